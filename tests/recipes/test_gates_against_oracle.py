"""DyLLM's gate in combinations against plain PyTorch: rows, tokens, salient rows and what heads keep, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dgraph.compiler.compiled_model import CompiledModel
from dgraph.runtime.stats import StepRecord
from tests.amounts import every_value
from tests.oracle import canvas, dyllm, focus, focus_two_modes
from tests.oracle.canvas import Moment
from tests.oracle.combined import Gate, GatedBlocks, GatedCanvas, GatedTwoModes
from tests.oracle.scoring import Eviction
from tests.oracle.sparse import Method
from tests.recipes import bidirectional, block_causal, block_dyllm, test_focus_two_modes
from tests.recipes.test_canvas_against_oracle import RULES, new_tokens, steps_of
from tests.recipes.test_sparse_against_oracle import kept

SERVE = Method("block", "block", 0.5, pool=3, delay=1)
SHARED = Method("block", "shared", 0.5, pool=3, delay=1)
VOTES = Method("response", "mask_voting", pairs=(6,), heads="mass", floor=0.1)
EVICTION = Eviction(full_steps=1)
# The tiny models turn their contexts further than a trained one, so thresholds are lower than the paper's.
TAU = 0.8


def dual(
    delay: int = 0, every: int = 0, block_cache: focus.BlockCache = "off", front: bool = True
) -> Callable[[int], canvas.Method]:
    """The block, and the whole canvas in its first steps. front: as in `canvas.fast_dllm`."""

    def of(prompt: int) -> canvas.Method:
        rows = canvas.fast_dllm(every=every, block_cache=block_cache, front=front)
        return lambda moment: None if moment.step <= delay else rows(moment)

    return of


def response(full: int, period: int) -> Callable[[int], canvas.Method]:
    """The response, and the prompt with it now and then."""

    def of(prompt: int) -> canvas.Method:
        def rows(moment: Moment) -> set[int] | None:
            since = moment.number - full
            if since < 0 or (period > 0 and since % period == 0):
                return None
            return moment.clamp(prompt - moment.shift, moment.end)

        return rows

    return of


# Recipe, its options, and the same in the oracle's words: the gate, the rows, the keys, the eviction.
CANVAS: dict[str, tuple[str, dict[str, Any], dyllm.Method, Any, Method | None, Eviction | None]] = {
    "dyllm+focus": ("dyllm+focus", {}, dyllm.Method(TAU, 1), dual(block_cache="dc+"), None, EVICTION),
    "dyllm+focus, gate of networks alone": (
        "dyllm+focus",
        {"partial": False, "block_cache": "off"},
        dyllm.Method(TAU, 1, partial=False),
        dual(),
        None,
        EVICTION,
    ),
    "dyllm+fast_dllm": ("dyllm+fast_dllm", {"every": 3}, dyllm.Method(TAU, 1), dual(every=3, front=False), None, None),
    "dyllm+dllm_serve": ("dllm_serve+dyllm", {"delay": 1}, dyllm.Method(TAU, 1), dual(1), SERVE, None),
    "dyllm+sparse_dllm": ("sparse_dllm+dyllm", {"full_steps": 2}, dyllm.Method(TAU, 2), dual(1), SHARED, None),
    "maskkv+dyllm": ("maskkv+dyllm", {"pairs": 6}, dyllm.Method(TAU, 4), response(4, 4), VOTES, None),
    "dllm_serve+dyllm+focus": (
        "dllm_serve+dyllm+focus",
        {"delay": 1},
        dyllm.Method(TAU, 1),
        dual(1, block_cache="dc+"),
        SERVE,
        EVICTION,
    ),
    "maskkv+dyllm+focus": (
        "maskkv+dyllm+focus",
        {"pairs": 6},
        dyllm.Method(TAU, 1),
        dual(block_cache="dc+"),
        VOTES,
        EVICTION,
    ),
}


class Compared:
    """Comparison of a run with the oracle, one sequence after the other.

    Attributes:
        result: of the run, with the keys and values that it keeps.
        salient: salient rows by layer of each step, over the sequences so far.
        skipped: rows that gates have left.
    """

    def __init__(self, run: CompiledModel, result: Any, layers: int, near: float):
        self.run, self.result, self.layers, self.near = run, result, layers, near
        self.salient: dict[int, list[int]] = {}
        self.skipped = 0

    def add(self, i: int, trace: canvas.Trace | focus.Trace, steps: list[dict[str, Any]], gate: Gate) -> None:
        """Compare sequence i: tokens, the rows of each step, and what each head keeps at the end."""
        assert self.result.token_ids[i] == trace.tokens
        assert [s["positions"] for s in steps] == [s.positions for s in trace.steps]
        assert [s["kept"] for s in steps] == [s.kept for s in trace.steps]
        assert [s["committed"] for s in steps] == [s.committed for s in trace.steps]
        for number, counts in enumerate(gate.salient):
            before = self.salient.get(number, [0] * len(counts))
            self.salient[number] = [a + b for a, b in zip(before, counts, strict=True)]
            self.skipped += len(counts) * len(trace.steps[number].positions) - sum(counts)
        for layer in range(self.layers if gate.keys is not None else 0):
            for (k, v), head in zip(kept(self.run, i, layer, self.result.kv[i]), gate.kept[layer], strict=True):
                torch.testing.assert_close(k, head.k, rtol=self.near, atol=self.near)
                torch.testing.assert_close(v, head.v, rtol=self.near, atol=self.near)

    def end(self) -> None:
        """Compare the salient rows of all sequences together."""
        assert self.result.stats.salient == [self.salient[number] for number in range(len(self.salient))]
        assert self.skipped > 50, "the gate skipped next to nothing"


def check_canvas(family: str, case: str, run: CompiledModel, rule: str, near: float = 1e-4) -> None:
    """Every step of a ragged batch, and what its heads keep at the end."""
    setup, block = bidirectional.setup_of(family), 16
    _, _, method, rows_of, keys, eviction = CANVAS[case]
    prompts, records = bidirectional.prompts_for(block), list[StepRecord]()
    new = new_tokens(block)
    result = run.generate(
        input_ids=prompts, max_new_tokens=new, keep_kv=True, observer=records.append, **RULES[rule][0]
    )
    assert result.kv is not None
    compared = Compared(run, result, bidirectional.LAYERS, near)
    for i, prompt in enumerate(prompts):
        gate = Gate(method, keys, eviction=eviction, whole_canvas=True, last_masked=keys is None)
        gated = GatedCanvas(gate, rows_of(len(prompt)), len(prompt))
        first = family == "dream" and "maskkv" not in case and "focus" not in case
        words: dict[str, Any] = {"forward": gated.forward, "eviction": eviction, "first": first, **RULES[rule][1]}
        trace = setup.traced(canvas.generate, prompt, gated.rows, block, new, **words)
        compared.add(i, trace, steps_of(records, i, setup.shift), gate)
    compared.end()


@every_value(("case", CANVAS), ("family, rule", [("llada", "threshold"), ("dream", "threshold"), ("llada", "steps")]))
def test_on_a_canvas(family: str, case: str, rule: str) -> None:
    name, options, *_ = CANVAS[case]
    run = bidirectional.setup_of(family).optimized(name, 16, tau=TAU, **options)
    check_canvas(family, case, run, rule)


BLOCKS: dict[str, tuple[str, dict[str, Any], dyllm.Method, Method | None, dict[str, Any]]] = {
    "dyllm+focus": ("dyllm+focus", {}, dyllm.Method(TAU, 1), None, {}),
    "dyllm+focus, two full steps": (
        "dyllm+focus",
        {"full_steps": 2, "block_cache": "dc"},
        dyllm.Method(TAU, 2),
        None,
        {"block_cache": "dc", "full_steps": 2},
    ),
    "dyllm+focus, every third step full": (
        "dyllm+focus",
        {"every": 3, "recommit": False},
        dyllm.Method(TAU, 1, every=3),
        None,
        {"recommit": False},
    ),
    "dllm_serve+dyllm": ("dllm_serve+dyllm", {}, dyllm.Method(TAU, 1), SERVE, {"evict": False, "block_cache": "off"}),
    "maskkv+dyllm": (
        "maskkv+dyllm",
        {"pairs": 6},
        dyllm.Method(TAU, 1),
        VOTES,
        {"evict": False, "block_cache": "off"},
    ),
    "dllm_serve+dyllm+focus": ("dllm_serve+dyllm+focus", {}, dyllm.Method(TAU, 1), SERVE, {}),
    "maskkv+dyllm+focus": ("maskkv+dyllm+focus", {"pairs": 6}, dyllm.Method(TAU, 1), VOTES, {}),
}
FAMILIES = [("sdar", "threshold"), ("sdar_moe", "threshold"), ("llada2", "threshold"), ("sdar", "steps")]
BY_RULE: dict[str, dict[str, Any]] = {"threshold": {"threshold": 0.7}, "steps": {"steps": 5}}


@every_value(("case", BLOCKS), ("family, rule", FAMILIES))
def test_in_blocks(family: str, case: str, rule: str) -> None:
    name, options, method, keys, words = BLOCKS[case]
    setup, parts = block_dyllm.setup_of(family), block_dyllm.oracle_of(family, method)
    run = block_causal.optimized(setup, name, tau=TAU, **options)
    prompts, records = block_causal.prompts_for(block_dyllm.BLOCK), list[StepRecord]()
    new = block_dyllm.NEW
    result = run.generate(input_ids=prompts, max_new_tokens=new, keep_kv=True, observer=records.append, **BY_RULE[rule])
    assert result.kv is not None
    compared = Compared(run, result, block_dyllm.LAYERS, 1e-4)
    for i, prompt in enumerate(prompts):
        eviction = EVICTION if words.get("evict", True) else None
        gate = Gate(method, keys, parts.feed_forward, parts.turn, eviction)
        blocks = GatedBlocks(gate, len(prompt), block_dyllm.BLOCK)
        trace = focus.generate(
            setup.weights, setup.config, prompt, max_new_tokens=new, block_length=block_dyllm.BLOCK,
            mask_id=setup.model.spec.mask_id, eos_ids=(block_dyllm.EOS,), forward=blocks, **words, **BY_RULE[rule],
        )  # fmt: skip
        compared.add(i, trace, block_causal.steps_of(records, i), gate)
    compared.end()


@every_value(("form", test_focus_two_modes.FORMS), ("tau", [TAU, 2.0]))
def test_in_blocks_that_are_encoded(form: str, tau: float) -> None:
    """Above 1, a block's first step that denoises evicts nothing, and all others are those of FOCUS."""
    setup, block = test_focus_two_modes.setup_of(form), test_focus_two_modes.BLOCK
    spec, new = setup.model.spec, block_causal.new_tokens(block)
    run = block_causal.optimized(setup, "dyllm+focus", tau=tau)
    prompts, records = block_causal.prompts_for(block), list[StepRecord]()
    result = run.generate(input_ids=prompts, max_new_tokens=new, threshold=0.6, observer=records.append)
    salient, skipped = dict[int, list[int]](), 0
    for i, prompt in enumerate(prompts):
        gate = Gate(dyllm.Method(tau, 1), eviction=Eviction(average_over="sequence"))
        trace = focus_two_modes.generate(
            setup.weights, setup.config, prompt, max_new_tokens=new, block=block, mask_id=spec.mask_id,
            eos_ids=spec.eos_ids, threshold=0.6, shift=spec.logit_shift, causal=spec.encoding == "causal",
            eviction=Eviction(average_over="sequence"), forward=GatedTwoModes(gate),
        )  # fmt: skip
        assert result.token_ids[i] == trace.tokens
        mine = [record for record in records if (record.sequence == i).any()]
        assert [r.positions[r.sequence == i].tolist() for r in mine] == [s.positions for s in trace.steps]
        assert [r.positions[(r.sequence == i) & r.kept].tolist() for r in mine] == [s.kept for s in trace.steps]
        for number, counts in enumerate(gate.salient[-len(trace.steps) :]):  # a prompt is encoded before them
            before = salient.get(number, [0] * len(counts))
            salient[number] = [a + b for a, b in zip(before, counts, strict=True)]
        skipped += sum(
            len(s.positions) - n[0] for s, n in zip(trace.steps, gate.salient[-len(trace.steps) :], strict=True)
        )
    assert result.stats.salient == [salient[number] for number in range(len(salient))]
    assert (skipped > 20) == (tau < 1)

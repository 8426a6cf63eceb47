"""MaskKV, dLLM-Serve and Sparse-dLLM on block-causal models against plain PyTorch: rows, tokens, and what is kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dgraph.compiler.compiled_model import CompiledModel
from dgraph.runtime.loop.batch import Batch
from dgraph.runtime.stats import StepRecord
from tests.amounts import every_value
from tests.oracle import dyllm, focus
from tests.oracle.sparse import Method
from tests.oracle.sparse_blocks import SparseBlocks
from tests.recipes.block_causal import optimized, steps_of
from tests.recipes.block_dyllm import BLOCK, EOS, LAYERS, NEW, oracle_of, setup_of
from tests.recipes.test_sparse_against_oracle import kept

RULES: dict[str, dict[str, Any]] = {"threshold": {"threshold": 0.7}, "steps": {"steps": 5}}

# Recipe, its options, and the same in the oracle's words.
CASES: dict[str, tuple[str, dict[str, Any], Method]] = {
    "maskkv": ("maskkv", {"pairs": 6}, Method("response", "mask_voting", pairs=(6,), heads="mass", floor=0.1)),
    "maskkv, uniform heads": (
        "maskkv",
        {"ratio": 0.3, "heads": "uniform"},
        Method("response", "mask_voting", 0.3, floor=0.1),
    ),
    **{
        selector: (
            "maskkv",
            {"selector": selector, "pairs": 5},
            Method("response", selector, pairs=(5,), heads="mass", floor=0.1),
        )
        for selector in ("front_voting", "middle_voting", "back_voting")
    },
    "maskkv, nothing": ("maskkv", {"pairs": 0}, Method("response", "mask_voting", pairs=(0,), heads="mass")),
    "dllm_serve": ("dllm_serve", {}, Method("block", "block", 0.5, pool=3, delay=1)),
    "dllm_serve, no delay, no pooling": (
        "dllm_serve",
        {"delay": 0, "pool": 1, "ratio": 0.3},
        Method("block", "block", 0.3),
    ),
    "dllm_serve, pairs, every 3": (
        "dllm_serve",
        {"pairs": 5, "every": 3},
        Method("block", "block", pairs=(5,), pool=3, delay=1, interval=3),
    ),
    "sparse_dllm": ("sparse_dllm", {}, Method("block", "shared", 0.5, pool=3, delay=1)),
    "sparse_dllm, few, late": (
        "sparse_dllm",
        {"ratio": 0.1, "pool": 5, "delay": 2},
        Method("block", "shared", 0.1, pool=5, delay=2),
    ),
}


def prompts() -> list[list[int]]:
    """Shorter than a block, several blocks and a remainder, exactly two blocks, one token."""
    draw = torch.Generator().manual_seed(BLOCK)
    return [torch.randint(6, 90, (n,), generator=draw).tolist() for n in (9, 3 * BLOCK + 3, 2 * BLOCK, 1)]


def trace_of(family: str, prompt: list[int], method: Method, rule: dict[str, Any]) -> tuple[focus.Trace, SparseBlocks]:
    setup, parts = setup_of(family), oracle_of(family, dyllm.Method())
    blocks = SparseBlocks(method, len(prompt), BLOCK, parts.feed_forward, parts.turn)
    trace = focus.generate(
        setup.weights, setup.config, prompt, max_new_tokens=NEW, block_length=BLOCK, mask_id=setup.model.spec.mask_id,
        eos_ids=(EOS,), evict=False, block_cache="off", forward=blocks, **rule,
    )  # fmt: skip
    return trace, blocks


def check(family: str, run: CompiledModel, method: Method, rule: dict[str, Any], near: float = 1e-4) -> None:
    """Every step of a ragged batch, what its heads keep at the end, and the keys and values in the cache."""
    records: list[StepRecord] = []
    result = run.generate(input_ids=prompts(), max_new_tokens=NEW, keep_kv=True, observer=records.append, **rule)
    assert result.kv is not None
    reused = 0
    for i, prompt in enumerate(prompts()):
        trace, blocks = trace_of(family, prompt, method, rule)
        assert result.token_ids[i] == trace.tokens
        steps = steps_of(records, i)
        assert (
            [s["positions"] for s in steps]
            == [s.positions for s in trace.steps]
            == [p.positions for p in blocks.passes]
        )
        assert [s["committed"] for s in steps] == [s.committed for s in trace.steps]
        first = blocks.first if method.window == "response" else 0
        assert (result.kv[i].first, result.kv[i].committed) == (first, trace.committed_end)
        for layer in range(LAYERS):
            heads = kept(run, i, layer, result.kv[i])
            assert len(heads) == len(blocks.kept[layer])
            for (k, v), head in zip(heads, blocks.kept[layer], strict=True):
                torch.testing.assert_close(k, head.k, rtol=near, atol=near)
                torch.testing.assert_close(v, head.v, rtol=near, atol=near)
            for got, want in zip(result.kv[i].layers[layer], trace.kv(layer), strict=True):
                final = trace.committed_end - first
                torch.testing.assert_close(got[:final], want[first:], rtol=near, atol=near)
        reused += sum(p.phase == "reuse" for p in blocks.passes)
    assert reused > 3 * len(prompts())


@every_value(("case", CASES), ("family, rule", [("sdar", "threshold"), ("sdar", "steps"), ("sdar_moe", "threshold")]))
def test_tokens_rows_and_what_is_kept(family: str, case: str, rule: str) -> None:
    name, options, method = CASES[case]
    check(family, optimized(setup_of(family), name, **options), method, RULES[rule])


@pytest.mark.parametrize("case", ["maskkv", "dllm_serve"])
def test_queries_that_are_rotated_in_part(case: str) -> None:
    name, options, method = CASES[case]
    check("llada2", optimized(setup_of("llada2"), name, **options), method, RULES["threshold"])


@pytest.mark.parametrize("buckets", ["hybrid", [40, 100, 400]])
@pytest.mark.parametrize("case", ["maskkv", "dllm_serve, pairs, every 3"])
def test_padded_rows(case: str, buckets: Any) -> None:
    name, options, method = CASES[case]
    check("sdar", optimized(setup_of("sdar"), name, buckets=buckets, **options), method, RULES["threshold"])


def test_key_rows_are_those_of_sequences_that_see_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step reads keys in vain for no others; and where it is a CUDA graph, of one number each, there are few."""
    found: list[tuple[int, int]] = []
    bound = Batch._bound

    def noted(batch: Batch, whole: Any) -> Any:
        made = bound(batch, whole)
        if "key_positions" in made.inputs:
            seen = int(made.inputs["cu_keys"][-1])
            assert seen <= len(made.inputs["key_positions"]) <= seen + len(whole) * (BLOCK + NEW)
            found.append((len(whole), seen))
        return made

    monkeypatch.setattr(Batch, "_bound", noted)
    run = optimized(setup_of("sdar"), "dllm_serve")
    run.generate(input_ids=prompts(), max_new_tokens=NEW, threshold=0.7)
    assert {count for count, _ in found} > {len(prompts())}  # all of them at first, and later some

    batch = SimpleNamespace(_sized=True, shape=SimpleNamespace(block=BLOCK))
    batch.running = {slot: SimpleNamespace(request=SimpleNamespace(end=n)) for slot, n in enumerate((1, 16384, 70000))}
    sizes = [Batch._key_rows(batch, slots) for slots in ([0], [1], [0, 1], [2], [0, 1, 2])]  # type: ignore[arg-type]
    assert sizes == [16384, 65536, 65536, 262144, 262144]


def test_the_cases_differ() -> None:
    """By what each step's heads keep."""
    found = set()
    for _, _, method in CASES.values():
        passes = [trace_of("sdar", prompt, method, RULES["steps"])[1].passes for prompt in prompts()]
        found.add(str([[(p.phase, p.kept) for p in each] for each in passes]))
    assert len(found) == len(CASES)

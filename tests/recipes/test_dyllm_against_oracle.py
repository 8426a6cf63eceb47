"""DyLLM against plain PyTorch: rows, salient rows, tokens and caches, step by step; and how the recipe is built."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import dgraph
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.errors import InputError
from dgraph.ir.graph import Graph
from dgraph.passes import GateFFN, PartialAttention
from dgraph.plans.regions import Response
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Counted
from dgraph.recipes import RECIPES, Recipe, build
from tests.amounts import every_value
from tests.oracle import canvas, dyllm
from tests.oracle.dyllm import Memory, Method, Step
from tests.passes.sparse_step import memory_of, run, step_of
from tests.recipes.bidirectional import FAMILIES, LAYERS, MASK, Setup, prompts_for, setup_of
from tests.recipes.test_canvas_against_oracle import PADDED, PAIRS, RULES, new_tokens, steps_of
from tests.tiny import read_cache, tiny_spec

# Options of the recipe, and the same in the oracle's words. The tiny models turn their contexts further than a trained
# one, so the thresholds that leave some rows out are lower than the paper's.
CASES: dict[str, tuple[dict[str, Any], Method]] = {
    "defaults": ({}, Method()),
    "tau 0.8": ({"tau": 0.8}, Method(0.8)),
    "tau by layer": ({"tau": (0.9, 0.5, 0.8)}, Method((0.9, 0.5, 0.8))),
    "gate only": ({"tau": 0.8, "partial": False}, Method(0.8, partial=False)),
    "partial only": ({"tau": 0.8, "gate": False}, Method(0.8, gate=False)),
    "one full step, every second wide": (
        {"tau": 0.7, "full_steps": 1, "response_only_period": 2},
        Method(0.7, full_steps=1, period=2),
    ),
    "never wide": ({"tau": 0.7, "full_steps": 2, "response_only_period": 0}, Method(0.7, full_steps=2, period=0)),
    "every third full": ({"tau": 0.7, "full_steps": 2, "every": 3}, Method(0.7, full_steps=2, every=3)),
    "nothing salient": ({"tau": -1.01, "full_steps": 2}, Method(-1.01, full_steps=2)),
}
PUBLISHED = {"llada": 0.99, "dream": 0.995}
"""The paper's thresholds (section 4.2.3), which are the defaults."""


def case_of(name: str, family: str) -> tuple[dict[str, Any], Method]:
    """Options of a case, and the method that they are on models of a family."""
    options, method = CASES[name]
    return options, method if options else replace(method, tau=PUBLISHED[family])


@pytest.fixture(scope="module")
def setups() -> dict[str, Setup]:
    return {family: setup_of(family) for family in FAMILIES}


def trace_of(setup: Setup, prompt: list[int], block: int, method: Method, rule: str, watch: Any = None) -> dyllm.Trace:
    return setup.traced(dyllm.generate, prompt, method, block, new_tokens(block), watch=watch, **RULES[rule][1])


@functools.lru_cache(maxsize=256)
def traces_of(setup: Setup, block: int, method: Method, rule: str) -> list[dyllm.Trace]:
    """What the oracle does with each prompt; shared by tests that run the same in other ways."""
    return [trace_of(setup, prompt, block, method, rule) for prompt in prompts_for(block)]


def check(
    setup: Setup, block: int, run: CompiledModel, rule: str, method: Method, near: float = 1e-4
) -> list[dyllm.Trace]:
    """Every step of a generation of a ragged batch, and its keys and values at the end, are the oracle's."""
    prompts, records = prompts_for(block), []
    result = run.generate(
        input_ids=prompts, max_new_tokens=new_tokens(block), keep_kv=True, observer=records.append, **RULES[rule][0]
    )
    wanted = traces_of(setup, block, method, rule)
    assert result.kv is not None
    for i, trace in enumerate(wanted):
        assert result.token_ids[i] == trace.tokens
        steps = steps_of(records, i, setup.shift)
        assert [s["positions"] for s in steps] == [s.positions for s in trace.steps]
        assert [s["committed"] for s in steps] == [s.committed for s in trace.steps]
        for layer in range(LAYERS):
            for got, want in zip(result.kv[i].layers[layer], (trace.memory.k, trace.memory.v), strict=True):
                torch.testing.assert_close(got, want[layer], rtol=near, atol=near)
    return wanted


def step_graph(setup: Setup, **options: Any) -> Graph:
    """The step's graph with logits."""
    recipe = build(RECIPES, "dyllm", setup.model.spec, options).keeping_logits()
    return dgraph.rewrite(setup.graph, recipe)["step"].graph


# -- the recipe against the oracle -------------------------------------------------------------------------------


@every_value(("family, rule", PAIRS), ("case", CASES))
def test_tokens_rows_and_caches(setups: dict[str, Setup], family: str, case: str, rule: str) -> None:
    options, method = case_of(case, family)
    check(setups[family], 16, setups[family].optimized("dyllm", 16, **options), rule, method)


@every_value(("family", FAMILIES), ("case", CASES))
def test_salient_rows_and_every_cache(setups: dict[str, Setup], family: str, case: str) -> None:
    """Each step of the oracle, replayed on the graph: logits, salient rows of each layer, and what all caches hold."""
    options, method = case_of(case, family)
    setup, prompt = setups[family], prompts_for(16)[1]
    graph, end = step_graph(setup, **options), len(prompt) + new_tokens(16)
    memory, salient, skipped = memory_of(graph.spec, (end,)), 0, 0

    def replay(step: Step, mine: Memory) -> None:
        nonlocal salient, skipped
        first = step.positions[0]
        assert step.positions == list(range(first, end))
        ((out, rows),) = run(graph, [step_of([step.tokens], [first], (end,), [step.changed], [step.full], 2)], memory)
        logits = out["logits"][: len(step.positions)].clone()
        logits[:, MASK] = -torch.inf
        torch.testing.assert_close(logits, step.logits, rtol=1e-3, atol=1e-3)

        def places(flags: list[torch.Tensor]) -> list[list[int]]:
            return [(f[: len(step.positions)].nonzero()[:, 0] + first).tolist() for f in flags]

        assert places(rows.salient) == [layer.salient for layer in step.layers]
        assert out["salient"].tolist() == [len(layer.salient) for layer in step.layers]
        if method.partial:
            assert places(rows.projected) == [layer.projected for layer in step.layers]
        if not step.full:
            found = sum(len(layer.salient) for layer in step.layers)
            salient, skipped = salient + found, skipped + LAYERS * len(step.positions) - found
        for kind, values in (("k", mine.k), ("v", mine.v), ("c", mine.c), *([("f", mine.f)] if method.gate else [])):
            for layer in range(LAYERS):
                got = read_cache(memory, f"{kind}_cache_{layer}", 0, end)
                torch.testing.assert_close(got, values[layer], rtol=1e-3, atol=1e-3)

    trace = trace_of(setup, prompt, 16, method, "threshold", replay)
    assert len(trace.steps) > method.full_steps + 2
    assert skipped > 0
    assert (salient > 0) == (method.tau != -1.01)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cases_differ(setups: dict[str, Setup], family: str) -> None:
    traces = [traces_of(setups[family], 16, method, "threshold")[1] for _, method in CASES.values()]
    assert len({float(t.memory.c[LAYERS - 1].double().nan_to_num().sum()) for t in traces}) == len(CASES)


@pytest.mark.parametrize(("family", "rule"), PAIRS)
def test_its_lossless_limit_is_the_dense_model(setups: dict[str, Setup], family: str, rule: str) -> None:
    """tau above 1 and all rows in every step."""
    setup, prompts = setups[family], prompts_for(16)
    run = setup.optimized("dyllm", 16, tau=1.01, full_steps=1, response_only_period=1)
    settings = {"max_new_tokens": new_tokens(16), **RULES[rule][0]}
    dense = setup.optimized("dense", 16).generate(input_ids=prompts, **settings)
    assert run.generate(input_ids=prompts, **settings).token_ids == dense.token_ids
    traces = traces_of(setup, 16, Method(1.01, full_steps=1, period=1), rule)
    for prompt, tokens, mine in zip(prompts, dense.token_ids, traces, strict=True):
        theirs = setup.traced(canvas.generate, prompt, canvas.vanilla, 16, new_tokens(16), **RULES[rule][1])
        assert mine.tokens == theirs.tokens == tokens


# -- how it is run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "buckets"), PADDED)
def test_padded_rows(setups: dict[str, Setup], family: str, buckets: Any) -> None:
    options, method = CASES["tau 0.8"]
    run = setups[family].optimized("dyllm", 16, buckets=buckets, **options)
    assert run.programs["step"].stage_names == ("step",)
    check(setups[family], 16, run, "threshold", method)


@pytest.mark.parametrize(("family", "block"), [("llada", 8), ("dream", 32)])
def test_other_blocks(setups: dict[str, Setup], family: str, block: int) -> None:
    options, method = CASES["tau 0.8"]
    check(setups[family], block, setups[family].optimized("dyllm", block, **options), "steps", method)


@pytest.mark.parametrize(("family", "buckets"), [("llada", None), ("dream", "hybrid")])
def test_compiled_by_inductor(setups: dict[str, Setup], family: str, buckets: Any) -> None:
    options, method = CASES["tau 0.8"]
    check(
        setups[family], 16, setups[family].optimized("dyllm", 16, "inductor", buckets, **options), "threshold", method
    )


@pytest.mark.parametrize(("family", "rule"), PAIRS)
def test_a_batch_gives_what_each_prompt_gives_alone(setups: dict[str, Setup], family: str, rule: str) -> None:
    run = setups[family].optimized("dyllm", 16, tau=0.8)
    settings = {"max_new_tokens": new_tokens(16), **RULES[rule][0]}
    together = run.generate(input_ids=prompts_for(16), **settings)
    alone = [run.generate(input_ids=[p], **settings) for p in prompts_for(16)]
    assert together.token_ids == [r.token_ids[0] for r in alone]
    assert together.stats.sequence_steps == [r.stats.sequence_steps[0] for r in alone]
    assert together.token_ids == run.generate(input_ids=prompts_for(16), max_batch=2, **settings).token_ids


# -- as a value --------------------------------------------------------------------------------------------------

SPEC = tiny_spec(layers=4, attention="bidirectional")


def recipe(**options: Any) -> Recipe:
    return build(RECIPES, "dyllm", SPEC, options)


def test_its_passes_and_rows() -> None:
    assert [p.name for p in recipe().phase("step").passes] == [
        "PackRows", "FuseProjections", "CacheKV", "ChunkLMHead", "GateFFN", "PartialAttention", "FuseGLU", "BoundRows",
    ]  # fmt: skip
    alone = [[p.name for p in recipe(**{name: False}).phase("step").passes][4:] for name in ("gate", "partial")]
    assert alone == [["PartialAttention", "FuseGLU", "BoundRows"], ["GateFFN", "FuseGLU", "BoundRows"]]
    exact = [p.name for p in recipe(update=False).phase("step").passes][3:]
    assert exact == ["ChunkLMHead", "OnlyMasked", "GateFFN", "PartialAttention", "FuseGLU", "BoundRows"]
    assert [p.name for p in recipe().phases] == ["step"]
    assert recipe().plan == RowPlan(Response(), Counted(full_steps=0, warm_up=4, widen=4))
    assert recipe(every=3).plan == RowPlan(Response(), Counted(full_steps=0, every=3, warm_up=4, widen=4))
    assert recipe(full_steps=2, response_only_period=0).plan == RowPlan(Response(), Counted(full_steps=0, warm_up=2))


@pytest.mark.parametrize(("family", "tau"), [*PUBLISHED.items(), ("sdar", 0.99)])
def test_the_threshold_is_that_of_the_family(family: str, tau: float) -> None:
    made = build(RECIPES, "dyllm", replace(SPEC, family=family), {})
    gated = [p for p in made.phase("step").passes if isinstance(p, GateFFN | PartialAttention)]
    assert [p.tau for p in gated] == [tau, tau]
    assert made == build(RECIPES, "dyllm", replace(SPEC, family=family), {"tau": tau})


def test_it_reads_back_from_json() -> None:
    for built in (recipe(), recipe(tau=(0.9, 0.95, 1.0, 1.5)), recipe(gate=False)):
        assert Recipe.from_json(built.to_json()) == built


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tau": "high"}, "tau must be a number, or one for each layer"),
        ({"full_steps": 0}, "full_steps must be an integer of at least 1, got 0"),
        ({"full_steps": 1.5}, "full_steps must be an integer of at least 1, got 1.5"),
        ({"response_only_period": -1}, "response_only_period must be an integer of at least 0, got -1"),
        ({"every": -1}, "every must be an integer of at least 0, got -1"),
        ({"block_cache": "dc+"}, r"block_cache='dc\+' skips rows of the current block; on hand, which is bidirect"),
        ({"gate": 1}, "gate must be True or False, got 1"),
        ({"gate": False, "partial": False}, "which leaves the dense model; use 'dense' instead"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        recipe(**options)


def test_as_many_taus_as_layers(setups: dict[str, Setup]) -> None:
    with pytest.raises(InputError, match="tau has 2 values, but the model 3 layers"):
        step_graph(setups["llada"], tau=(0.9, 0.8))


@pytest.mark.filterwarnings("ignore:block_length=8, but:dgraph.errors.DgraphWarning")
def test_statistics_count_salient_rows_by_step_and_layer(setups: dict[str, Setup]) -> None:
    run = dgraph.optimize(setups["llada"].model, "dyllm", backend="eager", full_steps=2, tau=0.99)
    stats = run.generate(input_ids=[list(range(5, 20))], max_new_tokens=16, block_length=8, steps=8).stats
    assert len(stats.salient) == stats.steps
    assert all(len(layers) == LAYERS for layers in stats.salient)
    assert stats.salient[0] == stats.salient[1] == [31] * LAYERS, "full steps: prompt and response"
    assert 0 < sum(map(sum, stats.salient[2:])) < 31 * LAYERS * (stats.steps - 2)
    dense = dgraph.optimize(setups["llada"].model, "dense", backend="eager")
    assert dense.generate(input_ids=[[5, 6]], max_new_tokens=8, steps=4).stats.salient == []

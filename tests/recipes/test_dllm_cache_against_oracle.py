"""dLLM-Cache against plain PyTorch: rows, tokens and caches, step by step; and how the recipe is built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import dgraph
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.errors import InputError
from dgraph.ops import OPS
from dgraph.plans.regions import Response
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Apart
from dgraph.recipes import RECIPES, Recipe, build
from dgraph.runtime.stats import StepRecord
from tests.amounts import every_value
from tests.oracle import canvas, dllm_cache
from tests.oracle.dllm_cache import Memory, Method, Step
from tests.passes.sparse_step import memory_of
from tests.recipes.bidirectional import FAMILIES, LAYERS, MASK, Setup, prompts_for, setup_of
from tests.recipes.test_canvas_against_oracle import PADDED, PAIRS, RULES, steps_of
from tests.tiny import interpret, read_cache, rows_of, tiny_spec

# Options of the recipe, and the same in the oracle's words.
CASES: dict[str, tuple[dict[str, Any], Method]] = {
    "defaults": ({}, Method()),
    "all four kinds of steps": (
        {"prompt_interval": 4, "response_interval": 3, "rho": 0.4},
        Method(4, 3, 0.4),
    ),
    "prompt more often than response": ({"prompt_interval": 2, "response_interval": 5}, Method(2, 5)),
    "pure reuse": ({"prompt_interval": 6, "response_interval": 4, "rho": 0}, Method(6, 4, 0.0)),
    "nothing reused of the response": ({"prompt_interval": 5, "rho": 1}, Method(5, 7, 1.0)),
}


@pytest.fixture(scope="module")
def setups() -> dict[str, Setup]:
    return {family: setup_of(family) for family in FAMILIES}


def new_tokens(block: int) -> int:
    """Two blocks and a part of one, which take more steps than the default intervals."""
    return 2 * block + block // 2 + 1


def trace_of(
    setup: Setup, prompt: list[int], block: int, method: Method, rule: str, watch: Any = None
) -> dllm_cache.Trace:
    return setup.traced(dllm_cache.generate, prompt, method, block, new_tokens(block), watch=watch, **RULES[rule][1])


def check(setup: Setup, block: int, run: CompiledModel, rule: str, method: Method, near: float = 1e-4) -> None:
    """Every step of a generation of a ragged batch, and its keys and values at the end, are the oracle's."""
    records: list[StepRecord] = []
    prompts = prompts_for(block)
    result = run.generate(
        input_ids=prompts, max_new_tokens=new_tokens(block), keep_kv=True, observer=records.append, **RULES[rule][0]
    )
    assert result.kv is not None
    for i, prompt in enumerate(prompts):
        trace = trace_of(setup, prompt, block, method, rule)
        assert result.token_ids[i] == trace.tokens
        steps = steps_of(records, i, setup.shift)
        assert [s["positions"] for s in steps] == [s.positions for s in trace.steps]
        assert [s["committed"] for s in steps] == [s.committed for s in trace.steps]
        for layer in range(LAYERS):
            for got, want in zip(result.kv[i].layers[layer], (trace.memory.k, trace.memory.v), strict=True):
                torch.testing.assert_close(got, want[layer], rtol=near, atol=near)


# -- the recipe against the oracle -------------------------------------------------------------------------------


@every_value(("family, rule", PAIRS), ("case", CASES))
def test_tokens_rows_and_caches(setups: dict[str, Setup], family: str, case: str, rule: str) -> None:
    options, method = CASES[case]
    check(setups[family], 16, setups[family].optimized("dllm_cache", 16, **options), rule, method)


@every_value(("family", FAMILIES), ("case", CASES))
def test_rows_of_each_layer_and_every_cache(setups: dict[str, Setup], family: str, case: str) -> None:
    """Each step of the oracle, replayed on the graph: logits, the rows of each layer, and what all caches hold."""
    options, method = CASES[case]
    setup, prompt = setups[family], prompts_for(16)[1]
    recipe = build(RECIPES, "dllm_cache", setup.model.spec, options).keeping_logits()
    graph, end = dgraph.rewrite(setup.graph, recipe)["step"].graph, len(prompt) + new_tokens(16)
    memory = memory_of(graph.spec, (end,))
    for layer in range(1, LAYERS):
        memory[f"a_cache_{layer}"] = torch.full_like(memory[f"f_cache_{layer}"], torch.nan)
    seen = set()

    def replay(step: Step, mine: Memory) -> None:
        n, first, flags = len(step.positions), step.positions[0], []

        def least_similar(*args: Any) -> torch.Tensor:
            flags.append(OPS["least_similar"].reference(*args))
            return flags[-1]

        inputs = rows_of([step.tokens], [first])
        inputs["full"] = torch.tensor(step.full)
        for name, value in inputs.items():  # two rows of padding
            if name not in ("cu_rows", "average", "reached"):
                inputs[name] = torch.cat([value, value.new_full((2,), 1)])
        out = interpret(graph, {**inputs, **memory}, {"least_similar": least_similar})
        logits = out["logits"][:n].clone()
        logits[:, MASK] = -torch.inf
        torch.testing.assert_close(logits, step.logits, rtol=1e-3, atol=1e-3)
        assert [(f.nonzero()[:, 0] + first).tolist() for f in flags] == step.computed[1:]
        assert out["salient"].tolist() == [len(rows) for rows in step.computed[1:]]
        seen.add((step.full[0], step.full[-1], n == end))
        for layer in range(LAYERS):
            kinds = [("k", mine.k), ("v", mine.v)] + ([("a", mine.a), ("f", mine.f)] if layer else [])
            for kind, values in kinds:
                got = read_cache(memory, f"{kind}_cache_{layer}", 0, end)
                torch.testing.assert_close(got, values[layer], rtol=1e-3, atol=1e-3)

    trace = trace_of(setup, prompt, 16, method, "threshold", replay)
    assert len(trace.steps) > method.response_interval
    if case == "all four kinds of steps":
        assert seen == {(True, True, True), (True, True, False), (True, False, True), (False, False, False)}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cases_differ(setups: dict[str, Setup], family: str) -> None:
    traces = [trace_of(setups[family], prompts_for(16)[1], 16, method, "threshold") for _, method in CASES.values()]
    assert len({float(t.memory.a[LAYERS - 1].double().sum()) for t in traces}) == len(CASES)


@pytest.mark.parametrize("options", [{"rho": 1}, {"response_interval": 1}], ids=str)
@pytest.mark.parametrize(("family", "rule"), PAIRS)
def test_its_lossless_limit_is_the_dense_model(
    setups: dict[str, Setup], family: str, rule: str, options: dict[str, Any]
) -> None:
    """The prompt in every step, and all of the response's rows."""
    setup, prompts = setups[family], prompts_for(16)
    run = setup.optimized("dllm_cache", 16, prompt_interval=1, **options)
    settings = {"max_new_tokens": new_tokens(16), **RULES[rule][0]}
    dense = setup.optimized("dense", 16).generate(input_ids=prompts, **settings)
    assert run.generate(input_ids=prompts, **settings).token_ids == dense.token_ids
    if options == {"rho": 1}:
        for prompt, tokens in zip(prompts, dense.token_ids, strict=True):
            theirs = setup.traced(canvas.generate, prompt, canvas.vanilla, 16, new_tokens(16), **RULES[rule][1])
            assert trace_of(setup, prompt, 16, Method(1, 7, 1.0), rule).tokens == theirs.tokens == tokens


# -- how it is run -----------------------------------------------------------------------------------------------

FOUR = "all four kinds of steps"


@pytest.mark.parametrize(("family", "buckets"), PADDED)
def test_padded_rows(setups: dict[str, Setup], family: str, buckets: Any) -> None:
    options, method = CASES[FOUR]
    run = setups[family].optimized("dllm_cache", 16, buckets=buckets, **options)
    assert run.programs["step"].stage_names == ("step",)
    check(setups[family], 16, run, "threshold", method)


@pytest.mark.parametrize(("family", "block"), [("llada", 8), ("dream", 32)])
def test_other_blocks(setups: dict[str, Setup], family: str, block: int) -> None:
    options, method = CASES[FOUR]
    check(setups[family], block, setups[family].optimized("dllm_cache", block, **options), "steps", method)


@pytest.mark.parametrize(("family", "buckets"), [("llada", None), ("dream", "hybrid")])
def test_compiled_by_inductor(setups: dict[str, Setup], family: str, buckets: Any) -> None:
    options, method = CASES[FOUR]
    run = setups[family].optimized("dllm_cache", 16, "inductor", buckets, **options)
    check(setups[family], 16, run, "threshold", method)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_gives_what_each_prompt_gives_alone(setups: dict[str, Setup], family: str) -> None:
    run = setups[family].optimized("dllm_cache", 16, **CASES[FOUR][0])
    settings = {"max_new_tokens": new_tokens(16), **RULES["threshold"][0]}
    together = run.generate(input_ids=prompts_for(16), **settings)
    alone = [run.generate(input_ids=[p], **settings) for p in prompts_for(16)]
    assert together.token_ids == [r.token_ids[0] for r in alone]
    assert together.token_ids == run.generate(input_ids=prompts_for(16), max_batch=2, **settings).token_ids


def test_statistics_count_the_rows_of_each_layer_after_the_first(setups: dict[str, Setup]) -> None:
    options: dict[str, Any] = {"prompt_interval": 4, "response_interval": 3, "rho": 0.25}
    run = setups["llada"].optimized("dllm_cache", 8, **options)
    stats = run.generate(input_ids=[list(range(5, 20))], max_new_tokens=16, steps=8).stats
    prompt, response, some = 15, 16, 4
    wanted = [
        prompt + response if step % 12 == 0 else response if step % 3 == 0 else prompt * (step % 4 == 0) + some
        for step in range(stats.steps)
    ]
    assert stats.salient == [[rows] * (LAYERS - 1) for rows in wanted]


# -- as a value --------------------------------------------------------------------------------------------------

SPEC = tiny_spec(layers=4, attention="bidirectional")


def recipe(**options: Any) -> Recipe:
    return build(RECIPES, "dllm_cache", SPEC, options)


def test_its_passes_and_rows() -> None:
    assert [p.name for p in recipe().phase("step").passes] == [
        "PackRows", "FuseProjections", "CacheKV", "ReuseRows", "ChunkLMHead", "FuseGLU",
    ]  # fmt: skip
    assert [p.name for p in recipe().phases] == ["step"]
    assert recipe().plan == RowPlan(Response(), Apart(50, 7))


def test_it_reads_back_from_json() -> None:
    for built in (recipe(), recipe(rho=0, prompt_interval=100, response_interval=1)):
        assert Recipe.from_json(built.to_json()) == built


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_interval": 0}, "prompt_interval must be an integer of at least 1, got 0"),
        ({"response_interval": 2.0}, "response_interval must be an integer of at least 1, got 2.0"),
        ({"response_interval": True}, "response_interval must be an integer of at least 1, got True"),
        ({"rho": 1.5}, r"rho must be a number from 0 \(reuse all rows\) to 1 \(recompute all\), got 1.5"),
        ({"rho": float("nan")}, "rho must be a number from 0"),
        ({"rho": "a quarter"}, "rho must be a number from 0"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        recipe(**options)


def test_a_block_causal_model_is_refused() -> None:
    with pytest.raises(InputError, match=r"hand is block_causal: the keys of all rows but.*Use 'dense' or 'focus'"):
        build(RECIPES, "dllm_cache", replace(SPEC, attention="block_causal"), {})

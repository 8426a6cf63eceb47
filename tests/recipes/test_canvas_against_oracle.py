"""Recipes of bidirectional models against plain PyTorch: same rows, same tokens, same caches, step by step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import dgraph
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.regions import RegionCompiler
from dgraph.recipes import Ablation
from dgraph.runtime.graphs.pool import GraphPool
from dgraph.runtime.loop.session import BlockSession
from dgraph.runtime.policies import policy_of
from dgraph.runtime.results import Generation
from dgraph.runtime.sampling.random_numbers import policy_order, row_seeds, sequence_keys, uniform
from dgraph.runtime.stats import StepRecord
from tests.amounts import every_pair, every_value
from tests.kv import kv_pairs
from tests.oracle import canvas as oracle
from tests.oracle import dream, llada
from tests.oracle.qwen3 import Cache
from tests.oracle.scoring import Eviction
from tests.recipes.ablations import focus_options
from tests.recipes.bidirectional import FAMILIES, LAYERS, MASK, VOCAB, Setup, prompts_for, setup_of
from tests.runtime.recorder import Recorder

# How tokens are committed: settings of `generate`, and the oracle's words for them.
RULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "threshold": ({"threshold": 0.6}, {"threshold": 0.6}),
    "high threshold": ({"threshold": 0.95}, {"threshold": 0.95}),
    "steps": ({"steps": 5}, {"steps": 5}),
    "dream": ({"policy": "dream_entropy", "steps": 5, "top_k": 0}, {"dream_steps": 5}),
}

# Families and rules under which each case of a recipe is run: two kinds of rules for each family.
PAIRS = [("llada", "threshold"), ("llada", "dream"), ("dream", "threshold"), ("dream", "steps")]

# Families, and the buckets that each of them is padded to.
PADDED: list[tuple[str, Any]] = [("llada", "hybrid"), ("dream", [40, 100, 400])]

# The same for rules that know before a step what it commits; the order of the first is that of `drawn_order`.
FORESEEING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one each": ({"policy": "dkv_greedy", "steps": 16}, {"steps": 16, "schedule": "masks"}),
    "three or four each": ({"policy": "dkv_greedy", "steps": 5}, {"steps": 5, "schedule": "masks"}),
    "from the left": ({"policy": "sequential", "steps": 6}, {"steps": 6, "order": lambda position: -position}),
}

# dKV-Cache (greedy): options, and the oracle's words for them.
GREEDY: dict[str, tuple[dict[str, Any], oracle.Method]] = {
    "defaults": ({}, oracle.dkv_greedy(2, 4)),
    "every 4": ({"every": 4}, oracle.dkv_greedy(4, 4)),
    "never": ({"every": 0, "around": 3}, oracle.dkv_greedy(0, 3)),
    "nothing around": ({"every": 0, "around": 0}, oracle.dkv_greedy(0, 0)),
    "all around": ({"every": 0, "around": 999}, oracle.dkv_greedy(0, 999)),
}

POLICY = {"first": "policy"}

# Recipe, its options, and the same in the oracle's words.
CASES: dict[str, tuple[str, dict[str, Any], oracle.Method]] = {
    "dense": ("dense", {}, oracle.vanilla),
    "dense dc": ("dense", {"block_cache": "dc"}, oracle.dense("dc")),
    "dense dc+": ("dense", {"block_cache": "dc+"}, oracle.dense("dc+")),
    "prefix": ("fast_dllm", {"cache": "prefix", **POLICY}, oracle.fast_dllm("prefix")),
    "dual": ("fast_dllm", POLICY, oracle.fast_dllm("dual")),
    "dual every 3": ("fast_dllm", {"every": 3, **POLICY}, oracle.fast_dllm("dual", 3)),
    "dual dc": ("fast_dllm", {"block_cache": "dc", **POLICY}, oracle.fast_dllm("dual", 0, "dc")),
    "dual dc+": ("fast_dllm", {"block_cache": "dc+", **POLICY}, oracle.fast_dllm("dual", 0, "dc+")),
    "prefix dc+ every 4": (
        "fast_dllm",
        {"cache": "prefix", "block_cache": "dc+", "every": 4, **POLICY},
        oracle.fast_dllm("prefix", 4, "dc+"),
    ),
    "dkv": ("dkv_cache", {}, oracle.dkv_cache(8)),
    "dkv every 3": ("dkv_cache", {"every": 3}, oracle.dkv_cache(3)),
    "dkv every 0": ("dkv_cache", {"every": 0}, oracle.dkv_cache(0)),
    "vicinity": ("vicinity", {}, oracle.vicinity(16, 16, 4)),
    "vicinity 2, 3": (
        "vicinity",
        {"before": 2, "after": 3, "warm_up": 0, "every": 5},
        oracle.vicinity(2, 3, 0, 5),
    ),
}

# FOCUS: its options, and those of the eviction alone.
FOCUS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "alpha 1.2": {"alpha": 1.2},
    "block cache off": {"block_cache": "off"},
    "block cache dc": {"block_cache": "dc"},
    "importance": {"signal": "importance", "alpha": 1.8},
    "after layer 2": {"after": 2},
    "random": {"select": "random"},
    "average over the sequence": {"average_over": "sequence"},
    "among the block": {"among": "block"},
}


@pytest.fixture(scope="module")
def setups() -> dict[str, Setup]:
    return {family: setup_of(family) for family in FAMILIES}


def new_tokens(block: int) -> int:
    """A block and a part of one; of small ones two and a part."""
    return (2 if block < 16 else 1) * block + block // 2 + 1


def steps_of(records: list[StepRecord], prompt: int, shift: int) -> list[dict[str, Any]]:
    """What the program did with one prompt, in the oracle's terms."""
    found = []
    for record in records:
        mine = record.sequence == prompt
        if not mine.any():
            continue
        at = record.prompts.tolist().index(prompt)
        positions = record.positions[mine]
        chosen = record.committed[mine]
        found.append(
            {
                "positions": positions.tolist(),
                "limit": set(record.limit[mine].tolist()),
                "masked": positions[record.candidate[mine]].tolist(),
                "kept": positions[record.kept[mine]].tolist(),
                "committed": list(
                    zip((positions[chosen] + shift).tolist(), record.token[mine][chosen].tolist(), strict=True)
                ),
                "average": float(record.average[at]),
                "sequence_average": float(record.sequence_average[at]),
                "reached": int(record.states_after["reached"][at]) if record.states else None,
                "score": None if record.score is None else record.score[mine] * record.candidate[mine],
            }
        )
    return found


def traces(
    setup: Setup,
    prompts: Sequence[Sequence[int]],
    block: int,
    method: oracle.Method,
    eviction: Callable[[int], Eviction | None],
    **rule: Any,
) -> list[oracle.Trace]:
    ordered = "schedule" in rule
    return [
        trace_of(
            setup,
            tuple(prompt),
            block,
            method,
            eviction=eviction(i),
            **(rule | {"order": drawn_order(i)} if ordered else rule),
        )
        for i, prompt in enumerate(prompts)
    ]


@functools.lru_cache(maxsize=512)
def trace_of(setup: Setup, prompt: tuple[int, ...], block: int, method: oracle.Method, **rule: Any) -> oracle.Trace:
    """What the oracle does with one prompt; shared by tests that run the same in other ways."""
    return setup.traced(oracle.generate, prompt, method, block, new_tokens(block), **rule)


def nothing_evicted(prompt: int) -> None:
    return None


@functools.cache
def drawn_order(prompt: int) -> Callable[[int], float]:
    """The order of a prompt's positions at seed 0."""
    order = policy_order(sequence_keys(0, torch.tensor([prompt])), torch.arange(200)[None])[0].tolist()
    return lambda position: order[position]


def check(
    setup: Setup,
    block: int,
    run: CompiledModel,
    rule: str,
    method: oracle.Method,
    eviction: Callable[[int], Eviction | None] = nothing_evicted,
    near: float = 1e-4,
    **words: Any,
) -> list[oracle.Trace]:
    """Every step of a generation, and to within `near` its caches at the end, are the oracle's, which is returned."""
    prompts, records = prompts_for(block), []
    mine, theirs = (RULES | FORESEEING)[rule]
    result = run.generate(
        input_ids=prompts, max_new_tokens=new_tokens(block), keep_kv=True, observer=records.append, **mine
    )
    wanted = traces(setup, prompts, block, method, eviction, **theirs, **words)
    assert result.kv is not None
    for i, trace in enumerate(wanted):
        which = eviction(i)
        whole = which is not None and which.average_over == "sequence"
        assert result.token_ids[i] == trace.tokens
        steps = steps_of(records, i, setup.shift)
        assert len(steps) == len(trace.steps) == result.stats.sequence_steps[i]
        for got, want in zip(steps, trace.steps, strict=True):
            assert got["positions"] == want.positions
            assert got["limit"] == {trace.end}
            assert got["masked"] == want.masked
            assert got["kept"] == want.kept
            assert got["committed"] == want.committed
            if got["score"] is not None:
                average = got["sequence_average" if whole else "average"]
                assert average == (math.inf if want.full else pytest.approx(want.average, rel=1e-6))
                assert got["reached"] == want.reached
            if want.score:
                torch.testing.assert_close(got["score"], torch.tensor(want.score), rtol=1e-3, atol=1e-3)
        assert result.kv[i].committed == 0
        for layer in range(LAYERS):
            for got_kv, want_kv in zip(result.kv[i].layers[layer], trace.kv(layer), strict=True):
                torch.testing.assert_close(got_kv, want_kv, rtol=near, atol=near)
    return wanted


@functools.cache
def evicting(**options: Any) -> Callable[[int], Eviction]:
    """Per prompt the eviction that a FOCUS recipe with these options has."""
    options = {k: v for k, v in options.items() if k != "block_cache"}

    @functools.cache
    def of(prompt: int) -> Eviction:
        if options.get("select") != "random":
            return Eviction(**options)
        key = sequence_keys(0, torch.tensor([prompt]))

        def noise(step: int, positions: list[int]) -> torch.Tensor:
            where, when = torch.as_tensor(positions), torch.full((len(positions),), step)
            return uniform(row_seeds(key.expand(2, len(positions)), where, when))

        return Eviction(**options, noise=noise)

    return of


def check_focus(setup: Setup, block: int, run: CompiledModel, rule: str, options: dict[str, Any]) -> None:
    method = oracle.fast_dllm("dual", 0, options.get("block_cache", "dc+"))
    found = check(setup, block, run, rule, method, evicting(**options))
    steps = [step for trace in found for step in trace.steps]
    assert all(step.kept == step.positions for step in steps if step.full)
    assert sum(len(step.kept) < len(step.positions) for step in steps) > 3, "nothing was evicted"


# -- the oracle itself --------------------------------------------------------------------------------------------


def test_the_oracles_rows_are_the_whole_models(setups: dict[str, Setup]) -> None:
    """Against the forwards that were written for each family, over a whole sequence."""
    tokens = [7, 8, 9, MASK, 11, MASK]
    for family, setup in setups.items():
        c = setup.config
        rows = oracle.forward(setup.weights, c, tokens, range(6), 6, Cache(c, 6, torch.zeros(1)))
        if family == "llada":
            shape = llada.Config(c.layers, c.hidden, c.heads, c.intermediate, VOCAB, c.rope_theta, c.eps)
            whole = llada.forward(oracle.llada_names(setup.weights, c.layers), shape, tokens)
        else:
            other = dream.Config(c.layers, c.hidden, c.heads, c.kv_heads, c.intermediate, VOCAB, c.rope_theta, c.eps)
            whole = dream.forward(setup.weights, other, tokens)
        torch.testing.assert_close(rows, whole, rtol=1e-4, atol=1e-4)


def test_the_cases_differ(setups: dict[str, Setup]) -> None:
    """Each method forwards other rows than all the others do, and leaves other keys."""
    for setup in setups.values():
        rows, keys = set(), set()
        for _, _, method in CASES.values():
            found = traces(setup, prompts_for(16)[1:2], 16, method, nothing_evicted, steps=16)
            rows.add(str([step.positions for trace in found for step in trace.steps]))
            keys.add(sum(float(trace.kv(LAYERS - 1)[0].double().sum()) for trace in found))
        assert len(rows) == len(keys) == len(CASES)


# -- recipes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["threshold", "steps", "dream"])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_fast_dllm_on_dream_is_the_published_one(setups: dict[str, Setup], cache: str, rule: str) -> None:
    """A block's first step commits its first position, whatever its confidence, and the row before it rests then."""
    setup, block = setups["dream"], 8
    run = setup.optimized("fast_dllm", block, cache=cache)
    found = check(setup, block, run, rule, oracle.fast_dllm(cache, front=False), first=True)
    opening = [step for trace in found for step in trace.steps if step.full]
    assert all(len(step.committed) == 1 for step in opening)
    assert len(opening) > 3
    other = check(
        setup, block, setup.optimized("fast_dllm", block, cache=cache, **POLICY), rule, oracle.fast_dllm(cache)
    )
    assert [trace.tokens for trace in other] != [trace.tokens for trace in found]


def test_fast_dllm_on_llada_may_open_blocks_in_the_same_way(setups: dict[str, Setup]) -> None:
    run = setups["llada"].optimized("fast_dllm", 8, first="position")
    check(setups["llada"], 8, run, "threshold", oracle.fast_dllm(), first=True)


@every_value(("family, rule", PAIRS), ("case", CASES))
def test_recipes(setups: dict[str, Setup], family: str, case: str, rule: str) -> None:
    recipe, options, method = CASES[case]
    check(setups[family], 16, setups[family].optimized(recipe, 16, **options), rule, method)


@every_pair(("family", FAMILIES), ("case", ["dense", "prefix", "dual dc+", "dkv", "vicinity 2, 3"]), ("block", [8, 32]))
def test_other_blocks(setups: dict[str, Setup], family: str, case: str, block: int) -> None:
    recipe, options, method = CASES[case]
    check(setups[family], block, setups[family].optimized(recipe, block, **options), "threshold", method)


@every_value(("family", FAMILIES), ("case", FOCUS))
def test_focus(setups: dict[str, Setup], family: str, case: str) -> None:
    run = setups[family].optimized("focus", 16, **focus_options(FOCUS[case]))
    check_focus(setups[family], 16, run, "high threshold", FOCUS[case])


@every_pair(("family", FAMILIES), ("block", [8, 32]), ("rule", ["steps", "dream"]))
def test_focus_by_other_rules(setups: dict[str, Setup], family: str, block: int, rule: str) -> None:
    check_focus(setups[family], block, setups[family].optimized("focus", block), rule, {})


@pytest.mark.parametrize("family", FAMILIES)
def test_focus_with_rows_counted_on_the_device(setups: dict[str, Setup], family: str) -> None:
    run = setups[family].optimized("focus", 16, buckets=[48, 200], count="device")
    assert run.programs["step"].stage_names == ("step",)
    check_focus(setups[family], 16, run, "high threshold", {})


@pytest.mark.parametrize("family", FAMILIES)
def test_focus_with_a_fixed_number_of_rows(setups: dict[str, Setup], family: str) -> None:
    """A full step evicts nothing, whatever the budget: what it leaves out has no keys that others could see."""
    run = setups[family].optimized("focus", 16, ablation=Ablation(keep=4))
    check_focus(setups[family], 16, run, "high threshold", {"keep": 4})


@every_pair(("family", FAMILIES), ("case", GREEDY), ("rule", FORESEEING))
def test_dkv_greedy(setups: dict[str, Setup], family: str, case: str, rule: str) -> None:
    options, method = GREEDY[case]
    found = check(
        setups[family], 16, setups[family].optimized("dkv_cache", 16, variant="greedy", **options), rule, method
    )
    sparse = [step for trace in found for step in trace.steps if not step.full]
    assert sparse
    if case == "no window":
        assert max(len(step.positions) for step in sparse) <= 4 + 4


@pytest.mark.parametrize("block", [8, 32])
@pytest.mark.parametrize("family", FAMILIES)
def test_dkv_greedy_in_other_blocks_and_padded(setups: dict[str, Setup], family: str, block: int) -> None:
    run = setups[family].optimized("dkv_cache", block, buckets=[40, 100, 400], variant="greedy")
    check(setups[family], block, run, "three or four each", oracle.dkv_greedy(2, 4))


def test_greedy_cases_differ(setups: dict[str, Setup]) -> None:
    for setup in setups.values():
        rows = set()
        for _, method in GREEDY.values():
            for _, rule in FORESEEING.values():
                found = traces(setup, prompts_for(16), 16, method, nothing_evicted, **rule)
                rows.add(str([step.positions for trace in found for step in trace.steps]))
        assert len(rows) == len(GREEDY) * len(FORESEEING)


# -- how it is run ------------------------------------------------------------------------------------------------


@every_value(("family, buckets", PADDED), ("case", ["dense", "prefix", "dual dc+", "dkv", "vicinity"]))
def test_padded_rows(setups: dict[str, Setup], family: str, case: str, buckets: Any) -> None:
    recipe, options, method = CASES[case]
    run = setups[family].optimized(recipe, 16, buckets=buckets, **options)
    check(setups[family], 16, run, "threshold", method)
    assert sum(run.programs["step"].bucket_sizes(100)) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_of_focus(setups: dict[str, Setup], family: str) -> None:
    check_focus(setups[family], 16, setups[family].optimized("focus", 16, buckets="hybrid"), "high threshold", {})


@pytest.mark.release
@pytest.mark.parametrize(("family", "buckets"), [("llada", None), ("dream", "hybrid")])
def test_compiled_by_inductor(setups: dict[str, Setup], family: str, buckets: Any) -> None:
    setup = setups[family]
    recipe, options, method = CASES["dual dc+"]
    check(setup, 16, setup.optimized(recipe, 16, "inductor", buckets, **options), "threshold", method)
    check_focus(setup, 16, setup.optimized("focus", 16, "inductor", buckets), "high threshold", {})


@every_value(
    ("family", FAMILIES),
    (
        "case, rule",
        [
            ("dual dc+", "threshold"),
            ("dkv every 3", "dream"),
            ("vicinity", "threshold"),
            ("focus", "high threshold"),
            ("focus", "dream"),
        ],
    ),
)
def test_a_batch_gives_what_each_prompt_gives_alone(
    setups: dict[str, Setup], family: str, case: str, rule: str
) -> None:
    recipe, options, _ = CASES.get(case, (case, {}, None))
    run = setups[family].optimized(recipe, 16, **options)
    settings = {"max_new_tokens": new_tokens(16), **RULES[rule][0]}
    together = run.generate(input_ids=prompts_for(16), **settings)
    alone = [run.generate(input_ids=[p], **settings) for p in prompts_for(16)]
    assert together.token_ids == [r.token_ids[0] for r in alone]
    assert together.stats.sequence_steps == [r.stats.sequence_steps[0] for r in alone]
    assert together.stats.kept_rows == sum(r.stats.kept_rows for r in alone)
    assert together.token_ids == run.generate(input_ids=prompts_for(16), max_batch=2, **settings).token_ids


@every_value(("family", FAMILIES), ("rule", FORESEEING))
def test_a_batch_of_greedy_gives_what_each_prompt_gives_alone(setups: dict[str, Setup], family: str, rule: str) -> None:
    """An order belongs to the prompt's index, so each prompt stands where it stood, beside others."""
    run = setups[family].optimized("dkv_cache", 16, variant="greedy", every=3)
    settings = {"max_new_tokens": new_tokens(16), **FORESEEING[rule][0]}
    prompts = prompts_for(16)
    together = run.generate(input_ids=prompts, **settings)
    for size in (1, 2):
        apart = run.generate(input_ids=prompts, max_batch=size, **settings)
        assert apart.token_ids == together.token_ids
        assert apart.stats.sequence_steps == together.stats.sequence_steps
        assert apart.stats.sequence_rows == together.stats.sequence_rows
    other = run.generate(input_ids=prompts, seed=1, **settings)
    assert (other.token_ids == together.token_ids) == (rule == "from the left")
    assert run.generate(input_ids=[[6, 7], *prompts[1:]], **settings).token_ids[1:] == together.token_ids[1:]


@every_value(
    ("family", FAMILIES), ("case", ["dense", "dense dc", "dual dc+", "dkv every 3", "greedy", "vicinity", "focus"])
)
def test_a_captured_transition_gives_what_plain_steps_give(setups: dict[str, Setup], family: str, case: str) -> None:
    setup = setups[family]
    name, options, *_ = {"greedy": ("dkv_cache", {"variant": "greedy"}), **CASES}.get(case, (case, {}))
    model, recipe = setup.model, dgraph.recipe(name, setup.model.spec, **options)
    phases = dgraph.rewrite(setup.graph, recipe)

    def session(pool: GraphPool | None) -> BlockSession:
        runner = {} if pool is None else {"runner": pool.runner}
        programs = {
            phase: LoweredProgram(r.graph, RegionCompiler("eager"), Buckets.of("hybrid"), **runner)
            for phase, r in phases.items()
        }
        cache = recipe.block_cache
        return BlockSession(model.spec, programs, block_cache=cache, plan=recipe.plan, pool=pool, page_size=16)

    pool = GraphPool(recorder=Recorder)
    captured, plain = session(pool), session(None)
    batches = [prompts_for(16), [[9, 8, 7], list(range(20, 61)), [11]], prompts_for(16)]
    rules = [policy_of(0.6), policy_of("dream", 5)]
    if case == "greedy":
        rules = [policy_of("dkv_greedy", 6), policy_of("sequential", 5)]
    if case == "dense":
        rules.append(policy_of("hierarchical_remask", remask_threshold=0.7))

    def run(of: BlockSession, prompts: list[list[int]], policy: Any) -> Generation:
        seed = prompts[0][0]
        return of.generate(prompts, max_new_tokens=new_tokens(32) // 2, policy=policy, seed=seed, keep_kv=True)

    for policy in rules:
        wanted = [run(plain, prompts, policy) for prompts in batches[:2]]
        for prompts, want in zip(batches, (*wanted, wanted[0]), strict=True):
            got = run(captured, prompts, policy)
            assert got.token_ids == want.token_ids
            assert got.stats.sequence_steps == want.stats.sequence_steps
            assert got.stats.sequence_rows == want.stats.sequence_rows
            if case != "dense":  # whose rows are not counted before every step, but known to be at most so many
                assert (got.stats.rows, got.stats.steps) == (want.stats.rows, want.stats.steps)
            for mine, theirs in kv_pairs(got, want):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert [stage for stage, _ in pool.recorded].count("transition") == len(rules)
    assert not pool.refused


@pytest.mark.parametrize("case", ["dense", "dual dc+", "dkv", "vicinity"])
def test_a_stop_token_ends_a_sequence_before_its_block_is_done(setups: dict[str, Setup], case: str) -> None:
    """The first token that one sequence answers with, wherever another one has it."""
    recipe, options, method = CASES[case]
    for setup in setups.values():
        free = setup.optimized(recipe, 16, **options).generate(
            input_ids=prompts_for(16), max_new_tokens=new_tokens(16), threshold=0.6
        )
        stopping = setup.stopping_at(free.token_ids[1][0], free.token_ids[2][20])
        found = check(stopping, 16, stopping.optimized(recipe, 16, **options), "threshold", method)
        assert found[1].tokens == []
        assert len(found[1].steps) < free.stats.sequence_steps[1]
        assert all(len(trace.tokens) < new_tokens(16) for trace in found[1:])

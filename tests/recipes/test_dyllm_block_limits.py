"""DyLLM on block-causal models: where it is the dense model, how it is run, and how the recipe is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dgraph
from dgraph.errors import InputError
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.regions import RegionCompiler
from dgraph.lowering.stage import LoweredStage, Runner, run_in_order
from dgraph.plans.regions import Block
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Counted
from dgraph.recipes import RECIPES, Recipe, build
from dgraph.runtime.graphs.pool import GraphPool
from dgraph.runtime.loop.session import BlockSession
from dgraph.runtime.policies import ConfidenceThreshold
from dgraph.runtime.results import Generation
from dgraph.runtime.sampling.sampler import Sampler
from tests.amounts import every_value, first_cases
from tests.kv import kv_pairs
from tests.oracle import qwen3
from tests.oracle.dyllm import Method
from tests.recipes.block_causal import LAYERS, optimized, prompts_for
from tests.recipes.block_dyllm import BLOCK, CACHES, FAMILIES, NEW, oracle_of, setup_of
from tests.runtime.recorder import Recorder
from tests.tiny import tiny_spec

# -- limits ------------------------------------------------------------------------------------------------------


def run(family: str, recipe: str, rule: dict[str, Any], backend: str = "eager", **options: Any) -> Any:
    return optimized(setup_of(family), recipe, backend, **options).generate(
        input_ids=prompts_for(BLOCK), keep_kv=True, **{"max_new_tokens": NEW, **rule}
    )


def check_same(got: Any, want: Any, exactly: bool = False) -> None:
    """Tokens and steps; keys and values bit for bit, or to 1e-5 of the largest."""
    assert got.token_ids == want.token_ids
    assert got.stats.sequence_steps == want.stats.sequence_steps
    for values, wanted in kv_pairs(got, want):
        atol = 0 if exactly else 1e-5 * float(wanted.abs().max())
        torch.testing.assert_close(values, wanted, rtol=0, atol=atol)


EACH = [(family, *CACHES[i]) for i, family in ((0, "sdar"), *((5, family) for family in FAMILIES))]
EACH += [("sdar", *cache) for cache in CACHES[1:5]] + [(family, *CACHES[0]) for family in FAMILIES[1:]]
"""Each family with a block cache, and one without, by default."""


@first_cases(1 + len(FAMILIES), "family, block_cache, recommit", EACH)
def test_its_lossless_limit_is_the_dense_model(family: str, block_cache: str, recommit: bool) -> None:
    """tau above 1: bit for bit after the gates; a product over another number of rows sums in another order."""
    shared: dict[str, Any] = {"block_cache": block_cache, "recommit": recommit}
    rule = {"steps": BLOCK} if family == "sdar" else {"threshold": 0.7}
    dense = run(family, "dense", rule, **shared)
    check_same(run(family, "dyllm", rule, tau=1.01, **shared), dense)
    check_same(run(family, "dyllm", rule, tau=1.01, partial=False, **shared), dense, exactly=True)


@every_value(("family", FAMILIES), ("options", [{"full_steps": 1000}, {"every": 1}]))
def test_full_steps_are_the_dense_model(family: str, options: dict[str, Any]) -> None:
    found = run(family, "dyllm", {"threshold": 0.7}, tau=-1.01, **options)
    check_same(found, run(family, "dense", {"threshold": 0.7}))
    assert sum(layers[0] for layers in found.stats.salient) == found.stats.rows["step"]


@pytest.mark.release
def test_compiled_its_lossless_limit_is_the_dense_model() -> None:
    dense = run("sdar", "dense", {"threshold": 0.7}, "inductor")
    check_same(run("sdar", "dyllm", {"threshold": 0.7}, "inductor", tau=1.01), dense)


def test_a_token_that_is_replaced_has_changed() -> None:
    """A decoding rule that replaces tokens: keys of the first layer are those of the new one."""
    found = run("llada2", "dyllm", {"policy": "llada2.1"}, tau=1.01)
    check_same(found, run("llada2", "dense", {"policy": "llada2.1"}))


@pytest.mark.parametrize(
    ("family", "block_cache", "recommit"),
    [case for case in EACH if case[1] == "off" or case[2]] + [("llada2", "dc+", True)],
)
def test_keys_of_finished_blocks_are_exact(family: str, block_cache: str, recommit: bool) -> None:
    """Whatever the steps of a block skipped, its commit gives what a forward of the tokens gives."""
    setup, prompts = setup_of(family), prompts_for(BLOCK)
    found = run(
        family,
        "dyllm",
        {"steps": 4, "max_new_tokens": 40},
        tau=0.5,
        block_cache=block_cache,
        recommit=recommit,
    )
    checked = 0
    for prompt, tokens, kv in zip(prompts, found.token_ids, found.kv, strict=True):
        end, ids = kv.committed, [*prompt, *tokens]
        if end == 0 or len(ids) < end:
            continue
        memory = qwen3.Cache(setup.config, end, setup.weights["lm_head.weight"])
        limits = [(p // BLOCK + 1) * BLOCK for p in range(end)]
        with torch.no_grad():
            oracle_of(family, Method())(setup.weights, setup.config, ids[:end], range(end), limits, memory)
        for layer in range(LAYERS):
            for got, want in zip(kv.layers[layer], memory.read(layer, end), strict=True):
                torch.testing.assert_close(got[:end], want, rtol=1e-4, atol=1e-4)
        checked += end - len(prompt) // BLOCK * BLOCK
    assert checked >= 2 * BLOCK


# -- how it is run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [{"threshold": 0.6}, {"steps": 6}], ids=["threshold", "steps"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_gives_what_each_prompt_gives_alone(family: str, rule: dict[str, Any]) -> None:
    built, prompts = optimized(setup_of(family), "dyllm", tau=0.8, block_cache="dc+"), prompts_for(BLOCK)
    together = built.generate(input_ids=prompts, max_new_tokens=NEW, **rule)
    alone = [built.generate(input_ids=[p], max_new_tokens=NEW, **rule) for p in prompts]
    assert together.token_ids == [r.token_ids[0] for r in alone]
    assert together.stats.sequence_steps == [r.stats.sequence_steps[0] for r in alone]
    assert torch.tensor(together.stats.salient).sum() == sum(torch.tensor(r.stats.salient).sum() for r in alone)
    assert together.token_ids == built.generate(input_ids=prompts, max_new_tokens=NEW, max_batch=2, **rule).token_ids


def session_of(pool: GraphPool | None, block_cache: str = "off", stages: bool = True) -> BlockSession:
    setup = setup_of("sdar")
    recipe = build(RECIPES, "dyllm", setup.model.spec, {"tau": 0.8, "full_steps": 2, "block_cache": block_cache})
    runner: Callable[[LoweredStage], Runner] = pool.runner if pool is not None and stages else run_in_order
    programs = {
        name: LoweredProgram(phase.graph, RegionCompiler("eager"), Buckets.of("hybrid"), runner, name=name)
        for name, phase in dgraph.rewrite(setup.graph, recipe).items()
    }
    cache: Any = block_cache
    return BlockSession(setup.model.spec, programs, block_cache=cache, plan=recipe.plan, pool=pool)


@pytest.mark.parametrize("stages", [False, True], ids=["transition", "transition and stages"])
@pytest.mark.parametrize("block_cache", ["off", "dc+"])
def test_captured_it_gives_what_plain_steps_give(block_cache: str, stages: bool) -> None:
    def generate(session: BlockSession, prompts: list[list[int]]) -> Generation:
        return session.generate(prompts, max_new_tokens=NEW, policy=ConfidenceThreshold(0.7), keep_kv=True)

    pool, prompts = GraphPool(recorder=Recorder), prompts_for(BLOCK)
    plain, captured = session_of(None, block_cache), session_of(pool, block_cache, stages)
    wanted = [generate(plain, batch) for batch in (prompts, prompts[::-1])]
    for batch, want in zip((prompts, prompts[::-1], prompts), (*wanted, wanted[0]), strict=True):
        got = generate(captured, batch)  # the others find what the first left behind
        check_same(got, want, exactly=True)
        assert got.stats.salient == want.stats.salient, "a step that is run twice finds nothing new"
    assert "transition" in {name for name, _ in pool.recorded}
    assert not pool.refused


def test_a_warm_up_prepares_every_bucket() -> None:
    pool = GraphPool(recorder=Recorder)
    session = session_of(pool)
    assert session.warm_up(4, 80) == len(pool.recorded) > 2
    session.generate(prompts_for(BLOCK), max_new_tokens=NEW, policy=ConfidenceThreshold(0.7))
    assert [name for name, _ in pool.recorded].count("transition") == 1
    assert len(pool.recorded) == len(set(pool.recorded)), "a bucket was captured twice"


def test_guidance() -> None:
    """The second pass without the prompt keeps contexts of its own."""
    guided = {"sampler": Sampler(cfg_scale=0.5), "threshold": 0.7}
    check_same(run("sdar", "dyllm", guided, tau=1.01), run("sdar", "dense", guided))


# -- as a value --------------------------------------------------------------------------------------------------

SPEC = tiny_spec(layers=4)


def recipe_of(**options: Any) -> Recipe:
    return build(RECIPES, "dyllm", SPEC, options)


def test_its_phases_and_plan() -> None:
    built = recipe_of(block_cache="dc+", recommit=False)
    assert [p.name for p in built.phases] == ["prefill", "step"]
    assert "GateFFN" not in [p.name for p in built.phase("prefill").passes]
    after = ["ChunkLMHead", "GateFFN", "PartialAttention", "FuseGLU", "BoundRows"]
    assert [p.name for p in built.phase("step").passes][3:] == after
    assert (built.block_cache, built.recommit) == ("dc+", False)
    assert built.plan == RowPlan(Block(), Counted(full_steps=1))
    assert recipe_of(full_steps=2, every=4).plan == RowPlan(Block(), Counted(full_steps=2, every=4))
    assert "OnlyMasked" not in [p.name for p in recipe_of(update=False).phase("step").passes]
    assert Recipe.from_json(built.to_json()) == built


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"response_only_period": 4}, r"response_only_period=4 says how often a bidirectional.*hand is block-causal"),
        ({"response_only_period": 0}, r"response_only_period=0 .*Leave it out"),
        ({"full_steps": 0}, "full_steps must be an integer of at least 1, got 0"),
        ({"every": -1}, "every must be an integer of at least 0, got -1"),
        ({"block_cache": "on"}, "block_cache must be one of 'off', 'dc', 'dc\\+', got 'on'"),
        ({"recommit": 1}, "recommit must be True or False, got 1"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        recipe_of(**options)

"""Recipes of bidirectional models: their limits, in which they are each other bit for bit, and what they refuse."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from dgraph.compiler.compiled_model import Result
from dgraph.errors import InputError, UnknownName
from dgraph.passes import BoundRows, CacheKV, ChunkLMHead, FuseGLU, FuseProjections, OnlyMasked, PackRows
from dgraph.plans.regions import All, Block, Next, Suffix
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Counted
from dgraph.recipes import RECIPES, Recipe, build
from tests.amounts import every_value
from tests.kv import kv_pairs
from tests.recipes.bidirectional import FAMILIES, Setup, prompts_for, setup_of
from tests.tiny import tiny_spec

SPEC = tiny_spec(attention="bidirectional")
CACHED = ("fast_dllm", "dkv_cache", "vicinity")


def recipe(name: str, **options: Any) -> Recipe:
    return build(RECIPES, name, SPEC, options)


# -- limits -------------------------------------------------------------------------------------------------------

POLICY = {"first": "policy"}

# A recipe at the setting in which it is another one, and that one; the stage that has all rows of each.
LIMITS: dict[str, tuple[tuple[str, dict[str, Any]], tuple[str, dict[str, Any]]]] = {
    "every step full": (("fast_dllm", {"every": 1, **POLICY}), ("dense", {})),
    "every step full, prefix": (("fast_dllm", {"cache": "prefix", "every": 1, **POLICY}), ("dense", {})),
    "every step full, block cache": (("fast_dllm", {"every": 1, "block_cache": "dc+", **POLICY}), ("dense", {})),
    "dkv, every step full": (("dkv_cache", {"every": 1}), ("dense", {})),
    "dkv greedy, every step full": (("dkv_cache", {"variant": "greedy", "every": 1}), ("dense", {})),
    "vicinity of everything": (("vicinity", {"before": 256, "after": 256, "warm_up": 0}), ("dense", {})),
    "endless warm-up": (("vicinity", {"warm_up": 999}), ("dense", {})),
    "vicinity of nothing": (("vicinity", {"before": 0, "after": 0, "warm_up": 0}), ("fast_dllm", POLICY)),
    "alpha inf": (("focus", {"alpha": math.inf, "block_cache": "off"}), ("fast_dllm", POLICY)),
    "alpha inf, dc+": (("focus", {"alpha": math.inf}), ("fast_dllm", {"block_cache": "dc+", **POLICY})),
}


@pytest.fixture(scope="module")
def setups() -> dict[str, Setup]:
    return {family: setup_of(family) for family in FAMILIES}


def same_bits(got: Result, want: Result) -> None:
    assert got.token_ids == want.token_ids
    assert got.stats.sequence_steps == want.stats.sequence_steps
    assert got.stats.commit_rows == want.stats.commit_rows
    for stage in got.stats.rows.values():
        assert stage == want.stats.rows["step"]
    assert all(torch.equal(*pair) for pair in kv_pairs(got, want))


@every_value(("family", FAMILIES), ("limit", LIMITS))
def test_lossless_limits(setups: dict[str, Setup], family: str, limit: str) -> None:
    runs = [setups[family].optimized(name, 16, **options) for name, options in LIMITS[limit]]
    settings: dict[str, Any] = {"input_ids": prompts_for(16), "max_new_tokens": 40, "keep_kv": True}
    rule = {"policy": "dkv_greedy", "steps": 6} if "greedy" in limit else {"threshold": 0.8}
    same_bits(*(run.generate(**settings, **rule) for run in runs))


def test_a_window_of_all_masks_is_the_delayed_cache(setups: dict[str, Setup]) -> None:
    """Then the rows are those that are not decoded and those decoded in the step before."""
    runs = [
        setups["llada"].optimized("dkv_cache", 16, variant="greedy", every=0, around=999),
        setups["llada"].optimized("dense", 16, block_cache="dc"),
    ]
    settings: dict[str, Any] = {"input_ids": prompts_for(16), "max_new_tokens": 40, "keep_kv": True}
    same_bits(*(run.generate(**settings, policy="dkv_greedy", steps=6) for run in runs))


@pytest.mark.release
def test_a_lossless_limit_compiled(setups: dict[str, Setup]) -> None:
    settings: dict[str, Any] = {"input_ids": prompts_for(16), "max_new_tokens": 24, "steps": 6, "keep_kv": True}
    for limit in ("every step full", "alpha inf"):
        runs = [setups["dream"].optimized(name, 16, "inductor", **options) for name, options in LIMITS[limit]]
        same_bits(*(run.generate(**settings) for run in runs))


def test_fewer_rows_than_dense(setups: dict[str, Setup]) -> None:
    """At one token per step all of them take as many steps."""
    for setup in setups.values():
        rows = {
            name: setup.optimized(name, 16, **options).generate(input_ids=prompts_for(16), max_new_tokens=32, steps=16)
            for name, options in (("dense", {}), ("vicinity", {"before": 4, "after": 4}), ("fast_dllm", POLICY))
        }
        focus = setup.optimized("focus", 16).generate(input_ids=prompts_for(16), max_new_tokens=32, steps=16)
        counts = [r.stats.kept_rows for r in (*rows.values(), focus)]
        assert counts == sorted(counts, reverse=True)
        assert len(set(counts)) == 4


# -- recipes as values --------------------------------------------------------------------------------------------


def test_plans() -> None:
    assert recipe("dense").plan == RowPlan()
    assert recipe("focus").plan == RowPlan(Block())
    assert recipe("fast_dllm").plan == RowPlan(Block())
    shifted = tiny_spec(attention="bidirectional", logit_shift=1)
    as_published = RowPlan(Block(lead=False), first="position")
    assert build(RECIPES, "fast_dllm", shifted, {}).plan == as_published
    assert recipe("fast_dllm", cache="prefix", every=4).plan == RowPlan(Suffix(), Counted(every=4))
    assert recipe("dkv_cache", every=5).plan == RowPlan(All(), Counted(full_steps=2, every=5))
    assert recipe("dkv_cache").plan == RowPlan(All(), Counted(full_steps=2, every=8))
    assert recipe("dkv_cache", variant="greedy").plan == RowPlan(Next(around=4), Counted(every=2))
    assert recipe("dkv_cache", variant="greedy", every=5, around=0).plan == RowPlan(Next(), Counted(every=5))
    assert recipe("dkv_cache", variant="greedy").block_cache == "off"
    assert recipe("vicinity").plan == RowPlan(Block(before=16, after=16), Counted(warm_up=4))
    assert recipe("dkv_cache").block_cache == "dc"
    assert recipe("fast_dllm", block_cache="dc+").block_cache == "dc+"


def test_there_is_no_prefill() -> None:
    """The first step forwards the prompt with everything else."""
    for name in (*CACHED, "dense", "focus"):
        assert [phase.name for phase in recipe(name).phases] == ["step"]
    for name in CACHED:
        passes = recipe(name, max_num_logits=7).phase("step").passes
        cached = (PackRows(), FuseProjections(), CacheKV())
        assert passes == (*cached, ChunkLMHead(7), OnlyMasked(), FuseGLU(), BoundRows())


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("name", [*CACHED, "dense", "focus"])
def test_the_last_layer_is_for_masked_rows(family: str, name: str) -> None:
    graph = setup_of(family).optimized(name, 16).graph("step")
    (head,) = graph.find("lm_head")
    assert head.args[8] is True
    assert graph.row_set(head.args[0]) != graph.row_set(head)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*CACHED, "dense", "focus"])
def test_json_says_all_of_a_recipe(name: str) -> None:
    value = recipe(name)
    assert Recipe.from_json(json.loads(json.dumps(value.to_json(), allow_nan=False))) == value
    assert value.to_json()["plan"] == value.plan.to_json()  # type: ignore[union-attr]


@pytest.mark.parametrize("name", CACHED)
def test_block_causal_models_are_refused(name: str) -> None:
    message = rf"recipe '{name}' approximates the keys of a bidirectional model; those of hand are exact .*'dense' or"
    with pytest.raises(InputError, match=message):
        build(RECIPES, name, tiny_spec(), {})


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("fast_dllm", {"cache": "prefx"}, UnknownName, r"unknown cache of fast_dllm 'prefx'\. Did you mean 'prefix'"),
        ("fast_dllm", {"first": "positoin"}, UnknownName, r"unknown first commit .* Did you mean 'position'"),
        ("fast_dllm", {"every": -1}, InputError, r"every must be an integer of at least 0, got -1"),
        ("fast_dllm", {"block_cache": "on"}, InputError, r"block_cache must be one of"),
        ("dkv_cache", {"every": 2.0}, InputError, r"every must be an integer of at least 0, got 2\.0"),
        ("dkv_cache", {"variant": "gredy"}, UnknownName, r"variant of dkv_cache 'gredy'\. Did you mean 'greedy'"),
        ("dkv_cache", {"variant": "greedy", "around": -1}, InputError, r"around must be an integer of at least 0"),
        ("dkv_cache", {"around": 4}, InputError, r"around=4 belongs to the variant 'greedy' of dkv_cache"),
        ("focus", {"full_steps": 0}, InputError, r"full_steps=0 evicts rows in the first step of a block, but"),
        ("vicinity", {"before": -3}, InputError, r"before must be an integer of at least 0, got -3"),
        ("vicinity", {"warm_up": True}, InputError, r"warm_up must be an integer of at least 0, got True"),
        ("vicinity", {"bfore": 3}, UnknownName, r"unknown option of recipe 'vicinity' 'bfore'\. Did you mean 'before'"),
    ],
)
def test_options_out_of_range(name: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        recipe(name, **options)

"""Recipes that keep few keys: the limits in which they keep all, what they are as values, and what they refuse."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dgraph.cli import app
from dgraph.compiler.compiled_model import CompiledModel, Result
from dgraph.errors import DgraphWarning, InputError, UnknownName
from dgraph.passes import (
    CacheKV,
    ChunkLMHead,
    CountRows,
    EvictTokens,
    FuseGLU,
    FuseProjections,
    OnlyKV,
    PackRows,
    ReuseRows,
    SparseKV,
)
from dgraph.plans.kv import KVPlan
from dgraph.plans.regions import Block, Response
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Apart, Counted
from dgraph.recipes import (
    RECIPES,
    Ablation,
    DyLLM,
    Focus,
    KeyOptions,
    MaskKVKeys,
    Recipe,
    RecipeOptions,
    build,
    check_recipe,
    options_of,
)
from dgraph.recipes.compose import combine
from dgraph.recipes.dense import ending, phases_of
from dgraph.recipes.sparse import LAYERS, METHODS
from tests.recipes import block_dyllm
from tests.recipes.bidirectional import prompts_for, setup_of
from tests.recipes.block_causal import optimized
from tests.tiny import tiny_spec

BOTH, CAUSAL = tiny_spec(attention="bidirectional"), tiny_spec()
ALL = 999
SPARSE = [name for name, builder in RECIPES.items() if issubclass(builder.options, KeyOptions)]

# -- limits -------------------------------------------------------------------------------------------------------

Named = tuple[str, dict[str, Any]]
POLICY = {"first": "policy"}

# A recipe that keeps everything, and the one that it is then.
LIMITS: dict[str, tuple[Named, Named]] = {
    "dllm_serve": (("dllm_serve", {"ratio": 1.0, "delay": 0}), ("fast_dllm", POLICY)),
    "dllm_serve, every": (
        ("dllm_serve", {"ratio": 1.0, "delay": 0, "every": 3}),
        ("fast_dllm", {"every": 3, **POLICY}),
    ),
    "dllm_serve, always": (("dllm_serve", {"ratio": 0.1, "every": 1, **POLICY}), ("dense", {})),
    "maskkv, where intervals meet": (
        ("maskkv", {"pairs": ALL, "prompt_interval": 4, "response_interval": 2, "rho": 0.4}),
        ("dllm_cache", {"prompt_interval": 4, "response_interval": 2, "rho": 0.4}),
    ),
    "maskkv+focus": (
        ("maskkv+focus", {"pairs": ALL, "alpha": 1.2, "ablation": Ablation(after=2), "block_cache": "dc"}),
        ("focus", {"alpha": 1.2, "ablation": Ablation(after=2), "block_cache": "dc"}),
    ),
    "maskkv+fast_dllm": (("maskkv+fast_dllm", {"pairs": ALL, "selector": "all_voting"}), ("fast_dllm", {})),
    "maskkv+fast_dllm, prefix": (
        ("maskkv+fast_dllm", {"pairs": ALL, "cache": "prefix", "every": 4}),
        ("fast_dllm", {"cache": "prefix", "every": 4}),
    ),
    "dllm_serve+focus": (("dllm_serve+focus", {"ratio": 1.0, "delay": 0}), ("focus", {})),
    "dllm_serve+focus, nothing evicted": (
        ("dllm_serve+focus", {"alpha": math.inf, "ratio": 1.0, "delay": 0, "block_cache": "off"}),
        ("fast_dllm", POLICY),
    ),
}

# The same for block-causal models.
ON_BLOCKS: dict[str, tuple[Named, Named]] = {
    "maskkv": (("maskkv", {"pairs": ALL}), ("dense", {})),
    "dllm_serve": (("dllm_serve", {"ratio": 1.0}), ("dense", {})),
    "sparse_dllm": (
        ("sparse_dllm", {"pairs": ALL, "every": 2, "block_cache": "dc+"}),
        ("dense", {"block_cache": "dc+"}),
    ),
    "maskkv+focus": (("maskkv+focus", {"pairs": ALL}), ("focus", {})),
    "maskkv+focus, no recommit": (("maskkv+focus", {"ratio": 1.0, "recommit": False}), ("focus", {"recommit": False})),
    "dllm_serve+focus": (("dllm_serve+focus", {"ratio": 1.0, "delay": 0}), ("focus", {})),
}


def run_on(family: str) -> Callable[..., CompiledModel]:
    """Makes the recipe of a name and options, for blocks of 16."""
    if family in block_dyllm.FAMILIES:
        return lambda name, **options: optimized(block_dyllm.setup_of(family), name, **options)
    return lambda name, **options: setup_of(family).optimized(name, 16, **options)


def same(got: Result, want: Result, keys_too: bool = True) -> None:
    """Same tokens and steps, and the same keys wherever both keep them."""
    assert got.token_ids == want.token_ids
    assert got.stats.sequence_steps == want.stats.sequence_steps
    assert got.stats.sequence_rows == want.stats.sequence_rows
    assert got.kv is not None
    assert want.kv is not None
    for mine, theirs in zip(got.kv, want.kv, strict=True):
        end = mine.committed - mine.first if mine.committed else None
        for got_layer, want_layer in zip(mine.layers, theirs.layers, strict=True):
            for got_kv, want_kv in zip(got_layer, want_layer, strict=True):
                torch.testing.assert_close(got_kv[:end], want_kv[mine.first :][:end], rtol=1e-3, atol=1e-3)


def long_prompts() -> list[list[int]]:
    """Ragged, and one of a single token."""
    return [*prompts_for(16), [17]]


@pytest.mark.parametrize(("family", "limit"), [(("llada", "dream")[i % 2], name) for i, name in enumerate(LIMITS)])
def test_lossless_limits(family: str, limit: str) -> None:
    runs = [run_on(family)(name, **options) for name, options in LIMITS[limit]]
    settings: dict[str, Any] = {"input_ids": long_prompts(), "max_new_tokens": 21, "threshold": 0.8, "keep_kv": True}
    if limit.startswith("maskkv, ") or limit == "dllm_serve, always":
        settings["threshold"] = 0.6
    same(*(run.generate(**settings) for run in runs))


@pytest.mark.parametrize(
    ("family", "limit"),
    [*((block_dyllm.FAMILIES[i % 3], name) for i, name in enumerate(ON_BLOCKS)), ("llada2", "maskkv")],
)
def test_lossless_limits_on_blocks(family: str, limit: str) -> None:
    runs = [run_on(family)(name, **options) for name, options in ON_BLOCKS[limit]]
    settings: dict[str, Any] = {"input_ids": long_prompts(), "max_new_tokens": 21, "threshold": 0.7, "keep_kv": True}
    same(*(run.generate(**settings) for run in runs))


@pytest.mark.parametrize("family", ["dream", "sdar"])
def test_few_keys_are_something_else(family: str) -> None:
    """Else the limits above would say nothing."""
    settings: dict[str, Any] = {"input_ids": long_prompts(), "max_new_tokens": 21, "steps": 6}
    made = run_on(family)
    dense = made("dense").generate(**settings)
    for name, options in (("maskkv", {"pairs": 1}), ("dllm_serve", {"ratio": 0.05}), ("maskkv+focus", {"pairs": 1})):
        assert made(name, **options).generate(**settings).token_ids != dense.token_ids


# -- recipes as values --------------------------------------------------------------------------------------------


def test_phases_and_plans() -> None:
    found = build(RECIPES, "maskkv", BOTH, {"pairs": 7, "max_num_logits": 5})
    assert (found.name, found.kv) == ("maskkv", KVPlan("response", pairs=(7,)))
    assert found.plan == RowPlan(Response(), Apart(50, 5))
    select = SparseKV("mask_voting", 0.0, (7,), "mass", 0.1)
    before = (PackRows(), FuseProjections(), CacheKV(), ReuseRows(0.25, idle=True))
    assert found.phase("select").passes == (*before, select, ChunkLMHead(5), FuseGLU())
    assert found.phase("step").passes == (*before, replace(select, reuse=True), ChunkLMHead(5), FuseGLU())
    assert [p.name for p in found.phases] == ["select", "step"]

    serve = build(RECIPES, "dllm_serve", BOTH, {"delay": 2, "every": 5})
    assert serve.plan == RowPlan(Block(), Counted(full_steps=3, every=5))
    assert serve.kv == KVPlan("block", delay=2, every=5, ratio=0.5)
    shifted = replace(BOTH, logit_shift=1)
    firsts = (({"delay": 1}, "position"), ({"delay": 0}, "policy"), ({"first": "policy", "delay": 1}, "policy"))
    for options, first in firsts:
        for name in ("dllm_serve", "sparse_dllm"):
            assert build(RECIPES, name, shifted, options).plan.first == first  # type: ignore[union-attr]
    # A delay costs a forward of the canvas where there are refreshes, and nothing where there are none.
    for spec, delay in ((shifted, 0), (BOTH, 0), (CAUSAL, 1)):
        for name in ("dllm_serve", "dllm_serve+focus"):
            assert build(RECIPES, name, spec, {}) == build(RECIPES, name, spec, {"delay": delay})
        assert build(RECIPES, "sparse_dllm", spec, {}) == build(RECIPES, "sparse_dllm", spec, {"delay": 1})

    blocks = build(RECIPES, "dllm_serve+focus", CAUSAL, {"count": "device"})
    assert [p.name for p in blocks.phases] == ["prefill", "select", "step"]
    for name, place in (("dllm_serve", "pages"), ("sparse_dllm+focus", "pages"), ("maskkv", "packed")):
        made = build(RECIPES, name, CAUSAL, {})
        selects = [p for phase in made.phases for p in phase.passes if isinstance(p, SparseKV)]
        assert [made.kv.kept, *(p.kept for p in selects)] == [place] * 3  # type: ignore[union-attr]
    assert (blocks.plan, blocks.block_cache) == (None, "dc+")
    assert isinstance(blocks.phase("prefill").passes[-1], OnlyKV)
    kinds = [type(p) for p in blocks.phase("select").passes]
    assert kinds.index(EvictTokens) < kinds.index(SparseKV) < kinds.index(ChunkLMHead) < kinds.index(CountRows)
    assert SparseKV("block", 0.5, pool=3, cached=True, kept="pages") in blocks.phase("select").passes
    assert SparseKV("block", 0.5, pool=3, cached=True, reuse=True, kept="pages") in blocks.phase("step").passes


def test_options_of_a_combination_reach_both_parts() -> None:
    options = options_of(RECIPES["dllm_serve+fast_dllm"])
    assert set(options) >= {"ratio", "pool", "delay", "every", "pairs", "cache", "first", "block_cache"}
    assert set(options_of(RECIPES["maskkv+focus"])) > {"pairs", "selector", "alpha", "ablation", "count"}
    asked = {"every": 4, "pool": 5, "block_cache": "dc", "pairs": 9, "delay": 1}
    both = build(RECIPES, "dllm_serve+fast_dllm", BOTH, asked)
    assert (both.plan, both.kv) == (RowPlan(Block(), Counted(full_steps=2, every=4)), KVPlan("block", 1, 4, pairs=(9,)))
    assert both.block_cache == "dc"
    assert SparseKV("block", 0.0, (9,), pool=5, reuse=True) in both.phase("step").passes
    pooled = build(RECIPES, "dllm_serve+focus", BOTH, {"pool": 5}).phase("select").passes
    assert {EvictTokens(alpha=1.5), SparseKV("block", 0.5, pool=5)} < set(pooled), "a pool of keys, not of the signal"
    evicting = build(RECIPES, "maskkv+focus", BOTH, {"pairs": 3, "alpha": 1.9, "max_num_logits": 6})
    assert {EvictTokens(alpha=1.9), ChunkLMHead(6)} < set(evicting.phase("select").passes)
    with pytest.raises(UnknownName, match=r"unknown option of recipe 'maskkv\+focus' 'alhpa'\. Did you mean 'alpha'"):
        build(RECIPES, "maskkv+focus", BOTH, {"alhpa": 2})


@pytest.mark.parametrize("spec", [BOTH, CAUSAL], ids=["bidirectional", "block_causal"])
@pytest.mark.parametrize("name", SPARSE)
def test_json_says_all_of_a_recipe(name: str, spec: Any) -> None:
    if spec is CAUSAL and "fast_dllm" in name:
        return
    value = build(RECIPES, name, spec, {"pairs": 5})
    assert Recipe.from_json(json.loads(json.dumps(value.to_json(), allow_nan=False))) == value
    assert value.kv is not None
    assert value.to_json()["kv"] == value.kv.to_json()


def test_they_are_listed() -> None:
    said = json.loads(CliRunner().invoke(app, ["recipes", "--json"]).stdout)["recipes"]
    found = {r["recipe"]: r for r in said}
    assert {*SPARSE} <= set(found)
    keys, rows = ("maskkv", "dllm_serve", "sparse_dllm"), ("focus", "fast_dllm")
    gates = ("", "dyllm+")
    both = {f"{first}+{gate}{second}" for first in keys for gate in gates for second in rows}
    assert set(SPARSE) == {*keys, *(f"{first}+dyllm" for first in keys), *both}
    assert found["maskkv+dyllm+focus"]["summary"] == (
        "Keys as `maskkv` keeps them, layers gated as in `dyllm`, rows as `focus` forwards them."
    )
    assert found["maskkv+focus"]["summary"] == "Keys as `maskkv` keeps them, rows as `focus` forwards them."
    assert found["maskkv+focus"]["options"]["pairs"] == 256


# -- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("maskkv+dense", r"recipe 'maskkv\+dense': 'dense' forwards rows anywhere in the canvas, and reads the keys"),
        ("maskkv+dkv_cache", "'dkv_cache' forwards rows anywhere in the canvas, and reads the keys of all others"),
        ("maskkv+vicinity", "'vicinity' forwards rows before the block, whose keys would have no place in the cache"),
        ("maskkv+dllm_cache", "'dllm_cache' is the half with the rows of 'maskkv' already"),
        ("dllm_serve+dllm_cache", "'dllm_cache' forwards rows after the block, and only the block keeps all of its"),
        ("focus+maskkv", r"at most one part that selects keys, then .*; write 'maskkv\+focus'"),
        ("maskkv+dllm_serve", "at most one part that selects keys, .* Leave out all but one of 'maskkv', 'dllm_serve'"),
        (
            "focus+fast_dllm",
            "at most one that says which rows are forwarded. Leave out all but one of 'focus', 'fast_d",
        ),
        (
            "maskkv+focus+focus",
            "at most one that says which rows are forwarded. Leave out all but one of 'focus', 'focus'",
        ),
    ],
)
def test_parts_that_do_not_go_together(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_recipe(RECIPES, name, {})


@dataclass(frozen=True, kw_only=True)
class Sliding(RecipeOptions):
    """Forward the block and rows before it."""

    before: int = 16

    name = "sliding"

    def build(self, spec: Any) -> Recipe:
        phases = phases_of(spec, *ending(spec), optional=frozenset({"OnlyMasked", "FuseGLU", "BoundRows"}))
        return Recipe(self.name, 1, phases, plan=RowPlan(Block(self.before)))


def test_a_recipe_that_declares_nothing_is_checked_where_it_is_built() -> None:
    both = combine(MaskKVKeys.__subclasses__()[0], Sliding)
    assert both(pairs=3, before=0).recipe(BOTH).kv == KVPlan("response", pairs=(3,))  # type: ignore[call-arg]
    with pytest.raises(InputError, match=r"maskkv\+sliding: recipe 'sliding' forwards rows before the block"):
        both(before=2).recipe(BOTH)  # type: ignore[call-arg]


def test_a_selection_refuses_passes_that_read_all_keys() -> None:
    """Also of a recipe whose class declares nothing."""
    dyllm, selection = DyLLM().recipe(CAUSAL), MaskKVKeys(pairs=3).selection(CAUSAL)
    with pytest.raises(InputError, match="mine: recipe 'dyllm' carries attention contexts"):
        selection.on(dyllm, "mine")


def test_a_combination_can_be_written_as_a_class() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Both(MaskKVKeys, Focus):
        name = "maskkv+focus"

    assert Both(pairs=5, alpha=1.9).recipe(BOTH) == build(RECIPES, "maskkv+focus", BOTH, {"pairs": 5, "alpha": 1.9})


def test_unknown_parts() -> None:
    for name, wrong, right in (("maskvk+focus", "maskvk", "maskkv"), ("maskkv+fcous", "fcous", "focus")):
        with pytest.raises(UnknownName, match=f"unknown part of a recipe '{wrong}'. Did you mean '{right}'"):
            build(RECIPES, name, BOTH, {})


PROMPT_VOTES = ("snapkv", "pyramidkv", "squeeze", "adakv", "h2o", "all_voting", "prompt_voting")


@pytest.mark.parametrize("selector", PROMPT_VOTES)
def test_votes_of_a_prompt_that_no_step_forwards(selector: str) -> None:
    for name in ("maskkv", "maskkv+focus"):
        message = rf"selector '{selector}' ranks .* hand is block_causal: .* Use 'mask_voting'"
        with pytest.raises(InputError, match=message):
            build(RECIPES, name, CAUSAL, {"selector": selector})
    options = {"selector": selector, "pairs": 8}
    if selector == "squeeze":
        with pytest.raises(InputError, match="was not measured for hand; run `dgraph calibrate`"):
            build(RECIPES, "maskkv", BOTH, options)
        options = {"selector": "pyramidkv", "pairs": 8}
    assert build(RECIPES, "maskkv", BOTH, options).kv is not None


MEASURED = replace(BOTH, layer_importance=(0.5, 0.1), attention_similarity=(0.6, 0.9))


@pytest.mark.parametrize("selector", METHODS)
def test_each_way_to_divide_among_layers_goes_with_each_selector(selector: str) -> None:
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for layers in ("", *LAYERS):
            kv = build(RECIPES, "maskkv", MEASURED, {"selector": selector, "pairs": 10, "layers": layers}).kv
            assert kv is not None
            found[layers] = kv.pairs
    assert found["uniform"] == (10,)
    assert found["pyramid"] == (19, 0)
    assert found["squeeze"] == (16, 4)
    assert found["importance"] == (10, 10)  # of two layers, both are outer ones
    own = {"pyramidkv": "pyramid", "squeeze": "squeeze"}
    masks = ("mask_voting", "front_voting", "middle_voting", "back_voting")
    assert found[""] == found[own.get(selector, "importance" if selector in masks else "uniform")]


def test_what_was_not_measured_is_said_by_name() -> None:
    with pytest.warns(DgraphWarning, match=r"importance, which was not measured for this hand model, .* `dgraph calib"):
        assert build(RECIPES, "maskkv", BOTH, {"pairs": 8}).kv == KVPlan("response", pairs=(8,))
    with pytest.raises(
        InputError, match=r"layers='squeeze' groups .* was not measured for hand; run `dgraph calibrate`"
    ):
        build(RECIPES, "maskkv", BOTH, {"pairs": 8, "layers": "squeeze"})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for pairs in (8, 9, 10):
            build(RECIPES, "maskkv", BOTH, {"pairs": pairs})
    assert len(told) == 1, "once, however many arms are built"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({"layers": "uniform"}, {"ratio": 0.3}, {"selector": "snapkv"}):
            build(RECIPES, "maskkv", BOTH, options)
        build(RECIPES, "maskkv", MEASURED, {})


def test_h2o_keeps_heavy_hitters_and_recent_positions() -> None:
    with pytest.warns(
        DgraphWarning, match=r"'h2o' of maskkv is H2O as it is published .* former choice is 'all_voting'"
    ):
        recipe = build(RECIPES, "maskkv", BOTH, {"selector": "h2o", "pairs": 9})
    assert SparseKV("all_voting", 0.0, (9,), recent_share=0.5) in recipe.phase("select").passes


@pytest.mark.parametrize(
    ("name", "spec", "options", "message"),
    [
        ("maskkv", BOTH, {"pairs": 5, "ratio": 0.5}, r"give either pairs or ratio, got pairs=5 and ratio=0\.5"),
        (
            "maskkv",
            BOTH,
            {"selector": "pyramidkv", "ratio": 0.5},
            r"'pyramidkv' divides a number of pairs among layers",
        ),
        (
            "maskkv",
            BOTH,
            {"layers": "importance", "ratio": 0.5},
            r"layers='importance' divides a number of pairs among",
        ),
        ("maskkv", BOTH, {"selector": "h2o", "ratio": 0.5}, r"selector 'h2o' halves a number of pairs; give pairs"),
        ("maskkv", BOTH, {"selector": "best"}, r"unknown selector of maskkv 'best'"),
        ("maskkv", BOTH, {"layers": "some"}, r"unknown layers of maskkv 'some'"),
        ("maskkv", BOTH, {"prompt_interval": 0}, r"prompt_interval must be an integer of at least 1, got 0"),
        ("maskkv", BOTH, {"heads": "alike"}, r"heads must be one of"),
        ("maskkv", BOTH, {"head_floor": 2}, r"floor must be a number from 0 to 1, got 2"),
        ("maskkv", CAUSAL, {"rho": 0.3}, r"prompt_interval, response_interval and rho say when a bidirectional"),
        ("dllm_serve", BOTH, {"pairs": 5, "ratio": 0.3}, r"give either ratio .* got 0\.3 and \(5,\)"),
        ("dllm_serve", BOTH, {"delay": -1}, r"delay must be an integer of at least 0, got -1"),
        ("dllm_serve", CAUSAL, {"first": "position"}, r"first='position' is about the step .* is block_causal"),
        ("dllm_serve", BOTH, {"first": "second"}, r"unknown first commit of a block 'second'"),
        ("sparse_dllm", BOTH, {"pool": 2}, r"pool must be odd and at least 1, got 2"),
        ("sparse_dllm", BOTH, {"block_cache": "on"}, r"block_cache must be one of"),
        ("dllm_serve+fast_dllm", BOTH, {"cache": "prefix"}, r"recipe 'fast_dllm' forwards rows after the block"),
        ("maskkv+fast_dllm", CAUSAL, {}, r"recipe 'maskkv\+fast_dllm' approximates the keys of a bidirectional model"),
    ],
    ids=str,
)
def test_settings_that_are_refused(name: str, spec: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((InputError, UnknownName), match=message):
        build(RECIPES, name, spec, options)

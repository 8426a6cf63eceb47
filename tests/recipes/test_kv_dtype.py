"""Recipes with keys and values in float8 against the oracles, which round what they write in the same way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dgraph.errors import InputError, UnknownName
from dgraph.passes import CacheKV, PackRows
from dgraph.recipes import RECIPES, Phase, Recipe, options_of
from tests.amounts import first_cases
from tests.oracle import canvas as oracle
from tests.oracle import qwen3
from tests.oracle.float8 import NUMBERS, nearest, rounded
from tests.recipes import bidirectional, block_causal
from tests.recipes import test_canvas_against_oracle as on_canvas
from tests.recipes import test_dllm_cache_against_oracle as dllm_cache
from tests.recipes import test_dyllm_against_oracle as dyllm
from tests.recipes import test_dyllm_on_blocks as dyllm_on_blocks
from tests.recipes import test_gates_against_oracle as gates
from tests.recipes import test_sparse_against_oracle as sparse
from tests.recipes import test_sparse_on_blocks as sparse_on_blocks
from tests.recipes.test_canvas_against_oracle import PAIRS

NEAR = 0.13
"""Sums in another order may round a key between two numbers to the other one, an eighth of it away at most."""


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracles that round what they write, and share no trace with those that do not."""
    monkeypatch.setattr(qwen3, "stored", rounded)
    for module, name in ((block_causal, "trace_of"), (on_canvas, "trace_of"), (dyllm, "traces_of")):
        monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)


def test_the_oracle_rounds_as_the_format_does() -> None:
    every = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert every[:127].tolist() == NUMBERS, "the last one is no number"
    x = torch.cat([torch.randn(500) * 3, torch.tensor([1.0625, 1.1875, 0.0, 448.0, 2.0**-10, 3 * 2.0**-10])])
    assert [nearest(value) for value in x.tolist()] == x.to(torch.float8_e4m3fn).float().tolist()


@first_cases(2, "recipe, options", [("dense", {}), ("focus", {"count": "device"}), ("focus", {})], ids=str)
def test_block_causal_models(recipe: str, options: dict[str, Any], rounding: None) -> None:
    setup = block_causal.setup_for(16)
    run = block_causal.optimized(setup, recipe, kv_dtype="fp8", **options)
    words = {"block_cache": "off", "evict": False} if recipe == "dense" else {}
    block_causal.check(setup, 16, run, {"threshold": 0.6}, words, NEAR)


CANVAS: dict[str, oracle.Method] = {
    "dense": oracle.vanilla,
    "fast_dllm": oracle.fast_dllm("dual"),
    "dkv_cache": oracle.dkv_cache(8),
    "vicinity": oracle.vicinity(16, 16, 4),
}


@pytest.mark.parametrize(("recipe", "pair"), list(zip(CANVAS, PAIRS, strict=True)), ids=str)
def test_bidirectional_models(recipe: str, pair: tuple[str, str], rounding: None) -> None:
    (family, rule), options = pair, {"first": "policy"} if recipe == "fast_dllm" else {}
    setup = bidirectional.setup_of(family)
    run = setup.optimized(recipe, 8, kv_dtype="fp8", **options)
    on_canvas.check(setup, 8, run, rule, CANVAS[recipe], near=NEAR)


@pytest.mark.parametrize(
    ("case", "pair"), list(zip(("defaults", "one full step, every second wide"), PAIRS[::3], strict=True))
)
def test_dyllm(case: str, pair: tuple[str, str], rounding: None) -> None:
    (family, rule), (options, method) = pair, dyllm.CASES[case]
    setup = bidirectional.setup_of(family)
    dyllm.check(setup, 16, setup.optimized("dyllm", 16, kv_dtype="fp8", **options), rule, method, NEAR)


def test_dyllm_on_blocks(rounding: None) -> None:
    dyllm_on_blocks.check_run("sdar", "defaults", {"threshold": 0.7}, near=NEAR, kv_dtype="fp8")


def test_dllm_cache(rounding: None) -> None:
    options, method = dllm_cache.CASES["all four kinds of steps"]
    setup = bidirectional.setup_of("dream")
    run = setup.optimized("dllm_cache", 16, kv_dtype="fp8", **options)
    dllm_cache.check(setup, 16, run, "threshold", method, NEAR)


@first_cases(2, "case", ["maskkv, uniform heads", "sparse_dllm", "dllm_serve"])
def test_kept_keys(case: str, rounding: None) -> None:
    name, options, method = sparse.case_of(case, "llada")
    setup = bidirectional.setup_of("llada")
    sparse.check(setup, 16, setup.optimized(name, 16, kv_dtype="fp8", **options), "threshold", method, NEAR)


@first_cases(1, "case", ["dllm_serve", "maskkv", "sparse_dllm"])
def test_kept_keys_on_blocks(case: str, rounding: None) -> None:
    name, options, method = sparse_on_blocks.CASES[case]
    run = block_causal.optimized(sparse_on_blocks.setup_of("sdar"), name, kv_dtype="fp8", **options)
    sparse_on_blocks.check("sdar", run, method, sparse_on_blocks.RULES["steps"], NEAR)


@first_cases(1, "case", ["dllm_serve+dyllm+focus", "dyllm+fast_dllm", "maskkv+dyllm"])
def test_gates(case: str, rounding: None) -> None:
    name, options, *_ = gates.CANVAS[case]
    run = bidirectional.setup_of("llada").optimized(name, 16, tau=gates.TAU, kv_dtype="fp8", **options)
    gates.check_canvas("llada", case, run, "threshold", NEAR)


def test_every_recipe_takes_it_and_gives_it_to_every_phase() -> None:
    spec = {"bidirectional": bidirectional.setup_of("llada").model.spec, "": block_causal.setup_for(16).model.spec}
    for name, builder in RECIPES.items():
        assert "kv_dtype" in options_of(builder), name
        for one in spec.values():
            try:
                recipe, plain = builder(one, kv_dtype="fp8"), builder(one)
            except InputError:
                continue
            caches = [p for phase in recipe.phases for p in phase.passes if isinstance(p, CacheKV)]
            assert caches == [CacheKV("fp8")] * len(recipe.phases)
            assert recipe != plain == recipe.with_kv_dtype(None)
            assert Recipe.from_json(recipe.to_json()) == recipe


def test_what_it_refuses() -> None:
    with pytest.raises(UnknownName, match=r"unknown dtype of keys and values 'fp4'\. Did you mean 'fp8'"):
        CacheKV("fp4")
    with pytest.raises(InputError, match=r"recipe 'none' keeps no keys and values \(CacheKV\), so leave out kv_dtype"):
        Recipe("none", 1, (Phase("step", (PackRows(),)),)).with_kv_dtype("fp8")

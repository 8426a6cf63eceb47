"""Every recipe on every family: ranks give one process's tokens, in the same steps, from slices of the same keys.

Ranks are threads, in fp32. A sum over ranks rounds in another way than one over all inputs, so a decision could fall
otherwise where two values are equal to within some 1e-6; with the seeds of these models and prompts none is.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dgraph.errors import InputError, PassError
from dgraph.recipes import RECIPES
from dgraph.testing import TinyModel, models, ranks
from tests.amounts import first_cases
from tests.parallel.divided import THRESHOLD, check_equal, run_of
from tests.runtime.test_statistics import Stable

OPTIONS: dict[str, dict[str, Any]] = {
    name: ({"tau": 0.97} if "dyllm" in name else {}) | ({"pairs": 4} if "maskkv" in name else {}) for name in RECIPES
}
"""Where by default everything of prompts as short as these is kept, or most rows are salient."""

DEFAULT = {
    ("dream", "dense", 4),
    ("sdar", "focus", 2),
    ("llada", "fast_dllm", 2),
    ("dream", "dkv_cache", 2),
    ("llada", "vicinity", 4),
    ("llada2", "dyllm", 2),
    ("fast_dllm_v2", "focus", 2),
    ("nemotron", "focus", 2),
    ("llada_moe", "dense", 2),
    ("dream", "dllm_cache", 4),
    ("dream", "maskkv", 4),
    ("sdar", "dllm_serve", 4),
    ("native", "sparse_dllm", 2),
    ("sdar", "maskkv+focus", 4),
    ("llada", "maskkv+fast_dllm", 2),
    ("sdar_moe", "dllm_serve+focus", 2),
    ("llada", "dllm_serve+fast_dllm", 4),
    ("llada", "sparse_dllm+focus", 2),
    ("dream", "sparse_dllm+fast_dllm", 2),
    ("sdar", "dllm_serve+dyllm+focus", 2),
    ("llada", "dllm_serve+dyllm+focus", 2),
    ("dream", "maskkv+dyllm", 4),
}
"""Every recipe once, of those with a gate in a combination some, every family, two ranks and four; every recipe on
every family, over as many, is for a release.
"""


def takes(tiny: TinyModel, recipe: str) -> bool:
    try:
        tiny.recipe(recipe, **OPTIONS.get(recipe, {}))
    except InputError:
        return False
    return True


def cases() -> list[Any]:
    """All of `DEFAULT`, and of every other recipe and family one, over two ranks and four in turns."""
    given = {case[:2]: case[2] for case in DEFAULT}
    found = [
        (tiny, recipe, given.get((str(tiny), recipe), 2 if (i + j) % 2 else 4))
        for i, tiny in enumerate(models())
        for j, recipe in enumerate(RECIPES)
        if takes(tiny, recipe)
    ]
    return [
        pytest.param(*case, marks=[] if (str(case[0]), *case[1:]) in DEFAULT else [pytest.mark.release])
        for case in found
    ]


def test_by_default_every_recipe_and_every_family_runs() -> None:
    families, recipes, worlds = (set(column) for column in zip(*DEFAULT, strict=True))
    assert families == {str(tiny) for tiny in models()}
    assert recipes <= set(RECIPES)
    assert {name for name in RECIPES if "dyllm" not in name.split("+")} | {"dyllm"} < recipes
    assert worlds == {2, 4}


@pytest.mark.parametrize(("tiny", "recipe", "world"), cases(), ids=str)
def test_ranks_decode_as_one_process_does(tiny: TinyModel, recipe: str, world: int) -> None:
    check_equal(tiny, world, recipe, OPTIONS.get(recipe, {}))


@pytest.mark.parametrize(("name", "world"), [("sdar", 4), ("llada2", 2)])
def test_ranks_open_the_same_blocks(name: str, world: int) -> None:
    (tiny,) = models(None, name)
    alone = run_of(tiny.optimized("dense"), tiny, threshold=THRESHOLD, max_new_tokens=40)
    whole, _ = check_equal(tiny, world, "dense", {}, max_new_tokens=40, open_blocks=4)
    assert len(whole.steps) < len(alone.steps)


@pytest.mark.parametrize(
    ("name", "recipe"), [("sdar", "focus"), ("llada", "dyllm"), ("dream", "maskkv"), ("sdar", "dllm_serve")], ids=str
)
def test_ranks_keep_the_scales_of_their_keys_and_values(name: str, recipe: str) -> None:
    """A sum of ranks' sums may round a key to the next number of the format, an eighth of it away at most."""
    (tiny,) = models(None, name)
    options = {**OPTIONS.get(recipe, {}), "kv_dtype": "fp8"}
    whole, (_, second) = check_equal(tiny, 2, recipe, options, near=0.13)
    of = {spec.name: spec for spec in whole.made._session.kv.declared}
    for spec in second.made._session.kv.declared:
        assert spec.dtype == of[spec.name].dtype
        if "_scale_" in spec.name:
            assert (spec.element, spec.dtype) == ((tiny.model.spec.kv_heads // 2,), torch.float32)


LIMITS: list[tuple[str, str, dict[str, Any], str, dict[str, Any]]] = [
    ("sdar", "focus", {"alpha": math.inf, "block_cache": "off"}, "dense", {}),
    ("llada2", "dyllm", {"tau": 1.01}, "dense", {}),
    ("llada", "dllm_cache", {"prompt_interval": 1, "response_interval": 1}, "dense", {}),
    ("sdar", "maskkv", {"pairs": 999}, "dense", {}),
    ("native", "dllm_serve", {"ratio": 1.0}, "dense", {}),
    ("dream", "sparse_dllm", {"ratio": 1.0, "delay": 0}, "fast_dllm", {"first": "policy"}),
]
"""Settings at which a method changes nothing, and what it is then."""


@pytest.mark.parametrize(
    ("name", "recipe", "options", "other", "given"),
    [pytest.param(*case, marks=[pytest.mark.release] if i > 1 else []) for i, case in enumerate(LIMITS)],
    ids=str,
)
def test_lossless_limits_hold_on_ranks(
    name: str, recipe: str, options: dict[str, Any], other: str, given: dict[str, Any]
) -> None:
    (tiny,) = models(None, name)
    decoding = {"threshold": 0.3, "max_new_tokens": 12}
    want = run_of(tiny.optimized(other, **given), tiny, **decoding).result.token_ids
    found = ranks(2, lambda rank: run_of(tiny.on_rank(rank, 2, recipe, **options), tiny, **decoding).result.token_ids)
    assert found == [want] * 2


RULES: list[tuple[str, str, dict[str, Any]]] = [
    ("sdar", "focus", {"steps": 4, "temperature": 1.0, "seed": 3}),
    ("llada", "dense", {"policy": "llada_random", "steps": 6, "temperature": 0.7}),
    ("dream", "dense", {"policy": "dream_topk_margin", "steps": 6}),
    ("dream", "fast_dllm", {"policy": "dream_entropy", "steps": 6, "temperature": 0.5}),
    ("sdar", "dense", {"policy": "entropy_bounded"}),
    ("llada2", "dense", {"policy": "llada2.1"}),
    ("sdar", "dyllm", {"threshold": 0.2, "temperature": 0.7, "top_k": 7}),
    ("dream", "dense", {"steps": 6, "temperature": 0.8, "top_p": 0.7}),
]
"""Draws; margin and entropy of the distribution; tokens that are edited; samplers that need whole logits."""


@first_cases(5, "name, recipe, decoding", RULES, ids=str)
def test_ranks_draw_and_commit_by_any_rule_as_one_process_does(
    name: str, recipe: str, decoding: dict[str, Any]
) -> None:
    (tiny,) = models(None, name)
    check_equal(tiny, 2, recipe, {}, **decoding)


def test_experts_of_their_own_on_each_rank_give_the_same() -> None:
    (tiny,) = models(None, "sdar_moe")
    check_equal(tiny, 2, "focus", {}, experts="parallel")


def test_statistics_of_whole_logits_are_refused() -> None:
    (tiny,) = models(None, "sdar")
    with pytest.raises(PassError, match=r"MeasureRows: .*spread.* no rank of a sharded model has whole logits"):
        ranks(2, lambda rank: run_of(tiny.on_rank(rank, 2, "dense"), tiny, policy=Stable(), max_new_tokens=8))


def test_ranks_keep_what_is_theirs() -> None:
    """Two of four heads: half of the pages' bytes, and of the keys that are kept packed."""
    (tiny,) = models(None, "llada", seed=1)  # of its own: other tests widen what a shared one has room for
    whole, each = check_equal(tiny, 2, "dllm_serve", {})
    for run in each:
        mine, other = run.made._session, whole.made._session
        assert mine.kv.position_bytes * 2 == other.kv.position_bytes
        assert mine.packed is not None
        assert other.packed is not None
        assert mine.packed.bytes * 2 == other.packed.bytes


@pytest.mark.release
@pytest.mark.parametrize(("name", "recipe"), [("llada", "dyllm"), ("llada", "dllm_cache"), ("dream", "maskkv")])
def test_compiled_regions_give_the_same_on_ranks(name: str, recipe: str) -> None:
    """Decisions that are compiled with what reads them; each rank compiles the same regions."""
    (tiny,) = models(None, name)
    options = OPTIONS.get(recipe, {})
    whole = run_of(tiny.optimized(recipe, **options), tiny, threshold=0.3, max_new_tokens=8)

    def compiled(rank: int) -> list[list[int]]:
        made = tiny.on_rank(rank, 2, recipe, "inductor", "fine", **options)
        return run_of(made, tiny, threshold=0.3, max_new_tokens=8).result.token_ids

    assert ranks(2, compiled) == [whole.result.token_ids] * 2

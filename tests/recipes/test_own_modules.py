"""A module of one's own, in every usual spelling, under every recipe: as captured, plain PyTorch's tokens and no other.

By default each pair of properties of the matrix is met by some module; `-m release` runs all of its modules. There
every recipe meets each pair of properties, and every module each method by itself.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from packaging.version import Version

import dgraph
from dgraph.errors import CaptureError
from dgraph.ir.graph import Graph
from dgraph.passes.base import Report
from dgraph.recipes import RECIPES
from dgraph.testing import TinyModel, check_batch_equals_alone, check_lossless, prompts
from dgraph.types.nodes import op_name
from tests.own_modules import LAYERS, Kind, decoded, own

THRESHOLD, NEW = 0.3, 20

MATRIX: dict[str, tuple[Any, ...]] = {
    "parallel": (False, True),
    "qkv": ("chunk", "split", "unbind", "apart"),
    "bias": (True, False),
    "norm": ("", "layer", "rms"),
    "rotary": (False, True),
}


def pairwise(matrix: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Few choices of one value of each property among which each two values of two properties meet."""
    every = [dict(zip(matrix, values, strict=True)) for values in itertools.product(*matrix.values())]
    left = {pair for choice in every for pair in itertools.combinations(choice.items(), 2)}
    chosen = []
    while left:
        best = max(every, key=lambda choice: len(left & set(itertools.combinations(choice.items(), 2))))
        left -= set(itertools.combinations(best.items(), 2))
        chosen.append(best)
    return chosen


COVERING = [Kind(**choice) for choice in pairwise(MATRIX)]
WHOLE = {Kind(**dict(zip(MATRIX, values, strict=True))) for values in itertools.product(*MATRIX.values())}
REST = sorted(WHOLE - {*COVERING}, key=str)
SPELLINGS = [Kind(qkv=name) for name in ("tensor_split", "index", "permute", "slices", "by heads", "nested", "kv")]
OTHERS = [
    Kind(qkv="split", kv_heads=2, attend="grouped"),
    Kind(qkv="split", kv_heads=1, attend="repeated", rotary=True),
    Kind(qkv="nested", kv_heads=2, attend="expanded", norm="rms"),
    Kind(qkv="unbind", attend="folded", rotary=True),
    Kind(ffn="tanh", names="h"),
    Kind(ffn="swiglu", head="bias", names="attributes"),
    Kind(ffn="gate last", head="own", names="stages", parallel=True),
]
FUSED = [*SPELLINGS, *(kind for kind in COVERING if kind.qkv != "apart")]


@functools.cache
def model(kind: Kind) -> TinyModel:
    """Captured once for all recipes."""
    return own(kind)


@functools.cache
def expected(kind: Kind) -> list[list[int]]:
    return [decoded(model(kind), prompt, NEW, THRESHOLD) for prompt in prompts(model(kind))]


def tokens(kind: Kind, recipe: str, **options: Any) -> list[list[int]]:
    made = model(kind).optimized(recipe, **options)
    return made.generate(input_ids=prompts(model(kind)), max_new_tokens=NEW, threshold=THRESHOLD).token_ids


def reports(kind: Kind, recipe: str) -> dict[str, Report]:
    """The reports of the passes of a step, by name."""
    return {report.name: report for report in model(kind).optimized(recipe).report["step"]}


def step(kind: Kind, recipe: str) -> Graph:
    return dgraph.rewrite(model(kind).graph, model(kind).recipe(recipe))["step"].graph


def check(kind: Kind, recipes: Iterable[str]) -> None:
    """Each recipe runs; `dense` gives plain PyTorch's tokens."""
    for recipe in recipes:
        got = tokens(kind, recipe)
        assert recipe != "dense" or got == expected(kind), recipe
        assert len(got) == len(prompts(model(kind)))


NAMES = [name for name in RECIPES.names() if name != "dense"]
METHODS = [name for name in RECIPES.names() if "+" not in name]
COMBINED = [name for name in RECIPES.names() if "+" in name]
REWRITING = ("dyllm", "dllm_cache", "focus")
"""Recipes that cut rows or take products apart in different places."""


@pytest.mark.parametrize("index", range(len(COVERING)), ids=lambda i: str(COVERING[i]))
def test_the_matrix_runs_and_dense_gives_plain_pytorchs_tokens(index: int) -> None:
    """Every recipe meets one of the modules."""
    check(COVERING[index], ["dense", *NAMES[index :: len(COVERING)]])


@pytest.mark.parametrize("kind", OTHERS, ids=str)
def test_so_do_other_ways_to_write_a_module(kind: Kind) -> None:
    if kind.attend == "folded" and Version(torch.__version__) < Version("2.12"):
        with pytest.raises(CaptureError, match="Constraints violated"):  # torch.export fixes the number of tokens
            check(kind, ["dense"])
        return
    check(kind, ["dense", REWRITING[OTHERS.index(kind) % len(REWRITING)]])


@pytest.mark.parametrize("kind", SPELLINGS, ids=str)
def test_so_does_every_spelling_of_a_projection(kind: Kind) -> None:
    check(kind, ["dense"])


@pytest.mark.release
@pytest.mark.parametrize("kind", [*COVERING, *SPELLINGS, *OTHERS], ids=str)
def test_every_recipe_runs_on_a_module_of_each_pair_of_properties(kind: Kind) -> None:
    check(kind, RECIPES.names())


@pytest.mark.release
@pytest.mark.parametrize("index", range(len(REST)), ids=lambda i: str(REST[i]))
def test_every_module_runs_under_every_method(index: int) -> None:
    """And under a third of their combinations, in turn."""
    check(REST[index], [*METHODS, *COMBINED[index % 3 :: 3]])


@pytest.mark.parametrize("kind", SPELLINGS[:-1], ids=str)
def test_every_spelling_is_one_graph(kind: Kind) -> None:
    """The same calls, on the same sizes, as of the module that splits its projection; in whatever order."""

    def text(graph: Graph) -> list[tuple[str, str, str]]:
        calls = [n for n in graph.calls if op_name(n.target) != "sym_size"]
        return sorted((op_name(n.target), graph.type_text(n), f"{n.meta['layer']}") for n in calls)

    got, wanted = model(kind).graph, model(Kind(qkv="split")).graph
    assert text(got) == text(wanted)
    assert sum(n.target is torch.ops.aten.split_with_sizes.default for n in got.calls) == LAYERS


@pytest.mark.parametrize("kind", FUSED[-4:], ids=str)
def test_a_fused_projection_is_taken_apart_once_where_a_pass_needs_it(kind: Kind) -> None:
    def linears(recipe: str) -> list[int]:
        graph = step(kind, recipe)
        names = ("linear", "dgraph.rows_linear", "dgraph.rows_glu")
        calls = [n for n in graph.calls if op_name(n.target) in names]
        return [sum(n.meta["layer"] == layer for n in calls) for layer in range(LAYERS)]

    whole = 4  # q|k|v, out, up and down
    assert linears("dllm_serve") == [whole] * LAYERS, "nothing is taken apart"
    assert linears("dense") == [whole, whole, whole + 1], "OnlyMasked: the last layer's queries"
    assert linears("dyllm") == [whole + 1] * LAYERS, "PartialAttention: keys and values of every layer"
    assert linears("dllm_cache") == [whole, whole + 1, whole + 1], "ReuseRows: values of each layer but the first"
    assert not reports(kind, "dense")["OnlyMasked"].skipped


@pytest.mark.parametrize("kind", [Kind(), Kind(parallel=True, qkv="unbind", norm="rms", rotary=True)], ids=str)
@pytest.mark.parametrize(
    ("recipe", "identity"),
    [
        ("focus", {"alpha": float("inf"), "block_cache": "off"}),
        ("dyllm", {"tau": 1.01, "response_only_period": 1}),
        ("dllm_cache", {"rho": 1, "prompt_interval": 1}),
    ],
    ids=str,
)
def test_the_lossless_limits(kind: Kind, recipe: str, identity: dict[str, Any]) -> None:
    against = "fast_dllm" if recipe == "focus" else "dense"
    check_lossless(model(kind), recipe, identity, against=against, threshold=THRESHOLD)


@pytest.mark.parametrize("kind", [Kind(parallel=True, qkv="unbind"), Kind(qkv="interleaved")], ids=str)
@pytest.mark.parametrize("recipe", ["dense", "focus"])
def test_a_batch_gives_what_each_prompt_gets_alone(kind: Kind, recipe: str) -> None:
    check_batch_equals_alone(model(kind), recipe, {}, threshold=THRESHOLD)


def test_a_projection_that_cannot_be_taken_apart_leaves_queries_whole_or_is_refused() -> None:
    """Queries, keys and values of a head side by side: no run of outputs is of one of them."""
    kind = Kind(qkv="interleaved")
    for recipe in ("dense", "focus", "fast_dllm", "dllm_serve", "maskkv+focus"):
        got = tokens(kind, recipe)
        assert recipe != "dense" or got == expected(kind)
    (miss,) = reports(kind, "dense")["OnlyMasked"].skipped
    assert miss.layer == LAYERS - 1
    assert miss.reason.startswith("queries are computed for all rows: queries, keys and values share ")
    assert reports(kind, "dense")["OnlyMasked"].applied
    for recipe, name in (("dyllm", "PartialAttention"), ("dllm_cache", "ReuseRows"), ("maskkv", "ReuseRows")):
        with pytest.raises(
            dgraph.errors.PassError, match=rf"{name}(.|\n)*each must be neighbouring outputs of one product"
        ):
            tokens(kind, recipe)


def test_a_parallel_network_is_gated_on_what_its_attention_reads() -> None:
    kind = Kind(parallel=True, qkv="split")
    found = reports(kind, "dyllm")
    assert [a.layer for a in found["GateFFN"].applied] == [*range(LAYERS)]
    assert [a.layer for a in found["PartialAttention"].applied] == [*range(LAYERS)]
    assert [a.layer for a in reports(kind, "dllm_cache")["ReuseRows"].applied] == [*range(1, LAYERS)]


@pytest.mark.parametrize("names", ["h", "attributes", "stages"])
def test_layers_are_numbered_whatever_holds_them(names: str) -> None:
    """With the roles that they have in a list of layers."""
    got, wanted = model(Kind(names=names)).graph, model(Kind()).graph
    tags = [[(n.meta["layer"], n.meta["role"]) for n in graph.calls] for graph in (got, wanted)]
    assert tags[0] == tags[1]


@pytest.mark.parametrize(
    "recipes",
    [("dense", *REWRITING), pytest.param(RECIPES.names(), marks=pytest.mark.release)],
    ids=["some", "all"],
)
def test_one_module_that_runs_several_times_is_as_many_layers(recipes: Iterable[str]) -> None:
    kind = replace(Kind(), names="attributes")
    shared = own(kind)
    first = shared.model.module.layer0  # type: ignore[union-attr]
    shared.model.module.layer1 = shared.model.module.layer2 = first  # type: ignore[union-attr]
    wanted = [decoded(shared, prompt, NEW, THRESHOLD) for prompt in prompts(shared)]
    for recipe in recipes:
        got = shared.optimized(recipe).generate(input_ids=prompts(shared), max_new_tokens=NEW, threshold=THRESHOLD)
        assert recipe != "dense" or got.token_ids == wanted
    assert [n.meta["layer"] for n in shared.graph.find("attention")] == [*range(LAYERS)]


def test_a_block_causal_module_runs_too() -> None:
    kind = Kind(qkv="unbind", norm="rms", rotary=True, parallel=True)
    tiny = own(kind, attention="block_causal")
    for recipe in ("dense", "focus", "dyllm", "maskkv", "dllm_serve", "sparse_dllm+focus"):
        tiny.optimized(recipe).generate(input_ids=prompts(tiny), max_new_tokens=NEW, threshold=THRESHOLD)
    check_lossless(tiny, "dyllm", {"tau": 1.01}, threshold=THRESHOLD)

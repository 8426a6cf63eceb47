"""SparseKV where ranks have some heads each: every head keeps what it keeps in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dgraph.ir.graph import Graph
from dgraph.ops.attention.sparse import REUSE, SELECT
from dgraph.passes import CacheKV, FuseProjections, PackRows, ShardTensorParallel, SparseKV
from dgraph.passes.base import Pass
from dgraph.ranks.sharding import FIRST_KV_HEAD
from dgraph.testing import TinyModel, models, ranks
from dgraph.text.writer import dump
from dgraph.types.nodes import args_of
from tests.golden_files import check_golden
from tests.passes.sparse_step import LENGTHS
from tests.passes.test_sparse_kv_numbers import caches_of, live, step
from tests.tiny import interpret, rewritten

DREAM, LLADA = models(None, "dream", "llada")
"""Four heads each: the one has two KV heads, the other four."""
CACHED = (PackRows(), CacheKV())


def of_rank(tiny: TinyModel, world: int, rank: int, *passes: Pass) -> Graph:
    return rewritten(tiny.graph, ShardTensorParallel(world, rank=rank), *CACHED, *passes)


def kept(memory: dict[str, Tensor], layer: int) -> list[list[list[int]]]:
    """Positions that each head keeps, by sequence."""
    found = []
    for s, counts in enumerate(memory[f"pack_count_{layer}"].tolist()):
        begin = int(memory["pack_start"][layer, s])
        entries = memory[f"pack_index_{layer}"][begin : begin + sum(counts)]
        found.append([part.tolist() for part in entries.split(counts)])
    return found


def two_steps(select: Graph, reuse: Graph) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logits of a step that selects and of one that reuses, and all caches after them."""
    memory = caches_of(select)
    steps = [(select, step(True, SELECT)), (reuse, step(False, REUSE, 2))]
    return [live(interpret(graph, {**inputs, **memory}), inputs) for graph, inputs in steps], memory


MASS: dict[str, Any] = {"ratio": 0.4, "heads": "mass", "floor": 0.1}
ADAPTIVE: dict[str, Any] = {"ratio": 0.4, "heads": "adaptive", "floor": 0.2, "pool": 3}


@pytest.mark.parametrize(
    ("tiny", "world", "settings"),
    [
        (LLADA, 2, {"selector": "mask_voting", **MASS}),
        (LLADA, 4, {"selector": "snapkv", **ADAPTIVE, "recent": 1}),
        (LLADA, 4, {"selector": "shared", "ratio": 0.4}),
        (LLADA, 2, {"selector": "block", "ratio": 0.4}),
        (DREAM, 2, {"selector": "shared", **ADAPTIVE}),
        (DREAM, 4, {"selector": "mask_voting", **MASS}),
        (DREAM, 4, {"selector": "all_voting", "ratio": 0.4}),
        (DREAM, 4, {"selector": "block", "ratio": 0.0, "pairs": (3,), "pool": 3}),
        (DREAM, 4, {"selector": "block", **ADAPTIVE}),
        (DREAM, 4, {"selector": "block", **ADAPTIVE, "kept": "pages"}),
    ],
    ids=str,
)
def test_each_head_keeps_what_it_keeps_in_one_process(tiny: TinyModel, world: int, settings: dict[str, Any]) -> None:
    sparse = [SparseKV(**settings, reuse=reuse) for reuse in (False, True)]
    want, memory = two_steps(*(rewritten(tiny.graph, *CACHED, each) for each in sparse))
    found = ranks(world, lambda rank: two_steps(*(of_rank(tiny, world, rank, each) for each in sparse)))
    heads = tiny.model.spec.kv_heads
    for rank, (got, mine) in enumerate(found):
        for logits, wanted in zip(got, want, strict=True):
            torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
        first, own = rank * heads // world, max(heads // world, 1)
        for layer in range(tiny.model.spec.layers):
            wanted_heads = [sequence[first : first + own] for sequence in kept(memory, layer)]
            assert kept(mine, layer) == wanted_heads
    counts = torch.stack([memory[f"pack_count_{layer}"] for layer in range(tiny.model.spec.layers)])
    assert bool((counts > 0).any())
    assert bool((counts[..., 0] < torch.tensor(LENGTHS)).all())
    if settings.get("heads", "uniform") != "uniform" and settings["selector"] != "shared":
        assert bool((counts != counts[..., :1]).any()), "budgets that are divided evenly show nothing"


@pytest.mark.parametrize(
    ("tiny", "world", "settings", "gathered", "first"),
    [
        (LLADA, 2, {"selector": "block"}, False, False),
        (LLADA, 2, {"selector": "mask_voting"}, False, False),
        (LLADA, 2, {"selector": "shared"}, True, False),
        (LLADA, 2, {"selector": "shared", "heads": "mass"}, True, True),
        (LLADA, 2, {"selector": "block", "heads": "adaptive"}, True, True),
        (DREAM, 4, {"selector": "block"}, True, True),
        (DREAM, 4, {"selector": "shared"}, True, False),
    ],
    ids=str,
)
def test_scores_are_gathered_where_a_choice_looks_at_other_heads(
    tiny: TinyModel, world: int, settings: dict[str, Any], gathered: bool, first: bool
) -> None:
    graphs = [of_rank(tiny, world, rank, SparseKV(**settings)) for rank in range(world)]
    assert len({dump(graph) for graph in graphs}) == 1
    heads, every = graphs[0].spec.kv_heads, tiny.model.spec.kv_heads
    for graph in graphs:
        for layer in range(graph.spec.layers):
            assert len(graph.find("all_gather", layer)) == gathered
            (pack,) = graph.find("kv_pack", layer)
            assert args_of(pack)[20:] == ((graph.weight(FIRST_KV_HEAD),) if first else ())
            assert graph.type_text(args_of(pack)[0]) == f"f32[N, {every if first else heads}]"
            budgets = every if "heads" in settings else 0
            assert graph.inputs[f"pack_count_{layer}"].budgets == budgets
    if first:
        numbers = [int(graph.tensors[FIRST_KV_HEAD]) for graph in graphs]
        assert numbers == [rank * every // world for rank in range(world)]


def test_attention_that_every_rank_has_is_chosen_for_as_in_one_process() -> None:
    whole = tuple((f"*.{name}_proj.*", "replicated") for name in "qkvo")
    graph = rewritten(LLADA.graph, ShardTensorParallel(2, hints=whole, rank=1), *CACHED, SparseKV(heads="mass"))
    assert {node.meta["layer"] for node in graph.find("all_gather")} == {None}
    assert graph.inputs["pack_count_0"].budgets == 0


def test_the_dump_of_a_step_that_selects() -> None:
    graph = of_rank(DREAM, 4, 0, FuseProjections(), SparseKV(heads="mass", floor=0.1))
    check_golden("dream_sparse_select_of_4_ranks.txt", dump(graph))

"""Scores and decisions as ops of their own, where a graph is sharded: one rank decides as the fused ops do, exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ir.graph import Graph
from dgraph.ops import OPS
from dgraph.passes import (
    CacheKV,
    ChunkLMHead,
    FuseProjections,
    GateFFN,
    PackRows,
    PartialAttention,
    ReuseRows,
    ShardTensorParallel,
    SparseKV,
)
from dgraph.passes.base import Pass
from dgraph.ranks.sharding import Sharding
from dgraph.testing import models
from dgraph.text.writer import dump
from dgraph.types.nodes import args_of
from tests.golden_files import check_golden
from tests.passes.sparse_step import LENGTHS, family_of, memory_of, three_steps
from tests.tiny import interpret, ops_of, report_of, rewritten

GATE, PARTIAL, ALL_ROWS = GateFFN(0.97), PartialAttention(0.97), PartialAttention(0.97, update=False)
FUSED = {"drift", "partial_attention", "least_similar"}


def alone(graph: Graph) -> Graph:
    """The graph as one rank of one has it."""
    copy = graph.copy()
    copy.sharding = Sharding(1, "")
    return copy


def outcomes(graph: Graph, steps: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Outputs of each step, and all caches after the last one."""
    spec = graph.spec
    memory = memory_of(spec, LENGTHS)
    pages, page = memory["k_cache_0"].shape[:2]
    memory |= {f"a_cache_{layer}": torch.full((pages, page, spec.hidden), torch.nan) for layer in range(spec.layers)}
    return [*(interpret(graph, {**inputs, **memory}) for inputs in steps), memory]


@pytest.mark.parametrize(
    ("passes", "made"),
    [
        ([GATE], {"compare_rows": 1, "all_reduce": 1, "drifted": 1}),
        ([PARTIAL], {"partial_context": 1, "all_reduce": 1, "drifted": 1}),
        ([ALL_ROWS], {"compare_rows": 1, "all_reduce": 1, "drifted": 1}),
        ([GATE, PARTIAL], {"partial_context": 1, "all_reduce": 1, "drifted": 1}),
        ([PARTIAL, GATE], {"partial_context": 1, "all_reduce": 1, "drifted": 1}),
        ([GATE, ALL_ROWS], {"compare_rows": 1, "all_reduce": 1, "drifted": 1}),
        ([ReuseRows(0.3)], {"compare_rows": 1, "all_reduce": 1, "least_drifted": 1}),
        ([ReuseRows(0.3, idle=True)], {"compare_rows": 1, "all_reduce": 1, "least_drifted": 1}),
    ],
    ids=lambda value: "+".join(map(str, value)) if isinstance(value, list) else "",
)
def test_one_rank_gives_what_fused_ops_give(passes: list[Pass], made: dict[str, int]) -> None:
    cached = family_of("llada").cached
    whole, divided = rewritten(cached, *passes), rewritten(alone(cached), *passes)
    first = 1 if isinstance(passes[0], ReuseRows) else 0
    for layer in range(first, cached.spec.layers):
        names = [name.removeprefix("dgraph.") for name in ops_of(divided, layer)]
        assert {op: names.count(op) for op in made} == made
        assert not FUSED & set(names)
    assert (divided.outputs, divided.inputs) == (whole.outputs, whole.inputs)
    for padding in (0, 4):
        steps = three_steps(cached.spec, padding)
        for i, inputs in enumerate(steps):
            inputs["adapt"] = torch.arange(len(inputs["full"])) % (3 if i else 1) == 0
        for got, wanted in zip(outcomes(divided, steps), outcomes(whole, steps), strict=True):
            assert got.keys() == wanted.keys()
            for name in wanted:
                torch.testing.assert_close(got[name], wanted[name], rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("other", [SparseKV(), ReuseRows()], ids=lambda step: step.name)
def test_attention_that_is_updated_is_left_alone(other: Pass) -> None:
    reasons = {
        skipped.reason
        for skipped in report_of(rewritten(alone(family_of("llada").cached), PARTIAL), other).skipped
        if skipped.layer
    }
    assert len(reasons) == 1
    assert "this attention is updated by" in reasons.pop()


def test_passes_with_another_tau_are_refused() -> None:
    for passes in ([GATE, PartialAttention(0.9)], [PARTIAL, GateFFN(0.9)]):
        with pytest.raises(InputError, match=r"give both passes the same tau"):
            rewritten(alone(family_of("llada").cached), *passes)


def test_decisions_follow_sums_that_are_added_over_ranks() -> None:
    graph = rewritten(alone(family_of("llada").cached), FuseProjections(), PARTIAL, GATE, ChunkLMHead())
    (total,) = {args_of(node)[0] for node in graph.find("drifted", 1)}
    assert [node.meta["by"] for node in graph.find("all_reduce")] == ["PartialAttention"] * graph.spec.layers
    assert total in graph.find("all_reduce", 1)
    assert graph.type_text(total) == "f32[N, 3]"


def test_a_part_of_the_heads_decides_with_the_sums_of_all() -> None:
    """Two ranks' contexts, each by itself and one after the other: the sums of both decide as the whole does."""
    whole: tuple[Any, ...] = next(iter(OPS["drift"].samples(torch.Generator().manual_seed(3)))).args
    context, cache, full, *place, tau = whole
    heads = context.shape[1] // 2
    sums = sum(
        OPS["compare_rows"].reference(context[:, part].contiguous(), cache[:, :, part].clone(), *place)
        for part in (slice(heads), slice(heads, None))
    )
    found = OPS["drifted"].reference(sums, full, place[-1], tau)
    assert found.equal(OPS["drift"].reference(context, cache.clone(), full, *place, tau))
    assert 0 < int(found.sum()) < len(found)
    # KV heads that two ranks hold are counted twice, and alike.
    assert OPS["drifted"].reference(sums + sums, full, place[-1], tau).equal(found)


@pytest.mark.parametrize(
    ("name", "passes"), [("dyllm", [PartialAttention(), GateFFN()]), ("idle", [ReuseRows(idle=True)])], ids=str
)
def test_dumps_of_a_step_on_two_ranks(name: str, passes: list[Pass]) -> None:
    (tiny,) = models(None, "sdar")
    made = (PackRows(), FuseProjections(), CacheKV(), *passes)
    texts = [dump(rewritten(tiny.graph, ShardTensorParallel(2, rank=rank), *made)) for rank in (0, 1)]
    assert texts[0] == texts[1]
    check_golden(f"sdar_{name}_step_of_2_ranks.txt", texts[0])

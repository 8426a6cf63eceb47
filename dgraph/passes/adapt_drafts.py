"""AdaptDrafts: rows that are drafted read the weights of a low-rank adapter besides the model's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dgraph.errors import PassError
from dgraph.families.adapters import LowRank
from dgraph.ir.graph import Graph
from dgraph.ir.linears import Linear, linears_of
from dgraph.ir.stored_weights import Stored
from dgraph.ops import OPS
from dgraph.passes.base import Effect, Pass, Report
from dgraph.plans.papers import NEMOTRON, Paper
from dgraph.ranks.sharding import Part
from dgraph.types.shapes import InputSpec

DRAFTED = InputSpec("drafted", torch.bool, ("N",))
"""Flags of draft rows, which a later step verifies."""


@dataclass(frozen=True)
class AdaptDrafts(Pass):
    """Add the low-rank product of an adapter (`Graph.adapter`) to linear layers, on the rows of drafts alone.

        before  %9 = linear(%8, self_attn.o_proj.weight)                        f32[N, 64]
        after   %9 = linear(%8, self_attn.o_proj.weight)                        f32[N, 64]
                %10 = dgraph.low_rank(%9, %8, self_attn.o_proj.low_rank_down, self_attn.o_proj.low_rank_up, drafted, 4)

    One program drafts and verifies: the rows that verify keep every bit of what the model's own weights give, and these
    are in memory once. Projections are still fused; on a graph that is divided over ranks, each has its part of what
    is added to its part of a weight. Runs after PackRows, before anything else. A program that never drafts (a
    prefill) needs none of it.

    Approximate: drafts change. Committed tokens are predicted by causal rows and stay the same.

    Raises:
        PassError: an adapter for a weight by which no linear layer multiplies.
    """

    effect: ClassVar[Effect] = Effect.APPROXIMATE
    papers: ClassVar[tuple[Paper, ...]] = (NEMOTRON,)
    summary: ClassVar[str] = "adds a low-rank adapter to linear layers, on rows of drafts alone"
    signature: ClassVar[frozenset[str]] = frozenset({DRAFTED.name})
    changes_weights: ClassVar[bool] = True

    def identity(self) -> AdaptDrafts:
        """It changes drafts alone."""
        return self

    def run(self, graph: Graph, report: Report) -> None:
        adapter = graph.adapter
        if adapter is None:
            report.skip("the model has no adapter for drafts; load it with adapter=", graph.output)
            return
        if "cu_rows" not in graph.inputs:
            report.skip("rows are not packed, so that none can be flagged; run PackRows first", graph.output)
            return
        left = dict(adapter.weights)
        for linear in linears_of(graph.calls, "plain"):
            stored = linear.stored
            if stored is None or stored.name not in left:
                continue
            low_rank = left.pop(stored.name)
            _add(graph, linear, stored, low_rank, report.name)
            rank = low_rank.down.shape[0]
            report.did(f"{linear.node.meta['role']} of rank {rank} on drafted rows", linear.node.meta["layer"])
        if left:
            raise PassError(
                f"the adapter {adapter.name} is for {len(left)} weights by which no linear layer multiplies, "
                f"{', '.join(sorted(left)[:3])} among them. Load the adapter that was trained for this model."
            )


def _add(graph: Graph, linear: Linear, weight: Stored, low_rank: LowRank, by: str) -> None:
    down, up = (t.to(linear.weight.meta["val"].dtype) for t in (low_rank.down, low_rank.up))
    part = graph.divided.get(weight.name)
    if part is not None:  # a rank has some outputs, or makes a share of all of them of some inputs
        of_values = linear.weight.meta["val"].shape[part.dim] // weight.parts[0].meta["val"].shape[part.dim]
        mine = Part.of(part.kind, part.dim, [(of_values * begin, of_values * end) for begin, end in part.ranges])
        down, up = (down, mine.take(up)) if part.dim == 0 else (mine.take(down), up)
    base = weight.name.removesuffix(".weight")
    names = [
        graph.add_weight(f"{base}.low_rank_{name}", tensor.detach().to(graph.device))
        for name, tensor in (("down", down), ("up", up))
    ]
    node = linear.node
    args = (node, linear.x, *names, graph.add_input(DRAFTED), float(low_rank.scale))
    added = graph.call(OPS["low_rank"], args, before=node.next, by=by, like=node)
    graph.redirect(node, added, after=added)

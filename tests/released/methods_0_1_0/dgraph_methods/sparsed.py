"""SparseD (arXiv 2509.24014): after some full steps, each head keeps the tiles of keys that it saw most."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dgraph import ModelSpec, Phase, Recipe
from dgraph.errors import InputError
from dgraph.graph import Graph
from dgraph.nodes import args_of
from dgraph.passes import ChunkLMHead, Effect, FuseProjections, PackRows, Pass
from dgraph.passes.base import Report
from dgraph.plans.regions import All
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import FirstShare
from dgraph.shapes import InputSpec
from dgraph_methods.sparsed_op import OP

FULL = InputSpec("full", torch.bool, ("N",))
PROMPT_END = InputSpec("prompt_end", torch.int32, ("b",))


@dataclass(frozen=True)
class KeepTiles(Pass):
    """Attention among the rows of a step reads, per head, the tiles of keys that it attended to most in a full step.

    New inputs: `full`, `prompt_end`; per layer l, the state `pattern_l` bool[b, heads, tiles, tiles] of a response. The
    input `limit` goes: every row sees its whole sequence.

        before  %9 = dgraph.packed_attention(%6, %7, %8, positions, cu_rows, limit, 0.18)      f32[N, 8, 32]
        after   %9, %10 = dgraph_methods.tile_attention(%6, %7, %8, positions, cu_rows, full, prompt_end, pattern, ...)

    Exact for select = 1 but for the order of sums.

    Attributes:
        select: share of the tiles that are kept, in (0, 1], of the prompt's and of the response's alike.
        size: positions of a tile; published: 32 for short sequences, 128 for long ones.
    """

    select: float = 0.3
    size: int = 32

    effect = Effect.APPROXIMATE
    summary = "attention to the tiles of keys that each head attended to most in a full step (SparseD)"
    signature = frozenset({"full", "prompt_end", "pattern_*", "limit"})

    def __post_init__(self) -> None:
        if not 0 < self.select <= 1 or type(self.size) is not int or self.size < 1:
            raise InputError(f"sparsed: select must be in (0, 1] and size at least 1, got {self}.")

    def run(self, graph: Graph, report: Report) -> None:
        for node in graph.find("paged_attention"):
            report.skip("it reads a cache, but all rows of a sequence must be there; leave CacheKV out", node)
        for node in graph.find("packed_attention"):
            q, k, v, positions, cu_rows, _, scale = args_of(node)
            heads, tiles = int(q.meta["val"].shape[1]), -(-graph.spec.max_positions // self.size) + 1
            name = f"pattern_{node.meta['layer']}"
            pattern = graph.add_input(InputSpec(name, torch.bool, ("b", heads, tiles, tiles), reset="response"))
            about = graph.add_input(FULL), graph.add_input(PROMPT_END), pattern
            args = (q, k, v, positions, cu_rows, *about, float(self.select), self.size, scale)
            call = graph.call(OP, args, before=node, by=report.name)
            out, after = graph.parts(call, 2, report.name)
            graph.replace(node, out)
            graph.set_outputs({**graph.results(), name: after})
            report.did("packed_attention -> tile_attention", node.meta["layer"])
        graph.sweep()


def sparsed(
    spec: ModelSpec, skip: float = 0.2, select: float = 0.3, size: int = 32, max_num_logits: int = 2048
) -> Recipe:
    """SparseD: full attention in the first steps; later each head attends to the tiles that it attended to most then.

    The share of full steps is that of all steps, as published, under a rule that decodes as many tokens in each (policy
    "llada", "fixed_steps"). Under any other rule nobody knows the number of steps ahead: there it is the share of the
    response's tokens that full steps decode. The last of them chooses the tiles.

    Args:
        spec: the model; bidirectional.
        skip: share of full steps, in (0, 1].
        select, size: see `KeepTiles`.
        max_num_logits: rows whose logits exist at a time.
    """
    if spec.attention != "bidirectional":
        raise InputError(f"sparsed: {spec.family} is {spec.attention}; SparseD is a method of bidirectional models.")
    passes = (PackRows(), FuseProjections(), KeepTiles(select, size), ChunkLMHead(max_num_logits))
    return Recipe("sparsed", 1, (Phase("step", passes),), plan=RowPlan(All(), FirstShare(skip)))

"""Divide a captured graph over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dgraph.families.weights import Source
from dgraph.ir.graph import Graph
from dgraph.parallel import of
from dgraph.passes.manager import run_passes
from dgraph.passes.shard_tensor_parallel import ShardTensorParallel
from dgraph.ranks.groups import group_of
from dgraph.runtime.loop.rank_check import agree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def divide(
    graph: Graph,
    mesh: DeviceMesh,
    facts: Mapping[str, object],
    hints: Mapping[str, str] | None = None,
    weights: Source | None = None,
) -> Graph:
    """Make this rank's part of a captured graph.

    Args:
        graph: the whole graph.
        mesh: of one dimension; every rank of it calls this.
        facts: values by name that must be the same on all ranks.
        hints: of the model, see `dgraph.families.Model`.
        weights: where to read the weights, if those of the graph only stand for them.

    Raises:
        InputError: a mesh or a model that cannot be divided so.
        RanksDiffer: facts that are not the same.
    """
    sharding = of(mesh)
    group = group_of(sharding.group)
    agree(group, "optimize", facts)
    divided = graph.copy()
    how = sharding.world, sharding.group, "split", tuple((hints or {}).items())
    run_passes(divided, [ShardTensorParallel(*how, rank=group.rank, weights=weights)])
    return divided

"""Flags of rows by what they compute: how far a value has moved, and how much attention a key gets.

A score that is a sum over heads is added over ranks here, so that every rank decides alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from dgraph.errors import VerifyError
from dgraph.ir.some_rows import Place
from dgraph.ops import OPS
from dgraph.types.nodes import args_of
from dgraph.types.shapes import InputSpec

if TYPE_CHECKING:
    from dgraph.ir.graph import Graph

aten = torch.ops.aten

FULL = InputSpec("full", torch.bool, ("N",))
KEY_POSITIONS = InputSpec("key_positions", torch.int64, ("M",))
CU_KEYS = InputSpec("cu_keys", torch.int32, ("b+1",))


def drift(graph: Graph, value: Node, tau: float, name: str, by: str) -> Node:
    """See `Graph.drift`."""
    graph.add_input(FULL)
    full = graph.on_rows_of(FULL.name, value, by)
    cache, table = graph.cache_of(name, value)
    place, at = graph.place_of(value, table, by), value.next
    if graph.sharding is None:
        args = (value, cache, full, *place.nodes, tau)
        return graph.call(OPS["drift"], args, before=at, by=by, like=value)
    sums = graph.call(OPS["compare_rows"], (value, cache, *place.nodes), before=at, by=by, like=value)
    return drifted(graph, sums, full, place.cu_rows, tau, by)


def drifted(graph: Graph, sums: Node, full: Node, cu_rows: Node, tau: float, by: str) -> Node:
    """Flags of the rows that have changed, by a cosine of whose sums each rank has a share."""
    total = graph.over_ranks(sums, by)
    return graph.call(OPS["drifted"], (total, full, cu_rows, tau), before=total.next, by=by, like=sums)


def least_similar(
    graph: Graph, values: tuple[Node, ...], place: Place, share: float, adapt: Node | None, before: Node, by: str
) -> Node:
    """See `Graph.least_similar`."""
    (new, cache), scale = values[:2], values[2:]
    graph.add_input(FULL)
    full = graph.on_rows_of(FULL.name, new, by)

    def optional(*given: Node) -> tuple[Node | None, ...]:
        return (*(given or (None,) if scale else given), *scale)

    more = () if adapt is None else (adapt,)
    if graph.sharding is None:
        args = (new, cache, full, *place.nodes, share, *optional(*more))
        return graph.call(OPS["least_similar"], args, before=before, by=by)
    changes = [graph.call(aten.logical_or.default, (full, node), before=before, by=by) for node in more]
    sums = graph.call(OPS["compare_rows"], (new, cache, *place.nodes, *optional(*changes)), before=before, by=by)
    total = graph.over_ranks(sums, by)
    return graph.call(OPS["least_drifted"], (total, full, place.cu_rows, share, *more), before=before, by=by)


def key_mass(graph: Graph, attention: Node, rows: Node, heads: bool, cached: bool, by: str) -> Node:
    """See `Graph.key_mass`."""
    if attention.target is not OPS["paged_attention"].overload:
        raise VerifyError(f"{attention.name} reads no cache of keys; expected a paged_attention, after CacheKV.")
    q, k_cache, _, table, cu_rows, limit, scale, *stored = args_of(attention)
    k_scale = [node for node in stored[:1] if node is not None]
    names = (graph.add_input(KEY_POSITIONS), graph.add_input(CU_KEYS)) if cached else None
    positions, cu_keys = names or (graph.input("positions"), graph.input("cu_rows"))
    at = max(attention, rows).next
    k, *scales = (_read(graph, cache, (positions, table, cu_keys), at, by) for cache in (k_cache, *k_scale))
    args = (q, k, rows, positions, cu_rows, cu_keys, limit, scale, *scales)
    mass = graph.call(OPS["key_mass"], args, before=at, by=by, like=attention)
    whole = graph.whole or graph.spec
    mine = int(k.meta["val"].shape[1])
    world = 1 if graph.sharding is None else graph.sharding.world
    if heads:
        if mine * world != whole.kv_heads:
            raise VerifyError(
                f"the queries of one KV head are on {mine * world // whole.kv_heads} ranks, so none has its whole "
                f"mass; take it over all heads (heads=False), or fewer ranks."
            )
        return mass
    share = graph.call(aten.mean.dim, (mass, [1]), before=at, by=by, like=attention)
    if world > 1:
        share = graph.call(aten.div.Scalar, (share, world), before=at, by=by, like=attention)
    return graph.over_ranks(share, by)


def _read(graph: Graph, cache: Node, place: tuple[Node, ...], before: Node, by: str) -> Node:
    """Values of a cache as they are before a node, read once for several readers."""
    for node in graph.find("feature_read"):
        if args_of(node) == (cache, *place) and node < before:
            return node
    return graph.call(OPS["feature_read"], (cache, *place), before=before, by=by)

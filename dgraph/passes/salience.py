"""Shared parts of passes over salient rows: thresholds, lists of such rows, and computations moved to them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from dgraph.errors import InputError
from dgraph.ir.graph import Graph, Listed
from dgraph.ir.layers import of_weights
from dgraph.ir.linears import head_of, linear_of
from dgraph.ops import OPS, op_of
from dgraph.passes.cache_kv import page_table
from dgraph.types.nodes import args_of, op_name
from dgraph.types.shapes import OWN, Dim, InputSpec, of_window

aten = torch.ops.aten

FULL = InputSpec("full", torch.bool, ("N",))
CHANGED = InputSpec("changed", torch.bool, ("N",))
SALIENT = "salient"
"""The output that counts the salient rows of each layer."""
INPUTS = frozenset({FULL.name, SALIENT, "c_cache_*", page_table(OWN).name})
"""Names that either pass may add."""


def checked(tau: Any) -> float | tuple[float, ...]:
    """A threshold, or one per layer, as numbers; JSON gives a list.

    Raises:
        InputError: something else.
    """
    several = tuple(tau) if isinstance(tau, (list, tuple)) else (tau,)
    if not several or any(type(t) not in (int, float) or not math.isfinite(t) for t in several):
        raise InputError(f"tau must be a number, or one for each layer (the paper uses 0.99 to 0.9975), got {tau!r}.")
    return several if isinstance(tau, (list, tuple)) else tau


def tau_of(tau: float | tuple[float, ...], layer: int, layers: int) -> float:
    """The threshold of a layer.

    Raises:
        InputError: there is not one for each layer.
    """
    if not isinstance(tau, tuple):
        return float(tau)
    if len(tau) != layers:
        raise InputError(f"tau has {len(tau)} values, but the model {layers} layers; give one for each layer, or one.")
    return float(tau[layer])


def cache_of(graph: Graph, kind: str, value: Node) -> tuple[Node, Node]:
    """The input that keeps a value of each row, by layer, and the page table by which it is read.

    Each row reads what an earlier step kept for its own position. A bidirectional model may come back to any position.
    A block-causal one forwards a finished block once more, in full, and never again. So its cache has a window of one
    position, and a sequence has places there for as many as a step forwards.
    """
    window = OWN if graph.spec.attention == "block_causal" else 0
    kept = value.meta["val"]
    shape: tuple[Dim, ...] = (of_window("pages", window), "page", *map(int, kept.shape[1:]))
    cache = graph.add_input(InputSpec(f"{kind}_cache_{value.meta['layer']}", kept.dtype, shape))
    return cache, graph.add_input(page_table(window))


FINDERS = ("partial_attention", "drift", "drifted", "least_similar", "least_drifted")
"""Ops that find the salient rows of their layer."""
UPDATED = ("partial_attention", "partial_context")
"""Attentions that are updated by changed values; all take the place of their rows at the same arguments."""


def finder(graph: Graph, layer: int) -> Node | None:
    """The call that finds the salient rows of a layer; None if there is no such call."""
    return next((node for op in FINDERS for node in graph.find(op, layer)), None)


def tau_in(found: Node) -> float:
    """The threshold of the call that `finder` found."""
    op = op_of(found.target)
    assert op is not None
    (tau,) = op.values("tau", args_of(found))
    return float(tau)


def flags_of(found: Node) -> Node:
    """The salient rows as flags, from the call that `finder` found."""
    op = op_of(found.target)
    assert op is not None
    return found if op.name != "partial_attention" else next(u for u in found.users if args_of(u)[1] == 1)


def drifts(graph: Graph, layer: int) -> list[Node]:
    """Calls that compare the contexts of a layer with those of the step before."""
    return graph.find("drift", layer) + graph.find("drifted", layer)


def drift(
    graph: Graph, context: Node, cache: Node, full: Node, place: tuple[Node, Node, Node], tau: float, by: str
) -> Node:
    """Flags of the rows whose context differs from the cached one, computed right after the context.

    The place of the rows is positions, page table and offsets. If ranks have some heads each, the sums of the cosine
    are added over ranks.
    """
    at, like = context.next, context
    if graph.sharding is None:
        return graph.call(OPS["drift"], (context, cache, full, *place, tau), before=at, by=by, like=like)
    sums = graph.call(OPS["compare_rows"], (context, cache, *place), before=at, by=by, like=like)
    return drifted(graph, sums, full, place[2], tau, by)


def drifted(graph: Graph, sums: Node, full: Node, cu_rows: Node, tau: float, by: str) -> Node:
    """Flags of the rows that have changed, by a cosine of whose sums each rank has a share."""
    total = graph.over_ranks(sums, by)
    return graph.call(OPS["drifted"], (total, full, cu_rows, tau), before=total.next, by=by, like=sums)


def no_longer(graph: Graph, drift: Node, flags: Node) -> None:
    """Let readers of the result of `drift` read `flags`, and remove the calls that compare rows for it."""
    op = op_of(drift.target)
    assert op is not None
    made = [args_of(drift)[0]] if op.name == "drifted" else []
    if made and graph.sharding is not None:
        made.append(args_of(made[0])[0])
    graph.replace(drift, flags)
    for node in made:
        graph.fx.erase_node(node)


def least_similar(
    graph: Graph,
    values: tuple[Node, ...],
    full: Node,
    place: tuple[Node, Node, Node],
    share: float,
    adapt: Node | None,
    before: Node,
    by: str,
) -> Node:
    """Flags of the share of rows whose values are least similar to the cached ones, computed before a node.

    `values` are the new values, their cache, and the scales of a cache in float8. Sums are added over ranks as in
    `drift`.
    """
    (new, cache), scale = values[:2], values[2:]

    def optional(*given: Node) -> tuple[Node | None, ...]:
        return (*(given or (None,) if scale else given), *scale)

    more = () if adapt is None else (adapt,)
    if graph.sharding is None:
        args = (new, cache, full, *place, share, *optional(*more))
        return graph.call(OPS["least_similar"], args, before=before, by=by)
    changes = [graph.call(aten.logical_or.default, (full, node), before=before, by=by) for node in more]
    sums = graph.call(OPS["compare_rows"], (new, cache, *place, *optional(*changes)), before=before, by=by)
    total = graph.over_ranks(sums, by)
    return graph.call(OPS["least_drifted"], (total, full, place[2], share, *more), before=before, by=by)


def listed(graph: Graph, flags: Node, cu_rows: Node, before: Node, by: str, like: Node | None = None) -> Listed:
    """The list of flagged rows: the one that is there, or a new one before a node."""
    for user in flags.users:
        if (op := op_of(user.target)) is not None and op.name == "list_kept":
            return graph.listed(user, by)
    kept = graph.call(OPS["list_kept"], (flags, cu_rows), before=before, by=by, like=like)
    return graph.listed(kept, by)


def count_salient(graph: Graph, by: str) -> None:
    """Let the output `salient` i32[L] say how many rows are salient in each layer that finds them, in order."""

    def add(target: Any, *args: Any, **kwargs: Any) -> Node:
        return graph.call(target, args, kwargs, before=graph.output, by=by, like=graph.output)

    found = [flags_of(f) for layer in range(graph.spec.layers) if (f := finder(graph, layer)) is not None]
    sums = []
    for _, flags in itertools.groupby(found, graph.row_set):  # an eviction leaves later layers fewer rows
        stacked = add(aten.stack.default, list(flags))
        sums.append(add(aten.sum.dim_IntList, stacked, [1], dtype=torch.int32))
    counts = sums[0] if len(sums) == 1 else add(aten.cat.default, sums)
    graph.set_outputs({**graph.results(), SALIENT: counts})


def of_masked(graph: Graph, node: Node) -> bool:
    """True if a value is over the masked rows alone (OnlyMasked), which differ in every step and block."""
    head = head_of(graph)
    if isinstance(head, str) or head.kind != "head" or graph.row_set(head.x) != graph.row_set(node):
        return False
    return args_of(head.node)[8:9] == (True,)  # packed


def obstacle(nodes: Iterable[Node]) -> str | None:
    """Reason why these calls cannot run on some of their rows, or None."""
    for node in nodes:
        op = op_of(node.target)
        # A count counts all rows, so its op cannot run on some; values of weights have no rows.
        if op is not None and (not op.by_row or op.count is not None) and not of_weights(node):
            return f"{op_name(node.target)} is not known to act row by row"
    return None


def move(
    graph: Graph, nodes: Sequence[Node], instead: Mapping[Node, Node], rows: Listed, before: Node, by: str
) -> dict[Node, Node]:
    """The calls `nodes` again, in order, on the listed rows, before a node.

    Linear layers run on as many rows as are listed. A row after them is routed to no expert. The projection that
    decides which experts run stays as it is: its sums keep their order, or near ties would be decided anew.

    Args:
        instead: replacements of values that are gathered already.

    Returns:
        `instead` and the new node of each old one.
    """
    new = dict(instead)
    for node in nodes:
        args: tuple[Any, ...] = torch.fx.map_arg(args_of(node), lambda n: new.get(n, n))
        target: Any = node.target
        made_by = node.meta["by"]
        linear = linear_of(node)
        if linear is not None and linear.kind == "plain" and linear.by_vectors and not linear.routes:
            target, made_by = OPS["rows_linear"], by
            args = (*torch.fx.map_arg((linear.x, linear.weight, linear.bias), lambda n: new.get(n, n)), rows.cu_rows)
        elif target is OPS["experts"].overload:
            args = (args[0], nowhere(graph, args[1], rows.index, node, before, by), *args[2:])
        copy = graph.call(target, args, node.kwargs, before=before, by=made_by, like=node)
        copy.meta["source"] = node.meta.get("source", "")
        new[node] = copy
    return new


def nowhere(graph: Graph, choice: Node, index: Node, like: Node, before: Node, by: str) -> Node:
    """`choice`, with expert -1 for the rows after the listed ones."""
    unused = graph.call(aten.lt.Scalar, (index, 0), before=before, by=by, like=like)
    unused = graph.call(aten.unsqueeze.default, (unused, 1), before=before, by=by, like=like)
    return graph.call(aten.masked_fill.Scalar, (choice, unused, -1), before=before, by=by, like=like)

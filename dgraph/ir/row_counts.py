"""Counts of the rows that layers ran on: made from a flag for each row, and read back from the graph.

The output `salient` i32[L] has a number for each layer that counts, in order of layers. Which layers these are is
stated nowhere else: it follows from the calls that make the output.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from dgraph.errors import VerifyError
from dgraph.types.nodes import args_of

if TYPE_CHECKING:
    from dgraph.ir.graph import Graph

aten = torch.ops.aten

SALIENT = "salient"
"""The output that counts the rows of each layer."""


def count_rows(graph: Graph, flags: Iterable[Node], by: str) -> None:
    """Let the output `salient` also say how many of these flags are set, for the layer of each.

    A layer counts once: its flags take the place of those that it counted before.

    Raises:
        VerifyError: flags outside the layers, or no longer in the graph, or an output `salient` that `count_rows` did
            not make.
    """
    new, calls = list(flags), set(graph.calls)
    for flag in new:
        if flag not in calls or flag.meta["layer"] is None or flag.meta["val"].dtype != torch.bool:
            raise VerifyError(
                f"rows are counted by a flag for each in a call of a layer that is read, got {flag.name}."
            )
    by_layer = {**counted_rows(graph), **{flag.meta["layer"]: flag for flag in new}}
    if not by_layer:
        return
    former = [node for totals in _made(graph) for node in totals]
    total = graph.result(SALIENT) if SALIENT in graph.outputs else None

    def add(target: Any, *args: Any, **kwargs: Any) -> Node:
        return graph.call(target, args, kwargs, before=graph.output, by=by, like=graph.output)

    sums = []
    in_order = [by_layer[layer] for layer in sorted(by_layer)]
    for _, alike in itertools.groupby(in_order, graph.row_set):  # an eviction leaves later layers fewer rows
        sums.append(add(aten.sum.dim_IntList, add(aten.stack.default, list(alike)), [1], dtype=torch.int32))
    counts = sums[0] if len(sums) == 1 else add(aten.cat.default, sums)
    graph.set_outputs({**graph.results(), SALIENT: counts})
    for node in dict.fromkeys([total, *former]):
        if node is not None:
            graph.fx.erase_node(node)


def counted_rows(graph: Graph) -> dict[int, Node]:
    """The flags of the rows that are counted, by layer, in the order of the output `salient`; empty without it.

    Raises:
        VerifyError: `count_rows` did not make the output, so nothing says which layers it counts.
    """
    return {flag.meta["layer"]: flag for _, stack in _made(graph) for flag in args_of(stack)[0]}


def _made(graph: Graph) -> list[tuple[Node, Node]]:
    """The calls that make the output, in order: each sum, with the stack of flags that it sums."""
    if SALIENT not in graph.outputs:
        return []
    counts = graph.result(SALIENT)
    totals = args_of(counts)[0] if counts.target is aten.cat.default else [counts]
    stacks = [args_of(total)[0] if total.target is aten.sum.dim_IntList else total for total in totals]
    for stack in stacks:
        if not isinstance(stack, Node) or stack.target is not aten.stack.default:
            raise VerifyError(
                f"output {SALIENT} is made by {counts.name}, and nothing says which layers it counts. Make it by "
                f"graph.count_rows(flags, by=report.name), from the flags of each layer that runs on some of its rows."
            )
    return list(zip(totals, stacks, strict=True))

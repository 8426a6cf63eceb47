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
    """See `Graph.count_rows`."""
    new = list(flags)
    for flag in new:
        if flag.meta.get("layer") is None or flag.meta["val"].dtype != torch.bool or graph.row_set(flag) is None:
            raise VerifyError(
                f"{flag.name} is {graph.type_text(flag)} of layer {flag.meta.get('layer')}; expected flags of the rows "
                f"on which a layer runs, bool[N], from a call in it."
            )
    by_layer = {**counted_rows(graph), **{flag.meta["layer"]: flag for flag in new}}
    if not by_layer:
        return
    taken_off(graph)

    def add(target: Any, *args: Any, **kwargs: Any) -> Node:
        return graph.call(target, args, kwargs, before=graph.output, by=by, like=graph.output)

    sums = []
    in_order = [by_layer[layer] for layer in sorted(by_layer)]
    for _, alike in itertools.groupby(in_order, graph.row_set):  # an eviction leaves later layers fewer rows
        sums.append(add(aten.sum.dim_IntList, add(aten.stack.default, list(alike)), [1], dtype=torch.int32))
    counts = sums[0] if len(sums) == 1 else add(aten.cat.default, sums)
    graph.set_outputs({**graph.results(), SALIENT: counts})


def counted_rows(graph: Graph) -> dict[int, Node]:
    """The flags of the rows that are counted, by layer, in the order of the output `salient`; empty without it.

    Raises:
        VerifyError: `count_rows` did not make the output, so nothing says which layers it counts.
    """
    made = _made(graph)
    if made is None:
        raise VerifyError(
            f"output {SALIENT} is made by {graph.result(SALIENT).name}, and nothing says which layers it counts. Make "
            f"it by graph.count_rows(flags, by=report.name), from the flags of each layer that runs on some rows."
        )
    return {flag.meta["layer"]: flag for _, stack in made for flag in args_of(stack)[0]}


def taken_off(graph: Graph) -> list[Node]:
    """Take the counts off the outputs, if `count_rows` made them; returns the flags, for `count_rows` to count anew.

    Rows that are cut are so no loss to the counts: these are of all rows that a layer ran on.
    """
    made = _made(graph)
    if not made:
        return []
    flags = [flag for _, stack in made for flag in args_of(stack)[0]]
    total = graph.result(SALIENT)
    graph.set_outputs({name: node for name, node in graph.results().items() if name != SALIENT})
    for node in dict.fromkeys([total, *(node for pair in made for node in pair)]):
        graph.fx.erase_node(node)
    return flags


def _made(graph: Graph) -> list[tuple[Node, Node]] | None:
    """The calls that make the output, in order: each sum, with the stack of flags that it sums; None if others do."""
    if SALIENT not in graph.outputs:
        return []
    counts = graph.result(SALIENT)
    totals = args_of(counts)[0] if counts.target is aten.cat.default else [counts]
    stacks = [args_of(total)[0] if total.target is aten.sum.dim_IntList else total for total in totals]
    if any(not isinstance(stack, Node) or stack.target is not aten.stack.default for stack in stacks):
        return None
    return list(zip(totals, stacks, strict=True))

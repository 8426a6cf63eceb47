"""A product of several values taken apart, for passes that need one of the values on fewer rows than the others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch.fx import Node

from dgraph.ir.graph import Graph
from dgraph.ir.linears import Linear, linears_of, split_of
from dgraph.ir.stored_weights import rows_of
from dgraph.types.nodes import args_of

aten = torch.ops.aten


def take_apart(graph: Graph, mine: Sequence[Node], others: Sequence[Node], by: str) -> str | None:
    """Make several products out of one that two groups of calls read: neighbouring parts that the same group reads are
    one product each, over views of the weight.

        before  %2 = linear(%1, self_attn.qkv.weight)                      f32[N, 96]
                %3 = split_with_sizes(%2, [32, 32, 32], 1)
        after   %2 = linear(%1, self_attn.qkv[0:32].weight)                f32[N, 32]
                %3 = linear(%1, self_attn.qkv[32:96].weight)               f32[N, 64]
                %4 = split_with_sizes(%3, [32, 32], 1)

    Args:
        mine, others: the groups, as `Layer.makers` gives them.

    Returns:
        Why that is not possible; None where it is done, or where the groups have no product in common.
    """
    shared = [linear for linear in linears_of(mine, "plain") if linear.node in others]
    if not shared:
        return None
    whole = shared[-1]
    split = split_of(whole)
    if len(shared) > 1 or split is None:
        return (
            f"queries, keys and values share {whole.node.name}, which is not split into them at once: each must be "
            f"neighbouring outputs of one product"
        )
    if (stored := whole.stored) is None:
        return f"queries, keys and values share {whole.node.name}, whose weight or bias is computed"
    sizes = args_of(split)[1]
    ends = list(itertools.accumulate(sizes, initial=0))
    pieces = {args_of(part)[1]: part for part in split.users}
    readers = [(pieces.get(i) in mine, pieces.get(i) in others) for i in range(len(sizes))]
    if (True, True) in readers:
        return f"part {readers.index((True, True))} of {split.name} is read by both sides"
    runs = [list(run) for _, run in itertools.groupby(range(len(sizes)), key=readers.__getitem__)]
    for run in runs:
        if isinstance(reason := stored.cut(ends[run[0]], ends[run[-1] + 1]), str):
            return reason
    for run in runs:
        value = _part_of(graph, whole, sizes, run, by)
        values: Sequence[Node] = (value,)
        if len(run) > 1:
            own = [sizes[i] for i in run]
            again = graph.call(
                aten.split_with_sizes.default, (value, own, args_of(split)[2]), before=whole.node, by=by, like=split
            )
            values = graph.parts(again, len(run), by)
        for i, piece in zip(run, values, strict=True):
            if i in pieces:
                graph.replace(pieces[i], piece)
    graph.fx.erase_node(split)
    graph.fx.erase_node(whole.node)
    return None


def _part_of(graph: Graph, whole: Linear, sizes: Sequence[int], run: Sequence[int], by: str) -> Node:
    """A linear layer over a run of another one's outputs, whose weights are views."""
    start, end = sum(sizes[: run[0]]), sum(sizes[: run[-1] + 1])
    stored, node = whole.stored, whole.node
    assert stored is not None  # take_apart looked
    path, _, kind = stored.name.rpartition(".")
    head, _, last = path.rpartition(".")
    each = last.split("+")
    mine = "+".join(each[i] for i in run) if len(each) == len(sizes) else f"{last}[{start}:{end}]"
    values = [rows_of(graph, stored, start, end, ".".join(filter(None, (head, mine, kind))), node, by)]
    if whole.bias is not None:
        tensor = graph.tensors[whole.bias.meta["weight"]].detach()[start:end]
        name = ".".join(filter(None, (head, mine, whole.bias.meta["weight"].rpartition(".")[2])))
        values.append(graph.weight(name) if name in graph.tensors else graph.add_weight(name, tensor))
    linear = graph.call(aten.linear.default, (whole.x, *values), before=node, by=by)
    role = f"{node.meta['role'].rpartition('.')[0]}.{mine}".lstrip(".")
    for made in (linear, values[0]):
        if made.op == "call_function":
            made.meta["role"] = role
    linear.meta["source"] = node.meta.get("source", "")
    return linear

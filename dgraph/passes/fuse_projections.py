"""FuseProjections: one GEMM for projections that read the same value."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.families.quantised import WHOLE
from dgraph.ir.graph import Graph
from dgraph.ir.layers import layers_of
from dgraph.ir.linears import Linear, linears_of, split_of
from dgraph.ir.stored_weights import stored_of
from dgraph.passes.base import Effect, Pass, Report
from dgraph.plans.papers import OURS, Paper
from dgraph.types.nodes import args_of

aten = torch.ops.aten


@dataclass(frozen=True)
class FuseProjections(Pass):
    """Fuse linear layers over one input (q|k|v, gate|up) into one with the stacked weight, and split its result.

        before  %2 = linear(%1, self_attn.q_proj.weight)                   f32[N, 256]
                %3 = linear(%1, self_attn.k_proj.weight)                   f32[N, 128]
                %4 = linear(%1, self_attn.v_proj.weight)                   f32[N, 128]
        after   %2 = linear(%1, self_attn.q_proj+k_proj+v_proj.weight)     f32[N, 512]
                %3 = split_with_sizes(%2, [256, 128, 128], 1)

    Memory is not doubled: the model's own parameters become views of the stacked weight, with the values that they had.
    A second graph over the same model finds them adjacent and stacks nothing. The values, scales and zeros of quantised
    weights are stacked, each by itself. A projection that is split into parts already gives its parts to the new split.
    A layer whose feed-forward network is parallel to its attention, over one input, has a product for each.

    Reassociates: a GEMM of another width may sum in another order.
    """

    effect: ClassVar[Effect] = Effect.REASSOCIATES
    papers: ClassVar[tuple[Paper, ...]] = OURS
    summary: ClassVar[str] = "one GEMM for q|k|v and one for gate|up"
    changes_weights: ClassVar[bool] = True

    def run(self, graph: Graph, report: Report) -> None:
        groups: dict[tuple[Node, int | None, bool], list[Linear]] = {}
        attending = {node for layer in layers_of(graph) for node in layer.attends_to}
        for linear in linears_of(graph.calls, "plain"):
            layer = linear.node.meta["layer"]
            if layer is not None and not linear.routes:
                groups.setdefault((linear.x, layer, linear.node in attending), []).append(linear)
        for members in groups.values():
            if len(members) < 2:
                continue
            if reason := _obstacle(members):
                report.skip(reason, members[0].node)
                continue
            report.did(_fuse(graph, members, report.name), members[0].node.meta["layer"])
        graph.sweep()


def _obstacle(members: Sequence[Linear]) -> str | None:
    """Reason why a group cannot be fused, or None."""
    biases, weights = [m.bias for m in members], [stored_of(m.weight) for m in members]
    found = [weight for weight in weights if weight is not None]
    if len(found) < len(members):
        return "a projection's weight is computed, not an input"
    if any(len(part.users) > 1 for weight in found for part in {weight.node, *weight.parts}):
        return "a projection's weight is read elsewhere too"
    if any(bias is not None and "weight" not in bias.meta for bias in biases):
        return "a projection's bias is computed, not an input"
    if any(biases) and not all(biases):
        return "some of the projections have a bias and some have none"
    if len({m.weight.meta["val"].dtype for m in members}) > 1:
        return "the projections' weights differ in dtype"
    if len({weight.kind for weight in found}) > 1:
        return "the projections' weights are quantised differently"
    *upper, _ = members
    if any(m.shape[0] % found[0].block[0] for m in upper):  # WHOLE divides everything
        return f"a projection ends within a block of {found[0].block[0]} rows that have a scale in common"
    return None


def _fuse(graph: Graph, members: Sequence[Linear], by: str) -> str:
    first = members[0].node
    rows_of_each = [m.shape[0] for m in members]
    weights = [stored for m in members if (stored := stored_of(m.weight)) is not None]
    values, *scales = zip(*(w.parts for w in weights), strict=True)
    (high, wide), rows = weights[0].block, rows_of_each if weights[0].block[0] == WHOLE else None
    stacked = [_stacked_weight(graph, values), *(_stacked_weight(graph, parts, rows) for parts in scales)]
    args = [members[0].x, weights[0].read(graph, stacked, first, by, (1 if rows else high, wide))]
    if biases := [m.bias for m in members if m.bias is not None]:
        args.append(_stacked_weight(graph, biases))
    linear = graph.call(aten.linear.default, args, before=first, by=by)
    name = stacked[0].meta["weight"].removesuffix(".weight").rsplit(".", 1)[-1]
    role = f"{first.meta['role'].rpartition('.')[0]}.{name}".lstrip(".")
    for node in (linear, args[1]):
        if node.op == "call_function":
            node.meta["role"] = role
    dim = first.meta["val"].dim() - 1
    splits = [split_of(m) for m in members]
    sizes = [[m.shape[0]] if split is None else args_of(split)[1] for m, split in zip(members, splits, strict=True)]
    whole = graph.call(
        aten.split_with_sizes.default, (linear, [*itertools.chain(*sizes)], dim), before=first, by=by, like=linear
    )
    pieces = iter(graph.parts(whole, sum(map(len, sizes)), by))
    for member, split, own in zip(members, splits, sizes, strict=True):
        parts = list(itertools.islice(pieces, len(own)))
        if split is None:
            graph.replace(member.node, parts[0])
            continue
        for part in list(split.users):
            graph.replace(part, parts[args_of(part)[1]])
        graph.fx.erase_node(split)
        graph.fx.erase_node(member.node)
    return str(name)


def _stacked_weight(graph: Graph, parts: Sequence[Node], rows: Sequence[int] | None = None) -> Node:
    """One weight of several.

    Args:
        rows: number of rows of each part, if a part is one scale for all of its rows, which differs from part to part.
            The scale is then repeated for every row.
    """
    names = [p.meta["weight"] for p in parts]
    paths = [n.split(".") for n in names]
    shared = 0
    while all(p[shared] == paths[0][shared] for p in paths) and shared < min(map(len, paths)) - 2:
        shared += 1
    middle = "+".join(".".join(p[shared:-1]) for p in paths)
    tensors = [graph.tensors[n] for n in names]
    if rows is not None:
        tensors = [t.expand(n, -1).contiguous() for t, n in zip(tensors, rows, strict=True)]
    return graph.add_weight(".".join([*paths[0][:shared], middle, paths[0][-1]]), stack(tensors))


def stack(parts: Sequence[Tensor]) -> Tensor:
    """The parts as one tensor along dimension 0; the parts become views of it, unless they are adjacent already."""
    with torch.no_grad():
        head = parts[0]
        offset, adjacent = head.storage_offset(), True
        for part in parts:
            adjacent &= part.is_contiguous() and part.storage_offset() == offset
            adjacent &= part.untyped_storage().data_ptr() == head.untyped_storage().data_ptr()
            offset += part.numel()
        rows = sum(p.shape[0] for p in parts)
        if adjacent and head.device.type != "meta":
            return head.detach().as_strided((rows, *head.shape[1:]), head.stride(), head.storage_offset())
        whole = torch.cat([p.detach() for p in parts])
        for part, piece in zip(parts, whole.split([p.shape[0] for p in parts]), strict=True):
            part.data = piece
    return whole

"""The table of aten ops against a numeric oracle: what changes in a result where one entry of an argument does."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from dgraph.errors import InputError
from dgraph.ir import aten_kinds as kinds
from dgraph.ir.aten_rules import RULES, Rule, axes_of, is_linear, register, rule_of
from dgraph.types.nodes import op_name

aten = torch.ops.aten
DRAW = torch.Generator().manual_seed(3)


def f(*shape: int) -> Tensor:
    """Distinct numbers, positive, so that roots and logarithms are numbers."""
    return torch.rand(shape, generator=DRAW) + 0.5


def i(*shape: int) -> Tensor:
    """Numbers that look up in a dimension of three or more."""
    return torch.randint(0, 3, shape, generator=DRAW)


def flags(*shape: int) -> Tensor:
    return torch.rand(shape, generator=DRAW) < 0.5


@dataclass
class Sample:
    """A call; tensors among the arguments become inputs."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        shapes = [tuple(a.shape) if isinstance(a, Tensor) else a for a in self.args]
        return f"{self.target}{shapes}"


def s(target: Any, *args: Any, **kwargs: Any) -> Sample:
    return Sample(target, args, kwargs)


X = 3, 4, 5
SAMPLES = [
    s(aten.cosine_similarity.default, f(*X), f(4, 5), -1),
    s(aten.cosine_similarity.default, f(3, 4), f(3, 4)),
    s(aten.add.Tensor, f(*X), f(4, 1)),
    s(aten.sub.Tensor, f(*X), f(5)),
    s(aten.subtract.Tensor, f(*X), f(5)),
    s(aten.mul.Tensor, f(3, 1), f(5)),
    s(aten.multiply.Tensor, f(*X), 2.0),
    s(aten.div.Tensor, f(*X), f(*X)),
    s(aten.divide.Tensor, f(*X), f(3, 1, 1)),
    s(aten.true_divide.Tensor, f(*X), 3),
    s(aten.neg.default, f(*X)),
    s(aten.negative.default, f(*X)),
    s(aten.absolute.default, f(*X)),
    s(aten.fix.default, f(*X) * 9),
    s(aten.floor_divide.default, f(*X) * 9, f(5)),
    s(aten.hardswish.default, f(*X)),
    s(aten.log_sigmoid.default, f(*X)),
    s(aten.isclose.default, f(*X), f(5), 0.3),
    s(aten.__and__.Tensor, i(*X), i(5)),
    s(aten.__or__.Tensor, i(*X), i(5)),
    s(aten.__xor__.Tensor, i(*X), i(5)),
    s(aten.complex.default, f(*X), f(*X)),
    s(aten.polar.default, f(*X), f(*X)),
    s(aten.greater.Tensor, f(*X), f(5)),
    s(aten.greater_equal.Tensor, f(*X), f(5)),
    s(aten.less.Tensor, f(*X), f(5)),
    s(aten.less_equal.Tensor, f(*X), f(5)),
    s(aten.not_equal.Tensor, i(*X), i(5)),
    s(aten.where.self, flags(3, 1, 5), f(*X), f(5)),
    s(aten.where.ScalarOther, flags(3, 1, 5), f(*X), 0.0),
    s(aten.where.default, flags(3, 5)),
    s(aten.rsub.Tensor, f(*X), f(4, 1)),
    s(aten.real.default, f(*X)),
    s(aten.special_ndtr.default, f(*X)),
    s(aten.arccos.default, f(*X) - 0.5),
    s(aten.arccosh.default, f(*X) + 1.0),
    s(aten.arcsin.default, f(*X) - 0.5),
    s(aten.arcsinh.default, f(*X)),
    s(aten.arctan.default, f(*X)),
    s(aten.arctan2.default, f(*X), f(5)),
    s(aten.arctanh.default, f(*X) - 0.5),
    s(aten.masked_fill.Scalar, f(*X), flags(5), 0.0),
    s(aten.lerp.Tensor, f(*X), f(5), f(4, 1)),
    s(aten.clone.default, f(*X)),
    s(aten.contiguous.default, f(*X)),
    s(aten.detach.default, f(*X)),
    s(aten.alias.default, f(*X)),
    s(aten.to.dtype, f(*X), torch.float64),
    s(aten._to_copy.default, f(*X), dtype=torch.float64),
    s(aten.type_as.default, f(*X), f(2).double()),
    s(aten.one_hot.default, i(3, 4), 3),
    s(aten.dropout.default, f(*X), 0.5, False),
    s(aten.bucketize.Tensor, f(*X), torch.tensor([0.6, 0.9, 1.2])),
    s(aten.searchsorted.Tensor, torch.tensor([0.6, 0.9, 1.2]), f(*X)),
    s(aten.prelu.default, f(*X) - 1.0, f(4)),
    s(aten.isin.Tensor_Tensor, i(*X), torch.tensor([1])),
    s(aten.zeros_like.default, f(*X)),
    s(aten.ones_like.default, f(*X)),
    s(aten.full_like.default, f(*X), 3.0),
    s(aten.zeros.default, [3, 4]),
    s(aten.ones.default, [3, 4]),
    s(aten.full.default, [3, 4], 2.0),
    s(aten.new_zeros.default, f(*X), [3, 4]),
    s(aten.new_ones.default, f(*X), [3, 4]),
    s(aten.new_full.default, f(*X), [3, 4], 2.0),
    s(aten.linear.default, f(3, 4, 5), f(6, 5), f(6)),
    s(aten.linear.default, f(3, 5), f(6, 5)),
    s(aten.mm.default, f(3, 4), f(4, 5)),
    s(aten.bmm.default, f(2, 3, 4), f(2, 4, 5)),
    s(aten.matmul.default, f(3, 4), f(4, 5)),
    s(aten.matmul.default, f(4), f(4, 5)),
    s(aten.matmul.default, f(3, 4), f(4)),
    s(aten.matmul.default, f(4), f(4)),
    s(aten.matmul.default, f(2, 3, 4), f(4, 5)),
    s(aten.matmul.default, f(3, 4), f(2, 4, 5)),
    s(aten.matmul.default, f(4), f(2, 4, 5)),
    s(aten.matmul.default, f(6, 1, 3, 4), f(2, 4, 5)),
    s(aten.mv.default, f(3, 4), f(4)),
    s(aten.dot.default, f(4), f(4)),
    s(aten.addmm.default, f(5), f(3, 4), f(4, 5)),
    s(aten.addmm.default, f(3, 5), f(3, 4), f(4, 5)),
    s(aten.addmv.default, f(3), f(3, 4), f(4)),
    s(aten.baddbmm.default, f(2, 3, 5), f(2, 3, 4), f(2, 4, 5)),
    s(aten.outer.default, f(3), f(4)),
    s(aten.einsum.default, "nhd,hde->nhe", [f(3, 2, 4), f(2, 4, 5)]),
    s(aten.einsum.default, "nd,md->nm", [f(3, 4), f(5, 4)]),
    s(aten.einsum.default, "nn->n", [f(3, 3)]),
    s(aten.einsum.default, "...d,de->...e", [f(3, 4), f(4, 5)]),
    s(aten.einsum.default, "... d, d e -> e ...", [f(2, 3, 4), f(4, 5)]),
    s(aten.einsum.default, "...d,...d->...d", [f(2, 3, 4), f(3, 4)]),
    s(aten.einsum.default, "nd,de", [f(3, 4), f(4, 5)]),
    s(aten.scaled_dot_product_attention.default, f(2, 3, 4, 5), f(2, 3, 6, 5), f(2, 3, 6, 7)),
    s(aten.scaled_dot_product_attention.default, f(2, 4, 3, 5), f(2, 2, 6, 5), f(2, 2, 6, 7), enable_gqa=True),
    s(aten.scaled_dot_product_attention.default, f(2, 3, 4, 5), f(2, 3, 6, 5), f(2, 3, 6, 5), f(3, 4, 6)),
    s(aten.scaled_dot_product_attention.default, f(2, 6, 5), f(2, 6, 5), f(2, 6, 5), is_causal=True),
    s(aten.conv1d.default, f(3, 2, 6), f(4, 2, 3), f(4)),
    s(aten.conv1d.default, f(2, 6), f(4, 2, 3)),
    s(aten.conv2d.default, f(3, 2, 6, 6), f(4, 2, 3, 3)),
    s(aten.convolution.default, f(3, 2, 6), f(4, 2, 3), f(4), [1], [0], [1], False, [0], 1),
    s(aten.softmax.int, f(*X), 1),
    s(aten._softmax.default, f(*X), -1, False),
    s(aten.log_softmax.int, f(*X), -1),
    s(aten._log_softmax.default, f(*X), 0, False),
    s(aten.cumsum.default, f(*X), 0),
    s(aten.cumprod.default, f(*X), 2),
    s(aten.cummax.default, f(*X), 1),
    s(aten.cummin.default, f(*X), 1),
    s(aten.logcumsumexp.default, f(*X), -2),
    s(aten.sort.default, f(*X)),
    s(aten.sort.stable, f(*X), stable=True, dim=0),
    s(aten.argsort.default, f(*X), 1),
    s(aten.topk.default, f(*X), 2, 1),
    s(aten.topk.default, f(*X), 2),
    s(aten.glu.default, f(3, 4, 6)),
    s(aten.flip.default, f(*X), [0, -1]),
    s(aten.roll.default, f(*X), [1], [1]),
    s(aten.roll.default, f(*X), [1]),
    s(aten.layer_norm.default, f(*X), [5], f(5), f(5)),
    s(aten.layer_norm.default, f(*X), [4, 5]),
    s(aten.native_layer_norm.default, f(*X), [5], f(5), None, 1e-5),
    s(aten.rms_norm.default, f(*X), [5], f(5), 1e-6),
    s(aten._fused_rms_norm.default, f(*X), [5], f(5), 1e-6),
    s(aten.group_norm.default, f(3, 4, 5), 2, f(4), f(4)),
    s(aten.native_group_norm.default, f(3, 4, 5), None, None, 3, 4, 5, 2, 1e-5),
    s(aten.tril.default, f(*X)),
    s(aten.triu.default, f(*X)),
    s(aten.sum.default, f(*X)),
    s(aten.sum.dim_IntList, f(*X), [1, -1]),
    s(aten.sum.dim_IntList, f(*X), [], True),
    s(aten.mean.default, f(*X)),
    s(aten.mean.dim, f(*X), [0], True),
    s(aten.amax.default, f(*X), [1]),
    s(aten.amin.default, f(*X), [-1], True),
    s(aten.amin.default, f(*X)),
    s(aten.max.default, f(*X)),
    s(aten.max.dim, f(*X), 1),
    s(aten.max.other, f(*X), f(5)),
    s(aten.min.dim, f(*X), 0, True),
    s(aten.argmax.default, f(*X), 1),
    s(aten.argmax.default, f(*X)),
    s(aten.argmin.default, f(*X), -1, True),
    s(aten.all.dim, flags(*X), 1),
    s(aten.any.dims, flags(*X), [0, 2]),
    s(aten.any.default, flags(*X)),
    s(aten.prod.dim_int, f(*X), 2),
    s(aten.var.dim, f(*X), [1]),
    s(aten.var.correction, f(*X), None),
    s(aten.std.correction, f(*X), [2], correction=1),
    s(aten.var_mean.correction, f(*X), [2]),
    s(aten.std_mean.correction, f(*X), [0]),
    s(aten.logsumexp.default, f(*X), [1]),
    s(aten.median.dim, f(*X), 1),
    s(aten.kthvalue.default, f(*X), 2, 1),
    s(aten.mode.default, i(*X), 1),
    s(aten.norm.ScalarOpt_dim, f(*X), 2, [1]),
    s(aten.norm.Scalar, f(*X)),
    s(aten.linalg_vector_norm.default, f(*X), 2, [-1], True),
    s(aten.count_nonzero.dim_IntList, i(*X), [1]),
    s(aten.reshape.default, f(3, 4, 6), [3, -1]),
    s(aten.reshape.default, f(3, 4, 6), [6, 2, 6]),
    s(aten.reshape.default, f(6, 4), [2, -1, 4]),
    s(aten.reshape.default, f(3, 4), [1, 3, 1, 2, 2]),
    s(aten.reshape.default, f(3, 1), [1, 3]),
    s(aten.view.default, f(3, 4), [-1, 2, 2]),
    s(aten.view.dtype, torch.ones(3, 4, dtype=torch.int32), torch.int8),
    s(aten._unsafe_view.default, f(3, 4), [12]),
    s(aten.flatten.using_ints, f(*X), 1, 2),
    s(aten.unflatten.int, f(3, 4, 6), 2, [2, 3]),
    s(aten.squeeze.dim, f(3, 1, 5), 1),
    s(aten.squeeze.default, f(3, 1, 5)),
    s(aten.unsqueeze.default, f(3, 5), 1),
    s(aten.view_as_complex.default, f(3, 4, 2)),
    s(aten.view_as_real.default, torch.complex(f(3, 4), f(3, 4))),
    s(aten.transpose.int, f(*X), 0, -1),
    s(aten.permute.default, f(*X), [2, 0, 1]),
    s(aten.t.default, f(3, 4)),
    s(aten.swapaxes.default, f(*X), 0, 1),
    s(aten.movedim.int, f(*X), 0, -1),
    s(aten.movedim.intlist, f(*X), [0, 1], [2, 0]),
    s(aten.numpy_T.default, f(3, 4)),
    s(aten.numpy_T.default, f(*X)),
    s(aten.mT.default, f(*X)),
    s(aten.expand.default, f(3, 1, 5), [2, -1, 4, 5]),
    s(aten.broadcast_to.default, f(1, 5), [3, 5]),
    s(aten.expand_as.default, f(3, 1), f(3, 4)),
    s(aten.repeat.default, f(3, 4), [2, 1, 3]),
    s(aten.repeat.default, f(1, 4), [3, 1]),
    s(aten.tile.default, f(3, 4), [2]),
    s(aten.repeat_interleave.self_int, f(3, 4), 2, 1),
    s(aten.repeat_interleave.self_int, f(3, 4), 2),
    s(aten.cat.default, [f(3, 4), f(3, 2)], 1),
    s(aten.cat.default, [f(3, 4), f(2, 4)]),
    s(aten.concat.default, [f(3, 4), f(3, 2)], -1),
    s(aten.concatenate.default, [f(3, 4), f(3, 2)], -1),
    s(aten.stack.default, [f(3, 4), f(3, 4)], 1),
    s(aten.stack.default, [f(3, 4), f(3, 4)], -1),
    s(aten.stack.default, [f(3), f(3)]),
    s(aten.split.Tensor, f(3, 6), 2, 1),
    s(aten.split_with_sizes.default, f(3, 6), [1, 5], 1),
    s(aten.chunk.default, f(4, 6), 2),
    s(aten.unsafe_split.Tensor, f(3, 6), 2, 1),
    s(aten.unsafe_chunk.default, f(3, 6), 2, 1),
    s(aten.slice.Tensor, f(3, 6), 1, 2, 5),
    s(aten.slice.Tensor, f(3, 6), 0, 1),
    s(aten.slice.Tensor, f(3, 6), 0, 0, 9),
    s(aten.narrow.default, f(3, 6), 1, 2, 3),
    s(aten.select.int, f(*X), 1, -1),
    s(aten.unbind.int, f(*X), 1),
    s(aten.unfold.default, f(3, 6), 1, 2, 2),
    s(aten.constant_pad_nd.default, f(*X), [0, 0, 1, 1]),
    s(aten.pad.default, f(*X), [0, 0, 0, 0, 1, 0]),
    s(aten.embedding.default, f(3, 5), i(3, 4)),
    s(aten.index_select.default, f(4, 5), 0, i(3)),
    s(aten.index_select.default, f(4, 5), 1, i(3)),
    s(aten.gather.default, f(3, 4), 1, i(3, 2)),
    s(aten.gather.default, f(3, 4), 0, i(2, 4)),
    s(aten.gather.default, f(3, 4), 1, i(2, 2)),
    s(aten.scatter.src, f(3, 4), 1, torch.tensor([[0, 1], [2, 3], [1, 0]]), f(3, 2)),
    s(aten.scatter.value, f(3, 4), 1, i(2, 2), 7.0),
    s(aten.scatter.value, f(3, 4), 0, i(2, 4), 7.0),
    s(aten.scatter_add.default, f(3, 4), 1, i(3, 2), f(3, 2)),
    s(aten.scatter_reduce.two, f(3, 4), 1, i(3, 2), f(3, 2), "amax"),
    s(aten.index.Tensor, f(4, 5), [i(3, 2)]),
    s(aten.index.Tensor, f(3, 4, 5), [None, i(2)]),
    s(aten.index.Tensor, f(3, 4, 5), [i(2), i(2)]),
    s(aten.index.Tensor, f(3, 4, 5), [i(2, 1), i(3)]),
    s(aten.index.Tensor, f(3, 4, 5), [i(2), None, i(2)]),
    s(aten.index.Tensor, f(3, 4, 5), [None, i(6, 2), i(2)]),
]  # fmt: skip


def node_of(sample: Sample) -> tuple[Node, dict[Node, Tensor]]:
    """The call as a node, and the values of its inputs."""
    graph, given = Graph(), dict[Node, Tensor]()

    def placed(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [placed(part) for part in value]
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder(f"x{len(given)}")
        node.meta["val"] = given[node] = value
        return node

    args = tuple(placed(value) for value in sample.args)
    node = graph.call_function(sample.target, args, sample.kwargs)
    node.meta["val"] = (
        computed(node, given)[0] if not isinstance(outcome(node, given), (tuple, list)) else outcome(node, given)
    )
    return node, given


def outcome(node: Node, given: dict[Node, Tensor]) -> Any:
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), given.__getitem__)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def computed(node: Node, given: dict[Node, Tensor]) -> list[Tensor]:
    result = outcome(node, given)
    return [part for part in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(part, Tensor)]


def other(value: Tensor) -> Tensor:
    if value.dtype == torch.bool:
        return ~value
    return (value + 1) % 3 if not value.is_floating_point() and not value.is_complex() else value * -1.7 + 0.3


def changed(before: Tensor, after: Tensor, dim: int) -> set[int]:
    """Entries along a dimension in which two results differ."""
    same = torch.isclose(before, after, rtol=0, atol=0, equal_nan=True)
    rest = [d for d in range(before.dim()) if d != dim]
    return set((~same).sum(rest).nonzero().flatten().tolist()) if rest else set((~same).nonzero().flatten().tolist())


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_an_entry_of_an_argument_changes_the_entry_of_a_result_that_the_table_says(sample: Sample) -> None:
    node, given = node_of(sample)
    axes, before = axes_of(node), computed(node, given)
    assert axes is not None
    assert {p.node for p in axes.passages} <= {*given}
    for passage in axes.passages:
        value = given[passage.node]
        assert len(passage.dims) == value.dim()
        images = [d for d in passage.dims if d is not None]
        assert len({*images}) == len(images), "two dimensions become one"
        for dim, to in enumerate(passage.dims):
            if to is None:
                continue
            for entry in range(value.shape[dim]):
                touched = value.clone()
                touched.select(dim, entry).copy_(other(value.select(dim, entry)))
                after = computed(node, given | {passage.node: touched})
                for old, new in zip(before, after, strict=True):
                    broadcast = value.shape[dim] == 1
                    allowed = {*range(old.shape[to])} if broadcast else {entry}
                    assert changed(old, new, to) <= allowed, (passage.name, dim, entry)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_the_table_refuses_no_dimension_that_passes(sample: Sample) -> None:
    """A dimension that is worked along is apart in no dimension of the results, as far as these numbers show.

    Of weights of norms and convolutions, and of a few ops, the table says less than it could.
    """
    node, given = node_of(sample)
    axes, before = axes_of(node), computed(node, given)
    assert axes is not None
    less = op_name(sample.target) in ("tril", "triu", "einsum", "view", "group_norm", "native_group_norm")
    less = less or op_name(sample.target).startswith("scatter")
    for passage in (p for p in axes.passages if p.name not in ("weight", "bias") and not less):
        value = given[passage.node]
        for dim in (d for d, to in enumerate(passage.dims) if to is None and value.shape[d] > 1):
            touched = [value.clone() for _ in range(value.shape[dim])]
            for entry, copy in enumerate(touched):
                copy.select(dim, entry).copy_(other(value.select(dim, entry)))
            after = [computed(node, given | {passage.node: copy}) for copy in touched]
            for to in range(before[0].dim()):
                if before[0].shape[to] == value.shape[dim] and to not in passage.dims:
                    apart = all(
                        changed(old, new, to) == {entry}
                        for entry, results in enumerate(after)
                        for old, new in zip(before, results, strict=True)
                    )
                    assert not apart, (passage.name, dim, to)


SCATTERED = [sample for sample in SAMPLES if op_name(sample.target).startswith("scatter")]


@pytest.mark.parametrize("sample", SCATTERED, ids=str)
def test_where_values_are_scattered_depends_on_no_dimension_that_passes(sample: Sample) -> None:
    """Along a dimension that passes, entries may stand in another order: so do those of the result, and no others."""
    node, given = node_of(sample)
    axes, before = axes_of(node), computed(node, given)
    assert axes is not None
    passing = {p.dims[0] for p in axes.passages}
    assert passing <= {0, None}
    for dim in passing - {None}:
        turned = computed(node, {n: value.flip(dim) for n, value in given.items()})
        assert all(torch.equal(a.flip(dim), b) for a, b in zip(before, turned, strict=True))
    assert (sample.args[2].shape[0] == 3 and sample.args[1] == 1) == (passing == {0})


def repeats(sample: Sample) -> bool:
    axes = axes_of(node_of(sample)[0])
    return axes is not None and bool(axes.repeated)


@pytest.mark.parametrize("sample", [sample for sample in SAMPLES if repeats(sample)], ids=str)
def test_entries_that_come_from_no_argument_are_alike_where_the_table_says_so(sample: Sample) -> None:
    node, given = node_of(sample)
    axes = axes_of(node)
    assert axes is not None
    for dim in axes.repeated - {d for p in axes.passages for d in p.dims if given[p.node].shape[p.dims.index(d)] > 1}:
        for result in computed(node, given):
            assert all(torch.equal(result.select(dim, 0), part) for part in result.unbind(dim))


def test_values_that_the_table_says_are_unread_change_nothing() -> None:
    for sample in SAMPLES:
        node, given = node_of(sample)
        axes, before = axes_of(node), computed(node, given)
        assert axes is not None
        for unread in {*given} - {p.node for p in axes.passages}:
            after = computed(node, given | {unread: other(given[unread])})
            assert all(map(torch.equal, before, after)), sample


def test_every_entry_has_a_sample() -> None:
    apart = {"getitem", "sym_size"}  # of a tuple; of a symbolic size
    assert {op_name(sample.target) for sample in SAMPLES} >= RULES.keys() - apart


@pytest.mark.parametrize("sample", [s for s in SAMPLES if all(map(torch.is_tensor, s.args[:1]))], ids=str)
def test_what_is_linear_makes_of_a_sum_the_sum(sample: Sample) -> None:
    node, given = node_of(sample)
    if not is_linear(node):
        return
    more = {n: torch.rand(v.shape, generator=DRAW).to(v.dtype) for n, v in given.items()}
    if any(not v.is_floating_point() for v in given.values()):
        return
    total = computed(node, {n: given[n] + more[n] for n in given})
    for whole, one, two in zip(total, computed(node, given), computed(node, more), strict=True):
        torch.testing.assert_close(whole, one + two)


def test_a_product_and_a_rounded_quotient_are_not_linear() -> None:
    for sample in (
        s(aten.mul.Tensor, f(3), f(3)),
        s(aten.div.Tensor_mode, f(3), 2.0, rounding_mode="floor"),
        s(aten.relu.default, f(3)),
        s(aten.add.Tensor, f(3), 1.0),
    ):
        assert not is_linear(node_of(sample)[0]), sample
    assert is_linear(node_of(s(aten.mul.Tensor, f(3), 2.0))[0])


def test_a_part_of_a_tuple_keeps_its_dimensions() -> None:
    node, _ = node_of(s(aten.split.Tensor, f(3, 6), 2, 1))
    part = node.graph.call_function(operator.getitem, (node, 1))
    part.meta["val"] = node.meta["val"][1]
    axes = axes_of(part)
    assert axes is not None
    assert [p.dims for p in axes.passages] == [(0, 1)]


RANDOM = (aten.rand_like.default, aten.bernoulli.default, aten.native_dropout.default, aten.randn.default)


@pytest.mark.parametrize("target", [*RANDOM, aten.arange.default, aten.empty_like.default, aten.nonzero.default])
def test_draws_numbers_of_rows_and_memory_as_it_is_are_in_no_table(target: Any) -> None:
    assert rule_of(target) is None


def test_an_op_is_added_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgraph.ir.aten_rules.RULES", dict(RULES))
    assert rule_of(aten.renorm.default) is None
    rule = Rule(kinds.along("dim"), dims=("dim",))
    register("renorm", rule)
    assert rule_of(aten.renorm.default) is rule
    with pytest.raises(InputError, match=r"op 'renorm' has an entry in dgraph\.ir\.aten_rules"):
        register("renorm", rule)

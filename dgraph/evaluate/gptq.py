"""Low-bit weights whose rounding errors compensate each other (GPTQ, Frantar et al., 2022, arXiv 2210.17323).

The columns of a weight are rounded in their order. The error of each in the outputs is fed forward to the columns that
are still to be rounded. Let H = X^T X be the Hessian of the inputs X, and U^T U = H^-1 with U upper triangular. Then
column j changes by -error_i U[i, j] / U[i, i]. A group of columns gets its scale when it is reached.

Neither torchao nor llm-compressor has a function that takes a weight and a Hessian alone. The former needs kernels of a
GPU (fbgemm), the latter a module of its own kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.errors import InputError, warn
from dgraph.evaluate.inputs import Inputs
from dgraph.families.quantised import (
    KINDS,
    WHOLE,
    Format,
    Kind,
    QuantisedWeight,
    numbers_of,
    quantise,
    scales_of,
    stored_numbers,
)
from dgraph.ir.graph import Graph
from dgraph.ir.linears import linears_of
from dgraph.ir.stored_weights import stored_of
from dgraph.ops import OPS
from dgraph.ops.experts.experts import chosen, gated
from dgraph.types.nodes import args_of

DAMPING = 0.01
"""Share of a Hessian's mean diagonal that is added to its diagonal."""
TOGETHER = 128
"""Columns whose errors are fed forward to the columns after them in one product."""


def gptq_for(inputs: Inputs, progress: Callable[[int, int], None] | None = None) -> dict[str, QuantisedWeight]:
    """The weights with which `dgraph.save_quantised(model, out, weights, rounded=...)` writes a checkpoint, by name.

    Layers are rounded one after the other, on inputs that come from the quantised layers before. An expert's inputs are
    the rows that reach it. An expert that no row reaches is rounded to the nearest, and a warning says how many are. A
    weight that also serves as an embedding is left out, and so is rounded to the nearest, too. While a layer is
    rounded, it has one Hessian in fp32 for all weights that read the same inputs, and two for each expert.

    Args:
        inputs: inputs of the model, whose graph takes the quantised weights.
        progress: called with (weights done, weights in all); a stack of experts' weights counts as one.

    Raises:
        InputError: a format whose scales several rows of a weight share.
    """
    for name, format in inputs.formats.items():
        check_format(name, format)
    graph, found = inputs.graph, dict[str, QuantisedWeight]()
    products = [product for product in _products(graph) if product.name in inputs.formats]
    for _, some in groupby(products, lambda product: product.node.meta["layer"]):
        mine = list(some)
        hessians = _hessians(inputs, mine)
        for product in mine:
            name, weight, hessian = product.name, graph.tensors[product.name], hessians[product.reads]
            if weight.dim() == 2:
                found[name] = rounded(weight, hessian, inputs.formats[name])
            else:
                each = [rounded(w, h, inputs.formats[name]) for w, h in zip(weight, hessian, strict=True)]
                found[name] = _stacked(each)
                if missed := sum(not bool(h.diagonal().any()) for h in hessian):
                    warn(
                        f"no row of the prompts reaches {missed} of {len(weight)} experts of {name}, which are rounded "
                        f"to the nearest; give more prompts, or longer ones."
                    )
            graph.tensors[name] = found[name].dequantised(weight.dtype)
            if progress is not None:
                progress(len(found), len(products))
    return found


@dataclass(frozen=True)
class Product:
    """A product by a weight of the model, or by those of experts.

    Attributes:
        name: name of the weight.
        node: the call.
        reads: key of the rows that it multiplies: (node of the rows, 0), or (call of experts, index of the argument
            that has the weights).
    """

    name: str
    node: Node
    reads: tuple[Node, int]


GATE_UP, DOWN = 3, 4
"""Indices of the weights among the arguments of dgraph::experts."""


def _products(graph: Graph) -> Iterator[Product]:
    for node in graph.calls:
        for linear in linears_of([node], "plain"):
            if linear.stored is not None and len(linear.weight.users) == 1:  # with more users it is also an embedding
                yield Product(linear.stored.name, node, (linear.x, 0))
        if node.target is OPS["experts"].overload:
            for argument in (GATE_UP, DOWN):
                if (stored := stored_of(args_of(node)[argument])) is not None:
                    yield Product(stored.name, node, (node, argument))


def _hessians(inputs: Inputs, products: Sequence[Product]) -> dict[tuple[Node, int], Tensor]:
    """Hessians by `Product.reads`: f32[in, in] of a linear layer, f32[E, in, in] of experts."""
    graph = inputs.graph
    found: dict[tuple[Node, int], Tensor] = {}
    for product in products:
        *stack, _, width = graph.tensors[product.name].shape
        if product.reads not in found:
            found[product.reads] = torch.zeros((*stack, width, width), device=graph.device)
    experts = [node for node in dict.fromkeys(node for node, _ in found) if node.target is OPS["experts"].overload]
    rows = [node for node, _ in found if node not in experts]
    read = list(dict.fromkeys([*rows, *(value for node in experts for value in args_of(node)[:2])]))
    for values in inputs.of(read):
        known = dict(zip(read, values, strict=True))
        for node in rows:
            _add(found[node, 0], known[node])
        for node in experts:
            x, choice, _, *weights = args_of(node)
            gate_up = graph.tensors[weights[0].meta["weight"]]
            for expert in known[choice][chosen(known[choice], len(gate_up))].unique().tolist():
                mine = known[x][(known[choice] == expert).any(-1)]
                if (node, GATE_UP) in found:
                    _add(found[node, GATE_UP][expert], mine)
                if (node, DOWN) in found:
                    activation = weights[2] if len(weights) > 2 else "silu"
                    _add(found[node, DOWN][expert], gated(mine @ gate_up[expert].t(), activation))
    return found


def _add(hessian: Tensor, rows: Tensor) -> None:
    """Add rows [..., in] to a Hessian."""
    rows = rows.float().flatten(0, -2)
    hessian.addmm_(rows.t(), rows)


def _stacked(weights: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """Stack weights of one format."""
    parts = zip(*((w.values.view(torch.uint8), w.scales, w.zeros) for w in weights), strict=True)
    values, scales, zeros = (None if part[0] is None else torch.stack(part) for part in parts)
    assert values is not None
    assert scales is not None
    return QuantisedWeight(values.view(weights[0].values.dtype), scales, zeros, weights[0].block)


def check_format(name: str, format: Format) -> None:
    """Refuse a format whose blocks have several rows, as GPTQ rounds each row by itself.

    Raises:
        InputError: such a format.
    """
    assert format.block is not None  # filled in by the format
    if format.block[0] != 1:
        raise InputError(
            f"GPTQ rounds the rows of a weight by themselves, and in blocks of {list(format.block)} {name} has scales "
            f"that several rows share; choose (1, 128) or (1, {WHOLE})."
        )


@torch.no_grad()
def rounded(weight: Tensor, hessian: Tensor, format: Format) -> QuantisedWeight:
    """Round a weight [rows, columns] to a format, each row by GPTQ, or to the nearest if that is better.

    Args:
        weight: floating[rows, columns].
        hessian: f32[columns, columns], X^T X of inputs X [n, columns].
        format: a format with scales for each row.

    Returns:
        The weight. No row has a larger squared error of the outputs than if it were rounded to the nearest.
    """
    plain, fed = quantise(weight, format), _fed_forward(weight.float(), hessian, format)
    errors = []
    for each in (plain, fed):
        off = each.dequantised(torch.float64) - weight.double()
        errors.append(((off @ hessian.double()) * off).sum(1))
    better = (errors[1] < errors[0])[:, None]

    def either(one: Tensor, other: Tensor) -> Tensor:
        """Select the better row of both weights; float8 is selected as bytes."""
        of = torch.uint8 if one.dtype.itemsize == 1 else one.dtype
        return torch.where(better, one.view(of), other.view(of)).view(one.dtype)

    zeros = None if fed.zeros is None or plain.zeros is None else either(fed.zeros, plain.zeros)
    return QuantisedWeight(either(fed.values, plain.values), either(fed.scales, plain.scales), zeros, plain.block)


def _fed_forward(weight: Tensor, hessian: Tensor, format: Format) -> QuantisedWeight:
    """Round a weight, f32[rows, columns], by GPTQ."""
    kind, block, columns = KINDS[format.kind], (1, WHOLE), weight.shape[1]
    assert format.block is not None  # filled in by the format
    width = columns if format.block[1] == WHOLE else format.block[1]
    factor, left = _factor(hessian), weight.clone()
    numbers = torch.empty_like(left)
    scales, zeros = list[Tensor](), list[Tensor]()
    for begin in range(0, columns, width):
        end = min(begin + width, columns)
        scale, zero = scales_of(left[:, begin:end], block, kind, format.zeros)
        scales.append(scale)
        zeros += [] if zero is None else [zero]
        for first in range(begin, end, TOGETHER):
            last = min(first + TOGETHER, end)
            errors = torch.empty_like(left[:, first:last])
            for i in range(first, last):
                column = left[:, i : i + 1]
                number = numbers_of(column, scale, zero, block, kind)
                numbers[:, i : i + 1] = number
                error = (column - _value(number, scale, zero, kind)) / factor[i, i]
                left[:, i + 1 : last] -= error * factor[i, i + 1 : last]
                errors[:, i - first] = error[:, 0]
            left[:, last:] -= errors @ factor[first:last, last:]
    every = torch.cat(zeros, 1) if zeros else None
    return QuantisedWeight(stored_numbers(numbers, kind), torch.cat(scales, 1), every, (1, format.block[1]))


def _value(number: Tensor, scale: Tensor, zero: Tensor | None, kind: Kind) -> Tensor:
    """The values that a column of stored numbers represents."""
    if kind.dtype.is_floating_point:
        return number.to(kind.dtype).float() * scale
    return (number - (kind.zero if zero is None else zero)) * scale


def _factor(hessian: Tensor) -> Tensor:
    """U, upper triangular, with U^T U the inverse of the damped Hessian.

    A column without inputs gets 1 on the diagonal, so that it changes nothing.
    """
    damped = hessian.clone()
    diagonal = damped.diagonal()
    diagonal += torch.where(diagonal > 0, DAMPING * diagonal.mean(), 1.0)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True)

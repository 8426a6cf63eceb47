"""Weights of few bits that make up for each other's rounding (GPTQ, Frantar et al., 2022, arXiv 2210.17323).

The columns of a weight are rounded in their order, and what rounding one of them does to the outputs is fed forward to
those that are still to be rounded: with the Hessian H = X^T X of the inputs X and U^T U = H^-1, U upper triangular,
column j changes by -error_i U[i, j] / U[i, i]. A group of columns gets its scale when it is reached.

Of torchao and llm-compressor no function takes a weight and a Hessian alone: one needs kernels of a GPU (fbgemm), the
other a module of its own making.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.evaluate.inputs import Inputs
from dgraph.linears import Linear, linears_of
from dgraph.quantised import (
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
from dgraph.stored import stored_of

DAMPING = 0.01
"""Added to the diagonal of a Hessian, as a share of its mean."""
TOGETHER = 128
"""Columns whose errors reach the columns after them at once."""


def gptq_for(inputs: Inputs, progress: Callable[[int, int], None] | None = None) -> dict[str, QuantisedWeight]:
    """The weights with which `dgraph.save_quantised(model, out, weights, rounded=...)` writes a checkpoint, by name.

    Layer by layer: inputs are those that the quantised layers before give. Of linear layers alone; experts, of which
    each reads other rows, are left to be rounded to the nearest.

    Args:
        inputs: of the model, whose graph takes the quantised weights.
        progress: called with (linear layers done, linear layers in all).

    Raises:
        InputError: a format whose scales several rows of a weight share.
    """
    for name, format in inputs.formats.items():
        check_format(name, format)
    graph, found = inputs.graph, dict[str, QuantisedWeight]()
    linears = [linear for linear in linears_of(graph.calls, "plain") if _name(linear) in inputs.formats]
    for _, some in groupby(linears, lambda linear: linear.node.meta["layer"]):
        mine = list(some)
        read = list(dict.fromkeys(linear.x for linear in mine))
        sizes = [int(x.meta["val"].shape[-1]) for x in read]
        hessians = [torch.zeros((size, size), device=graph.device) for size in sizes]
        for values in inputs.of(read):
            for hessian, value in zip(hessians, values, strict=True):
                rows = value.float().flatten(0, -2)
                hessian.addmm_(rows.t(), rows)
        for linear in mine:
            name, weight = _name(linear), graph.tensors[_name(linear)]
            found[name] = rounded(weight, hessians[read.index(linear.x)], inputs.formats[name])
            graph.tensors[name] = found[name].dequantised(weight.dtype)
            if progress is not None:
                progress(len(found), len(linears))
    return found


def _name(linear: Linear) -> str:
    stored = stored_of(linear.weight)
    return "" if stored is None else stored.name


def check_format(name: str, format: Format) -> None:
    """Refuse blocks in which rows of a weight could not be rounded by themselves.

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
    """A weight [rows, columns] in a format, each row as GPTQ rounds it, or to the nearest if that is better.

    Args:
        weight: floating.
        hessian: f32[columns, columns], X^T X of inputs X [n, columns].
        format: with scales of each row.

    Returns:
        The weight, of whose rows none has a larger squared error of the outputs than if it were rounded to the nearest.
    """
    plain, fed = quantise(weight, format), _fed_forward(weight.float(), hessian, format)
    errors = []
    for each in (plain, fed):
        off = each.dequantised(torch.float64) - weight.double()
        errors.append(((off @ hessian.double()) * off).sum(1))
    better = (errors[1] < errors[0])[:, None]

    def chosen(one: Tensor, other: Tensor) -> Tensor:
        """Rows of either, as bytes where they are float8."""
        of = torch.uint8 if one.dtype.itemsize == 1 else one.dtype
        return torch.where(better, one.view(of), other.view(of)).view(one.dtype)

    zeros = None if fed.zeros is None or plain.zeros is None else chosen(fed.zeros, plain.zeros)
    return QuantisedWeight(chosen(fed.values, plain.values), chosen(fed.scales, plain.scales), zeros, plain.block)


def _fed_forward(weight: Tensor, hessian: Tensor, format: Format) -> QuantisedWeight:
    """A weight, f32[rows, columns], as GPTQ rounds it."""
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
    """What a column of numbers stands for."""
    if kind.dtype.is_floating_point:
        return number.to(kind.dtype).float() * scale
    return (number - (kind.zero if zero is None else zero)) * scale


def _factor(hessian: Tensor) -> Tensor:
    """U, upper triangular, with U^T U the inverse of the damped Hessian; a column without inputs changes nothing."""
    damped = hessian.clone()
    diagonal = damped.diagonal()
    diagonal += torch.where(diagonal > 0, DAMPING * diagonal.mean(), 1.0)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True)

"""The matrix products of a step, as calls on random values that read their weights from memory and not from a cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dgraph.ops.experts.experts import can_group, multiply_groups


class Mixture(NamedTuple):
    """Sizes of a mixture of experts.

    Attributes:
        experts: number of experts.
        chosen: experts per row.
        hidden: size of a row.
        inner: size within an expert.
    """

    experts: int
    chosen: int
    hidden: int
    inner: int


Linear = tuple[int, int]
"""Shape of a linear layer's weight: outputs, inputs."""
Shape = Linear | Mixture

Calls = list[Callable[[], Any]]
MOST = 64
"""Most calls that read distinct weights."""


def calls_of(shape: Shape, dtype: torch.dtype, device: torch.device, cold: float) -> Callable[[int], Calls]:
    """A function that takes a row count and gives two or more calls of one product each.

    Together they read weights of `cold` bytes or more, unless that takes more than `MOST` calls. With several times the
    size of a cache for `cold`, no call finds its weights in the cache.
    """
    draw = partial(torch.randn, dtype=dtype, device=device)
    if isinstance(shape, Mixture):
        return _calls_of_mixture(shape, draw, cold)
    size = shape[0] * shape[1] * dtype.itemsize
    weights = [draw(shape) for _ in range(max(2, _as_many(cold, size)))]

    def calls(rows: int) -> Calls:
        x = draw((rows, shape[1]))
        return [partial(_product, x, weight) for weight in weights]

    return calls


def _calls_of_mixture(shape: Mixture, draw: Callable[..., Tensor], cold: float) -> Callable[[int], Calls]:
    """Calls of a mixture, each with its own routing: so even a few rows find few of their experts in a cache."""
    experts, chosen, hidden, inner = shape
    size = 3 * hidden * inner * draw(0).element_size()
    sets = _as_many(cold, experts * size)
    weights = [(draw((experts, 2 * inner, hidden)), draw((experts, hidden, inner))) for _ in range(sets)]

    def calls(rows: int) -> Calls:
        x, between = draw((rows * chosen, hidden)), draw((rows * chosen, inner))
        product = _grouped if can_group(x, weights[0][0]) else _one_by_one
        count = max(2, sets, _as_many(cold, min(experts, rows * chosen) * size))
        return [product(x, between, routed(shape, rows, x.device), *weights[i % sets]) for i in range(count)]

    return calls


def routed(shape: Mixture, rows: int, device: torch.device) -> Tensor:
    """i32[experts], the end of each expert's rows if every row goes to distinct experts at random."""
    choice = torch.rand((rows, shape.experts), device=device).topk(shape.chosen).indices
    return choice.flatten().bincount(minlength=shape.experts).cumsum(0).int()


def _as_many(cold: float, size: int) -> int:
    """The number of weights of `size` bytes that take more than `cold` bytes; at least 1 and at most `MOST`."""
    return max(1, min(MOST, int(cold / size) + 1))


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(x, weight.t())


def _grouped(x: Tensor, between: Tensor, ends: Tensor, gate_up: Tensor, down: Tensor) -> Callable[[], Any]:
    """Both products of dgraph::experts; on a GPU by its own kernels."""
    multiply = multiply_groups
    if x.is_cuda:
        from dgraph.ops.experts.triton.experts import multiply_plain as multiply

    def call() -> None:
        multiply(x, gate_up, ends)
        multiply(between, down, ends)

    return call


def _one_by_one(x: Tensor, between: Tensor, ends: Tensor, gate_up: Tensor, down: Tensor) -> Callable[[], Any]:
    """Both products expert by expert, for tensors that cannot be grouped."""
    bounds = [0, *ends.tolist()]
    parts = [(e, slice(bounds[e], bounds[e + 1])) for e in range(len(ends)) if bounds[e] < bounds[e + 1]]

    def call() -> None:
        for expert, rows in parts:
            F.linear(x[rows], gate_up[expert])
            F.linear(between[rows], down[expert])

    return call

"""Shares of attention, from programs that each read a share of the keys, and the kernels that add them up.

A share of a row and a head has two parts: a mean of values, f32 [splits, N, H, D], and a mass, f32 [splits, N, H]. Its
weight is 2 ** mass. A share without a key has the mass -inf, and its mean may hold anything.

If the rows are rounded next, a program adds up all heads of a row and rounds it: a scale belongs to a whole row.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.families.quantised import KINDS
from dgraph.ops.products.rows_quantise import fake
from dgraph.ops.products.triton.rows_quantise import ROUNDING, rounded
from dgraph.ops.products.triton.rows_quantise import kernel as rows_quantise
from dgraph.ops.triton.rows import power_of_two, start_of, wait

Shares = tuple[Tensor, Tensor]
"""Means and masses."""

WIDEST = 16384
"""Most numbers of a row that a program adds up; heads and their width each count as a power of two."""

HELD, MOST = 32768, 8
"""Most numbers of all shares that it loads at once, and most shares: at most 64 registers of each thread."""


def shares_for(q: Tensor, splits: int) -> Shares:
    """Allocate the shares of queries q [N, H, D]."""
    (n, heads, d), device = q.shape, q.device
    part = torch.empty((splits, n, heads, d), dtype=torch.float32, device=device)
    return part, torch.empty((splits, n, heads), dtype=torch.float32, device=device)


def finished(out: Tensor, shares: Shares | None, kind: str | None, cu_rows: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """Finish an attention: return out [N, H, D], or the results of dgraph::rows_quantise on it as rows [N, H * D].

    Args:
        out: the results, which are still to be added up if there are shares.
        shares: shares of the keys; None if out is complete.
        kind: "fp8" or "int8", to which rows are rounded; None for results as they are.
        cu_rows: counts the live rows. If there are shares, padding rows are added up and rounded as well.
    """
    if kind is None or shares is None or power_of_two(out.shape[1]) * power_of_two(out.shape[2], 16) > WIDEST:
        if shares is not None:
            add_up(*shares, out)
        return out if kind is None else rows_quantise(out.flatten(1), kind, cu_rows)
    return _rounded_sums(*shares, out, kind, cu_rows)


def add_up(part: Tensor, mass: Tensor, out: Tensor) -> None:
    """Add shares up into out [N, H, D]."""
    splits, n, heads, d = part.shape
    width = power_of_two(d, 16)
    _add_up[(n, heads)](
        part, mass, out, n, heads, d, width, splits, power_of_two(splits),
        num_warps=max(width // 128, 1), **start_of(out.device),
    )  # fmt: skip


def _rounded_sums(part: Tensor, mass: Tensor, out: Tensor, kind: str, cu_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Add shares up and round the rows. Only the dtype of out [N, H, D] counts; sums have it before the rounding."""
    splits, n, heads, d = part.shape
    values, scales = fake(out.flatten(1), kind, cu_rows)
    block, width = power_of_two(heads), power_of_two(d, 16)
    _add_up_rows[(n,)](
        part, mass, out, values, scales, n, heads, block, d, width, splits, power_of_two(splits),
        min(max(HELD // (block * width), 1), MOST), values.dtype == torch.int8, KINDS[kind].reach,
        num_warps=power_of_two(block * width // 256, 1, 16), **ROUNDING, **start_of(out.device),
    )  # fmt: skip
    return values, scales


@triton.jit
def _add_up(
    part_ptr, mass_ptr, out_ptr, n, heads, D: tl.constexpr, WIDTH: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write to out the mean of the shares of a row and a head, weighted by 2 ** mass.

    All are loaded at once: one after the other would take the time of as many trips to memory.
    """
    wait(EARLY)
    d, split = tl.arange(0, WIDTH), tl.arange(0, BLOCK_S)
    value = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    at = split.to(tl.int64) * n * heads + value
    mass = tl.load(mass_ptr + at, mask=split < SPLITS, other=float("-inf"))
    there = (split < SPLITS)[:, None] & (d < D)[None, :]
    part = tl.load(part_ptr + at[:, None] * D + d[None, :], mask=there, other=0.0)
    top = tl.max(mass, 0)
    weight = tl.exp2(mass - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, 0)
    found = tl.sum(tl.where((mass > float("-inf"))[:, None], part, 0.0) * weight[:, None], 0)
    found /= tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + value * D + d, found.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def _add_up_rows(
    part_ptr, mass_ptr, out_ptr, values_ptr, scales_ptr, n,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, SOME: tl.constexpr, INTEGERS: tl.constexpr, REACH: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Do the same for all heads of a row, as numbers and a scale; means are in the dtype of out_ptr before that.

    SOME shares are loaded at once, before the weights are computed. Weights pass from warp to warp, and loads between
    two of their barriers would come one after the other.
    """
    wait(EARLY)
    row, h, d, split = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_H), tl.arange(0, WIDTH), tl.arange(0, BLOCK_S)
    inside = (h < HEADS)[:, None] & (d < D)[None, :]
    at = (split.to(tl.int64) * n + row)[None, :] * HEADS + h[:, None]
    there = (split < SPLITS)[None, :] & (h < HEADS)[:, None]
    mass = tl.load(mass_ptr + at, mask=there, other=float("-inf"))
    found = tl.zeros([BLOCK_H, WIDTH], tl.float32)
    for first in tl.static_range(0, SPLITS, SOME):
        parts = ()
        for one in tl.static_range(first, min(first + SOME, SPLITS)):
            at = (one * tl.full([], n, tl.int64) + row) * HEADS + h
            parts = parts + (tl.load(part_ptr + at[:, None] * D + d[None, :], mask=inside, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        top = tl.max(mass, 1)
        weight = tl.exp2(mass - tl.where(top == float("-inf"), 0.0, top)[:, None])
        total = tl.sum(weight, 1)
        weight /= tl.where(total > 0, total, 1.0)[:, None]
        weight = tl.where(mass == float("-inf"), -1.0, weight)  # of a share that is not there
        for one in tl.static_range(first, min(first + SOME, SPLITS)):
            own = tl.sum(tl.where((split == one)[None, :], weight, 0.0), 1)
            found += tl.where((own < 0)[:, None], 0.0, parts[one - first] * own[:, None])
    found = found.to(out_ptr.dtype.element_ty).to(tl.float32)
    numbers, scale = rounded(tl.reshape(found, [1, BLOCK_H * WIDTH]), 1, INTEGERS, REACH)
    i, nothing = tl.arange(0, BLOCK_H * WIDTH)[None, :], tl.arange(0, 1)
    at = row * HEADS * D + i // WIDTH * D + i % WIDTH
    tl.store(values_ptr + at, numbers.to(values_ptr.dtype.element_ty), mask=(i // WIDTH < HEADS) & (i % WIDTH < D))
    tl.store(scales_ptr + row + nothing, scale)

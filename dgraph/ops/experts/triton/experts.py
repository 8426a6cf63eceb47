"""dgraph::experts on CUDA: slots in the order of their experts, then two grouped matrix products.

Slots are ordered by counting: one program per expert reads every choice. The bounds of each expert's rows stay on the
device, and sizes of allocations follow from the shapes. So the whole call can be captured in a CUDA graph.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.families.quantised import QuantisedRows, QuantisedWeight
from dgraph.ops.experts.experts import can_group, check, chosen, combine, feed_forward, meets, multiply_groups
from dgraph.ops.experts.triton import experts_rounded, grouped
from dgraph.ops.experts.triton.experts_rounded import gated_rows
from dgraph.ops.products.triton import stored
from dgraph.ops.triton.rows import dense_rows, power_of_two

TILE = 8192
"""Values that one program moves."""


def kernel(
    x: Tensor | QuantisedRows,
    choice: Tensor,
    weight: Tensor,
    gate_up: Tensor | QuantisedWeight,
    down: Tensor | QuantisedWeight,
    activation: str = "silu",
    inner: str | None = None,
) -> Tensor:
    """dgraph::experts; see its contract."""
    check(x, choice, weight, gate_up, down, activation, inner)
    if not choice.numel():
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    quantised = isinstance(gate_up, QuantisedWeight) and isinstance(down, QuantisedWeight)
    by = by_grouping if quantised or can_group(x, gate_up) else by_masking
    return by(x, choice, weight, gate_up, down, activation, inner)


def by_grouping(
    x: Tensor | QuantisedRows,
    choice: Tensor,
    weight: Tensor,
    gate_up: Tensor | QuantisedWeight,
    down: Tensor | QuantisedWeight,
    activation: str = "silu",
    inner: str | None = None,
) -> Tensor:
    """Run the experts on rows grouped by expert.

    Each slot's row is copied after the rows of lower experts; rows after the last bound are never written.
    """
    (n, d), experts, slots = x.shape, len(down), choice.shape[1]
    choice, weight = choice.contiguous(), weight.contiguous()
    ends, rank = ordered(choice, experts)
    rows, place = spread(x, choice, ends, rank)
    between: Tensor | QuantisedRows
    if inner is None:
        between = _units(rows, gate_up, ends, activation == "silu")
    else:
        between = experts_rounded.gate(_products(rows, gate_up, ends), ends, inner, activation == "silu")
        between = between if meets(inner, down) else between.dequantised()
    each = _products(between, down, ends)

    block = power_of_two(d, 16, 1024)
    out = torch.empty((n, d), dtype=x.dtype, device=x.device)
    _sum_slots[(n, triton.cdiv(d, block))](each, place, weight, out, each.stride(0), slots, d, block, num_warps=4)
    return out


def spread(
    x: Tensor | QuantisedRows, choice: Tensor, ends: Tensor, rank: Tensor
) -> tuple[Tensor | QuantisedRows, Tensor]:
    """Copy the row of each slot, in the order of the experts, and give the place of each slot there.

    The place of a slot without an expert is -1. ends, rank: as `ordered` gives them.
    """
    values, scales = (x.values, x.scales.contiguous()) if isinstance(x, QuantisedRows) else (x, None)
    values, (n, size), slots = dense_rows(values), x.shape, choice.shape[1]
    wide, place = power_of_two(slots), torch.empty_like(rank)
    block = power_of_two(size, 16, max(16, TILE // wide))
    rows = torch.empty((n * slots, size), dtype=values.dtype, device=x.device)
    by = None if scales is None else torch.empty((n * slots, 1), dtype=scales.dtype, device=x.device)
    _spread_rows[(n, triton.cdiv(size, block))](
        values, scales, choice, ends, rank, place, rows, by, len(ends), values.stride(0), slots, wide, size, block,
        num_warps=4,
    )  # fmt: skip
    return rows if by is None else QuantisedRows(rows, by, x.dtype), place


def gate(both: Tensor, ends: Tensor, silu: bool) -> Tensor:
    """Compute act(gate) * up of [N, 2f]; rows after the last end are not written."""
    n, f = both.shape[0], both.shape[1] // 2
    block = power_of_two(f, 16, 1024)
    some = TILE // 4 // block
    out = torch.empty((n, f), dtype=both.dtype, device=both.device)
    _gate_rows[(triton.cdiv(n, some), triton.cdiv(f, block))](
        both, out, ends, len(ends) - 1, both.stride(0), f, some, block, silu, num_warps=4
    )
    return out


def _units(rows: Tensor | QuantisedRows, weight: Tensor | QuantisedWeight, ends: Tensor, silu: bool) -> Tensor:
    """Compute act(gate) * up of the rows before each end, by weights that have gate's rows before those of up."""
    if isinstance(rows, Tensor) and isinstance(weight, Tensor) and grouped.pays(rows, weight):
        return grouped.multiply_units(rows, weight, ends, silu)
    return gate(_products(rows, weight, ends), ends, silu)


def _products(rows: Tensor | QuantisedRows, weight: Tensor | QuantisedWeight, ends: Tensor) -> Tensor:
    """Multiply the rows before each end by the weight of their expert; rows after the last end hold anything."""
    if isinstance(rows, QuantisedRows):
        assert isinstance(weight, QuantisedWeight)
        return experts_rounded.multiply_grouped(rows, weight, ends)
    if isinstance(weight, QuantisedWeight):
        return stored.multiply_grouped(rows, weight, ends)
    return multiply_plain(rows, weight, ends)


def multiply_plain(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Do the same by plain weights, in whichever kernel is faster."""
    if grouped.pays(rows, weight):
        return grouped.multiply(rows, weight, ends)
    return multiply_groups(rows, weight, ends)


def ordered(choice: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Ends of each expert's rows, i32[experts], and ranks i32[n * slots] of the slots of choice [n, slots].

    A rank is the number of a slot among those of its expert. It is not written for a slot without an expert.
    """
    ends = torch.empty(experts, dtype=torch.int32, device=choice.device)
    rank = torch.empty(choice.numel(), dtype=torch.int32, device=choice.device)
    _order_slots[(experts,)](choice, ends, rank, len(rank), power_of_two(len(rank), 1024, 4096), num_warps=8)
    return ends, rank


def by_masking(
    x: Tensor | QuantisedRows,
    choice: Tensor,
    weight: Tensor,
    gate_up: Tensor | QuantisedWeight,
    down: Tensor | QuantisedWeight,
    activation: str = "silu",
    inner: str | None = None,
) -> Tensor:
    """Run every expert over every row, where rows cannot be grouped: E / k times the work, but without a host read."""
    each = torch.zeros((*choice.shape, x.shape[1]), dtype=x.dtype, device=x.device)
    for expert in range(gate_up.shape[0]):
        result = feed_forward(x, gate_up[expert], down[expert], activation, inner)
        each = torch.where((choice == expert)[:, :, None], result[:, None], each)
    return combine(each, weight, chosen(choice, gate_up.shape[0]))


@triton.jit
def _order_slots(choice_ptr, ends_ptr, rank_ptr, slots, BLOCK: tl.constexpr):
    """Write the end of an expert's rows, and the number of each of its slots among them.

    One pass suffices: the rows begin at the end of the expert before, and `_spread_rows` looks that up.
    """
    expert = tl.program_id(0)
    lower, own = tl.zeros([BLOCK], tl.int32), 0
    for first in range(0, slots, BLOCK):
        at = first + tl.arange(0, BLOCK)
        choice = tl.load(choice_ptr + at, mask=at < slots, other=-1)
        mine = (choice == expert).to(tl.int32)
        tl.store(rank_ptr + at, own + tl.cumsum(mine, 0) - 1, mask=mine > 0)
        own += tl.sum(mine)
        lower += ((choice >= 0) & (choice < expert)).to(tl.int32)
    tl.store(ends_ptr + expert, tl.sum(lower) + own)


@triton.jit
def _spread_rows(
    x_ptr, scale_ptr, choice_ptr, ends_ptr, rank_ptr, place_ptr, out_ptr, by_ptr, experts, x_row,
    SLOTS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy a row, and its scale if rows have scales, to the places of its slots, and write these places."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, WIDTH)
    at = row * SLOTS + slot
    choice = tl.load(choice_ptr + at, mask=slot < SLOTS, other=-1)
    live = (choice >= 0) & (choice < experts)
    before = tl.load(ends_ptr + choice - 1, mask=live & (choice > 0), other=0)
    place = tl.where(live, before + tl.load(rank_ptr + at, mask=live, other=0), -1)
    if tl.program_id(1) == 0:
        tl.store(place_ptr + at, place, mask=slot < SLOTS)
        if scale_ptr is not None:
            tl.store(by_ptr + place, tl.load(scale_ptr + row), mask=live)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + row * x_row + column, mask=column < SIZE)
    to = out_ptr + place.to(tl.int64)[:, None] * SIZE + column[None, :]
    mask = live[:, None] & (column < SIZE)[None, :]
    tl.store(to, tl.broadcast_to(value[None, :], [WIDTH, BLOCK]), mask=mask)


@triton.jit(do_not_specialize=["last"])
def _gate_rows(
    both_ptr, out_ptr, ends_ptr, last, both_row,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Compute act(gate) * up of the rows before the last bound."""
    first, end = tl.program_id(0) * ROWS, tl.load(ends_ptr + last)
    if first >= end:
        return
    row = first + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < end)[:, None] & (column < SIZE)[None, :]
    found = gated_rows(both_ptr, row, column, mask, both_row, SIZE, SILU)
    wide = row.to(tl.int64)[:, None]
    tl.store(out_ptr + wide * SIZE + column[None, :], found.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sum_slots(
    each_ptr, place_ptr, weight_ptr, out_ptr, each_row, SLOTS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sum the weighted slots of a row, in order."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(SLOTS):
        place = tl.load(place_ptr + row * SLOTS + slot).to(tl.int64)
        live = place >= 0
        weight = tl.load(weight_ptr + row * SLOTS + slot, mask=live, other=0.0).to(tl.float32)
        value = tl.load(each_ptr + place * each_row + column, mask=live & (column < SIZE), other=0.0)
        total += weight * value.to(tl.float32)
    tl.store(out_ptr + row * SIZE + column, total.to(out_ptr.dtype.element_ty), mask=column < SIZE)

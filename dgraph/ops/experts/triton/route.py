"""dgraph::route on CUDA: one program per row holds its experts in registers, a line for each group.

A rank and a number are one integer (`key_of`), larger for a larger rank and, among equals, for a lower number. So the
highest is a single maximum, ties are decided with it, and the choice is an expert whatever a padding row holds.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.ops.experts.route import check
from dgraph.ops.triton.rows import dense_rows, power_of_two

NONE = tl.constexpr(-(2**63))
"""Key of a place that cannot be chosen; below that of any expert."""
LOW = tl.constexpr(0x7FFFFFFF)
"""The lower 31 bits, all of an integer but its sign."""


def kernel(
    logits: Tensor,
    bias: Tensor | None,
    score: str,
    groups: int,
    top_groups: int,
    topk: int,
    renormalise: bool,
    scale: float,
    allowed: Tensor | None = None,
    expert_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """dgraph::route; see its contract."""
    *rows, experts = logits.shape
    check(experts, score, groups, top_groups, topk)
    choice = torch.empty((*rows, topk), dtype=torch.int64, device=logits.device)
    weight = torch.empty((*rows, topk), dtype=torch.float32, device=logits.device)
    if not choice.numel():
        return choice, weight
    logits = dense_rows(logits.reshape(-1, experts))
    size = experts // groups
    wide = power_of_two(groups), power_of_two(size)
    flags = None if allowed is None else allowed.reshape(-1, experts).contiguous().view(torch.uint8)
    _route[(len(logits),)](
        logits, logits if bias is None else bias.contiguous(), choice, weight,
        flags, None if expert_scale is None else expert_scale.contiguous(), logits.stride(0), scale,
        score == "sigmoid", bias is not None, groups, top_groups, size, topk, renormalise, *wide, power_of_two(topk),
        num_warps=1 if wide[0] * wide[1] <= 512 else 4,
    )  # fmt: skip
    return choice, weight


@triton.jit
def key_of(value, number):
    """A rank of fp32 and a number below 2**31 as one integer; NaN ranks above all others."""
    bits = value.to(tl.int32, bitcast=True)
    ordered = tl.where(value == value, bits ^ ((bits >> 31) & LOW), LOW)
    return (ordered.to(tl.int64) << 32) | (LOW - number)


@triton.jit
def rank_of(key):
    """The rank in a key."""
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & LOW)).to(tl.float32, bitcast=True)


@triton.jit
def _route(
    logits_ptr, bias_ptr, choice_ptr, weight_ptr, allowed_ptr, expert_scale_ptr, logits_row, scale,
    SIGMOID: tl.constexpr, BIASED: tl.constexpr, GROUPS: tl.constexpr, OPEN: tl.constexpr, SIZE: tl.constexpr,
    TOPK: tl.constexpr, RENORMALISE: tl.constexpr, LINES: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, LINES), tl.arange(0, WIDTH)
    real = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    expert = group[:, None] * SIZE + member[None, :]
    logit = tl.load(logits_ptr + row * logits_row + expert, mask=real, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score = tl.sigmoid(logit)
    else:
        part = tl.exp(logit - tl.max(logit))
        score = part / tl.sum(part)
    ranked = score
    if BIASED:
        ranked += tl.load(bias_ptr + expert, mask=real, other=0.0).to(tl.float32)
    if allowed_ptr is not None:
        allowed = tl.load(allowed_ptr + row * (GROUPS * SIZE) + expert, mask=real, other=0)
        ranked = tl.where(allowed != 0, ranked, float("-inf"))
    key = tl.where(real, key_of(ranked, expert), NONE)
    if GROUPS > 1:
        first = tl.max(key, 1)
        second = tl.max(tl.where(key == first[:, None], NONE, key), 1)
        strongest = tl.where(group < GROUPS, key_of(rank_of(first) + rank_of(second), group), NONE)
        ahead = tl.sum((strongest[None, :] > strongest[:, None]).to(tl.int32), 1)
        lowest = tl.full([LINES, WIDTH], float("-inf"), tl.float32)
        key = tl.where(real & (ahead >= OPEN)[:, None], key_of(lowest, expert), key)
    slot = tl.arange(0, SLOTS)
    choice, weight, total = tl.zeros([SLOTS], tl.int64), tl.zeros([SLOTS], tl.float32), 0.0
    for i in range(TOPK):
        best = tl.max(key)
        mine = tl.sum(tl.where(key == best, score, 0.0))
        choice = tl.where(slot == i, LOW - (best & LOW), choice)
        weight = tl.where(slot == i, mine, weight)
        total += mine
        key = tl.where(key == best, NONE, key)
    if RENORMALISE:
        weight = weight / (total + 1e-20)
    weight *= scale
    if expert_scale_ptr is not None:
        weight *= tl.load(expert_scale_ptr + choice, mask=slot < TOPK, other=0.0).to(tl.float32)
    at = row * TOPK + slot
    tl.store(choice_ptr + at, choice, mask=slot < TOPK)
    tl.store(weight_ptr + at, weight, mask=slot < TOPK)

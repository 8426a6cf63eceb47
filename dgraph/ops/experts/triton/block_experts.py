"""dgraph::block_experts on CUDA: the program of a block's first row chooses for all of them, the others end at once."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.ops.experts.block_experts import check
from dgraph.ops.experts.triton.route import NONE, key_of
from dgraph.ops.triton.rows import dense_rows, power_of_two


def kernel(logits: Tensor, bias: Tensor | None, blocks: Tensor, capacity: int) -> Tensor:
    """dgraph::block_experts; see its contract."""
    check(logits, blocks, capacity)
    *rows, experts = logits.shape
    allowed = torch.empty((*rows, experts), dtype=torch.bool, device=logits.device)
    if allowed.numel():
        logits, blocks = dense_rows(logits.reshape(-1, experts)), blocks.reshape(-1).contiguous()
        wide = power_of_two(experts)
        _share_experts[(len(logits),)](
            logits, None if bias is None else bias.contiguous(), blocks, allowed.view(torch.uint8),
            len(logits), logits.stride(0), experts, capacity, wide, num_warps=1 if wide <= 512 else 4,
        )  # fmt: skip
    return allowed


@triton.jit(do_not_specialize=["n"])
def _share_experts(
    logits_ptr, bias_ptr, blocks_ptr, allowed_ptr, n, logits_row,
    EXPERTS: tl.constexpr, CAPACITY: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    expert = tl.arange(0, WIDE)
    real = expert < EXPERTS
    number = tl.load(blocks_ptr + row)
    before = tl.load(blocks_ptr + row - 1, mask=row > 0, other=0)
    if number <= 0:
        tl.store(allowed_ptr + row.to(tl.int64) * EXPERTS + expert, tl.zeros([WIDE], tl.uint8), mask=real)
    elif number != before:
        bias = tl.zeros([WIDE], tl.float32)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + expert, mask=real, other=0.0).to(tl.float32)
        best = tl.full([WIDE], float("-inf"), tl.float32)
        end = row
        while tl.load(blocks_ptr + end, mask=end < n, other=0) == number:
            logit_at = logits_ptr + end.to(tl.int64) * logits_row + expert
            score = tl.sigmoid(tl.load(logit_at, mask=real, other=0.0).to(tl.float32)) + bias
            best = tl.maximum(best, score, propagate_nan=tl.PropagateNan.ALL)
            end += 1
        key = tl.where(real, key_of(best, expert), NONE)
        mine = tl.zeros([WIDE], tl.uint8)
        for _ in range(CAPACITY):
            highest = tl.max(key)
            mine = tl.where(key == highest, tl.full([WIDE], 1, tl.uint8), mine)
            key = tl.where(key == highest, NONE, key)
        allowed_at = allowed_ptr + row.to(tl.int64) * EXPERTS + expert
        for _ in range(row, end):
            tl.store(allowed_at, mine, mask=real)
            allowed_at += EXPERTS

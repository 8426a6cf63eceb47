"""dgraph::vocabulary_attention on CUDA: dgraph::vocabulary_part of all ids, and results from its numbers and sums."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.ops.triton.rows import power_of_two
from dgraph.ops.vocabulary.triton import vocabulary_part
from dgraph.ops.vocabulary.triton.vocabulary_part import CHUNK


def kernel(
    h: Tensor,
    weight: Tensor,
    temperature: Tensor,
    seed: Tensor,
    cu_rows: Tensor,
    softcap: float | None,
    suppress: int,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dgraph::vocabulary_attention; see its contract. chunk: ids at a time, a power of two."""
    rows = temperature, seed, cu_rows, softcap, suppress
    sums, numbers = vocabulary_part.kernel(h, weight, *rows, None, len(weight), chunk)
    n, width = h.shape
    best, token = (torch.empty(n, dtype=torch.int64, device=h.device) for _ in range(2))
    confidence, entropy = (torch.empty(n, dtype=torch.float32, device=h.device) for _ in range(2))
    soft = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    if n:
        block = power_of_two(width, 16, 4096)
        _finish[(n,)](numbers, sums, best, confidence, token, entropy, soft, width, block, num_warps=4)
    return best, confidence, token, entropy, soft


@triton.jit
def _finish(
    numbers_ptr, sums_ptr, best_ptr, confidence_ptr, token_ptr, entropy_ptr, soft_ptr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the results of a row; the sums of a row that is not live are zeros."""
    row = tl.program_id(0)
    numbers_ptr += row * 6
    token = tl.load(numbers_ptr + 5)
    live = token != -1
    mass = tl.where(live, tl.load(numbers_ptr + 2), 1.0)
    entropy = tl.log(mass) + tl.load(numbers_ptr + 3) / mass
    tl.store(best_ptr + row, tl.where(live, tl.load(numbers_ptr), -1.0).to(tl.int64))
    tl.store(confidence_ptr + row, tl.where(live, 1.0 / mass, float("-inf")))
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(entropy_ptr + row, tl.where(live, entropy, float("inf")))
    sums_ptr += row.to(tl.int64) * WIDTH
    soft_ptr += row.to(tl.int64) * WIDTH
    for at in range(0, WIDTH, BLOCK):
        place = at + tl.arange(0, BLOCK)
        soft = tl.load(sums_ptr + place, mask=place < WIDTH) / mass
        tl.store(soft_ptr + place, soft.to(soft_ptr.dtype.element_ty), mask=place < WIDTH)

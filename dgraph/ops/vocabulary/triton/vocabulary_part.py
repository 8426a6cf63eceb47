"""dgraph::vocabulary_part on CUDA.

The sums of a row are as wide as the model, too wide for the registers of one multiprocessor. So a row cannot be kept
there as attention keeps it. Instead ids are taken in chunks, and the two products of a chunk are the library's. One is
rows by the chunk's weight into fp32 logits, the other exp(x - largest) by the same weight onto the sums. Between them
`_weigh_ids` holds a row's logits of the chunk in registers. It reads them once, and merges their numbers with those of
the chunks before. It writes exp(x - the largest so far), rounded to the dtype of h, over the logits that it read. So
the memory of a chunk is fp32 [rows, chunk].

The product cannot know how many rows are live, so it multiplies all; no row reads another.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.ops.lm_head.triton.logits import exponential
from dgraph.ops.triton.rows import dense_rows, live_rows, power_of_two
from dgraph.ops.vocabulary.vocabulary_part import NUMBERS, check

CHUNK = 16384
"""Ids at a time: the fastest of 4,096 to 32,768 at 256 and 2,048 rows on an H200."""
HELD = 1024
"""Logits that a warp holds, 32 a thread; half as many were no faster there."""


def workspace(h: Tensor, weight: Tensor) -> int:
    """Bytes of the logits of one chunk."""
    return 4 * len(h) * power_of_two(len(weight), 16, CHUNK)


def kernel(
    h: Tensor,
    weight: Tensor,
    temperature: Tensor,
    seed: Tensor,
    cu_rows: Tensor,
    softcap: float | None,
    suppress: int,
    first: Tensor | None,
    vocab: int,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """dgraph::vocabulary_part; see its contract. first: None is 0. chunk: ids at a time, a power of two."""
    check(h, weight, temperature, seed, softcap, vocab)
    (n, width), ids = h.shape, len(weight)
    sums = torch.empty((n, width), dtype=torch.float32, device=h.device)
    numbers = torch.empty((n, NUMBERS), dtype=torch.float32, device=h.device)
    if not n:
        return sums, numbers
    h, weight, temperature, seed = dense_rows(h), dense_rows(weight), temperature.contiguous(), seed.contiguous()
    chunk = power_of_two(ids, 16, chunk)
    warps = power_of_two(chunk // HELD, 4, 32)
    buffer = torch.empty((n, chunk), dtype=torch.float32, device=h.device)
    over = buffer.view(h.dtype)
    for start in range(0, ids, chunk):
        part = weight[start : start + chunk]
        _multiply(h, part.t(), buffer[:, : len(part)], add=False)
        _weigh_ids[(n,)](
            buffer, over, sums, numbers, temperature, seed, cu_rows, first,
            cu_rows.shape[0] - 1, n, start, len(part), vocab, suppress, softcap or 0.0, over.stride(0),
            width, chunk, power_of_two(width, 16, 1024), softcap is not None, num_warps=warps,
        )  # fmt: skip
        _multiply(over[:, : len(part)], part, sums, add=start > 0)
    return sums, numbers


def _multiply(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    """Write a @ b to `out` f32, or add it to what `out` holds; products are summed in fp32 and not rounded."""
    if a.dtype == torch.float32 or not a.is_cuda:  # only on CUDA does the library keep fp32 sums of halves
        a, b = a.float(), b.float()
        if add:
            torch.addmm(out, a, b, out=out)
        else:
            torch.mm(a, b, out=out)
    elif add:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)


@triton.jit(do_not_specialize=["b", "n"])
def _weigh_ids(
    logits_ptr, share_ptr, sums_ptr, numbers_ptr, temperature_ptr, seed_ptr, cu_ptr, first_ptr,
    b, n, start, count, ids_in_all, suppress, softcap, share_row,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Replace a row's logits of a chunk by exp(x - the largest so far), and update the row's numbers and sums."""
    row = tl.program_id(0)
    column = tl.arange(0, CHUNK)
    share_ptr += row.to(tl.int64) * share_row
    numbers_ptr += row * 6
    if row < live_rows(cu_ptr, b, n):
        z = tl.load(logits_ptr + row.to(tl.int64) * CHUNK + column, mask=column < count, other=0.0)
        temperature = tl.load(temperature_ptr + row)
        colder = 1.0 / tl.where(temperature > 0, temperature, 1.0)
        x = z * colder
        if CAPPED:  # c tanh(z / c), to within 2e-7 c
            x = colder * softcap - 2.0 * colder * softcap / (tl.exp(z * (2.0 / softcap)) + 1.0)
        base = start
        if first_ptr is not None:
            base += tl.load(first_ptr).to(tl.int32)
        real = (column < tl.minimum(count, ids_in_all - base)) & (column != suppress - base)
        x = tl.where(real, x, float("-inf"))
        top = tl.max(x)
        # Before the first chunk nothing is found; a finite start, because infinities have no difference.
        later = start > 0
        best = tl.load(numbers_ptr, mask=later, other=2147483648.0)
        earlier = tl.load(numbers_ptr + 1, mask=later, other=-1e30)
        mass = tl.load(numbers_ptr + 2, mask=later, other=0.0)
        spread = tl.load(numbers_ptr + 3, mask=later, other=0.0)
        key = tl.load(numbers_ptr + 4, mask=later, other=-1e30)
        token = tl.load(numbers_ptr + 5, mask=later, other=2147483648.0)
        highest = tl.maximum(earlier, top)
        # NaN stays NaN, and shows in the confidence.
        gap = tl.minimum(highest - x, 1e30, propagate_nan=tl.PropagateNan.ALL)
        share = tl.exp(-gap)
        tl.store(share_ptr + column, share.to(share_ptr.dtype.element_ty), mask=column < count)
        # Ids rise with the chunks: of equals the first is the lowest.
        if top > earlier:
            best = (base + tl.min(tl.where(x == top, column, CHUNK))).to(tl.float32)
        if temperature > 0:
            # The largest x + Gumbel noise is where exp(x) over exponential noise is largest.
            seed = tl.load(seed_ptr + row)
            low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
            odds = share / exponential(low, high, (base + column).to(tl.uint32))
            most = tl.max(odds)
            drawn = highest + tl.log(most)
            if drawn > key:
                key, token = drawn, (base + tl.min(tl.where(odds == most, column, CHUNK))).to(tl.float32)
        else:
            key, token = highest, best
        risen = highest - earlier
        fade = tl.exp(-risen)
        tl.store(numbers_ptr, best)
        tl.store(numbers_ptr + 1, highest)
        tl.store(numbers_ptr + 2, mass * fade + tl.sum(share))
        tl.store(numbers_ptr + 3, (spread + mass * risen) * fade + tl.sum(gap * share))
        tl.store(numbers_ptr + 4, key)
        tl.store(numbers_ptr + 5, token)
        if later & (risen > 0):
            sums_ptr += row.to(tl.int64) * WIDTH
            for at in range(0, WIDTH, BLOCK):
                place = at + tl.arange(0, BLOCK)
                tl.store(sums_ptr + place, tl.load(sums_ptr + place, mask=place < WIDTH) * fade, mask=place < WIDTH)
    else:
        tl.store(share_ptr + column, tl.zeros([CHUNK], share_ptr.dtype.element_ty), mask=column < count)
        if start == 0:
            place = tl.arange(0, 8)
            tl.store(numbers_ptr + place, tl.where(place == 5, -1.0, 0.0), mask=place < 6)

"""dgraph::lm_head on CUDA.

Every row is projected, chunk by chunk into one buffer, because the host does not know which are masked; the
kernels skip the rows that are not. Each row's vocabulary is reduced in shares, and the shares are combined in
order: the two largest logits, the sum of exponentials and their mean distance to the maximum, and the token
with its logit.

The noise of a draw has the integer part of the reference to the bit; its two logarithms differ in the last
bits of fp32 (below 4e-6), so a draw differs only where two tokens tie to within that.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.triton.rows import power_of_two

BLOCK = 2048
# Programs that fill a large GPU; with fewer rows, a row is divided into shares.
PROGRAMS = 1024


def kernel(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    masked: Tensor,
    temperature: Tensor,
    seed: Tensor,
    max_num_logits: int,
    suppress: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dgraph::lm_head; see its contract."""
    if max_num_logits < 1:
        raise InputError(f"dgraph::lm_head: max_num_logits must be at least 1 row, got {max_num_logits}.")
    n, vocab = h.shape[0], weight.shape[0]
    token = torch.empty(n, dtype=torch.int64, device=h.device)
    # An op's results may not share memory.
    confidence, margin, entropy = (torch.empty(n, dtype=torch.float32, device=h.device) for _ in range(3))
    buffer = torch.empty((min(n, max_num_logits), vocab), dtype=h.dtype, device=h.device)
    for first in range(0, n, max_num_logits):
        part = slice(first, min(first + max_num_logits, n))
        logits = buffer[: part.stop - first]
        if bias is None:
            torch.mm(h[part], weight.t(), out=logits)
        else:
            torch.addmm(bias, h[part], weight.t(), out=logits)
        found = token[part], confidence[part], margin[part], entropy[part]
        reduce_logits(logits, masked[part], temperature[part], seed[part], suppress, *found)
    return token, confidence, margin, entropy


def reduce_logits(
    logits: Tensor,
    masked: Tensor,
    temperature: Tensor,
    seed: Tensor,
    suppress: int,
    token: Tensor,
    confidence: Tensor,
    margin: Tensor,
    entropy: Tensor,
    block: int = BLOCK,
    splits: int | None = None,
) -> None:
    """Write token i64[R], and confidence, margin and entropy f32[R], for each row of logits [R, V].

    The other arguments, and what a row that is not masked gets, are those of dgraph::lm_head. `block`: logits per
    iteration; `splits`: shares of a row.
    """
    rows, vocab = logits.shape
    if not rows:
        return
    block = power_of_two(vocab, 16, block)
    if splits is None:
        splits = max(1, min(PROGRAMS // rows, vocab // (2 * block), 32))
    keys = torch.empty((6, rows, splits), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, splits), dtype=torch.int32, device=logits.device)
    temperature, seed, masked = temperature.contiguous(), seed.contiguous(), masked.contiguous()
    share = triton.cdiv(triton.cdiv(vocab, splits), block) * block
    _reduce[(rows, splits)](
        logits, masked, temperature, seed, *keys.unbind(), ids, vocab, logits.stride(0), suppress, share,
        splits, block, num_warps=4,
    )  # fmt: skip
    _combine[(rows,)](
        masked, *keys.unbind(), ids, token, confidence, margin, entropy, splits, power_of_two(splits), num_warps=1
    )


@triton.jit
def _mix(x):
    """The 32-bit finaliser of the reference."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def _gumbel(low, high, index):
    """Standard Gumbel noise of `index`, from the two halves of a seed."""
    bits = _mix(_mix(low) ^ high)
    noise = _mix(_mix(index ^ bits) + _mix(bits ^ 0x5BD1E995))
    survival = tl.minimum((noise.to(tl.float32) + 0.5) * (1.0 / 4294967296.0), 1.0 - 1.0 / 16777216.0)
    # -log(1 - x): by its series where the logarithm of a number near 1 would lose the bits of x.
    x = tl.minimum(survival, 0.125)
    series = 1.0 / 8 + x * (1.0 / 9)
    series = 1.0 / 6 + x * (1.0 / 7 + x * series)
    series = 1.0 / 4 + x * (1.0 / 5 + x * series)
    series = 1.0 / 2 + x * (1.0 / 3 + x * series)
    small = x + x * x * series
    return -tl.log(tl.where(survival <= 0.125, small, -tl.log(1.0 - survival)))


@triton.jit
def _scaled(value, factor):
    """value * factor, where a factor of zero wins over an infinite value."""
    return tl.where(factor > 0, value * factor, 0.0)


@triton.jit
def _accumulate(x, top, second, total, spread):
    """Each lane after one more logit, with one exponential.

    The two largest logits, the sum of exp(x - top), and the sum of (top - x) * exp(x - top).
    """
    gap = tl.abs(x - top)
    fade = tl.exp(-gap)
    risen = x > top
    spread = tl.where(risen, _scaled(spread + total * gap, fade), spread + _scaled(gap, fade))
    total = tl.where(risen, total * fade + 1.0, total + fade)
    return tl.maximum(top, x), tl.maximum(second, tl.minimum(x, top)), total, spread


@triton.jit
def _merge(top, second, total, spread, lane, BLOCK: tl.constexpr):
    """The same four of all lanes together."""
    highest = tl.max(top)
    first = tl.min(tl.where(top == highest, lane, BLOCK))
    runner = tl.max(tl.where(lane == first, second, top))
    fade, gap = tl.exp(top - highest), highest - top
    return highest, runner, tl.sum(total * fade), tl.sum(_scaled(spread + total * gap, fade))


@triton.jit
def _take(
    x, index, suppress, divisor, low, high, top, second, total, spread, best, chosen, ids, DRAWN: tl.constexpr
):  # fmt: skip
    """The lanes after one more logit each."""
    x = tl.where(index == suppress, float("-inf"), x.to(tl.float32))
    if DRAWN:
        x = tl.div_rn(x, divisor)
        key = x + _gumbel(low, high, index.to(tl.uint32))
        better = key > best
        best, chosen = tl.where(better, key, best), tl.where(better, x, chosen)
    else:
        better = x > top
    ids = tl.where(better, index, ids)
    top, second, total, spread = _accumulate(x, top, second, total, spread)
    if not DRAWN:
        best, chosen = top, top
    return top, second, total, spread, best, chosen, ids


@triton.jit
def _share(logits_ptr, first, last, suppress, temperature, low, high, BLOCK: tl.constexpr, DRAWN: tl.constexpr):
    """The lanes after the logits [first, last). Whole blocks need no mask per lane, and load one block ahead."""
    lane = tl.arange(0, BLOCK)
    # A finite start: the difference of two infinities is no number.
    top, second = tl.full([BLOCK], -1e30, tl.float32), tl.full([BLOCK], -1e30, tl.float32)
    total, spread = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    best, chosen = tl.full([BLOCK], float("-inf"), tl.float32), tl.full([BLOCK], float("-inf"), tl.float32)
    ids = tl.full([BLOCK], 2147483647, tl.int32)
    divisor = tl.zeros([BLOCK], tl.float32) + temperature
    whole = first + (last - first) // BLOCK * BLOCK
    ahead = tl.load(logits_ptr + first + lane, mask=first < whole, other=0.0)
    for at in range(first, whole, BLOCK):
        x = ahead
        ahead = tl.load(logits_ptr + at + BLOCK + lane, mask=at + BLOCK < whole, other=0.0)
        top, second, total, spread, best, chosen, ids = _take(
            x, at + lane, suppress, divisor, low, high, top, second, total, spread, best, chosen, ids, DRAWN
        )
    if whole < last:
        x = tl.load(logits_ptr + whole + lane, mask=whole + lane < last, other=float("-inf"))
        top, second, total, spread, best, chosen, ids = _take(
            x, whole + lane, suppress, divisor, low, high, top, second, total, spread, best, chosen, ids, DRAWN
        )
    return top, second, total, spread, best, chosen, ids


@triton.jit
def _reduce(
    logits_ptr, masked_ptr, temperature_ptr, seed_ptr,
    top_ptr, second_ptr, total_ptr, spread_ptr, best_ptr, chosen_ptr, ids_ptr,
    vocab, stride, suppress, share, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every lane reduces its own logits; the lanes meet once, at the end."""
    row, split = tl.program_id(0), tl.program_id(1)
    if tl.load(masked_ptr + row) == 0:
        return
    logits_ptr += row.to(tl.int64) * stride
    temperature = tl.load(temperature_ptr + row)
    seed = tl.load(seed_ptr + row)
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    first = split * share
    last = tl.maximum(tl.minimum(first + share, vocab), first)
    if temperature > 0:
        top, second, total, spread, best, chosen, ids = _share(
            logits_ptr, first, last, suppress, temperature, low, high, BLOCK, True
        )
    else:
        top, second, total, spread, best, chosen, ids = _share(
            logits_ptr, first, last, suppress, temperature, low, high, BLOCK, False
        )
    winner = tl.max(best)
    token = tl.min(tl.where(best == winner, ids, 2147483647))
    highest, runner, mass, distance = _merge(top, second, total, spread, tl.arange(0, BLOCK), BLOCK)
    at = row * SPLITS + split
    tl.store(top_ptr + at, highest)
    tl.store(second_ptr + at, runner)
    tl.store(total_ptr + at, mass)
    tl.store(spread_ptr + at, distance)
    tl.store(best_ptr + at, winner)
    tl.store(chosen_ptr + at, tl.max(tl.where(ids == token, chosen, float("-inf"))))
    tl.store(ids_ptr + at, token)


@triton.jit
def _combine(
    masked_ptr, top_ptr, second_ptr, total_ptr, spread_ptr, best_ptr, chosen_ptr, ids_ptr,
    token_ptr, confidence_ptr, margin_ptr, entropy_ptr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if tl.load(masked_ptr + row) == 0:
        tl.store(token_ptr + row, tl.full([], -1, tl.int64))
        tl.store(confidence_ptr + row, float("-inf"))
        tl.store(margin_ptr + row, float("-inf"))
        tl.store(entropy_ptr + row, float("inf"))
        return
    split = tl.arange(0, BLOCK)
    at, inside = row * SPLITS + split, split < SPLITS
    top = tl.load(top_ptr + at, mask=inside, other=-1e30)
    second = tl.load(second_ptr + at, mask=inside, other=-1e30)
    total = tl.load(total_ptr + at, mask=inside, other=0.0)
    spread = tl.load(spread_ptr + at, mask=inside, other=0.0)
    best = tl.load(best_ptr + at, mask=inside, other=float("-inf"))
    chosen = tl.load(chosen_ptr + at, mask=inside, other=float("-inf"))
    ids = tl.load(ids_ptr + at, mask=inside, other=2147483647)
    highest, runner, mass, distance = _merge(top, second, total, spread, split, BLOCK)
    token = tl.min(tl.where(best == tl.max(best), ids, 2147483647))
    logit = tl.max(tl.where(ids == token, chosen, float("-inf")))
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(confidence_ptr + row, tl.exp(logit - highest) / mass)
    tl.store(margin_ptr + row, (1.0 - tl.exp(runner - highest)) / mass)
    tl.store(entropy_ptr + row, tl.log(mass) + distance / mass)

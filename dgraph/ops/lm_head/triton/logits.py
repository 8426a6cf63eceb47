"""Device functions of dgraph::lm_head: the noise of a draw, and the reduction of a share of a row's logits.

The noise has the integer part of the reference to the bit; its two logarithms differ in the last bits of fp32 (below
4e-6), so a draw differs only where two tokens tie to within that.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    """The 32-bit finaliser of the reference."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def exponential(low, high, index):
    """Standard exponential noise of `index`, above 1e-10, from the two halves of a seed."""
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
    return tl.where(survival <= 0.125, small, -tl.log(1.0 - survival))


@triton.jit
def gumbel(low, high, index):
    """Standard Gumbel noise of `index`, from the two halves of a seed."""
    return -tl.log(exponential(low, high, index))


@triton.jit
def _scaled(value, factor):
    """value * factor, where a factor of zero wins over an infinite value."""
    return tl.where(factor > 0, value * factor, 0.0)


@triton.jit
def _accumulate(x, top, second, total, spread):
    """Add one more logit to each lane, with one exponential.

    The two largest logits, the sum of exp(x - top), and the sum of (top - x) * exp(x - top).
    """
    gap = tl.abs(x - top)
    fade = tl.exp(-gap)
    risen = x > top
    spread = tl.where(risen, _scaled(spread + total * gap, fade), spread + _scaled(gap, fade))
    total = tl.where(risen, total * fade + 1.0, total + fade)
    return tl.maximum(top, x), tl.maximum(second, tl.minimum(x, top)), total, spread


@triton.jit
def merge(top, second, total, spread, lane, BLOCK: tl.constexpr):
    """Merge the same four numbers of all lanes."""
    highest = tl.max(top)
    first = tl.min(tl.where(top == highest, lane, BLOCK))
    runner = tl.max(tl.where(lane == first, second, top))
    fade, gap = tl.exp(top - highest), highest - top
    return highest, runner, tl.sum(total * fade), tl.sum(_scaled(spread + total * gap, fade))


@triton.jit
def _take(
    x, index, suppress, divisor, low, high, top, second, total, spread, best, chosen, ids, DRAWN: tl.constexpr
):  # fmt: skip
    """Update the lanes by one more logit each."""
    x = tl.where(index == suppress, float("-inf"), x.to(tl.float32))
    if DRAWN:
        x = tl.div_rn(x, divisor)
        key = x + gumbel(low, high, index.to(tl.uint32))
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
def reduce_share(
    logits_ptr, first, last, base, suppress, temperature, low, high, BLOCK: tl.constexpr, DRAWN: tl.constexpr
):  # fmt: skip
    """Reduce the logits [first, last) of a row in lanes; the first logit of the row is that of the id `base`.

    Whole blocks need no mask per lane, and load one block ahead.
    """
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
            x, base + at + lane, suppress, divisor, low, high, top, second, total, spread, best, chosen, ids, DRAWN
        )
    if whole < last:
        x = tl.load(logits_ptr + whole + lane, mask=whole + lane < last, other=float("-inf"))
        top, second, total, spread, best, chosen, ids = _take(
            x, base + whole + lane, suppress, divisor, low, high, top, second, total, spread, best, chosen, ids, DRAWN
        )
    return top, second, total, spread, best, chosen, ids

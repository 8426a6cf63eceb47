"""Kernels of dgraph::kv_pack that choose the number of candidates that each head keeps, and list them.

Keys are integers [Hkv, M] in the order of the ranks; the run of a sequence begins at cu[s] and is as long as it has
candidates. The threshold of a head is the largest number that as many keys reach as it keeps, found two bits at a
time. That of all heads together is found four bits per launch, because every head must be counted in between.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

PLAN = tl.constexpr(4)  # of each sequence: candidates, those below the window, rows in the window, budget per head
ROUNDS = tl.constexpr(8)  # of four bits
DIGITS = tl.constexpr(16)
LEAST = tl.constexpr(-(2**31))


@triton.jit
def share(
    sums_ptr, cu_ptr, plan_ptr, count_ptr, count_row,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, FLOOR: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute k_h by mass.

    Wanted sizes descend with the mass, so no head is cut after one that is not. The first r heads together keep what
    they want together, but at most r * n.
    """
    s = tl.program_id(0)
    n, budget = tl.load(plan_ptr + s * PLAN), tl.load(plan_ptr + s * PLAN + 3)
    if (budget == n) | (budget == 0):
        return
    head = tl.arange(0, WIDTH)
    real = head < HEADS
    tile = tl.load(cu_ptr + s) // ROWS + s
    mass = tl.zeros([WIDTH], tl.float64)
    for first in range(0, tl.cdiv(n, ROWS), BLOCK):
        i = first + tl.arange(0, BLOCK)
        at = (tile + i)[:, None] * HEADS + head[None, :]
        mass += tl.sum(tl.load(sums_ptr + at, mask=(i * ROWS < n)[:, None] & real[None, :], other=0.0), 0)
    mass = tl.where(mass > 0, mass, 0.0)
    mass = tl.where(tl.sum(mass) > 0, mass, tl.where(real, 1.0, 0.0))
    base = tl.floor(tl.full([], FLOOR, tl.float64) * budget.to(tl.float64)).to(tl.int32)
    shared = ((budget - base) * HEADS).to(tl.float64)
    wanted = tl.where(real, base + tl.floor(shared * mass / tl.sum(mass)).to(tl.int32), 0)
    column = tl.reshape(head, [1, WIDTH])
    other_mass = tl.reshape(mass, [1, WIDTH])
    ahead = (other_mass > mass[:, None]) | ((other_mass == mass[:, None]) & (column < head[:, None]))
    ahead = ahead & (column < HEADS)
    before = tl.sum(tl.where(ahead, tl.reshape(wanted, [1, WIDTH]), 0), 1)
    rank = tl.sum(ahead.to(tl.int32), 1)
    kept = tl.minimum(before + wanted, (rank + 1) * n) - tl.minimum(before, rank * n)
    tl.store(count_ptr + s.to(tl.int64) * count_row + head, kept, mask=real)


@triton.jit
def _reached(keys_ptr, n, low, step, TILE: tl.constexpr):
    """Count the keys, of n, that reach low, low + step and low + 2 * step."""
    i = tl.arange(0, TILE)
    bound, next_bound, last_bound = low.to(tl.int32), (low + step).to(tl.int32), (low + 2 * step).to(tl.int32)
    one = tl.zeros([TILE], tl.int32)
    two, three = one, one
    for first in range(0, n, TILE):
        inside = first + i < n
        key = tl.load(keys_ptr + first + i, mask=inside, other=LEAST)
        one += ((key >= bound) & inside).to(tl.int32)
        two += ((key >= next_bound) & inside).to(tl.int32)
        three += ((key >= last_bound) & inside).to(tl.int32)
    return tl.sum(one), tl.sum(two), tl.sum(three)


@triton.jit(do_not_specialize=["turn"])
def count_joint(
    keys_ptr, cu_ptr, plan_ptr, counts_ptr, bounds_ptr, m, b, turn,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """counts[turn, s, h, digit]: keys that reach the bound so far with the next digit; in the last turn, with the
    bound itself as digit 0 and the number above it as digit 1."""
    s, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, budget = tl.load(plan_ptr + s * PLAN), tl.load(plan_ptr + s * PLAN + 3)
    if (budget == n) | (budget == 0):
        return
    digit, other = tl.arange(0, DIGITS), tl.arange(0, WIDTH)
    bound = LEAST + (0 * turn).to(tl.int64)
    if turn > 0:
        at = (((turn - 1) * b + s) * HEADS + other[:, None]) * DIGITS + digit[None, :]
        inside = (other < HEADS)[:, None] & (digit > 0)[None, :]
        total = tl.sum(tl.load(counts_ptr + at, mask=inside, other=0), 0)
        found = tl.sum(((total >= budget * HEADS) & (digit > 0)).to(tl.int32))
        bound = tl.load(bounds_ptr + (turn - 1) * b + s).to(tl.int64)
        bound += found.to(tl.int64) << (4 * (ROUNDS - turn))
    if turn < ROUNDS:
        if (head == 0) & (part == 0):
            tl.store(bounds_ptr + turn * b + s, bound.to(tl.int32))
        step = tl.full([], 1, tl.int64) << (4 * (ROUNDS - 1 - turn))
        first = 3 * part + 1
    else:
        step = tl.full([], 1, tl.int64)
        first = 0 * part
    run = keys_ptr + head.to(tl.int64) * m + tl.load(cu_ptr + s)
    one, two, three = _reached(run, n, bound + first * step, step, TILE)
    counts_ptr += ((turn * b + s) * HEADS + head) * DIGITS + first
    tl.store(counts_ptr, one)
    tl.store(counts_ptr + 1, two)
    tl.store(counts_ptr + 2, three)


@triton.jit
def divide(
    counts_ptr, plan_ptr, count_ptr, count_row, HEADS: tl.constexpr, WIDTH: tl.constexpr, FLOOR: tl.constexpr
):  # fmt: skip
    """Compute k_h from the numbers of candidates of each head that reach the threshold of all heads, and exceed it."""
    s = tl.program_id(0)
    n, budget = tl.load(plan_ptr + s * PLAN), tl.load(plan_ptr + s * PLAN + 3)
    if (budget == n) | (budget == 0):
        return
    head = tl.arange(0, WIDTH)
    real = head < HEADS
    at = (s * HEADS + head) * DIGITS
    reach = tl.load(counts_ptr + at, mask=real, other=0)
    above = tl.load(counts_ptr + at + 1, mask=real, other=0)
    equal = reach - above
    left = budget * HEADS - tl.sum(above) - (tl.cumsum(equal, 0) - equal)
    first = above + tl.maximum(tl.minimum(left, equal), 0)
    floor = tl.full([], FLOOR, tl.float64)
    kept = floor * budget.to(tl.float64) + (1.0 - floor) * first.to(tl.float64)
    tl.store(count_ptr + s.to(tl.int64) * count_row + head, tl.floor(kept).to(tl.int32), mask=real)


@triton.jit
def list_best(
    keys_ptr, cu_ptr, plan_ptr, count_ptr, first_ptr, listed_ptr, m, count_row, TILE: tl.constexpr
):  # fmt: skip
    """listed[h, cu[s] + i]: rows of the candidates that head h keeps, ascending; h counts from the first of those that
    are listed."""
    s, mine = tl.program_id(0), tl.program_id(1)
    head = mine.to(tl.int64)
    if first_ptr is not None:
        head += tl.load(first_ptr)
    n = tl.load(plan_ptr + s * PLAN)
    if n == 0:
        return
    size = tl.load(count_ptr + s.to(tl.int64) * count_row + head)
    if size == 0:
        return
    start = tl.load(cu_ptr + s)
    run = mine.to(tl.int64) * m + start
    keys_ptr += head * m + start
    bound = tl.full([], LEAST, tl.int64)
    ties = 0
    if size < n:
        for turn in range(16):
            step = tl.full([], 1, tl.int64) << (30 - 2 * turn)
            one, two, three = _reached(keys_ptr, n, bound + step, step, TILE)
            digit = (one >= size).to(tl.int64) + (two >= size).to(tl.int64) + (three >= size).to(tl.int64)
            bound += digit * step
        above, _, _ = _reached(keys_ptr, n, bound + 1, tl.full([], 0, tl.int64), TILE)
        ties = size - above
    below, cut = tl.load(plan_ptr + s * PLAN + 1), tl.load(plan_ptr + s * PLAN + 2)
    least = bound.to(tl.int32)
    above_before, equal_before = 0, 0
    for first in range(0, n, TILE):
        c = first + tl.arange(0, TILE)
        key = tl.load(keys_ptr + c, mask=c < n, other=LEAST)
        above = ((key > least) & (c < n)).to(tl.int32)
        equal = ((key == least) & (c < n)).to(tl.int32)
        running = tl.cumsum(above + (equal << 16), 0)  # both at once: a tile has less than 2**16 keys
        of_equal = equal_before + (running >> 16) - equal
        place = above_before + (running & 0xFFFF) - above + tl.minimum(of_equal, ties)
        row = start + c + tl.where(c >= below, cut, 0)
        tl.store(listed_ptr + run + place, row, mask=(above > 0) | ((equal > 0) & (of_equal < ties)))
        above_before += tl.sum(above)
        equal_before += tl.sum(equal)

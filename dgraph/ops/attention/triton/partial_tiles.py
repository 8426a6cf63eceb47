"""A tile of partial_attention on CUDA: rows of one sequence, all query heads of one KV head, a share of the keys."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from dgraph.ops.attention.triton.paged_attention import load_keys
from dgraph.ops.kv.triton.scales import above, halved, load_scales, scales_at


@triton.jit
def queries(
    q_ptr, order_ptr, limit_ptr, first, end, head, q_row, scale,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Queries [BLOCK_M, WIDTH] of the listed rows from `first` on, factors of their scores, and rows, live, limit.

    SCALED: keys are in float8.
    """
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, WIDTH)
    at = first + m // GROUP
    live = (m // GROUP < ROWS) & (at < end)
    row = tl.load(order_ptr + at, mask=live, other=0)
    limit = tl.load(limit_ptr + row, mask=live, other=0)
    q_at = row.to(tl.int64)[:, None] * q_row + ((head * GROUP + m % GROUP) * D)[:, None] + d[None, :]
    q = tl.load(q_ptr + q_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
    if SCALED:
        q, q_by = halved(q)
        by = scale * q_by
    else:
        by = tl.full([BLOCK_M], scale, tl.float32)
    return q, by, row, live, limit


@triton.jit
def scan(
    q, live, limit, k_ptr, v_ptr, k_blocks, v_blocks, table_ptr, keys, split, column,
    k_page, k_slot, v_page, v_slot, by, k_scale_ptr, v_scale_ptr,
    PAGE: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr, BULK: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """Largest score and sum of the weights of each row over one share of its keys; with VALUES also their weighted sum.

    by: factor of each row's scores. k_scale_ptr, v_scale_ptr: scales from the KV head on, or None.
    """
    longest = tl.minimum(tl.max(limit), keys)
    share = tl.cdiv(tl.cdiv(longest, BLOCK_N), SPLITS) * BLOCK_N
    first, last = split * share, tl.minimum(split * share + share, longest)
    # Keys that every row of the tile sees need no mask.
    shortest = tl.min(tl.where(live, limit, longest))
    plain = tl.maximum(tl.minimum(shortest // BLOCK_N * BLOCK_N, last), first)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for key in tl.range(first, plain, BLOCK_N, num_stages=STAGES):
        if BULK:
            slot = tl.load(table_ptr + key // PAGE) * PAGE + key % PAGE
            k = k_blocks.load([slot, column]).T
            if VALUES:
                v = v_blocks.load([slot, column])
        else:
            k, v = load_keys(
                k_ptr, v_ptr, table_ptr, key, longest, k_page, k_slot, v_page, v_slot, PAGE, D, WIDTH, BLOCK_N, False
            )
        if k_scale_ptr is not None:
            k_by, v_by = load_scales(k_scale_ptr, v_scale_ptr, table_ptr, key, longest, PAGE, KV_HEADS, BLOCK_N, False)
            score = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * k_by[None, :]
        else:
            score = tl.dot(q, k, input_precision=PRECISION)
        if VALUES and k_scale_ptr is not None:
            higher = tl.maximum(top, above(score, by, v_by))
        else:
            higher = tl.maximum(top, tl.max(score, 1) * by)
        p = tl.exp2(score * by[:, None] - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(p, 1)
        if VALUES:
            if k_scale_ptr is not None:
                p, v = p * v_by[None, :], v.to(q.dtype)
            acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        top = higher
    for key in tl.range(plain, last, BLOCK_N, num_stages=1):
        k, v = load_keys(
            k_ptr, v_ptr, table_ptr, key, longest, k_page, k_slot, v_page, v_slot, PAGE, D, WIDTH, BLOCK_N, True
        )
        if k_scale_ptr is not None:
            k_by, v_by = load_scales(k_scale_ptr, v_scale_ptr, table_ptr, key, longest, PAGE, KV_HEADS, BLOCK_N, True)
            score = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * k_by[None, :]
        else:
            score = tl.dot(q, k, input_precision=PRECISION)
        position = key + tl.arange(0, BLOCK_N)
        score = tl.where(position[None, :] < limit[:, None], score, float("-inf"))
        if VALUES and k_scale_ptr is not None:
            higher = tl.maximum(top, above(score, by, v_by))
        else:
            higher = tl.maximum(top, tl.max(score, 1) * by)
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row may see nothing so far
        p = tl.exp2(score * by[:, None] - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(p, 1)
        if VALUES:
            if k_scale_ptr is not None:
                p, v = p * v_by[None, :], v.to(q.dtype)
            acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        top = higher
    return top, total, acc


@triton.jit
def changes(
    q, limit, top, total, k_ptr, dv_ptr, changed_ptr, room, first, last, longest, dv_row, k_page, k_slot, by,
    k_scale_ptr, PAGE: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, CHANGES: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum the weights of the changed keys in [first, last) of the list times the differences of their values.

    changed_ptr: slot and position of each changed key, in that order, `room` of each.
    """
    d = tl.arange(0, WIDTH)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for start in tl.range(first, last, CHANGES, num_stages=2):
        j = start + tl.arange(0, CHANGES)
        slot = tl.load(changed_ptr + j, mask=j < last, other=0)
        position = tl.load(changed_ptr + room + j, mask=j < last, other=longest)
        some = position < longest
        k_at = (slot // PAGE).to(tl.int64) * k_page + slot % PAGE * k_slot
        k = tl.load(k_ptr + k_at[None, :] + d[:, None], mask=some[None, :] & (d < D)[:, None], other=0.0)
        dv_at = j.to(tl.int64)[:, None] * dv_row + d[None, :]
        dv = tl.load(dv_ptr + dv_at, mask=some[:, None] & (d < D)[None, :], other=0.0)
        if k_scale_ptr is not None:
            by_at = scales_at((slot // PAGE).to(tl.int64), slot % PAGE, PAGE, KV_HEADS)
            k_by = tl.load(k_scale_ptr + by_at, mask=some, other=0.0).to(tl.float32)
            score = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * k_by[None, :]
        else:
            score = tl.dot(q, k, input_precision=PRECISION)
        score = tl.where(position[None, :] < limit[:, None], score * by[:, None], float("-inf"))
        if SPLITS > 1:  # these keys may lie in another share
            higher = tl.maximum(top, tl.max(score, 1))
            fade = tl.exp2(top - tl.where(higher == float("-inf"), 0.0, higher))
            total, acc, top = total * fade, acc * fade[:, None], higher
        p = tl.exp2(score - tl.where(top == float("-inf"), 0.0, top)[:, None])
        acc = tl.dot(p.to(dv.dtype), dv, acc, input_precision=PRECISION)
    return top, total, acc


@triton.jit
def finish(
    found, row, head, live, slots_ptr, c_ptr, out_ptr, sums_ptr, n, heads, c_page, c_slot, added,
    PAGE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write context [M, WIDTH] to the result and the cache, and the sums of its cosine with the cached context.

    added: True if the context so far is a change of the cached one.
    """
    d = tl.arange(0, WIDTH)
    inside = live[:, None] & (d < D)[None, :]
    slot = tl.load(slots_ptr + row, mask=live, other=0)
    c_at = ((slot // PAGE).to(tl.int64) * c_page + slot % PAGE * c_slot + head * D)[:, None] + d[None, :]
    old = tl.load(c_ptr + c_at, mask=inside, other=0.0).to(tl.float32)
    if added:
        found += old
    rounded = found.to(out_ptr.dtype.element_ty)
    new = rounded.to(tl.float32)
    sums_ptr += head * n + row
    tl.store(sums_ptr, tl.sum(new * old, 1), mask=live)
    tl.store(sums_ptr + heads * n, tl.sum(new * new, 1), mask=live)
    tl.store(sums_ptr + 2 * heads * n, tl.sum(old * old, 1), mask=live)
    out_at = (row.to(tl.int64) * heads + head)[:, None] * D + d[None, :]
    tl.store(out_ptr + out_at, rounded, mask=inside)
    tl.debug_barrier()  # several threads may hold one value of a narrow tile: all have read the old one now
    tl.store(c_ptr + c_at, rounded, mask=inside)


@triton.jit
def leave(
    acc, top, total, row, live, head, split, slots_ptr, c_ptr, out_ptr, sums_ptr, part_ptr, mass_ptr, n, c_page, c_slot,
    added, PAGE: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Finish a tile: write the context, or one share of it."""
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, WIDTH)
    head = head * GROUP + m % GROUP
    if SPLITS == 1:
        found = acc / tl.where(total > 0, total, 1.0)[:, None]
        finish(
            found, row, head, live, slots_ptr, c_ptr, out_ptr, sums_ptr, n, HEADS, c_page, c_slot, added,
            PAGE, D, WIDTH,
        )  # fmt: skip
    else:
        at = split.to(tl.int64) * n * HEADS + row * HEADS + head
        tl.store(mass_ptr + at, top, mask=live)
        tl.store(mass_ptr + tl.full([], SPLITS, tl.int64) * n * HEADS + at, total, mask=live)
        inside = (live & (top > float("-inf")))[:, None] & (d < D)[None, :]
        tl.store(part_ptr + at[:, None] * D + d[None, :], acc, mask=inside)


@triton.jit
def exactly(
    q_ptr, k_ptr, v_ptr, k_blocks, v_blocks, c_ptr, table_ptr, order_ptr, slots_ptr, limit_ptr,
    out_ptr, sums_ptr, part_ptr, mass_ptr,
    first, end, head, split, n, keys, q_row, k_page, k_slot, v_page, v_slot, c_page, c_slot, scale,
    k_scale_ptr, v_scale_ptr,
    PAGE: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """Compute exact attention of a tile of rows in the list."""
    q, by, row, live, limit = queries(
        q_ptr, order_ptr, limit_ptr, first, end, head, q_row, scale, GROUP, D, WIDTH, ROWS, BLOCK_M,
        k_scale_ptr is not None,
    )  # fmt: skip
    top, total, acc = scan(
        q, live, limit, k_ptr, v_ptr, k_blocks, v_blocks, table_ptr, keys, split, head * D,
        k_page, k_slot, v_page, v_slot, by, k_scale_ptr, v_scale_ptr,
        PAGE, HEADS // GROUP, D, WIDTH, BLOCK_M, BLOCK_N, STAGES, SPLITS, PRECISION, BULK, True,
    )  # fmt: skip
    leave(
        acc, top, total, row, live, head, split, slots_ptr, c_ptr, out_ptr, sums_ptr, part_ptr, mass_ptr, n,
        c_page, c_slot, False, PAGE, GROUP, HEADS, D, WIDTH, BLOCK_M, SPLITS,
    )  # fmt: skip

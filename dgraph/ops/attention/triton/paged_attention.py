"""dgraph::paged_attention on CUDA.

A program takes a tile of rows of one sequence, all query heads of one KV head, and a share of the keys. Heads and rows
are stacked as rows of one matrix, so that a key is read once per KV head, not per query head. With more than one share
a second kernel adds the shares up. The values of a wide head may be divided among programs, each of which computes all
scores. Such a program can hold its part of the sums in registers.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dgraph.ops.attention.triton import attention_float8, attention_roles
from dgraph.ops.attention.triton.attention_shares import finished, shares_for
from dgraph.ops.attention.triton.attention_tiling import Tiling, multiprocessors, tiling_for
from dgraph.ops.kv.triton.scales import above, check_scales, halved, load_scales
from dgraph.ops.padded import check_heads, check_ranges, check_window
from dgraph.ops.triton.rows import dense_rows, offsets_block, power_of_two, sequence_at, start_of, wait
from dgraph.ops.tuning import attention_shape, chosen


def blocks_of(
    k_cache: Tensor, v_cache: Tensor, block_n: int, parts: int = 1
) -> tuple[TensorDescriptor, TensorDescriptor] | None:
    """Each cache as a matrix [positions, Hkv * D] for the bulk copy engine; None if it cannot be read as one.

    A block has `block_n` positions, and of the values a head's share among `parts`.
    """
    pages, page, heads, d = k_cache.shape
    if k_cache.device.type == "cuda" and torch.cuda.get_device_capability(k_cache.device) < (9, 0):
        return None
    if page % block_n or d != power_of_two(d, 16) or pages * page >= 1 << 31:
        return None
    found = []
    for cache, columns in ((k_cache, d), (v_cache, d // parts)):
        step = cache.stride(1)
        if cache.stride() != (page * step, step, d, 1) or (step * cache.element_size() | cache.data_ptr()) % 16:
            return None
        flat = cache.as_strided((pages * page, heads * d), (step, 1))
        found.append(TensorDescriptor(flat, list(flat.shape), [step, 1], [block_n, columns]))
    return found[0], found[1]


def kernel(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_rows: Tensor,
    limit: Tensor,
    scale: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    origin: Tensor | None = None,
    window: int = 0,
    gap: Tensor | None = None,
    own: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    tiling: Tiling | None = None,
    rotation: tuple[Tensor, Tensor] | None = None,
    kind: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """dgraph::paged_attention; see its contract.

    Kernels whose warps have roles of their own know nothing of windows, gaps and own keys, so such a call is not
    theirs.

    Args:
        tiling: overrides the sizes chosen for the shape.
        rotation: cos and sin, [N, 1, D] of any dtype, for a q that is not rotated yet (see dgraph::rope). It is rotated
            where it is loaded, in fp32, and rounded to its dtype.
        kind: returns the results of dgraph::rows_quantise on the rows [N, Hq * D], counted by cu_rows, in this kind.
    """
    check_heads("paged_attention", q, k_cache.transpose(1, 2), 1)
    check_window("paged_attention", origin, window)
    check_ranges(q, k_cache, gap, own, k, v)
    check_scales("paged_attention", k_cache=(k_cache, k_scale), v_cache=(v_cache, v_scale))
    (n, heads, d), (_, page, kv_heads, _), b = q.shape, k_cache.shape, cu_rows.shape[0] - 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return finished(out, None, kind, cu_rows)
    keys = page_table.shape[1] * page
    tiling = tiling or chosen("paged_attention", attention_shape(q, k_cache, page_table))
    if tiling is None:
        cores, stored = multiprocessors(q.device), k_cache.element_size()
        tiling = tiling_for(n, b, (heads, kv_heads), d, page, keys, q.element_size(), cores, stored=stored)
    group, width, splits, parts = heads // kv_heads, power_of_two(d, 16), tiling.splits, tiling.parts
    rows = tiling.block_m // group
    q, page_table = dense_rows(q), dense_rows(page_table)
    if scale < 0:  # the largest score is taken before the scale
        q, scale = -q, -scale
    rotation = (dense_rows(rotation[0]), dense_rows(rotation[1])) if rotation is not None else None
    simple = origin is None and gap is None and own is None
    if tiling.roles and simple and attention_roles.fits(q, k_cache):
        wide = blocks_of(k_cache, v_cache, attention_roles.KEYS)
        if wide is not None:
            attention_roles.launch(q, wide, page, kv_heads, page_table, cu_rows, limit, scale, rotation, out)
            return finished(out, None, kind, cu_rows)
    shares = shares_for(q, splits) if splits > 1 else None
    part, mass = shares or (out, out)
    eight = tiling.roles and simple and attention_float8.fits(q, k_cache)
    wide = blocks_of(k_cache, v_cache, attention_float8.KEYS) if eight else None
    if wide is not None and k_scale is not None and v_scale is not None:
        scales, split = (k_scale, v_scale), (splits, part, mass)
        attention_float8.launch(q, wide, scales, page_table, cu_rows, limit, scale, rotation, out, split)
    else:
        blocks = blocks_of(k_cache, v_cache, tiling.block_n, parts) if tiling.bulk else None
        cos, sin = rotation or (q, q)
        k, v = (None if x is None else dense_rows(x) for x in (k, v))
        gap = None if gap is None else gap.contiguous()
        _attend[(kv_heads * parts, splits, b + 1 + n // rows)](
            q, k_cache, v_cache, *(blocks or (k_cache, v_cache)), page_table, cu_rows, limit, cos, sin,
            out, part, mass, k_scale, v_scale, origin, window, gap, own, k, v, n, b, keys,
            *(0 if x is None else x.stride(0) for x in (k, v)),
            q.stride(0), page_table.stride(0), cos.stride(0), sin.stride(0),
            *k_cache.stride()[:3], *v_cache.stride()[:3],
            scale * math.log2(math.e),
            page, group, heads, d, width, rows, tiling.block_m, tiling.block_n, splits, parts, offsets_block(b),
            "ieee" if q.dtype == torch.float32 else "tf32", blocks is not None, rotation is not None,
            num_warps=tiling.warps, num_stages=tiling.stages, **start_of(q.device),
        )  # fmt: skip
    return finished(out, shares, kind, cu_rows)


@triton.jit
def load_keys(
    k_ptr, v_ptr, table_ptr, key, longest, k_page, k_slot, v_page, v_slot,
    PAGE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    part=0, PARTS: tl.constexpr = 1,
):  # fmt: skip
    """Keys [WIDTH, BLOCK_N] and a part of the values, [BLOCK_N, WIDTH // PARTS], of the positions from `key` on; zeros
    from `longest` on.
    """
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, WIDTH)
    e = part * (WIDTH // PARTS) + tl.arange(0, WIDTH // PARTS)
    if PAGE % BLOCK_N == 0:
        page = tl.load(table_ptr + key // PAGE).to(tl.int64)
        k_ptr += page * k_page + key % PAGE * k_slot
        v_ptr += page * v_page + key % PAGE * v_slot
        k_at, v_at = n * k_slot, n * v_slot
    else:
        position = key + n
        if MASKED:
            page = tl.load(table_ptr + position // PAGE, mask=position < longest, other=0).to(tl.int64)
        else:
            page = tl.load(table_ptr + position // PAGE).to(tl.int64)
        k_at = page * k_page + (position % PAGE) * k_slot
        v_at = page * v_page + (position % PAGE) * v_slot
    k_at, v_at = k_at[None, :] + d[:, None], v_at[:, None] + e[None, :]
    if MASKED:  # unwritten slots may hold NaN, which no weight of zero hides
        seen = key + n < longest
        k = tl.load(k_ptr + k_at, mask=seen[None, :] & (d < D)[:, None], other=0.0)
        v = tl.load(v_ptr + v_at, mask=seen[:, None] & (e < D)[None, :], other=0.0)
    elif WIDTH == D:
        k, v = tl.load(k_ptr + k_at), tl.load(v_ptr + v_at)
    else:
        k = tl.load(k_ptr + k_at, mask=(d < D)[:, None], other=0.0)
        v = tl.load(v_ptr + v_at, mask=(e < D)[None, :], other=0.0)
    return k, v


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, k_blocks, v_blocks, table_ptr, cu_ptr, limit_ptr, cos_ptr, sin_ptr,
    out_ptr, part_ptr, mass_ptr, k_scale_ptr, v_scale_ptr, origin_ptr, window, gap_ptr, own_ptr, own_k_ptr, own_v_ptr,
    n, b, keys, own_k_row, own_v_row, q_row, table_row, cos_row, sin_row,
    k_page, k_slot, k_head, v_page, v_slot, v_head, scale,
    PAGE: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    PARTS: tl.constexpr, OFFSETS: tl.constexpr, PRECISION: tl.constexpr, BULK: tl.constexpr, ROTATED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    head, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    split, tile = tl.program_id(1), tl.program_id(2)
    VALUES: tl.constexpr = WIDTH // PARTS
    s = sequence_at(cu_ptr, b, tile, ROWS, OFFSETS)
    start = tl.load(cu_ptr + s)
    end = tl.load(cu_ptr + s + 1, mask=s < b, other=n)
    first_row = start + (tile - start // ROWS - s) * ROWS
    if first_row >= end:
        return
    m = tl.arange(0, BLOCK_M)
    row = first_row + m // GROUP
    live = (m // GROUP < ROWS) & (row < end)
    limit = tl.load(limit_ptr + row, mask=live & (s < b), other=0)  # padding rows see nothing
    longest = tl.minimum(tl.max(limit), keys)
    begin, since = 0, tl.zeros([BLOCK_M], tl.int32)
    if origin_ptr is not None:  # the first key that a row sees, and that any row of the tile does
        since = tl.load(origin_ptr + row, mask=live & (s < b), other=0) - window + 1
        begin = tl.min(tl.where(live & (s < b), since, longest))
        begin = tl.minimum(tl.maximum(begin, 0), longest) // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(longest - begin, BLOCK_N), SPLITS) * BLOCK_N
    first = begin + split * share
    last = tl.minimum(first + share, longest)

    # Keys that every row of the tile sees need no mask: those in [lead, plain).
    shortest = tl.min(tl.where(live, limit, longest))
    plain = tl.maximum(tl.minimum(shortest // BLOCK_N * BLOCK_N, last), first)
    lead = first
    if origin_ptr is not None:
        latest = tl.max(tl.where(live & (s < b), since, 0))
        lead = tl.maximum(tl.cdiv(tl.maximum(latest, 0), BLOCK_N) * BLOCK_N, first)
        nothing = lead >= plain
        lead, plain = tl.where(nothing, first, lead), tl.where(nothing, first, plain)
    # A gap of any row takes [gone, gone + hole) out of these.
    gone, hole = plain, 0
    gap_from, gap_to = tl.zeros([BLOCK_M], tl.int32), tl.zeros([BLOCK_M], tl.int32)
    if gap_ptr is not None:
        gap_from = tl.load(gap_ptr + 2 * row, mask=live & (s < b), other=0)
        gap_to = tl.load(gap_ptr + 2 * row + 1, mask=live & (s < b), other=0)
        there = gap_from < gap_to
        earliest = tl.maximum(tl.min(tl.where(there, gap_from, plain)), 0)
        latest = tl.minimum(tl.max(tl.where(there, gap_to, 0)), plain)
        gone = tl.minimum(tl.maximum(earliest // BLOCK_N * BLOCK_N, lead), plain)
        hole = tl.maximum(tl.cdiv(latest, BLOCK_N) * BLOCK_N, gone) - gone

    d = tl.arange(0, WIDTH)
    value = (row.to(tl.int64) * HEADS + head * GROUP + m % GROUP)[:, None]
    q_at = row.to(tl.int64)[:, None] * q_row + ((head * GROUP + m % GROUP) * D)[:, None] + d[None, :]
    q = tl.load(q_ptr + q_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
    if ROTATED:
        there = live[:, None] & (d < D)[None, :]
        turned = tl.where(d < D // 2, D // 2, -(D // 2))
        other = tl.load(q_ptr + q_at + turned[None, :], mask=there, other=0.0).to(tl.float32)
        angle = row.to(tl.int64)[:, None]
        cos = tl.load(cos_ptr + angle * cos_row + d[None, :], mask=there, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle * sin_row + d[None, :], mask=there, other=0.0).to(tl.float32)
        q = (q.to(tl.float32) * cos + tl.where((d < D // 2)[None, :], -other, other) * sin).to(q.dtype)
    k_ptr += head.to(tl.int64) * k_head
    v_ptr += head.to(tl.int64) * v_head
    table_ptr += s.to(tl.int64) * table_row
    if k_scale_ptr is not None:
        k_scale_ptr += head * PAGE
        v_scale_ptr += head * PAGE
        q, q_by = halved(q)
        by = scale * q_by
    else:
        by = tl.full([BLOCK_M], scale, tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUES], tl.float32)
    if own_ptr is not None:  # its own key comes first, in the first share
        alone = tl.load(own_ptr + row, mask=live & (s < b) & (split == 0), other=0) != 0
        there = alone[:, None] & (d < D)[None, :]
        own_at = row.to(tl.int64) * own_k_row + head * D
        own_k = tl.load(own_k_ptr + own_at[:, None] + d[None, :], mask=there, other=0.0).to(tl.float32)
        own_score = tl.sum(q.to(tl.float32) * own_k, 1) * by
        top = tl.where(alone, own_score, top)
        total = tl.where(alone, 1.0, total)
        e = part * VALUES + tl.arange(0, VALUES)
        own_at = row.to(tl.int64) * own_v_row + head * D
        there = alone[:, None] & (e < D)[None, :]
        acc = tl.load(own_v_ptr + own_at[:, None] + e[None, :], mask=there, other=0.0).to(tl.float32)
    for plainly in range(lead, plain - hole, BLOCK_N):
        key = plainly
        if gap_ptr is not None:
            key = tl.where(plainly < gone, plainly, plainly + hole)
        if BULK:
            slot = tl.load(table_ptr + key // PAGE) * PAGE + key % PAGE
            k = k_blocks.load([slot, head * D]).T
            v = v_blocks.load([slot, head * D + part * VALUES])
        else:
            k, v = load_keys(
                k_ptr, v_ptr, table_ptr, key, longest, k_page, k_slot, v_page, v_slot, PAGE, D, WIDTH, BLOCK_N, False,
                part, PARTS,
            )  # fmt: skip
        if k_scale_ptr is not None:
            k_by, v_by = load_scales(
                k_scale_ptr, v_scale_ptr, table_ptr, key, longest, PAGE, HEADS // GROUP, BLOCK_N, False
            )
            score = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * k_by[None, :]
            higher = tl.maximum(top, above(score, by, v_by))
        else:
            score = tl.dot(q, k, input_precision=PRECISION)
            higher = tl.maximum(top, tl.max(score, 1) * by)
        p = tl.exp2(score * by[:, None] - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(p, 1)
        if k_scale_ptr is not None:
            p, v = p * v_by[None, :], v.to(q.dtype)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        top = higher
    # The others: after the plain keys, and first those before them and amid them.
    for at in tl.range(plain - hole - (lead - first), last, BLOCK_N, num_stages=1):
        key = tl.where(at < plain - hole, at - plain + hole + lead, at) if origin_ptr is not None else at
        if gap_ptr is not None:
            key = tl.where((at >= plain - hole) & (at < plain), at - plain + hole + gone, key)
        if BULK and (WIDTH > 128 or k_scale_ptr is not None):  # pointers for such a tile take too many registers
            slot = tl.load(table_ptr + key // PAGE) * PAGE + key % PAGE
            k = k_blocks.load([slot, head * D]).T
            v = v_blocks.load([slot, head * D + part * VALUES])
            # An unwritten slot of the page may hold NaN; of a key, the score is masked below.
            v = tl.where((key + tl.arange(0, BLOCK_N) < longest)[:, None], v, tl.zeros_like(v))
        else:
            k, v = load_keys(
                k_ptr, v_ptr, table_ptr, key, longest, k_page, k_slot, v_page, v_slot, PAGE, D, WIDTH, BLOCK_N, True,
                part, PARTS,
            )  # fmt: skip
        if k_scale_ptr is not None:
            k_by, v_by = load_scales(
                k_scale_ptr, v_scale_ptr, table_ptr, key, longest, PAGE, HEADS // GROUP, BLOCK_N, True
            )
            score = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * k_by[None, :]
        else:
            score = tl.dot(q, k, input_precision=PRECISION)
        position = key + tl.arange(0, BLOCK_N)
        seen = position[None, :] < limit[:, None]
        if origin_ptr is not None:
            seen = seen & (position[None, :] >= since[:, None])
        if gap_ptr is not None:
            seen = seen & ((position[None, :] < gap_from[:, None]) | (position[None, :] >= gap_to[:, None]))
        score = tl.where(seen, score, float("-inf"))
        if k_scale_ptr is not None:
            higher = tl.maximum(top, above(score, by, v_by))
        else:
            higher = tl.maximum(top, tl.max(score, 1) * by)
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row may see nothing so far
        p = tl.exp2(score * by[:, None] - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(p, 1)
        if k_scale_ptr is not None:
            p, v = p * v_by[None, :], v.to(q.dtype)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        top = higher
    found = acc / tl.where(total > 0, total, 1.0)[:, None]
    e = part * VALUES + tl.arange(0, VALUES)
    inside = live[:, None] & (e < D)[None, :]
    if SPLITS == 1:
        tl.store(out_ptr + value * D + e[None, :], found.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        rank = split.to(tl.int64) * n * HEADS
        mass = top + tl.log2(tl.where(total > 0, total, 1.0))
        tl.store(mass_ptr + rank + row * HEADS + head * GROUP + m % GROUP, mass, mask=live & (part == 0))
        some = first < last
        if own_ptr is not None:
            some = some | (split == 0)
        if some:
            tl.store(part_ptr + (rank + value) * D + e[None, :], found, mask=inside)

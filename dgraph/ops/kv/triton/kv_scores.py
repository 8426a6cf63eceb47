"""dgraph::kv_scores on CUDA: the mean query of each window, then one pass over the keys, bound by reading them."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.ops.attention.sparse import SELECT
from dgraph.ops.kv.triton.kv_votes import rows_between
from dgraph.ops.kv.triton.scales import check_scales
from dgraph.ops.padded import check_heads
from dgraph.ops.triton.rows import dense_rows, offsets_block, power_of_two, sequence_at

# Values of a tile: enough that reading the next key hides the sums, few enough for the registers of four warps.
TILE = 4096


def kernel(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cu_rows: Tensor,
    cu_keys: Tensor,
    window: Tensor,
    action: Tensor,
    scale: float,
    shared: bool,
    k_scale: Tensor | None = None,
    block: int | None = None,
) -> Tensor:
    """dgraph::kv_scores; see its contract. `block` keys, a power of two, are one tile."""
    check_heads("kv_scores", q, k, 1)
    check_scales("kv_scores", k=(k, k_scale))
    (n, heads, d), (m, kv_heads, _), b = q.shape, k.shape, cu_rows.shape[0] - 1
    out = torch.empty((m, kv_heads), dtype=torch.float32, device=k.device)
    if not out.numel():
        return out
    if not n or not b:
        return out.fill_(0)
    q, k, width = dense_rows(q), dense_rows(k), power_of_two(d, 16)
    block = block or max(TILE // width, 1)
    mean = torch.empty((b, heads, d), dtype=torch.float32, device=q.device)
    _mean[(b, heads)](
        q, positions.contiguous(), cu_rows, window.contiguous(), action, mean,
        n.bit_length(), q.stride(0), SELECT, heads, d, width, max(TILE // width, 1), num_warps=4,
    )  # fmt: skip
    _score[(1 if shared else kv_heads, b + 1 + m // block)](
        k, cu_keys, action, mean, out, k_scale, m, b, k.stride(0), scale,
        SELECT, heads // kv_heads, kv_heads, d, width, block, shared, offsets_block(b), power_of_two(kv_heads),
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _mean(
    q_ptr, positions_ptr, cu_ptr, window_ptr, action_ptr, mean_ptr, steps, q_row,
    WANTED: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """mean[s, head] = the mean of q over the rows inside the window; zeros without such rows."""
    s, head = tl.program_id(0), tl.program_id(1)
    if tl.load(action_ptr + s) != WANTED:
        return
    low, high = tl.load(window_ptr + 2 * s), tl.load(window_ptr + 2 * s + 1)
    begin, end = rows_between(positions_ptr, cu_ptr, s, low, high, steps)
    d = tl.arange(0, WIDTH)
    acc = tl.zeros([BLOCK, WIDTH], tl.float32)
    for first in range(begin, end, BLOCK):
        row = first + tl.arange(0, BLOCK)
        at = row.to(tl.int64)[:, None] * q_row + head * D + d[None, :]
        acc += tl.load(q_ptr + at, mask=(row < end)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    found = tl.sum(acc, 0) / tl.maximum(end - begin, 1)
    tl.store(mean_ptr + (s * HEADS + head) * D + d, found, mask=d < D)


@triton.jit
def _score(
    k_ptr, cu_keys_ptr, action_ptr, mean_ptr, out_ptr, k_scale_ptr, keys, b, k_row, scale,
    WANTED: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, SHARED: tl.constexpr, OFFSETS: tl.constexpr, ALL_HEADS: tl.constexpr,
):  # fmt: skip
    """A tile of keys: for one KV head the best of its query heads, or for all of them the mean over all."""
    tile = tl.program_id(1)
    n, d = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    s = sequence_at(cu_keys_ptr, b, tile, BLOCK, OFFSETS)
    start = tl.load(cu_keys_ptr + s)
    end = tl.load(cu_keys_ptr + s + 1, mask=s < b, other=keys)
    key = start + (tile - start // BLOCK - s) * BLOCK + n
    wanted = tl.load(action_ptr + s, mask=s < b, other=-1) == WANTED
    # A sequence with another action has no mean query; all that is loaded for it, and written, is zeros.
    live = (key < end) & wanted
    inside = live[:, None] & (d < D)[None, :]
    k_at = key.to(tl.int64)[:, None] * k_row + d[None, :]
    mean_ptr += s.to(tl.int64) * KV_HEADS * GROUP * D
    if SHARED:
        acc = tl.zeros([BLOCK, WIDTH], tl.float32)
        for head in range(KV_HEADS):
            k = tl.load(k_ptr + k_at + head * D, mask=inside, other=0.0).to(tl.float32)
            if k_scale_ptr is not None:
                by = tl.load(k_scale_ptr + key.to(tl.int64) * KV_HEADS + head, mask=live, other=0.0)
                k *= by.to(tl.float32)[:, None]
            query = tl.zeros([WIDTH], tl.float32)
            for i in tl.static_range(GROUP):
                query += tl.load(mean_ptr + (head * GROUP + i) * D + d, mask=wanted & (d < D), other=0.0)
            acc += k * query[None, :]
        score = tl.sum(acc, 1) * scale / (KV_HEADS * GROUP)
        every = tl.arange(0, ALL_HEADS)
        out_at = key.to(tl.int64)[:, None] * KV_HEADS + every[None, :]
        same = tl.broadcast_to(score[:, None], [BLOCK, ALL_HEADS])
        tl.store(out_ptr + out_at, same, mask=(key < end)[:, None] & (every < KV_HEADS)[None, :])
    else:
        head = tl.program_id(0)
        k = tl.load(k_ptr + k_at + head * D, mask=inside, other=0.0).to(tl.float32)
        if k_scale_ptr is not None:
            by = tl.load(k_scale_ptr + key.to(tl.int64) * KV_HEADS + head, mask=live, other=0.0)
            k *= by.to(tl.float32)[:, None]
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        for i in tl.static_range(GROUP):
            query = tl.load(mean_ptr + (head * GROUP + i) * D + d, mask=wanted & (d < D), other=0.0)
            best = tl.maximum(best, tl.sum(k * query[None, :], 1) * scale)
        tl.store(out_ptr + key.to(tl.int64) * KV_HEADS + head, best, mask=key < end)

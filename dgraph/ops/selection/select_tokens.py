"""dgraph::select_tokens: select the rows of a block that survive eviction (FOCUS, budget and selection)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.draws import cu_rows_of, pad_rows
from dgraph.ops.padded import offsets_of, sequence_of
from dgraph.ops.registry import Sample, define

CONTRACT = """\
FOCUS budget and selection, per sequence; M = its candidates, a list in row order. Rows that are not masked
are always kept; masked None: the candidates are.
Budget: K = min(|M|, ceil(alpha * max(average, 1))), the product in fp32; alpha = inf gives |M|.
With keep > 0 instead: K = min(|M|, keep). An average of inf evicts nothing in either case.
All rows are kept unless |M| > K > 0. Else the base selection is {score >= mean + std} if that has at least
K rows (not considered with keep > 0), otherwise the K rows of largest score; ties: lower row first. Mean
and population standard deviation over M are accumulated in float64 in row order. To the base selection are
added
 - AR context: of list neighbours i, i + 1 whose positions differ by exactly 1: i, if the base selection
   has i + 1 (one hop);
 - placeholder integrity: every masked row m with reached < position(m) < r, where r is the largest
   position selected of M so far, and reached the absolute position of the rightmost row retained so far in
   this block (-1 before its first step).
r(S) = position of the last kept row of the sequence. New limit = min(limit, r(S) + 1) for every row of the
sequence; new reached = max(reached, r(S)), unchanged for a sequence without rows.
score f32[N], finite; candidate bool[N]; positions i64[N]; cu_rows i32[b+1]; limit i32[N]; average f32[b];
reached i32[b]; masked bool[N] or None -> keep bool[N], limit i32[N], reached i32[b].
Scores of rows that are no candidates are not read. Padding rows give keep False and limit 0; they may hold
anything.
Deterministic; the result of a sequence is the same alone and in any batch."""


def reference(
    score: Tensor,
    candidate: Tensor,
    positions: Tensor,
    cu_rows: Tensor,
    limit: Tensor,
    average: Tensor,
    reached: Tensor,
    alpha: float,
    keep: int,
    masked: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    if not alpha > 0:
        raise InputError(f"dgraph::select_tokens: alpha must be above 0 (inf keeps everything), got {alpha}.")
    n, live = score.shape[0], int(cu_rows[-1])
    sequence = sequence_of(cu_rows, live)
    index = candidate[:live].nonzero().squeeze(1)
    offsets = offsets_of(candidate, cu_rows)
    kept = torch.zeros_like(candidate)
    kept[:live] = True
    if len(index):
        # [b, m] tables over the candidate lists; slots past the end of a list are not valid.
        count = offsets.diff()
        column = torch.arange(int(count.max()), device=score.device)
        valid = column < count[:, None]
        rows = index[torch.where(valid, offsets[:-1, None] + column, 0)]
        budget = _budget(count, average, alpha, keep)
        chosen = _choose(score[rows], positions[rows], valid, count, budget, by_spread=keep <= 0)
        right = torch.where(chosen, positions[rows], -1).amax(1)
        evict, absent = (budget > 0) & (count > budget), candidate if masked is None else masked
        behind = (positions[:live] > reached[sequence]) & (positions[:live] < right[sequence])
        kept[:live] = ~(evict[sequence] & absent[:live]) | behind
        kept[rows[chosen]] = True
    at = torch.where(kept[:live], positions[:live], -1)
    last = at.new_full((cu_rows.shape[0] - 1,), -1).scatter_reduce_(0, sequence, at, "amax")
    new_limit = limit.new_zeros(n)
    new_limit[:live] = torch.minimum(limit[:live], last[sequence].to(limit.dtype) + 1)
    return kept, new_limit, torch.maximum(reached, last.to(reached.dtype))


def _budget(count: Tensor, average: Tensor, alpha: float, keep: int) -> Tensor:
    """Budget K of each sequence, i64[b]."""
    if keep > 0:
        return torch.where(average.isinf(), count, count.clamp(max=keep))
    wanted = torch.ceil(average.float().clamp(min=1.0) * torch.tensor(alpha, dtype=torch.float32))
    return torch.minimum(wanted, count.float()).long()


def _choose(
    score: Tensor,
    position: Tensor,
    valid: Tensor,
    count: Tensor,
    budget: Tensor,
    by_spread: bool,
) -> Tensor:
    """Flag the selected slots of the candidate lists, bool[b, m], for sequences whose rows are evicted.

    These are the base selection and its AR context.
    """
    order = torch.where(valid, score, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    rank = torch.empty_like(order)
    rank.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    base = valid & (rank < budget[:, None])
    if by_spread:
        above = valid & (score.double() >= _threshold(score, valid, count)[:, None])
        base = torch.where(above.sum(1)[:, None] >= budget[:, None], above, base)
    follows = F.pad(position[:, 1:] - position[:, :-1] == 1, (0, 1))
    return valid & (base | (follows & F.pad(base[:, 1:], (0, 1))))


def _threshold(score: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """Mean + population standard deviation of each list, f64[b].

    Running sums add the slots past the end of a list last and as zeros, so that other lists change no bit.
    """
    wide = torch.where(valid, score.double(), 0.0)
    mean = wide.cumsum(1)[:, -1] / count
    spread = torch.where(valid, wide - mean[:, None], 0.0)
    return mean + (spread.square().cumsum(1)[:, -1] / count).sqrt()


def fake(
    score: Tensor,
    candidate: Tensor,
    positions: Tensor,
    cu_rows: Tensor,
    limit: Tensor,
    average: Tensor,
    reached: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(candidate), torch.empty_like(limit), torch.empty_like(reached)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    infinite = float("inf")
    for name, counts, share, alpha, keep, levels in (
        ("a step of three blocks", (32, 20, 32), 0.8, 1.5, 0, 0),
        ("alpha = inf", (8, 5), 0.9, infinite, 0, 0),
        ("ties", (16, 16, 9), 0.9, 2.0, 0, 3),
        ("all scores equal", (12,), 1.1, 1.5, 0, 1),
        ("fixed budget", (32, 7, 3), 0.8, 1.5, 6, 0),
        ("all candidates, empty sequences", (0, 9, 0, 1), 1.1, 1.0, 0, 0),
        ("no candidates", (4, 3), -1.0, 1.5, 0, 0),
        ("no rows", (0, 0), 0.5, 1.5, 0, 0),
    ):
        n, b = sum(counts), len(counts)
        score = torch.randn(n, generator=generator)
        if levels:
            score = (score * levels / 3).round()
        candidate = torch.rand(n, generator=generator) < share
        # Some positions of a block are cached already, so that rows have gaps.
        parts = [
            torch.randperm(c + c // 3, generator=generator)[:c].sort().values + 32 * s for s, c in enumerate(counts)
        ]
        positions, cu_rows = torch.cat(parts), cu_rows_of(counts)
        limit = torch.cat([p.new_full((len(p),), int(p.max()) + 1) if len(p) else p for p in parts]).int()
        average = torch.rand(b, generator=generator) * 3 + 0.5
        reached = torch.tensor([32 * s - 1 + s * 3 for s in range(b)]).int()
        rest = (average, reached, alpha, keep)
        args = (score, candidate, positions, cu_rows, limit, *rest)
        padded = (*(pad_rows(x, 5) for x in (score, candidate, positions)), cu_rows, pad_rows(limit, 5), *rest)
        yield Sample(name, args, padded)
        if not levels:  # the rows that hold masks are not those that predict their tokens
            masked = candidate.roll(1)
            yield Sample(f"{name}, a row predicts the next position", (*args, masked), (*padded, pad_rows(masked, 5)))


OP = define(
    "select_tokens",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    padding=(0, 0),
    kernel="dgraph.ops.selection.triton.select_tokens:kernel",
)

"""dgraph::lm_head on CUDA.

The host does not know which rows are candidates. If there are many rows, the device lists the candidates. Each chunk of
the list is gathered and multiplied by the kernel of rows_linear, which reads on the device how many rows are live.
Chunks after the last candidate end at once. If there are few rows, all are multiplied: the product takes the time to
read the weight anyway. Rows that are packed need no gathering; they are listed whatever their number, since their
results belong elsewhere.

Each row's vocabulary is reduced in shares, and the shares are combined in order. A share gives the two largest logits,
the sum of exponentials and their mean distance to the maximum, and the token with its logit.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.errors import InputError
from dgraph.families.quantised import QuantisedRows, QuantisedWeight
from dgraph.ops.lm_head.triton.lm_head_rows import Listed, gathered, list_candidates
from dgraph.ops.lm_head.triton.logits import merge, reduce_share
from dgraph.ops.products.triton import linear, rows_linear
from dgraph.ops.triton.rows import dense_rows, power_of_two
from dgraph.ops.tuning import LogitsShape, chosen, dtype_name

BLOCK = 2048
# Programs that fill a large GPU; with fewer rows, a row is divided into shares.
PROGRAMS = 1024
# More rows than this are listed. A product of this many takes about as long as reading its weight.
FEW = 256
# A chunk of listed rows may be nearly empty, so it is divided as one of no more rows than this.
LISTED = 512


@dataclass(frozen=True)
class Tiling:
    """Sizes of the reduction of one chunk.

    Attributes:
        block: logits per iteration, a power of two.
        splits: shares of a row.
        warps: warps of the reduction.
    """

    block: int
    splits: int
    warps: int = 4


def tiling_for(rows: int, vocab: int) -> Tiling:
    """Choose the tiling for a chunk of `rows` rows."""
    block = power_of_two(vocab, 16, BLOCK)
    return Tiling(block, max(1, min(PROGRAMS // rows, vocab // (2 * block), 32)))


Results = tuple[Tensor, Tensor, Tensor, Tensor]
"""token i64[N]; confidence, margin, entropy f32[N]."""


Nothing = tuple[None, None, None, None]
NOTHING: Nothing = (None, None, None, None)


class Share(NamedTuple):
    """A rank's share of the vocabulary, and where its numbers go; see dgraph::lm_head_part.

    Attributes:
        numbers: f32[N, 8].
        first: i64[1], the id of the first logit.
        vocab: number of ids in the whole vocabulary.
    """

    numbers: Tensor
    first: Tensor
    vocab: int


def kernel(
    h: Tensor | QuantisedRows,
    weight: Tensor | QuantisedWeight,
    bias: Tensor | None,
    candidate: Tensor,
    temperature: Tensor,
    seed: Tensor,
    max_num_logits: int,
    suppress: int,
    packed: bool = False,
    listed: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dgraph::lm_head; see its contract.

    listed: True if candidates are to be listed; None: if there are many rows. Packed rows always are.
    """
    return decode_candidates(h, weight, bias, candidate, temperature, seed, max_num_logits, suppress, packed, listed)


Measure = Callable[[Tensor, Tensor, Tensor, Tensor | None], None]
"""Function that takes a chunk of R rows.

Its arguments are the numbers of the rows, i32 or i64[R]; flags bool[R] of candidates, all else may be anything; the
logits [R, V]; and the tokens i64[N] of all rows, None for a share."""
Adjust = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function that takes the first three of these, and returns the logits to decide by."""


def decode_candidates(
    h: Tensor | QuantisedRows,
    weight: Tensor | QuantisedWeight,
    bias: Tensor | None,
    candidate: Tensor,
    temperature: Tensor,
    seed: Tensor,
    max_num_logits: int,
    suppress: int,
    packed: bool,
    listed: bool | None = None,
    measure: Measure | None = None,
    adjust: Adjust | None = None,
) -> Results:
    """Run dgraph::lm_head, and pass each chunk to `adjust` and `measure`; `listed` as for `kernel`."""
    n = candidate.shape[0]
    token = torch.empty(n, dtype=torch.int64, device=h.device)
    # An op's results may not share memory.
    confidence, margin, entropy = (torch.empty(n, dtype=torch.float32, device=h.device) for _ in range(3))
    found = token, confidence, margin, entropy
    rows = candidate, temperature, seed, max_num_logits, suppress, packed
    decode(h, weight, bias, *rows, listed, measure, found, None, adjust)
    return found


def decode(
    h: Tensor | QuantisedRows,
    weight: Tensor | QuantisedWeight,
    bias: Tensor | None,
    candidate: Tensor,
    temperature: Tensor,
    seed: Tensor,
    max_num_logits: int,
    suppress: int,
    packed: bool,
    listed: bool | None,
    measure: Measure | None,
    found: Results | Nothing,
    share: Share | None,
    adjust: Adjust | None = None,
) -> None:
    """Write the results of all rows, or the numbers of a share."""
    if max_num_logits < 1:
        raise InputError(f"dgraph::lm_head: max_num_logits must be at least 1 row, got {max_num_logits}.")
    if n := candidate.shape[0]:
        per_row = candidate.contiguous(), temperature.contiguous(), seed.contiguous()
        chunk = min(n, max_num_logits)
        if packed or (n > FEW if listed is None else listed):
            _listed_rows(h, weight, bias, *per_row, chunk, suppress, packed, found, measure, share, adjust)
        else:
            _all_rows(h, weight, bias, *per_row, chunk, suppress, found, measure, share, adjust)


def _all_rows(
    h: Tensor | QuantisedRows,
    weight: Tensor | QuantisedWeight,
    bias: Tensor | None,
    candidate: Tensor,
    temperature: Tensor,
    seed: Tensor,
    chunk: int,
    suppress: int,
    found: Results | Nothing,
    measure: Measure | None,
    share: Share | None,
    adjust: Adjust | None,
) -> None:
    n = h.shape[0]
    for first in range(0, n, chunk):
        part = slice(first, min(first + chunk, n))
        logits = linear.kernel(h[part], weight, bias)
        rows = candidate[part], temperature[part], seed[part]
        if adjust is not None:
            logits = adjust(torch.arange(part.start, part.stop, device=h.device), rows[0], logits)
        token, confidence, margin, entropy = (None if x is None else x[part] for x in found)
        of_share = None if share is None else share._replace(numbers=share.numbers[part])
        reduce_logits(logits, *rows, suppress, token, confidence, margin, entropy, share=of_share)
        if measure is not None:
            measure(torch.arange(part.start, part.stop, device=h.device), rows[0], logits, found[0])
        del logits  # or two chunks would be alive at once


def _listed_rows(
    h: Tensor | QuantisedRows,
    weight: Tensor | QuantisedWeight,
    bias: Tensor | None,
    candidate: Tensor,
    temperature: Tensor,
    seed: Tensor,
    chunk: int,
    suppress: int,
    packed: bool,
    found: Results | Nothing,
    measure: Measure | None,
    share: Share | None,
    adjust: Adjust | None,
) -> None:
    weight = weight if isinstance(weight, QuantisedWeight) else dense_rows(weight)
    rows = list_candidates(candidate, chunk, *found)
    token, confidence, margin, entropy = found
    n = min(len(candidate), len(h))  # as many may be candidates
    for i, first in enumerate(range(0, n, chunk)):
        part, most = rows.chunk(i, chunk), min(chunk, n - first)
        if packed:
            some = h[first : first + chunk]
        elif isinstance(h, QuantisedRows):
            some = h.each(functools.partial(gathered, part=part, most=most))
        else:
            some = gathered(h, part, most)
        logits = rows_linear.kernel(some, weight, bias, part.counts)
        if adjust is not None:
            logits = adjust(part.rows[: len(logits)], _live(part, logits), logits)
        of_rows = candidate, temperature, seed, suppress, token, confidence, margin, entropy
        reduce_logits(logits, *of_rows, listed=part, share=share)
        if measure is not None:
            measure(part.rows[: len(logits)], _live(part, logits), logits, token)
        del some, logits  # or two chunks would be alive at once


def _live(part: Listed, logits: Tensor) -> Tensor:
    """Flag the rows of logits [R, V] that the list has."""
    return torch.arange(len(logits), device=logits.device) < part.counts[-1]


def reduce_logits(
    logits: Tensor,
    candidate: Tensor,
    temperature: Tensor,
    seed: Tensor,
    suppress: int,
    token: Tensor | None,
    confidence: Tensor | None,
    margin: Tensor | None,
    entropy: Tensor | None,
    tiling: Tiling | None = None,
    listed: Listed | None = None,
    programs: int = PROGRAMS,
    share: Share | None = None,
) -> None:
    """Write token i64[R], and confidence, margin and entropy f32[R], for each row of logits [R, V].

    The other arguments, and the results of a row that is no candidate, are those of dgraph::lm_head.

    Args:
        tiling: overrides the sizes chosen for the shape.
        listed: a chunk of the candidates. Row i of the logits is that of row rows[i] of all other arguments, for as
            many i as the last count says. Other rows are left as they are.
        programs: about the most programs that reduce listed rows, because most chunks of a list are empty.
        share: its numbers are written instead of the results, for candidates alone.
    """
    rows, vocab = logits.shape
    if not rows:
        return
    if tiling is None:
        default = tiling_for(rows if listed is None else min(rows, LISTED), vocab)
        tiling = chosen("lm_head", LogitsShape(rows, vocab, dtype_name(logits.dtype))) or default
    block, splits = tiling.block, tiling.splits
    keys = torch.empty((6, rows, splits), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, splits), dtype=torch.int32, device=logits.device)
    temperature, seed, candidate = temperature.contiguous(), seed.contiguous(), candidate.contiguous()
    index, counts = listed or (None, None)
    last = 0 if counts is None else counts.shape[0] - 1
    numbers, first, ids_in_all = share or (None, None, vocab)
    length = triton.cdiv(triton.cdiv(vocab, splits), block) * block
    across = rows if listed is None else min(rows, max(1, programs // splits))
    _reduce[(across, splits)](
        logits, candidate, index, counts, temperature, seed, *keys.unbind(), ids, first,
        last, vocab, ids_in_all, logits.stride(0), suppress, length, splits, block, num_warps=tiling.warps,
    )  # fmt: skip
    _combine[(rows,)](
        candidate, index, counts, *keys.unbind(), ids, token, confidence, margin, entropy, numbers,
        last, splits, power_of_two(splits), num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["last_count"])
def _reduce(
    logits_ptr, candidate_ptr, index_ptr, counts_ptr, temperature_ptr, seed_ptr,
    top_ptr, second_ptr, total_ptr, spread_ptr, best_ptr, chosen_ptr, ids_ptr, first_ptr,
    last_count, vocab, ids_in_all, stride, suppress, share, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce a share of one row, if that is a candidate; or of listed rows, one after the other."""
    place, split = tl.program_id(0), tl.program_id(1)
    base = 0
    if first_ptr is not None:
        base = tl.load(first_ptr).to(tl.int32)
        vocab = tl.minimum(vocab, tl.maximum(ids_in_all - base, 0))
    if index_ptr is None:
        if tl.load(candidate_ptr + place) != 0:
            _reduce_row(
                logits_ptr, temperature_ptr, seed_ptr,
                top_ptr, second_ptr, total_ptr, spread_ptr, best_ptr, chosen_ptr, ids_ptr,
                place, place, split, vocab, base, stride, suppress, share, SPLITS, BLOCK,
            )  # fmt: skip
    else:
        for at in range(place, tl.load(counts_ptr + last_count), tl.num_programs(0)):
            _reduce_row(
                logits_ptr, temperature_ptr, seed_ptr,
                top_ptr, second_ptr, total_ptr, spread_ptr, best_ptr, chosen_ptr, ids_ptr,
                tl.load(index_ptr + at), at, split, vocab, base, stride, suppress, share, SPLITS, BLOCK,
            )  # fmt: skip


@triton.jit
def _reduce_row(
    logits_ptr, temperature_ptr, seed_ptr, top_ptr, second_ptr, total_ptr, spread_ptr, best_ptr, chosen_ptr, ids_ptr,
    row, place, split, vocab, base, stride, suppress, share, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every lane reduces its own logits; the lanes meet once, at the end."""
    logits_ptr += (tl.full([], 0, tl.int64) + place) * stride
    temperature = tl.load(temperature_ptr + row)
    seed = tl.load(seed_ptr + row)
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    first = split * share
    last = tl.maximum(tl.minimum(first + share, vocab), first)
    if temperature > 0:
        top, second, total, spread, best, chosen, ids = reduce_share(
            logits_ptr, first, last, base, suppress, temperature, low, high, BLOCK, True
        )
    else:
        top, second, total, spread, best, chosen, ids = reduce_share(
            logits_ptr, first, last, base, suppress, temperature, low, high, BLOCK, False
        )
    winner = tl.max(best)
    token = tl.min(tl.where(best == winner, ids, 2147483647))
    highest, runner, mass, distance = merge(top, second, total, spread, tl.arange(0, BLOCK), BLOCK)
    at = place * SPLITS + split
    tl.store(top_ptr + at, highest)
    tl.store(second_ptr + at, runner)
    tl.store(total_ptr + at, mass)
    tl.store(spread_ptr + at, distance)
    tl.store(best_ptr + at, winner)
    tl.store(chosen_ptr + at, tl.max(tl.where(ids == token, chosen, float("-inf"))))
    tl.store(ids_ptr + at, token)


@triton.jit(do_not_specialize=["last_count"])
def _combine(
    candidate_ptr, index_ptr, counts_ptr,
    top_ptr, second_ptr, total_ptr, spread_ptr, best_ptr, chosen_ptr, ids_ptr,
    token_ptr, confidence_ptr, margin_ptr, entropy_ptr, numbers_ptr,
    last_count, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    row = place
    if index_ptr is not None:
        if place >= tl.load(counts_ptr + last_count):
            return
        row = tl.load(index_ptr + place)
    elif tl.load(candidate_ptr + row) == 0:
        if numbers_ptr is None:
            tl.store(token_ptr + row, tl.full([], -1, tl.int64))
            tl.store(confidence_ptr + row, float("-inf"))
            tl.store(margin_ptr + row, float("-inf"))
            tl.store(entropy_ptr + row, float("inf"))
        return
    split = tl.arange(0, BLOCK)
    at, inside = place * SPLITS + split, split < SPLITS
    top = tl.load(top_ptr + at, mask=inside, other=-1e30)
    second = tl.load(second_ptr + at, mask=inside, other=-1e30)
    total = tl.load(total_ptr + at, mask=inside, other=0.0)
    spread = tl.load(spread_ptr + at, mask=inside, other=0.0)
    best = tl.load(best_ptr + at, mask=inside, other=float("-inf"))
    chosen = tl.load(chosen_ptr + at, mask=inside, other=float("-inf"))
    ids = tl.load(ids_ptr + at, mask=inside, other=2147483647)
    highest, runner, mass, distance = merge(top, second, total, spread, split, BLOCK)
    token = tl.min(tl.where(best == tl.max(best), ids, 2147483647))
    logit = tl.max(tl.where(ids == token, chosen, float("-inf")))
    if numbers_ptr is None:
        tl.store(token_ptr + row, token.to(tl.int64))
        tl.store(confidence_ptr + row, tl.exp(logit - highest) / mass)
        tl.store(margin_ptr + row, (1.0 - tl.exp(runner - highest)) / mass)
        tl.store(entropy_ptr + row, tl.log(mass) + distance / mass)
    else:
        numbers_ptr += row * 8
        tl.store(numbers_ptr, highest)
        tl.store(numbers_ptr + 1, runner)
        tl.store(numbers_ptr + 2, mass)
        tl.store(numbers_ptr + 3, distance)
        tl.store(numbers_ptr + 4, tl.maximum(tl.max(best), -1e30))
        tl.store(numbers_ptr + 5, tl.maximum(logit, -1e30))
        tl.store(numbers_ptr + 7, token.to(tl.float32))

"""dgraph::lm_head: logits of the candidates, in chunks, reduced at once to a token and its confidence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.draws import pad_rows
from dgraph.ops.products import stored
from dgraph.ops.registry import Sample, define, numeric

CONTRACT = """\
Only rows with candidate = True are projected, in chunks of at most max_num_logits rows; the logits of a chunk
are freed before the next chunk, so that they take max_num_logits * V values whatever K is.
h [K, d]; weight [V, d]; bias [V] or None; candidate bool[K]; temperature f32[K], >= 0; seed i64[K]
-> token i64[K], confidence, margin, entropy f32[K] (float64 for float64).
If packed, row i of h is the i-th candidate, and h has at least as many rows as there are candidates; rows after them
may hold anything.
Logits are h @ weight.T + bias in the dtype of h; everything after that is in fp32. The id `suppress`
(-1: none) counts as if its logit were -inf: a model must not answer a mask with a mask.
temperature 0: the token of the largest logit (ties: lowest id); confidence is its softmax probability.
temperature T > 0: p = softmax(logits / T); the token is drawn from p by the Gumbel-max rule, with noise
from an integer hash of (seed of the row, vocabulary id); confidence is p of the token. A draw depends on
nothing but logits, T and seed: not on batch, chunk or device.
margin is the difference of the two largest values of p, entropy -sum p log p in nats; both are of p itself
(T = 1 for temperature 0), whatever was drawn.
Rows that are no candidates, and padding rows (candidate = False), give token -1, confidence and margin -inf and
entropy inf; they may hold anything. A candidate whose logits are no numbers gives NaN for the three, and a token that
may be no id.
Deterministic. The chunk length may change the last bits of the logits, as it does for any matrix product."""

MASK32 = 0xFFFFFFFF
CACHED_LOGITS = 1 << 18
"""Logits that are decided together on a CPU, 1 MiB in fp32."""


def reference(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    candidate: Tensor,
    temperature: Tensor,
    seed: Tensor,
    max_num_logits: int,
    suppress: int,
    packed: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return decode_candidates(h, weight, bias, candidate, temperature, seed, max_num_logits, suppress, packed)


def decode_candidates(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    candidate: Tensor,
    temperature: Tensor,
    seed: Tensor,
    max_num_logits: int,
    suppress: int,
    packed: bool,
    measure: Callable[[Tensor, Tensor, Tensor], None] | None = None,
    adjust: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run dgraph::lm_head, and pass each chunk's rows i64[R], logits [R, V] and tokens i64[R] to `measure`.

    adjust: given the rows and logits of a chunk, the logits to decide by.
    """
    token = seed.new_full(candidate.shape, -1)
    confidence, margin = (token.new_full(token.shape, -torch.inf, dtype=numeric(h.dtype)) for _ in range(2))
    entropy = torch.full_like(confidence, torch.inf)

    def decide(rows: Tensor, logits: Tensor) -> None:
        logits = logits if adjust is None else adjust(rows, logits)
        found = decode_logits(logits, temperature[rows], seed[rows], suppress, measure is None)
        token[rows], confidence[rows], margin[rows], entropy[rows] = found
        if measure is not None:
            measure(rows, logits, found.token)

    each_chunk(h, weight, bias, candidate, max_num_logits, packed, decide)
    return token, confidence, margin, entropy


def each_chunk(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    candidate: Tensor,
    max_num_logits: int,
    packed: bool,
    take: Callable[[Tensor, Tensor], None],
) -> None:
    """Pass the rows i64[R] and the logits [R, V] of each chunk of candidates to `take`, which must keep no logits.

    Raises:
        InputError: max_num_logits is below 1.
    """
    if max_num_logits < 1:
        raise InputError(f"dgraph::lm_head: max_num_logits must be at least 1 row, got {max_num_logits}.")
    first = 0
    for rows in candidate.nonzero().squeeze(1).split(max_num_logits):
        if len(rows):
            logits = stored.multiply(h[first : first + len(rows)] if packed else h[rows], weight, bias)
            first += len(rows)
            take(rows, logits)
            del logits  # or two chunks would be alive at once


class RowDecisions(NamedTuple):
    """Decisions on R rows of logits; see the contract of dgraph::lm_head.

    token i64[R]; confidence, margin, entropy f32[R] (float64 of float64 logits).
    """

    token: Tensor
    confidence: Tensor
    margin: Tensor
    entropy: Tensor


def decode_logits(
    logits: Tensor, temperature: Tensor, seed: Tensor, suppress: int = -1, overwrite: bool = False
) -> RowDecisions:
    """Choose a token for each row of logits, with its probability, and margin and entropy of its distribution.

    On a CPU a few rows are taken at a time, whose logits stay in its cache from one pass to the next.

    Args:
        logits: [R, V].
        temperature: f32[R]; 0 takes the largest logit.
        seed: i64[R], one per row; the same seed gives the same draw.
        suppress: an id that is never produced (the mask token), or -1.
        overwrite: the memory of `logits` may be used; a copy of a large vocabulary costs as much as its softmax.
    """
    together = _rows_together(len(logits), logits.shape[1], logits.device)
    if len(logits) <= together:
        return _decode(logits, temperature, seed, suppress, overwrite)
    given = zip(logits.split(together), temperature.split(together), seed.split(together), strict=True)
    parts = [_decode(some, heat, seeds, suppress, overwrite) for some, heat, seeds in given]
    return RowDecisions(*map(torch.cat, zip(*parts, strict=True)))


def _rows_together(rows: int, vocab: int, device: torch.device) -> int:
    """Rows of logits [R, V] that are decided together, at most R."""
    return rows if device.type == "cuda" else min(rows, max(1, CACHED_LOGITS // vocab))


def _decode(logits: Tensor, temperature: Tensor, seed: Tensor, suppress: int, overwrite: bool) -> RowDecisions:
    given, warm = logits, (temperature > 0).nonzero().squeeze(1)
    logits = logits.to(numeric(logits.dtype))
    if not overwrite and logits is given:
        logits = logits.clone()
    if suppress >= 0:
        logits[:, suppress] = -torch.inf
    if len(warm):
        logits[warm] /= temperature[warm, None].to(logits.dtype)
    token = best = logits.argmax(-1)
    if len(warm):
        token = best.clone()
        token[warm] = logits[warm].add_(gumbel(seed[warm], logits.shape[1])).argmax(-1)
    p = logits.softmax(-1)
    confidence = p.gather(1, token[:, None]).squeeze(1)
    largest = p.gather(1, best[:, None])
    # Where p is 0 the difference may be -inf, and their product would be no number. A logarithm of each p takes longer.
    below = logits.sub_(logits.gather(1, best[:, None])).clamp_(min=torch.finfo(torch.float32).min)
    entropy = -(below.mul_(p).sum(-1) + largest.squeeze(1).log())
    second = p.scatter_(1, best[:, None], 0).amax(-1, keepdim=True)  # 0 of a vocabulary of one; topk takes longer
    return RowDecisions(token, confidence, (largest - second).squeeze(1), entropy)


def gumbel(seed: Tensor, vocab: int, first: Tensor | int = 0) -> Tensor:
    """Standard Gumbel noise f32[R, vocab] of the ids from `first` on, a function of (seed, vocabulary id) alone."""
    index = torch.arange(vocab, dtype=torch.int64, device=seed.device) + first
    bits = _hash(seed & MASK32)
    bits = _hash(bits ^ ((seed >> 32) & MASK32))
    one, other = bits[:, None], _hash(bits ^ 0x5BD1E995)[:, None]
    # Two keyed rounds: with one, the draws of two seeds would be the same noise in another order.
    noise = _hash((_hash(index ^ one) + other).bitwise_and_(MASK32))
    # Noise that can win lies in the tail of small survival probabilities, where fp32 resolves best.
    survival = noise.float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return survival.neg_().log1p_().neg_().log_().neg_()


def _hash(x: Tensor) -> Tensor:
    """A 32-bit finaliser in int64; its multipliers are below 2^31, so that no product overflows."""
    x = x ^ (x >> 16)
    x.mul_(0x21F0AAAD).bitwise_and_(MASK32)
    x ^= x >> 15
    x.mul_(0x735A2D97).bitwise_and_(MASK32)
    x ^= x >> 15
    return x


def fake(
    h: Tensor, weight: Tensor, bias: Tensor | None, candidate: Tensor, temperature: Tensor, seed: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    confidence, margin, entropy = (h.new_empty(candidate.shape, dtype=numeric(h.dtype)) for _ in range(3))
    return torch.empty_like(seed), confidence, margin, entropy


def workspace(
    device: torch.device,
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    candidate: Tensor,
    temperature: Tensor,
    seed: Tensor,
    max_num_logits: int,
    suppress: int,
    packed: bool = False,
    *rest: Any,
) -> int:
    """Bytes of one chunk.

    On a GPU: its logits, its rows unless they are packed, and the weight if it is dequantised first
    (`dgraph.ops.products.stored`). On a CPU, at temperature 0: its logits, and for the rows that are decided together
    their softmax in fp32. Logits in half precision are converted to fp32 first.
    """
    rows = min(len(candidate), max_num_logits)
    logits = rows * len(weight)
    if device.type == "cuda":
        first = stored.workspace(device, h[:rows], weight)
        return first + h.element_size() * (logits + (0 if packed else rows * h.shape[1]))
    copies = 1 if h.dtype == numeric(h.dtype) else 2
    together = _rows_together(rows, len(weight), device) * len(weight)
    return logits * h.element_size() + together * copies * numeric(h.dtype).itemsize


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, k, d, vocab, share, bias, heat, chunk in (
        ("greedy", 7, 8, 33, 0.6, False, 0.0, 3),
        ("one chunk, bias", 5, 8, 17, 0.8, True, 0.0, 100),
        ("sampled", 6, 4, 40, 0.9, False, 1.0, 4),
        ("sampled and greedy rows", 9, 6, 21, 1.1, True, 0.5, 2),
        ("no candidates", 4, 4, 8, -1.0, False, 0.0, 2),
        ("no rows", 0, 4, 8, 0.5, False, 0.0, 2),
    ):
        h, weight = torch.randn(k, d, generator=generator), torch.randn(vocab, d, generator=generator)
        offset = torch.randn(vocab, generator=generator) if bias else None
        candidate = torch.rand(k, generator=generator) < share
        temperature = heat * (torch.rand(k, generator=generator) < 0.7)
        seed = torch.randint(-(2**62), 2**62, (k,), generator=generator)
        padded = tuple(pad_rows(x, 3) for x in (candidate, temperature, seed))
        padded[0][k:] = False
        suppress = vocab // 2 if bias else -1
        yield Sample(
            name,
            (h, weight, offset, candidate, temperature, seed, chunk, suppress),
            (pad_rows(h, 3), weight, offset, *padded, chunk, suppress),
        )
        front = pad_rows(h[candidate], k - int(candidate.sum()))  # as many rows as there may be candidates
        yield Sample(
            f"{name}, packed",
            (front, weight, offset, candidate, temperature, seed, chunk, suppress, True),
            (pad_rows(front, 5), weight, offset, *padded, chunk, suppress, True),
        )
    twice = torch.randn(4, 6, generator=generator).repeat_interleave(2, dim=0)
    h, zero = torch.randn(3, 6, generator=generator), torch.zeros(3)
    yield Sample("one id", (h, twice[:1], None, torch.ones(3).bool(), zero, zero.long(), 2, -1))
    yield Sample("ties", (h, twice, None, torch.ones(3).bool(), zero, zero.long(), 2, -1))


OP = define(
    "lm_head",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    apart_by="candidate",
    own_rows=("h",),
    padding=(-1, -torch.inf, -torch.inf, torch.inf),
    kernel="dgraph.ops.lm_head.triton.lm_head:kernel",
    tuning="dgraph.ops.triton.candidates:LOGITS",
    stored=("weight",),
    rounded=("h",),
    workspace=workspace,
)

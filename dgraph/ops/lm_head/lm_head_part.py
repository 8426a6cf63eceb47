"""dgraph::lm_head_part: one rank's share of dgraph::lm_head, over the ids that the rank has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dgraph.ops.draws import pad_rows
from dgraph.ops.lm_head import lm_head
from dgraph.ops.registry import Sample, define, numeric

CONTRACT = """\
h, candidate, temperature, seed, max_num_logits, suppress, packed: as dgraph::lm_head takes them; weight [V, d] and bias
[V] or None of the ids first, ..., first + V - 1, of which those from `vocab` on are none: they are not chosen, and
count for nothing. first i64[1]; suppress and vocab are numbers of ids in the whole vocabulary, at most 2^24.
current i64[K]: the id that stands at the position that the row predicts, -1 for none; None: of no row.
-> numbers f32[K, 8] (float64 for float64) of each row's share of the distribution, x = logit / T (T = 1 for
temperature 0):
0, 1  the two largest x
2, 3  the sum of exp(x - largest), and that of (largest - x) * exp(x - largest)
4     the largest x plus its noise, that of dgraph::lm_head for its id in the whole vocabulary (T = 0: the largest x)
5     the x by which it is so
6     the x of the id that stands, -1e30 where the share has none
7     the id by which it is so (ties: lowest id); 2^31 - 1, rounded, where the share has no id
None of them is below -1e30, which stands where there is no x.
Rows that are no candidates, and padding rows, have -1 as the last number, and zeros. What dgraph::lm_head gives,
dgraph::lm_head_combine makes of the numbers of all ranks, 32 bytes a row and rank."""

NUMBERS = 8
LOWEST = -1e30
"""Stand-in for -inf where there is no x, because the difference of two infinities is NaN."""
NO_TOKEN = 2**31 - 1
MOST_IDS = 2**24
"""Number of ids that float32 tells apart."""


def reference(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    candidate: Tensor,
    temperature: Tensor,
    seed: Tensor,
    max_num_logits: int,
    suppress: int,
    packed: bool,
    first: Tensor,
    vocab: int,
    current: Tensor | None = None,
) -> Tensor:
    numbers = temperature.new_zeros((*candidate.shape, NUMBERS), dtype=numeric(h.dtype))
    numbers[:, -1] = -1

    def take(rows: Tensor, logits: Tensor) -> None:
        stands = None if current is None else current[rows]
        numbers[rows] = numbers_of(logits, temperature[rows], seed[rows], suppress, first, vocab, stands)

    lm_head.each_chunk(h, weight, bias, candidate, max_num_logits, packed, take)
    return numbers


def numbers_of(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    suppress: int,
    first: Tensor,
    vocab: int,
    current: Tensor | None = None,
) -> Tensor:
    """Numbers [R, 8] of rows of logits [R, V]; see the contract."""
    x = logits.to(numeric(logits.dtype))
    standing = standing_of(x, first, current, suppress, vocab)
    ids = torch.arange(x.shape[1], device=x.device) + first
    x = x.masked_fill((ids >= vocab) | (ids == suppress), -torch.inf)
    heat = torch.where(temperature > 0, temperature, 1.0).to(x.dtype)
    x /= heat[:, None]
    top, best = x.max(-1, keepdim=True)
    top = top.clamp(min=LOWEST)
    second = x.scatter(1, best, -torch.inf).amax(-1).clamp(min=LOWEST)
    key, warm = x, (temperature > 0).nonzero().squeeze(1)
    if len(warm):
        key = x.clone()
        key[warm] += lm_head.gumbel(seed[warm], x.shape[1], first)
    token = key.argmax(-1, keepdim=True)
    best_key, chosen, token = (value.gather(1, token).squeeze(1) for value in (key, x, ids.expand_as(x)))
    token = torch.where(chosen == -torch.inf, NO_TOKEN, token).to(x.dtype)
    best_key, chosen = best_key.clamp(min=LOWEST), chosen.clamp(min=LOWEST)
    gap = (top - x).clamp_(max=-LOWEST)
    share = torch.exp(-gap)
    total, spread = share.sum(-1), gap.mul_(share).sum(-1)
    standing = (standing / heat).clamp(min=LOWEST)
    return torch.stack([top.squeeze(1), second, total, spread, best_key, chosen, standing, token], dim=1)


def standing_of(logits: Tensor, first: Tensor, current: Tensor | None, suppress: int, vocab: int) -> Tensor:
    """The logit of the id that stands, of rows of logits [R, V]; -1e30 where the share has none. f32[R], or float64."""
    if current is None:
        return logits.new_full(logits.shape[:1], LOWEST)
    at = current - first
    there = (current >= 0) & (current < vocab) & (current != suppress) & (at >= 0) & (at < logits.shape[1])
    found = logits.gather(1, torch.where(there, at, 0)[:, None]).squeeze(1).to(numeric(logits.dtype))
    return torch.where(there, found, LOWEST)


def merged(top: Tensor, total: Tensor, spread: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the largest x and the two sums of W shares, [R, W] each, into those of all shares, [R, 1] each."""
    highest = top.amax(-1, keepdim=True)
    gap = highest - top
    fade = torch.exp(-gap)
    return highest, (total * fade).sum(-1, keepdim=True), ((spread + total * gap) * fade).sum(-1, keepdim=True)


def fake(h: Tensor, weight: Tensor, bias: Tensor | None, candidate: Tensor, *rest: Any) -> Tensor:
    return h.new_empty((*candidate.shape, NUMBERS), dtype=numeric(h.dtype))


def workspace(device: torch.device, h: Tensor, *rest: Any) -> int:
    """Bytes of one chunk: those of dgraph::lm_head; on a CPU its logits, with three or four copies of them in fp32.

    The fourth is for an id to suppress, or for logits in half precision.
    """
    if device.type == "cuda":
        return lm_head.workspace(device, h, *rest[:8])
    weight, _, candidate, _, _, most, suppress = rest[:7]
    copies = 4 if suppress >= 0 or h.dtype != numeric(h.dtype) else 3
    return min(len(candidate), most) * len(weight) * (h.element_size() + copies * numeric(h.dtype).itemsize)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for sample in lm_head.samples(generator):
        vocab = len(sample.args[1])
        of_part: tuple[Any, ...] = (torch.tensor([vocab]), 2 * vocab - 1)
        current = torch.randint(-1, 2 * vocab, (len(sample.args[3]),), generator=generator)
        calls = []
        for args in (sample.args, sample.padded or sample.args):
            stands = pad_rows(current, len(args[3]) - len(current))
            calls.append((*args[:8], *(args[8:] or (False,)), *of_part, stands))
        calls = [(*args[:7], args[7] + vocab if args[7] >= 0 else -1, *args[8:]) for args in calls]
        yield replace(sample, args=calls[0], padded=calls[1] if sample.padded else None)


OP = define(
    "lm_head_part",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    apart_by="candidate",
    own_rows=("h",),
    padding=(None,),
    kernel="dgraph.ops.lm_head.triton.lm_head_part:kernel",
    stored=("weight",),
    rounded=("h",),
    workspace=workspace,
)

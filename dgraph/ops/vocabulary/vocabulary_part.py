"""dgraph::vocabulary_part: one rank's share of dgraph::vocabulary_attention, over the ids that the rank has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.draws import cu_rows_of, pad_rows
from dgraph.ops.lm_head.lm_head import gumbel
from dgraph.ops.lm_head.lm_head_part import LOWEST, MOST_IDS, NO_TOKEN, merged
from dgraph.ops.registry import Sample, define, numeric

CONTRACT = """\
h, temperature, seed, cu_rows, softcap, suppress: as dgraph::vocabulary_attention takes them; weight [V, d] of the ids
first, ..., first + V - 1, of which those from `vocab` on are none: their weight may be anything finite, none is chosen,
and they count for nothing. first i64[1]; suppress and vocab are numbers of ids in the whole vocabulary, at most 2^24.
-> context f32[N, d] (float64 for float64): the sum of exp(x - largest x) * weight over the ids of the share;
numbers f32[N, 6] (likewise) of the share, where x is as in dgraph::vocabulary_attention:
0, 1  the id of the largest x, and that x
2, 3  the sum of exp(x - largest), and that of (largest - x) * exp(x - largest)
4     the largest x plus its noise, that of its id in the whole vocabulary (T = 0: the largest x)
5     the id by which it is so
Ties go to the lowest id. An id is 2^31 - 1, rounded, and an x -1e30, where the share has none. Padding rows have -1 as
the last number, and zeros, in the context too. What dgraph::vocabulary_attention gives, dgraph::vocabulary_combine and
a sum over the ranks make of it: 24 bytes a row and rank gathered, and one [N, d] added up."""

NUMBERS = 6
IDS = 4096
"""Ids whose logits exist at a time on a CPU."""


def reference(
    h: Tensor,
    weight: Tensor,
    temperature: Tensor,
    seed: Tensor,
    cu_rows: Tensor,
    softcap: float | None,
    suppress: int,
    first: Tensor,
    vocab: int,
) -> tuple[Tensor, Tensor]:
    check(h, weight, temperature, seed, softcap, vocab)
    live = min(int(cu_rows[-1]), len(h))
    dtype = numeric(h.dtype)
    context, numbers = torch.zeros_like(h, dtype=dtype), h.new_zeros((len(h), NUMBERS), dtype=dtype)
    numbers[:, -1] = -1
    rows = h[:live].to(dtype)
    numbers[:live] = rows.new_tensor([NO_TOKEN, LOWEST, 0, 0, LOWEST, NO_TOKEN])
    for at in range(0, len(weight), IDS):
        ids = torch.arange(at, min(at + IDS, len(weight)), device=h.device) + first
        values = weight[at : at + IDS].to(dtype).masked_fill((ids >= vocab)[:, None], 0)
        x = tempered(F.linear(rows, values), temperature[:live], softcap)
        x.masked_fill_((ids >= vocab) | (ids == suppress), -torch.inf)
        found, share = numbers_of(x, temperature[:live], seed[:live], ids)
        both = combined(torch.stack([numbers[:live], found], dim=1))
        context[:live] *= faded(numbers[:live], both)
        context[:live] += (share * faded(found, both)) @ values
        numbers[:live] = both
        del x, share, values  # or two chunks would be alive at once
    return context, numbers


def check(
    h: Tensor, weight: Tensor, temperature: Tensor, seed: Tensor, softcap: float | None, vocab: int = MOST_IDS
) -> None:
    """Refuse arguments that do not belong together.

    Raises:
        InputError: sizes that do not fit each other, a softcap that caps nothing, or more ids than float32 tells apart.
    """
    if h.dim() != 2 or weight.dim() != 2 or h.shape[1] != weight.shape[1] or not len(weight):
        raise InputError(
            f"dgraph::vocabulary_attention: h must be [N, d] and weight [V, d], got {list(h.shape)} and "
            f"{list(weight.shape)}."
        )
    if temperature.shape != h.shape[:1] or seed.shape != h.shape[:1]:
        raise InputError(
            f"dgraph::vocabulary_attention: temperature and seed must be [{len(h)}], one for each row of h, got "
            f"{list(temperature.shape)} and {list(seed.shape)}."
        )
    if softcap is not None and not 0 < softcap < float("inf"):
        raise InputError(f"dgraph::vocabulary_attention: softcap must be None or above 0, got {softcap}.")
    if max(len(weight), vocab) > MOST_IDS:
        raise InputError(
            f"dgraph::vocabulary_attention: at most {MOST_IDS} ids, got {max(len(weight), vocab)}; use dgraph::lm_head."
        )


def tempered(logits: Tensor, temperature: Tensor, softcap: float | None) -> Tensor:
    """Compute cap(logits) / T, [R, V], in place; see the contract of dgraph::vocabulary_attention."""
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    return logits.div_(torch.where(temperature > 0, temperature, 1.0).to(logits.dtype)[:, None])


def numbers_of(x: Tensor, temperature: Tensor, seed: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers [R, 6] of rows of x [R, V], and exp(x - largest) [R, V]; x is -inf for an id that does not exist."""
    top, best = x.max(-1, keepdim=True)
    best = torch.where(top > -torch.inf, ids[best], NO_TOKEN)
    top = top.clamp(min=LOWEST)
    key, warm = x, (temperature > 0).nonzero().squeeze(1)
    if len(warm):
        key = x.clone()
        key[warm] += gumbel(seed[warm], x.shape[1], ids[0])
    highest, token = key.max(-1, keepdim=True)
    token = torch.where(highest > -torch.inf, ids[token], NO_TOKEN)
    del key
    gap = (top - x).clamp_(max=-LOWEST)
    share = torch.exp(-gap)
    total, spread = share.sum(-1, keepdim=True), gap.mul_(share).sum(-1, keepdim=True)
    numbers = [best.to(x.dtype), top, total, spread, highest.clamp(min=LOWEST), token.to(x.dtype)]
    return torch.cat(numbers, dim=1), share


def combined(shares: Tensor) -> Tensor:
    """Combine the numbers of W shares [R, W, 6] into [R, 6]; each share has higher ids than those before it."""
    best, top, total, spread, key, token = shares.unbind(-1)
    highest, mass, distance = merged(top, total, spread)
    which, (winner, drawn) = top.argmax(-1, keepdim=True), key.max(-1, keepdim=True)
    return torch.cat([best.gather(-1, which), highest, mass, distance, winner, token.gather(-1, drawn)], dim=1)


def faded(part: Tensor, whole: Tensor) -> Tensor:
    """Factor [R, 1] that turns exp(x - largest) of a part of the ids into that of all of them."""
    return torch.exp(part[:, 1:2] - whole[:, 1:2])


def fake(h: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    dtype = numeric(h.dtype)
    return h.new_empty(h.shape, dtype=dtype), h.new_empty((h.shape[0], NUMBERS), dtype=dtype)


def workspace(device: torch.device, h: Tensor, weight: Tensor, *rest: Any) -> int:
    """Bytes of one chunk of ids: on a GPU as its kernel says; on a CPU four times its logits, and its weight."""
    if device.type == "cuda":
        from dgraph.ops.vocabulary.triton.vocabulary_part import workspace as on_gpu

        return on_gpu(h, weight)
    ids = min(IDS, len(weight))
    return numeric(h.dtype).itemsize * ids * (4 * len(h) + h.shape[1])


def calls(generator: torch.Generator) -> Iterator[tuple[str, tuple[Any, ...], tuple[Any, ...] | None]]:
    """Yield the name, call and padded call of samples of dgraph::vocabulary_attention."""
    for name, counts, d, vocab, heat, softcap, suppress in (
        ("greedy", (5,), 8, 33, 0.0, None, -1),
        ("drawn, capped", (4, 0, 3), 16, 70, 0.8, 3.0, -1),
        ("drawn and greedy rows, a suppressed id", (3, 6), 12, 41, 1.3, None, 20),
        ("one id", (2,), 8, 1, 1.0, 30.0, -1),
        ("no rows", (0, 0), 8, 9, 1.0, None, 3),
    ):
        n = sum(counts)
        h, weight = torch.randn(n, d, generator=generator), torch.randn(vocab, d, generator=generator)
        temperature = heat * (torch.rand(n, generator=generator) < 0.7)
        seed = torch.randint(-(2**62), 2**62, (n,), generator=generator)
        rest = (cu_rows_of(counts), softcap, suppress)
        padded = tuple(pad_rows(x, 3) for x in (h, temperature, seed))
        yield name, (h, weight, temperature, seed, *rest), (padded[0], weight, *padded[1:], *rest)
    twice = torch.randn(4, 6, generator=generator).repeat_interleave(2, dim=0)
    h, zero = torch.randn(3, 6, generator=generator), torch.zeros(3)
    yield "ties", (h, twice, zero, zero.long(), torch.tensor([3]), None, -1), None
    yield "a count of more rows than there are", (h, twice, zero, zero.long(), torch.tensor([9]), 5.0, -1), None


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, args, padded in calls(generator):
        vocab, suppress = len(args[1]), args[-1]
        of_part = (suppress + vocab if suppress >= 0 else -1, torch.tensor([vocab]), max(2 * vocab - 1, vocab + 1))
        yield Sample(name, (*args[:-1], *of_part), None if padded is None else (*padded[:-1], *of_part))


OP = define(
    "vocabulary_part",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    count="cu_rows",
    padding=(0, None),
    kernel="dgraph.ops.vocabulary.triton.vocabulary_part:kernel",
    workspace=workspace,
)

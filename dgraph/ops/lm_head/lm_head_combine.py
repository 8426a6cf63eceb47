"""dgraph::lm_head_combine: the results of dgraph::lm_head, from the numbers of all ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dgraph.ops.draws import pad_rows
from dgraph.ops.lm_head import lm_head_part
from dgraph.ops.lm_head.lm_head_part import NUMBERS
from dgraph.ops.registry import Sample, define

CONTRACT = """\
numbers f32[K, W * 8] (or float64): those that dgraph::lm_head_part gave for each row on W ranks, by rank; a rank has
higher ids than those before it -> token i64[K], confidence, margin, entropy [K] in the dtype of numbers, as
dgraph::lm_head gives them: the token of the largest fourth number (ties: lowest rank); and current [K, 1], the
probability of the id that stands, 0 without one. A row whose last number is -1 is no candidate, and has current 0. Row
by row: a padding row influences no other row, and may hold anything. Every rank computes the same bits. Inline: the
compiler fuses it."""


def reference(numbers: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    by_rank = numbers.unflatten(-1, (-1, NUMBERS))
    top, second, total, spread, key, chosen, standing, ids = by_rank.unbind(-1)
    highest, mass, distance = lm_head_part.merged(top, total, spread)
    mass, distance = mass.squeeze(-1), distance.squeeze(-1)
    first = top.argmax(-1, keepdim=True)
    runner = top.scatter(-1, first, second.gather(-1, first)).amax(-1, keepdim=True)
    winner = key.argmax(-1, keepdim=True)
    token = ids.gather(-1, winner).squeeze(-1).to(torch.int64)
    confidence = torch.exp(chosen.gather(-1, winner) - highest).squeeze(-1) / mass
    margin = (1.0 - torch.exp(runner - highest).squeeze(-1)) / mass
    entropy = torch.log(mass) + distance / mass
    current = torch.exp(standing.amax(-1, keepdim=True) - highest) / mass[:, None]
    other = numbers[:, -1] == -1
    return (
        token.masked_fill(other, -1),
        confidence.masked_fill(other, -torch.inf),
        margin.masked_fill(other, -torch.inf),
        entropy.masked_fill(other, torch.inf),
        current.masked_fill(other[:, None], 0.0),
    )


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for k, vocab, ranks in ((7, 30, 2), (3, 5, 4), (5, 9, 1), (0, 8, 2)):
        logits = torch.randn((k, vocab), generator=generator)
        temperature = torch.rand(k, generator=generator).round()
        seed = torch.randint(0, 2**62, (k,), generator=generator)
        current = torch.randint(-1, vocab, (k,), generator=generator)
        each = -(-vocab // ranks)
        parts = []
        for rank in range(ranks):
            part = torch.zeros((k, each))
            own = logits[:, rank * each : (rank + 1) * each]
            part[:, : own.shape[1]] = own
            first = torch.tensor([rank * each])
            parts.append(lm_head_part.numbers_of(part, temperature, seed, 1, first, vocab, current))
        numbers = torch.cat(parts, dim=1)
        if k > 3:
            numbers[2] = 0.0
            numbers[2, NUMBERS - 1 :: NUMBERS] = -1.0
        yield Sample(f"{vocab} ids on {ranks} ranks", (numbers,), (pad_rows(numbers, 2),))


OP = define(
    "lm_head_combine",
    reference,
    samples=samples,
    contract=CONTRACT,
    by_row=("numbers",),
    padding=(None, None, None, None, None),
    inline=True,
)

"""dgraph::vocabulary_combine: the results of dgraph::vocabulary_attention, from the numbers of all ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dgraph.ops.draws import pad_rows
from dgraph.ops.registry import Sample, define
from dgraph.ops.vocabulary import vocabulary_part
from dgraph.ops.vocabulary.vocabulary_part import NUMBERS, combined, faded

CONTRACT = """\
numbers f32[K, W * 6] (or float64): those that dgraph::vocabulary_part gave for each row on W ranks, by rank; a rank has
higher ids than those before it. own [K, 6] and context [K, d]: numbers and context of this rank
-> best i64[K], confidence [K], token i64[K], entropy [K] as dgraph::vocabulary_attention gives them, and soft [K, d]:
this rank's part of the soft embedding, of which the sum over the ranks is all of it; in the dtype of numbers.
A row whose last number is -1 is a padding row. Row by row: a padding row influences no other row, and may hold
anything. Every rank computes the same bits but for soft. Inline: the compiler fuses it."""


def reference(numbers: Tensor, own: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    every = combined(numbers.unflatten(-1, (-1, NUMBERS)))
    return decided(every, context * faded(own, every), numbers[:, -1] != -1)


def decided(numbers: Tensor, context: Tensor, live: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Results of rows whose numbers [R, 6] are of the whole vocabulary; live: bool[R], rows that are no padding."""
    best, _, mass, distance, _, token = numbers.unbind(-1)
    return (
        best.to(torch.int64).masked_fill(~live, -1),
        (1 / mass).masked_fill(~live, -torch.inf),
        token.to(torch.int64).masked_fill(~live, -1),
        (mass.log() + distance / mass).masked_fill(~live, torch.inf),
        (context / mass[:, None]).masked_fill(~live[:, None], 0),
    )


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for k, vocab, ranks in ((7, 30, 2), (3, 5, 4), (5, 9, 1), (0, 8, 2)):
        h, weight = torch.randn(k, 6, generator=generator), torch.randn(vocab, 6, generator=generator)
        temperature = torch.rand(k, generator=generator).round()
        seed = torch.randint(0, 2**62, (k,), generator=generator)
        each = -(-vocab // ranks)
        filled = torch.cat([weight, torch.zeros(ranks * each - vocab, 6)])
        rows = temperature, seed, torch.tensor([max(k - 1, 0)]), None, 1
        parts = [
            vocabulary_part.reference(h, part, *rows, torch.tensor([rank * each]), vocab)
            for rank, part in enumerate(filled.split(each))
        ]
        numbers, (context, own) = torch.cat([numbers for _, numbers in parts], dim=1), parts[-1]
        args = numbers, own, context
        yield Sample(f"{vocab} ids on {ranks} ranks", args, tuple(pad_rows(x, 2) for x in args))


OP = define(
    "vocabulary_combine",
    reference,
    samples=samples,
    contract=CONTRACT,
    by_row=("numbers", "own", "context"),
    padding=(None, None, None, None, None),
    inline=True,
)

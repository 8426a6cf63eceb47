"""dgraph_methods::first_rows and dgraph_methods::moved, see `dgraph_methods.elastic`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from dgraph.ops import Sample, define
from dgraph.ops.draws import cu_rows_of, pad_rows
from dgraph.ops.padded import sequence_of

FIRST_CONTRACT = """\
The first `count` flagged rows of each sequence, or all of them if these are fewer.
flags bool[N]; cu_rows i32[b+1]; count an integer -> bool[N]; padding rows: False, and they may hold anything.
Deterministic, without a host read."""
MOVED_CONTRACT = """\
Flags all rows of a sequence, unless a row has held[:, 1] and held[:, 2] above 0, and the cosine of new with
held[:, 0] over its rows is at least gamma. With a side of zeros they are flagged.
new f32[N]; held f32[N, 3]; cu_rows i32[b+1]; gamma a float -> bool[N]; padding rows: False, and they may hold anything.
Sums in the dtype of new, in order. Deterministic, without a host read."""


def first_rows(flags: Tensor, cu_rows: Tensor, count: int) -> Tensor:
    sequence = sequence_of(cu_rows, len(flags))
    before = F.pad(flags.long().cumsum(0), (1, 0))
    return flags & (sequence < len(cu_rows) - 1) & (before[1:] - before[cu_rows.long()[sequence]] <= count)


def moved(new: Tensor, held: Tensor, cu_rows: Tensor, gamma: float) -> Tensor:
    old, tracked, ran = held.to(new.dtype).unbind(1)
    values = torch.stack([new * old, new * new, old * old, tracked * ran], 1)
    ends = cu_rows.long()  # each sequence is summed by itself, in order
    dot, mine, former, known = torch.segment_reduce(values, "sum", offsets=ends, axis=0, initial=0, unsafe=True).T
    alike = (torch.stack([mine, former, known]) > 0).all(0) & (dot >= gamma * (mine * former).sqrt())
    return F.pad(~alike, (0, 1))[sequence_of(cu_rows, len(new))]


def fake(of: Tensor, *rest: object) -> Tensor:
    return of.new_empty(of.shape, dtype=torch.bool)


def first_samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, counts, count in (("ragged, an empty sequence", (9, 0, 4), 3), ("more than there are", (5, 2), 9)):
        flags, cu_rows = torch.rand(sum(counts), generator=generator) < 0.6, cu_rows_of(counts)
        yield Sample(name, (flags, cu_rows, count), (pad_rows(flags, 3), cu_rows, count))


def moved_samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, counts, gamma in (("ragged, an empty sequence", (6, 0, 3, 8, 4), 0.9), ("always", (5, 2), 2.0)):
        new, cu_rows = torch.rand(sum(counts), generator=generator), cu_rows_of(counts)
        held = torch.stack([new + 0.3 * torch.rand(len(new), generator=generator) ** 4, *torch.ones(2, len(new))], 1)
        held[: counts[0], 2] = 0  # it did not run
        held[-counts[-1] :, 0] = 1 - new[-counts[-1] :]
        yield Sample(name, (new, held, cu_rows, gamma), (pad_rows(new, 3), pad_rows(held, 3), cu_rows, gamma))


FIRST_ROWS = define(
    "dgraph_methods::first_rows", first_rows, samples=first_samples, contract=FIRST_CONTRACT, fake=fake, padding=(0,)
)
MOVED = define("dgraph_methods::moved", moved, samples=moved_samples, contract=MOVED_CONTRACT, fake=fake, padding=(0,))

"""dgraph::block_numbers: a number for each row, the same for all rows of one block."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.draws import cu_rows_of, pad_rows, positions_of
from dgraph.ops.registry import Sample, define

CONTRACT = """\
positions i64[N], of rows that cu_rows i32[b+1] divides into sequences; or i64[b, t] of whole sequences, and no cu_rows
-> i64 of the shape of positions: a number above 0 for each row, the same for rows of one sequence whose positions are
of one block [k * block, (k + 1) * block), and another for all others; 0 for padding rows.
Padding rows may hold anything. Deterministic. Nothing is read on the host. Inline: the compiler fuses it, once for all
that read it."""


def reference(positions: Tensor, cu_rows: Tensor | None, block: int) -> Tensor:
    if block < 1:
        raise InputError(f"dgraph::block_numbers: block must be a number of positions, at least 1, got {block}.")
    rows = torch.arange(positions.shape[0], device=positions.device)
    inside = positions // block + 1
    if cu_rows is None:
        return (rows[:, None] << 32) + inside
    # Counted, not searched: a compiler fuses that everywhere.
    sequence = (cu_rows[1:] <= rows[:, None]).sum(1)
    return torch.where(rows < cu_rows[-1], (sequence << 32) + inside, 0)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, counts, starts, block in (
        ("ragged, an empty sequence", (5, 0, 7, 4), (0, 3, 30, 8), 4),
        ("one block each", (3, 3), (8, 8), 32),
        ("no rows", (0, 0), (0, 0), 4),
    ):
        positions, cu_rows = positions_of(counts, starts), cu_rows_of(counts)
        yield Sample(name, (positions, cu_rows, block), (pad_rows(positions, 3), cu_rows, block))
    yield Sample("whole sequences", (torch.arange(7).expand(3, 7).contiguous(), None, 4))


OP = define(
    "block_numbers",
    reference,
    samples=samples,
    contract=CONTRACT,
    padding=(0,),
    inline=True,
    ahead=True,
)

"""Actions of a sequence under sparse attention, and helpers that the ops on its keys share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

REUSE, DENSE, SELECT, REPACK = range(4)
"""Actions of a sequence in a step, the values of `action`.

DENSE and SELECT: rows see the key rows of the step; SELECT also chooses the keys to keep. REUSE and REPACK: rows
see the kept keys, and the window; REPACK first renews the keys and values that were kept.
"""


def spans_of(action: Tensor, wanted: int, *offsets: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield each sequence with action `wanted`: its index, and a slice of its rows for each of the offsets i32[b+1]."""
    starts = [offset.tolist() for offset in offsets]
    for s, found in enumerate(action.tolist()):
        if found == wanted:
            yield s, *(slice(start[s], start[s + 1]) for start in starts)


def per_sequence(values: Sequence[Sequence[int]] | Sequence[int]) -> Tensor:
    """Tensor i32[b, ...] from a list with an entry for each sequence."""
    return torch.tensor(values, dtype=torch.int32)

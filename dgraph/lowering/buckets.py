"""Buckets: the row counts for which a stage is prepared."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import torch

from dgraph.errors import InputError

# Up to a row count, the distance between buckets; 0 for powers of two.
_STRIDES: dict[str, tuple[tuple[float, int], ...]] = {
    "hybrid": ((128, 0), (inf, 256)),
    "fine": ((128, 0), (1024, 64), (4096, 128), (inf, 256)),
}
KINDS = ("exact", *_STRIDES)
"""Kinds of buckets that have a name."""


@dataclass(frozen=True)
class Buckets:
    """Round a row count up to one that a stage was prepared for.

    Attributes:
        kind: "exact" (no padding), "hybrid", "fine" or "list". "hybrid" has powers of two up to 128, then multiples of
            256 (FOCUS, section 5). "fine" has powers of two up to 128, then multiples of 64, of 128 above 1024 and of
            256 above 4096. It pads less and needs more graphs.
        sizes: the ascending list of kind "list"; larger counts round up to multiples of the last.
    """

    kind: str = "exact"
    sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, value: str | Sequence[int] | Buckets | None) -> Buckets:
        """Buckets from an option: a kind, a list of sizes, or None for "exact".

        Raises:
            InputError: an unknown kind, or sizes that are not positive integers.
        """
        if isinstance(value, Buckets):
            return value
        if value is None or (isinstance(value, str) and value in KINDS):
            return cls(value or "exact")
        sizes = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else []
        if not sizes or not all(type(s) is int and s > 0 for s in sizes):
            kinds = ", ".join(map(repr, KINDS))
            raise InputError(f"buckets must be {kinds} or a list of row counts of at least 1, got {value!r}.")
        return cls("list", tuple(sorted(set(sizes))))

    @classmethod
    def default(cls, device: torch.device) -> Buckets:
        """Default buckets of a device: the paper's list on a GPU, no padding elsewhere."""
        return cls("hybrid" if device.type == "cuda" else "exact")

    def __call__(self, rows: int) -> int:
        """The bucket of a row count; at least 1."""
        rows = max(rows, 1)
        if self.kind == "exact":
            return rows
        if self.kind != "list":
            stride = next(stride for bound, stride in _STRIDES[self.kind] if rows <= bound)
            return -(-rows // stride) * stride if stride else 1 << (rows - 1).bit_length()
        at = bisect.bisect_left(self.sizes, rows)
        return self.sizes[at] if at < len(self.sizes) else -(-rows // self.sizes[-1]) * self.sizes[-1]

    def up_to(self, rows: int) -> tuple[int, ...]:
        """Every bucket that counts from 1 to `rows` fall into, ascending.

        Raises:
            InputError: there is one for each count (kind "exact").
        """
        if self.kind == "exact":
            raise InputError(
                "buckets of kind 'exact' cannot be prepared ahead; choose 'hybrid', 'fine' or a list of row counts."
            )
        sizes = [self(1)]
        while sizes[-1] < rows:
            sizes.append(self(sizes[-1] + 1))
        return tuple(sizes)

    def to_json(self) -> str | list[int]:
        """The option that makes these buckets."""
        return list(self.sizes) if self.kind == "list" else self.kind

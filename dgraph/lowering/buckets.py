"""Buckets: the row counts for which a stage is prepared."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from dgraph.errors import InputError


@dataclass(frozen=True)
class Buckets:
    """Rounds a row count up to one that a stage was prepared for.

    Attributes:
        kind: "exact" (no padding), "hybrid" (powers of two up to 128, then multiples of 256: FOCUS, section 5) or
            "list".
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
        if value is None or value == "exact":
            return cls()
        if value == "hybrid":
            return cls("hybrid")
        if isinstance(value, str):
            raise InputError(f"buckets must be 'exact', 'hybrid' or a list of row counts, got {value!r}.")
        sizes = tuple(sorted(set(value)))
        if not sizes or not all(isinstance(s, int) and s > 0 for s in sizes):
            raise InputError(f"buckets must be positive row counts, got {list(value)!r}.")
        return cls("list", sizes)

    def __call__(self, rows: int) -> int:
        """The bucket of a row count; at least 1."""
        rows = max(rows, 1)
        if self.kind == "exact":
            return rows
        if self.kind == "hybrid":
            return 1 << (rows - 1).bit_length() if rows <= 128 else -(-rows // 256) * 256
        at = bisect.bisect_left(self.sizes, rows)
        return self.sizes[at] if at < len(self.sizes) else -(-rows // self.sizes[-1]) * self.sizes[-1]

    def to_json(self) -> str | list[int]:
        """As the option that makes them."""
        return list(self.sizes) if self.kind == "list" else self.kind

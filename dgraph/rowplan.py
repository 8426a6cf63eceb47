"""Which rows the steps of a bidirectional model forward.

In a bidirectional model every row sees the whole canvas, so every decoded token changes every key. A method that does
not forward all rows in all steps reads keys and values as they were last written; which rows it does forward, and how
often all of them, is all that distinguishes the published caches of this kind.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from dgraph.errors import InputError, UnknownName

REGIONS = ("all", "suffix", "block")


@dataclass(frozen=True)
class RowPlan:
    """Rows of a step: all of the canvas in a full step, a region of it in the others.

    Whether decoded rows of the region are forwarded again is the block cache's business (see `Recipe.block_cache`).

    Attributes:
        region: "all" (every row), "suffix" (the current block and all behind it) or "block" (the current block).
        full_steps: full steps at the beginning of every block, at least 1.
        every: another full step every so many steps of a block; 0 for none.
        warm_up: full steps at the beginning of a response.
        behind, ahead: rows in front of the current block and behind it that belong to the region "block".
    """

    region: str = "all"
    full_steps: int = 1
    every: int = 0
    warm_up: int = 0
    behind: int = 0
    ahead: int = 0

    def __post_init__(self) -> None:
        if self.region not in REGIONS:
            raise UnknownName("region", str(self.region), REGIONS)
        lowest = {"full_steps": 1, "every": 0, "warm_up": 0, "behind": 0, "ahead": 0}
        for name, least in lowest.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise InputError(f"{name} must be an integer of at least {least}, got {value!r}.")
        if self.region != "block" and (self.behind or self.ahead):
            raise InputError(f"behind and ahead widen the region 'block', not {self.region!r}; leave them at 0.")

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

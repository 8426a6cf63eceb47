"""Counts of an engine since it began."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

COUNTS = (
    *("finished", "admitted", "preempted", "prompt_tokens", "completion_tokens", "steps", "rows", "padded"),
    *("refresh_rows", "mixed_rows", "prefix_asked", "prefix_found"),
)
"""Fields of `EngineStats` that only grow."""


@dataclass(frozen=True)
class EngineStats:
    """Counts of an engine since it began, and its state now.

    Attributes:
        running, waiting: requests now.
        finished: requests that ended, by finish reason.
        admitted, preempted: requests that got a slot, and that gave it up since pages ran out.
        prompt_tokens, completion_tokens: of requests that ended.
        steps: forward passes of the decode loop; idle ones are none.
        rows, padded: by stage, rows that were forwarded, and with the padding of the buckets.
        refresh_rows: of prompts and of steps that recompute them; mixed_rows: of prompts that steps encoded with their
            blocks.
        budget_fill: share of `max_batched_rows` that steps used.
        longest_wait: most steps in a row that a running request sat out.
        pages, free_pages: of the KV pool; kv_bytes: of all caches, those of rings and packed keys among them.
        prefix_asked, prefix_found: tokens of prompts that were looked up in the prefix cache, and that were there.
    """

    running: int
    waiting: int
    finished: Mapping[str, int]
    admitted: int
    preempted: int
    prompt_tokens: int
    completion_tokens: int
    steps: int
    rows: Mapping[str, int]
    padded: Mapping[str, int]
    refresh_rows: int
    budget_fill: float
    longest_wait: int
    pages: int
    free_pages: int
    kv_bytes: int
    prefix_asked: int = 0
    prefix_found: int = 0
    mixed_rows: int = 0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompts' tokens that were in the prefix cache; 0 before the first."""
        return self.prefix_found / self.prefix_asked if self.prefix_asked else 0.0

    def since(self, before: EngineStats) -> EngineStats:
        """Counts since an earlier moment, and the state now."""
        return replace(self, **{name: _more(getattr(self, name), getattr(before, name)) for name in COUNTS})

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "prefix_hit_rate": self.prefix_hit_rate}


def _more(now: Any, before: Any) -> Any:
    """Growth of a count, or of each count by name."""
    if not isinstance(now, Mapping):
        return now - before
    return {name: count - before.get(name, 0) for name, count in now.items()}

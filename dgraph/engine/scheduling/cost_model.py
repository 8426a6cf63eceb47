"""Cost model of a step: its seconds, from its rows and keys; the profiler fits it, and the simulator uses it."""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgraph.errors import InputError


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step: `constant + products(rows) + per_key * keys`.

    Attributes:
        rows: row counts, ascending, at which the products were measured.
        seconds: of the products at these; linear between them, constant below the first, and after the last as steep as
            between the last two.
        per_key: seconds per row of keys that attention reads: over all slots of a step, the keys of each once. (A
            refresh reads them once per tile of its queries; that is part of the cost of its rows.)
        constant: of launches, of the LM head of the few rows that need logits, and of the work between forwards.

    Raises:
        InputError: row counts that do not ascend, or as many times as there are not row counts.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    per_key: float = 0.0
    constant: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(self.rows))
        object.__setattr__(self, "seconds", tuple(self.seconds))
        if len(self.rows) != len(self.seconds) or not self.rows:
            raise InputError(
                f"a cost model needs as many seconds as row counts, got {len(self.seconds)} and {len(self.rows)}."
            )
        if any(a >= b for a, b in zip(self.rows, self.rows[1:], strict=False)) or self.rows[0] < 0:
            raise InputError(f"row counts of a cost model must ascend from at least 0, got {self.rows}.")
        if min(*self.seconds, self.per_key, self.constant) < 0:
            raise InputError(f"times of a cost model must not be negative, got {self}.")

    def products(self, rows: int) -> float:
        """Seconds of the products of a step of `rows` rows."""
        if rows <= self.rows[0]:
            return self.seconds[0]
        if len(self.rows) == 1:
            return self.seconds[0] * rows / self.rows[0]
        at = min(bisect.bisect_left(self.rows, rows), len(self.rows) - 1)
        low, high = self.rows[at - 1], self.rows[at]
        return self.seconds[at - 1] + (self.seconds[at] - self.seconds[at - 1]) * (rows - low) / (high - low)

    def step(self, rows: int, keys: int) -> float:
        """Seconds of a step that forwards `rows` rows, of slots that hold `keys` keys together; 0 without a row."""
        return self.constant + self.products(rows) + self.per_key * keys if rows else 0.0

    def enough(self, limit: int, times: float = 8.0) -> int:
        """The fewest rows of a step that takes `times` times as long as one of a single row; `limit` if no step does.

        The fixed cost of a step (reading the weights, launches) is then a small part of it. With more requests at a
        time, steps grow in proportion, and tokens per second hardly rise.
        """
        seconds = times * self.step(1, 0)
        return bisect.bisect_left(range(1, limit), seconds, key=lambda rows: self.step(rows, 0)) + 1

    @classmethod
    def fit(cls, samples: Iterable[tuple[int, int, float]], knots: Sequence[int] | None = None) -> CostModel:
        """The model that fits measured steps best, by least squares.

        The constant is part of the products' seconds: steps alone cannot tell one from the other.

        Args:
            samples: (rows, keys, seconds) of a step each.
            knots: row counts of the table; by default those of the samples, thinned to at most 16.

        Raises:
            InputError: fewer samples than knots.
        """
        import numpy as np

        found = np.array(list(samples), dtype=float).reshape(-1, 3)
        at = sorted({int(rows) for rows in found[:, 0]}) if knots is None else sorted(set(knots))
        if knots is None and len(at) > 16:
            at = [at[round(i * (len(at) - 1) / 15)] for i in range(16)]
        if not at or len(found) < len(at):
            raise InputError(f"a cost model of {len(at)} row counts needs at least as many steps, got {len(found)}.")
        hats = np.stack([np.interp(found[:, 0], at, np.eye(len(at))[i]) for i in range(len(at))], axis=1)
        keys = found[:, 1:2] if found[:, 1].any() else np.zeros((len(found), 0))
        scale = 1 / found[:, 2:]  # relative errors count: steps differ a hundredfold
        solved = np.linalg.lstsq(np.hstack([hats, keys]) * scale, np.ones(len(found)), rcond=None)[0].clip(min=0)
        return cls(tuple(at), tuple(map(float, solved[: len(at)])), float(solved[len(at)]) if keys.shape[1] else 0.0)

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them."""
        return {"rows": self.rows, "seconds": self.seconds, "per_key": self.per_key, "constant": self.constant}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> CostModel:
        """The model that `to_json` described.

        Raises:
            InputError: other names or values.
        """
        try:
            return cls(**value)
        except TypeError as error:
            raise InputError(f"a cost model has rows, seconds, per_key and constant, got {value!r}: {error}.") from None

    @classmethod
    def read(cls, path: str | Path) -> CostModel:
        """Read the model in a JSON file: one of its own, or one that `dgraph profile --steps --json` wrote.

        Raises:
            InputError: a file that cannot be read, or has no such model.
        """
        try:
            value = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls.from_json(value["cost"] if isinstance(value, dict) and "cost" in value else value)
        except (OSError, ValueError) as error:
            raise InputError(f"cost model {path} cannot be read: {error}.") from None


LLADA_8B_H200 = CostModel(
    rows=(1, 32, 128, 192, 256, 512, 1024, 2048, 4096, 8192),
    seconds=tuple(
        1.1e-3 * 32 * (218.1 / 192.9) * ms for ms in (0.108, 0.111, 0.119, 0.146, 0.157, 0.306, 0.589, 1.27, 2.35, 4.72)
    ),
    per_key=0.2e-6,
    constant=1.0e-3,
)
"""LLaDA-8B in bfloat16 on one H200, from single measurements and the throughput of an engine.

Products: those of one SDAR-8B layer (192.9 M weights), timed in a CUDA graph, times 32 layers of 218.1 M weights. They
are raised by 10 % for the rest of a step (attention of refreshes, LM head). So the closed loops of
benchmarks/results/serving.md have the throughput that was measured within 9 %, where rows are padded as there. A row
of keys: 512 KiB in 32 layers with 32 KV heads each, at 2.6 TB/s. The constant is of launches at batch 1: a step of 32
rows over 1,088 keys takes 5.6 ms, and 5.4 were measured.
"""

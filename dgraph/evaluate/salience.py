"""Salient rows by layer and step: counts of a batch, and mean shares over batches (DyLLM, figure 5 and table 4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dgraph.runtime.stats import GenerationStats

Cells = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Counted:
    """Salient rows of a batch, step by step.

    Attributes:
        keys: keys of the results of its prompts; see `Keys`.
        layers: the layers that count, from 0.
        rows: per step, the number of forwarded rows.
        salient: per step, the number of salient rows among them in each of these layers.
    """

    keys: tuple[str, ...]
    layers: tuple[int, ...]
    rows: tuple[int, ...]
    salient: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, keys: Iterable[str], layers: Iterable[int], stats: GenerationStats) -> Counted | None:
        """The counts in the statistics of one batch; None if nothing was counted."""
        if not stats.salient:
            return None
        return cls(tuple(keys), tuple(layers), tuple(stats.step_rows), tuple(map(tuple, stats.salient)))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Counted:
        """The record that `to_json` made.

        Raises:
            KeyError, TypeError, ValueError: an entry is missing, or of another type or length.
        """
        keys, layers, rows = (tuple(value[name]) for name in ("batch", "layers", "rows"))
        salient = tuple(map(tuple, value["salient"]))
        if not keys or not all(isinstance(key, str) for key in keys):
            raise TypeError("keys of another type")
        if not all(type(n) is int for n in (*layers, *rows, *(n for counts in salient for n in counts))):
            raise TypeError("a count of another type")
        if len(salient) != len(rows) or any(len(counts) != len(layers) for counts in salient) or not all(rows):
            raise ValueError("counts of another length")
        return cls(keys, layers, rows, salient)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"batch": self.keys, "layers": self.layers, "rows": self.rows, "salient": self.salient}

    def full(self, step: int) -> bool:
        """True if every layer ran on all rows in that step."""
        return all(count == self.rows[step] for count in self.salient[step])


@dataclass(frozen=True)
class Salience:
    """Mean share of the forwarded rows that are salient; a mean over batches weighs each by its prompts.

    A step in which all layers run on all rows is full, and any other is sparse. A step that is full for some sequences
    of a batch only is sparse.

    Attributes:
        prompts: number of prompts for which there are counts.
        layers: the layers that count, from 0.
        shares: per step and layer, the weighted sum of the shares of batches for which the step was sparse; a batch's
            weight is its number of prompts.
        sparse, full: per step, the weight of the batches for which it was sparse, and for which it was full.
    """

    prompts: int
    layers: tuple[int, ...]
    shares: Cells
    sparse: tuple[float, ...]
    full: tuple[float, ...]

    @classmethod
    def of(cls, batches: Sequence[tuple[Counted, int]]) -> Salience | None:
        """Average over batches, each given with the number of its prompts that count; None without batches."""
        if not batches:
            return None
        layers, length = batches[0][0].layers, max(len(counted.rows) for counted, _ in batches)
        shares = [[0.0] * len(layers) for _ in range(length)]
        sparse, full = [0.0] * length, [0.0] * length
        for counted, prompts in batches:
            for step, (rows, salient) in enumerate(zip(counted.rows, counted.salient, strict=True)):
                if counted.full(step):
                    full[step] += prompts
                    continue
                sparse[step] += prompts
                shares[step] = [s + prompts * n / rows for s, n in zip(shares[step], salient, strict=True)]
        return cls(sum(n for _, n in batches), layers, tuple(map(tuple, shares)), tuple(sparse), tuple(full))

    def cell(self, step: int, layer: int) -> float | None:
        """The mean share over batches for which a step was sparse; None if there are none.

        layer: the layer's place in `layers`.
        """
        return self.shares[step][layer] / self.sparse[step] if self.sparse[step] else None

    @property
    def by_layer(self) -> list[float] | None:
        """Per layer, the mean share over the sparse steps of all batches; None without sparse steps."""
        total = sum(self.sparse)
        return [sum(column) / total for column in zip(*self.shares, strict=True)] if total else None

    @property
    def by_step(self) -> list[float]:
        """Per step, the mean share over its layers and batches; 1 for a full step."""
        weights = zip(self.shares, self.sparse, self.full, strict=True)
        return [(sum(s) / len(self.layers) + full) / (sparse + full) for s, sparse, full in weights]

    def mean(self, first: int = 0, last: int | None = None) -> float | None:
        """The mean share over all layers and the sparse ones of steps first to last - 1; None without sparse steps."""
        total = sum(self.sparse[first:last])
        return sum(map(sum, self.shares[first:last])) / (total * len(self.layers)) if total else None

    def to_json(self) -> dict[str, Any]:
        """Plain values: `by_layer` in the order of `layers`, `by_step` from step 0."""
        return {
            "prompts": self.prompts,
            "mean": self.mean(),
            "layers": list(self.layers),
            "by_layer": self.by_layer,
            "by_step": self.by_step,
        }


def rows_run(batches: Sequence[tuple[Counted, int]], decoded: int) -> dict[int, float]:
    """Rows that each counting layer ran on per decoded token, full steps included, by layer; empty without batches.

    Args:
        batches: as `Salience.of` takes them. A batch counts by the share of its prompts.
        decoded: tokens that these prompts decoded.
    """
    found: dict[int, float] = {}
    for counted, prompts in batches:
        for layer, rows in zip(counted.layers, map(sum, zip(*counted.salient, strict=True)), strict=True):
            found[layer] = found.get(layer, 0.0) + rows * prompts / len(counted.keys) / decoded
    return found

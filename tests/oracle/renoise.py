"""The rule of DiffusionGemma's canvases, in plain Python numbers: one canvas, one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Canvas:
    """What the rule remembers of a canvas.

    Attributes:
        bound, stability, confidence, steps: its settings.
        history: the most likely tokens of every step so far.
    """

    bound: float
    stability: int
    confidence: float
    steps: int
    history: list[list[int]] = field(default_factory=list)

    def step(self, best: Sequence[int], entropy: Sequence[float]) -> tuple[set[int], bool]:
        """The positions that keep what was drawn, and whether the canvas is done."""
        kept, sum_before = set(), 0.0
        for position in sorted(range(len(entropy)), key=lambda p: (entropy[p], p)):
            if sum_before > self.bound:
                break
            kept.add(position)
            sum_before += entropy[position]
        before = self.history[len(self.history) - self.stability :] if self.stability else []
        stable = len(before) == self.stability and all(canvas == list(best) for canvas in before)
        self.history.append(list(best))
        sure = sum(entropy) / len(entropy) < self.confidence
        return kept, (stable and sure) or len(self.history) >= self.steps


def heat(t_min: float, t_max: float, steps: int, step: int) -> float:
    """The temperature of a step, counted from 0, by how many are left."""
    left = steps - step
    return t_min + (t_max - t_min) * left / steps

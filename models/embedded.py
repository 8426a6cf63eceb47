"""The trained models that are installed with dgraph."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dgraph.families import Embedded
from dgraph.models.tasks import TASKS, held_out


@dataclass(frozen=True)
class HeldOut:
    """The held-out side of the training tasks; see `dgraph.families.Exam`."""

    new_tokens: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(TASKS)

    def draw(self, task: str, count: int, seed: int) -> list[tuple[str, str]]:
        """Prompts and answers of `dgraph.models.tasks`."""
        return [(example.prompt, example.answer) for example in held_out(task, count, seed)]


tiny_sdar = Embedded(
    name="tiny_sdar",
    folder=Path(__file__).parent / "tiny_sdar",
    summary="10 M parameters, SDAR format, blocks of 32: arithmetic, retrieval, sorting, instructions, open text",
    exam=HeldOut(new_tokens=96),
)

tiny_llada = Embedded(
    name="tiny_llada",
    folder=Path(__file__).parent / "tiny_llada",
    summary="11 M parameters, LLaDA format, every row sees every row: the same tasks, retrieval from 512 tokens",
    exam=HeldOut(new_tokens=64),
)

"""The trained models that are installed with dgraph."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dgraph.families import Embedded
from dgraph.models.tasks import TASKS, held_out


@dataclass(frozen=True)
class HeldOut:
    """The held-out side of the training tasks; see `dgraph.families.Exam`.

    Attributes:
        pairs: fewest and most in the prompts of the hard retrieval.
    """

    new_tokens: int
    pairs: tuple[int, int]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(TASKS)

    @property
    def hard(self) -> tuple[str, ...]:
        return tuple(self._hard)

    @property
    def _hard(self) -> dict[str, tuple[str, dict[str, int]]]:
        """The generator of each hard task, and its options.

        They are harder than the training data, as far as a model still has a third to four fifths of the answers right.
        """
        fewest, most = self.pairs
        return {
            "hard/math": ("math", {"fewest": 3, "most": 4, "largest": 40}),
            "hard/needle": ("needle", {"fewest": fewest, "most": most}),
            "hard/sort": ("sort", {"fewest": 9, "most": 11}),
            "hard/trace": ("trace", {"fewest": 3, "most": 3, "largest": 12}),
        }

    def draw(self, task: str, count: int, seed: int) -> list[tuple[str, str]]:
        """Prompts and answers of `dgraph.models.tasks`."""
        name, options = self._hard.get(task, (task, {}))
        return [(example.prompt, example.answer) for example in held_out(name, count, seed, **options)]


tiny_sdar = Embedded(
    name="tiny_sdar",
    folder=Path(__file__).parent / "tiny_sdar",
    summary="10 M parameters, SDAR format, blocks of 32: arithmetic, retrieval, sorting, instructions, open text",
    exam=HeldOut(new_tokens=96, pairs=(36, 48)),
)

tiny_llada = Embedded(
    name="tiny_llada",
    folder=Path(__file__).parent / "tiny_llada",
    summary="11 M parameters, LLaDA format, every row sees every row: the same tasks, retrieval from 512 tokens",
    exam=HeldOut(new_tokens=64, pairs=(110, 114)),
)

smol_sdar = Embedded(
    name="smol_sdar",
    folder=Path(__file__).parent / "smol_sdar",
    summary="135 M parameters, SmolLM2-135M-Instruct as a block-causal model, blocks of 32: English dialogue, word "
    "problems; needs the extra smol",
)

smol_llada = Embedded(
    name="smol_llada",
    folder=Path(__file__).parent / "smol_llada",
    summary="135 M parameters, SmolLM2-135M-Instruct where every row sees every row: the same; needs the extra smol",
)

"""Training batches: documents of one prompt and one response, packed into rows of fixed length.

A document begins at position 0 and is padded with end-of-sequence tokens to the end of its last block, so every
document starts at a block boundary of its row and blocks aligned to absolute positions stay aligned in the row.
Batch i depends on the seed and i alone, whatever number of workers makes it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

from .tasks import TASKS, make
from .tokenizer import EOS_ID, PAD_ID, encode_prompt

BLOCK = 32
"""Rows in a diffusion block."""

PADDING, PROMPT, RESPONSE, EOS_PADDING, TEXT_PROMPT = range(5)
"""What a token is to the loss: nothing, a task's prompt, part of a response, padding after its end, open text."""

KIND_NAMES = (*TASKS, "text")
"""Names of the `task` numbers in a batch."""

TASK_WEIGHTS = {"math": 0.36, "needle": 0.34, "sort": 0.12, "follow": 0.08, "trace": 0.10}
TEXT_SHARE = 1 / 3
"""Share of all tokens that is open text."""
EXTRA_BLOCK = 0.15
"""Chance of one more block of end-of-sequence padding after a response."""


@dataclass(frozen=True)
class Document:
    """One prompt and response: ids and kinds (of `PADDING` ..) per token, and the number of its task."""

    ids: list[int]
    kinds: list[int]
    task: int


@dataclass(frozen=True)
class Batch:
    """Packed rows; every tensor is i64 [rows, length]. `docs` numbers the documents of a row, -1 at padding."""

    tokens: Tensor
    positions: Tensor
    docs: Tensor
    kinds: Tensor
    tasks: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`, as i64."""
        fields = (getattr(self, name) for name in self.__dataclass_fields__)
        return Batch(*(field.to(device, non_blocking=True).long() for field in fields))


def document(prompt: list[int], response: list[int], task: str, length: int, extra: bool = False) -> Document:
    """Join prompt ids and response ids, end the response and pad it to the end of its block.

    A document longer than `length` (a multiple of the block) is cut there and then has no end.
    """
    first = TEXT_PROMPT if task == "text" else PROMPT
    ids = [*prompt, *response, EOS_ID][:length]
    kinds = ([first] * len(prompt) + [RESPONSE] * (len(response) + 1))[:length]
    padded = min(length, -(-len(ids) // BLOCK) * BLOCK + BLOCK * extra)
    return Document(
        ids + [EOS_ID] * (padded - len(ids)),
        kinds + [EOS_PADDING] * (padded - len(kinds)),
        KIND_NAMES.index(task),
    )


def split_passage(text: str, rng: random.Random) -> tuple[str, str]:
    """A passage as (first lines, remaining lines): between one line and half of them go first."""
    lines = text.split("\n")
    first = rng.randint(1, max(1, len(lines) // 2))
    return "\n".join(lines[:first]), "\n".join(lines[first:])


def pack(documents: Sequence[Document], rows: int, length: int) -> dict[str, np.ndarray]:
    """Place documents into rows, longest first, each in the first row with room; those without room are dropped."""
    arrays: dict[str, np.ndarray] = {
        "tokens": np.full((rows, length), PAD_ID, np.int16),
        "positions": np.zeros((rows, length), np.int16),
        "docs": np.full((rows, length), -1, np.int16),
        "kinds": np.full((rows, length), PADDING, np.uint8),
        "tasks": np.zeros((rows, length), np.uint8),
    }
    used = np.zeros(rows, np.int64)
    for number, item in enumerate(sorted(documents, key=lambda d: -len(d.ids))):
        size = len(item.ids)
        room = used + size <= length
        if not room.any():
            continue
        row = int(room.argmax())
        at = slice(used[row], used[row] + size)
        arrays["tokens"][row, at], arrays["kinds"][row, at], arrays["tasks"][row, at] = (
            item.ids,
            item.kinds,
            item.task,
        )
        arrays["positions"][row, at], arrays["docs"][row, at] = np.arange(size), number
        used[row] += size
    return arrays


class Mixture(Dataset[Batch]):
    """Batches of tasks and open text: item i is the i-th batch of `rows` rows of `length` tokens."""

    def __init__(
        self, tokenizer: Tokenizer, passages: list[str], rows: int, length: int, batches: int, seed: int
    ) -> None:
        self.tokenizer, self.passages = tokenizer, passages
        self.rows, self.length, self.batches, self.seed = rows, length, batches, seed

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> Batch:
        rng = random.Random(f"batch {self.seed} {index}")
        documents: list[Document] = []
        text = total = 0
        while total < self.rows * self.length:
            drawn = self._draw(rng, text=text <= TEXT_SHARE * total)
            documents += drawn
            size = sum(len(item.ids) for item in drawn)
            total += size
            text += size * (KIND_NAMES[drawn[0].task] == "text")
        arrays = pack(documents, self.rows, self.length)
        return Batch(**{name: torch.from_numpy(array) for name, array in arrays.items()})

    def _draw(self, rng: random.Random, text: bool, count: int = 16) -> list[Document]:
        """`count` documents at once, all open text or all tasks: the tokenizer is faster on batches."""
        if text:
            names = ["text"] * count
            pairs = [split_passage(self.passages[rng.randrange(len(self.passages))], rng) for _ in names]
        else:
            names = rng.choices(list(TASK_WEIGHTS), list(TASK_WEIGHTS.values()), k=count)
            pairs = [(example.prompt, example.answer) for example in (make(name, rng) for name in names)]
        answers = self.tokenizer.encode_batch_fast([answer for _, answer in pairs], add_special_tokens=False)
        return [
            document(
                encode_prompt(self.tokenizer, prompt),
                answer.ids,
                name,
                self.length,
                rng.random() < EXTRA_BLOCK,
            )
            for name, (prompt, _), answer in zip(names, pairs, answers, strict=True)
        ]

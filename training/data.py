"""Training batches: documents of one prompt and one response, packed into rows of fixed length.

A document begins at position 0 and is padded with end-of-sequence tokens. Padding goes to the end of its last block, so
that blocks aligned to absolute positions stay aligned in the row. Or it goes to the end of a response region that a
full bidirectional model denoises as a whole. Batch i depends on the seed and i alone, whatever number of workers makes
it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

from dgraph.models.tasks import TASKS, make

from .tokenizer import EOS_ID, PAD_ID, USER_ID, encode_prompt

BLOCK = 32
"""Rows in a diffusion block."""

PADDING, PROMPT, RESPONSE, EOS_PADDING, TEXT_PROMPT = range(5)
"""Kinds of tokens in the loss: padding, a task's prompt, part of a response, padding after its end, open text."""

KIND_NAMES = (*TASKS, "text")
"""Names of the `task` numbers in a batch."""

TASK_WEIGHTS = {"math": 0.36, "needle": 0.34, "sort": 0.12, "follow": 0.08, "trace": 0.10}
TEXT_SHARE = 1 / 3
"""Share of all tokens that is open text."""
EXTRA_BLOCK = 0.15
"""Chance of one more block of end-of-sequence padding after a response."""
RESPONSE_LENGTH = 64
"""Rows in the usual response region."""


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
    size = min(length, len(prompt) + len(response) + 1)
    return _document(prompt, response, task, min(length, -(-size // BLOCK) * BLOCK + BLOCK * extra))


def region_document(prompt: list[int], response: list[int], task: str, region: int) -> Document:
    """Join prompt ids and response ids, the response ended and padded, or cut, to `region` tokens."""
    return _document(prompt, response, task, len(prompt) + region)


def _document(prompt: list[int], response: list[int], task: str, padded: int) -> Document:
    first = TEXT_PROMPT if task == "text" else PROMPT
    ids = [*prompt, *response, EOS_ID][:padded]
    kinds = ([first] * len(prompt) + [RESPONSE] * (len(response) + 1))[:padded]
    return Document(
        ids + [EOS_ID] * (padded - len(ids)),
        kinds + [EOS_PADDING] * (padded - len(kinds)),
        KIND_NAMES.index(task),
    )


def draw_region(need: int, task: str, rng: random.Random) -> int:
    """Length of a response region: usually 64 for a task; else blocks that hold `need` tokens, or any length above.

    Open text is denoised whole or, half of the time, up to 64 or 128 tokens of it.
    """
    if task == "text":
        return rng.choice([need, need, RESPONSE_LENGTH, 2 * RESPONSE_LENGTH])
    whole = -(-need // BLOCK) * BLOCK
    choices = [max(whole, RESPONSE_LENGTH), whole, whole + BLOCK, need + rng.randrange(BLOCK)]
    return rng.choices(choices, [0.45, 0.3, 0.15, 0.1])[0]


def tail(prompt: list[int], length: int) -> list[int]:
    """An encoded prompt (`encode_prompt`) of at most `length` tokens: the beginning of its text is dropped."""
    return prompt if len(prompt) <= length else [USER_ID, *prompt[len(prompt) - length + 1 :]]


@dataclass(frozen=True)
class Layout:
    """Form of documents: at most `limit` tokens, retrieval among up to `pairs`, response regions or blocks."""

    limit: int
    pairs: int = 16
    regions: bool = False

    def place(self, prompt: list[int], response: list[int], task: str, rng: random.Random) -> Document | None:
        """The document of one prompt and response; None for a task's that does not fit whole."""
        need = len(response) + 1
        fits = task == "text" or len(prompt) + need <= self.limit
        if not self.regions:
            whole = document(prompt, response, task, self.limit, rng.random() < EXTRA_BLOCK)
            return whole if fits else None
        region = draw_region(need, task, rng)
        if task == "text":
            prompt = tail(prompt, max(self.limit - region, self.limit // 2))
        return region_document(prompt, response, task, min(region, self.limit - len(prompt))) if fits else None


def split_passage(text: str, rng: random.Random) -> tuple[str, str]:
    """A passage as (first lines, remaining lines): between one line and half of them go first."""
    lines = text.split("\n")
    first = rng.randint(1, max(1, len(lines) // 2))
    return "\n".join(lines[:first]), "\n".join(lines[first:])


def pack(documents: Sequence[Document], rows: int, length: int) -> dict[str, np.ndarray]:
    """Place documents into rows, longest first, each in the first row with room; those without room are dropped."""
    ordered = sorted(documents, key=lambda d: -len(d.ids))
    return fill(ordered, Rows(rows, length).places(len(item.ids) for item in ordered), rows, length)


class Rows:
    """Room in rows of `length` tokens, taken by first fit."""

    def __init__(self, rows: int, length: int) -> None:
        self.used, self.length = np.zeros(rows, np.int64), length

    def place(self, size: int) -> int | None:
        """Take room for `size` tokens in the first row that has it; return the row, or None without one."""
        room = self.used + size <= self.length
        if not room.any():
            return None
        row = int(room.argmax())
        self.used[row] += size
        return row

    def places(self, sizes: Iterable[int]) -> list[int | None]:
        """`place` of each."""
        return [self.place(size) for size in sizes]


def fill(documents: Sequence[Document], places: Sequence[int | None], rows: int, length: int) -> dict[str, np.ndarray]:
    """The tensors of a `Batch`: each document in its row (None: nowhere), one after the other, numbered in order."""
    arrays: dict[str, np.ndarray] = {
        "tokens": np.full((rows, length), PAD_ID, np.int32),
        "positions": np.zeros((rows, length), np.int16),
        "docs": np.full((rows, length), -1, np.int16),
        "kinds": np.full((rows, length), PADDING, np.uint8),
        "tasks": np.zeros((rows, length), np.uint8),
    }
    used = np.zeros(rows, np.int64)
    for number, (item, row) in enumerate(zip(documents, places, strict=True)):
        if row is None:
            continue
        size = len(item.ids)
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
    """Batches of tasks and open text: item i is the i-th batch of `rows` rows of `length` tokens.

    Without a `layout`, documents of up to `length` tokens end with a block.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        passages: list[str],
        rows: int,
        length: int,
        batches: int,
        seed: int,
        layout: Layout | None = None,
    ) -> None:
        self.tokenizer, self.passages, self.layout = tokenizer, passages, layout or Layout(length)
        self.rows, self.length, self.batches, self.seed = rows, length, batches, seed

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> Batch:
        rng = random.Random(f"batch {self.seed} {index}")
        documents: list[Document] = []
        text = total = 0
        while total < self.rows * self.length:
            open_text = text <= TEXT_SHARE * total
            drawn = self._draw(rng, open_text)
            documents += drawn
            size = sum(len(item.ids) for item in drawn)
            total += size
            text += size * open_text
        arrays = pack(documents, self.rows, self.length)
        return Batch(**{name: torch.from_numpy(array) for name, array in arrays.items()})

    def _draw(self, rng: random.Random, text: bool, count: int = 16) -> list[Document]:
        """`count` documents at once, all open text or all tasks: the tokenizer is faster on batches."""
        if text:
            names = ["text"] * count
            pairs = [split_passage(self.passages[rng.randrange(len(self.passages))], rng) for _ in names]
        else:
            names = rng.choices(list(TASK_WEIGHTS), list(TASK_WEIGHTS.values()), k=count)
            options = {"needle": {"most": self.layout.pairs}}
            examples = (make(name, rng, **options.get(name, {})) for name in names)
            pairs = [(example.prompt, example.answer) for example in examples]
        answers = self.tokenizer.encode_batch_fast([answer for _, answer in pairs], add_special_tokens=False)
        placed = (
            self.layout.place(encode_prompt(self.tokenizer, prompt), answer.ids, name, rng)
            for name, (prompt, _), answer in zip(names, pairs, answers, strict=True)
        )
        return [item for item in placed if item is not None]

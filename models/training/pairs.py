"""Prompts and responses from JSONL files as training batches, for the tokenizer of any checkpoint.

What an autoregressive model is made a diffusion model with: dialogues that it wrote itself, and tasks. A document is
the prompt in the model's chat form, the response, and the stop token, repeated to the end of a block: a diffusion model
ends a block with it. A prompt is never masked and carries no loss.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import Dataset

from dgraph.errors import InputError
from dgraph.families import ChatTokenizer

from .data import BLOCK, EOS_PADDING, PROMPT, RESPONSE, Batch, Document, Rows, fill


def read_pairs(path: Path) -> list[tuple[str, str]]:
    """(prompt, response) of each line {"prompt", "response"} of a file.

    Raises:
        InputError: a line that is none.
    """
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            prompt, response = value["prompt"], value["response"]
        except (ValueError, KeyError, TypeError):
            prompt = response = None
        if not isinstance(prompt, str) or not isinstance(response, str) or not prompt:
            raise InputError(
                f'{path}, line {number}: expected {{"prompt": TEXT, "response": TEXT}}, got {line[:60]!r}.'
            )
        pairs.append((prompt, response))
    return pairs


def chat_document(
    tokenizer: ChatTokenizer, prompt: str, response: str, eos_id: int, task: int = 0, block: int = BLOCK
) -> Document:
    """A prompt in its chat form and a response that ends: whole blocks, filled up with the stop token.

    task: the number of the file that it is from, for the log.
    """
    before = tokenizer.encode(prompt)
    after = [*tokenizer.encode_text(response), eos_id]
    padding = -(len(before) + len(after)) % block
    return Document(
        [*before, *after, *[eos_id] * padding],
        [PROMPT] * len(before) + [RESPONSE] * len(after) + [EOS_PADDING] * padding,
        task,
    )


@dataclass(frozen=True)
class Place:
    """Where a document goes: its number in the list of them, and its row in the batch."""

    document: int
    row: int


def plan(sizes: Sequence[int], rows: int, length: int, seed: str) -> list[list[Place]]:
    """Batches of one pass over documents of so many tokens: each that fits into a row once, in an order by the seed.

    A batch takes documents until one has no room in it; that one begins the next.
    """
    order = [i for i, size in enumerate(sizes) if size <= length]
    random.Random(seed).shuffle(order)
    batches: list[list[Place]] = []
    room = Rows(0, length)
    for i in order:
        row = room.place(sizes[i])
        if row is None:
            room = Rows(rows, length)
            row = room.place(sizes[i])
            assert row is not None  # it fits into an empty row
            batches.append([])
        batches[-1].append(Place(i, row))
    return batches


class Pairs(Dataset[Batch]):
    """Batches of one pass over documents: item i depends on the seed, the pass and i alone.

    Args:
        documents: of which those longer than `length` are left out; `left_out` counts them.
        rows, length: of a batch, in tokens.
        seed, epoch: of the order.
    """

    def __init__(self, documents: Sequence[Document], rows: int, length: int, seed: int, epoch: int = 0) -> None:
        self.documents, self.rows, self.length = documents, rows, length
        sizes = [len(item.ids) for item in documents]
        self.left_out = sum(size > length for size in sizes)
        self.batches = plan(sizes, rows, length, f"pairs {seed} {epoch}")

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Batch:
        places = self.batches[index]  # raises IndexError after the last, which ends a loop
        documents = [self.documents[place.document] for place in places]
        arrays = fill(documents, [place.row for place in places], self.rows, self.length)
        return Batch(**{name: torch.from_numpy(array) for name, array in arrays.items()})

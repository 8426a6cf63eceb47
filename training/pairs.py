"""Prompts and responses, and plain text, from JSONL files as training batches, for the tokenizer of any checkpoint.

The data that make a diffusion model of an autoregressive one: dialogues that it wrote itself, tasks, and plain text. A
document is the prompt in the model's chat form, the response, and the stop token. The stop token is repeated to the end
of a block: a diffusion model ends a block with it. If a response was cut off before its end, its whole blocks are
learnt from.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch.utils.data import Dataset

from dgraph.errors import InputError
from dgraph.families import ChatTokenizer

from .data import BLOCK, EOS_PADDING, PROMPT, RESPONSE, Batch, Document, Rows, fill


class Pair(NamedTuple):
    """Source of a document: a prompt and a response, or a text.

    Attributes:
        prompt: "" for a text without a frame.
        response: or that text.
        ended: True if the response is over where it ends here.
    """

    prompt: str
    response: str
    ended: bool = True


def read_pairs(path: Path) -> list[Pair]:
    """Each line {"prompt", "response"} of a file, with "ended": false where the response goes on; or {"text"}.

    Raises:
        InputError: a file that cannot be read, or a line that is neither.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from None
    pairs = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        pair = _pair(line)
        if pair is None:
            raise InputError(
                f'{path}, line {number}: expected {{"prompt": TEXT, "response": TEXT}} or {{"text": TEXT}}, got '
                f"{line[:60]!r}."
            )
        pairs.append(pair)
    return pairs


def _pair(line: str) -> Pair | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    text = value.get("text")
    if isinstance(text, str) and text and "prompt" not in value:
        return Pair("", text)
    prompt, response, ended = value.get("prompt"), value.get("response"), value.get("ended", True)
    if isinstance(prompt, str) and isinstance(response, str) and isinstance(ended, bool) and prompt:
        return Pair(prompt, response, ended)
    return None


def chat_document(
    before: list[int],
    after: list[int],
    eos_id: int,
    task: int = 0,
    block: int = BLOCK,
    more: int = 0,
    ended: bool = True,
) -> Document:
    """Ids of a prompt in its chat form and of a response: whole blocks, filled up with the stop token if it has ended.

    task: the number of the file that it is from, for the log. more: blocks of stop tokens after that, as a
    bidirectional model sees them after a short answer.
    """
    if ended:
        return _ended(before, after, eos_id, task, block, more)
    ids = [*before, *after][: (len(before) + len(after)) // block * block]
    return Document(ids, ([PROMPT] * len(before) + [RESPONSE] * len(after))[: len(ids)], task)


def text_documents(
    tokenizer: ChatTokenizer, text: str, eos_id: int, length: int, task: int = 0, block: int = BLOCK
) -> list[Document]:
    """A text without a frame, all of it to be learnt: pieces of `length` tokens, which blocks divide, and a last one
    that ends as a response does.
    """
    ids = tokenizer.encode_text(text)
    whole = len(ids) // length * length
    pieces = [Document(ids[at : at + length], [RESPONSE] * length, task) for at in range(0, whole, length)]
    return [*pieces, _ended([], ids[whole:], eos_id, task, block)] if whole < len(ids) else pieces


def _ended(before: list[int], response: list[int], eos_id: int, task: int, block: int, more: int = 0) -> Document:
    after = [*response, eos_id]
    padding = -(len(before) + len(after)) % block + more * block
    return Document(
        [*before, *after, *[eos_id] * padding],
        [PROMPT] * len(before) + [RESPONSE] * len(after) + [EOS_PADDING] * padding,
        task,
    )


@dataclass(frozen=True)
class Place:
    """Place of a document: its number in the list of them, and its row in the batch."""

    document: int
    row: int


def plan(sizes: Sequence[int], rows: int, length: int, seed: str) -> list[list[Place]]:
    """Batches of one pass over documents of `sizes` tokens: each that fits into a row once, in an order by the seed.

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
        documents: those longer than `length` are left out; `left_out` counts them.
        rows, length: size of a batch, in rows and tokens.
        seed, epoch: they determine the order.
    """

    def __init__(self, documents: Sequence[Document], rows: int, length: int, seed: int, epoch: int = 0) -> None:
        self.documents, self.rows, self.length, self.seed = documents, rows, length, seed
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


class Passes(Dataset[Batch]):
    """Batches of pass after pass without an end: item i depends on the seed and i alone, so a run goes on anywhere.

    Args:
        documents, rows, length, seed: as of `Pairs`.
        times: by the documents' `task`, how often one comes in a pass; once where it is not said. 2.5 is twice, and
            once more with a chance of a half, drawn for each document and pass.

    Raises:
        InputError: no document that fits into a row.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        rows: int,
        length: int,
        seed: int,
        times: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        self.documents, self.rows, self.length, self.seed, self.times = documents, rows, length, seed, times
        if not any(times.get(item.task, 1.0) > 0 and len(item.ids) <= length for item in documents):
            raise InputError(
                f"none of {len(documents)} documents fits into a row of {length} tokens; give data, or longer rows."
            )
        self.passes: list[Pairs] = []

    def _pass(self, number: int) -> Pairs:
        rng = random.Random(f"times {self.seed} {number}")
        chosen = []
        for item in self.documents:
            whole, part = divmod(self.times.get(item.task, 1.0), 1)
            chosen += [item] * (int(whole) + (part > 0 and rng.random() < part))
        return Pairs(chosen, self.rows, self.length, self.seed, number)

    def __getitem__(self, index: int) -> Batch:
        for number in count():  # a pass may draw no document, but not all of them
            if number == len(self.passes):
                self.passes.append(self._pass(number))
            if index < len(self.passes[number]):
                return self.passes[number][index]
            index -= len(self.passes[number])
        raise AssertionError("a pass without batches")

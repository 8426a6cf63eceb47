"""What a batch is made of: requests, how large it is, and what it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from dgraph.lowering.program import Program
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.kv import KVStore
from dgraph.runtime.pack import PackedKV
from dgraph.runtime.policies import edits
from dgraph.spec import ModelSpec

Canvas = tuple[int | None, ...]
"""The beginning of a response: ids where it is fixed, None where it is free."""


@dataclass(frozen=True)
class Request:
    """A prompt and how it is continued.

    index: of the prompt among all of a call; draws and scripts depend on it. shared: pages of KV that its prompt begins
    with, which are there already. steps: that it has had before, where it goes on after it has given way. canvas: its
    response where that is given, None where it is to be decoded, as is all after it.
    """

    ids: Sequence[int]
    decoding: Decoding
    index: int = 0
    shared: tuple[int, ...] = ()
    steps: int = 0
    canvas: Canvas = ()

    @classmethod
    def of(cls, ids: Sequence[int], decoding: Decoding, index: int, canvas: Canvas, spec: ModelSpec) -> Request:
        """A request whose canvas may have a stop token: it ends the response, and the canvas with it."""
        first = sys.maxsize if decoding.ignore_eos else decoding.min_tokens
        end = next((at + 1 for at, token in enumerate(canvas) if at >= first and token in spec.eos_ids), None)
        if end is not None:
            decoding, canvas = replace(decoding, max_new_tokens=end), canvas[:end]
        return cls(ids, decoding, index, canvas=canvas)

    def after(self, tokens: Sequence[int], steps: int) -> Request:
        """What is left of it once its response begins with these tokens, which are prompt now, after so many steps."""
        done = len(tokens)
        new, least = self.decoding.max_new_tokens - done, max(0, self.decoding.min_tokens - done)
        decoding = replace(self.decoding, max_new_tokens=new, min_tokens=least)
        return replace(self, ids=[*self.ids, *tokens], decoding=decoding, steps=steps, canvas=self.canvas[done:])

    @property
    def known(self) -> list[int]:
        """Its prompt and the tokens that are fixed right after it; less than all of its positions."""
        fixed = takewhile(lambda token: token is not None, self.canvas)
        return [*self.ids, *(token for token in fixed if token is not None)][: self.end - 1]

    @property
    def free(self) -> int:
        """Tokens of its response that are to be decoded, at most."""
        return self.decoding.max_new_tokens - sum(token is not None for token in self.canvas)

    @property
    def end(self) -> int:
        """Positions of its prompt and of its whole response."""
        return len(self.ids) + self.decoding.max_new_tokens

    @property
    def stops_from(self) -> int:
        """The position from which on a stop token ends it."""
        return sys.maxsize if self.decoding.ignore_eos else len(self.ids) + self.decoding.min_tokens


@dataclass
class Running:
    """A request in its slot. handles: its pages, and those of its twin without the prompt under guidance. prompt:
    positions that are prefilled before its first step, or with it (see `prefilled_positions`); prefilled: how many are.
    steps: that were launched for it; start: where its block began when it was last heard of, and `began`: steps it had
    had then. mixed: whether its first step encodes what is left of its prompt.
    """

    request: Request
    handles: list[int]
    prompt: int
    prefilled: int
    steps: int = 0
    start: int = 0
    began: int = 0
    mixed: bool = False

    @property
    def left(self) -> int:
        """Rows of its prompt that are to be encoded."""
        return self.prompt - self.prefilled

    @property
    def ready(self) -> bool:
        """Whether its first step may come, if it has not come yet."""
        return self.mixed or not self.left


@dataclass(frozen=True)
class Shape:
    """How large a batch is. slots: sequences at a time; columns: of the canvas, a multiple of the block; pages: of a
    sequence, at most; block: columns of a block; most_rows: rows of a step, None for as many as there may be; mixed:
    rows of prompts among them, of all sequences together.
    """

    slots: int
    columns: int
    pages: int
    block: int
    most_rows: int | None = None
    mixed: int = 0


@dataclass(frozen=True)
class Programs:
    """What a batch runs. select: instead of `step` where some sequence chooses which keys it keeps; None if all are."""

    step: Program
    select: Program | None = None
    prefill: Program | None = None


def prefilled_positions(request: Request, block: int, spec: ModelSpec) -> int:
    """Positions that are prefilled before the first step of a request, or with it.

    Where the forward that writes keys predicts the next token, the last row before the response is left to the first
    step, and with it what is written together: that row alone, or its block.
    """
    if spec.attention != "block_causal":
        return 0
    known = len(request.known)
    if spec.encoding == "causal":
        return known - spec.next_token
    left = block if spec.next_token and known % block == 0 else known % block
    return known - left


def step_rows(block: int, spec: ModelSpec) -> int:
    """Rows that a step of a block-causal model forwards for one sequence, at most: those of a block, and those of the
    block before it where these ride along to be written once more.
    """
    return block if spec.two_modes else 2 * block


def positions(request: Request, block: int, spec: ModelSpec) -> int:
    """Positions of KV that a request takes in its whole life. A last block that begins anywhere ends after it."""
    end = request.end + (block if spec.encoding == "causal" else 0)
    return -(-end // block) * block


def first_positions(request: Request, block: int, by_block: bool, spec: ModelSpec) -> int:
    """Positions of KV that a request takes when it is admitted; by_block: those of what is known of it and two more
    blocks of them.
    """
    whole = positions(request, block, spec)
    return min(whole, (len(request.known) // block + 2) * block) if by_block else whole


def ring_pages(request: Request, block: int, spec: ModelSpec, kv: KVStore) -> tuple[int, ...]:
    """Pages that a request takes in each ring of a store when it is admitted; after its prompt it needs no more."""
    whole, part = positions(request, block, spec), kv.part(block)
    if spec.attention != "block_causal":
        return kv.ring_pages(whole, whole)  # its steps forward all of it
    prompt = prefilled_positions(request, block, spec)
    return kv.ring_pages(whole, step_rows(block, spec), prompt if part is None else min(part, prompt))


def first_cached(prompt: int, block: int, spec: ModelSpec, packed: PackedKV | None) -> int:
    """The first position whose keys are in the cache once the others that are kept are packed elsewhere."""
    if packed is None:
        return 0
    if spec.attention != "block_causal":
        return prompt - spec.logit_shift
    return packed.plan.kept_from(prompt, block if spec.aligned else 1)


def settled_end(request: Request, start: int) -> int:
    """The position up to which committed tokens of a response are final, while its block begins at `start`: under some
    policies those of the block can still be replaced.
    """
    return min(request.end, start) if edits(request.decoding.rule) else request.end

"""What a batch is made of: requests, how large it is, and what it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dgraph.lowering.program import Program
from dgraph.runtime.decode_state import DecodeState
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.policies import Mixture, edits, row_of, settings_spec
from dgraph.runtime.seeds import sequence_keys


@dataclass(frozen=True)
class Request:
    """A prompt and how it is continued.

    index: of the prompt among all of a call; draws and scripts depend on it. shared: pages of KV that its prompt begins
    with, which are there already. steps: that it has had before, where it goes on after it has given way.
    """

    ids: Sequence[int]
    decoding: Decoding
    index: int = 0
    shared: tuple[int, ...] = ()
    steps: int = 0

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
    positions of the prompt that are prefilled, a multiple of the block; prefilled: how many of them are. steps: that
    were launched for it; start: where its block began when it was last heard of, and `began`: steps it had had then.
    """

    request: Request
    handles: list[int]
    prompt: int
    prefilled: int
    steps: int = 0
    start: int = 0
    began: int = 0


@dataclass(frozen=True)
class Shape:
    """How large a batch is. slots: sequences at a time; columns: of the canvas, a multiple of the block; pages: of a
    sequence, at most; block: columns of a block; most_rows: rows of a step, None for as many as there may be.
    """

    slots: int
    columns: int
    pages: int
    block: int
    most_rows: int | None = None


@dataclass(frozen=True)
class Programs:
    """What a batch runs. select: instead of `step` where some sequence chooses which keys it keeps; None if all are."""

    step: Program
    select: Program | None = None
    prefill: Program | None = None


def positions(request: Request, block: int) -> int:
    """Positions of KV that a request takes in its whole life."""
    return -(-request.end // block) * block


def first_positions(request: Request, block: int, by_block: bool) -> int:
    """Positions of KV that a request takes when it is admitted; by_block: its prompt's and two more blocks of them."""
    whole = positions(request, block)
    return min(whole, (len(request.ids) // block + 2) * block) if by_block else whole


def settled_end(request: Request, start: int) -> int:
    """The position up to which committed tokens of a response are final, while its block begins at `start`: under some
    policies those of the block can still be replaced.
    """
    return min(request.end, start) if edits(request.decoding.rule) else request.end


def say(state: DecodeState, mixture: Mixture, requests: Sequence[Request]) -> None:
    """Write what requests ask for into their state [b]; with no request, as much as its slots need to be written later.

    Raises `InputError` for a policy whose kind the mixture has not.
    """
    device, count = state.start.device, len(state.start)
    given = [row_of(mixture, request.decoding.rule) for request in requests]
    for name, dtype in settings_spec(mixture.kinds).items():
        values = [settings.get(name, 1) for _, settings in given] or [1] * count
        state.settings[name] = torch.tensor(values, dtype=dtype, device=device)
    if not requests:
        return
    keys = [sequence_keys(r.decoding.seed, torch.tensor([r.index]))[:, 0] for r in requests]
    state.keys = torch.stack(keys).to(device)
    state.counter = torch.tensor([request.steps for request in requests], device=device)
    state.kind = torch.tensor([kind for kind, _ in given], device=device)
    heat = [float(r.decoding.sampling.temperature) for r in requests]
    state.temperature = torch.tensor(heat, dtype=torch.float32, device=device)
    state.stops_from = torch.tensor([request.stops_from for request in requests], device=device)

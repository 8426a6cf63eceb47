"""Requests of a batch, its shape, and its programs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from dgraph.lowering.program import Program
from dgraph.plans.kv import PAGES, KVPlan
from dgraph.runtime.constraints.guide import Guide
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.kv.packed import PackedKV
from dgraph.runtime.kv.store import KVStore
from dgraph.runtime.policies import traits_of
from dgraph.spec import ModelSpec

Canvas = tuple[int | None, ...]
"""The beginning of a response: ids where it is fixed, None where it is free."""


@dataclass(frozen=True)
class Stops:
    """Tokens that end a response.

    Attributes:
        first: by id, the position from which on it does.
        kept: ids that are the last token of the response then; others are left out.
    """

    first: Mapping[int, int] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Request:
    """A prompt and the settings by which it is continued.

    Attributes:
        ids: tokens of the prompt.
        decoding: the settings.
        index: index of the prompt among all of a call; draws and scripts depend on it.
        shared: KV pages that its prompt begins with, which hold its keys already.
        steps, decoded: steps that it has had before, and tokens that they decoded, if it was preempted and goes on.
        canvas: fixed tokens of the response, None at positions to decode; all positions after it are decoded.
        shown: special tokens that are written out in its text, with that text.
        length: tokens of its response when it goes on, if it was preempted after it had grown; None: the first length.
    """

    ids: Sequence[int]
    decoding: Decoding
    index: int = 0
    shared: tuple[int, ...] = ()
    steps: int = 0
    decoded: int = 0
    canvas: Canvas = ()
    length: int | None = None
    shown: tuple[tuple[int, str], ...] = ()

    @classmethod
    def of(cls, ids: Sequence[int], decoding: Decoding, index: int, canvas: Canvas, spec: ModelSpec) -> Request:
        """Make a request; a stop token in the canvas ends the response, and the canvas with it."""
        first = sys.maxsize if decoding.ignore_eos else decoding.min_tokens
        end = next((at + 1 for at, token in enumerate(canvas) if at >= first and token in spec.eos_ids), None)
        if end is not None:
            decoding, canvas = replace(decoding, max_new_tokens=end), canvas[:end]
        return cls(ids, decoding, index, canvas=canvas)

    def after(self, tokens: Sequence[int], steps: int, end: int | None = None) -> Request:
        """Rest of the request after `steps` steps: these first tokens of its response become part of the prompt.

        end: the position where its response ended then, if it had grown.
        """
        done = len(tokens)
        new, least = self.decoding.max_new_tokens - done, max(0, self.decoding.min_tokens - done)
        decoding = replace(self.decoding, max_new_tokens=new, min_tokens=least)
        decoded = self.decoded + done - sum(token is not None for token in self.canvas[:done])
        return replace(
            self,
            ids=[*self.ids, *tokens],
            decoding=decoding,
            steps=steps,
            decoded=decoded,
            canvas=self.canvas[done:],
            length=None if end is None else end - len(self.ids) - done,
        )

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
    def first_length(self) -> int:
        """Tokens of its response before its first step."""
        most, rule, first = self.decoding.max_new_tokens, self.decoding.rule, self.length
        if first is None:
            said = getattr(rule, "first_length", None) if traits_of(rule).extends else None
            first = most if said is None else max(said, self.decoding.min_tokens, len(self.canvas) + 1)
        return min(most, first)

    @property
    def end(self) -> int:
        """Positions of its prompt and of its whole response."""
        return len(self.ids) + self.decoding.max_new_tokens

    def step_rows(self, block: int, spec: ModelSpec) -> int:
        """See `step_rows`."""
        return step_rows(block * self.decoding.open_blocks, spec)

    def reach(self, start: int, block: int) -> int:
        """End of the blocks that may be open after the next step, while the current one begins at `start`.

        Beyond the blocks that were open at most one opens in a step.
        """
        return start + (1 + self.decoding.open_blocks) * block

    def stops(self, spec: ModelSpec) -> Stops:
        """Its stop tokens."""
        first, decoding = len(self.ids) + self.decoding.min_tokens, self.decoding
        found = dict.fromkeys(decoding.stop_token_ids, first)
        kept = frozenset(found) - {*spec.eos_ids} if decoding.include_stop_str_in_output else frozenset()
        return Stops({**dict.fromkeys(spec.eos_ids, self.stops_from), **found}, kept)

    @property
    def stops_from(self) -> int:
        """The position from which on a stop token ends it."""
        return sys.maxsize if self.decoding.ignore_eos else len(self.ids) + self.decoding.min_tokens


@dataclass
class SlotState:
    """A request in its slot.

    Attributes:
        request: the request.
        handles: handles of its pages, and of those of its twin without the prompt under guidance.
        prompt: positions that are prefilled before its first step, or with it (see `prefilled_positions`).
        prefilled: number of these that are prefilled already.
        steps: steps that were launched for it.
        start: start of its block by the last report in which it changed.
        began: steps that it had had by that report.
        end: end of its response by that report.
        mixed: True if its first step encodes the rest of its prompt.
        guide: keeps the response to its constraint, if it has one.
    """

    request: Request
    handles: list[int]
    prompt: int
    prefilled: int
    steps: int = 0
    start: int = 0
    began: int = 0
    end: int = 0
    mixed: bool = False
    guide: Guide | None = None

    @property
    def left(self) -> int:
        """Rows of its prompt that are to be encoded."""
        return self.prompt - self.prefilled

    @property
    def ready(self) -> bool:
        """True if its first step may run, or has run."""
        return self.mixed or not self.left


@dataclass(frozen=True)
class Shape:
    """Sizes of a batch.

    Attributes:
        slots: sequences at a time.
        columns: columns of the canvas, a multiple of the block.
        pages: pages of a sequence, at most.
        block: columns of a block.
        most_rows: rows of a step at most; None for no limit.
        mixed: rows of prompts among these at most, over all sequences.
        open: blocks of a sequence that may be open together.
    """

    slots: int
    columns: int
    pages: int
    block: int
    most_rows: int | None = None
    mixed: int = 0
    open: int = 1

    @property
    def width(self) -> int:
        """Columns of the blocks of a sequence that may be open together."""
        return self.block * self.open


@dataclass(frozen=True)
class Programs:
    """Programs of a batch.

    Attributes:
        step: program of a step.
        select: program of a step in which some sequence chooses which keys it keeps; None if all are kept.
        prefill: program of prompts; None if steps forward them.
    """

    step: Program
    select: Program | None = None
    prefill: Program | None = None


def prefilled_positions(request: Request, block: int, spec: ModelSpec) -> int:
    """Positions that are prefilled before the first step of a request, or with it.

    If the forward that writes keys predicts the next token, the last row before the response is left to the first step.
    So are the rows that are written together with it: none, or those of its block.
    """
    if spec.attention != "block_causal":
        return 0
    known = len(request.known)
    if spec.encoding == "causal":
        return known - spec.next_token
    left = block if spec.next_token and known % block == 0 else known % block
    return known - left


def step_rows(width: int, spec: ModelSpec) -> int:
    """Rows that a step of a block-causal model forwards for one sequence, at most.

    They are the `width` rows of open blocks. A model without two modes also forwards as many before them, to commit
    blocks that are done.
    """
    return width if spec.two_modes else 2 * width


def positions(request: Request, block: int, spec: ModelSpec) -> int:
    """KV positions that a request takes in its whole life.

    With blocks that begin anywhere, the last one may end up to a block after the response.
    """
    end = request.end + (block if spec.encoding == "causal" else 0)
    return -(-end // block) * block


def first_positions(request: Request, block: int, by_block: bool, spec: ModelSpec) -> int:
    """KV positions that a request takes when it is admitted.

    by_block: only those of its known tokens and of the blocks that the first two steps forward.
    """
    whole = positions(request, block, spec)
    return min(whole, request.reach(len(request.known) // block * block, block)) if by_block else whole


def ring_pages(request: Request, block: int, spec: ModelSpec, kv: KVStore) -> tuple[int, ...]:
    """Pages that a request takes in each ring of a store when it is admitted; after its prompt it needs no more."""
    whole, part = positions(request, block, spec), kv.part(block)
    if spec.attention != "block_causal":
        return kv.ring_pages(whole, whole)  # its steps forward all of it
    prompt = prefilled_positions(request, block, spec)
    return kv.ring_pages(whole, request.step_rows(block, spec), prompt if part is None else min(part, prompt))


def kept_candidates(request: Request, plan: KVPlan) -> int:
    """Positions of a request outside of its window at most, of which a plan keeps some."""
    return plan.candidates(len(request.ids), request.decoding.max_new_tokens)


def first_cached(prompt: int, block: int, spec: ModelSpec, packed: PackedKV | None) -> int:
    """First position whose keys stay in the paged cache; kept keys before it are packed. 0 without packed keys."""
    if packed is None or packed.plan.kept == PAGES:
        return 0
    if spec.attention != "block_causal":
        return prompt - spec.logit_shift
    return packed.plan.kept_from(prompt, block if spec.aligned else 1)


def settled_end(request: Request, start: int, end: int) -> int:
    """End of the positions whose committed tokens are final, while the block begins at `start` and the response ends
    at `end`.

    Policies that edit can still replace those of the block, and those that insert move them.
    """
    traits = traits_of(request.decoding.rule)
    return min(end, start) if traits.edits or traits.inserts else end

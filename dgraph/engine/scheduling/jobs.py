"""The values that pass between an engine and its scheduler, and the rule by which a step gives out its rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dgraph.errors import InputError
from dgraph.errors.former import former_names

NEVER = 1 << 60
"""A number of steps that is never reached."""
MIXED_ROWS = 512
"""Most rows of prompts in one step, if the caller gives no number.

Prompts that share a step save one more reading of the weights: 4 ms of an 8B model on an H200. There a forward of 256
rows takes 6 ms, one of 512 rows 11 and one of 1,024 rows 21 (see `LLADA_8B_H200`).
"""


def grant(needs: Sequence[int], chunks: Sequence[int], budget: int) -> list[int]:
    """Give out the rows of a step to slots, in order; the device follows the same rule.

    A slot takes part while the sum of the needs up to it stays within the budget. The first one that does not fit gets
    the rows that are left if it can be cut, in whole chunks, and nothing else. Slots after it sit this step out even
    where they would fit, so that none overtakes it.

    Args:
        needs: rows that each slot has to forward, in the order of the plan; 0 for one that has ended.
        chunks: rows that each can be cut at multiples of; 0 for one that forwards all of them or none.
        budget: rows of a step.
    """
    granted = []
    left = budget
    for need, chunk in zip(needs, chunks, strict=True):
        given = need if need <= left else left // chunk * chunk if chunk else 0
        granted.append(given)
        left = left - given if given == need else 0
    return granted


__getattr__ = former_names(__name__, {"Job": "ScheduledRequest", "Running": "RequestProgress"})


@dataclass(frozen=True)
class Budgets:
    """Resources that the requests of one engine share.

    Attributes:
        rows: of one step, of all slots together.
        sequences: slots: requests that run at the same time.
        pages: of the KV pool.
        rings: pages of each of its rings, for layers with a window; see `dgraph.runtime.kv.store.Ring`.
        entries: packed entries of each group of layers alike; see `dgraph.runtime.kv.packed.PackedKV`.
    """

    rows: int
    sequences: int
    pages: int
    rings: tuple[int, ...] = ()
    entries: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("rows", "sequences", "pages"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InputError(f"budget of {name} must be a whole number, at least 1, got {value!r}.")


@dataclass(frozen=True, kw_only=True)
class ScheduledRequest:
    """A request as the scheduler sees it: numbers of rows, tokens, pages and seconds.

    Attributes:
        id: ascends with arrival.
        prompt: tokens of the prompt.
        new: most tokens of the response.
        block: tokens that are denoised together.
        arrived: seconds, on the clock that the scheduler is told of.
        priority: higher goes first; see `Scheduler`.
        refresh_rows: rows of a refresh. For a bidirectional model all rows, prompt and response; for a block-causal one
            the prompt's full blocks, 0 if it has none.
        reuse_rows: rows of any other step, at most: the block, or two where the commit of the last block rides along.
        chunk: rows at multiples of which a prompt can be cut (a block, in a block-causal model); 0 where refreshes are
            forwarded whole. A prompt that can be cut is forwarded once: in forwards of its own or, uncut, in that of
            its first step.
        refresh_blocks: the first step of every block is a refresh; that of the response always is.
        refresh_every: a refresh is due at the latest `refresh_every` steps after the last one; 0 for never.
        steps_per_block: number of steps, if it is fixed; None where a threshold decides.
        pages_first: pages that must be free for its first step.
        pages_life: pages that it holds at its end.
        rings: pages of each ring that must be free for its first step; it never holds more.
        entries: packed entries of each group of layers alike that it holds for its whole life.
    """

    id: int
    prompt: int
    new: int
    block: int
    arrived: float
    refresh_rows: int
    reuse_rows: int
    chunk: int = 0
    refresh_blocks: bool = False
    refresh_every: int = 0
    steps_per_block: int | None = None
    pages_first: int = 0
    pages_life: int = 0
    priority: int = 0
    rings: tuple[int, ...] = ()
    entries: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("new", 1), ("block", 1), ("reuse_rows", 1), ("refresh_rows", 0), ("chunk", 0)):
            if getattr(self, name) < least:
                raise InputError(f"request {self.id}: {name} must be at least {least}, got {getattr(self, name)}.")
        if self.chunk and (self.refresh_blocks or self.refresh_every):
            raise InputError(
                f"request {self.id}: chunk={self.chunk}, but only a prompt that is forwarded once can be cut; with "
                f"refreshes, chunk must be 0."
            )
        if not 0 <= self.pages_first <= self.pages_life:
            raise InputError(
                f"request {self.id}: pages_first must be from 0 to pages_life ({self.pages_life}), "
                f"got {self.pages_first}."
            )

    @property
    def first_rows(self) -> int:
        """Rows of its first step; they are forwarded in several steps where they can be cut."""
        return self.refresh_rows or self.reuse_rows

    @property
    def peak_rows(self) -> int:
        """Rows of a step that cannot be cut, at most."""
        return self.reuse_rows if self.chunk else max(self.refresh_rows, self.reuse_rows)


class Facts(NamedTuple):
    """Report of the device on a request, after a step whose order has it.

    Attributes:
        took: rows that it forwarded; 0 if it sat the step out.
        rows: that its next step needs; 0 if it has ended.
        refresh: True if that step is a refresh.
        masks_left: tokens of its block that are not committed.
        blocks_left: after this one.
        prompt_left: rows of a prompt that is forwarded in chunks and still has to be.
        prompt: rows of such a prompt among those that it forwarded; all of them where it took no step.
    """

    took: int
    rows: int
    refresh: bool
    masks_left: int
    blocks_left: int
    prompt_left: int = 0
    prompt: int = 0


class RequestProgress:
    """A request in a slot: its last known state, and the probable needs of its next steps.

    Attributes:
        job, slot: the request, and where it runs.
        key: its place in the queue, smallest first; see `Scheduler`.
        admitted: iteration from which on it has had its slot.
        skipped: iterations in a row in which it took no part, as far as known.
        rows, refresh, masks_left, blocks_left, prompt_left: as in `Facts`, the last that were told.
        ahead: steps that are planned with it and of which nothing was told yet.
        steps, committed: decoding steps so far, and tokens that they have committed.
        ordinary: rows of a step that is no refresh: the fewest so far.
        since: steps since the last refresh.
        due: steps from the one that `rows` is of to the next refresh; 0 if that is one.
        period: steps from there to the one after.
        left: steps until it ends.
    """

    __slots__ = (
        "admitted",
        "ahead",
        "blocks_left",
        "committed",
        "due",
        "job",
        "key",
        "left",
        "masks_left",
        "ordinary",
        "period",
        "prompt_left",
        "refresh",
        "rows",
        "since",
        "skipped",
        "slot",
        "steps",
    )

    def __init__(self, job: ScheduledRequest, slot: int, key: tuple[float, int], admitted: int, pace: float):
        self.job, self.slot, self.key, self.admitted = job, slot, key, admitted
        self.skipped = self.ahead = self.steps = self.committed = self.since = 0
        self.rows, self.refresh, self.ordinary = job.first_rows, job.refresh_rows > 0, job.reuse_rows
        self.masks_left = min(job.block, job.new)
        self.blocks_left = -(-job.new // job.block) - 1
        self.prompt_left = job.refresh_rows if job.chunk else 0
        self.foresee(pace)

    def pace(self, usual: float) -> float:
        """Tokens per decoding step; close to the `usual` ones of other requests until it has decoded enough to tell."""
        if self.job.steps_per_block is not None:
            return max(1.0, self.job.block / self.job.steps_per_block)
        return max(1.0, (self.committed + 4 * usual) / (self.steps + 4))

    def told(self, facts: Facts, usual: float) -> None:
        """Take the facts of a step, and foresee from them; `usual` are the tokens per step of other requests."""
        took, rows, refresh, masks_left, blocks_left, prompt_left, prompt = facts
        if took:
            self.skipped = 0
            if took > prompt:
                self.steps += 1
                block = self.job.block
                self.committed += (self.blocks_left - blocks_left) * block + self.masks_left - masks_left
            self.since = 0 if self.refresh else self.since + 1
        elif rows:
            self.skipped += 1
        if rows and not refresh:
            self.ordinary = min(self.ordinary, rows)
        self.rows, self.refresh = rows, refresh
        self.masks_left, self.blocks_left, self.prompt_left = masks_left, blocks_left, prompt_left
        self.foresee(usual)

    def foresee(self, usual: float) -> None:
        """Work out `due`, `period` and `left` anew: exact where steps per block are fixed, else from its pace."""
        job, pace = self.job, self.pace(usual)
        per_block = math.ceil(job.block / pace)
        in_block = math.ceil(self.masks_left / pace)
        self.left = in_block + self.blocks_left * per_block + (self.prompt_left > 0)
        due = period = NEVER
        if job.refresh_blocks:
            due, period = in_block, per_block
        if job.refresh_every:
            due = min(due, job.refresh_every - 1 - self.since)
            period = min(period, job.refresh_every)
        self.due, self.period = 0 if self.refresh else max(due, 1), period

    def needs(self, ahead: int) -> int:
        """Expected rows of the step that comes `ahead` steps after the last one that was told of."""
        if ahead == 0:
            return self.rows
        if ahead >= self.left:
            return 0
        since = ahead - self.due
        if since >= 0 and self.period < NEVER and since % self.period == 0:
            return self.job.refresh_rows
        return self.ordinary


@dataclass(frozen=True)
class Plan:
    """Plan of one step.

    Attributes:
        iteration: its number, from 0.
        admit: requests that get a slot (`Scheduler.running` says which) before the step.
        order: ids of the requests that take part, those just admitted included, in the order in which rows are given
            out.
    """

    iteration: int
    admit: tuple[ScheduledRequest, ...]
    order: tuple[int, ...]

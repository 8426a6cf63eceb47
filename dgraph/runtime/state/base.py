"""State of the decode loop's sequences, and the transition from step to step, as tensors on the device.

Subclasses: `BlockCausalState`; `EncodeDenoiseState` for models that predict the next token where they write a finished
block; `UniformNoiseState` for those without a mask token; `BidirectionalState` for bidirectional ones. They differ in
which rows they forward. Nothing here loops over sequences, and only `report` is meant to be read by the host.

Every sequence is a row of every tensor (a slot), independent of the others. So the host may write slots between steps.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from dgraph.ops.attention.sparse import REUSE
from dgraph.ops.statistics import GIVEN
from dgraph.plans.block_cache import BlockCache
from dgraph.runtime.policies import (
    Candidates,
    Carried,
    Policy,
    Tail,
    carries_of,
    needs_of,
    per_sequence,
    statistics_of,
    traits_of,
    widest_tail,
)
from dgraph.runtime.sampling.random_numbers import policy_order
from dgraph.runtime.state.growth import Growth, moved_columns
from dgraph.runtime.state.packed_rows import RowResults, StepRows, choose, predictors, read
from dgraph.runtime.state.report import note_shown, report_of
from dgraph.runtime.state.state_init import StateInit

OUT = -1
"""The place of a sequence that sits a step out."""


@dataclass
class DecodeState(ABC):
    """State of b sequences. Attributes that the transitions replace:

    start i64[b]: position of the current block; decoded, steps i64[b]: tokens of this block, and its steps that decoded
    some (with later open blocks, since it is the current one); counter i64[b]: steps of the sequence; total i64[b]:
    tokens it has decoded; earlier i64[b]: tokens that the request had decoded before it was preempted, in steps that
    `counter` counts; kept_rows i64[b]: its rows that reached
    the last layers, all steps; commit_rows i64[b]: its rows forwarded for their keys alone (to commit a block, or to
    renew what others read), all steps; forwards, passes i64[b]: steps of this block, and those that began with no mask
    left; active bool[b]; broken bool[b]: a step gave nothing to commit, or NaN; granted bool[b]: takes part in the next
    step (see `grant`); shown i64[b, W]: tokens of the blocks that the last step was about, -1 where there is a mask;
    shown_confidence f32[b, W]: the probability with which each of these was committed, 1 where it was given and 0
    where there is a mask; shown_kept bool[b, W]: False where the last step evicted the row that predicts the position;
    shown_start i64[b]: where they begin; carried: by name, tensors that the policy carries from step to step
    (see `carry`); canvas i64[b, T]: prompts, fixed tokens and decoded tokens, mask tokens elsewhere; end i64[b]: where
    the response ends, at most at `bound`; last i64[b]: the last position before it that was not given; grown bool[b]:
    the last step has lengthened the response.

    Settings of a request, written with its slot: prompt i64[b]: index of each prompt among all of the call; given
    bool[b, T]: positions whose tokens came with it, those of the prompt and the fixed ones of the response; prompt_end
    i64[b]; bound i64[b] = prompt + max_new_tokens; keys i64[b, 2]: what draws start from, see `sequence_keys`;
    temperature f32[b]; stops_from i64[b]: the position from which on a stop token ends it; kind i64[b] and settings, by
    name [b]: which policy of a mixture decides, and with which numbers; adjust: see `sampling.adjustments`. place
    i64[b]: its turn when rows are granted, the lowest first, `OUT` for none. Fixed: stop_ids i64[E]; mask_id;
    most_rows: rows that a step may have.
    """

    start: Tensor
    decoded: Tensor
    steps: Tensor
    counter: Tensor
    earlier: Tensor
    total: Tensor
    commit_rows: Tensor
    kept_rows: Tensor
    forwards: Tensor
    passes: Tensor
    active: Tensor
    broken: Tensor
    granted: Tensor
    shown: Tensor
    shown_confidence: Tensor
    shown_kept: Tensor
    shown_start: Tensor
    carried: dict[str, Tensor]
    canvas: Tensor
    prompt: Tensor
    given: Tensor
    prompt_end: Tensor
    end: Tensor
    bound: Tensor
    grown: Tensor
    last: Tensor
    keys: Tensor
    temperature: Tensor
    stops_from: Tensor
    kind: Tensor
    settings: dict[str, Tensor]
    adjust: dict[str, Tensor]
    place: Tensor
    stop_ids: Tensor
    mask_id: int
    most_rows: int

    @classmethod
    @abstractmethod
    def begin(cls, init: StateInit) -> Self:
        """Make the state before the first step."""

    @property
    @abstractmethod
    def block(self) -> int:
        """Columns of a block, B."""

    @property
    def width(self) -> int:
        """Columns of the blocks that are open together, W: the current one, and those after it."""
        return self.block

    @property
    def capacity(self) -> int:
        """Rows that a step can have at most."""
        return min(self.most_rows, self._columns())

    @abstractmethod
    def _columns(self) -> int:
        """Entries of `live`: rows of a step in which every sequence forwards all that it has."""

    @property
    @abstractmethod
    def block_masked(self) -> Tensor:
        """bool[b, W]: columns that are not decoded yet."""

    @property
    @abstractmethod
    def block_tokens(self) -> Tensor:
        """i64[b, W]: the tokens of these columns as they stand."""

    @property
    def open_masked(self) -> Tensor:
        """bool[b, W]: columns of open blocks that are not decoded yet."""
        return self.block_masked

    @abstractmethod
    def wanted(self) -> Tensor:
        """bool[b, W]: rows that each sequence's next step forwards, over the columns of this kind of state."""

    def live(self) -> Tensor:
        """bool[b, W]: rows of `wanted` that the next step forwards: those of sequences that take part."""
        return self.wanted() & self.granted[:, None]

    def grant(self) -> None:
        """Let sequences take part in the next step, in the order of their places, while their rows fit in `most_rows`.

        The first that does not fit, and all after it, wait: so none is overtaken for ever.
        """
        self.granted = self.active & (self.place != OUT)
        if self._columns() > self.most_rows:
            rows = self.wanted().sum(dim=1) * self.granted
            before = (self.place[None, :] <= self.place[:, None]) & self.granted
            self.granted = self.granted & ((before * rows).sum(dim=1) <= self.most_rows)

    @abstractmethod
    def rows(self, capacity: int, editing: Tensor | bool = False, tail: Tensor | None = None) -> StepRows:
        """Pack the rows of the next step into `capacity` rows: the live ones (see `live`), then padding.

        The caller must give at least as much capacity as there are live rows: others are lost. editing, for all
        sequences or bool[b]: decoded rows that may be replaced are candidates like masked ones. tail i64[b]: so are
        those that predict that many last positions of a response, in bidirectional models.
        """

    def steady(self, policy: Policy) -> bool:
        """True if every step of a sequence but its first forwards at most as many rows as its block has."""
        return False

    @property
    def closes(self) -> Tensor:
        """bool[b]: the next step may be the last of its block."""
        return torch.ones_like(self.active)

    def drafted(self, policy: Policy) -> Tensor:
        """bool[b]: the next step's predictions are a draft, which a later step verifies."""
        return torch.zeros_like(self.active)

    @abstractmethod
    def _own_rows(self) -> Tensor:
        """i64[b]: rows of the step that are forwarded for their keys alone."""

    @abstractmethod
    def _write(self, written: Tensor, token: Tensor, left: Tensor, policy: Policy) -> None:
        """Write tokens i64[b, W] where written bool[b, W] says; left bool[b, W]: the columns that are masks then."""

    def _write_next(self, token: Tensor, confidence: Tensor) -> Tensor:
        """bool[b]: sequences in which the step also decides the position after the block; the token is written there.

        token i64[b] and confidence f32[b]: the prediction for that position.
        """
        return torch.zeros_like(self.active)

    @abstractmethod
    def _advance(
        self, masked: Tensor, policy: Policy, block_cache: BlockCache, recommit: bool, settled: Tensor | None
    ) -> None:
        """Finish sequences, move on to the next block, and decide which rows the next step forwards.

        masked bool[b, W]: the columns as they were forwarded. settled bool[b]: whether the block is done, where that is
        not the same as having no mask (its tokens can still be replaced).
        """

    @property
    def average(self) -> Tensor:
        """f32[b]: tokens per step of this block, over its steps that decoded some (FOCUS in its public code).

        1.0 before the first; inf where `keeps_all`.
        """
        return self._mean(self.decoded, self.steps)

    @property
    def sequence_average(self) -> Tensor:
        """f32[b]: tokens per step of the sequence, over all of its steps (FOCUS, N_decoded, Eq. 17 to 19).

        1.0 before the first; inf where `keeps_all`.
        """
        return self._mean(self.earlier + self.total, self.counter)

    def _mean(self, tokens: Tensor, steps: Tensor) -> Tensor:
        # In float64, which compiled code divides in as the op does. It rounds to the same number: both are small ints.
        mean = torch.where(steps > 0, (tokens.double() / steps.clamp(min=1)).float(), 1.0)
        return torch.where(self.keeps_all, math.inf, mean)

    @property
    def keeps_all(self) -> Tensor:
        """bool[b]: the next step may evict nothing.

        It is the first of a block with a given token after a mask. The rows of such tokens stay, and see all before
        them, so the keys of all of these must have been written.
        """
        masked = self.block_masked
        scattered = (~masked & (masked.cumsum(dim=1) > 0)).any(dim=1)
        return scattered & (self.forwards == 0)

    @property
    def window(self) -> Tensor | None:
        """i32[b, 2]: the positions whose keys are always seen; None where all are."""
        return None

    @property
    def action(self) -> Tensor | None:
        """i32[b]: the next step's action on other keys (`dgraph.ops.attention.sparse`); REUSE without a part in it."""
        return None

    @property
    def known(self) -> dict[str, Any]:
        """Values for a `View` that every kind of state has."""
        return {
            "step": self.counter,
            "block_step": self.forwards,
            "decoded": self.total,
            "prompt_end": self.prompt_end,
            "end": self.end,
            "start": self.start,
            "block": self.block,
        }

    @property
    @abstractmethod
    def visible(self) -> Tensor:
        """i64[b]: end of the positions that rows of the current block may see."""

    def seen_keys(self) -> Tensor:
        """bool[b, T]: positions that the rows of a sequence may see; all False if it reuses packed keys."""
        action = self.action
        assert action is not None, "the session keeps all keys"
        positions = torch.arange(self.canvas.shape[1], device=self.canvas.device)
        return (positions < self.visible[:, None]) & (action != REUSE)[:, None]

    @property
    def columns(self) -> Tensor:
        """i64[b, W]: positions of the current block, and of those after it that may be open."""
        return self.start[:, None] + torch.arange(self.width, device=self.start.device)

    @property
    def order(self) -> Tensor:
        """f32[b, W]: `policy_order` of the positions of `columns`."""
        return policy_order(self.keys.T, self.columns)

    @property
    def editable(self) -> Tensor:
        """bool[b, W]: decoded positions of `columns` that were not given.

        A rule that edits decodes, and so edits, the whole of a last block that reaches beyond the response.
        """
        return ~self.block_masked & ~self._at(self.columns, self.given)

    def clone(self) -> Self:
        """A copy that shares no tensor."""
        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, dict):
                value = {name: one.clone() for name, one in value.items()}
            values[field.name] = value.clone() if isinstance(value, Tensor) else value
        return type(self)(**values)

    def carry(self, policy: Policy) -> None:
        """Initialise the tensors that a policy carries from step to step."""
        b, device = len(self.start), self.start.device
        self.carried = {each.name: each.begin(b, self.block, device) for each in carries_of(policy)}

    def report(self) -> Tensor:
        """i64[b, ...]: values that the host reads of each sequence; see `report_of`."""
        return report_of(self)

    def apply(
        self,
        rows: StepRows,
        results: RowResults,
        policy: Policy,
        block_cache: BlockCache,
        recommit: bool,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Apply the results of a forward of `rows`; return the committed columns, bool[b, W + 1].

        The last column is the position after these. Sequences that took no part stay as they are. So do those with
        a NaN, except for `broken`: a NaN's token may be invalid, and the next step may run before the host knows.
        noise f32[b, W]: uniform, for policies that draw.
        """
        before, part, traits = copy.copy(self), self.granted & self.active, traits_of(policy)
        editing, masked, start = traits.edits, self.block_masked, self.start
        fillers = {s.name: s.filler for s in (*GIVEN, *statistics_of(policy))}
        predicted = partial(predictors, rows, len(masked), self.width)
        row, following = (rows_of := predicted())[:, :-1], rows_of[:, -1]
        if widest_tail(policy):  # which is predicted also where it is decoded
            row = torch.where(
                masked | choose(per_sequence(lambda traits: traits.edits, policy, self.kind), self.editable, masked),
                row,
                -1,
            )
        measured = results.at(row, fillers)
        token, confidence = measured.pop("token"), measured.pop("confidence")
        token_after = read(results.token, following, -1)
        confidence_after = read(results.confidence, following, -math.inf)
        added = {} if rows.added is None else results.at(predicted(added=True)[:, :-1], fillers)
        invalid = part & (confidence.isnan().any(dim=1) | confidence_after.isnan())
        candidates = Candidates(
            token=token,
            confidence=confidence.nan_to_num(nan=0.0, neginf=-math.inf),
            masked=masked,
            current=self.block_tokens,
            step=self.steps,
            decoded=self.decoded,
            start=self.start,
            prompt=self.prompt,
            measured=measured,
            carried=self.carried,
            noise=noise,
            order=self.order if "order" in needs_of(policy) else None,
            forwards=self.forwards,
            editable=self.editable if editing else None,
            passes=self.passes,
            kind=self.kind,
            settings=self.settings,
            added=added,
            draw=None if results.draw is None else read(results.draw, row, -1),
            room=self.bound - self.end if traits.extends else None,
            tail=self._tail(rows, results, policy),
        )
        commit = self._chosen(candidates, policy)
        carries = carries_of(policy)
        kept = policy.carry(candidates, commit) if carries else {}  # type: ignore[attr-defined]
        settled = policy.settled(candidates, commit) if editing else None  # type: ignore[attr-defined]
        progressed = choose(
            per_sequence(lambda traits: traits.may_wait, policy, self.kind), candidates.committable, commit & masked
        )
        masks_left = self.open_masked.any(dim=1)
        # Once set it stays set: the host may read it only some steps later.
        self.broken = self.broken | (part & masks_left & ~progressed.any(dim=1))

        self.commit_rows = self.commit_rows + self._own_rows()
        own = rows.sequence == torch.arange(len(self.start), device=masked.device)[:, None]
        self.kept_rows = self.kept_rows + (own & results.kept & rows.live & (rows.column >= 0)).sum(dim=1)
        self.forwards = self.forwards + part
        self.passes = self.passes + (part & ~masks_left)
        self.counter = self.counter + part
        written, left = commit, masked & ~commit
        if traits.remasks:
            back = policy.remask(candidates, commit)  # type: ignore[attr-defined]
            written, left, token = commit | back, left | back, torch.where(back, self.mask_id, token)
        changed, source = written & (masked | (token != candidates.current)), None
        if traits.moves:
            said, source = policy.move(candidates, commit)  # type: ignore[attr-defined]
            token = torch.where(written, torch.where(commit, said, token), candidates.current)
            token = moved_columns(source, token, candidates.current, self.mask_id)
            left = moved_columns(source, left, masked, True)
            written = (token != candidates.current) | (left != masked)
        self._show(candidates, changed, left, read(results.kept, row, True), source)
        count = masked.sum(dim=1) - left.sum(dim=1)
        self.decoded = self.decoded + count
        self.steps = self.steps + (count > 0)
        self.total = self.total + count
        self._write(written, token, left, policy)
        if traits.extends:
            kept = self._extend(policy.extend(candidates, commit), kept, carries)  # type: ignore[attr-defined]
        self.shown = torch.where(self.block_masked, -1, self.block_tokens)
        after = self._write_next(token_after, confidence_after)
        self.total = self.total + after
        self._advance(masked, policy, block_cache, recommit, settled)
        moved = self.start != start
        self.carried = {each.name: each.next(kept[each.name], moved) for each in carries}
        valid = part & ~invalid
        self._keep(before, ~valid)
        self.broken = self.broken | invalid
        self.grant()
        return torch.cat([commit, after[:, None]], dim=1) & valid[:, None]

    def _keep(self, before: DecodeState, waiting: Tensor) -> None:
        """Undo a transition for the sequences bool[b]."""
        for field in fields(self):
            old, new = getattr(before, field.name), getattr(self, field.name)
            if isinstance(new, dict):
                new = {n: one if one is old[n] else choose(waiting, old[n], one) for n, one in new.items()}
            elif isinstance(new, Tensor) and new is not old:
                new = choose(waiting, old, new)
            setattr(self, field.name, new)

    def _show(self, candidates: Candidates, changed: Tensor, left: Tensor, kept: Tensor, source: Tensor | None) -> None:
        """See `note_shown`."""
        note_shown(self, candidates, changed, left, kept, source)

    def _tail(self, rows: StepRows, results: RowResults, policy: Policy) -> Tail | None:
        """Predictions for the ends of responses, if the policy reads them."""
        return None

    def _extend(self, more: Tensor, kept: Mapping[str, Tensor], carries: Sequence[Carried]) -> Mapping[str, Tensor]:
        """Lengthen responses; see `DecodeRule.extend`. Return what the policy carries, moved with its positions."""
        positions = torch.arange(self.canvas.shape[1], device=self.canvas.device)
        fixed_ahead = (self.given & (positions >= self.start[:, None])).any(dim=1)
        growth = Growth.of(more, self.block, self.bound - self.end, fixed_ahead)
        self.end, self.grown = self.end + growth.total, growth.total > 0
        self.last = torch.where(self.grown, self.end - 1, self.last)
        return self._grow(growth, kept, carries)

    def _grow(self, growth: Growth, kept: Mapping[str, Tensor], carries: Sequence[Carried]) -> Mapping[str, Tensor]:
        """Make the masks of a growth, once `end` is moved."""
        return kept  # a block has masks beyond the response's end, too

    def _chosen(self, candidates: Candidates, policy: Policy) -> Tensor:
        """bool[b, W]: columns that the step commits."""
        return policy.choose(candidates)

    def _on_canvas(self, values: Tensor, others: Tensor | float) -> Tensor:
        """[b, T]: values [b, W] at the positions of `columns`, `others` elsewhere."""
        column = torch.arange(self.canvas.shape[1], device=values.device) - self.start[:, None]
        inside = (column >= 0) & (column < self.width)
        return torch.where(inside, values.gather(1, column.clamp(min=0, max=self.width - 1)), others)

    @staticmethod
    def _at(columns: Tensor, values: Tensor) -> Tensor:
        """[b, n]: values [b, T] at positions i64[b, n]; arbitrary for a position beyond the canvas."""
        return values.gather(1, columns.clamp(max=values.shape[1] - 1))

    def _finish(self, policy: Policy, settled: Tensor | None) -> Tensor:
        """End sequences that are done; return i64[b], the blocks with which the others are done."""
        left = self.block_masked & (self.columns <= self.last[:, None])  # masks beyond the response need no step
        done = self._done(left) if settled is None else settled.long()
        stopped = self._stopped()
        if settled is not None:
            edited = per_sequence(lambda traits: traits.edits, policy, self.kind)
            stopped = stopped & (settled if isinstance(edited, bool) else settled | ~edited)
        self.active = self.active & ~(stopped | ((done > 0) & (self.start + done * self.block > self.last)))
        return done * self.active

    def _done(self, left: Tensor) -> Tensor:
        """i64[b]: open blocks that are done, with all before them; left bool[b, W]: masks that are to be decoded."""
        return (~left.any(dim=1)).long()

    def _stopped(self) -> Tensor:
        """bool[b]: there is a stop token with no mask before it; it ends at once, and later tokens are dropped."""
        width, masked = self.width, self.block_masked
        column = torch.arange(width, device=masked.device)
        # A stop token of the prompt does not count.
        counts = ~masked & (self.columns >= torch.maximum(self.prompt_end, self.stops_from)[:, None])
        stop = (self.block_tokens[:, :, None] == self.stop_ids).any(dim=2) & counts
        first_stop = torch.where(stop, column, width + 1).amin(dim=1)
        return first_stop < torch.where(masked, column, width).amin(dim=1)

    def _next_block(self, moved: Tensor, start: Tensor) -> None:
        """Move sequences bool[b] on to the blocks that begin at start i64[b]."""
        self.start = torch.where(moved, start, self.start)
        for name in ("decoded", "steps", "forwards", "passes"):
            setattr(self, name, torch.where(moved, 0, getattr(self, name)))

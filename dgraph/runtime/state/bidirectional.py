"""The state of bidirectional models: a canvas per sequence, of which a step forwards the rows that its plan names.

Blocks of the response follow the prompt; all after the current block are mask tokens that every row sees. The rows
that a step does not forward are seen as they were last written to the KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from dgraph.ops.attention.sparse import DENSE, REPACK, REUSE, SELECT
from dgraph.plans.block_cache import BlockCache, ready_columns
from dgraph.plans.kv import KVPlan
from dgraph.plans.regions import rows_of, seen_of
from dgraph.plans.rows import RowPlan
from dgraph.plans.view import View
from dgraph.runtime.policies import (
    Candidates,
    Carried,
    Policy,
    PolicyMix,
    Tail,
    per_sequence,
    traits_of,
    widest_tail,
)
from dgraph.runtime.state.base import DecodeState
from dgraph.runtime.state.growth import Growth, shifted
from dgraph.runtime.state.packed_rows import RowResults, StepRows, choose, inverse, packed, read
from dgraph.runtime.state.state_init import StateInit


@dataclass
class BidirectionalState(DecodeState):
    """State of b sequences of a bidirectional model; see `DecodeState`. Attributes that the transitions replace, too:

    masked bool[b, T]: positions of the response that are not decoded yet; pending bool[b, T]: forwarded in the next
    step; full, whole bool[b]: the next step is a full one, and forwards every row that is seen (see `Schedule`);
    changed bool[b, T]: decoded in the step before; frozen bool[b, T]: keys and values were written with the decoded
    token, so the block cache may skip the row; seen bool[b, T]: rows that exist, None if the plan's region hides none;
    decoded_in i64[b, T], entropy f32[b]: as in `View`, None unless the plan notes them;
    added bool[b, B]: columns of the block for which the next step has an added row, None if the plan adds none.

    Fixed: plan; kv: which keys stay, None for all; size: columns of a block; shift: 0 if a row predicts its own
    position, 1 if the next one (Dream).
    """

    masked: Tensor
    pending: Tensor
    full: Tensor
    whole: Tensor
    changed: Tensor
    frozen: Tensor
    seen: Tensor | None
    decoded_in: Tensor | None
    entropy: Tensor | None
    added: Tensor | None
    plan: RowPlan
    kv: KVPlan | None
    size: int
    shift: int

    @classmethod
    def begin(cls, init: StateInit) -> Self:
        """Make the state before the first step, which is a full one."""
        block, prompt_end, plan = init.block, init.prompt_end, init.plan
        assert plan is not None, "a bidirectional model has a plan"
        masked = init.inside & ~init.given
        start = prompt_end + (init.first_open - prompt_end) // block * block
        columns = start[:, None] + torch.arange(block, device=start.device)
        first = torch.ones_like(prompt_end, dtype=torch.bool)
        state = cls(
            **init.fields(start, cls._at(columns, init.canvas), cls._at(columns, masked), init.last_open),
            masked=masked,
            pending=init.inside,
            full=first,
            whole=first.clone(),
            changed=torch.zeros_like(masked),
            frozen=torch.zeros_like(masked),
            seen=None,
            decoded_in=torch.zeros_like(init.canvas) if plan.notes else None,
            entropy=torch.full(start.shape, -torch.inf, device=start.device) if plan.notes else None,
            added=None,
            plan=plan,
            kv=init.kv,
            size=block,
            shift=init.shift,
        )
        if plan.region.hides:
            state.seen = state._seen(state.view())
            state.pending = state.seen.clone()
        state.added = state._added(state.view())
        return state

    def view(self, **more: Any) -> View:
        """View of the sequences before the next step, for plans."""
        positions = torch.arange(self.canvas.shape[1], device=self.canvas.device)
        wanted = torch.roll(self._on_canvas(self.block_masked, False), -self.shift, dims=1)
        known = self.known | {"shift": self.shift, "masked": self.masked, "changed": self.changed, "wanted": wanted}
        if self.plan.notes:
            known |= {"decoded_in": self.decoded_in, "entropy": self.entropy}
        return View(**known, **more, positions=positions)

    @property
    def block(self) -> int:
        return self.size

    def _columns(self) -> int:
        return self.canvas.numel() + (0 if self.added is None else self.added.numel())

    @property
    def block_masked(self) -> Tensor:
        return self.masked.gather(1, self.columns)

    @property
    def block_tokens(self) -> Tensor:
        return self.canvas.gather(1, self.columns)

    @property
    def keeps_all(self) -> Tensor:
        """bool[b]: as in `DecodeState`, or a step whose keys others read, or of whose rows something is kept."""
        return super().keeps_all | self.full | self.whole

    @property
    def window(self) -> Tensor | None:
        if self.kv is None:
            return None
        if self.kv.window == "block":
            bounds = self.start - self.shift, torch.minimum(self.start + self.size, self.end)
        else:
            bounds = self.prompt_end - self.shift, self.end
        return torch.stack(bounds, dim=1).int()

    @property
    def action(self) -> Tensor | None:
        if self.kv is None:
            return None
        if self.kv.window == "block":
            found = torch.where(self.whole, torch.where(self.forwards < self.kv.delay, DENSE, SELECT), REUSE)
        else:
            found = torch.where(self.whole, torch.where(self.counter == 0, SELECT, REPACK), REUSE)
        return torch.where(self.active & self.granted, found, REUSE).int()

    @property
    def editable(self) -> Tensor:
        """As in `DecodeState`, but only up to the end of the response, even if its last block reaches beyond it."""
        return super().editable & (self.columns < self.end[:, None])

    @property
    def visible(self) -> Tensor:
        return self.end

    def wanted(self) -> Tensor:
        """As in `DecodeState`: rows of the canvas, and after them added rows by the column of their position."""
        rows = self.pending if self.added is None else torch.cat([self.pending, self.added], dim=1)
        return rows & self.active[:, None]

    def rows(self, capacity: int, editing: Tensor | bool = False, tail: Tensor | None = None) -> StepRows:
        live, width = self.live(), self.canvas.shape[1]
        index, cu_rows = packed(live, capacity)
        real = index >= 0
        index = index.clamp(min=0)
        sequence, position = index // live.shape[1] * real, index % live.shape[1] * real
        added = None if self.added is None else position >= width
        if added is not None:  # it stands for the row that predicts the position
            of_column = self.start[sequence] + position - width - self.shift
            position = torch.where(added, of_column, position).clamp(min=0)
        masks = self.block_masked

        def per_row(flags: Tensor, column: Tensor) -> Tensor:
            return in_block(column) & flags[sequence, column.clamp(min=0, max=self.size - 1)]

        def in_block(column: Tensor) -> Tensor:
            return real & (column >= 0) & (column < self.size)

        own = position - self.start[sequence]
        column = own + self.shift  # of the position that the row predicts
        masked = per_row(masks, own)
        candidate = masked
        if editing is not False:
            candidate = per_row(masks | choose(editing, self.editable, torch.zeros_like(masks)), column)
        elif self.shift:
            candidate = per_row(masks, column)
        if tail is not None:
            end = self.end[sequence]
            predicted = position + self.shift
            begin = torch.maximum(end - tail[sequence], self.prompt_end[sequence])
            candidate = candidate | (real & (predicted < end) & (predicted >= begin))
        full, always = self.full[sequence], self.plan.schedule.always(self.view())
        if always is not None:
            full = full | always[sequence, position]
        slots, end = None, self.end
        if self.seen is not None:  # keys of rows that are seen lie side by side
            places, end = self.seen.cumsum(dim=1), self.seen.sum(dim=1)
            slots = (places - 1)[sequence, position] * real
        ids, gap = self.canvas[sequence, position], None
        if added is not None:
            if not self.shift:
                ids = torch.where(added, self.mask_id, ids)
            at = position if slots is None else slots
            gap = (torch.stack([at, at + 1 + self.shift], dim=1) * added[:, None]).int()
            masked, candidate = masked & ~added, candidate | added
        return StepRows(
            sequence=sequence,
            column=(column + self.size) * in_block(column),
            input_ids=ids * real,
            positions=position,
            limit=(end[sequence] * real).int(),
            masked=masked,
            candidate=candidate,
            cu_rows=cu_rows,
            full=full & real,
            changed=(self.changed[sequence, position] | full) & real,
            slots=slots,
            added=added,
            gap=gap,
        )

    def _chosen(self, candidates: Candidates, policy: Policy) -> Tensor:
        chosen = policy.choose(candidates)
        overruled = per_sequence(lambda traits: traits.overrules, policy, self.kind)
        if self.plan.first == "policy" or overruled is True:
            return chosen
        first = candidates.masked & (candidates.masked.cumsum(dim=1) == 1)
        opened = torch.where((self.forwards == 0)[:, None], first & candidates.committable, chosen)
        return choose(overruled, chosen, opened)

    def _tail(self, rows: StepRows, results: RowResults, policy: Policy) -> Tail | None:
        if not (width := widest_tail(policy)):
            return None
        column = rows.positions + self.shift - (self.end - width)[rows.sequence]
        there = rows.live & (column >= 0) & (column < width)
        if rows.added is not None:
            there = there & ~rows.added
        row = inverse(torch.where(there, rows.sequence * width + column, -1), len(self.end) * width).view(-1, width)
        confidence = read(results.confidence, row, 0.0).clamp(min=0.0)
        return Tail(torch.where(confidence > 0, read(results.token, row, -1), -1), confidence)

    def _show(self, candidates: Candidates, changed: Tensor, left: Tensor, kept: Tensor, source: Tensor | None) -> None:
        super()._show(candidates, changed, left, kept, source)
        if self.decoded_in is not None:
            found = torch.where(changed, candidates.measured["entropy"], -torch.inf)
            self.entropy = found.amax(dim=1)
            self.decoded_in = torch.where(self._on_canvas(changed, False), self.counter[:, None], self.decoded_in)

    def _grow(self, growth: Growth, kept: Mapping[str, Tensor], carries: Sequence[Carried]) -> Mapping[str, Tensor]:
        if (inserted := growth.inserted) is not None:
            added = self._on_canvas(inserted, 0)
            moved = (inserted > 0).any(dim=1)[:, None]

            def along(values: Tensor, fill: float) -> Tensor:
                return shifted(self._on_canvas(values, fill), added, fill).gather(1, self.columns).to(values.dtype)

            per_position = {each.name: each.fill for each in carries if each.per == "position"}
            kept = {n: along(v, per_position[n]) if n in per_position else v for n, v in kept.items()}
            self.shown_confidence = along(self.shown_confidence, 0.0)
            self.shown_kept = along(self.shown_kept, True)
            self.canvas = shifted(self.canvas, added, self.mask_id)
            self.masked = shifted(self.masked, added, True)
            self.changed = shifted(self.changed, added, False)
            self.frozen = self.frozen & ~moved
            if self.decoded_in is not None:
                self.decoded_in = shifted(self.decoded_in, added, 0)
        positions = torch.arange(self.canvas.shape[1], device=self.canvas.device)
        new = (positions >= (self.end - growth.at_end)[:, None]) & (positions < self.end[:, None])
        self.masked = (self.masked | new) & (positions < self.end[:, None])
        return kept

    def _own_rows(self) -> Tensor:
        live = self.live()[:, : self.canvas.shape[1]]
        return live.sum(dim=1) - (live & self.view().around_block()).sum(dim=1)

    def _seen(self, view: View) -> Tensor:
        """bool[b, T]: rows that exist; the block can be decoded whatever a region says."""
        return view.inside & seen_of(self.plan.region, view) | view.around_block()

    def _added(self, view: View) -> Tensor | None:
        """bool[b, B]: columns for which a step has an added row; those that came with the request need none."""
        if self.plan.added is None:
            return None
        named = self._at(self.columns, rows_of(self.plan.added, view) & ~self.given)
        return named & (self.columns < self.end[:, None])

    def _write(self, written: Tensor, token: Tensor, left: Tensor, policy: Policy) -> None:
        self.canvas = self._on_canvas(torch.where(written, token, self.block_tokens), self.canvas)
        self.masked = self._on_canvas(left, self.masked)
        self.changed = self._on_canvas(written, False)

    def _advance(
        self, masked: Tensor, policy: Policy, block_cache: BlockCache, recommit: bool, settled: Tensor | None
    ) -> None:
        # Decoded before this step, so the keys that it wrote for them are those of their tokens.
        before = self._on_canvas(masked, self.masked)
        positions = torch.arange(self.canvas.shape[1], device=self.canvas.device)
        # As in FOCUS, the last column of a block waits for no neighbour.
        waiting = before & (positions < (self.start + self.size)[:, None])
        ready = ready_columns(~waiting, block_cache) & ~before & (self.pending | self.frozen)
        self.frozen = torch.where(self.whole[:, None], ready, self.frozen | ready)
        moved = self._finish(policy, settled) > 0
        # Blocks that have no mask are passed over, unless masks that were inserted have moved tokens there.
        coming = ~self.given & (positions >= (self.start + self.size)[:, None]) & (positions < self.end[:, None])
        following = torch.where(coming, positions, self.end[:, None]).amin(dim=1) - self.prompt_end
        self._next_block(moved, self.prompt_end + following // self.size * self.size)
        region, schedule = self.plan.region, self.plan.schedule
        more = {"coming": self._coming(policy)} if region.foresees else {}
        view = self.view(**more)
        everything = view.inside
        self.full, self.whole = schedule.full(view), schedule.whole(view)
        if traits_of(policy).extends:  # rows that are new have no keys yet
            self.full, self.whole = self.full | self.grown, self.whole | self.grown
        if self.seen is not None:
            everything = self._seen(view)
            moved_keys = (everything != self.seen).any(dim=1)  # every slot is another row's
            self.full, self.whole, self.seen = self.full | moved_keys, self.whole | moved_keys, everything
        # A row is also forwarded for its prediction, even if its own keys are frozen.
        part = everything & rows_of(region, view) & (~self.frozen | view.wanted)
        self.pending = torch.where(self.whole[:, None], everything, part)
        self.added = self._added(view)

    def _coming(self, policy: Policy) -> Tensor:
        known = self.block_masked, self.steps, self.decoded, self.order
        if isinstance(policy, PolicyMix):
            return policy.foresee(*known, self.kind, self.settings)
        return policy.foresee(*known)  # type: ignore[attr-defined,no-any-return]

"""The state of bidirectional models: a canvas per sequence, of which a step forwards the rows that its plan names.

Blocks of the response follow the prompt; all behind the current block are mask tokens that every row sees. The rows
that a step does not forward are seen as they were last written to the KV cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dgraph.ops.sparse import DENSE, REPACK, REUSE, SELECT
from dgraph.plans.kv import KVPlan
from dgraph.plans.rows import RowPlan
from dgraph.runtime.decode_state import BlockCache, DecodeState, full_step, ready_columns
from dgraph.runtime.policies import Candidates, Policy, overrules
from dgraph.runtime.rows import StepRows, packed


@dataclass
class CanvasState(DecodeState):
    """State of b sequences of a bidirectional model; see `DecodeState`. Attributes that the transitions replace, too:

    masked bool[b, T]: positions of the response that are not decoded yet; pending bool[b, T]: forwarded in the next
    step; full bool[b]: the next step is a full one (of the response, if the plan counts those of the prompt apart);
    changed bool[b, T]: decoded in the step before; frozen bool[b, T]: keys and values were written with the decoded
    token, so the block cache may spare the row.

    Fixed: plan; kv: which keys stay, None for all; size: columns of a block; shift: 0 if a row predicts its own
    position, 1 if the next one (Dream).
    """

    masked: Tensor
    pending: Tensor
    full: Tensor
    changed: Tensor
    frozen: Tensor
    plan: RowPlan
    kv: KVPlan | None
    size: int
    shift: int

    @classmethod
    def begin(
        cls,
        canvas: Tensor,
        prompt: Tensor,
        prompt_end: Tensor,
        *,
        sequences: int | None = None,
        max_new_tokens: int,
        block: int,
        mask_id: int,
        stop_ids: Tensor,
        plan: RowPlan,
        kv: KVPlan | None = None,
        shift: int = 0,
    ) -> CanvasState:
        """Before the first step, which is a full one.

        prompt i64[b]: indices among all prompts. canvas i64[b, T]: prompts, then mask tokens, at least one block more
        than the longest sequence needs. sequences: only the first so many take part, default all.
        """
        positions = torch.arange(canvas.shape[1], device=canvas.device)
        end = prompt_end + max_new_tokens
        inside = positions < end[:, None]
        return cls(
            **cls.counters(prompt_end.clone(), sequences),
            masked=inside & (positions >= prompt_end[:, None]),
            pending=inside,
            full=torch.ones_like(prompt_end, dtype=torch.bool),
            changed=torch.zeros_like(inside),
            frozen=torch.zeros_like(inside),
            canvas=canvas,
            prompt=prompt,
            prompt_end=prompt_end,
            end=end,
            stop_ids=stop_ids,
            mask_id=mask_id,
            plan=plan,
            kv=kv,
            size=block,
            shift=shift,
        )

    @property
    def block(self) -> int:
        return self.size

    @property
    def capacity(self) -> int:
        return self.canvas.numel()

    @property
    def block_masked(self) -> Tensor:
        return self.masked.gather(1, self.columns)

    @property
    def block_tokens(self) -> Tensor:
        return self.canvas.gather(1, self.columns)

    @property
    def average(self) -> Tensor:
        """f32[b]: as in `DecodeState`; inf in front of a full step, which may evict nothing: others read its keys."""
        return torch.where(self.full, math.inf, super().average)

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
            found = torch.where(self.full, torch.where(self.forwards < self.kv.delay, DENSE, SELECT), REUSE)
        else:
            found = torch.where(self._whole(), torch.where(self.counter == 0, SELECT, REPACK), REUSE)
        return torch.where(self.active, found, REUSE).int()

    @property
    def editable(self) -> Tensor:
        """As in `DecodeState`; the canvas ends with the response, whatever is left of its last block."""
        return super().editable & (self.columns < self.end[:, None])

    def live(self) -> Tensor:
        return self.pending & self.active[:, None]

    def rows(self, capacity: int, editing: bool = False) -> StepRows:
        live, width = self.live(), self.canvas.shape[1]
        index, cu_rows = packed(live, capacity)
        real = index >= 0
        index = index.clamp(min=0)
        sequence, position = index // width * real, index % width * real
        column = position + self.shift - self.start[sequence]  # of the position that the row predicts
        inside = real & (column >= 0) & (column < self.size)
        wanted = self.block_masked | self.editable if editing else self.block_masked
        full = self.full[sequence]
        if self.plan.prompt_every:  # the prompt is forwarded to be recomputed, whatever the response is
            full = full | (position < self.prompt_end[sequence] - self.shift)
        return StepRows(
            sequence=sequence,
            column=(column + self.size) * inside,
            input_ids=self.canvas[sequence, position] * real,
            positions=position,
            limit=(self.end[sequence] * real).int(),
            masked=inside & wanted[sequence, column.clamp(min=0, max=self.size - 1)],
            cu_rows=cu_rows,
            full=full & real,
            changed=(self.changed[sequence, position] | full) & real,
        )

    def _chosen(self, candidates: Candidates, policy: Policy) -> Tensor:
        chosen = policy.choose(candidates)
        if self.plan.first == "policy" or overrules(policy):
            return chosen
        first = torch.arange(self.size, device=chosen.device) == 0
        return torch.where((self.forwards == 0)[:, None], first & candidates.committable, chosen)

    def _own_rows(self) -> Tensor:
        live = self.live()
        return live.sum() - (live & self._span(0, 0)).sum()

    def _span(self, behind: int, ahead: int) -> Tensor:
        """bool[b, T]: the rows that predict the current block, the block itself, and so many rows around them."""
        positions = torch.arange(self.canvas.shape[1], device=self.canvas.device)
        start = self.start[:, None]
        inside = (positions >= start - self.shift - behind) & (positions < start + self.size + ahead)
        return inside & (positions < self.end[:, None])

    def _write(self, written: Tensor, token: Tensor, left: Tensor) -> None:
        self.canvas = self._on_canvas(torch.where(written, token, self.block_tokens), self.canvas)
        self.masked = self._on_canvas(left, self.masked)
        self.changed = self._on_canvas(written, False)

    def _advance(
        self, masked: Tensor, policy: Policy, block_cache: BlockCache, recommit: bool, settled: Tensor | None
    ) -> None:
        # Decoded in front of this step, so the keys that it wrote for them are those of their tokens.
        before = self._on_canvas(masked, self.masked)
        positions = torch.arange(self.canvas.shape[1], device=self.canvas.device)
        # As in FOCUS, the last column of a block waits for no neighbour.
        waiting = before & (positions < (self.start + self.size)[:, None])
        ready = ready_columns(~waiting, block_cache) & ~before & (self.pending | self.frozen)
        self.frozen = torch.where(self.full[:, None], ready, self.frozen | ready)
        moved = self._finish(settled)
        self._next_block(moved)
        plan = self.plan
        everything = positions < self.end[:, None]
        # A row is also forwarded for what it predicts, whether its own keys are frozen or not.
        needed = self._predicting(self.block_masked)
        # The row in front of the block predicts its first position alone: a block that has that one does without.
        spared = self.shift if plan.first == "position" else 0
        if plan.region == "all":
            region = everything
        elif plan.region == "response":
            region = everything & (positions >= (self.prompt_end - self.shift)[:, None])
        elif plan.region == "suffix":
            region = self._span(-spared, self.canvas.shape[1])
        elif plan.region == "next":
            region = everything & self._next_rows(policy)
        else:
            region = self._span(plan.behind - spared, plan.ahead)
        if spared:  # a position that became a mask again is predicted again, and so is all of a script
            region = region | (needed & everything)
        self.full = full_step(plan, self.forwards, self.counter)
        self.pending = torch.where(self._whole()[:, None], everything, region & (~self.frozen | needed))

    def _whole(self) -> Tensor:
        """bool[b]: the next step forwards every row."""
        plan = self.plan
        if plan.prompt_every:
            return self.counter % plan.prompt_every == 0
        return self.full | ((self.counter - plan.warm_up) % plan.widen == 0) if plan.widen else self.full

    def _predicting(self, flags: Tensor) -> Tensor:
        """bool[b, T]: rows that predict the flagged positions, bool[b, B], of the current block."""
        return torch.roll(self._on_canvas(flags, False), -self.shift, dims=1)

    def _next_rows(self, policy: Policy) -> Tensor:
        """bool[b, T]: the rows of the region "next"; see `RowPlan`."""
        coming = policy.foresee(self.block_masked, self.steps, self.decoded, self.order)  # type: ignore[attr-defined]
        some = coming >= 0
        flags = torch.zeros_like(self.columns, dtype=torch.bool)
        flags = torch.cat([flags, flags[:, :1]], dim=1).scatter(1, torch.where(some, coming, self.size), True)[:, :-1]
        rows = self._predicting(flags) | self.changed
        positions = torch.arange(self.canvas.shape[1], device=self.canvas.device)
        far = 2 * self.canvas.shape[1]
        window = min(self.plan.window, self.canvas.shape[1])
        centres = self.start[:, None] + coming - self.shift
        for column in range(coming.shape[1] if window else 0):
            away = positions - centres[:, column, None]
            distance = torch.where(self.masked & ~rows, 2 * away.abs() + (away > 0), far)  # the left one first
            distance, nearest = distance.topk(window, dim=1, largest=False)
            chosen = (distance < far) & some[:, column, None]
            rows = rows | torch.zeros_like(rows).scatter(1, nearest, chosen)
        return rows

"""States that hold the current block beside the canvas."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dgraph.ops.attention.sparse import DENSE, REUSE, SELECT
from dgraph.plans.kv import KVPlan
from dgraph.plans.rows import RowPlan
from dgraph.plans.view import View
from dgraph.runtime.state.base import DecodeState
from dgraph.runtime.state.packed_rows import packed


@dataclass
class BlockWindowState(DecodeState):
    """A `DecodeState` whose rows are those of its open blocks, and each sees up to the end of its block.

    tokens i64[b, n]: tokens of its rows, those of open blocks in the last W columns. masked bool[b, W]: columns of
    these that are not decoded yet.
    """

    tokens: Tensor
    masked: Tensor

    @property
    def block(self) -> int:
        return self.masked.shape[1]

    def _columns(self) -> int:
        return self.tokens.numel()

    @property
    def block_masked(self) -> Tensor:
        return self.masked

    @property
    def block_tokens(self) -> Tensor:
        return self.tokens[:, -self.width :]

    @property
    def visible(self) -> Tensor:
        return self.start + self.width

    def _window(self, plan: KVPlan, response: Tensor) -> Tensor:
        """i32[b, 2]: positions that are always seen under a plan.

        response i64[b]: begin of that window if it is the response and not the block.
        """
        begin = self.start if plan.window == "block" else response
        return torch.stack([begin, torch.maximum(self.end, self.start) + self.block], dim=1).int()

    def _around_block(self, plan: KVPlan) -> Tensor:
        """i64[b]: the next step's action on keys outside of the block, if the block is the window."""
        dense = torch.where(self.forwards < plan.delay, DENSE, REUSE)
        selects = self.forwards == plan.delay
        if plan.every:
            selects = selects | (self.forwards > plan.delay) & (self.forwards % plan.every == 0)
        return torch.where(selects, SELECT, dense)


@dataclass
class PrefillMixinState(BlockWindowState):
    """An `BlockWindowState` whose first steps may encode the rest of prompts.

    The rows of the last `mixed` positions before the current block are part of the forward of the first step. They have
    columns of their own, before those of `pending`, since only a first step has any.

    pending bool[b, n]: columns of `tokens` that the next step forwards. mixed i64[b]: rows of the prompt that the next
    step encodes. changed bool[b, W]: decoded in the step before, None without a plan. Fixed: most_mixed: such rows in
    one step at most, over all sequences; plan: which steps of a block are full ones, None if no program asks; kv: which
    keys stay, None for all; shift: as in `View`.
    """

    pending: Tensor
    mixed: Tensor
    most_mixed: int
    changed: Tensor | None
    plan: RowPlan | None
    kv: KVPlan | None
    shift: int

    @property
    def full(self) -> Tensor:
        """bool[b]: the next step is a full one."""
        if self.plan is None:
            return torch.zeros_like(self.active)
        return self.plan.schedule.full(View(**self.known, shift=self.shift))

    @property
    def keeps_all(self) -> Tensor:
        """bool[b]: as in `DecodeState`, or a full step, of whose rows something is kept."""
        return super().keeps_all | self.full

    def _columns(self) -> int:
        return super()._columns() + self.most_mixed

    def wanted(self) -> Tensor:
        pending = self.pending
        if self.most_mixed:
            ahead = torch.arange(self.most_mixed, 0, -1, device=pending.device)
            pending = torch.cat([ahead <= self.mixed[:, None], pending], dim=1)
        return pending & self.active[:, None]

    def _own_live(self) -> Tensor:
        """bool[b, n]: columns of `pending` that the next step forwards."""
        return self.live()[:, self.most_mixed :]

    def _placed(self, capacity: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Places of the N rows of the next step.

        i64[N]: sequence; i64[N]: column, 0 for padding and below 0 for rows of a prompt; bool[N]: the row is not
        padding; i32[b+1]: where sequences begin.
        """
        live = self.live()
        index, cu_rows = packed(live, capacity, self.most_mixed)
        real, width = index >= 0, live.shape[1]
        index = index.clamp(min=0)
        return index // width * real, (index % width - self.most_mixed) * real, real, cu_rows

    def _encoded_prompts(self) -> None:
        """Reset `mixed` after a step, which has encoded these rows of the prompts."""
        if self.most_mixed:
            self.mixed = torch.zeros_like(self.mixed)

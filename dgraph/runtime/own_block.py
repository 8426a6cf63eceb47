"""States that hold the current block beside the canvas."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dgraph.ops.sparse import DENSE, REUSE, SELECT
from dgraph.plans.kv import KVPlan
from dgraph.runtime.decode_state import DecodeState


@dataclass
class OwnBlockState(DecodeState):
    """A `DecodeState` whose rows are those of one block, and see up to its end.

    tokens i64[b, W]: what its rows read, with the block's own in the last B columns. masked bool[b, B]: columns of the
    block that are not decoded yet.
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
        return self.tokens[:, -self.block :]

    @property
    def visible(self) -> Tensor:
        return self.start + self.block

    def _window(self, plan: KVPlan, response: Tensor) -> Tensor:
        """i32[b, 2]: what is always seen under a plan; response i64[b]: where that window begins if it is that."""
        begin = self.start if plan.window == "block" else response
        return torch.stack([begin, torch.maximum(self.end, self.start) + self.block], dim=1).int()

    def _around_block(self, plan: KVPlan) -> Tensor:
        """i64[b]: what the next step does about keys outside of the block, where that is the window."""
        dense = torch.where(self.forwards < plan.delay, DENSE, REUSE)
        selects = self.forwards == plan.delay
        if plan.every:
            selects = selects | (self.forwards > plan.delay) & (self.forwards % plan.every == 0)
        return torch.where(selects, SELECT, dense)

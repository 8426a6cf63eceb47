"""The state of block-causal models: a window of two blocks per sequence.

Columns [0, B) are the previous block, columns [B, 2B) the current one. A row of the previous block is forwarded once
more to commit it (its keys and values then see the whole decoded block); it rides in the same forward as the next
block's first step. That is exact for block-causal attention: every layer writes its keys before any row reads them, and
each row has its own limit. The rest of a prompt may ride in that forward too (see `PrefillMixinState`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from dgraph.ops.attention.sparse import REUSE, SELECT
from dgraph.plans.block_cache import BlockCache, ready_columns
from dgraph.runtime.policies import Policy
from dgraph.runtime.state.block_window import PrefillMixinState
from dgraph.runtime.state.packed_rows import StepRows, choose
from dgraph.runtime.state.state_init import StateInit


@dataclass
class BlockCausalState(PrefillMixinState):
    """State of b sequences of a block-causal model; see `PrefillMixinState`. Attributes that transitions replace, too:

    tokens i64[b, 2B]; pending bool[b, 2B]; masked bool[b, B]: not decoded yet. A masked column holds the mask token;
    programs never predict it for a mask, but decoding ends even with one that does.
    """

    @classmethod
    def begin(cls, init: StateInit) -> Self:
        """Make the state before the first step.

        Blocks without a mask at the beginning are prefilled, and the first block may begin with the rest of the prompt.
        """
        block, device = init.block, init.canvas.device
        start = torch.minimum(init.first_open, init.end - 1) // block * block
        columns = start[:, None] + torch.arange(-block, block, device=device)
        pending = torch.zeros(len(start), 2 * block, dtype=torch.bool, device=device)
        pending[:, block:] = True
        tokens, masked = init.canvas.gather(1, columns.clamp(min=0)), ~init.given.gather(1, columns[:, block:])
        return cls(
            **init.fields(start, tokens[:, block:], masked, init.last_open),
            tokens=tokens,
            pending=pending,
            masked=masked,
            changed=None if init.plan is None else torch.zeros_like(masked),
            mixed=torch.zeros_like(start),
            plan=init.plan,
            kv=init.kv,
            most_mixed=init.most_mixed,
            shift=0,
        )

    @property
    def window(self) -> Tensor | None:
        if self.kv is None:
            return None
        return self._window(self.kv, self.prompt_end // self.block * self.block)

    @property
    def action(self) -> Tensor | None:
        if self.kv is None:
            return None
        if self.kv.window == "block":
            found = self._around_block(self.kv)
        else:
            found = torch.where(self.counter == 0, SELECT, REUSE)
        return torch.where(self.active & self.granted, found, REUSE).int()

    def rows(self, capacity: int, editing: Tensor | bool = False, tail: Tensor | None = None) -> StepRows:
        live, block = self._own_live(), self.block
        sequence, column, real, cu_rows = self._placed(capacity)
        columns = torch.arange(block, device=live.device)
        # Rows of the current block see up to the rightmost row that is forwarded: a cached tail of the
        # block is invisible, as in every public version of FOCUS (L + r(P) + 1 keys).
        reach = torch.where(live[:, -block:], columns, -1).amax(dim=1) + 1 + self.start
        current, start = column >= block, self.start[sequence]
        # Columns of the prompt end where the current block begins, as do those of the block before it.
        positions = (start + column - torch.where(column < 0, 0, block)) * real
        limit = torch.where(current, reach[sequence], (positions // block + 1) * block) * real

        def per_row(flags: Tensor) -> Tensor:
            return current & flags[sequence, (column - block).clamp(min=0)] & real

        masked, none = per_row(self.masked), torch.zeros_like(self.masked)
        full = changed = None
        if self.plan is not None and self.changed is not None:
            # The keys of a commit are final, so none of its rows is skipped.
            full = (~current | self.full[sequence]) & real
            changed = (full | self.changed[sequence, (column - block).clamp(min=0)]) & real
        return StepRows(
            sequence=sequence,
            column=column,
            input_ids=self.canvas[sequence, positions] * real,
            positions=positions,
            limit=limit.int(),
            masked=masked,
            candidate=masked if editing is False else per_row(self.masked | choose(editing, self.editable, none)),
            cu_rows=cu_rows,
            full=full,
            changed=changed,
        )

    def _own_rows(self) -> Tensor:
        return self._own_live()[:, : -self.block].sum(dim=1)

    def _write(self, written: Tensor, token: Tensor, left: Tensor, policy: Policy) -> None:
        block = self.block
        current = torch.where(written, token, self.tokens[:, block:])
        self.tokens = torch.cat([self.tokens[:, :block], current], dim=1)
        self.masked = left
        if self.changed is not None:
            self.changed = written
        # A finished sequence's block no longer changes, so writing it again is harmless.
        self.canvas = self._on_canvas(current, self.canvas)

    def _advance(
        self, masked: Tensor, policy: Policy, block_cache: BlockCache, recommit: bool, settled: Tensor | None
    ) -> None:
        block = self.block
        self._encoded_prompts()
        # From the block as it was forwarded: a token decoded now has mask-token keys until its next forward.
        pending = self.pending[:, block:] & ~ready_columns(~masked, block_cache)
        moved = self._finish(policy, settled)
        shift = moved[:, None]
        # The keys of a block that began without a mask are final with its first step.
        final = (self.forwards == 1) & ~masked.any(dim=1)
        committing = (torch.ones_like(pending) if recommit else pending) & ~final[:, None]
        previous = torch.where(shift, committing, False)  # else cleared: this step has committed it
        self.pending = torch.cat([previous, pending | shift], dim=1)
        coming = self.columns + block
        shifted = torch.cat([self.tokens[:, block:], self._at(coming, self.canvas)], dim=1)
        self.tokens = torch.where(shift, shifted, self.tokens)
        self.masked = torch.where(shift, ~self._at(coming, self.given), self.masked)
        self._next_block(moved, self.start + block)

"""The state of block-causal models: the open blocks of each sequence, and the blocks before them that are committed.

Columns [W, 2W) are the current block and those after it that may be open, one block without `Decoding.open_blocks`.
Columns [0, W) are the blocks before it. A row of a block that is done is forwarded once more to commit it (its keys and
values then see only decoded tokens); it rides in the same forward as the next step of the blocks after it. That is
exact for block-causal attention: every layer writes its keys before any row reads them, and each row has its own limit.
The rest of a prompt may ride in that forward too (see `PrefillMixinState`).

Several blocks are open by the rule of MultiBD (arXiv 2606.29215). The next block opens once the last one has
`open_at` decided rows. A block must commit a token in each step if the block before it has `sure_at` decided rows;
otherwise it commits what the rule is sure of. As open blocks change, so do the keys of those after them; so a block is
committed once all before it are done.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from dgraph.ops.attention.sparse import REUSE, SELECT
from dgraph.plans.block_cache import BlockCache, ready_columns
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.policies import Candidates, Policy
from dgraph.runtime.state.block_window import PrefillMixinState
from dgraph.runtime.state.packed_rows import StepRows, choose
from dgraph.runtime.state.state_init import StateInit


@dataclass
class BlockCausalState(PrefillMixinState):
    """State of b sequences of a block-causal model; see `PrefillMixinState`. Attributes that transitions replace, too:

    tokens i64[b, 2W]; pending bool[b, 2W]; masked bool[b, W]: not decoded yet; opened i64[b]: blocks that are open, the
    first ones. A masked column holds the mask token; programs never predict it for a mask, but decoding ends even with
    one that does.

    Settings of a request, i64[b] each: most_open: blocks that may be open; open_at, sure_at: rows of a block that are
    decided when the next one opens, and when the next one must commit. Fixed: open: blocks of W columns.
    """

    opened: Tensor
    most_open: Tensor
    open_at: Tensor
    sure_at: Tensor
    open: int

    @classmethod
    def begin(cls, init: StateInit) -> Self:
        """Make the state before the first step.

        Blocks without a mask at the beginning are prefilled, and the first block may begin with the rest of the prompt.
        """
        block, width, device = init.block, init.block * init.open, init.canvas.device
        start = torch.minimum(init.first_open, init.end - 1) // block * block
        columns = start[:, None] + torch.arange(-width, width, device=device)
        pending = torch.zeros(len(start), 2 * width, dtype=torch.bool, device=device)
        pending[:, width : width + block] = True
        tokens = init.canvas.gather(1, columns.clamp(min=0, max=init.canvas.shape[1] - 1))
        masked, one = ~cls._at(columns[:, width:], init.given), torch.ones_like(start)
        return cls(
            **init.fields(start, tokens[:, width:], masked, init.last_open),
            tokens=tokens,
            pending=pending,
            masked=masked,
            changed=None if init.plan is None else torch.zeros_like(masked),
            mixed=torch.zeros_like(start),
            plan=init.plan,
            kv=init.kv,
            most_mixed=init.most_mixed,
            shift=0,
            opened=one,
            most_open=one.clone(),
            open_at=torch.zeros_like(start),
            sure_at=torch.zeros_like(start),
            open=init.open,
        )

    def set_open(self, decodings: Sequence[Decoding]) -> None:
        """Write the settings of open blocks of requests, one for each sequence."""

        def rows(share: float) -> int:
            return math.ceil(round(share * self.block, 9))

        each = [(one.open_blocks, rows(one.open_at), rows(one.sure_at)) for one in decodings]
        settings = torch.tensor(each, device=self.start.device)
        self.most_open, self.open_at, self.sure_at = (column.clone() for column in settings.unbind(1))

    @property
    def block(self) -> int:
        return self.width // self.open

    @property
    def width(self) -> int:
        return self.masked.shape[1]

    @property
    def is_open(self) -> Tensor:
        """bool[b, W]: columns of open blocks."""
        columns = torch.arange(self.width, device=self.opened.device)
        return columns < self.opened[:, None] * self.block

    @property
    def open_masked(self) -> Tensor:
        return self.masked & self.is_open

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
        live, block, width = self._own_live(), self.block, self.width
        sequence, column, real, cu_rows = self._placed(capacity)
        columns = torch.arange(width, device=live.device)
        # Rows of an open block see up to its rightmost row that is forwarded: a cached tail of the
        # block is invisible, as in every public version of FOCUS (L + r(P) + 1 keys).
        forwarded = torch.where(live[:, -width:], columns, -1).view(-1, self.open, block)
        reach = forwarded.amax(dim=2) + 1 + self.start[:, None]
        current, start, inner = column >= width, self.start[sequence], (column - width).clamp(min=0)
        # Columns of the prompt end where the current block begins, as do those of the blocks before it.
        positions = (start + column - torch.where(column < 0, 0, width)) * real
        limit = torch.where(current, reach[sequence, inner // block], (positions // block + 1) * block) * real

        def per_row(flags: Tensor) -> Tensor:
            return current & flags[sequence, inner] & real

        masked, none = per_row(self.masked), torch.zeros_like(self.masked)
        full = changed = None
        if self.plan is not None and self.changed is not None:
            # The keys of a commit are final, so none of its rows is skipped.
            full = (~current | self.full[sequence]) & real
            changed = (full | self.changed[sequence, inner]) & real
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
        return self._own_live()[:, : -self.width].sum(dim=1)

    def _chosen(self, candidates: Candidates, policy: Policy) -> Tensor:
        if self.open == 1:
            return super()._chosen(candidates, policy)
        nearly = self._decided() >= self.sure_at[:, None]
        must = torch.cat([torch.ones_like(nearly[:, :1]), nearly[:, :-1]], dim=1)
        return policy.choose(candidates.by_block(must)).view_as(self.masked)

    def _decided(self) -> Tensor:
        """i64[b, W / B]: decided rows of each block."""
        return (~self.masked).view(-1, self.open, self.block).sum(dim=2)

    def _write(self, written: Tensor, token: Tensor, left: Tensor, policy: Policy) -> None:
        width = self.width
        current = torch.where(written, token, self.tokens[:, width:])
        self.tokens = torch.cat([self.tokens[:, :width], current], dim=1)
        self.masked = left
        if self.changed is not None:
            self.changed = written
        # A finished sequence's block no longer changes, so writing it again is harmless.
        self.canvas = self._on_canvas(current, self.canvas)

    def _advance(
        self, masked: Tensor, policy: Policy, block_cache: BlockCache, recommit: bool, settled: Tensor | None
    ) -> None:
        width = self.width
        self._encoded_prompts()
        # From the blocks as they were forwarded: a token decoded now has mask-token keys until its next forward.
        pending = self.pending[:, width:] & ~ready_columns(~masked, block_cache)
        done = self._finish(policy, settled)
        # The keys of a block that began without a mask are final with its first step.
        final = self._leading(~masked) & (self.forwards == 1)[:, None]
        committing = (torch.ones_like(pending) if recommit else pending) & ~final
        ahead = done * self.block

        def moved(values: Tensor, coming: Tensor) -> Tensor:
            """Values [b, n] without the first columns, those of blocks that are done; [b, W] come after them."""
            kept = torch.arange(values.shape[1], device=done.device) + ahead[:, None]
            return torch.cat([values, coming], dim=1).gather(1, kept)

        closed = ~self.is_open
        self.opened = self._open_next(done)
        opens = moved(closed, torch.ones_like(closed)) & self.is_open
        # Blocks that are done move to the columns before; the blocks there have been committed by this step.
        commit = moved(torch.zeros_like(committing), committing)
        self.pending = torch.cat([commit, moved(pending, torch.zeros_like(pending)) | opens], dim=1)
        coming = self.columns + width
        self.tokens = moved(self.tokens, self._at(coming, self.canvas))
        self.masked = moved(self.masked, ~self._at(coming, self.given))
        self._next_block(done > 0, self.start + ahead)

    def _done(self, left: Tensor) -> Tensor:
        return self._leading(~left & self.is_open).sum(dim=1) // self.block

    def _leading(self, flags: Tensor) -> Tensor:
        """bool[b, W]: columns of the first blocks in all of whose columns a flag bool[b, W] is set."""
        whole = flags.view(-1, self.open, self.block).all(dim=2).long().cumprod(dim=1).bool()
        return whole.repeat_interleave(self.block, dim=1)

    def _open_next(self, done: Tensor) -> Tensor:
        """i64[b]: blocks that are open once the first ones, i64[b], are done."""
        left, number = self.opened - done, torch.arange(self.open, device=done.device)
        begun = (self._decided() >= self.open_at[:, None]) & (number == self.opened[:, None] - 1)
        # A block without a position of the response's rest has nothing to decide.
        most = torch.minimum(self.most_open, (self.last - self.start) // self.block + 1 - done)
        opens = (left > 0) & begun.any(dim=1)
        return torch.minimum(left + opens, most).clamp(min=1)

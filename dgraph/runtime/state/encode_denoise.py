"""The state of models that work in two modes: they denoise a block, then encode it.

The modes differ in the positions that rows see and predict. The rows of a block that is denoised see all of it, and
their predictions for its masks are committed. A block that is encoded holds no mask, and its keys are final. Each of
its rows predicts the position after it, and the last row the first token of the next block. One program runs both, and
one step may hold both, of different sequences: every row has its own limit.

With causal encoding, a row that is encoded sees itself and the positions before it, not its whole block. Then a block
begins where the known tokens end, and fewer rows than a block can be encoded. So an autoregressive policy encodes each
token as it comes. A policy that drafts denoises a block once, and encodes the predictions of that step. It keeps the
tokens up to the first that differs from the new prediction of the row before it.

With a plan that keeps few keys, steps that denoise choose them. If they are chosen around each block, encoded rows see
every key: their own are final, and the next token is predicted from all. If they are chosen for the whole response, the
first step that denoises chooses among the prompt's keys, and the others are dropped. Rows encoded after it see the kept
keys only, and predict the next token from these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from dgraph.ops.attention.sparse import DENSE, REUSE, SELECT
from dgraph.plans.block_cache import BlockCache, ready_columns
from dgraph.runtime.policies import Candidates, Policy, per_sequence, sub_blocks
from dgraph.runtime.state.block_window import PrefillMixinState
from dgraph.runtime.state.packed_rows import StepRows, choose
from dgraph.runtime.state.state_init import StateInit


@dataclass
class EncodeDenoiseState(PrefillMixinState):
    """State of b sequences of such a model; see `PrefillMixinState`. Attributes that the transitions replace, too:

    tokens i64[b, B]: the current block, drafts included; masked bool[b, B]: not decoded yet (drafts are not); pending
    bool[b, B]: forwarded in the next step; encodes bool[b]: that step encodes these rows; partly bool[b]: that step
    forwards a part of the block, whose rows also see the cached keys of later parts; final i64[b]: rows of the block
    that the last step encoded for good; selected bool[b]: the kept keys of the prompt were chosen, None unless keys are
    chosen for the whole response.

    Fixed: shift: 0 if a row that is denoised predicts its own position, 1 if the next one; causal: a row that is
    encoded sees only itself and the positions before it.
    """

    encodes: Tensor
    final: Tensor
    partly: Tensor
    selected: Tensor | None
    causal: bool

    @classmethod
    def begin(cls, init: StateInit) -> Self:
        """Make the state before the first step.

        All known tokens are prefilled (or `mixed`), except for those that the first step encodes to predict the next
        token. With causal encoding that is the last row, else the last block. In the latter case, known tokens of a
        block that has masks begin that block, and nothing is encoded.
        """
        block, kv = init.block, init.kv
        known = torch.minimum(init.first_open, init.end - 1)
        encodes = torch.ones_like(known, dtype=torch.bool) if init.causal else known % block == 0
        start = known - (1 if init.causal else torch.where(encodes, block, known % block))
        start = start.clamp(min=0)  # of idle slots, which know nothing
        columns = start[:, None] + torch.arange(block, device=start.device)
        tokens, masked = cls._at(columns, init.canvas), ~cls._at(columns, init.given)
        return cls(
            **init.fields(start, tokens, masked, init.last_open),
            tokens=tokens,
            pending=leading(tokens != init.mask_id) | ~encodes[:, None],
            masked=masked,
            encodes=encodes,
            mixed=torch.zeros_like(start),
            most_mixed=init.most_mixed,
            final=torch.zeros_like(start),
            partly=torch.zeros_like(encodes),
            changed=None if init.plan is None else torch.zeros_like(masked),
            selected=None if kv is None or kv.window == "block" else torch.zeros_like(encodes),
            plan=init.plan,
            kv=kv,
            shift=init.shift,
            causal=init.causal,
        )

    @property
    def closes(self) -> Tensor:
        return self.encodes

    def steady(self, policy: Policy) -> bool:
        if sub_blocks(policy, self.kind) is not None:
            return False
        autoregressive = per_sequence(lambda traits: traits.autoregressive, policy, self.kind)
        drafts = per_sequence(lambda traits: traits.drafts, policy, self.kind)
        return autoregressive is False or drafts is True  # a token at a time, unless a draft is encoded

    @property
    def keeps_all(self) -> Tensor:
        """bool[b]: as in `DecodeState`, or the step encodes a block, of which every row is needed."""
        return super().keeps_all | self.encodes

    @property
    def window(self) -> Tensor | None:
        if self.kv is None:
            return None
        return self._window(self.kv, self.prompt_end if self.causal else self.prompt_end // self.block * self.block)

    @property
    def action(self) -> Tensor | None:
        if self.kv is None:
            return None
        if self.selected is None:
            found = torch.where(self.encodes, DENSE, self._around_block(self.kv))
        else:
            found = torch.where(self.selected, REUSE, torch.where(self.encodes, DENSE, SELECT))
        return torch.where(self.active & self.granted, found, REUSE).int()

    def rows(self, capacity: int, editing: Tensor | bool = False, tail: Tensor | None = None) -> StepRows:
        live, block = self._own_live(), self.block
        sequence, place, real, cu_rows = self._placed(capacity)
        of_prompt, column = place < 0, place.clamp(min=0)
        encoded = (self.encodes[sequence] | of_prompt) & real
        position = (self.start[sequence] + place) * real
        # A cached tail of the block is out of sight, see `BlockCausalState.rows`.
        reach = torch.where(live, torch.arange(block, device=live.device), -1).amax(dim=1) + 1 + self.start
        limit = torch.where(self.partly, self.visible, reach)[sequence]
        limit = torch.where(of_prompt, (position // block + 1) * block, limit) * real
        if self.causal:
            limit = torch.where(encoded, position + 1, limit)
        predicted = column + torch.where(encoded, 1, self.shift)
        free = self.masked
        if editing is not False:
            none = torch.zeros_like(free)
            free = free | choose(editing, choose(~self.encodes, self.editable, none), none)
        free = torch.cat([free, self._after_is_free[:, None]], dim=1)
        full = changed = None
        if self.plan is not None and self.changed is not None:
            # Keys that are written for good come from every row.
            every = self.encodes | self.full
            full = (every[sequence] | of_prompt) & real
            changed = (full | self.changed[sequence, column]) & real
        return StepRows(
            sequence=sequence,
            column=torch.where(of_prompt, place, predicted + block) * real,
            input_ids=torch.where(of_prompt, self.canvas[sequence, position], self.tokens[sequence, column]) * real,
            positions=position,
            limit=limit.int(),
            masked=self.masked[sequence, column] & ~encoded & real,
            candidate=free[sequence, predicted] & real & ~of_prompt,
            cu_rows=cu_rows,
            full=full,
            changed=changed,
        )

    def drafted(self, policy: Policy) -> Tensor:
        drafts = per_sequence(lambda traits: traits.drafts, policy, self.kind)
        return choose(drafts, ~self.encodes, torch.zeros_like(self.encodes))

    @property
    def _after_is_free(self) -> Tensor:
        """bool[b]: the next step is to decide the position after the block."""
        given = self._at(self.start[:, None] + self.block, self.given)[:, 0]
        return self.encodes & ~given

    def _own_rows(self) -> Tensor:
        return (self._own_live() & self.encodes[:, None]).sum(dim=1)

    def _chosen(self, candidates: Candidates, policy: Policy) -> Tensor:
        # A row that is encoded is right if the row before it predicts its token. The first that is not is still
        # replaced by that prediction.
        wrong = candidates.masked & (candidates.token != candidates.current)
        encoded = candidates.committable & leading(~wrong, include=True)
        return choose(self.encodes, encoded, policy.choose(candidates))

    def _write(self, written: Tensor, token: Tensor, left: Tensor, policy: Policy) -> None:
        before, encodes = self.tokens, self.encodes[:, None]
        drafts = choose(
            per_sequence(lambda traits: traits.drafts, policy, self.kind),
            left & ~encodes & (token >= 0),
            torch.zeros_like(left),
        )
        tokens = torch.where(written | drafts, token, before)
        self.tokens = torch.where(left & ~drafts, self.mask_id, tokens)
        right = self.pending & ~left & (self.tokens == before)
        self.final = torch.where(self.encodes, leading(right).sum(dim=1), 0)
        self.masked = left
        if self.changed is not None:
            self.changed = written
        self.canvas = self._on_canvas(torch.where(left, self.mask_id, tokens), self.canvas)

    def _write_next(self, token: Tensor, confidence: Tensor) -> Tensor:
        """See `DecodeState`.

        A step that encodes shows the positions after its first one, the last of which may be decided here.
        """
        whole = self.encodes & (self.final == self.block)
        wanted = whole & self._after_is_free
        found = wanted & (token >= 0)
        self.broken = self.broken | (wanted & ~found)
        after = self.start + self.block
        here = torch.arange(self.canvas.shape[1], device=token.device) == after[:, None]
        self.canvas = torch.where(here & found[:, None], token[:, None], self.canvas)
        given = self._at(after[:, None], self.given)
        unknown = ~found[:, None] & ~given
        shown = torch.where(unknown, -1, self._at(after[:, None], self.canvas))
        sure = torch.where(found, confidence, 1.0)[:, None]
        one_on = {
            "shown": shown,
            "shown_confidence": torch.where(unknown, 0.0, sure),
            "shown_kept": torch.ones_like(given),
        }
        for name, value in one_on.items():
            mine = getattr(self, name)
            setattr(self, name, choose(self.encodes, torch.cat([mine[:, 1:], value], dim=1), mine))
        self.shown_start = self.shown_start + self.encodes
        return found

    def _advance(
        self, masked: Tensor, policy: Policy, block_cache: BlockCache, recommit: bool, settled: Tensor | None
    ) -> None:
        self._encoded_prompts()
        moved = self.encodes
        if self.selected is not None:
            self.selected = self.selected | ~moved
        skipped = ready_columns(~masked, block_cache)
        self.active = self.active & ~(moved & self._stopped())
        # Sequences that were encoded go on at the first position that was not.
        self._next_block(moved, self.start + self.final)
        self.tokens = choose(moved, self._at(self.columns, self.canvas), self.tokens)
        self.masked = choose(moved, self.tokens == self.mask_id, self.masked)
        if settled is not None:  # that was said of the block before
            settled = torch.where(moved, ~self.masked.any(dim=1), settled)
        complete = self._finish(policy, settled) > 0
        autoregressive = per_sequence(lambda traits: traits.autoregressive, policy, self.kind)
        drafts = per_sequence(lambda traits: traits.drafts, policy, self.kind)
        if autoregressive is not False:
            first_mask = torch.where(self.masked, self.columns, self.start[:, None] + self.block).amin(dim=1)
            self.active = self.active & ~choose(autoregressive, first_mask > self.last, torch.zeros_like(moved))
            complete = choose(autoregressive, ~(moved & drafts), complete)
        self.encodes = complete
        ahead = torch.cat([self.masked[:, self.shift :], torch.zeros_like(self.masked[:, : self.shift])], dim=1)
        again = choose(moved, torch.ones_like(masked), (self.pending & ~skipped) | ahead)
        if (parts := sub_blocks(policy, self.kind)) is not None:
            # The first step of a block forwards all of it, even if known tokens begin a part; later steps see the
            # cached keys of these tokens.
            first = torch.where(self.masked, torch.arange(self.block, device=moved.device), self.block).amin(dim=1)
            size = torch.where(parts > 0, parts, self.block)
            self.partly = (parts > 0) & ~moved & ~complete & (first % size > 0)
            part = torch.arange(self.block, device=moved.device) // size[:, None] == (first // size)[:, None]
            again = choose(parts > 0, choose(self.partly, part, torch.ones_like(part)), again)
        self.pending = choose(complete, leading(self.tokens != self.mask_id), again)


def leading(flags: Tensor, include: bool = False) -> Tensor:
    """bool[b, B]: the columns before the first that is not flagged; include: and that one."""
    columns = torch.arange(flags.shape[1], device=flags.device)
    first = torch.where(flags, flags.shape[1], columns).amin(dim=1, keepdim=True)
    return columns <= first if include else columns < first

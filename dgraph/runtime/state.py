"""The decode loop's state for block-causal models, and its transitions, as tensors on the device.

A window of two blocks per sequence: columns [0, B) are the previous block, columns [B, 2B) the current one.
A row of the previous block is forwarded once more to commit it (its keys and values then see the whole
decoded block); it rides in the same forward as the next block's first step. That is exact for block-causal
attention: every layer writes its keys before any row reads them, and each row has its own limit.

Nothing here loops over sequences, and only `summary` is meant to be read by the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from dgraph.runtime.policies import Candidates, Policy, edits, may_wait
from dgraph.runtime.rows import RowResults, StepRows

BlockCache = Literal["off", "dc", "dc+"]
BLOCK_CACHES: tuple[BlockCache, ...] = ("off", "dc", "dc+")


def ready_columns(decoded: Tensor, rule: BlockCache) -> Tensor:
    """Columns whose keys and values are frozen within their block: bool[b, B] -> bool[b, B].

    decoded: before the commit of the step. "off": none. "dc": the decoded ones. "dc+": the decoded ones whose
    right neighbour is decoded too; the last column counts as having one (FOCUS, delayed cache).
    """
    if rule == "off":
        return torch.zeros_like(decoded)
    if rule == "dc":
        return decoded
    right = torch.cat([decoded[:, 1:], torch.ones_like(decoded[:, :1])], dim=1)
    return decoded & right


@dataclass
class StepState:
    """State of b sequences. Attributes that the transitions replace:

    tokens i64[b, 2B]; pending bool[b, 2B]: forwarded in the next step; masked bool[b, B]: not decoded yet
    (its token is the mask token; programs never answer a mask with a mask, but one that does still ends);
    start i64[b]: position of the current block's first row; progress i32[b]: rightmost position kept in
    this block so far, start - 1 before its first step; decoded, steps i64[b]: tokens of this block, and its
    steps that decoded some; counter i64[b]: steps of the sequence; total i64[b]: tokens it has decoded;
    commit_rows, kept_rows i64[]: rows forwarded to commit, and rows that reached the last layers, all steps;
    forwards, passes i64[b]: steps of this block, and those that began with no mask left; active bool[b];
    broken bool[b]: the last step gave nothing to commit, or NaN; canvas i64[b, T]: prompt and every block so far.

    Fixed: prompt i64[b]: index of each prompt among all of the call; prompt_end i64[b];
    end i64[b] = prompt + max_new_tokens; stop_ids i64[E]; mask_id.
    """

    tokens: Tensor
    pending: Tensor
    masked: Tensor
    start: Tensor
    progress: Tensor
    decoded: Tensor
    steps: Tensor
    counter: Tensor
    total: Tensor
    commit_rows: Tensor
    kept_rows: Tensor
    forwards: Tensor
    passes: Tensor
    active: Tensor
    broken: Tensor
    canvas: Tensor
    prompt: Tensor
    prompt_end: Tensor
    end: Tensor
    stop_ids: Tensor
    mask_id: int

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
    ) -> StepState:
        """Before the first step: full prompt blocks are prefilled, the rest of the prompt begins the first
        block.

        prompt i64[b]: indices among all prompts.
        canvas i64[b, T]: prompts, then mask tokens, at least to the end of the longest sequence's last block.
        sequences: only the first so many take part, default all; the others have no rows.
        """
        b, device = len(canvas), canvas.device
        start = prompt_end // block * block
        columns = start[:, None] + torch.arange(-block, block, device=device)
        pending = torch.zeros(b, 2 * block, dtype=torch.bool, device=device)
        pending[:, block:] = True
        zeros = torch.zeros(b, dtype=torch.int64, device=device)
        return cls(
            tokens=canvas.gather(1, columns.clamp(min=0)),
            pending=pending,
            masked=columns[:, block:] >= prompt_end[:, None],
            start=start,
            progress=(start - 1).int(),
            decoded=zeros,
            steps=zeros.clone(),
            counter=zeros.clone(),
            total=zeros.clone(),
            commit_rows=torch.zeros((), dtype=torch.int64, device=device),
            kept_rows=torch.zeros((), dtype=torch.int64, device=device),
            forwards=zeros.clone(),
            passes=zeros.clone(),
            active=torch.arange(b, device=device) < (b if sequences is None else sequences),
            broken=torch.zeros(b, dtype=torch.bool, device=device),
            canvas=canvas,
            prompt=prompt,
            prompt_end=prompt_end,
            end=prompt_end + max_new_tokens,
            stop_ids=stop_ids,
            mask_id=mask_id,
        )

    @property
    def block(self) -> int:
        return self.masked.shape[1]

    def clone(self) -> StepState:
        """A copy that shares no tensor."""
        tensors: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            tensors[field.name] = value.clone() if isinstance(value, Tensor) else value
        return StepState(**tensors)

    @property
    def average(self) -> Tensor:
        """f32[b]: tokens per step in this block; 1.0 before its first step (FOCUS, N_decoded)."""
        mean = self.decoded.float() / self.steps.clamp(min=1).float()
        return torch.where(self.steps > 0, mean, 1.0)

    def live(self) -> Tensor:
        """bool[b, 2B]: what the next step forwards."""
        return self.pending & self.active[:, None]

    def summary(self) -> Tensor:
        """i64[4]: rows of the next step, active sequences, tokens decoded so far, broken sequences."""
        return torch.stack([self.live().sum(), self.active.sum(), self.total.sum(), self.broken.sum()])

    @property
    def editable(self) -> Tensor:
        """bool[b, B]: decoded positions of the current block that are not part of the prompt."""
        positions = self.start[:, None] + torch.arange(self.block, device=self.start.device)
        return ~self.masked & (positions >= self.prompt_end[:, None])

    def rows(self, capacity: int, editing: bool = False) -> StepRows:
        """Pack the rows of the next step; `capacity` rows, of which `summary()[0]` are live and the others padding.

        With a capacity below that count rows are lost: the caller knows better. editing: decoded rows that may be
        replaced get a candidate like masked ones.
        """
        live = self.live()
        block, width = self.block, 2 * self.block
        index = torch.nonzero_static(live.flatten(), size=capacity, fill_value=-1)[:, 0]
        real = index >= 0
        index = index.clamp(min=0)
        sequence, column = index // width * real, index % width * real
        columns = torch.arange(width, device=live.device)
        # Rows of the current block see up to the rightmost row that is forwarded: a cached tail of the
        # block is invisible, as in every public version of FOCUS (L + r(P) + 1 keys).
        reach = torch.where(live[:, block:], columns[block:], -1).amax(dim=1) + 1 - block + self.start
        current = column >= block
        limit = torch.where(current, reach[sequence], self.start[sequence]) * real
        wanted = self.masked | self.editable if editing else self.masked
        masked = current & wanted[sequence, (column - block).clamp(min=0)]
        cu_rows = torch.zeros(len(live) + 1, dtype=torch.int32, device=live.device)
        cu_rows[1:] = live.sum(dim=1).cumsum(0)
        return StepRows(
            sequence=sequence,
            column=column,
            input_ids=self.tokens[sequence, column] * real,
            positions=(self.start[sequence] - block + column) * real,
            limit=limit.int(),
            masked=masked & real,
            cu_rows=cu_rows,
        )

    def apply(
        self,
        rows: StepRows,
        results: RowResults,
        policy: Policy,
        block_cache: BlockCache,
        refresh: bool,
        progress: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """The transition after a forward of `rows`; returns the committed columns, bool[b, B].

        progress i32[b]: as the program updated it; None where it does not evict (nobody reads it then). noise
        f32[b, B]: uniform, for policies that draw.
        """
        editing = edits(policy)
        token = self._on_block(rows, results.token, -1)
        confidence = self._on_block(rows, results.confidence, -math.inf)
        invalid = confidence.isnan().any(dim=1)
        candidates = Candidates(
            token=token,
            confidence=confidence.nan_to_num(nan=0.0, neginf=-math.inf),
            masked=self.masked,
            current=self.tokens[:, self.block :],
            step=self.steps,
            decoded=self.decoded,
            start=self.start,
            prompt=self.prompt,
            margin=None if results.margin is None else self._on_block(rows, results.margin, -math.inf),
            entropy=None if results.entropy is None else self._on_block(rows, results.entropy, math.inf),
            noise=noise,
            forwards=self.forwards,
            editable=self.editable if editing else None,
            passes=self.passes,
        )
        commit = policy.choose(candidates)
        settled = policy.settled(candidates, commit) if editing else None  # type: ignore[attr-defined]
        progressed = candidates.committable if may_wait(policy) else commit & self.masked
        masks_left = self.masked.any(dim=1)
        self.broken = self.active & (invalid | (masks_left & ~progressed.any(dim=1)))

        self.commit_rows = self.commit_rows + self.live()[:, : self.block].sum()
        self.kept_rows = self.kept_rows + (results.kept & rows.live).sum()
        self.forwards = self.forwards + self.active
        self.passes = self.passes + (self.active & ~masks_left)
        if progress is not None:
            self.progress = torch.where(self.active, progress, self.progress)
        # From the block as it was forwarded: a token decoded now has mask-token keys until its next forward.
        ready = ready_columns(~self.masked, block_cache)
        self._decode(commit, token)
        current = self.pending[:, self.block :] & ~ready
        self._advance(current, refresh, settled)
        return commit

    def _on_block(self, rows: StepRows, values: Tensor, fill: float) -> Tensor:
        """Per-row values -> [b, B] on the current block; `fill` where no row was."""
        window = values.new_full((self.tokens.numel() + 1,), fill)
        at = torch.where(rows.live, rows.sequence * 2 * self.block + rows.column, self.tokens.numel())
        return window.scatter_(0, at, values)[:-1].view_as(self.tokens)[:, self.block :]

    def _decode(self, commit: Tensor, token: Tensor) -> None:
        block = self.block
        current = torch.where(commit, token, self.tokens[:, block:])
        self.tokens = torch.cat([self.tokens[:, :block], current], dim=1)
        count = (commit & self.masked).sum(dim=1)
        self.masked = self.masked & ~commit
        self.decoded = self.decoded + count
        self.steps = self.steps + (count > 0)
        self.total = self.total + count
        self.counter = self.counter + self.active
        # A finished sequence's block no longer changes, so writing it again is harmless.
        columns = self.start[:, None] + torch.arange(block, device=current.device)
        self.canvas = self.canvas.scatter(1, columns, current)

    def _advance(self, pending: Tensor, refresh: bool, settled: Tensor | None) -> None:
        """Finish sequences, or move their window by one block.

        pending bool[b, B]: of the current block. settled bool[b]: whether the block is done, where that is not the same
        as having no mask (its tokens can still be replaced).
        """
        block, masked, current = self.block, self.masked, self.tokens[:, self.block :]
        columns = torch.arange(block, device=masked.device)
        positions = self.start[:, None] + columns
        generated = ~masked & (positions >= self.prompt_end[:, None])  # a stop token of the prompt is none
        stop = (current[:, :, None] == self.stop_ids).any(dim=2) & generated
        first_stop = torch.where(stop, columns, block + 1).amin(dim=1)
        first_mask = torch.where(masked, columns, block).amin(dim=1)
        complete = first_mask == block if settled is None else settled
        # What comes after a stop token is dropped, so a stop token with no mask before it ends the sequence
        # at once.
        stopped = first_stop < first_mask
        if settled is not None:
            stopped = stopped & settled
        finished = stopped | (complete & (self.start + block >= self.end))
        self.active = self.active & ~finished

        shift = (complete & self.active)[:, None]
        committing = torch.ones_like(pending) if refresh else pending
        previous = torch.where(shift, committing, False)  # else cleared: this step has committed it
        self.pending = torch.cat([previous, pending | shift], dim=1)
        shifted = torch.cat([current, torch.full_like(current, self.mask_id)], dim=1)
        self.tokens = torch.where(shift, shifted, self.tokens)
        self.masked = masked | shift
        moved = shift[:, 0]
        self.start = torch.where(moved, self.start + block, self.start)
        self.progress = torch.where(moved, (self.start - 1).int(), self.progress)
        self.decoded = torch.where(moved, 0, self.decoded)
        self.steps = torch.where(moved, 0, self.steps)
        self.forwards = torch.where(moved, 0, self.forwards)
        self.passes = torch.where(moved, 0, self.passes)

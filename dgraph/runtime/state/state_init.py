"""Sequences and settings from which every kind of decode state begins."""

from __future__ import annotations

import sys
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dgraph.plans.kv import KVPlan
from dgraph.plans.rows import RowPlan


@dataclass(frozen=True)
class StateInit:
    """State of b sequences before their first step, as far as all kinds of state have it alike.

    Attributes:
        canvas: i64[b, T], prompts, then fixed tokens and mask tokens, at least to the end of the longest sequence's
            last block; one block more for bidirectional models.
        prompt: i64[b], indices among all prompts.
        prompt_end: i64[b], positions after the prompts.
        max_new_tokens: for all, or i64[b].
        block: columns of a block, B.
        open: blocks of a sequence that may be open together, at most; 1 but for block-causal models.
        mask_id: id of the mask token.
        stop_ids: i64[E], ids that end a response.
        first_length: i64[b], tokens of each response before it grows; None for all of max_new_tokens.
        sequences: number of sequences that take part, the first ones; None for all. The others have no rows.
        plan: which rows, or which steps of a block, are forwarded whole; None if no program asks.
        kv: which keys stay; None for all.
        shift: 0 if a row predicts its own position, 1 if the next one.
        causal: a row that is encoded sees only itself and the positions before it.
        vocab: number of tokens to draw from, for canvases of random tokens.
        most_rows: rows that a step may have; None for any number.
        most_mixed: rows of prompts that a first step may encode.
    """

    canvas: Tensor
    prompt: Tensor
    prompt_end: Tensor
    _: KW_ONLY
    max_new_tokens: int | Tensor
    block: int
    open: int = 1
    mask_id: int
    stop_ids: Tensor
    first_length: Tensor | None = None
    sequences: int | None = None
    plan: RowPlan | None = None
    kv: KVPlan | None = None
    shift: int = 0
    causal: bool = False
    vocab: int = 0
    most_rows: int | None = None
    most_mixed: int = 0

    @cached_property
    def end(self) -> Tensor:
        """i64[b]: positions after the responses, as long as they are at first."""
        return self.bound if self.first_length is None else self.prompt_end + self.first_length

    @cached_property
    def bound(self) -> Tensor:
        """i64[b]: positions after the responses, when they have grown as long as they may."""
        return self.prompt_end + self.max_new_tokens

    @cached_property
    def positions(self) -> Tensor:
        """i64[T]: positions of the canvas."""
        return torch.arange(self.canvas.shape[1], device=self.canvas.device)

    @cached_property
    def inside(self) -> Tensor:
        """bool[b, T]: positions of prompts and responses."""
        return self.positions < self.end[:, None]

    @cached_property
    def given(self) -> Tensor:
        """bool[b, T]: positions whose tokens came with the request: the prompt's, and fixed ones of the response."""
        fixed = (self.canvas != self.mask_id) & self.inside
        return fixed | (self.positions < self.prompt_end[:, None])

    @cached_property
    def first_open(self) -> Tensor:
        """i64[b]: the first position of the response that was not given; its end without one."""
        return torch.where(self.given, self.end[:, None], self.positions).amin(dim=1)

    @cached_property
    def last_open(self) -> Tensor:
        """i64[b]: the last position of the response that was not given; -1 without one."""
        return torch.where(~self.given & self.inside, self.positions, -1).amax(dim=1)

    def fields(self, start: Tensor, tokens: Tensor, masked: Tensor, last: Tensor) -> dict[str, Any]:
        """Fields of a `DecodeState` that begin alike in every kind of state.

        start i64[b]: where the first block begins; tokens i64[b, W] and masked bool[b, W]: the columns from there on,
        those of blocks that may be open, and their masks;
        last i64[b]: as in the attributes of `DecodeState`, -1 for none.
        """
        b, device = len(start), start.device
        taking_part = b if self.sequences is None else self.sequences
        active = (last >= 0) & (torch.arange(b, device=device) < taking_part)
        counts = (
            *("decoded", "steps", "counter", "earlier", "total", "kept_rows", "commit_rows"),
            *("forwards", "passes", "kind"),
        )
        return {
            "canvas": self.canvas,
            "prompt": self.prompt,
            "prompt_end": self.prompt_end,
            "end": self.end.clone(),
            "bound": self.bound,
            "grown": torch.zeros_like(active),
            "given": self.given,
            "stop_ids": self.stop_ids,
            "mask_id": self.mask_id,
            "most_rows": sys.maxsize if self.most_rows is None else self.most_rows,
            "start": start,
            "last": last,
            **{name: torch.zeros_like(start) for name in counts},
            "active": active,
            "broken": torch.zeros_like(active),
            "granted": active.clone(),
            "shown": torch.where(masked, -1, tokens),
            "shown_confidence": (~masked).float(),
            "shown_kept": torch.ones_like(masked),
            "shown_start": start.clone(),
            "carried": {},
            "keys": torch.zeros((b, 2), dtype=torch.int64, device=device),
            "temperature": torch.zeros(b, device=device),
            "stops_from": torch.zeros_like(start),
            "settings": {},
            "adjust": {},
            "place": torch.arange(b, device=device),
        }

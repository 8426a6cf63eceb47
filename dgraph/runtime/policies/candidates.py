"""Candidates that a step offers to a decoding rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import InputError

ORIGINS = {
    "noise": "a uniform draw per position from the runtime",
    "order": "a uniform draw per position from the runtime that lasts",
    "forwards": "the number of steps that the block has had",
    "added": "a row plan that adds rows (RowPlan.added)",
    "editable": "a runtime that offers decoded positions for editing",
    "passes": "a runtime that offers decoded positions for editing",
    "room": "a runtime in which responses grow",
    "tail": "a rule that says how many positions of the response's end it reads (`tail`)",
}
"""Optional fields of `Candidates`, and where each comes from. A statistic comes from the step program."""


@dataclass(frozen=True)
class Tail:
    """Predictions for the last W positions of each response; column W - 1 is its last position, decoded or not.

    Attributes:
        token: i64[b, W], the predicted token; -1 before the response, and where the step did not forward the row.
        confidence: f32[b, W], its probability, 0 without one.
    """

    token: Tensor
    confidence: Tensor


@dataclass(frozen=True)
class Candidates:
    """Candidates that a step offers for the current block of b sequences; all tensors are [b, B] unless stated.

    Attributes:
        token: i64, the predicted token, -1 without one.
        confidence: f32, its probability, -inf where nothing can be committed (not masked, evicted, or no token).
        masked: bool, not decoded yet.
        current: i64, the block's tokens as they were forwarded.
        step: i64[b], steps of this block that decoded something, from 0.
        decoded: i64[b], tokens that these steps decoded.
        start: i64[b], position of the block's first row.
        prompt: i64[b], index of the sequence's prompt among all of the call.
        measured: by name, f32 statistics of each row's distribution that the rule needs (see `dgraph.ops.statistics`);
            each has its filler where there is no candidate.
        carried: by name, tensors that the rule carries from step to step.
        noise: f32, uniform in [0, 1), a function of seed, prompt, position and step; None if it was not given.
        order: f32, uniform in [0, 1), a function of seed, prompt and position, hence the same in all steps; None if it
            was not given.
        forwards: i64[b], steps of this block, those that decoded nothing included; None if it was not given.
        editable: bool, for rules that edit: decoded, and not part of the prompt. For these rules, token and confidence
            also stand at decoded positions.
        passes: i64[b], for rules that edit: steps of this block that began without a mask.
        kind: i64[b], index of each sequence's kind of rule in a `PolicyMix`.
        settings: by "{index of the kind}.{field}", float64[b] or int64[b], settings of each sequence for itself in a
            `PolicyMix`; arbitrary for sequences of another kind.
        added: by name, results of the rows that the plan adds for the positions (see `RowPlan.added`). These are
            "token" (-1 without such a row), "confidence" (-inf) and statistics as in `measured`. Empty without a plan
            that adds rows.
        draw: i64, for rules that draw a canvas again, else None: a token drawn from the distribution, -1 without one;
            `token` is then the most likely token.
        room: i64[b], tokens by which the response may still grow; None if it was not given.
        tail: predictions for the end of the response, for rules that ask for them (`DecodeRule.tail`), else None.
        must: bool[b], the step commits at least one position of the block; None where that holds for all. It is False
            in a block that is open ahead of one that is far from done.
    """

    token: Tensor
    confidence: Tensor
    masked: Tensor
    current: Tensor
    step: Tensor
    decoded: Tensor
    start: Tensor
    prompt: Tensor
    measured: Mapping[str, Tensor] = field(default_factory=dict)
    carried: Mapping[str, Tensor] = field(default_factory=dict)
    noise: Tensor | None = None
    order: Tensor | None = None
    forwards: Tensor | None = None
    editable: Tensor | None = None
    passes: Tensor | None = None
    kind: Tensor | None = None
    settings: Mapping[str, Tensor] = field(default_factory=dict)
    added: Mapping[str, Tensor] = field(default_factory=dict)
    draw: Tensor | None = None
    room: Tensor | None = None
    tail: Tail | None = None
    must: Tensor | None = None

    @property
    def committable(self) -> Tensor:
        """bool[b, B]: masked positions that have a token."""
        return self.masked & (self.confidence > -math.inf)

    @property
    def offered(self) -> Tensor:
        """f32[b, B]: confidence where a token can be committed, -inf elsewhere."""
        return torch.where(self.committable, self.confidence, -math.inf)

    @property
    def masks_at_start(self) -> Tensor:
        """i64[b]: masked positions that the block began with."""
        return self.masked.sum(dim=1) + self.decoded

    def due(self, flags: Tensor) -> Tensor:
        """bool[b, n]: the flags of blocks in which the step must commit something, False in others."""
        return flags if self.must is None else flags & self.must[:, None]

    def by_block(self, must: Tensor) -> Candidates:
        """Candidates of K open blocks of each sequence as those of b K sequences with a block each.

        must: bool[b, K], see `must`. Counts of steps and tokens stay those of the sequence.
        """
        count = must.shape[1]

        def split(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: split(one) for name, one in value.items()}
            if not isinstance(value, Tensor):
                return value
            if value.dim() == 1:
                return value.repeat_interleave(count)
            return value.reshape(len(value) * count, -1)

        found = replace(self, **{each.name: split(getattr(self, each.name)) for each in fields(self)})
        size = found.masked.shape[1]
        ahead = torch.arange(count, device=must.device) * size
        return replace(found, start=(self.start[:, None] + ahead).flatten(), must=must.flatten())

    def need(self, name: str, rule: object) -> Any:
        """Read an optional field or a statistic.

        Raises:
            InputError: it was not given; the message names the rule.
        """
        value: Any = getattr(self, name) if name in ORIGINS else self.measured.get(name)
        if value is None:
            raise missing(name, rule)
        return value


def missing(name: str, rule: object) -> InputError:
    return InputError(
        f"{type(rule).__name__}: needs {name}, got none; it takes "
        f"{ORIGINS.get(name, f'a step program that outputs {name}, or logits')}. "
        f"Choose a rule that decides by confidence alone, or give it.",
        field="policy",
    )

"""The state of models without a mask token: a canvas of random tokens that is drawn again until it is done.

A step of one mode denoises the canvas: all of its rows see the canvas and the positions before it, and tokens are drawn
from their predictions. The policy decides which draws the next step finds on the canvas, and when the canvas is done;
all other positions get new random tokens. Then a step of the other mode encodes the canvas: each row sees itself and
the positions before it, and its keys are final. One program runs both, and one step may hold both, of different
sequences.

Random tokens depend on (seed of the request, prompt, position, step) alone, as all draws do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from dgraph.plans.block_cache import BlockCache
from dgraph.runtime.policies import Candidates, Policy
from dgraph.runtime.sampling.random_numbers import WORD, random_ids
from dgraph.runtime.state.block_window import BlockWindowState
from dgraph.runtime.state.packed_rows import StepRows, packed
from dgraph.runtime.state.state_init import StateInit


@dataclass
class UniformNoiseState(BlockWindowState):
    """State of b sequences of such a model; see `DecodeState`. Attributes that the transitions replace, too:

    tokens i64[b, B]: the canvas as the next step finds it, except for a first step, which finds random tokens; masked
    bool[b, B]: not decoded yet, the same for all positions of a canvas; encodes bool[b]: the next step encodes it.

    Fixed: vocab: number of tokens to draw from. `canvas` holds mask_id (-1) at positions that are not decoded.
    """

    encodes: Tensor
    vocab: int

    @classmethod
    def begin(cls, init: StateInit) -> Self:
        """Make the state before the first step; prompts are prefilled, and the first canvas follows them."""
        assert init.plan is None, "such a model has no plan"
        start = init.prompt_end.clone()
        tokens = torch.zeros((len(start), init.block), dtype=torch.int64, device=start.device)
        masked = torch.ones_like(tokens, dtype=torch.bool)
        return cls(
            **init.fields(start, tokens, masked, init.end - 1),
            tokens=tokens,
            masked=masked,
            encodes=torch.zeros_like(start, dtype=torch.bool),
            vocab=init.vocab,
        )

    @property
    def block_tokens(self) -> Tensor:
        """i64[b, B]: the canvas as the next step finds it."""
        first = random_ids(self.keys.T, self.columns, torch.full_like(self.start, WORD), self.vocab)
        return torch.where((self.forwards == 0)[:, None] & self.masked, first, self.tokens)

    @property
    def closes(self) -> Tensor:
        return self.encodes

    def steady(self, policy: Policy) -> bool:
        return True

    def wanted(self) -> Tensor:
        return self.active[:, None].expand_as(self.masked)

    def rows(self, capacity: int, editing: Tensor | bool = False, tail: Tensor | None = None) -> StepRows:
        live, block = self.live(), self.block
        index, cu_rows = packed(live, capacity)
        real = index >= 0
        index = index.clamp(min=0)
        sequence, column = index // block * real, index % block * real
        start, encoded = self.start[sequence], self.encodes[sequence] & real
        position = (start + column) * real
        masked = self.masked[sequence, column] & real
        return StepRows(
            sequence=sequence,
            column=(column + block) * real,
            input_ids=self.block_tokens[sequence, column] * real,
            positions=position,
            limit=(torch.where(encoded, position + 1, start + block) * real).int(),
            masked=masked,
            candidate=masked,
            cu_rows=cu_rows,
            encoded=encoded,
            origin=(torch.where(encoded, position, start) * real).int(),
        )

    def _own_rows(self) -> Tensor:
        return (self.live() & self.encodes[:, None]).sum(dim=1)

    def _chosen(self, candidates: Candidates, policy: Policy) -> Tensor:
        chosen = policy.choose(candidates)
        assert candidates.draw is not None
        fresh = random_ids(self.keys.T, self.columns, self.counter, self.vocab)
        kept = policy.keep(candidates)  # type: ignore[attr-defined]
        drawn = torch.where(kept & candidates.committable, candidates.draw, fresh)
        self.tokens = torch.where(self.masked, drawn, self.tokens)
        return chosen

    def _write(self, written: Tensor, token: Tensor, left: Tensor, policy: Policy) -> None:
        self.tokens, self.masked = torch.where(written, token, self.tokens), left
        self.canvas = self._on_canvas(torch.where(left, self.mask_id, self.tokens), self.canvas)

    def _advance(
        self, masked: Tensor, policy: Policy, block_cache: BlockCache, recommit: bool, settled: Tensor | None
    ) -> None:
        moved = self.encodes
        self._next_block(moved, self.start + self.block)
        self.masked = self.masked | moved[:, None]
        self.encodes = self._finish(policy, settled) > 0

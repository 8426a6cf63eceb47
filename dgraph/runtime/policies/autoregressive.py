"""Rules by which a model that encodes causally decodes what its causal rows predict, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dgraph.runtime.policies.base import Candidates, DecodeRule


@dataclass(frozen=True)
class Autoregressive(DecodeRule):
    """One token per step: the row of the last token, which sees itself and all before it, predicts the next one.

    For models of encoding="causal" (Nemotron-Labs-Diffusion, its AR mode).
    """

    name: ClassVar[str] = "autoregressive"
    autoregressive: ClassVar[bool] = True

    def choose(self, candidates: Candidates) -> Tensor:
        return torch.zeros_like(candidates.masked)  # `TwoModeState` commits what is predicted


@dataclass(frozen=True)
class SelfSpeculation(DecodeRule):
    """Draft a block, verify it: the tokens of `Autoregressive` in fewer steps (Nemotron-Labs-Diffusion, linear
    self-speculation).

    A step denoises a block that begins with the last token and holds masks after it; what it predicts is a draft. The
    next step forwards the draft with causal rows: of these, row i predicts position i + 1 from tokens that are right as
    long as every draft before was what the row before it predicted. So the longest such prefix is kept, and the token
    that its last row predicts after it, with which the next draft begins. Greedy decoding gives the tokens of
    `Autoregressive`, one for one; draws have the distribution of its draws.
    """

    name: ClassVar[str] = "self_speculation"
    autoregressive: ClassVar[bool] = True
    drafts: ClassVar[bool] = True
    may_wait: ClassVar[bool] = True

    def choose(self, candidates: Candidates) -> Tensor:
        return torch.zeros_like(candidates.masked)  # a draft commits nothing

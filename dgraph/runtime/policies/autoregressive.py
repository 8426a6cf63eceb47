"""Rules for models of causal encoding: they commit the predictions of causal rows from left to right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dgraph.plans.papers import NEMOTRON, Paper
from dgraph.runtime.policies.base import Candidates, DecodeRule
from dgraph.runtime.policies.traits import Traits


@dataclass(frozen=True)
class Autoregressive(DecodeRule):
    """Decode one token per step: the row of the last token, which sees itself and all before it, predicts the next one.

    For models of encoding="causal" (the AR mode of Nemotron-Labs-Diffusion, arXiv 2607.05722).
    """

    papers: ClassVar[tuple[Paper, ...]] = (NEMOTRON,)
    name: ClassVar[str] = "autoregressive"
    traits: ClassVar[Traits] = Traits(autoregressive=True)

    def choose(self, candidates: Candidates) -> Tensor:
        return torch.zeros_like(candidates.masked)  # `EncodeDenoiseState` commits the prediction


@dataclass(frozen=True)
class SelfSpeculation(DecodeRule):
    """Draft a block, verify it: the tokens of `Autoregressive` in fewer steps (Nemotron-Labs-Diffusion, linear
    self-speculation).

    The rule is published in arXiv 2607.05722. A step denoises a block that begins with the last token and holds masks
    after it; its predictions are a draft. The next step forwards the draft with causal rows, in which row i predicts
    position i + 1. A drafted token is right if all drafts before it are right and the row before it predicts it.

    The longest prefix of right tokens is kept, and the token that its last row predicts after it. The next draft begins
    with that token. Greedy decoding gives the tokens of `Autoregressive`, one for one; draws have the distribution of
    its draws.
    """

    papers: ClassVar[tuple[Paper, ...]] = (NEMOTRON,)
    name: ClassVar[str] = "self_speculation"
    traits: ClassVar[Traits] = Traits(autoregressive=True, drafts=True, may_wait=True)

    def choose(self, candidates: Candidates) -> Tensor:
        return torch.zeros_like(candidates.masked)  # a draft commits nothing

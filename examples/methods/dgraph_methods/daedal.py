"""DAEDAL (arXiv 2508.00819): the response finds its length before it is decoded, and grows where it is unsure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from dgraph.plans.papers import Paper
from dgraph.runtime.policies import Candidates, Carried, DecodeRule, Traits, best
from dgraph.spec import ModelSpec


@dataclass(frozen=True)
class Daedal(DecodeRule):
    """Lengthen the response until the model sees its end; then decode by a threshold, and insert where it is unsure.

    The end is seen by the sum of the probabilities of stop tokens over the last `tail` positions that predict one,
    divided by `tail`. In the first stage steps commit nothing: each adds `growth` masks while that is below `begin`,
    and the last one `more` masks. Then steps commit as `ConfidenceThreshold` does. While the end is below `steady`, the
    least sure mask of the block, if it is below `unsure` and not committed, becomes `growth` masks.

    Steps of recipes that do not forward the end of the response insert nothing. The bound is max_new_tokens.

    Attributes:
        threshold: in (0, 1]; published: 0.9.
        first: tokens of a response at first; published: 64.
        growth: masks that are added at once, at least 1; published: 8.
        more: masks that the first stage adds at its end; in the published code 16.
        begin, steady: how clearly the end is seen, in [0, 1]; published: 0.5 and 0.9.
        unsure: a probability in [0, 1]; published: 0.1. 0 inserts nothing.
        tail: last positions, at least 1; published: 32.
        end_ids: the stop tokens; None for the model's.
    """

    threshold: float = 0.9
    first: int = 64
    growth: int = 8
    more: int = 16
    begin: float = 0.5
    steady: float = 0.9
    unsure: float = 0.1
    tail: int = 32
    end_ids: tuple[int, ...] | None = None

    name: ClassVar[str] = "daedal"
    papers: ClassVar[tuple[Paper, ...]] = (
        Paper("Beyond Fixed: Training-Free Variable-Length Denoising for Diffusion LLMs", "2508.00819", "algorithm 1"),
    )
    traits: ClassVar[Traits] = Traits(may_wait=True, extends=True, inserts=True)
    needs: ClassVar[frozenset[str]] = frozenset({"room", "tail"})
    carries: ClassVar[tuple[Carried, ...]] = (Carried("ready", torch.bool, per="sequence", lasts="sequence"),)

    def __post_init__(self) -> None:
        self.check_threshold()
        for field in ("begin", "steady", "unsure"):
            self.check_number(field, 0, 1, "a probability in [0, 1]")
        for field, least in (("first", 1), ("growth", 1), ("more", 0), ("tail", 1)):
            if type(getattr(self, field)) is not int or getattr(self, field) < least:
                raise self.refuse(field, f"a number of tokens, at least {least}")

    @property
    def first_length(self) -> int:
        return self.first

    def bind(self, spec: ModelSpec) -> Self:
        return self if self.end_ids is not None else replace(self, end_ids=spec.eos_ids)

    def choose(self, candidates: Candidates) -> Tensor:
        offered = candidates.offered
        chosen = ((offered > self.threshold) | best(offered)) & candidates.committable
        return chosen & candidates.carried["ready"][:, None]

    def extend(self, candidates: Candidates, chosen: Tensor) -> Tensor:
        ready, found = candidates.carried["ready"], self._found(candidates)
        at_end = torch.where(found < self.begin, self.growth, self.more) * ~ready
        left = candidates.committable & ~chosen
        sure = torch.where(left, candidates.confidence, torch.inf)
        seen = (candidates.need("tail", self).token >= 0).any(dim=1) & ready & (found < self.steady)
        opened = best(-sure) & (sure < self.unsure) & seen[:, None]
        return torch.cat([(self.growth - 1) * opened, at_end[:, None]], dim=1)

    def carry(self, candidates: Candidates, chosen: Tensor) -> Mapping[str, Tensor]:
        done = (self._found(candidates) >= self.begin) | (candidates.need("room", self) == 0)
        return {"ready": candidates.carried["ready"] | done}

    def _found(self, candidates: Candidates) -> Tensor:
        """f32[b]: how clearly the end is seen."""
        tail = candidates.need("tail", self)
        ends = torch.zeros_like(tail.token, dtype=torch.bool)
        for token in self.end_ids or ():
            ends = ends | (tail.token == token)
        return (tail.confidence * ends).sum(dim=1) / self.tail

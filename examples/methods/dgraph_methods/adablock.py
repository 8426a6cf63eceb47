"""AdaBlock (arXiv 2509.26432): blocks that end where a sentence or a line probably does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dgraph.plans.papers import Paper
from dgraph.runtime.policies import Candidates, Carried, DecodeRule, best


@dataclass(frozen=True)
class AdaBlock(DecodeRule):
    """Decode parts of the block from left to right, by a threshold, and end each at a delimiter if one is predicted.

    A part begins at the first mask. Among its first positions, `share` of the block, the surest one that predicts a
    delimiter ends the part, if it is at least `least` sure; else the part has `usual` positions. A part is decoded as
    by `ConfidenceThreshold`, and the next begins in the step after. The published blocks are the parts of a decode with
    block_length = max_new_tokens; caches of keys, which know the decode's block, then gain nothing. Without delimiters
    the tokens are those of a decode with block_length = `usual`.

    Attributes:
        delimiters: ids of delimiters; published for LLaDA: 198, a newline.
        threshold: in (0, 1]; published: 0.9.
        least: a probability in [0, 1]; published: 0.3.
        usual: positions of a part without a delimiter, at least 1; published: 32.
        share: in (0, 1]; published: 0.25.
    """

    delimiters: tuple[int, ...] = (198,)
    threshold: float = 0.9
    least: float = 0.3
    usual: int = 32
    share: float = 0.25

    name: ClassVar[str] = "adablock"
    papers: ClassVar[tuple[Paper, ...]] = (
        Paper("AdaBlock-dLLM: Semantic-Aware Diffusion LLM Inference via Adaptive Block Size", "2509.26432"),
    )
    carries: ClassVar[tuple[Carried, ...]] = (Carried("until", torch.int64, per="sequence"),)

    def __post_init__(self) -> None:
        self.check_threshold()
        self.check_threshold("share")
        self.check_number("least", 0, 1, "a probability in [0, 1]")
        object.__setattr__(self, "delimiters", tuple(self.delimiters))
        if not all(type(token) is int and token >= 0 for token in self.delimiters):
            raise self.refuse("delimiters", "token ids, such as (198,)")
        if type(self.usual) is not int or self.usual < 1:
            raise self.refuse("usual", "a number of positions, at least 1")

    def choose(self, candidates: Candidates) -> Tensor:
        column = torch.arange(candidates.token.shape[1], device=candidates.token.device)
        part = candidates.offered.masked_fill(column >= self._until(candidates)[:, None], -torch.inf)
        return ((part > self.threshold) | best(part)) & (part > -torch.inf)

    def carry(self, candidates: Candidates, chosen: Tensor) -> Mapping[str, Tensor]:
        return {"until": self._until(candidates)}

    def _until(self, candidates: Candidates) -> Tensor:
        """i64[b]: the column at which the part ends; the part that was, while it has masks."""
        masked, block = candidates.masked, candidates.token.shape[1]
        column = torch.arange(block, device=masked.device)
        begin = torch.where(masked, column, block).amin(dim=1)
        delimits = torch.zeros_like(masked)
        for token in self.delimiters:
            delimits = delimits | (candidates.token == token)
        near = column < begin[:, None] + max(1, int(self.share * block))
        sure = candidates.offered.masked_fill(~(delimits & near), -torch.inf)
        found = torch.where(sure.amax(dim=1) >= self.least, sure.argmax(dim=1) + 1, begin + self.usual)
        return torch.where(begin < candidates.carried["until"], candidates.carried["until"], found)

"""Rules that divide a block: dInfer's, with something from every stretch of masks, and Fast-dLLM v2's sub-blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dgraph.plans.papers import DINFER, FAST_DLLM_V2, Paper
from dgraph.runtime.policies.base import Candidates, DecodeRule, best, rank, setting
from dgraph.runtime.policies.thresholds import THRESHOLD
from dgraph.runtime.policies.traits import Traits


@dataclass(frozen=True)
class Hierarchical(DecodeRule):
    """Commit masks above the threshold, the best of each stretch above a lower threshold, and the best of all (dInfer
    HierarchyDecoder).

    A stretch is a maximal run of masked positions of the block. Its most confident position is committed if
    c > low_threshold. Added to that: every c > threshold, and the most confident of the block. A commit inside a
    stretch splits it, so that few steps leave short ones.

    fast_v2: where even the most confident of the block is below low_threshold, it alone is committed (dInfer
    fast_v2). With low_threshold <= threshold that is the same rule.
    """

    threshold: float = THRESHOLD
    low_threshold: float = 0.4
    fast_v2: bool = False

    papers: ClassVar[tuple[Paper, ...]] = (DINFER,)
    name: ClassVar[str] = "hierarchical"
    per_request: ClassVar[tuple[str, ...]] = ("threshold", "low_threshold")

    def __post_init__(self) -> None:
        self.check_threshold()
        self.check_number("low_threshold", 0, 1, "a probability in [0, 1]")
        if type(self.fast_v2) is not bool:
            raise self.refuse("fast_v2", "true or false")

    def choose(self, candidates: Candidates) -> Tensor:
        offered, masked = candidates.offered, candidates.masked
        top, low = best(offered), setting(self.low_threshold, offered)
        chosen = (offered > setting(self.threshold, offered)) | (best_of_stretches(offered, masked) & (offered > low))
        if self.fast_v2:
            chosen &= offered.amax(dim=1, keepdim=True) >= low
        return (chosen | top) & candidates.committable


@dataclass(frozen=True)
class HierarchicalRemask(DecodeRule):
    """Decode by the hierarchical rule, and mask decoded tokens again that have become doubtful (dInfer
    HierarchyDecoder, remasking variant).

    A decoded position that is not of the prompt is in doubt if the step predicts a token there with
    c < remask_threshold. That token may be the present one or another. Masks and positions in doubt are decided alike:
    stretches are runs of both. The best of each stretch is committed if c > low_threshold, and so is every
    c > threshold. If these are fewer than r + 1, where r positions are in doubt, the most confident of the others make
    up for it. Positions in doubt that are not committed become masks.

    So m masks and r positions in doubt leave at most m - 1 masks after the step. A block takes at most as many steps as
    it has positions. It ends with its last mask, before which a stop token ends nothing. As for every rule that edits,
    the block cache must be "off".
    """

    threshold: float = THRESHOLD
    low_threshold: float = 0.4
    remask_threshold: float = 0.4

    papers: ClassVar[tuple[Paper, ...]] = (DINFER,)
    name: ClassVar[str] = "hierarchical_remask"
    per_request: ClassVar[tuple[str, ...]] = ("threshold", "low_threshold", "remask_threshold")
    traits: ClassVar[Traits] = Traits(edits=True, remasks=True)

    def __post_init__(self) -> None:
        self.check_threshold()
        self.check_number("low_threshold", 0, 1, "a probability in [0, 1]")
        self.check_number("remask_threshold", 0, 1, "a probability in [0, 1]", "0 masks nothing again.")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"editable"})

    def choose(self, candidates: Candidates) -> Tensor:
        doubtful = self._doubtful(candidates)
        score = torch.where(candidates.committable | doubtful, candidates.confidence, -math.inf)
        stretches = best_of_stretches(score, candidates.masked | doubtful)
        low = setting(self.low_threshold, score)
        chosen = (score > setting(self.threshold, score)) | (stretches & (score > low))
        missing = doubtful.sum(dim=1) + 1 - chosen.sum(dim=1)
        others = torch.where(chosen, -math.inf, score)
        return chosen | ((rank(others) < missing[:, None]) & (others > -math.inf))

    def remask(self, candidates: Candidates, chosen: Tensor) -> Tensor:
        """See `DecodeRule.remask`."""
        return self._doubtful(candidates) & ~chosen

    def settled(self, candidates: Candidates, chosen: Tensor) -> Tensor:
        """bool[b]: no mask is left, and none has come back."""
        return super().settled(candidates, chosen) & ~self.remask(candidates, chosen).any(dim=1)

    def _doubtful(self, candidates: Candidates) -> Tensor:
        predicted = candidates.confidence > -math.inf
        doubtful = predicted & (candidates.confidence < setting(self.remask_threshold, candidates.confidence))
        return candidates.need("editable", self) & ~candidates.masked & doubtful


@dataclass(frozen=True)
class SubBlocks(DecodeRule):
    """Decode a block part by part, each by a threshold (Fast-dLLM v2).

    The rule is that of arXiv 2509.26328. A part is `size` positions of the block, the last one perhaps fewer. The first
    part that has a mask is decoded: every c > threshold in it, at least its most confident position (ties: lower
    position).

    cached: a step forwards the block while the first position of that part is a mask, and the part alone after that.
    The rows of the part then see the other parts' keys as the last step over the block cached them (the publication's
    dual cache). These are keys of masks where tokens were decoded since, so another token may follow. For models that
    predict the next token where they encode a block, under recipes that evict no row and skip none.
    """

    threshold: float = THRESHOLD
    size: int = 8
    cached: bool = False

    papers: ClassVar[tuple[Paper, ...]] = (FAST_DLLM_V2,)
    name: ClassVar[str] = "sub_blocks"
    per_request: ClassVar[tuple[str, ...]] = ("threshold",)

    def __post_init__(self) -> None:
        self.check_threshold()
        if type(self.size) is not int or self.size < 1:
            raise self.refuse("size", "a number of positions, at least 1")
        if type(self.cached) is not bool:
            raise self.refuse("cached", "true or false")

    @property
    def sub_block(self) -> int | None:
        return self.size if self.cached else None

    def choose(self, candidates: Candidates) -> Tensor:
        masked, columns = candidates.masked, torch.arange(candidates.masked.shape[1], device=candidates.masked.device)
        part = (columns // self.size).expand_as(masked)
        first = torch.where(masked, part, masked.shape[1]).amin(dim=1, keepdim=True)
        offered = torch.where(part == first, candidates.offered, -math.inf)
        chosen = (offered > setting(self.threshold, offered)) | best(offered)
        return chosen & (offered > -math.inf)


def best_of_stretches(score: Tensor, flags: Tensor) -> Tensor:
    """bool[b, B]: the largest score of each maximal run of flags (ties: lower position), unless it is -inf."""
    b, block = flags.shape
    begins = flags & ~torch.cat([torch.zeros_like(flags[:, :1]), flags[:, :-1]], dim=1)
    stretch = torch.where(flags, begins.cumsum(dim=1), 0)  # 0: no stretch
    top = torch.full((b, block + 1), -math.inf, dtype=score.dtype, device=score.device)
    top = top.scatter_reduce(1, stretch, score, "amax")
    columns = torch.arange(block, device=flags.device).expand(b, block)
    ties = flags & (score == top.gather(1, stretch)) & (score > -math.inf)
    first = torch.full((b, block + 1), block, device=flags.device)
    first = first.scatter_reduce(1, stretch, torch.where(ties, columns, block), "amin")
    return ties & (columns == first.gather(1, stretch))

"""LocalLeap (arXiv 2510.07081): near a very confident token, others commit at a lower confidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from dgraph.plans.papers import Paper
from dgraph.runtime.policies import Candidates, DecodeRule, best, setting


@dataclass(frozen=True)
class LocalLeap(DecodeRule):
    """Commit anchors, masks at least as confident as `threshold`, and masks near one that reach `relaxed`.

    Where the block has no anchor, its most confident mask is committed. With radius 0, or with `relaxed` at the
    threshold, the rule is `ConfidenceThreshold(threshold, inclusive=True)`.

    Attributes:
        threshold: of an anchor, in (0, 1]; published: 0.9.
        relaxed: of the masks around an anchor, in (0, 1]; published: 0.75.
        radius: distance up to which a mask is near, in positions of the block, at least 0; published: 4.
    """

    threshold: float = 0.9
    relaxed: float = 0.75
    radius: int = 4

    name: ClassVar[str] = "localleap"
    papers: ClassVar[tuple[Paper, ...]] = (
        Paper("Accelerating Diffusion LLM Inference via Local Determinism Propagation", "2510.07081"),
    )
    per_request: ClassVar[tuple[str, ...]] = ("threshold", "relaxed")

    def __post_init__(self) -> None:
        self.check_threshold()
        self.check_threshold("relaxed")
        if type(self.radius) is not int or self.radius < 0:
            raise self.refuse("radius", "a number of positions, at least 0")

    def choose(self, candidates: Candidates) -> Tensor:
        offered = candidates.offered
        anchors = candidates.committable & (offered >= setting(self.threshold, offered))
        near = F.max_pool1d(anchors.float()[:, None], 2 * self.radius + 1, 1, self.radius)[:, 0] > 0
        relaxed = near & (offered >= setting(self.relaxed, offered))
        return (anchors | relaxed | best(offered)) & candidates.committable

"""LLaDA2.1's rule: decode masks and replace decoded tokens by one threshold each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dgraph.plans.papers import LLADA21, Paper
from dgraph.runtime.policies.base import Candidates, DecodeRule, best, setting
from dgraph.runtime.policies.traits import Traits


@dataclass(frozen=True)
class JointThreshold(DecodeRule):
    """Write confident predictions over masks, and over decoded tokens that differ from them.

    Gamma = {i : masked, c_i > threshold}, or the most confident mask if that is empty (LLaDA2.1 eq. 1);
    Delta = {i : decoded, not of the prompt, token_i != current_i, c_i > edit_threshold} (eq. 2); both are written
    (eq. 3). A block without masks gets up to `max_post_edit_steps` further passes, and is settled by the first that
    changes nothing. The defaults are those of SGLang's JointThreshold; its `penalty_lambda` is a field of
    `runtime.sampling.Sampler`.

    SGLang counts a pass before it looks at the limit, and so forwards the block once more without writing anything;
    the tokens are the same without that.

    Positions whose keys are kept from an earlier step of the block would not see an edit: this rule needs a block
    cache of "off".
    """

    threshold: float = 0.5
    edit_threshold: float = 0.0
    max_post_edit_steps: int = 16

    papers: ClassVar[tuple[Paper, ...]] = (LLADA21,)
    name: ClassVar[str] = "joint_threshold"
    per_request: ClassVar[tuple[str, ...]] = ("threshold", "edit_threshold", "max_post_edit_steps")
    traits: ClassVar[Traits] = Traits(edits=True)

    def __post_init__(self) -> None:
        self.check_threshold()
        self.check_number("edit_threshold", 0, 1, "a probability in [0, 1]", "1 edits nothing.")
        if type(self.max_post_edit_steps) is not int or self.max_post_edit_steps < 0:
            raise self.refuse("max_post_edit_steps", "a number of passes, at least 0")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"editable", "passes"})

    def choose(self, candidates: Candidates) -> Tensor:
        offered, confidence = candidates.offered, candidates.confidence
        sure = offered > setting(self.threshold, offered)
        decoded = (sure | (best(offered) & ~sure.any(dim=1, keepdim=True))) & candidates.committable
        changed = (candidates.token != candidates.current) & (candidates.token >= 0)
        edited = candidates.need("editable", self) & ~candidates.masked & changed
        edited &= confidence > setting(self.edit_threshold, confidence)
        late = ~candidates.masked.any(dim=1) & (candidates.need("passes", self) >= self.max_post_edit_steps)
        return decoded | (edited & ~late[:, None])

    def settled(self, candidates: Candidates, chosen: Tensor) -> Tensor:
        """bool[b]: no mask is left, and the passes after the last mask are used up or change nothing."""
        masks = candidates.masked.any(dim=1)
        left = (candidates.masked & ~chosen).any(dim=1)
        spent = candidates.need("passes", self) + (~masks).long() >= self.max_post_edit_steps
        return ~left & (spent | (~masks & ~chosen.any(dim=1)))

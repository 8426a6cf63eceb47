"""LLaDA2.2's rule: the joint threshold, where a predicted token may also remove its position or open one before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dgraph.ops.statistics import OtherToken, Statistic
from dgraph.plans.papers import LLADA22, Paper
from dgraph.runtime.policies.base import Candidates, Carried, rank, setting
from dgraph.runtime.policies.editing import JointThreshold
from dgraph.runtime.policies.traits import Traits


@dataclass(frozen=True)
class JointThresholdInDel(JointThreshold):
    """Write predicted tokens as `JointThreshold` does, and let two ids among them change how many there are (LLaDA2.2).

    Where `delete_id` is written, the position is removed: what follows in the block moves up, and masks fill the end.
    Where `split_id` is written, a mask is put before the token that stood there, and what follows moves down; what
    leaves the block at its end is lost. Neither id stays. Given tokens (the prompt, fixed ones) stay where they are:
    only the other positions move, in their order.

    Masks that the block began with are original, wherever they have moved; others were introduced. While an original
    mask is left, a step commits at least n = 1 + introduced masks, so an original one is among them. These are the
    masks above `threshold` if there are n or more, else the n most confident. Without original masks a step commits
    all. Decoded tokens are replaced as in `JointThreshold`.

    Steps that begin without an original mask are counted, up to `max_post_edit_steps`; the next one is the last, as is
    step block length + max_post_edit_steps + 1 in any case. In the last step the most likely other token stands in for
    either id, so that nothing moves and no mask is left. A block is settled by the last step, or by one that writes
    nothing.

    The budget is that of SGLang's JointThresholdInDel. SGLang also remembers all states of a block, and resamples a
    token in a state that it has seen. That guard against repeated blocks is left out: the budget ends such blocks.
    """

    delete_id: int = 156930
    split_id: int = 156931

    papers: ClassVar[tuple[Paper, ...]] = (LLADA22,)
    name: ClassVar[str] = "joint_threshold_indel"
    per_request: ClassVar[tuple[str, ...]] = ("threshold", "edit_threshold", "max_post_edit_steps")
    traits: ClassVar[Traits] = Traits(edits=True, moves=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("delete_id", "split_id"):
            if type(getattr(self, field)) is not int or getattr(self, field) < 0:
                raise self.refuse(field, "a token id, at least 0")
        if self.delete_id == self.split_id:
            raise self.refuse("split_id", "another id than delete_id")

    @property
    def needs(self) -> frozenset[str | Statistic]:  # type: ignore[override]
        return frozenset({"editable", "forwards", self._other})

    @property
    def carries(self) -> tuple[Carried, ...]:
        return Carried("original", torch.bool), Carried("late", torch.int64, per="sequence")

    def choose(self, candidates: Candidates) -> Tensor:
        offered, confidence, masked = candidates.offered, candidates.confidence, candidates.masked
        original, _, last = self._progress(candidates)
        required = 1 + (masked & ~original).sum(dim=1)
        sure = offered > setting(self.threshold, offered)
        enough = (sure.sum(dim=1) >= required)[:, None]
        everything = (last | ~(masked & original).any(dim=1))[:, None]
        decoded = torch.where(enough, sure, rank(offered) < required[:, None]) | everything
        changed = (self._token(candidates) != candidates.current) & (candidates.token >= 0)
        edited = candidates.need("editable", self) & ~masked & changed
        edited &= confidence > setting(self.edit_threshold, confidence)
        return (decoded & candidates.committable) | edited

    def settled(self, candidates: Candidates, chosen: Tensor) -> Tensor:
        """bool[b]: the last step, or one that writes nothing."""
        return self._progress(candidates)[2] | ~chosen.any(dim=1)

    def move(self, candidates: Candidates, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """See `DecodeRule.move`."""
        token, block = self._token(candidates), chosen.shape[1]
        free = candidates.need("editable", self) | candidates.masked
        removed, opened = (chosen & free & (token == id_) for id_ in (self.delete_id, self.split_id))
        count = free.long() - removed.long() + opened.long()
        begin, column = count.cumsum(dim=1) - count, torch.arange(block, device=chosen.device).expand_as(token)
        nowhere = torch.full_like(token, 2 * block)
        found = token.new_full((len(token), 2 * block + 1), 2 * block)
        found = found.scatter(1, torch.where(count > 0, begin, nowhere), torch.where(opened, nowhere, column))
        found = found.scatter(1, torch.where(opened, begin + 1, nowhere), column + block)
        place = (free.long().cumsum(dim=1) - 1).clamp(min=0)
        return token, torch.where(free, found.gather(1, place), column)

    def carry(self, candidates: Candidates, chosen: Tensor) -> Mapping[str, Tensor]:
        """See `DecodeRule.carry`."""
        original, late, _ = self._progress(candidates)
        everywhere = torch.cat([original, original, torch.zeros_like(original[:, :1])], dim=1)
        return {"original": everywhere.gather(1, self.move(candidates, chosen)[1]), "late": late}

    @property
    def _other(self) -> OtherToken:
        return OtherToken((self.delete_id, self.split_id))

    def _progress(self, candidates: Candidates) -> tuple[Tensor, Tensor, Tensor]:
        """Counters of the block in this step.

        bool[b, B]: original masks, at the positions to which they have moved; i64[b]: steps that began without an
        original mask, this one included; bool[b]: this is the last step.
        """
        forwards, masked = candidates.need("forwards", self), candidates.masked
        original = torch.where((forwards == 0)[:, None], masked, candidates.carried["original"])
        late = candidates.carried["late"] + ~(masked & original).any(dim=1)
        most = self.max_post_edit_steps
        return original, late, (late > most) | (forwards + 1 > masked.shape[1] + most)

    def _token(self, candidates: Candidates) -> Tensor:
        """i64[b, B]: tokens to write; in the last step, the most likely other token in place of either id."""
        token, last = candidates.token, self._progress(candidates)[2]
        moving = (token == self.delete_id) | (token == self.split_id)
        return torch.where(moving & last[:, None], candidates.need(self._other.name, self).to(token.dtype), token)

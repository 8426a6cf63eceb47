"""Which rows the steps of a bidirectional model forward.

In a bidirectional model every row sees the whole canvas, so every decoded token changes every key. A method that does
not forward all rows in all steps reads keys and values as they were last written; which rows it does forward, and how
often all of them, is all that distinguishes the published caches of this kind.

In a block-causal model the keys of earlier blocks are final, and a step forwards the current block. There a plan only
says which steps of a block are full: its region is "block", and of the numbers it has `full_steps` and `every`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dgraph.errors import InputError, UnknownName

REGIONS = ("all", "response", "suffix", "block", "next")
FIRSTS = ("policy", "position")


@dataclass(frozen=True)
class RowPlan:
    """Rows of a step: all of the canvas in a full step, a region of it in the others.

    In a full step a program recomputes everything it has; in the others it may spare what has hardly changed (DyLLM).

    Whether decoded rows of the region are forwarded again is the block cache's business (see `Recipe.block_cache`).

    Attributes:
        region: "all" (every row), "response" (all behind the prompt), "suffix" (the current block and all behind it),
            "block" (the current block) or "next" (the rows that the step decodes from, those that were decoded in the
            step before, and masked ones around the former; for policies that know before a step what it commits).
        full_steps: full steps at the beginning of every block; 0 only with a warm-up.
        every: another full step every so many steps of a block; 0 for none.
        warm_up: full steps at the beginning of a response.
        widen: every row is forwarded, though not in a full step, every so many steps behind the warm-up; 0 for never.
        prompt_every, response_every: with the region "response", instead of the above: the prompt is forwarded, and
            recomputed, every so many steps of a response, and all of the response is recomputed every so many
            (dLLM-Cache). Both or neither.
        behind, ahead: rows in front of the current block and behind it that belong to the region "block".
        window: masked rows that each row that the step decodes from brings into the region "next": one after the other,
            in the order in which they are decoded, takes the nearest ones of the response, in the block or behind it,
            that do not belong to the region yet, and of two that are equally near the left one first.
        first: what the first step of a block commits: "policy" (what the policy chooses) or "position" (the block's
            first position alone, whatever its confidence; later steps of a model with shifted logits then forward the
            block without the row before it, which predicts that position and nothing else).
    """

    region: str = "all"
    full_steps: int = 1
    every: int = 0
    warm_up: int = 0
    widen: int = 0
    prompt_every: int = 0
    response_every: int = 0
    behind: int = 0
    ahead: int = 0
    window: int = 0
    first: str = "policy"

    def __post_init__(self) -> None:
        if self.region not in REGIONS:
            raise UnknownName("region", str(self.region), REGIONS)
        if self.first not in FIRSTS:
            raise UnknownName("first commit of a block", str(self.first), FIRSTS)
        for name in (f.name for f in fields(self) if f.name not in ("region", "first")):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise InputError(f"{name} must be an integer of at least 0, got {value!r}.")
        if self.prompt_every or self.response_every:
            if not (self.prompt_every and self.response_every):
                raise InputError(
                    f"prompt_every and response_every go together, got {self.prompt_every} and {self.response_every}; "
                    f"set both to at least 1, or leave both at 0."
                )
            if self.region != "response" or self.full_steps or self.every or self.warm_up or self.widen:
                raise InputError(
                    f"prompt_every and response_every say all of when rows are recomputed; beside them the region must "
                    f"be 'response', and full_steps, every, warm_up and widen 0, got {self}."
                )
        elif self.full_steps + self.warm_up < 1:
            raise InputError(
                "the first step of a response must be a full one; set full_steps or warm_up to at least 1."
            )
        if self.region != "block" and (self.behind or self.ahead):
            raise InputError(f"behind and ahead widen the region 'block', not {self.region!r}; leave them at 0.")
        if self.region != "next" and self.window:
            raise InputError(f"window widens the region 'next', not {self.region!r}; leave it at 0.")
        if self.region == "next" and self.first != "policy":
            raise InputError(
                f"the region 'next' is the rows that the policy decodes from, but first={self.first!r} commits another "
                f"one in the first step of a block; leave it at 'policy'."
            )

    def rows_of(self, step: int, prompt: int, new: int, shift: int) -> int | None:
        """The most rows that a sequence forwards in a step, known without looking at what it has decoded.

        Args:
            step: number of the sequence's step, from 0.
            prompt, new: its tokens, given and to decode.
            shift: the model's logit shift: with 1, the row in front of the response predicts its first token, and
                is forwarded with it.

        Returns:
            None if the count depends on where the sequence is in its block.
        """
        if self.region == "all":
            return prompt + new
        if self.region != "response" or self.full_steps or self.every:
            return None
        return prompt + new if self.forwards_prompt(step) else new + shift

    def forwards_prompt(self, step: int) -> bool:
        """Whether a step forwards every row, of sequences that have all taken as many; only if `rows_of` says a
        number.
        """
        if self.region == "all":
            return True
        if self.prompt_every:
            return step % self.prompt_every == 0
        return step < self.warm_up or bool(self.widen and (step - self.warm_up) % self.widen == 0)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RowPlan:
        """The plan that `to_json` described.

        Raises:
            UnknownName: a field that plans do not have.
            InputError: a value out of range.
        """
        known = [f.name for f in fields(cls)]
        for name in value:
            if name not in known:
                raise UnknownName("field of a row plan", name, known)
        return cls(**value)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

"""How the sequences of a step are decoded."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields

from dgraph.plans.block_cache import BlockCache
from dgraph.runtime.policies import Mixture, policy_key
from dgraph.runtime.script import Script
from dgraph.shapes import InputSpec


@dataclass(frozen=True)
class Rule:
    """How sequences are decoded together; what differs from one to the next lies in their state.

    policy: the policies that requests bring. sampled: whether some of them draw tokens.
    inputs: what the programs read that the loop computes or carries. guided: every program runs once more without the
    prompts, with states of its own. For the others see `BlockSession`.
    """

    policy: Mixture
    block_cache: BlockCache
    recommit: bool
    select_noise: bool
    sampled: bool
    inputs: tuple[InputSpec, ...] = ()
    guided: bool = False

    @property
    def key(self) -> Hashable:
        """Equal for two rules of which one may run what was captured for the other."""
        others = tuple(getattr(self, field.name) for field in fields(self) if field.name != "policy")
        return (policy_key(self.policy), *others)

    @property
    def draws(self) -> bool:
        """Whether programs or the loop draw anything by row."""
        return self.sampled or self.select_noise

    @property
    def script(self) -> Script | None:
        """The script that decides, if one does."""
        first = self.policy.kinds[0]
        return first if isinstance(first, Script) else None

    @property
    def policies(self) -> str:
        """Names of the policies, for messages."""
        return " and ".join(type(kind).__name__ for kind in self.policy.kinds)

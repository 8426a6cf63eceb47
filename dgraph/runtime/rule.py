"""How a session decodes a batch."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields

from dgraph.runtime.decode_state import BlockCache
from dgraph.runtime.policies import Policy, policy_key
from dgraph.shapes import InputSpec


@dataclass(frozen=True)
class Rule:
    """How a session decodes; see `BlockSession` and its `generate`.

    inputs: what the programs read that the loop computes or carries. guided: every program runs once more without the
    prompts, with states of its own.
    """

    policy: Policy
    block_cache: BlockCache
    recommit: bool
    select_noise: bool
    temperature: float
    seed: int
    inputs: tuple[InputSpec, ...] = ()
    guided: bool = False

    @property
    def key(self) -> Hashable:
        """Equal for two rules of which one may run what was captured for the other, each with its own seed."""
        others = tuple(getattr(self, field.name) for field in fields(self) if field.name not in ("policy", "seed"))
        return (policy_key(self.policy), *others)

    @property
    def draws(self) -> bool:
        """Whether programs or the loop draw anything by row."""
        return self.temperature > 0 or self.select_noise

"""Settings of decoding that the sequences of a step share."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields

from dgraph.plans.block_cache import BlockCache
from dgraph.runtime.loop.scripted_policy import Script
from dgraph.runtime.policies import PolicyMix, policy_key
from dgraph.types.shapes import InputSpec


@dataclass(frozen=True)
class BatchConfig:
    """Settings of sequences that are decoded together; settings of a single sequence lie in its state.

    Attributes:
        policy: the policies of the requests.
        block_cache, recommit, select_noise: see `BlockSession`.
        sampled: True if some requests draw tokens.
        inputs: inputs of the programs that the loop computes or carries.
        guided: every program runs once more without the prompts, with states of its own.
        adjusts: some request adjusts its logits.
        penalises: some request does so by the tokens that are committed.
    """

    policy: PolicyMix
    block_cache: BlockCache
    recommit: bool
    select_noise: bool
    sampled: bool
    inputs: tuple[InputSpec, ...] = ()
    guided: bool = False
    adjusts: bool = False
    penalises: bool = False

    @property
    def key(self) -> Hashable:
        """Cache key: two rules with equal keys may share captured graphs."""
        others = tuple(getattr(self, field.name) for field in fields(self) if field.name != "policy")
        return (policy_key(self.policy), *others)

    @property
    def draws(self) -> bool:
        """True if programs or the loop draw anything by row."""
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

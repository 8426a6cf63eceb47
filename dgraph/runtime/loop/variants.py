"""Variants of step programs, which the requests of a batch ask for."""

from __future__ import annotations

from collections.abc import Sequence

from dgraph.ops.statistics import declare
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.policies import Policy, PolicyMix, statistics_of

LOGITS = "logits"
"""The variant of programs that end in logits."""


ADJUSTED = "adjusted"
"""The variant of programs that adjust logits (`AdjustLogits`)."""


def measuring(policy: Policy) -> str:
    """The variant of programs that compute the statistics which a policy asks for; "" if it asks for none."""
    return declare(statistics_of(policy))


def variant_of(decodings: Sequence[Decoding]) -> str:
    """The variant of programs that requests with these decodings share; "" for the main ones."""
    asked = measuring(PolicyMix.of([chosen.rule for chosen in decodings]))
    adjusts = any(chosen.adjusts for chosen in decodings)
    if any(chosen.needs_logits for chosen in decodings) or (adjusts and asked):
        return LOGITS
    return ADJUSTED if adjusts else asked

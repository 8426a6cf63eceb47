"""Capabilities of a decoding rule, by which the decode loop asks more of it than `choose`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cache

from dgraph.errors import warn


@dataclass(frozen=True)
class Traits:
    """Capabilities of a decoding rule; by default it has none, and `choose` commits a token in every step.

    Attributes:
        may_wait: a step may commit nothing.
        edits: `choose` may also replace decoded tokens, and `settled` says when a block is done.
        remasks: it edits, and `remask` turns decoded tokens into masks again.
        moves: it edits, and `move` says where tokens go.
        overrules: it decides the first step of a block too, whatever the row plan says of that step.
        foresees: the columns that a step commits are known before its forward; the rule then has `foresee`.
        autoregressive: each step commits the tokens that causal rows predict for the position after them, whatever
            `choose` returns (see `dgraph.runtime.state.encode_denoise`).
        drafts: a step that denoises a block first predicts the tokens of these causal rows.
        extends: the response begins with `first_length` tokens, and `extend` says by how many it grows after a step, up
            to max_new_tokens.
        inserts: it extends, and may also put masks between positions of the block; for bidirectional models.
        renoises: positions that are not committed are drawn again, or random, in the next step. The rule then has
            `keep` and `heat`, and commits all of a block at once.
        holds_back: where `Candidates.must` is False it commits only what it is sure of, maybe nothing. So it can decode
            blocks beyond one that is not done (`Decoding.open_blocks`).
    """

    may_wait: bool = False
    edits: bool = False
    remasks: bool = False
    moves: bool = False
    overrules: bool = False
    foresees: bool = False
    autoregressive: bool = False
    drafts: bool = False
    extends: bool = False
    inserts: bool = False
    renoises: bool = False
    holds_back: bool = False

    @classmethod
    def union(cls, several: Iterable[Traits]) -> Traits:
        """Traits that at least one of several has."""
        kept = list(several)
        return cls(**{name: any(getattr(traits, name) for traits in kept) for name in TRAITS})


TRAITS = tuple(field.name for field in fields(Traits))
"""Names of all traits."""


def traits_of(policy: object) -> Traits:
    """Traits of a policy; none for a policy that does not declare `traits`.

    Attributes named like traits count too, with a warning: rules declared them before there was `traits`.
    """
    declared: Traits = getattr(policy, "traits", Traits())
    separate = {name: bool(getattr(policy, name)) for name in TRAITS if hasattr(policy, name)}
    if not separate:
        return declared
    rule = type(policy)
    _warn_of_separate(f"{rule.__module__}.{rule.__qualname__}", tuple(separate))
    return replace(declared, **separate)


@cache
def _warn_of_separate(rule: str, names: tuple[str, ...]) -> None:
    """Warn once per class."""
    given = ", ".join(f"{name}=..." for name in names)
    warn(
        f"{rule}: {' and '.join(names)} as class attributes go with version 0.3; declare "
        f"traits: ClassVar[Traits] = Traits({given}), imported from dgraph.runtime.policies."
    )

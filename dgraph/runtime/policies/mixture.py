"""A batch whose sequences decode by rules of several kinds, each with its own settings."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.statistics import BY_NAME, Statistic
from dgraph.runtime.policies.base import (
    Candidates,
    Carried,
    DecodeRule,
    Policy,
    bound,
    carries_of,
    policy_key,
    statistics_of,
)
from dgraph.runtime.policies.candidates import Tail
from dgraph.runtime.policies.kinds import kind_of, per_request, settings_of, with_settings
from dgraph.runtime.policies.traits import Traits, traits_of
from dgraph.spec import ModelSpec

T = TypeVar("T")


@dataclass(frozen=True)
class Refusals:
    """Kinds of a mixture that are no longer asked, since they raised: their sequences commit nothing.

    Attributes:
        errors: the exception of each such kind, by its index in the mixture.
        noting: note the exception of a further kind too; False propagates it.
    """

    errors: dict[int, Exception] = field(default_factory=dict)
    noting: bool = True


_REFUSALS: ContextVar[Refusals | None] = ContextVar("dgraph refusals", default=None)


@contextmanager
def refusing(refusals: Refusals | None) -> Iterator[None]:
    """Context in which mixtures skip the kinds that have raised; None: they ask all, and exceptions propagate."""
    token = _REFUSALS.set(refusals)
    try:
        yield
    finally:
        _REFUSALS.reset(token)


@contextmanager
def noting_none() -> Iterator[bool]:
    """Context in which exceptions of kinds propagate instead of being noted; yields True if some kinds are skipped."""
    before = _REFUSALS.get()
    with refusing(None if before is None else replace(before, noting=False)):
        yield before is not None and bool(before.errors)


@dataclass(frozen=True)
class PolicyMix:
    """A policy that decides for each sequence by its own kind of rule.

    It reads `Candidates.kind`, which may be None where there is one kind, and `Candidates.settings`. Every kind decides
    for every sequence, and `kind` says which decision counts; so nothing is compiled anew for other settings, nor for
    sequences that change their kind. Tokens and confidences stand at decoded positions only of sequences whose kind
    edits, see `where`. With one kind it is that kind, operation for operation.

    Attributes:
        kinds: at least one, no two alike; the values of per-request settings do not matter.

    Raises:
        InputError: no kind, two that are equal, or statistics of one name that differ.
    """

    kinds: tuple[Policy, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", tuple(map(kind_of, self.kinds)))
        if not self.kinds:
            raise InputError("PolicyMix: kinds holds at least one policy, got none.")
        for number, kind in enumerate(self.kinds):
            if _place(kind, self.kinds) < number:
                raise InputError(
                    f"PolicyMix: {kind!r} is there twice; policies that differ only in what each request sets for "
                    f"itself are of one kind. Use PolicyMix.of, which drops such."
                )
        statistics_of(self)  # raises where two kinds ask for others of one name

    @classmethod
    def of(cls, policies: Sequence[Policy]) -> PolicyMix:
        """PolicyMix of the policies' kinds, in the order of their first occurrence."""
        kinds = tuple(map(kind_of, policies))
        return cls(tuple(kind for number, kind in enumerate(kinds) if _place(kind, kinds) == number))

    def bind(self, spec: ModelSpec) -> PolicyMix:
        """See `DecodeRule.bind`, of every kind."""
        return PolicyMix(tuple(bound(kind, spec) for kind in self.kinds))

    @property
    def policy_key(self) -> Hashable:
        """See `dgraph.runtime.policies.policy_key`."""
        return (PolicyMix, *map(policy_key, self.kinds))

    @property
    def needs(self) -> frozenset[str | Statistic]:
        """Needs of all kinds together; a statistic that is asked for by name and as an object is there once."""
        found = {need for kind in self.kinds for need in getattr(kind, "needs", ())}
        return frozenset(BY_NAME.get(need, need) if isinstance(need, str) else need for need in found)

    @property
    def carries(self) -> tuple[Carried, ...]:
        """Carried tensors of all kinds, named "{index of the kind}.{name}"."""
        return tuple(
            replace(each, name=_name(index, each.name))
            for index, kind in enumerate(self.kinds)
            for each in carries_of(kind)
        )

    @cached_property
    def kind_traits(self) -> tuple[Traits, ...]:
        """Traits of each kind."""
        return tuple(map(traits_of, self.kinds))

    @property
    def traits(self) -> Traits:
        """Traits of any kind; either all kinds draw again or none, since a model has one kind of canvas."""
        return Traits.union(self.kind_traits)

    def keep(self, candidates: Candidates) -> Tensor:
        """See `DecodeRule.keep`; all False for kinds that do not draw again."""

        def none(own: Candidates) -> Tensor:
            return torch.zeros_like(own.masked)

        return self._each(candidates, lambda rule, own: rule.keep(own) if traits_of(rule).renoises else none(own), none)

    def heat(self, step: Tensor, kind: Tensor | None = None, settings: Mapping[str, Tensor] | None = None) -> Tensor:
        """See `DecodeRule.heat`; 0 for kinds that do not draw again. kind, settings: see `Candidates`."""
        none = partial(torch.zeros_like, step, dtype=torch.float32)
        found = [
            _asked(index, partial(rule.heat, step), none) if traits_of(rule).renoises else none()
            for index, rule in enumerate(self._rules(kind, settings or {}))
        ]
        return _by_kind(found, kind)

    def choose(self, candidates: Candidates) -> Tensor:
        """See `Policy.choose`.

        Raises:
            InputError: a rule returns something else than bool[b, B].
        """
        return self._each(candidates, _chosen, lambda own: torch.zeros_like(own.masked))

    def settled(self, candidates: Candidates, chosen: Tensor) -> Tensor:
        """See `DecodeRule.settled`; for kinds that do not edit, True if no mask is left."""

        def complete(own: Candidates) -> Tensor:
            return DecodeRule().settled(own, chosen)

        return self._each(
            candidates,
            lambda rule, own: rule.settled(own, chosen) if traits_of(rule).edits else complete(own),
            complete,
        )

    def remask(self, candidates: Candidates, chosen: Tensor) -> Tensor:
        """See `DecodeRule.remask`; all False for kinds that do not remask."""

        def none(own: Candidates) -> Tensor:
            return torch.zeros_like(chosen)

        return self._each(
            candidates, lambda rule, own: rule.remask(own, chosen) if traits_of(rule).remasks else none(own), none
        )

    def move(self, candidates: Candidates, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """See `DecodeRule.move`; for kinds that do not move, every token stays in its column."""
        column = torch.arange(chosen.shape[1], device=chosen.device).expand_as(candidates.token)
        found = [
            _asked(index, partial(rule.move, own, chosen), lambda: (candidates.token, column))
            if traits_of(rule).moves
            else (candidates.token, column)
            for index, (rule, own) in enumerate(self._own(candidates))
        ]
        token, source = (_by_kind(values, candidates.kind) for values in zip(*found, strict=True))
        return token, source

    def carry(self, candidates: Candidates, chosen: Tensor) -> Mapping[str, Tensor]:
        """See `DecodeRule.carry`; tensors of other kinds than a sequence's own keep their values."""
        found = {}
        for index, (rule, own) in enumerate(self._own(candidates)):
            becomes: Mapping[str, Tensor] = own.carried
            if becomes:
                becomes = _asked(index, partial(rule.carry, own, chosen), partial(dict, own.carried))
            for name, before in own.carried.items():
                after = becomes[name]
                if candidates.kind is not None and len(self.kinds) > 1:
                    after = torch.where(_over(candidates.kind == index, after), after, before)
                found[_name(index, name)] = after
        return found

    def extend(self, candidates: Candidates, chosen: Tensor) -> Tensor:
        """See `DecodeRule.extend`; nothing for kinds that do not extend. i64[b, B + 1] if some kind inserts."""
        sequences, block = chosen.shape
        shape = (sequences, block + 1) if self.traits.inserts else (sequences,)

        def none(own: Candidates) -> Tensor:
            return chosen.new_zeros(shape, dtype=torch.int64)

        def ask(rule: Any, own: Candidates) -> Tensor:
            if not traits_of(rule).extends:
                return none(own)
            found: Tensor = rule.extend(own, chosen)
            return F.pad(found[:, None], (block, 0)) if len(shape) > found.dim() else found

        return self._each(candidates, ask, none)

    def foresee(
        self,
        masked: Tensor,
        step: Tensor,
        decoded: Tensor,
        order: Tensor,
        kind: Tensor | None = None,
        settings: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """See `DecodeRule.foresee`; -1 for kinds that do not foresee. kind, settings: see `Candidates`."""

        def nothing() -> Tensor:
            return torch.full_like(step, -1)[:, None]

        found = [
            _asked(index, partial(rule.foresee, masked, step, decoded, order), nothing)
            if traits_of(rule).foresees
            else nothing()
            for index, rule in enumerate(self._rules(kind, settings or {}))
        ]
        most = max(columns.shape[1] for columns in found)
        return _by_kind([F.pad(columns, (0, most - columns.shape[1]), value=-1) for columns in found], kind)

    def _each(
        self,
        candidates: Candidates,
        ask: Callable[[Any, Candidates], Tensor],
        otherwise: Callable[[Candidates], Tensor],
    ) -> Tensor:
        """Answer of each sequence's own kind. otherwise: the answer in place of a kind that is not asked."""
        found = [
            _asked(index, partial(ask, rule, own), partial(otherwise, own))
            for index, (rule, own) in enumerate(self._own(candidates))
        ]
        return _by_kind(found, candidates.kind)

    def _rules(self, kind: Tensor | None, settings: Mapping[str, Tensor]) -> list[Any]:
        """The kinds with the settings of every sequence.

        Raises:
            InputError: kind is missing though there are several kinds, or a setting is missing.
        """
        if kind is None and len(self.kinds) > 1:
            raise InputError(
                f"PolicyMix: candidates of {len(self.kinds)} kinds of rule say each sequence's kind, got none."
            )
        for name in settings_spec(self.kinds):
            if name not in settings:
                raise InputError(
                    f"PolicyMix: candidates have the setting {name!r} of each sequence, got {list(settings)}."
                )
        return [
            with_settings(rule, {name: settings[_name(index, name)] for name in per_request(rule)})
            for index, rule in enumerate(self.kinds)
        ]

    def _own(self, candidates: Candidates) -> list[tuple[Any, Candidates]]:
        """Each kind with the settings of every sequence, and the candidates with the tensors that the kind carries."""
        found = []
        for index, rule in enumerate(self._rules(candidates.kind, candidates.settings)):
            carried = {each.name: candidates.carried[_name(index, each.name)] for each in carries_of(rule)}
            width, tail = getattr(rule, "tail", 0), None
            if width and candidates.tail is not None:
                tail = Tail(candidates.tail.token[:, -width:], candidates.tail.confidence[:, -width:])
            found.append((rule, replace(candidates, carried=carried, kind=None, settings={}, tail=tail)))
        return found


def per_sequence(trait: Callable[[Traits], bool], policy: Policy, kind: Tensor) -> Tensor | bool:
    """bool[b]: a trait of the policy of each sequence, or one bool for all; kind i64[b] as in `Candidates`."""
    several = policy.kind_traits if isinstance(policy, PolicyMix) else (traits_of(policy),)
    each = [trait(traits) for traits in several]
    if len(set(each)) == 1:
        return each[0]
    found = torch.zeros_like(kind, dtype=torch.bool)
    for index, true in enumerate(each):
        if true:
            found = found | (kind == index)
    return found


def sub_blocks(policy: Policy, kind: Tensor) -> Tensor | None:
    """i64[b]: `DecodeRule.sub_block` of each sequence, 0 without one; None if no kind has one. kind i64[b]."""
    return _sizes("sub_block", policy, kind)


def tails(policy: Policy, kind: Tensor) -> Tensor | None:
    """i64[b]: `DecodeRule.tail` of each sequence; None if no kind has one. kind i64[b]."""
    return _sizes("tail", policy, kind)


def widest_tail(policy: Policy) -> int:
    """The largest `DecodeRule.tail` of the policy's kinds."""
    kinds = policy.kinds if isinstance(policy, PolicyMix) else (policy,)
    return max(getattr(each, "tail", 0) for each in kinds)


def _sizes(name: str, policy: Policy, kind: Tensor) -> Tensor | None:
    kinds = policy.kinds if isinstance(policy, PolicyMix) else (policy,)
    sizes = [getattr(each, name, None) or 0 for each in kinds]
    if not any(sizes):
        return None
    found = torch.zeros_like(kind)
    for index, size in enumerate(sizes):
        found = torch.where(kind == index, size, found)
    return found


def settings_spec(kinds: Sequence[Policy]) -> dict[str, torch.dtype]:
    """Dtypes of the per-sequence settings of a batch of these kinds, by the name in `Candidates.settings`.

    Each is a tensor [b]; entries of sequences of another kind are arbitrary.
    """
    return {
        _name(index, name): torch.float64 if isinstance(value, float) else torch.int64
        for index, kind in enumerate(kinds)
        for name, value in settings_of(kind).items()
    }


def row_of(mixture: PolicyMix, policy: Policy) -> tuple[int, dict[str, float | int]]:
    """Index of a request's kind, and its settings by the names of `settings_spec`.

    Raises:
        InputError: the mixture has no such kind.
    """
    index = _place(kind_of(policy), mixture.kinds)
    if index == len(mixture.kinds):
        raise InputError(
            f"this batch decodes by policies like {', '.join(map(repr, mixture.kinds))}, got {policy!r}, which is of "
            f"another kind; make the batch with it (PolicyMix.of)."
        )
    return index, {_name(index, name): value for name, value in settings_of(policy).items()}


def _asked(index: int, ask: Callable[[], T], otherwise: Callable[[], T]) -> T:
    """Answer of the kind at an index of a mixture; `otherwise()` if the kind has raised, see `refusing`."""
    refusals = _REFUSALS.get()
    if refusals is None:
        return ask()
    if index not in refusals.errors:
        try:
            return ask()
        except Exception as error:
            if not refusals.noting:
                raise
            refusals.errors[index] = error
    return otherwise()


def _place(kind: Policy, kinds: Sequence[Policy]) -> int:
    """Index of a kind among others; their number if it is not among them."""
    keys = [policy_key(one) for one in kinds]
    return keys.index(policy_key(kind)) if policy_key(kind) in keys else len(keys)


def _name(index: int, name: str) -> str:
    return f"{index}.{name}"


def _over(flags: Tensor, like: Tensor) -> Tensor:
    """bool[b] with the dimensions of `like` [b, ...]."""
    return flags.view(-1, *(1,) * (like.dim() - 1))


def _chosen(rule: Policy, candidates: Candidates) -> Tensor:
    """bool[b, B]: positions that a rule chooses.

    Raises:
        InputError: it returns something else.
    """
    found: object = rule.choose(candidates)
    if isinstance(found, Tensor) and found.dtype is torch.bool and found.shape == candidates.masked.shape:
        return found
    got = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else repr(found)
    raise InputError(
        f"{type(rule).__name__}: choose returns a tensor torch.bool {list(candidates.masked.shape)}, which says of "
        f"each position of each block whether it is committed, got {got}."
    )


def _by_kind(values: Sequence[Tensor], kind: Tensor | None) -> Tensor:
    """[b, ...]: each sequence's entry from the value [b, ...] of its own kind."""
    found = values[0]
    for index, value in enumerate(values[1:], 1):
        assert kind is not None
        found = torch.where(_over(kind == index, value), value, found)
    return found

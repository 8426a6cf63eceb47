"""The base class of decoding rules, what they carry, and the vectorised pieces that they share."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.statistics import BY_NAME, GIVEN, Statistic, declare
from dgraph.plans.papers import Paper
from dgraph.runtime.policies.candidates import Candidates, missing
from dgraph.runtime.policies.traits import Traits
from dgraph.runtime.sampling.sampler import Sampler
from dgraph.spec import ModelSpec


@dataclass(frozen=True)
class Carried:
    """A tensor that a policy carries from step to step; the runtime makes, keeps and resets it.

    Attributes:
        name: key of the tensor in `Candidates.carried`, and of its next value in the result of `carry`.
        dtype: of its values.
        fill: initial value.
        per: "position" for [b, B] over the current block, or "sequence" for [b].
        lasts: "block" resets it with every block; "sequence" never does, and takes per="sequence".
    """

    name: str
    dtype: torch.dtype = torch.float32
    fill: float = 0.0
    per: str = "position"
    lasts: str = "block"

    def __post_init__(self) -> None:
        allowed = {("position", "block"), ("sequence", "block"), ("sequence", "sequence")}
        if (self.per, self.lasts) not in allowed:
            raise InputError(
                f"Carried: {self.name!r} is per 'position' and lasts a 'block', or per 'sequence' and lasts a 'block' "
                f"or a 'sequence', got per={self.per!r} and lasts={self.lasts!r}."
            )

    def begin(self, sequences: int, block: int, device: torch.device) -> Tensor:
        """[b, B] or [b]: the initial tensor."""
        shape = (sequences, block) if self.per == "position" else (sequences,)
        return torch.full(shape, self.fill, dtype=self.dtype, device=device)

    def next(self, value: Tensor, moved: Tensor) -> Tensor:
        """The policy's next value, reset for the sequences bool[b] that moved on to another block."""
        if self.lasts == "sequence":
            return value
        return torch.where(moved[:, None] if value.dim() == 2 else moved, self.fill, value).to(self.dtype)


class Policy(Protocol):
    """A decode policy. It may also have the attributes of `DecodeRule`, whose defaults hold if it does not."""

    def choose(self, candidates: Candidates) -> Tensor:
        """bool[b, B]: the positions whose token is committed.

        At least one position of every sequence with a committable one, unless the policy may wait. Committable
        positions only, unless the policy edits. Runs on the device and reads nothing back, and may be captured in a
        CUDA graph.
        """
        ...


@dataclass(frozen=True)
class DecodeRule:
    """Base class of decoding rules: frozen, comparable, JSON-able. Ties always go to the lower position.

    Attributes:
        papers: publications of the rule; `dgraph.plans.papers.OURS` for none.
        name: name of the rule in `policy_of`.
        traits: what the rule can do beyond `choose`, a `Traits` value; see there for the methods that it then has.
        sampler: sampler of the rule, unless a caller gives another; None takes the most likely token.

    `per_request` names numeric fields that may differ between the sequences of a batch. The methods must then take a
    tensor [b], float64 or int64, in the place of the number, and give the same bits with either; `setting` and
    `steps_of` read both. The value of an idle slot, or of a sequence that decodes by another rule, may be 0: integers
    must not be divided by it. A None field stays None. The names hold only for the class that declares them, since the
    methods of a derived class may read a field in another way.
    """

    papers: ClassVar[tuple[Paper, ...]] = ()
    name: ClassVar[str]
    sampler: Sampler | None = field(default=None, kw_only=True, repr=False)

    @property
    def traits(self) -> Traits:
        """See `DecodeRule`; a class that can do more has traits: ClassVar[Traits] instead."""
        return Traits()

    @property
    def per_request(self) -> tuple[str, ...]:
        """See `DecodeRule`."""
        return ()

    @property
    def needs(self) -> frozenset[str | Statistic]:
        """Inputs of the rule beyond the fields that `Candidates` always has.

        Names of its optional fields and of statistics, or statistics themselves.
        """
        return frozenset()

    @property
    def carries(self) -> tuple[Carried, ...]:
        """Tensors that the rule carries from step to step; it then has `carry`. A captured step has no other state."""
        return ()

    def to_json(self) -> dict[str, Any]:
        """JSON form: the name under "rule", and the settings; `policy_of(**value)` gives an equal policy.

        Raises:
            InputError: its class has no name, by which it would be found again.
        """
        if getattr(self, "name", None) is None:
            kind = type(self).__name__
            raise InputError(f"{kind} has no name, so no form in JSON; give the class name = ..., and register it.")
        values = asdict(replace(self, sampler=None))
        found = {"rule": self.name, **{f.name: values[f.name] for f in fields(self) if f.init and f.name != "sampler"}}
        return found if self.sampler is None else {**found, "sampler": self.sampler.to_json()}

    @property
    def first_length(self) -> int | None:
        """Tokens of a response before it is extended, for a rule that `extends`; None for all of max_new_tokens."""
        return None

    @property
    def tail(self) -> int:
        """Last positions of a response whose predictions the rule reads in `Candidates.tail`; 0 for none."""
        return 0

    @property
    def sub_block(self) -> int | None:
        """Length of a part of the block that is decoded by itself; None: every step forwards the block.

        The part sees the other parts' keys as they were cached when its first position was decoded.
        """
        return None

    def bind(self, spec: ModelSpec) -> Self:
        """The rule of one decode, with what it must know of the model; called once, before the decode starts.

        It reads the mask token, the stop tokens and the block length of the decode from `spec`, and returns a rule that
        has them as fields: `replace(self, end_ids=spec.eos_ids)`. A field that the caller has set stays, so binding a
        bound rule changes nothing.

        Args:
            spec: the model, with the block length of the decode.
        """
        return self

    def choose(self, candidates: Candidates) -> Tensor:
        """See `Policy.choose`."""
        raise NotImplementedError

    def carry(self, candidates: Candidates, chosen: Tensor) -> Mapping[str, Tensor]:
        """Next value of each of `carries`, by name, once `chosen` bool[b, B] is committed; in new tensors."""
        raise NotImplementedError

    def foresee(self, masked: Tensor, step: Tensor, decoded: Tensor, order: Tensor) -> Tensor:
        """i64[b, K]: columns that the coming step commits, in order, and -1 after them; K is the most of any step.

        `choose` returns the same columns if all masked positions are candidates. masked bool[b, B], step i64[b],
        decoded i64[b] and order f32[b, B] are as in `Candidates`. Runs on the device and reads nothing back.
        """
        raise NotImplementedError

    def remask(self, candidates: Candidates, chosen: Tensor) -> Tensor:
        """bool[b, B]: decoded positions, none of them chosen, that become masks again.

        They must be fewer than the chosen masks, so that every step leaves fewer masks and a block ends.
        """
        raise NotImplementedError

    def move(self, candidates: Candidates, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """i64[b, B]: tokens written at the chosen positions; i64[b, B]: source of each position's token or mask.

        A source c is column c after the write, B + c is column c before it, and 2 B is a new mask.
        """
        raise NotImplementedError

    def extend(self, candidates: Candidates, chosen: Tensor) -> Tensor:
        """i64[b]: masks that are added at the end of each response, once `chosen` is committed; 0 for none.

        Masks beyond `Candidates.room` are left out. A rule that `inserts` returns i64[b, B + 1]: the masks that follow
        each column of the block, and then those at the end. Tokens after an inserted mask move on, beyond the block
        too, so that nothing is lost. A sequence in which more is inserted than there is room for, or in which fixed
        tokens lie ahead, inserts nothing in that step.
        """
        raise NotImplementedError

    def keep(self, candidates: Candidates) -> Tensor:
        """bool[b, B]: positions that keep this step's draw in the next step; the others get random tokens."""
        raise NotImplementedError

    def heat(self, step: Tensor) -> Tensor:
        """f32[b]: the temperature at which step i64[b] of a block, from 0, draws; above 0 in steps that take place."""
        raise NotImplementedError

    def settled(self, candidates: Candidates, chosen: Tensor) -> Tensor:
        """bool[b]: the block needs no further step, once `chosen` is committed."""
        return ~(candidates.masked & ~chosen).any(dim=1)

    def refuse(self, field: str, expected: str, hint: str = "") -> InputError:
        """Error for a field with a wrong value."""
        value = getattr(self, field)
        message = f"{type(self).__name__}: {field} is {expected}, got {value!r}.{hint and ' ' + hint}"
        return InputError(message, field=field)

    def check_number(self, field: str, low: float, high: float, expected: str, hint: str = "") -> None:
        """Raise `InputError` unless the field is a number, not NaN, in [low, high]."""
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.refuse(field, expected, hint)

    def check_threshold(self, field: str = "threshold", hint: str = "") -> None:
        """Raise `InputError` unless the field is a probability above 0."""
        self.check_number(field, math.ulp(0.0), 1, "a probability in (0, 1]", hint)

    def check_steps(self, steps: object, optional: bool = True) -> None:
        """Raise `InputError` unless `steps` is a positive int, or None (if optional) for the block length."""
        if optional and steps is None:
            return
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            none = ", or None for the block length" if optional else ""
            raise self.refuse("steps", f"a number of denoising steps per block, at least 1{none}")

    def check_choice(self, field: str, choices: Sequence[str]) -> None:
        """Raise `InputError` unless the field is one of the choices."""
        if getattr(self, field) not in choices:
            raise self.refuse(field, f"one of {', '.join(choices)}")


class _Own:
    """Identity of one object as a hashable value: equal to another identity of the same object only."""

    def __init__(self, owner: object):
        self.owner = owner  # a reference, so that no other object gets its address

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Own) and other.owner is self.owner

    def __hash__(self) -> int:
        return id(self.owner)


def policy_key(policy: Policy) -> Hashable:
    """Cache key of a policy: two policies with equal keys may share captured graphs.

    Equal values have equal keys: frozen dataclasses all of whose attributes are fields that are compared and cannot
    change. Any other policy may hold state that its equality does not tell, and is equal to itself alone. A policy that
    is made of others combines their keys in an attribute `policy_key`.
    """
    theirs: Hashable = getattr(policy, "policy_key", None)
    if theirs is not None:
        return theirs
    own: Hashable = _Own(policy)
    return policy if is_value(policy) and isinstance(policy, Hashable) else own


def is_value(value: object) -> bool:
    """True if an object has no state beyond what its equality compares; see `policy_key`."""
    if value is None or isinstance(value, bool | int | float | str | bytes | Enum | torch.dtype):
        return True
    if isinstance(value, tuple | frozenset):
        return all(map(is_value, value))
    settings = getattr(type(value), "__dataclass_params__", None)
    if settings is None or isinstance(value, type) or not (settings.frozen and settings.eq):
        return False
    compared = {f.name for f in fields(value) if f.compare}  # type: ignore[arg-type]
    held = {*getattr(value, "__dict__", {}), *(f.name for f in fields(value))}  # type: ignore[arg-type]
    return held == compared and all(is_value(getattr(value, name)) for name in compared)


def bound(policy: Policy, spec: ModelSpec) -> Policy:
    """The policy as `DecodeRule.bind` returns it; a policy without `bind` as it is.

    Raises:
        InputError: bind returns another kind of object.
    """
    bind = getattr(policy, "bind", None)
    found: Policy = policy if bind is None else bind(spec)
    if type(found) is not type(policy):
        name = type(policy).__name__
        raise InputError(f"{name}.bind(spec) returns a {name}, got {found!r}; return self, or replace(self, ...).")
    return found


def policy_sampler(policy: Policy) -> Sampler:
    """Sampler of a policy, used if the caller gives none."""
    return getattr(policy, "sampler", None) or Sampler()


def needs_of(policy: Policy) -> frozenset[str]:
    """Names of a policy's inputs: optional fields of `Candidates`, and statistics."""
    return frozenset(need.name if isinstance(need, Statistic) else need for need in getattr(policy, "needs", ()))


def statistics_of(policy: Policy) -> tuple[Statistic, ...]:
    """Statistics that a policy reads beside those that dgraph::lm_head gives, sorted by name.

    Raises:
        InputError: two of one name.
    """
    needs = (BY_NAME.get(need) if isinstance(need, str) else need for need in getattr(policy, "needs", ()))
    found = sorted((s for s in needs if isinstance(s, Statistic) and s not in GIVEN), key=lambda s: (s.name, repr(s)))
    declare(found)
    return tuple(found)


def carries_of(policy: Policy) -> tuple[Carried, ...]:
    """Tensors that a policy carries from step to step."""
    return tuple(getattr(policy, "carries", ()))


def check_needs(policy: Policy, given: Collection[str]) -> None:
    """Refuse a policy whose inputs are missing, before anything has run.

    given: names of the optional fields and statistics that candidates will have.

    Raises:
        InputError: a field is missing; the message names the rule and the first such field.
    """
    for name in sorted(needs_of(policy) - set(given)):
        raise missing(name, policy)


# -- vectorised pieces of rules ----------------------------------------------------------------------------------


PAIRS = 128
"""Columns up to which `rank` compares all pairs, fused with the ops around it. Beyond it sorting is faster."""


def rank(score: Tensor) -> Tensor:
    """i64[b, B]: 0 for the largest score of its row, 1 for the next; ties: lower position first."""
    columns = torch.arange(score.shape[1], device=score.device)
    if len(columns) > PAIRS:
        order = score.argsort(dim=1, descending=True, stable=True)
        return torch.empty_like(order).scatter_(1, order, columns.expand_as(order))
    one, other = score[:, :, None], score[:, None, :]
    ahead = (other > one) | ((other == one) & (columns < columns[:, None]))
    return ahead.sum(dim=2)


def best(score: Tensor) -> Tensor:
    """bool[b, B]: the largest score of each row; ties: lower position."""
    return torch.arange(score.shape[1], device=score.device) == score.argmax(dim=1, keepdim=True)


def leftmost(flags: Tensor, count: Tensor) -> Tensor:
    """bool[b, B]: the first count[b] of the flagged positions."""
    return flags & (flags.cumsum(dim=1) <= count[:, None])


def first_columns(score: Tensor, count: Tensor, most: int) -> Tensor:
    """i64[b, most]: columns of the count[b] largest scores of each row, then -1.

    The largest comes first (ties: lower position).
    """
    columns = score.argsort(dim=1, descending=True, stable=True)[:, :most]
    return torch.where(torch.arange(columns.shape[1], device=score.device) < count[:, None], columns, -1)


def setting(value: float | Tensor, like: Tensor) -> Tensor:
    """[b, 1, ...], or 1 in the place of b for a number: a setting in the dtype and with the dimensions of `like`.

    A number becomes a tensor too, since a GPU divides by a number in another way than by a tensor of it.
    """
    shape = (-1, *(1,) * (like.dim() - 1))
    if isinstance(value, Tensor):
        return value.to(like.dtype).view(shape)
    return torch.full((1,), value, dtype=like.dtype, device=like.device).view(shape)


def steps_of(steps: int | Tensor | None, block: int) -> int | Tensor:
    """Number of steps of a block: the setting `steps`, or the block length if it is not set.

    i64[b] is raised to at least 1, also for idle slots, so that it can be divided by.
    """
    return steps.clamp(min=1) if isinstance(steps, Tensor) else steps or block


def share(total: Tensor | int, steps: Tensor | int, step: Tensor) -> Tensor:
    """i64[b]: share of step `step` i64[b] (from 0) when `total` is spread over `steps` steps; at least one.

    total // steps, and one more in the first total % steps steps. A block whose rows were evicted may need more
    steps than that; each of them gets total // steps.
    """
    return (total // steps + (step < total % steps).long()).clamp(min=1)

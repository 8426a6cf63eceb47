"""What a decode policy sees, and what all policies share."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.statistics import BY_NAME, GIVEN, Statistic, declare
from dgraph.runtime.sampling import Sampler

ORIGINS = {
    "noise": "a uniform draw per position from the runtime",
    "order": "a uniform draw per position from the runtime that lasts",
    "forwards": "the number of steps that the block has had",
    "editable": "a runtime that offers decoded positions for editing",
    "passes": "a runtime that offers decoded positions for editing",
}
"""Optional fields of `Candidates`, and where each comes from. A statistic comes from the step program."""


@dataclass(frozen=True)
class Candidates:
    """What a step offers for the current block of b sequences, all [b, B] unless stated.

    token i64: predicted, -1 where there is none; confidence f32: its probability, -inf where nothing can be
    committed (not masked, evicted, or no token); masked bool: not decoded yet; current i64: the block's tokens
    as they were forwarded; step i64[b]: steps of this block that decoded something, from 0; decoded i64[b]:
    tokens that they decoded; start i64[b]: position of the block's first row; prompt i64[b]: index of the
    sequence's prompt among all of the call.

    measured: by name, f32 statistics of each row's distribution that the rule needs (see `dgraph.ops.statistics`),
    each with its filler where there is no candidate. carried: by name, what the rule carries from step to step.

    What only some rules read (None where nobody gave it): noise f32: uniform in [0, 1), a function of seed, prompt,
    position and step; order f32: uniform in [0, 1), a function of seed, prompt and
    position, hence the same in all steps; forwards i64[b]: steps of this block, those that decoded nothing included.

    Where sequences decode by several kinds of rule (see `Mixture`): kind i64[b], which of them each one has; settings
    by "{index of the kind}.{field}", float64 or int64 [b]: what each set for itself, anything for another kind's.

    For rules that draw a canvas again, else None: draw i64[b, B]: drawn from the distribution of which token is then
    the most likely one, -1 where there is none.

    For rules that edit: token and confidence also stand at decoded positions; editable bool: decoded, and not
    part of the prompt; passes i64[b]: steps of this block that began with no mask left in it.
    """

    token: Tensor
    confidence: Tensor
    masked: Tensor
    current: Tensor
    step: Tensor
    decoded: Tensor
    start: Tensor
    prompt: Tensor
    measured: Mapping[str, Tensor] = field(default_factory=dict)
    carried: Mapping[str, Tensor] = field(default_factory=dict)
    noise: Tensor | None = None
    order: Tensor | None = None
    forwards: Tensor | None = None
    editable: Tensor | None = None
    passes: Tensor | None = None
    kind: Tensor | None = None
    settings: Mapping[str, Tensor] = field(default_factory=dict)
    draw: Tensor | None = None

    @property
    def committable(self) -> Tensor:
        """bool[b, B]: masked positions that have a token."""
        return self.masked & (self.confidence > -math.inf)

    @property
    def offered(self) -> Tensor:
        """f32[b, B]: confidence where a token can be committed, -inf elsewhere."""
        return torch.where(self.committable, self.confidence, -math.inf)

    @property
    def masks_at_start(self) -> Tensor:
        """i64[b]: masked positions that the block began with."""
        return self.masked.sum(dim=1) + self.decoded

    def need(self, name: str, rule: object) -> Tensor:
        """An optional field or a statistic; `InputError` naming the rule if nobody gave it."""
        value: Tensor | None = getattr(self, name) if name in ORIGINS else self.measured.get(name)
        if value is None:
            raise _missing(name, rule)
        return value


def _missing(name: str, rule: object) -> InputError:
    return InputError(
        f"{type(rule).__name__}: needs {name}, got none; it takes "
        f"{ORIGINS.get(name, f'a step program that outputs {name}, or logits')}. "
        f"Choose a rule that decides by confidence alone, or give it.",
        field="policy",
    )


@dataclass(frozen=True)
class Carried:
    """A tensor that a policy carries from step to step; the runtime makes, keeps and resets it.

    Attributes:
        name: under which `Candidates.carried` has it, and `carry` gives what it becomes.
        dtype: of its values.
        fill: what it begins with.
        per: "position" [b, B] of the current block, or "sequence" [b].
        lasts: "block": it begins anew with every block; "sequence": it does not, which only one per sequence can.
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
        """[b, B] or [b]: what it begins with."""
        shape = (sequences, block) if self.per == "position" else (sequences,)
        return torch.full(shape, self.fill, dtype=self.dtype, device=device)

    def next(self, value: Tensor, moved: Tensor) -> Tensor:
        """What the policy made of it, begun anew for the sequences bool[b] that moved on to another block."""
        if self.lasts == "sequence":
            return value
        return torch.where(moved[:, None] if value.dim() == 2 else moved, self.fill, value).to(self.dtype)


class Policy(Protocol):
    """A decode policy. It may also have the attributes of `DecodeRule`, whose defaults hold if it does not."""

    def choose(self, candidates: Candidates) -> Tensor:
        """bool[b, B]: the positions whose token is committed.

        Every sequence with a committable position gets at least one, unless the policy may wait; a position
        that is not committable, none, unless the policy edits. Runs on the device and reads nothing back, and
        may be captured in a CUDA graph.
        """
        ...


@dataclass(frozen=True)
class DecodeRule:
    """Base of the policies here: frozen, comparable, JSON-able. Ties always go to the lower position.

    name: what `policy_of` knows it by. may_wait: a step may commit nothing. edits: `choose` may also replace
    decoded tokens, and `settled` says when a block is done. remasks: it edits, and `remask` takes tokens back. moves:
    it edits, and `move` says where tokens go. autoregressive: what is committed is what causal rows predict of the
    position after them, whatever `choose` says (see `dgraph.runtime.two_modes`); drafts: a step that denoises a block
    first predicts what these rows hold.
    renoises: what is not committed is drawn again, or random, in the next step; it then has `keep` and `heat`, and
    commits all of a block at once.
    sampler: how tokens are taken from logits unless a caller says otherwise; None for the most likely one.

    per_request: names of numeric fields that each sequence of a batch may have its own value of. The methods must then
    take a tensor [b], float64 or int64, in the place of the number, and give the same bits with either; `setting` and
    `steps_of` read both. Of a sequence that is not there, or decodes by another rule, the value may be 0, by which no
    integer must be divided. A field that is None stays so. It holds for the class that says it and not for those
    derived from it, whose methods may read a field in another way.
    """

    name: ClassVar[str]
    may_wait: ClassVar[bool] = False
    edits: ClassVar[bool] = False
    remasks: ClassVar[bool] = False
    moves: ClassVar[bool] = False
    autoregressive: ClassVar[bool] = False
    drafts: ClassVar[bool] = False
    renoises: ClassVar[bool] = False
    sampler: Sampler | None = field(default=None, kw_only=True, repr=False)

    @property
    def per_request(self) -> tuple[str, ...]:
        """See `DecodeRule`."""
        return ()

    @property
    def needs(self) -> frozenset[str | Statistic]:
        """What the rule reads beyond the fields that `Candidates` always has: names of its optional fields and of
        statistics, or statistics themselves.
        """
        return frozenset()

    @property
    def carries(self) -> tuple[Carried, ...]:
        """What the rule keeps from step to step; it then has `carry`. A captured step knows of no other state."""
        return ()

    def to_json(self) -> dict[str, Any]:
        """Its name under "rule" and its settings; `policy_of(**value)` gives an equal policy.

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
    def foresees(self) -> bool:
        """Whether what a step commits is known before its forward, so that `foresee` can say it."""
        return False

    @property
    def sub_block(self) -> int | None:
        """The length of a part of the block that is decoded by itself, with the other parts' keys as they were cached
        when its first position was decoded; None: every step forwards the block.
        """
        return None

    def choose(self, candidates: Candidates) -> Tensor:
        """See `Policy.choose`."""
        raise NotImplementedError

    def carry(self, candidates: Candidates, chosen: Tensor) -> Mapping[str, Tensor]:
        """What each of `carries` becomes, by name, once `chosen` bool[b, B] is committed; in new tensors."""
        raise NotImplementedError

    def foresee(self, masked: Tensor, step: Tensor, decoded: Tensor, order: Tensor) -> Tensor:
        """i64[b, K]: columns that the coming step commits, in order, and -1 after them; K is the most that any does.

        It is what `choose` takes of candidates for all masked positions. masked bool[b, B], step i64[b], decoded i64[b]
        and order f32[b, B] are as in `Candidates`. Runs on the device and reads nothing back.
        """
        raise NotImplementedError

    def remask(self, candidates: Candidates, chosen: Tensor) -> Tensor:
        """bool[b, B]: decoded positions, none of them chosen, that become masks again. Fewer of them than chosen masks,
        so that every step leaves fewer masks and a block ends.
        """
        raise NotImplementedError

    def move(self, candidates: Candidates, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """i64[b, B]: what is written at the chosen positions; and i64[b, B]: from where each position takes its token
        or mask. c: from column c, with what is written there; B + c: from column c as it was; 2 B: a new mask.
        """
        raise NotImplementedError

    def keep(self, candidates: Candidates) -> Tensor:
        """bool[b, B]: positions where the next step finds what this one drew; elsewhere it finds random tokens."""
        raise NotImplementedError

    def heat(self, step: Tensor) -> Tensor:
        """f32[b]: the temperature at which step i64[b] of a block, from 0, draws; above 0 in steps that take place."""
        raise NotImplementedError

    def settled(self, candidates: Candidates, chosen: Tensor) -> Tensor:
        """bool[b]: the block needs no further step, once `chosen` is committed."""
        return ~(candidates.masked & ~chosen).any(dim=1)

    def refuse(self, field: str, expected: str, hint: str = "") -> InputError:
        """The error for a field whose value is not what it should be."""
        value = getattr(self, field)
        message = f"{type(self).__name__}: {field} is {expected}, got {value!r}.{hint and ' ' + hint}"
        return InputError(message, field=field)

    def check_number(self, field: str, low: float, high: float, expected: str, hint: str = "") -> None:
        """`InputError` unless the field is a number, not NaN, in [low, high]."""
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.refuse(field, expected, hint)

    def check_threshold(self, field: str = "threshold", hint: str = "") -> None:
        """`InputError` unless the field is a probability above 0."""
        self.check_number(field, math.ulp(0.0), 1, "a probability in (0, 1]", hint)

    def check_steps(self, steps: object, optional: bool = True) -> None:
        """`InputError` unless the field `steps` is a positive int, or None for the block length."""
        if optional and steps is None:
            return
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            none = ", or None for the block length" if optional else ""
            raise self.refuse("steps", f"a number of denoising steps per block, at least 1{none}")

    def check_choice(self, field: str, choices: Sequence[str]) -> None:
        """`InputError` unless the field is one of the choices."""
        if getattr(self, field) not in choices:
            raise self.refuse(field, f"one of {', '.join(choices)}")


class _Own:
    """Stands for one object: equal to what stands for the same one."""

    def __init__(self, owner: object):
        self.owner = owner  # held, so that no other object gets its address

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Own) and other.owner is self.owner

    def __hash__(self) -> int:
        return id(self.owner)


def policy_key(policy: Policy) -> Hashable:
    """Equal for two policies of which one may run what was captured for the other.

    That is true of equal values: frozen dataclasses all of whose attributes are fields that are compared and cannot
    change. Any other policy may hold state that its equality does not tell, and is equal to itself alone. One that is
    made of others has theirs in an attribute `policy_key`.
    """
    theirs: Hashable = getattr(policy, "policy_key", None)
    if theirs is not None:
        return theirs
    own: Hashable = _Own(policy)
    return policy if is_value(policy) and isinstance(policy, Hashable) else own


def is_value(value: object) -> bool:
    """Whether all that it is shows in its equality; see `policy_key`."""
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


def policy_sampler(policy: Policy) -> Sampler:
    """How tokens are taken from logits under a policy where the caller does not say."""
    return getattr(policy, "sampler", None) or Sampler()


def needs_of(policy: Policy) -> frozenset[str]:
    """Names of what a policy reads: optional fields of `Candidates`, and statistics."""
    return frozenset(need.name if isinstance(need, Statistic) else need for need in getattr(policy, "needs", ()))


def statistics_of(policy: Policy) -> tuple[Statistic, ...]:
    """The statistics that a policy reads beside those that dgraph::lm_head gives, by name.

    Raises `InputError` for two of one name.
    """
    needs = (BY_NAME.get(need) if isinstance(need, str) else need for need in getattr(policy, "needs", ()))
    found = sorted((s for s in needs if isinstance(s, Statistic) and s not in GIVEN), key=lambda s: (s.name, repr(s)))
    declare(found)
    return tuple(found)


def carries_of(policy: Policy) -> tuple[Carried, ...]:
    """What a policy carries from step to step."""
    return tuple(getattr(policy, "carries", ()))


def may_wait(policy: Policy) -> bool:
    """Whether a step of the policy may commit nothing."""
    return bool(getattr(policy, "may_wait", False))


def edits(policy: Policy) -> bool:
    """Whether the policy replaces decoded tokens; it then has `settled`, see `DecodeRule`."""
    return bool(getattr(policy, "edits", False))


def overrules(policy: Policy) -> bool:
    """Whether the policy decides every step, whatever a plan says of a block's first one."""
    return bool(getattr(policy, "overrules", False))


def remasks(policy: Policy) -> bool:
    """Whether the policy turns decoded tokens into masks again; it then has `remask`, see `DecodeRule`."""
    return bool(getattr(policy, "remasks", False))


def moves(policy: Policy) -> bool:
    """Whether the policy changes how many tokens a block has; it then has `move`, see `DecodeRule`."""
    return bool(getattr(policy, "moves", False))


def renoises(policy: Policy) -> bool:
    """Whether the policy draws what it does not commit again; it then has `keep` and `heat`, see `DecodeRule`."""
    return bool(getattr(policy, "renoises", False))


def foresees(policy: Policy) -> bool:
    """Whether the policy knows before a step what it commits; it then has `foresee`, see `DecodeRule`."""
    return bool(getattr(policy, "foresees", False))


def check_needs(policy: Policy, given: Collection[str]) -> None:
    """Refuse a policy before anything has run.

    given: the optional fields that candidates will have.

    Raises `InputError` naming the rule and the first field that is missing.
    """
    for name in sorted(needs_of(policy) - set(given)):
        raise _missing(name, policy)


# -- vectorised pieces of rules ----------------------------------------------------------------------------------


PAIRS = 128
"""Up to this number of columns all pairs are compared, fused with what is around it. Beyond it sorting is faster."""


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
    """i64[b, most]: columns of the count[b] largest scores of each row, the largest first (ties: lower position); -1
    after them.
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
    """The setting `steps`: None for one per position of a block; i64[b], which is at least 1 even where no sequence is,
    so that it divides.
    """
    return steps.clamp(min=1) if isinstance(steps, Tensor) else steps or block


def share(total: Tensor | int, steps: Tensor | int, step: Tensor) -> Tensor:
    """i64[b]: what step `step` i64[b] (from 0) gets when `total` is spread over `steps` steps; at least one.

    total // steps, and one more in the first total % steps steps. A block whose rows were evicted may need more
    steps than that; each of them gets total // steps.
    """
    return (total // steps + (step < total % steps).long()).clamp(min=1)

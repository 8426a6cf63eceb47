"""Settings of a policy that each request of a batch has for itself, and the kind of policy that requests share."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from torch import Tensor

from dgraph.errors import InputError
from dgraph.runtime.policies.base import DecodeRule, Policy, is_value

_MOST = 2**63 - 1  # what an int64 holds


def per_request(policy: Policy) -> tuple[str, ...]:
    """Names of the fields that may hold a tensor [b] in the place of a number; see `DecodeRule.per_request`.

    Raises:
        InputError: a name that is no field, or whose annotation says neither float nor int.
    """
    if not isinstance(policy, DecodeRule) or "per_request" not in vars(type(policy)) or not is_value(policy):
        return ()
    own = tuple(name for name in policy.per_request if getattr(policy, name, 0) is not None)
    for name in own:
        _type_of(policy, name)
    return own


def kind_of(policy: Policy) -> Policy:
    """Kind of a policy: the policy with its per-request settings at fixed values, and without its sampler.

    No rule decides by its sampler. Policies of one kind have equal kinds and equal `policy_key`s, so graphs compiled
    for one serve all. A policy that is no `DecodeRule`, or may hold state (see `policy_key`), is a kind of its own.
    """
    if not isinstance(policy, DecodeRule) or not is_value(policy):
        return policy
    return _with(policy, {"sampler": None, **{name: _usual(policy, name) for name in per_request(policy)}})


def settings_of(policy: Policy) -> dict[str, float | int]:
    """Per-request settings of a policy by field; `with_settings` makes the policy from its kind and these."""
    values = {name: _type_of(policy, name)(getattr(policy, name)) for name in per_request(policy)}
    return {name: min(value, _MOST) if isinstance(value, int) else value for name, value in values.items()}


def with_settings(policy: Policy, settings: Mapping[str, Tensor]) -> Policy:
    """The policy for b sequences of its kind, each with its own settings: tensors [b] by field, float64 or int64.

    Values are not checked: that was done where the requests' own policies were made. Values of idle slots may be 0.

    Raises:
        InputError: a field that is not a request's own.
    """
    own = per_request(policy)
    for name in settings:
        if name not in own:
            has = f"those are {', '.join(own)}" if own else "it has none"
            raise InputError(f"{type(policy).__name__}: {name!r} is no setting of each request's own; {has}.")
    return _with(policy, settings) if settings else policy


def _with(policy: Policy, values: Mapping[str, Any]) -> Policy:
    found = copy.copy(policy)
    for name, value in values.items():
        object.__setattr__(found, name, value)  # no `replace`, which checks values, and would read them on the host
    return found


def _field(policy: Policy, name: str) -> Field[Any] | None:
    return next((f for f in fields(policy) if f.name == name), None)  # type: ignore[arg-type]


def _type_of(policy: Policy, name: str) -> type[float] | type[int]:
    field = _field(policy, name)
    words = set() if field is None else set(re.findall(r"\w+", str(field.type)))
    if not words & {"float", "int"}:
        raise InputError(
            f"{type(policy).__name__}: per_request names fields that are annotated as float or int, got {name!r}"
            f"{'' if field is None else f', annotated as {field.type}'}."
        )
    return float if "float" in words else int


def _usual(policy: Policy, name: str) -> float | int:
    """A valid value: the default, or 1 for a field without a default or with default None."""
    field = _field(policy, name)
    assert field is not None
    number = 1 if field.default is MISSING or field.default is None else field.default
    return _type_of(policy, name)(number)

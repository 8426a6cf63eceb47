"""Scheduling policies, one a file.

Another package adds one (a subclass of `SchedulePolicy`) through the entry-point group `dgraph.schedulers`, see
`dgraph.plugins`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dgraph.engine.scheduling.schedulers.base import SchedulePolicy, View
from dgraph.engine.scheduling.schedulers.fcfs import Fcfs
from dgraph.engine.scheduling.schedulers.look_ahead import LookAhead
from dgraph.engine.scheduling.schedulers.prefill_first import PrefillFirst
from dgraph.engine.scheduling.schedulers.static import Static
from dgraph.errors import InputError, UnknownName
from dgraph.plugins import Table
from dgraph.settings import settings_of

GROUP = "dgraph.schedulers"


def _is_policy(name: str, value: Any) -> bool:
    if not (isinstance(value, type) and issubclass(value, SchedulePolicy)):
        raise ValueError(f"is no subclass of SchedulePolicy, got {value!r}")
    if value.name != name:
        raise ValueError(f"is a policy whose name is {value.name!r}; both names must be the same")
    return True


OWN: tuple[type[SchedulePolicy], ...] = (Static, PrefillFirst, Fcfs, LookAhead)
POLICIES: Mapping[str, type[SchedulePolicy]] = Table({policy.name: policy for policy in OWN}, GROUP, _is_policy)
"""Every policy by name."""


def policy_of(given: str | SchedulePolicy, **settings: Any) -> SchedulePolicy:
    """The policy that a caller means: an object, or a name with settings.

    Raises:
        UnknownName: an unknown policy, or a setting that it has not.
        InputError: neither a name nor a policy, settings beside an object, or one out of range.
    """
    if isinstance(given, str):
        if given not in POLICIES:
            raise UnknownName("scheduling policy", given, POLICIES)
        return settings_of(POLICIES[given], None, settings)
    if not isinstance(given, SchedulePolicy):
        raise InputError(f"policy must be a name ({', '.join(POLICIES)}) or a SchedulePolicy, got {given!r}.")
    return settings_of(type(given), given, settings)


__all__ = ["POLICIES", "Fcfs", "LookAhead", "PrefillFirst", "SchedulePolicy", "Static", "View", "policy_of"]

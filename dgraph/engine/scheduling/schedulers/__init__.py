"""Schedulers, one a file: which requests run in the next step.

Another package adds one (a subclass of `SchedulingStrategy`) through the entry-point group `dgraph.schedulers`, see
`dgraph.plugins`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dgraph.engine.scheduling.schedulers.base import SchedulingStrategy, View
from dgraph.engine.scheduling.schedulers.fcfs import Fcfs
from dgraph.engine.scheduling.schedulers.look_ahead import LookAhead
from dgraph.engine.scheduling.schedulers.prefill_first import PrefillFirst
from dgraph.engine.scheduling.schedulers.static import Static
from dgraph.errors import InputError, UnknownName
from dgraph.errors.former import former_names
from dgraph.plugins import Table
from dgraph.settings import settings_of

GROUP = "dgraph.schedulers"


def _is_scheduler(name: str, value: Any) -> bool:
    if not (isinstance(value, type) and issubclass(value, SchedulingStrategy)):
        raise ValueError(f"is no subclass of SchedulingStrategy, got {value!r}")
    if value.name != name:
        raise ValueError(f"is a scheduler whose name is {value.name!r}; both names must be the same")
    return True


OWN: tuple[type[SchedulingStrategy], ...] = (Static, PrefillFirst, Fcfs, LookAhead)
SCHEDULERS: Mapping[str, type[SchedulingStrategy]] = Table(
    {scheduler.name: scheduler for scheduler in OWN}, GROUP, _is_scheduler
)
"""Every scheduler by name."""


def scheduler_of(given: str | SchedulingStrategy, **settings: Any) -> SchedulingStrategy:
    """The scheduler that a caller means: an object, or a name with settings.

    Raises:
        UnknownName: an unknown scheduler, or a setting that it has not.
        InputError: neither a name nor a scheduler, settings beside an object, or one out of range.
    """
    if isinstance(given, str):
        if given not in SCHEDULERS:
            raise UnknownName("scheduler", given, SCHEDULERS)
        return settings_of(SCHEDULERS[given], None, settings)
    if not isinstance(given, SchedulingStrategy):
        raise InputError(f"scheduler must be a name ({', '.join(SCHEDULERS)}) or a SchedulingStrategy, got {given!r}.")
    return settings_of(type(given), given, settings)


_FORMER = {"POLICIES": "SCHEDULERS", "SchedulePolicy": "SchedulingStrategy", "policy_of": "scheduler_of"}
__getattr__ = former_names(__name__, _FORMER)

__all__ = ["SCHEDULERS", "Fcfs", "LookAhead", "PrefillFirst", "SchedulingStrategy", "Static", "View", "scheduler_of"]

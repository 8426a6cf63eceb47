"""Static batches: the next one starts when the last of this one has ended."""

from __future__ import annotations

from dataclasses import dataclass

from dgraph.engine.scheduling.jobs import ScheduledRequest
from dgraph.engine.scheduling.schedulers.base import SchedulingStrategy, View


@dataclass(frozen=True)
class Static(SchedulingStrategy):
    """Requests are admitted only while no slot was busy, as many as there are slots and pages for.

    Rows go by order of admission. A request sits out at most the steps that those of its batch before it still need.
    """

    name = "static"

    def admits(self, job: ScheduledRequest, view: View) -> bool:
        return view.before == 0

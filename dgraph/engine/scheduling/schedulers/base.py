"""The interface of a scheduler by which requests are chosen, and the state that it is shown."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from dgraph.engine.scheduling.cost_model import CostModel
from dgraph.engine.scheduling.jobs import Budgets, RequestProgress, ScheduledRequest


@dataclass(slots=True)
class View:
    """The state of a scheduler while it plans a step.

    Attributes:
        budgets: see `Budgets`.
        running: requests in slots, in order of admission, those that this plan admits last.
        needs: rows that each of them is expected to need in this step.
        before: how many of them ran before this plan.
        waiting: requests in the queue.
        pace: tokens per decoding step of all requests so far.
        rows: the sum of `needs`.
    """

    budgets: Budgets
    running: list[RequestProgress]
    needs: list[int]
    before: int
    waiting: int
    pace: float
    rows: int
    _foreseen: list[int] = field(default_factory=list)

    def admit(self, running: RequestProgress) -> None:
        """Count the head of the queue among those that run."""
        self.running.append(running)
        self.needs.append(running.rows)
        self.rows += running.rows
        self.waiting -= 1
        if self._foreseen:
            _add(self._foreseen, running)

    def foreseen(self, horizon: int, job: ScheduledRequest | None = None) -> list[int]:
        """Rows that cannot be cut, of this step and of those that follow it, `horizon` in all.

        Args:
            horizon: the same in every call.
            job: a request that is counted as if it was admitted now.
        """
        if not self._foreseen:
            self._foreseen = [0] * horizon
            for running in self.running:
                _add(self._foreseen, running)
        if job is None:
            return self._foreseen
        rows = list(self._foreseen)
        _add(rows, RequestProgress(job, -1, (0.0, job.id), 0, self.pace))
        return rows


def _add(foreseen: list[int], running: RequestProgress) -> None:
    """Add the expected rows of a request, from the step that is planned on."""
    job = running.job
    end = min(running.left - running.ahead, len(foreseen))
    for at in range(end):
        foreseen[at] += running.ordinary
    if job.chunk:  # its prompt takes the rows that others leave
        return
    at = running.due - running.ahead
    if at < 0:
        at %= running.period
    for peak in range(at, end, running.period):
        foreseen[peak] += job.refresh_rows - running.ordinary


class SchedulingStrategy(ABC):
    """Choice of the requests that are admitted, and of the order in which rows are given out.

    A strategy is a frozen dataclass: its fields are its settings.

    Slots, pages and the order of the queue are the scheduler's. `admits` is asked only of the first request in the
    queue, and only where a slot and its pages are free. A request that fits must be admitted once nothing runs.
    """

    name: ClassVar[str]

    @abstractmethod
    def admits(self, job: ScheduledRequest, view: View) -> bool:
        """True if a request starts in this step."""

    def measured(self, costs: CostModel, rows: int) -> SchedulingStrategy:
        """Adapt this strategy to a device whose step times are known, up to `rows` rows."""
        return self

    def order(self, view: View) -> list[RequestProgress]:
        """Requests that take part in this step, in the order in which rows are given out."""
        return view.running


def first_step(job: ScheduledRequest) -> int:
    """Rows that a request needs to start: those of its first step, or of the first chunk of its prompt."""
    return min(job.chunk, job.first_rows) or job.first_rows

"""First come, first served with one budget of rows: the scheduler of the dLLM-Serve paper (section 4.4)."""

from __future__ import annotations

from dataclasses import dataclass

from dgraph.engine.scheduling.jobs import ScheduledRequest
from dgraph.engine.scheduling.schedulers.base import SchedulingStrategy, View, first_step


@dataclass(frozen=True)
class Fcfs(SchedulingStrategy):
    """Running requests by order of admission, then waiting ones as long as the rows of this step last.

    Admission sees this step alone: requests whose refreshes will meet later are admitted, and the later ones then sit
    out. Let `largest` be the rows of the largest step that cannot be cut. While a request sits out, those before it get
    more than `rows - largest` rows in every step. Let `work` be all the rows that those admitted before it still need
    until they end. Then it sits out at most `work / (rows - largest + 1)` steps in a row, rounded up. The bound grows
    with slots and with lengths of responses. (The paper's public code has no bound: requests that it schedules go back
    to the queue's head, before those that it delays.)
    """

    name = "fcfs"

    def admits(self, job: ScheduledRequest, view: View) -> bool:
        return view.rows + first_step(job) <= view.budgets.rows

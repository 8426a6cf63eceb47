"""Look-ahead: admit a request if the coming steps hold its foreseen refreshes; requests that sat out go first."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dgraph.engine.scheduling.cost_model import CostModel
from dgraph.engine.scheduling.jobs import RequestProgress, ScheduledRequest
from dgraph.engine.scheduling.schedulers.base import SchedulingStrategy, View, first_step
from dgraph.errors import InputError


@dataclass(frozen=True)
class LookAhead(SchedulingStrategy):
    """Admit a request if the steps of the horizon hold the rows that it and the running requests will need.

    The steps of refreshes are known where steps per block are fixed; else they follow from the masks left and from the
    pace of the request so far. Rows that exceed the budget of a step wait for the next one, and so on. At no step may
    the rows left over be more than `delay` steps forward. A refresh that waits is a staggering that lasts, since the
    refreshes after it move along.

    `enough` keeps requests from slowing each other down for nothing. Below `enough` rows a step, another request adds
    to throughput. Above, steps grow in proportion: the running requests end later by as much as the newcomer starts
    sooner. So while the coming steps have `enough` rows on average, a request is admitted only if more wait than half
    of those that run. A long queue wants the last per cent of throughput; a short one wants the oldest to end.

    Rows go by order of the queue, but first to requests that have sat out `patience` steps in a row, longest first. So
    no request is overtaken for ever. Let `n` be the running requests, `largest` the rows of the largest need among
    them, and `lag` the age of facts in steps. `lag` is 1 where the host plans a step while the one before it runs, else
    0. Then a request sits out at most

        patience + lag + (n - 1) * (1 + lag) // (rows // largest)

    steps in a row. A step in which a request sits out serves at least `rows // largest` others. Once it is known that a
    request has sat out `patience` steps, only requests that have sat out as long go before it. Each of the `n - 1`
    others ceases to as soon as it is known to be served. Until then it may be served `1 + lag` times.

    Attributes:
        horizon: steps to look ahead.
        delay: steps that a foreseen refresh may have to wait.
        patience: steps that a request sits out before it goes first.
        enough: rows of a step from which on more requests make steps longer in proportion; None to go by the cost model
            (`CostModel.enough`), and where that is not known, by the budget alone.
    """

    horizon: int = 32
    delay: int = 1
    patience: int = 4
    enough: int | None = None

    name = "look_ahead"

    def __post_init__(self) -> None:
        for name, least in (("horizon", 1), ("delay", 0), ("patience", 1), ("enough", 1)):
            value = getattr(self, name)
            if not (type(value) is int and value >= least) and not (name == "enough" and value is None):
                raise InputError(f"look_ahead: {name} must be a whole number, at least {least}, got {value!r}.")

    def measured(self, costs: CostModel, rows: int) -> LookAhead:
        return replace(self, enough=costs.enough(rows)) if self.enough is None else self

    def admits(self, job: ScheduledRequest, view: View) -> bool:
        if view.rows + first_step(job) > view.budgets.rows:
            return False
        if self.enough is not None and len(view.running) >= 2 * view.waiting:
            prompts = sum([r.prompt_left for r in view.running])
            if sum(view.foreseen(self.horizon)) + prompts >= self.horizon * self.enough:
                return False
        budget, over = view.budgets.rows, 0
        for rows in view.foreseen(self.horizon, job):
            over = max(over + rows - budget, 0)
            if over > self.delay * budget:
                return False
        return True

    def order(self, view: View) -> list[RequestProgress]:
        patience = self.patience
        return sorted(view.running, key=lambda r: (-r.skipped if r.skipped >= patience else 0, r.key))

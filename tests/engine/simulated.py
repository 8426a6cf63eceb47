"""A simulated engine whose every step is checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dgraph.bench.arrivals import Request
from dgraph.bench.simulate import Engine, Method
from dgraph.engine.scheduling.cost_model import CostModel
from dgraph.engine.scheduling.jobs import Budgets, Facts, ScheduledRequest
from dgraph.engine.scheduling.scheduler import Scheduler
from dgraph.engine.scheduling.schedulers import SchedulingStrategy

COSTS = CostModel(rows=(8, 64), seconds=(0.01, 0.08), per_key=1e-5, constant=0.001)


class Checked(Engine):
    """Asserts after every step what must hold under any scheduler; keeps the order of admission and who sat out."""

    def __init__(self, requests: Sequence[Request], scheduler: Scheduler, method: Method, **settings: Any):
        self.admissions: list[ScheduledRequest] = []
        self.sat_out: dict[int, int] = {}
        self.longest = 0
        super().__init__(requests, scheduler, method, COSTS, **settings)

    def advance(self) -> bool:
        going = super().advance()
        budgets = self.scheduler.budgets
        assert self.free >= 0
        assert self.free + sum(slot.pages for slot in self.slots.values()) == budgets.pages
        assert len(self.scheduler.running) <= budgets.sequences
        slots = [r.slot for r in self.scheduler.running.values()]
        assert len(set(slots)) == len(slots)
        assert set(slots) <= set(range(budgets.sequences))
        return going

    def _begin(self, job: ScheduledRequest) -> None:
        self.admissions.append(job)
        super()._begin(job)

    def _step(self, order: Sequence[int]) -> tuple[float, list[tuple[int, Facts]]]:
        active = {id for id, slot in self.slots.items() if slot.rows}
        assert len(set(order)) == len(order)
        end, facts = super()._step(order)
        assert sum(what.took for _, what in facts) <= self.scheduler.budgets.rows
        took = {id for id, what in facts if what.took}
        self.sat_out = {id: self.sat_out.get(id, 0) + 1 for id in active - took}
        self.longest = max(self.longest, *self.sat_out.values(), 0)
        return end, facts


def run(
    requests: Sequence[Request], budgets: Budgets, method: Method, scheduler: str | SchedulingStrategy, **settings: Any
) -> Checked:
    """Serve all requests, checked."""
    engine = Checked(requests, Scheduler(budgets, scheduler), method, **settings)
    while engine.advance():
        pass
    return engine

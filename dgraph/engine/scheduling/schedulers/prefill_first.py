"""Prompts first, as SGLang's scheduler for diffusion models does it."""

from __future__ import annotations

from dataclasses import dataclass

from dgraph.engine.scheduling.jobs import RequestProgress, ScheduledRequest
from dgraph.engine.scheduling.schedulers.base import SchedulingStrategy, View, first_step


@dataclass(frozen=True)
class PrefillFirst(SchedulingStrategy):
    """Requests that have not finished their prompt, or their first refresh, run alone; else all others do.

    Admission asks only whether the first steps of those that run alone fit together: the two kinds are never mixed.
    Rows go by order of admission within a kind. Only the arrivals bound how long decoding requests sit out. As long as
    requests come and there are slots and pages, prompts go first.
    """

    name = "prefill_first"

    def admits(self, job: ScheduledRequest, view: View) -> bool:
        first = sum(need for r, need in zip(view.running, view.needs, strict=True) if _starts(r))
        return first + first_step(job) <= view.budgets.rows

    def order(self, view: View) -> list[RequestProgress]:
        return [r for r in view.running if _starts(r)] or view.running


def _starts(running: RequestProgress) -> bool:
    """True if its first step, or its prompt, is not planned to its end."""
    return running.prompt_left > 0 or (running.steps == 0 and running.ahead == 0)

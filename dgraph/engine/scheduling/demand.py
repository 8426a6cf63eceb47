"""Estimate what a request will need, from its model, plan and decoding: a `ScheduledRequest` for the scheduler."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from dgraph.engine.scheduling.jobs import ScheduledRequest
from dgraph.plans.regions import rows_of
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Apart, Counted
from dgraph.plans.view import View, ahead
from dgraph.runtime.policies import FixedSteps
from dgraph.runtime.requests import Request, prefilled_positions
from dgraph.spec import ModelSpec


def job_of(
    number: int,
    request: Request,
    spec: ModelSpec,
    block: int,
    plan: RowPlan | None,
    *,
    arrived: float,
    priority: int,
    pages_first: int,
    pages_life: int,
    rings: tuple[int, ...] = (),
    entries: tuple[int, ...] = (),
) -> ScheduledRequest:
    """The job of a request; see `ScheduledRequest` for the meaning of its numbers.

    Args:
        number: its id for the scheduler.
        request: its prompt and decoding.
        spec: the model.
        block: columns of a block.
        plan: which rows a bidirectional model forwards.
        arrived, priority, pages_first, pages_life, rings, entries: as in `ScheduledRequest`.
    """
    prompt, new = len(request.ids), request.decoding.max_new_tokens
    rule = request.decoding.rule
    common: dict[str, Any] = {
        "id": number,
        "prompt": prompt,
        "new": new,
        "block": block,
        "arrived": arrived,
        "priority": priority,
        "pages_first": pages_first,
        "pages_life": pages_life,
        "rings": rings,
        "entries": entries,
        "steps_per_block": rule.steps if isinstance(rule, FixedSteps) else None,
    }
    if spec.attention == "block_causal":
        refresh = prefilled_positions(request, block, spec)
        return ScheduledRequest(**common, refresh_rows=refresh, reuse_rows=request.step_rows(block, spec), chunk=block)
    assert plan is not None
    added = 0 if plan.added is None else block  # at most
    everything = prompt + new + added
    reuse = min(everything, (_region_rows(plan, prompt, new, spec.logit_shift) or block + spec.logit_shift) + added)
    blocks, every = _refreshes(plan)
    if reuse == everything:  # no step is larger than another
        blocks, every = False, 0
    phases: dict[str, Any] = {"refresh_rows": everything, "refresh_blocks": blocks, "refresh_every": every}
    return ScheduledRequest(**common, **phases, reuse_rows=reuse)


def _region_rows(plan: RowPlan, prompt: int, new: int, shift: int) -> int | None:
    """Rows of a step that is not whole; None where the device alone knows them."""
    end = torch.tensor([prompt + new])
    view = View(positions=torch.arange(prompt + new), prompt_end=torch.tensor([prompt]), end=end, shift=shift)
    rows = ahead(partial(rows_of, plan.region), view)
    return None if rows is None else max(1, int(rows.sum()))


def _refreshes(plan: RowPlan) -> tuple[bool, int]:
    """True if every block begins with a whole step; steps after which one is due at the latest (0: never)."""
    schedule = plan.schedule
    if isinstance(schedule, Counted):
        rounds = [n for n in (schedule.every, schedule.widen) if n]
        return schedule.full_steps > 0, min(rounds, default=0)
    if isinstance(schedule, Apart):
        return False, min(schedule.prompt_every, schedule.response_every)
    return False, 0

"""A measured load in the simulator, with the times of the same program's steps, to tell how far it can be trusted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from dgraph.bench.arrivals import arrivals
from dgraph.bench.serve import LoadTest, ServedLoad
from dgraph.bench.simulate import Method, Simulated, simulate
from dgraph.bench.traces import Trace
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.engine.memory.profile import profile
from dgraph.engine.scheduling.cost_model import CostModel
from dgraph.engine.scheduling.jobs import Budgets
from dgraph.plans.regions import Block
from dgraph.plans.schedules import Counted
from dgraph.runtime.policies import FixedSteps


@dataclass(frozen=True)
class Steps:
    """Times of a program's steps.

    Attributes:
        costs: seconds by rows and keys.
        pad: the rows with which a step of a number of rows runs.
    """

    costs: CostModel
    pad: Callable[[int], int]

    @classmethod
    def of(cls, program: CompiledModel, rows: int) -> Steps:
        """Time steps of up to `rows` rows, or find their times in the artifact cache; see `profile`."""
        found = profile(program, rows, steps=True, measured=False)
        return cls(CostModel.fit(found.steps), program.programs["step"].buckets)


def method_of(test: LoadTest, trace: Trace | None = None) -> Method | None:
    """The method of a load test as the simulator knows it; None for one that it does not model.

    It models blocks of one length, of which the first steps forward all rows, and the others the block. They commit the
    same number of tokens in every step, or follow a trace. Thresholds are not modelled, and neither are layers that
    forward unlike rows (`focus`, `dyllm`, `dllm_cache`, `maskkv`).
    """
    program, rule = test.optimized, test.decoding.rule
    spec, plan, kv = program.spec, program.recipe.plan, program.recipe.kv
    if plan is None or not isinstance(plan.region, Block) or not isinstance(plan.schedule, Counted):
        return None
    if trace is None and not isinstance(rule, FixedSteps):
        return None
    commits = math.ceil(spec.block_length / rule.steps) if isinstance(rule, FixedSteps) else 1
    return Method(
        block=spec.block_length,
        refresh_every=plan.schedule.every,
        full_steps=plan.schedule.full_steps,
        commits=commits,
        counts=None if trace is None else trace.counts,
        page=program.page_size,
        kept=1.0 if kv is None or kv.pairs else kv.ratio,
    )


def simulated(
    test: LoadTest,
    served: ServedLoad,
    steps: Steps,
    rate: float | None = None,
    *,
    trace: Trace | None = None,
    pattern: str = "poisson",
    clients: int = 0,
    seed: int = 0,
) -> Simulated | None:
    """Simulate a load that was measured; None for a method that the simulator does not model.

    Args:
        test, rate, pattern, clients, seed: as they were given to `LoadTest.run`.
        served: what it measured; its requests and the pages of its engine are taken.
        steps: times of the program's steps.
        trace: of the commits, if the decoding follows one.
    """
    method = method_of(test, trace)
    if method is None:
        return None
    requests = list(test.requests[: len(served.served)])
    if rate is not None:
        times = arrivals(pattern, rate, len(requests), seed)
        requests = [replace(request, arrival=time) for request, time in zip(requests, times, strict=True)]
    rows, slots = test.settings.max_batched_rows or 8192, test.settings.max_sequences or len(requests)
    return simulate(
        requests,
        Budgets(rows, slots, served.stats.pages),
        method,
        served.scheduler,
        steps.costs,
        clients=clients,
        pad=steps.pad,
        seed=seed,
        warm_up=test.warm_up,
        limit=test.limit,
    )

"""`dgraph.bisect`: the first pass of a recipe, or stage of its lowering, that changes results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from dgraph.cache.store import open_store
from dgraph.comparison.fault import Bisection, Check, Fault
from dgraph.comparison.pairing import names_of
from dgraph.comparison.ways import Lowered
from dgraph.compiler.arguments import arguments_of, check_options
from dgraph.compiler.base_graph import Weights, graph_of_model, quantising
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.compiler.phases import Rewritten, rewrite
from dgraph.errors import InputError
from dgraph.families import Model, resolve
from dgraph.ir.graph import Graph
from dgraph.lowering.regions import RegionCompiler
from dgraph.numerics.effects import at_identity
from dgraph.numerics.parting import check_tolerance
from dgraph.numerics.run import run
from dgraph.numerics.small_runs import Beside, Way, rewrites, small_runs
from dgraph.recipes import RECIPES, RecipeLike, build
from dgraph.runtime.graphs.pool import GraphPool
from dgraph.settings import DtypeLike

STAGES = {
    "op by op": "stages and regions, node by node",
    "regions": "compiled regions",
    "kernels": "kernels of calls",
    "graphs": "CUDA graphs",
}
"""Stages of lowering, in order, and what each adds."""


def bisect(
    model: CompiledModel | Graph | Model | str | Path,
    recipe: RecipeLike | None = None,
    *,
    tolerance: float | None = None,
    as_set: bool = False,
    backend: str = "inductor",
    dtype: DtypeLike = None,
    device: str | torch.device | None = None,
    weights: Weights = None,
    facts: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Bisection:
    """Find the first pass, or stage of lowering, after which results leave a tolerance.

        found = dgraph.bisect("tiny_sdar", "focus")
        print(found)
        assert not found, found.fault

    Each phase of the recipe runs on small steps before and after every pass, by the references of ops. Then it runs as
    lowering runs it, and each stage is compared with the one before:

    - "op by op": cut into stages and regions, which run node by node, and calls by the references of their ops;
    - "regions": the same with compiled regions;
    - "kernels": the same with the kernels of calls, which may absorb other calls;
    - "graphs": the same as CUDA graphs, on a GPU.

    Outputs and caches are compared. A pass that approximates is taken at its identity, where it must change nothing.

    Args:
        model: a name or folder, a `Model`, a captured graph, or an optimized model, which has its own recipe.
        recipe: default "focus".
        tolerance: as a share of the largest magnitude; 0: the same bits. None: `dgraph.numerics.TOLERANCES`, of the
            coarsest dtype.
        as_set: take every pass as it is set, so that the first one that approximates is found.
        backend: "inductor", or "eager" to compile no region.
        dtype, device, weights, facts: of a name or folder; see `optimize`.
        progress: called with what is being done, for display.
        options: the recipe's options.

    Returns:
        The checks in order, up to the first that failed; true if one did.

    Raises:
        InputError: settings beside a model that is made already, or a graph that is divided over ranks.
        PassError: a pass that approximates has no identity; or a pass applies nowhere.
        UnknownName: an unknown recipe or option.
    """
    tell = progress or (lambda what: None)
    check_tolerance(tolerance)
    compiler = RegionCompiler(backend, tell, open_store() if backend != "eager" else None)
    tell("capturing")
    captured, name = _captured(model, recipe, dict(options), dtype, device, weights, facts)
    if captured.sharding is not None:
        raise InputError("results are compared on one process: leave the ranks out.")
    if isinstance(model, CompiledModel):
        chosen = model.recipe
    else:
        chosen = build(RECIPES, "focus" if recipe is None else recipe, captured.spec, options)
    phases = rewrite(captured, chosen if as_set else at_identity(chosen))
    checks: list[Check] = []
    fault = None
    for check, fault in _checks(captured, phases, compiler, tolerance, tell):
        checks.append(check)
        if fault is not None:
            break
    return Bisection(f"{name} under {chosen.name}", as_set, tolerance, tuple(checks), fault)


def _captured(
    model: Any,
    recipe: RecipeLike | None,
    options: dict[str, Any],
    dtype: DtypeLike,
    device: str | torch.device | None,
    weights: Weights,
    facts: Mapping[str, Any] | None,
) -> tuple[Graph, str]:
    """The graph that passes start from, and the name of its model."""
    if isinstance(model, CompiledModel | Graph):
        given: dict[str, Any] = {"dtype": dtype, "device": device, "weights": weights, "facts": facts}
        given |= {"recipe": recipe, **options} if isinstance(model, CompiledModel) else {}
        for name, value in given.items():
            if value is not None:
                raise InputError(f"this model is made already, with its own {name}; leave {name} out.")
    if recipe is not None:
        check_options(recipe, options, arguments_of(bisect))
    if isinstance(model, CompiledModel):
        return model.captured, model.model.name
    if isinstance(model, Graph):
        return model, model.spec.family
    stored = quantising(weights)
    found = resolve(model, dtype, device, opened=stored is not None, **dict(facts or {}))
    return graph_of_model(found, open_store(), stored), found.name


def _checks(
    captured: Graph,
    phases: Mapping[str, Rewritten],
    compiler: RegionCompiler,
    tolerance: float | None,
    tell: Callable[[str], None],
) -> Iterator[tuple[Check, Fault | None]]:
    """Each check, with what it found wrong."""
    small, rounded = small_runs(captured, phases), {captured.spec.dtype}
    for phase, report, before, after in rewrites(captured, phases):
        tell(f"{phase}: checking {report.name}")
        found = small[phase].beside((before, run), (after, run), tolerance, rounded)
        known = {node.name for node in before.calls}
        made = [node for node in after.calls if node.meta["by"] == report.name and node.name not in known]
        yield _checked(phase, report.name, report.config, report.effect.value, found, after, made)
    eager = RegionCompiler("eager")
    ways = {"op by op": Lowered(eager, kernels=False), "regions": Lowered(compiler, kernels=False)}
    if compiler.backend == "eager":
        del ways["regions"]
    ways["kernels"] = Lowered(compiler, kernels=True)
    if captured.device.type == "cuda":
        ways["graphs"] = Lowered(compiler, kernels=True, pool=GraphPool())
    for phase, rewritten in phases.items():
        graph = rewritten.graph
        last: Way = run
        for name, way in ways.items():
            tell(f"{phase}: checking {name}")
            found = small[phase].beside((graph, last), (graph, way), tolerance, rounded)
            node = None if found.parting is None else found.parting.node
            together = () if node is None else way.run_with(graph, node)
            yield _checked(phase, name, STAGES[name], "lowering", found, graph, together)
            last = way


def _checked(
    phase: str, name: str, config: str, effect: str, found: Beside, graph: Graph, made: Sequence[Node]
) -> tuple[Check, Fault | None]:
    check = Check(phase, name, config, effect, found.compared, 0.0 if found.farthest is None else found.farthest.share)
    if found.parted is None:
        return check, None
    names, parting = names_of(graph), found.parting
    node = None if parting is None else str(names.get(parting.node, parting.node.name))
    apart = None if parting is None else parting.difference
    return check, Fault(check, found.where, found.parted, node, apart, tuple(names[n] for n in made if n in names))

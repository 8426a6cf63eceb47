"""Dump, diff and explain from whatever names a model: what the command line and `dgraph.dump`, `dgraph.diff` call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dgraph.api import CompiledModel, capture
from dgraph.cache.store import open_store
from dgraph.compiler.arguments import arguments_of, check_options, unknown_keyword
from dgraph.compiler.base_graph import Weights, graph_of_model, quantising
from dgraph.compiler.phases import graph_of_phase, rewrite
from dgraph.errors import InputError, UnknownName
from dgraph.families import resolve
from dgraph.families.weights import Shapes
from dgraph.ir.graph import Graph
from dgraph.lowering.buckets import Buckets
from dgraph.passes.base import Pass
from dgraph.passes.manager import run_passes
from dgraph.passes.shard_tensor_parallel import ShardTensorParallel
from dgraph.recipes import RECIPES, RecipeLike, build, options_of
from dgraph.text.diff import Diff
from dgraph.text.diff import diff as diff_graphs
from dgraph.text.explain import Explanation
from dgraph.text.explain import explain as explain_phases
from dgraph.text.writer import dump as dump_graph

CAPTURED = "captured"
"""Stands for "no recipe" where a recipe's name is asked for."""


def graph_of(
    model: Any,
    recipe: RecipeLike | None = None,
    phase: str = "step",
    after: str | None = None,
    options: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
    tp: int | None = None,
    weights: Weights = None,
) -> Graph:
    """The graph that a view is of.

    Args:
        model: a `Graph`, an `CompiledModel`, or anything that `capture` takes.
        recipe: None or "captured" for the graph as it is; else the recipe to rewrite it by.
        phase: of the recipe.
        after: the pass after which to look; None for the end of the phase.
        options: the recipe's options.
        facts: as for `capture`; a `Graph` and an `CompiledModel` have theirs.
        tp: ranks to divide the model over right after capture, of which one's graph is given; its weights have shapes
            and no values. An `CompiledModel` is divided or not. None: not divided.
        weights: format in which weights are stored, as for `optimize`; they have shapes and no values then.

    Raises:
        UnknownName: an unknown recipe, option, phase or pass.
        InputError: `after` or options without a recipe, or a recipe for a model that is optimized already.
        CheckpointError, CaptureError: the model cannot be loaded or captured.
    """
    options = dict(options or {})
    _names_pass(after)
    if isinstance(model, CompiledModel):
        if recipe is not None or options:
            raise InputError(f"this model is optimized by {model.recipe.name!r} already; leave recipe and options out.")
        _has_its_own(facts)
        _is_made(tp=tp, weights=weights)
        return model.graph(phase, after)
    if recipe is None or recipe == CAPTURED:
        if after is not None or options:
            raise InputError(f"{f'after={after!r}' if after else ', '.join(options)} needs a recipe.")
        return _captured(model, facts, tp, weights)
    _known(recipe)
    check_options(recipe, options, arguments_of(dump))
    graph = _captured(model, facts, tp, weights)
    return graph_of_phase(rewrite(graph, build(RECIPES, recipe, graph.spec, options)), phase, after)


def dump(
    model: Any,
    recipe: RecipeLike | None = None,
    phase: str = "step",
    after: str | None = None,
    layer: int | None = None,
    full: bool = False,
    facts: Mapping[str, Any] | None = None,
    tp: int | None = None,
    weights: Weights = None,
    **options: Any,
) -> str:
    """A graph as text: as captured, or after a recipe's passes. See `dgraph.text.dump`.

        print(dgraph.dump("tiny_sdar", recipe="focus", alpha=1.8))

    Args:
        model, recipe, phase, after, facts, tp, weights, options: which graph; see `graph_of`. As `after` names
            a pass, an option of that name has to come with a finished recipe.
        layer: only this layer.
        full: write every layer out instead of folding equal ones.
    """
    return dump_graph(graph_of(model, recipe, phase, after, options, facts, tp, weights), full, layer)


def diff(
    model: Any,
    from_: RecipeLike = "dense",
    to: RecipeLike = "focus",
    phase: str = "step",
    facts: Mapping[str, Any] | None = None,
    tp: int | None = None,
    weights: Weights = None,
    after: str | None = None,
    **options: Any,
) -> Diff:
    """Difference between a phase of two recipes; prints as text. See `dgraph.diff`.

        print(dgraph.diff("tiny_sdar", from_="dense", to="focus"))
        print(dgraph.diff("tiny_sdar", from_="captured", to="focus", after="PackRows"))

    Args:
        model: a `Graph`, or anything that `capture` takes.
        from_, to: recipes; "captured" for the graph without any.
        phase: of both.
        facts: as for `capture`.
        tp, weights: ranks to divide the model over first, and how its weights are stored, see `graph_of`.
        after: the pass after which to look at both; None for the end of the phase. An option of that name has to come
            with a finished recipe.
        options: each goes to every one of the two recipes that has it.
    """
    return diff_of(model, from_, to, phase, after, options, facts, tp, weights)


def diff_of(
    model: Any,
    from_: RecipeLike,
    to: RecipeLike,
    phase: str,
    after: str | None,
    options: Mapping[str, Any],
    facts: Mapping[str, Any] | None = None,
    tp: int | None = None,
    weights: Weights = None,
) -> Diff:
    """As `diff`, with the options as a mapping, which may have one of any name."""
    _names_pass(after)
    for recipe in (from_, to):
        _known(recipe)
    named = [r for r in (from_, to) if isinstance(r, str) and r != CAPTURED]
    for option in options:
        if not any(option in options_of(RECIPES[r]) for r in named):
            known = {o for r in named for o in options_of(RECIPES[r])}
            kind = f"option of {' or '.join(map(repr, named)) or 'a finished recipe'}"
            raise unknown_keyword(kind, option, known, arguments_of(diff))
    graph = _captured(model, facts, tp, weights)
    graphs, names = [], []
    place = phase if after is None else f"{phase} after {after}"
    for recipe in (from_, to):
        own = {k: v for k, v in options.items() if recipe in named and k in options_of(RECIPES[str(recipe)])}
        graphs.append(graph_of(graph, recipe, phase, None if recipe == CAPTURED else after, own))
        names.append(
            CAPTURED if recipe == CAPTURED else f"{recipe if isinstance(recipe, str) else recipe.name} {place}"
        )
    return diff_graphs(graphs[0], graphs[1], (names[0], names[1]))


def explain(
    model: Any,
    recipe: RecipeLike = "focus",
    buckets: str | Sequence[int] | None = None,
    facts: Mapping[str, Any] | None = None,
    weights: Weights = None,
    **options: Any,
) -> Explanation:
    """Explain a model after a recipe, without compiling it; prints as text. See `dgraph.explain`.

    Args:
        model: a `Graph`, an `CompiledModel`, or anything that `capture` takes.
        recipe, options: the recipe; an `CompiledModel` has its own.
        buckets: as for `optimize`; an `CompiledModel` has its own.
        facts: as for `capture`.
        weights: format in which weights are stored, as for `optimize`; an `CompiledModel` has its own.
    """
    if isinstance(model, CompiledModel):
        _has_its_own(facts)
        _is_made(weights=weights)
        return explain_phases(model.phases, model.recipe, next(iter(model.programs.values())).buckets)
    check_options(recipe, options, arguments_of(explain))
    rounding = None if buckets is None else Buckets.of(buckets)
    graph = _captured(model, facts, weights=weights)
    chosen = build(RECIPES, recipe, graph.spec, options)
    return explain_phases(rewrite(graph, chosen), chosen, rounding or Buckets.default(graph.device))


def _captured(model: Any, facts: Mapping[str, Any] | None, tp: int | None = None, weights: Weights = None) -> Graph:
    stored = quantising(weights)
    hints: Mapping[str, str] = {}
    if isinstance(model, Graph):
        _has_its_own(facts)
        graph = model
    elif tp is None and stored is None:
        graph = capture(model, **dict(facts or {}))
    else:
        found = resolve(model, opened=True, **dict(facts or {}))
        graph, hints = graph_of_model(found, open_store()), found.hints
    steps: list[Pass] = [] if stored is None else [replace(stored, weights=Shapes())]
    if tp is not None:
        steps.append(ShardTensorParallel(tp, hints=tuple(hints.items()), weights=Shapes()))
    if steps:
        graph = graph.copy()
        run_passes(graph, steps)
    return graph


def _names_pass(after: object) -> None:
    """Refuse an option `after` of a recipe where the name of a pass is meant."""
    if after is not None and not isinstance(after, str):
        raise InputError(
            f"after is the name of a pass here, got {after!r}; a recipe's own option `after` goes into the recipe: "
            f"recipe=dgraph.recipes.Vicinity(after={after!r})."
        )


def _has_its_own(facts: Mapping[str, Any] | None) -> None:
    """Refuse facts beside what has been captured with its own."""
    if facts:
        raise InputError(f"{', '.join(facts)} cannot be given beside a captured model; give it where it is captured.")


def _is_made(**given: object) -> None:
    """Refuse ranks and formats of weights for a model that is optimized already."""
    for name, value in given.items():
        if value is not None:
            raise InputError(f"this model is optimized already, with its own ranks and weights; leave {name} out.")


def _known(recipe: RecipeLike) -> None:
    """Refuse an unknown name before a model is loaded."""
    if isinstance(recipe, str) and recipe != CAPTURED and recipe not in RECIPES:
        raise UnknownName("recipe", recipe, [*RECIPES.names(), CAPTURED])

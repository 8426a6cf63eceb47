"""`dgraph.compare`: two sides on the same steps, and where their values part."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgraph.api import load, optimize
from dgraph.comparison.decode import Forward, Moment, follow
from dgraph.comparison.pairing import Pairing
from dgraph.comparison.report import Comparison, NodeDifference, StepDifference, TokenDifference
from dgraph.compiler.arguments import arguments_of, check_keywords
from dgraph.compiler.base_graph import Weights
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.compiler.phases import Rewritten
from dgraph.compiler.prompts import encode_prompts
from dgraph.errors import InputError
from dgraph.families import Model
from dgraph.ir.graph import Graph
from dgraph.lowering.regions import RegionCompiler
from dgraph.numerics.parting import STATISTICS, TOKENS, UNIT, check_tolerance, distance, in_one_dtype, shared
from dgraph.numerics.run import Run, run
from dgraph.numerics.steps import State, small_steps
from dgraph.recipes import RECIPES, Recipe, RecipeLike, check_recipe, options_of
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.request_checks import ids_of
from dgraph.settings import DtypeLike, dtype_name

PROMPT = "Sort these words: river stone cloud maple"
"""The prompt of a comparison that is given none."""
NEW_TOKENS = 32
"""Length of its response."""
STEPS = 8
"""Steps per block of a decode for which the caller gives no rule."""

_OWN = ("block_cache", "recommit")
"""Settings of a recipe that are none of a pass."""

Side = CompiledModel | Graph | Rewritten | Model | str | Path
Inputs = str | Sequence[str] | Sequence[Sequence[int]] | Tensor | Mapping[str, Tensor]


def compare(
    a: Side,
    b: Side | None = None,
    inputs: Inputs | None = None,
    *,
    recipe: RecipeLike = "dense",
    to: RecipeLike | None = None,
    dtype: DtypeLike = None,
    weights: Weights = None,
    backend: str | None = None,
    device: str | torch.device | None = None,
    facts: Mapping[str, Any] | None = None,
    tolerance: float | None = None,
    max_new_tokens: int = NEW_TOKENS,
    threshold: float | None = None,
    steps: int | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Comparison:
    """Run two sides on the same steps, and measure by step, layer and node where their values part.

        print(dgraph.compare("tiny_sdar", recipe="dense", to="focus"))
        print(dgraph.compare("tiny_sdar", recipe="focus", dtype="bf16"))
        print(dgraph.compare(optimized, other, ["Why is the sky blue?"]))
        print(dgraph.compare(graph_before, graph_after))

    Models decode: the first one freely, and then both in step, where the second commits the tokens of the first. Rows
    that one side leaves out are left out of the comparison. Values of a compiled side are those that leave its regions;
    by default regions run op by op, and every value is compared. Graphs run on small steps, by the references of ops.

    Args:
        a: the first side: an optimized model, a graph, a phase, or the name or folder of a model.
        b: the second side, of the same kind. None: `a` with one of `to`, dtype, weights, backend and device changed.
        inputs: of models, prompts as texts or as ids; of graphs, tensors by name for a single step.
        recipe: of both sides, where they are names.
        to: recipe of the second side.
        dtype, weights, backend, device: of the second side; see `optimize`. The first one has the dtype of `load`, its
            weights as they are, the backend "eager" and the device "cpu".
        facts: of both models; see `optimize`.
        tolerance: values are apart beyond this share of their largest magnitude; None: by dtype, the coarser of both
            (`dgraph.numerics.TOLERANCES`).
        max_new_tokens, threshold, steps: of the decode; see `Decoding`. Default: `STEPS` steps per block, so that a
            confident model takes several.
        progress: called with what is being done, for display.
        options: each goes to every one of the two recipes that has it.

    Raises:
        InputError: sides that cannot be compared, or nothing in which they differ.
        UnknownName: an unknown recipe, option or model.
    """
    tell = progress or (lambda what: None)
    check_tolerance(tolerance)
    changed = {"to": to, "dtype": dtype, "weights": weights, "backend": backend, "device": device}
    if isinstance(a, Graph | Rewritten) or isinstance(b, Graph | Rewritten):
        _leave_out(changed | options, "graphs and phases")
        graphs = _graph(a), _graph(b)
        names = ("first", "second")
        moments = _small(graphs, inputs)
    else:
        per_block = STEPS if steps is None and threshold is None else steps
        decoding = Decoding(max_new_tokens=max_new_tokens, threshold=threshold, steps=per_block)
        if isinstance(a, CompiledModel) or isinstance(b, CompiledModel):
            _leave_out(changed | options, "optimized models")
            sides = _optimized(a, "the first side"), _optimized(b, "the second side")
        else:
            sides = _made(a, b, recipe, changed, dict(facts or {}), options, tell)
        names = _names(*sides)
        tell(f"decoding with {names[0]}")
        moments = follow(sides, _ids(sides[0], inputs), decoding)
    pairings: dict[tuple[Graph, Graph], Pairing] = {}
    found, programs = [], dict[str, Graph]()
    for moment in moments:
        tell(f"comparing {moment.name}")
        programs[moment.sides[1].program] = moment.sides[1].run.graph
        found.append(_measured(moment, tolerance, pairings))
    if not found:
        raise InputError("the graphs run none of the steps; give inputs by name.")
    return Comparison(names, tolerance, tuple(found), programs)


def _measured(moment: Moment, tolerance: float | None, pairings: dict[tuple[Graph, Graph], Pairing]) -> StepDifference:
    """The distances of one forward."""
    before, after = moment.sides
    graphs = before.run.graph, after.run.graph
    if graphs not in pairings:
        pairings[graphs] = Pairing(*graphs)
    pairing, rounded = pairings[graphs], {graph.spec.dtype for graph in graphs}
    results = {node: name for name, node in graphs[1].results().items()}
    nodes = []
    for node, values in shared(before.run, after.run, pairing.same):
        name = results.get(node)
        if name in TOKENS or node not in pairing.named:  # the part of a result that is picked twice has no name
            continue
        least = UNIT if name in STATISTICS else 0.0
        found = distance(in_one_dtype(values), tolerance, rounded, least)
        nodes.append(NodeDifference(pairing.named[node], found))
    differently = [
        TokenDifference(key[0], key[1], (token, after.tokens.get(key, -1)))
        for key, token in moment.committed.items()
        if after.tokens.get(key, -1) != token
    ]
    programs, rows = (before.program, after.program), (before.rows, after.rows)
    return StepDifference(moment.name, programs, rows, tuple(nodes), len(moment.committed), tuple(differently))


# -- graphs ------------------------------------------------------------------------------------------------------


def _graph(side: Any) -> Graph:
    found = side.graph if isinstance(side, Rewritten) else side
    if not isinstance(found, Graph):
        raise InputError(
            f"a graph or phase is compared with another one, got {side!r}; give dgraph.capture(model), or the phase "
            f"of an optimized model."
        )
    return found


def _small(graphs: tuple[Graph, Graph], inputs: Inputs | None) -> Iterator[Moment]:
    """Small steps of two graphs, or the step with given inputs; each has caches and states of its own."""
    if inputs is not None:
        if not isinstance(inputs, Mapping):
            raise InputError(f"inputs of graphs are tensors by name, got {inputs!r}; prompts are for optimized models.")
        yield Moment("step 1", _both(graphs, ({name: t.clone() for name, t in inputs.items()} for _ in graphs)))
        return
    if graphs[0].spec.vocab != graphs[1].spec.vocab:
        raise InputError("the graphs are of models with other vocabularies, so no step is the same for both.")
    states = [State() for _ in graphs]
    for number, step in enumerate(small_steps(graphs[0].spec, graphs[0].device)):
        given = [state.inputs(graph, step) for state, graph in zip(states, graphs, strict=True)]
        if given[0] is None or given[1] is None:
            continue
        moment = Moment(f"step {number + 1}", _both(graphs, (each for each in given if each is not None)))
        for state, side in zip(states, moment.sides, strict=True):
            made = side.run
            state.take(made.graph, {name: made.values[node] for name, node in made.graph.results().items()})
        yield moment


def _both(graphs: tuple[Graph, Graph], inputs: Any) -> tuple[Forward, Forward]:
    runs: list[Run] = []
    for graph, given in zip(graphs, inputs, strict=True):
        missing = [name for name in graph.inputs if name not in given]
        if missing:
            raise InputError(f"input {missing[0]!r} is missing; the graph reads {', '.join(graph.inputs)}.")
        runs.append(run(graph, given, keep=True))
    first, second = (Forward("graph", made, (_rows(made),)) for made in runs)
    return first, second


def _rows(made: Run) -> int:
    """Rows of a step."""
    counts = (made.inputs[name].shape[0] for name, spec in made.graph.inputs.items() if spec.per == "row")
    return next(counts, 0)


# -- models ------------------------------------------------------------------------------------------------------


def _optimized(side: Any, what: str) -> CompiledModel:
    if not isinstance(side, CompiledModel):
        raise InputError(
            f"an optimized model is compared with another one, but {what} is {side!r}; give dgraph.optimize(...) for "
            f"both, or two names."
        )
    return side


def _leave_out(given: Mapping[str, Any], what: str) -> None:
    """Refuse settings of sides that are made already."""
    for name, value in given.items():
        if value is not None:
            raise InputError(f"{what} are compared as they are; leave {name} out, or give the name of a model.")


def _made(
    a: Any,
    b: Any,
    recipe: RecipeLike,
    changed: Mapping[str, Any],
    facts: dict[str, Any],
    options: Mapping[str, Any],
    tell: Callable[[str], None],
) -> tuple[CompiledModel, CompiledModel]:
    """Both sides from names of models."""
    to = changed["to"]
    recipes = recipe, recipe if to is None else to
    if b is None and all(value is None for value in changed.values()):
        raise InputError(
            "both sides would be the same; give another recipe (to), dtype, weights, backend or device for the second."
        )
    RegionCompiler(changed["backend"] or "eager")  # refuses an unknown one
    for each in recipes:
        check_recipe(RECIPES, each, {})
    known = [options_of(RECIPES[each]) if isinstance(each, str) else {} for each in recipes]
    check_keywords("option of these recipes", options, {*known[0], *known[1]}, arguments_of(compare))
    own = [{name: value for name, value in options.items() if name in each} for each in known]
    other: Any = a if b is None else b
    placed = {name: changed[name] for name in ("dtype", "device", "weights") if changed[name] is not None}
    if isinstance(other, Model) and placed.keys() & {"dtype", "device"}:
        raise InputError(f"{other.name} is loaded already, with its own dtype and device; give its name or folder.")
    first = a if isinstance(a, Model) else load(a, **facts)
    one = optimize(first, recipes[0], backend="eager", progress=tell, **own[0])
    if b is None and not placed:
        other, facts = first, {}
    two = optimize(
        other, recipes[1], backend=changed["backend"] or "eager", facts=facts, progress=tell, **placed, **own[1]
    )
    return one, two


def _ids(side: CompiledModel, inputs: Inputs | None) -> list[list[int]]:
    """The prompts of a comparison."""
    spec, tokenizer = side.spec, side.model.tokenizer
    if isinstance(inputs, Mapping):
        raise InputError("inputs of optimized models are prompts, as texts or ids; tensors by name are for graphs.")
    if inputs is None and tokenizer is None:
        taken = {spec.mask_id, *spec.eos_ids}
        return [[token for token in range(spec.vocab) if token not in taken][: spec.block_length + 3]]
    texts = [PROMPT] if inputs is None else [inputs] if isinstance(inputs, str) else inputs
    if isinstance(texts, Tensor) or not all(isinstance(text, str) for text in texts):
        return ids_of(texts)  # type: ignore[arg-type]
    return encode_prompts(texts, tokenizer, side.model.name)  # type: ignore[arg-type]


def _names(a: CompiledModel, b: CompiledModel) -> tuple[str, str]:
    """Names of two sides: model and recipe, and what else differs."""

    def facts(side: CompiledModel, other: CompiledModel) -> list[str]:
        stored = re.search(r"QuantizeWeights\(format='(\w+)'", " ".join(side.captured.history))
        how = f"weights in {stored[1]}" if stored else "weights as they are"
        recipe = " ".join([side.recipe.name, *_settings(side.recipe, other.recipe)])
        dtype, place = dtype_name(side.spec.dtype), str(side.captured.device)
        return [side.model.name, recipe, dtype, how, side.compiler.backend, place]

    both = facts(a, b), facts(b, a)
    shown = [n for n, (x, y) in enumerate(zip(*both, strict=True)) if n < 2 or x != y]
    first, second = (" ".join(each[n] for n in shown) for each in both)
    return first, second


def _settings(recipe: Recipe, other: Recipe) -> list[str]:
    """Settings in which a recipe differs from another one of the same name."""
    if recipe.name != other.name:
        return []
    found = [f"{name}={getattr(recipe, name)}" for name in _OWN if getattr(recipe, name) != getattr(other, name)]
    passes = ([step for phase in each.phases for step in phase.passes] for each in (recipe, other))
    for step, theirs in zip(*passes, strict=False):
        if type(step) is type(theirs):
            named = (field.name for field in fields(step) if field.compare)
            found += [f"{n}={getattr(step, n)}" for n in named if getattr(step, n) != getattr(theirs, n)]
    return list(dict.fromkeys(found))

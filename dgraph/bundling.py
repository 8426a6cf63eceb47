"""A step of a generation in a bundle, and that step run again and compared with its record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgraph.api import load, optimize
from dgraph.bundles import Bundle, Recorder, Stopped, live_outputs
from dgraph.bundles.file import fingerprint, versions
from dgraph.compiler.arguments import arguments_of, check_keywords
from dgraph.compiler.base_graph import Weights
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.compiler.prompts import Prompts
from dgraph.errors import FormatError, InputError
from dgraph.families import embedded
from dgraph.ir.graph import Graph
from dgraph.ir.stored_graph import to_data
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.regions import RegionCompiler
from dgraph.numerics.parting import difference
from dgraph.recipes import Recipe
from dgraph.runtime.decoding import Decoding
from dgraph.spec import FACTS
from dgraph.text.columns import table
from dgraph.types.card import Card, Described, counted

EQUAL = "equal"
SEED = 0
"""Seed of weights that are drawn in place of those that no one gave."""


@dataclass(frozen=True, repr=False, eq=False)
class Replay(Described):
    """Comparison of a step with its record; prints as text.

    Attributes:
        bundle: the record.
        outputs: by name of each output, its type, and "equal", "equal within rounding: ..." or the difference.
        raised: the exception of this run; None without one.
        same: True if outputs are equal within rounding (`dgraph.numerics.TOLERANCES`), or the same exception came.
        notes: differences of the two runs that may explain others: weights, graph, versions.
    """

    bundle: Bundle
    outputs: Mapping[str, tuple[str, str]]
    raised: Exception | None
    same: bool
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        raised = None if self.raised is None else _said(self.raised)
        return {
            "bundle": self.bundle.title,
            "same": self.same,
            "outputs": {name: {"type": kind, "result": result} for name, (kind, result) in self.outputs.items()},
            "recorded exception": None if self.bundle.error is None else _recorded(self.bundle.error),
            "exception": raised,
            "notes": list(self.notes),
        }

    def card(self) -> Card:
        """See `Described`."""
        facts = [("same", str(self.same)), *((name, result) for name, (_, result) in self.outputs.items())]
        return Card(f"Replay of {self.bundle.title}", (*facts, ("use", "print(replay)")), str(self))

    def __str__(self) -> str:
        lines = [self.bundle.title, *(f"note: {note}" for note in self.notes)]
        if self.outputs:
            rows = [(name, kind, result) for name, (kind, result) in self.outputs.items()]
            lines += table(("output", "type", "against the record"), rows)
        if self.bundle.error is not None:
            lines.append(f"recorded  {_recorded(self.bundle.error)}")
        if self.raised is not None or self.bundle.error is not None:
            lines.append(f"raised    {'nothing' if self.raised is None else _said(self.raised)}")
        return "\n".join([*lines, "the same" if self.same else "not the same"]) + "\n"


def bundle(
    optimized: CompiledModel,
    path: str | Path,
    prompts: Prompts | None = None,
    decoding: Decoding | None = None,
    *,
    step: int | None = None,
    weights: bool = False,
    text: bool = False,
    input_ids: Sequence[Sequence[int]] | Tensor | None = None,
    canvas: Sequence[int | None] | Sequence[Sequence[int | None] | None] | None = None,
    max_batch: int | None = None,
    **settings: Any,
) -> Bundle:
    """Write a file with what a bug report needs of one step; `dgraph.replay` runs that again.

        dgraph.bundle(optimized, "step.zip", "Sort these words: river stone", step=3)

    It has the token ids of prompts and of fixed tokens, and the keys and values that belong to these; no text.

    Args:
        optimized: the compiled model, whole on one device.
        path: of the file, a zip.
        prompts, decoding, input_ids, canvas, max_batch, settings: as for `CompiledModel.generate`.
        step: number of the step, from 0. A step that fails before it is taken in its place. None: the one that fails,
            else the last one.
        weights: put the weights in, as the program reads them; without them a replay needs the model.
        text: put the prompts and the texts of `stop` in.

    Raises:
        InputError: what `generate` refuses, no such step, ranks that share the model, or a file that cannot be written.
        FormatError: a graph that has no form in a file.
    """
    check_keywords("setting of Decoding", settings, arguments_of(Decoding), arguments_of(bundle))
    if optimized.captured.sharding is not None:
        raise InputError("a bundle has the inputs of one rank, which does not run alone; use one device.")
    if step is not None and (type(step) is not int or step < 0):
        raise InputError(f"step must be the number of a step, from 0, got {step!r}.")
    asked = optimized.asked(prompts, optimized.decoding_of(decoding, settings), input_ids, canvas, max_batch)
    recorder, failed = Recorder(keep=True, last=step), None
    try:
        optimized.decode(asked, recorder)
    except Stopped:
        pass
    except Exception as error:
        if recorder.call is None:  # nothing has run
            raise
        failed = error
    if recorder.call is None or (failed is None and step is not None and recorder.steps <= step):
        raise InputError(f"decoding these prompts takes {counted(recorder.steps, 'step')}, so there is no step {step}.")
    made = optimized.bundle_of(asked, recorder, failed, weights, text)
    made.write(path)
    return made


def replay(
    path: str | Path,
    model: Any = None,
    *,
    backend: str | None = None,
    device: str | torch.device | None = None,
    weights: Weights = None,
) -> Replay:
    """Run the step of a bundle again, and compare.

        print(dgraph.replay("step.zip"))

    A model that is given, or an embedded one of the recorded name, is rewritten by the recorded recipe: passes and
    kernels are those of today. Else the recorded graph runs on the weights of the bundle. Without any weights an
    exception of a program is looked for on random ones. No code of the file is run.

    Args:
        path: of the bundle.
        model: as for `dgraph.optimize`.
        backend, device: instead of the recorded ones.
        weights: storage of the model's weights, as for `dgraph.optimize`.

    Raises:
        FormatError: a file that is no bundle, or is damaged; or no weights to run with.
        InputError: a file that cannot be read.
        UnknownName: a recipe with a pass that is not here.
    """
    bundle = Bundle.read(path)
    where = device or bundle.graph.get("device", "cpu")
    if str(where).startswith("cuda") and device is None and not torch.cuda.is_available():
        where = "cpu"
    notes = _versions(bundle, torch.device(where))
    how = bundle.facts["compilation"]
    chosen = backend or how["backend"]
    if model is None and bundle.weights is None:
        name = bundle.facts["model"]["name"]
        model = name if name in embedded() else None  # a file from elsewhere may not say what is fetched
    whole = bundle.error is not None and bundle.error["in"] == "loop"
    optimized = None
    if model is not None:
        optimized = _optimized(bundle, model, where, {**how, "backend": chosen}, weights)
        notes += _unlike(bundle, optimized)
    elif whole or (bundle.weights is None and bundle.error is None):
        raise FormatError(
            f"{path} does not have the weights of {bundle.facts['model']['name']}, without which there is nothing to "
            f"compare; give the model (--model on the command line)."
        )
    if whole:
        assert optimized is not None
        return _decoded(bundle, optimized, notes)
    if optimized is not None:
        step = bundle.facts["step"]
        program = optimized.program(step["phase"], step["variant"], _decoding(bundle) if step["variant"] else None)
    else:
        graph = bundle.stored_graph()
        if bundle.weights is None:
            notes += ("weights are drawn at random; none are in the bundle, and no model was given",)
            _draw(graph)
        program = LoweredProgram(graph, RegionCompiler(chosen), Buckets.of(how["buckets"]))
    return _run(bundle, program, notes)


def _optimized(
    bundle: Bundle, model: Any, device: str | torch.device, how: Mapping[str, Any], weights: Weights
) -> CompiledModel:
    """A model under the recorded recipe, with the recorded facts."""
    spec = bundle.graph.get("whole") or bundle.graph["spec"]
    if isinstance(model, (str, Path)):
        lists = {name: tuple(value) for name, value in spec.items() if isinstance(value, list)}
        facts = {name: value for name, value in {**spec, **lists}.items() if name in FACTS and name != "adapter"}
        model = load(model, spec["dtype"], device, weights is not None, **facts)
    settings = {name: how[name] for name in ("backend", "buckets", "graphs")}
    return optimize(model, Recipe.from_json(bundle.facts["recipe"]), weights=weights, **settings)


def _run(bundle: Bundle, program: LoweredProgram, notes: tuple[str, ...]) -> Replay:
    """Run a program on the recorded inputs."""
    device = program.graph.device
    inputs = {}
    for name, spec in program.inputs.items():
        if name not in bundle.inputs:
            raise FormatError(f"the program of today reads {name!r}, which the bundle does not have; record it anew.")
        value = bundle.inputs[name]
        inputs[name] = spec.empty(value.shape, device).copy_(value)
    try:
        found = live_outputs(program, program(inputs, bundle.facts["step"]["rows"]))
    except Exception as error:
        return Replay(bundle, {}, error, _reproduced(bundle, error), notes)
    recorded = bundle.outputs or {}
    outputs = {name: _compared(program.graph, recorded.get(name), found.get(name)) for name in {**found, **recorded}}
    same = bundle.error is None and all(result.startswith(EQUAL) for _, result in outputs.values())
    return Replay(bundle, outputs if bundle.error is None else {}, None, same, notes)


def _decoded(bundle: Bundle, optimized: CompiledModel, notes: tuple[str, ...]) -> Replay:
    """Decode the recorded prompts, for an exception that no program raised."""
    asked = bundle.facts["request"]
    try:
        prompts = asked["input_ids"], asked.get("canvas"), asked.get("max_batch")
        optimized.decode(optimized.asked(None, _decoding(bundle), *prompts), Recorder())
    except Exception as error:
        return Replay(bundle, {}, error, _reproduced(bundle, error), notes)
    return Replay(bundle, {}, None, False, notes)


def _decoding(bundle: Bundle) -> Decoding:
    asked = bundle.facts["request"]
    if "decoding" not in asked:
        raise FormatError(f"the settings of decoding are not in this bundle: {asked.get('no decoding')}")
    return Decoding.from_json(asked["decoding"])


def _compared(graph: Graph, before: Tensor | None, after: Tensor | None) -> tuple[str, str]:
    """Type of an output, and how it compares with its record."""
    if before is None or after is None:
        return "", "is new" if before is None else "is gone"
    kind = graph.symbols.type_text(after)
    before = before.to(after.device)
    exact, beyond = difference((before, after), 0.0), difference((before, after), None)
    if exact is None:
        return kind, EQUAL
    return kind, str(beyond) if beyond is not None else f"{EQUAL} within rounding: {exact}"


def _reproduced(bundle: Bundle, error: Exception) -> bool:
    return bundle.error is not None and _recorded(bundle.error) == _said(error)


def _recorded(error: Mapping[str, Any]) -> str:
    return f"{error['type']}: {error['message']}"


def _said(error: Exception) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}: {error}"


def _unlike(bundle: Bundle, optimized: CompiledModel) -> tuple[str, ...]:
    """Notes about a model that is not the recorded one."""
    notes: tuple[str, ...] = ()
    if list(optimized.captured.history) != (passes := bundle.facts["model"]["passes"]):
        notes += (f"the recorded model came after {', '.join(passes) or 'no pass'}; --weights stores weights anew",)
    if fingerprint(optimized.captured) != bundle.facts["model"]["weights"]:
        notes += ("the weights are not those that were recorded",)
    step = bundle.facts["step"]
    phases = optimized.phases
    if not step["variant"] and step["phase"] in phases:
        now, then = to_data(phases[step["phase"]].graph), bundle.graph
        if [_meaning(node) for node in now["nodes"]] != [_meaning(node) for node in then["nodes"]]:
            notes += ("the passes of today make another graph than the recorded one",)
    return notes


def _meaning(node: Mapping[str, Any]) -> dict[str, Any]:
    """A node without the tags that change no number."""
    return {name: value for name, value in node.items() if name != "meta"}


def _versions(bundle: Bundle, device: torch.device) -> tuple[str, ...]:
    then = bundle.facts["environment"]
    now = versions(device)
    differ = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return tuple(
        f"{name} is {now.get(name, 'not known')}, and was {then.get(name, 'not known')}"
        if len(f"{now.get(name)}{then.get(name)}") < 100
        else f"another value of {name}"
        for name in differ
    )


def _draw(graph: Graph) -> None:
    """Give a graph random weights of small magnitude; whole numbers stay 0."""
    draw = torch.Generator().manual_seed(SEED)
    for name, tensor in graph.tensors.items():
        if name not in graph.own:
            drawn = torch.randn(tensor.shape, generator=draw) * float(tensor.is_floating_point()) / 50
            graph.tensors[name] = drawn.to(tensor.device, tensor.dtype)

"""The file of a bundle: a zip of JSON and safetensors, which holds no code.

- bundle.json: model, recipe, compilation, request, step, exception, versions
- graph.json: the program's graph, as `Graph.save` writes it
- inputs.safetensors: the inputs of the step as they were before it
- outputs.safetensors: the live rows of its outputs, if it ended
- weights.safetensors: the graph's weights, if they were asked for
"""

from __future__ import annotations

import hashlib
import json
import traceback
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as tensor_bytes
from torch import Tensor

from dgraph.bundles.recorder import RecordedCall
from dgraph.cache.key import environment
from dgraph.errors import FormatError, InputError
from dgraph.ir.graph import Graph
from dgraph.ir.graph_file import graph_text, pack_weights, parse_safetensors, read_graph_text, unpack_weights
from dgraph.ir.stored_graph import check_version, damaged, from_data, to_data
from dgraph.ir.verifier import verify
from dgraph.recipes import Recipe
from dgraph.runtime.decoding import Decoding
from dgraph.types.card import Card, Described
from dgraph.types.texts import package_path, parse_json

KIND = "dgraph bundle"
"""The entry with the version of the form."""
VERSION = 1
_FACTS, _GRAPH, _INPUTS, _OUTPUTS, _WEIGHTS = (
    "bundle.json",
    "graph.json",
    "inputs.safetensors",
    "outputs.safetensors",
    "weights.safetensors",
)
_ENTRIES = {
    "model": ("name", "weights", "passes"),
    "recipe": ("recipe",),
    "compilation": ("backend", "buckets", "graphs"),
    "request": ("input_ids",),
    "step": ("phase", "variant", "number", "rows"),
    "error": ("type", "message", "in", "frames"),
    "environment": (),
}
"""Entries of bundle.json, and of each; "error" may be null."""
SAMPLE = 64
"""Elements of each weight by which two models are told apart."""


@dataclass(frozen=True)
class Asked:
    """One call of `generate`.

    Attributes:
        ids: token ids per prompt.
        decoding: the settings.
        canvases: fixed tokens per response; None without any.
        max_batch: prompts at a time; None for all.
        texts: the prompts as they were given; None where ids were.
    """

    ids: Sequence[Sequence[int]]
    decoding: Decoding
    canvases: Sequence[Sequence[int | None] | None] | None = None
    max_batch: int | None = None
    texts: Any = None

    def to_json(self, text: bool) -> dict[str, Any]:
        """Plain values; without the caller's texts, prompts and stops, unless `text`."""
        found: dict[str, Any] = {"input_ids": [list(ids) for ids in self.ids], "seed": self.decoding.seed}
        try:
            found["decoding"] = (self.decoding if text else replace(self.decoding, stop=())).to_json()
        except InputError as error:
            found["no decoding"] = str(error)
        if self.canvases is not None:
            found["canvas"] = [None if canvas is None else list(canvas) for canvas in self.canvases]
        if self.max_batch is not None:
            found["max_batch"] = self.max_batch
        if text and self.texts is not None:
            found["prompts"] = self.texts
        return found


@dataclass(frozen=True, repr=False, eq=False)
class Bundle(Described):
    """Contents of a bundle.

    Attributes:
        facts: everything but graph and tensors, as plain values.
        graph: data of the program's graph (`dgraph.ir.stored_graph`).
        inputs: of the step, by name.
        outputs: of the step, by name; None if it did not end.
        weights: of the graph, in the form of safetensors; None if they were left out.
    """

    facts: Mapping[str, Any]
    graph: Mapping[str, Any]
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor] | None
    weights: bytes | None = None

    @property
    def title(self) -> str:
        """The step in a phrase."""
        model, recipe, step = self.facts["model"]["name"], self.facts["recipe"]["recipe"], self.facts["step"]
        where = f"prefill before step {step['number']}" if step["phase"] == "prefill" else f"step {step['number']}"
        return f"{where} of {model} under {recipe} ({step['phase']}, {step['rows']} rows)"

    @property
    def error(self) -> Mapping[str, Any] | None:
        """The exception: its "type", "message" and "frames", and if it came from the "program" or the "loop"."""
        found: Mapping[str, Any] | None = self.facts["error"]
        return found

    def card(self) -> Card:
        """See `Described`."""
        error = f"{self.error['type']}: {self.error['message']}" if self.error else "none"
        facts = [("exception", error), ("inputs", ", ".join(self.inputs)), ("outputs", ", ".join(self.outputs or ()))]
        facts += [("weights", "inside" if self.weights is not None else "left out"), ("use", "write(path)")]
        return Card(f"Bundle of {self.title}", facts)

    def write(self, path: str | Path) -> None:
        """Write the file.

        Raises:
            InputError: it cannot be written.
        """
        partial = Path(f"{path}.part")
        try:
            with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as made:
                made.writestr(_FACTS, json.dumps(self.facts, indent=1))
                made.writestr(_GRAPH, graph_text(self.graph))
                for name, tensors in ((_INPUTS, self.inputs), (_OUTPUTS, self.outputs)):
                    if tensors is not None:
                        made.writestr(name, tensor_bytes({n: value.contiguous() for n, value in tensors.items()}))
                if self.weights is not None:
                    made.writestr(_WEIGHTS, self.weights, zipfile.ZIP_STORED)
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise InputError(f"{path} cannot be written: {error.strerror}.") from None

    @classmethod
    def read(cls, path: str | Path) -> Bundle:
        """Read a file that `write` wrote; nothing of it is executed.

        Raises:
            InputError: the file cannot be read.
            FormatError: it is no bundle, is damaged, or is of another version.
        """
        try:
            with zipfile.ZipFile(path) as file:
                members = {name: file.read(name) for name in file.namelist()}
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}.") from None
        except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, RuntimeError) as error:
            raise FormatError(f"{path} is no bundle, or a damaged one: {error}.") from None
        with damaged("bundle"):
            facts = parse_json(members[_FACTS].decode())
            check_version(facts, KIND, VERSION, "bundle")
            outputs = members.get(_OUTPUTS)
            found = cls(
                facts,
                read_graph_text(members[_GRAPH].decode()),
                parse_safetensors(members[_INPUTS], "inputs of this bundle"),
                None if outputs is None else parse_safetensors(outputs, "outputs of this bundle"),
                members.get(_WEIGHTS),
            )
            for name, entries in _ENTRIES.items():
                for entry in entries if facts[name] is not None or name != "error" else ():
                    _ = facts[name][entry]
        return found

    def stored_graph(self) -> Graph:
        """The verified graph with the weights of the bundle, or stand-ins for them.

        Raises:
            FormatError: it is damaged, or this dgraph lacks an op.
            VerifyError: it breaks a rule.
        """
        found = () if self.weights is None else unpack_weights(self.graph, self.weights)
        graph = from_data(self.graph, *found)
        verify(graph, by="the bundle")
        return graph


def bundle_of(
    call: RecordedCall,
    asked: Asked,
    *,
    model: str,
    recipe: Recipe,
    captured: Graph,
    compilation: Mapping[str, Any],
    error: Exception | None = None,
    weights: bool = False,
    text: bool = False,
) -> Bundle:
    """Make a bundle of a call.

    Args:
        call: with its inputs.
        asked: the call of `generate` that it was made in.
        model: the model's name; a folder's without its path.
        recipe: the recipe.
        captured: the graph that the recipe began with, by whose weights models are told apart.
        compilation: the settings that a program's results depend on.
        error: exception that the step raised, in the call or after it.
        weights: put the weights of the graph in.
        text: put the caller's texts in.
    """
    graph = call.graph
    if graph.spec.adapter:
        graph = graph.copy()
        graph.spec = replace(graph.spec, adapter=Path(graph.spec.adapter).name)
    data, inside = to_data(graph), None
    if weights:
        inside, data["tied"] = pack_weights(graph)
    facts = {
        KIND: VERSION,
        "model": {"name": model, "weights": fingerprint(captured), "passes": list(captured.history)},
        "recipe": recipe.to_json(),
        "compilation": dict(compilation),
        "request": asked.to_json(text),
        "step": {"phase": call.phase, "variant": call.variant, "number": call.number, "rows": call.rows},
        "error": None if error is None else error_data(error, call.failed),
        "environment": versions(graph.device),
    }
    return Bundle(facts, data, call.inputs, None if call.failed else call.outputs, inside)


def versions(device: torch.device) -> dict[str, str]:
    """Versions and facts of a device that a run depends on, besides model and settings."""
    return {**{name: version(name) for name in ("dgraph", "transformers")}, **environment(device)}


def error_data(error: Exception, in_program: bool) -> dict[str, Any]:
    """An exception as plain values: no line of a source is in it, and paths begin at their package."""
    frames = traceback.extract_tb(error.__traceback__)
    return {
        "type": f"{type(error).__module__}.{type(error).__qualname__}",
        "message": str(error),
        "in": "program" if in_program else "loop",
        "frames": [f"{package_path(frame.filename)}:{frame.lineno} {frame.name}" for frame in frames],
    }


def fingerprint(graph: Graph) -> str:
    """SHA-256 over names, types and the first elements of all weights, by which a report knows a model again."""
    found = hashlib.sha256()
    for name, tensor in sorted(graph.tensors.items()):
        some = tensor.detach().flatten()[:SAMPLE] if tensor.is_contiguous() else tensor.detach()[:1].flatten()[:SAMPLE]
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(some.contiguous().view(torch.uint8).cpu().numpy().tobytes() if some.numel() else b"")
    return found.hexdigest()

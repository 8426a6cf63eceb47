"""A captured graph as plain data, and its place in the artifact cache: capture is the longest part of a warm start.

The stored form is the captured forward in canonical form: ops by name, arguments, layers, roles. It has no code, no
weights and no types. A graph that is read back is typed anew from the model's own tensors, and verified like any other.
"""

from __future__ import annotations

import inspect
import json
import math
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from dgraph.cache.key import Key, graph_key
from dgraph.cache.store import Store
from dgraph.errors import DgraphError
from dgraph.families.weights import WeightSource, weights_of
from dgraph.frontend.capture import capture_module
from dgraph.ir.graph import Graph
from dgraph.ir.stored_weights import as_stored
from dgraph.ir.verifier import verify
from dgraph.plugins import load_ops
from dgraph.private.torch import OpOverload
from dgraph.spec import ModelSpec
from dgraph.types.nodes import args_of
from dgraph.types.shapes import DTYPES, InputSpec

FILE = "graph.json"
_DTYPES = {text: dtype for dtype, text in DTYPES.items()}
_OPERATORS: dict[str, Callable[..., Any]] = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (operator, math)
    for name in dir(module)
    if callable(getattr(module, name)) and not name.startswith("_")
}


READ_LATER = {
    "attention_similarity",
    "block_length",
    "encoding",
    "eos_ids",
    "image_id",
    "layer_importance",
    "mask_id",
    "next_token",
    "noise",
    "pad_id",
}
"""Facts of a spec that recipes and decode loops read, and no capture does."""


class NotPlain(Exception):
    """A graph holds something that has no plain form."""


def capture_or_load(
    module: nn.Module,
    spec: ModelSpec,
    prefix: str = "",
    store: Store | None = None,
    weights: WeightSource | None = None,
) -> tuple[Graph, bool]:
    """A module's verified graph, from the store if the same forward was captured before.

    Args:
        module, spec, prefix: as for `capture_module`.
        store: cache of graphs. Only a module with an attribute `identity` is looked up, and stored. This string
            says everything its forward depends on but its tensors.
        weights: weights of a model whose parameters are not read, see `dgraph.families.Model`. Weights that are stored
            quantised are read as they are stored.

    Returns:
        The graph, and True if it was captured just now.

    Raises:
        CaptureError: as `capture_module`.
        VerifyError: the captured graph breaks a rule.
    """
    graph, made = _captured_or_loaded(module, spec, prefix, store)
    if weights is not None and weights.formats:
        as_stored(graph, weights)
        verify(graph)
    return graph, made


def _captured_or_loaded(module: nn.Module, spec: ModelSpec, prefix: str, store: Store | None) -> tuple[Graph, bool]:
    identity = getattr(module, "identity", "")
    if store is None or not identity:
        graph = capture_module(module, spec, prefix)
        verify(graph)
        return graph, True
    key = key_of(module, identity, spec)
    found = store.find(key)
    if found is not None:
        try:
            graph = from_data(json.loads(found.files[FILE]), spec, weights_of(module, prefix))
            verify(graph)
            return graph, False
        except (DgraphError, NotPlain, KeyError, ValueError) as error:
            store.reject(key.digest, f"it does not load ({str(error).partition(chr(10))[0]})")
    with store.making(key.digest):
        graph = capture_module(module, spec, prefix)
        verify(graph)
        try:
            data = to_data(graph)
            from_data(data, spec, weights_of(module, prefix))  # proves now that it can be read back
        except (DgraphError, NotPlain) as error:
            store.warn(f"a captured graph cannot be stored in the artifact cache {store.root}: {error}.")
        else:
            store.put(key, {FILE: json.dumps(data, separators=(",", ":")).encode()})
    return graph, True


def key_of(module: nn.Module, identity: str, spec: ModelSpec) -> Key:
    """The key of a captured graph; facts of the spec that recipes alone read are no part of it."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    said = {name: value for name, value in spec.to_json().items() if name not in READ_LATER}
    facts = {
        "identity": identity,
        "spec": json.dumps(said, sort_keys=True),
    }
    return graph_key(facts, device, Path(inspect.getfile(type(module))))


def to_data(graph: Graph) -> dict[str, Any]:
    """A captured graph as values that JSON knows.

    Raises:
        NotPlain: an op, an argument or a weight has no such form.
    """
    numbers: dict[Node, int] = {}
    weights, inputs, calls = [], [], []
    for node in graph.fx.nodes:
        numbers[node] = len(numbers)
        if node.op == "placeholder" and "weight" in node.meta:
            weights.append(node.meta["weight"])
        elif node.op == "placeholder":
            spec = graph.inputs[node.meta["input"]]
            inputs.append([spec.name, DTYPES[spec.dtype], list(spec.shape)])
        elif node.op == "call_function":
            kwargs = {name: _plain(value, numbers) for name, value in node.kwargs.items()}
            tags = [node.meta.get("layer"), node.meta.get("role", ""), node.meta.get("source", "")]
            calls.append([_name(node.target), _plain(list(args_of(node)), numbers), kwargs, tags])
    outputs = {name: numbers[node] for name, node in graph.results().items()}
    return {"weights": weights, "inputs": inputs, "calls": calls, "outputs": outputs}


def from_data(data: Mapping[str, Any], spec: ModelSpec, tensors: Mapping[str, Tensor]) -> Graph:
    """The graph that `to_data` described, over the tensors of a model.

    Raises:
        NotPlain: the data names what does not exist.
        VerifyError: an op does not accept the types that it gets.
    """
    graph = Graph(spec)
    nodes: list[Node] = []
    for name in data["weights"]:
        if name not in tensors:
            raise NotPlain(f"the model has no tensor {name!r}")
        nodes.append(graph.add_weight(name, tensors[name]))
    for name, dtype, shape in data["inputs"]:
        nodes.append(graph.add_input(InputSpec(name, _DTYPES[dtype], tuple(shape))))
    # Calls stand before something; the output that they are for comes last.
    end = graph.fx.output(())
    end.meta.update(layer=None, role="", by="", val=())
    for target, args, kwargs, (layer, role, source) in data["calls"]:
        values = {key: _value(value, nodes) for key, value in kwargs.items()}
        node = graph.call(_target(target), _value(args, nodes), values, before=end, by="", source=source)
        node.meta.update(layer=layer, role=role)
        nodes.append(node)
    graph.set_outputs({name: nodes[number] for name, number in data["outputs"].items()})
    return graph


def _name(target: Any) -> str:
    if isinstance(target, OpOverload):
        return str(target)
    name = f"{getattr(target, '__module__', '').lstrip('_')}.{getattr(target, '__name__', '')}"
    if _OPERATORS.get(name) is not target:
        raise NotPlain(f"op {target} is neither a registered op nor a function of operator or math")
    return name


def _target(name: str) -> Any:
    if name in _OPERATORS:
        return _OPERATORS[name]
    found = _registered(name)
    if found is None:  # the package that registers it may not have been imported
        load_ops()
        found = _registered(name)
    if found is None:
        raise NotPlain(f"there is no op {name!r}")
    return found


def _registered(name: str) -> OpOverload | None:
    namespace, _, rest = name.partition(".")
    op, _, overload = rest.rpartition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), op), overload)
    except (AttributeError, RuntimeError):
        return None


# Values that JSON has no word for are written as {"kind": value}.
def _plain(value: Any, numbers: Mapping[Node, int]) -> Any:
    if isinstance(value, Node):
        return {"node": numbers[value]}
    if isinstance(value, (list, tuple)):
        return [_plain(v, numbers) for v in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, (torch.memory_format, torch.layout)):
        return {"torch": str(value).removeprefix("torch.")}
    raise NotPlain(f"an argument of type {type(value).__name__} has no plain form")


def _value(data: Any, nodes: list[Node]) -> Any:
    if isinstance(data, list):
        return [_value(v, nodes) for v in data]
    if not isinstance(data, dict):
        return data
    ((kind, value),) = data.items()
    if kind == "node":
        return nodes[value]
    if kind == "float":
        return float(value)
    if kind == "device":
        return torch.device(value)
    if kind in ("dtype", "torch") and isinstance(
        found := getattr(torch, value, None), (torch.dtype, torch.memory_format, torch.layout)
    ):
        return found
    raise NotPlain(f"unknown value {kind}: {value}")

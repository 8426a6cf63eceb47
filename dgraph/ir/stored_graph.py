"""A graph as plain data: the one form in which files, pickles and the artifact cache have it.

    {"name": "add_1", "op": "aten.add.Tensor", "args": [{"node": "linear"}, {"node": "add"}], "type": "f32[N, 64]",
     "meta": {"layer": 0, "role": "self_attn", "source": "transformers/models/qwen3/modeling_qwen3.py:268"}}

The form is JSON: ops by name and schema, arguments, types, tags, declarations of inputs, and weights by name, shape and
dtype. It has no code. A graph that is read is typed anew: its ops are called on types alone, and types that differ from
the written ones are refused.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.errors import DgraphError, FormatError
from dgraph.families.adapters import Adapter, LowRank
from dgraph.ir.graph import Graph
from dgraph.plugins import load_ops
from dgraph.private.torch import OpOverload
from dgraph.ranks.sharding import Part, Sharding
from dgraph.spec import ModelSpec
from dgraph.types.nodes import args_of
from dgraph.types.shapes import Evaluator, InputSpec

KIND = "dgraph graph"
"""The entry with the version of the form, by which such data is known."""
VERSION = 1
_GETITEM = "operator.getitem"
_OWN = ("val", "weight", "input")
"""Entries of `meta` that the form has elsewhere."""


def to_data(graph: Graph) -> dict[str, Any]:
    """A graph as values that JSON knows, its weights by name, shape and dtype.

    Raises:
        FormatError: an op or an argument has no such form.
    """
    nodes, ops = [], dict[str, str]()
    for node in graph.fx.nodes:
        said: dict[str, Any] = {"name": node.name}
        if node.op == "output":
            continue
        if "weight" in node.meta:
            said |= {"weight": node.meta["weight"], **tensor_data(graph.tensors[node.meta["weight"]])}
        elif "input" in node.meta:
            said["input"] = node.meta["input"]
        else:
            said["op"] = name = _name(node.target)
            if name != _GETITEM:
                ops[name] = str(node.target._schema)
            said["args"] = _plain(list(args_of(node)))
            if node.kwargs:
                said["kwargs"] = {key: _plain(value) for key, value in node.kwargs.items()}
            said["type"] = graph.type_text(node)
        tags = {key: _plain(value) for key, value in node.meta.items() if key not in _OWN and value not in (None, "")}
        nodes.append({**said, **({"meta": tags} if tags else {})})
    found: dict[str, Any] = {
        KIND: VERSION,
        "spec": graph.spec.to_json(),
        "device": str(graph.device),
        "history": list(graph.history),
        "inputs": [_input_data(spec) for spec in graph.inputs.values()],
        "outputs": {name: node.name for name, node in graph.results().items()},
        "ops": ops,
        "nodes": nodes,
    }
    if graph.sharding is not None:
        found["sharding"] = asdict(graph.sharding)
        found["divided"] = {name: asdict(part) for name, part in graph.divided.items()}
        found["own"] = {name: int(number) for name, number in graph.own.items()}
    if graph.whole is not None:
        found["whole"] = graph.whole.to_json()
    if graph.adapter is not None:
        found["adapter"] = {"name": graph.adapter.name, "weights": _adapter_data(graph.adapter)}
    return found


def from_data(
    data: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
    spec: ModelSpec | None = None,
    adapter: Adapter | None = None,
) -> Graph:
    """The graph that `to_data` described. It is typed, but not verified.

    Args:
        data: as `to_data` gives it.
        tensors: by name, at least the weights of the graph. A graph that is divided over ranks takes its parts of whole
            weights. None: stand-ins of NaN, which take no memory.
        spec: facts that hold instead of the written ones.
        adapter: the adapter by which the model drafts; None: stand-ins for the written one.

    Raises:
        FormatError: another version, damaged data, an op that is not there, or a weight that does not fit.
        VerifyError: an op does not accept the types that it gets.
    """
    check_version(data, KIND, VERSION, "graph")
    with damaged("graph"):
        graph = Graph(ModelSpec.from_json(data["spec"]) if spec is None else spec)
        device = torch.device(data["device"])
        declared = {said["name"]: _input_of(said) for said in data["inputs"]}
        targets = {name: _target(name, schema) for name, schema in data["ops"].items()} | {_GETITEM: operator.getitem}
        graph.history = tuple(data["history"])
        if "sharding" in data:
            graph.sharding = Sharding(**data["sharding"])
            graph.divided = {name: _part_of(said) for name, said in data["divided"].items()}
            graph.own = {name: torch.tensor([number], device=device) for name, number in data["own"].items()}
        if "whole" in data:
            graph.whole = ModelSpec.from_json(data["whole"])
        weights = None if tensors is None else {**tensors, **graph.own}
        if "adapter" in data:
            graph.adapter = adapter or _adapter_of(data["adapter"], device)
        nodes: dict[str, Node] = {}
        for said in data["nodes"]:
            name = said["name"]
            if name in nodes:
                raise FormatError(f"this graph has the node {name!r} twice.")
            if "weight" in said:
                nodes[name] = graph.fx.placeholder(name)
                tensor = _weight(graph, said, weights, device)
                nodes[name].meta.update(weight=said["weight"], val=graph.symbols.of(tensor))
                graph.tensors[said["weight"]] = tensor
            elif "input" in said:
                nodes[name] = graph.fx.placeholder(name)
                graph.inputs[said["input"]] = one = declared[said["input"]]
                on = next((t.device for t in graph.tensors.values()), device)
                nodes[name].meta.update(input=one.name, val=graph.symbols.shared(one.shape, one.dtype, on))
            else:
                nodes[name] = _call(graph, said, targets, nodes)
            nodes[name].meta.update({"layer": None, "role": "", "by": "", **_values(said.get("meta", {}), nodes)})
        if list(graph.inputs) != list(declared):  # in the order of their declaration
            graph.inputs = {name: graph.inputs[name] for name in declared}
        graph.set_outputs({name: nodes[node] for name, node in data["outputs"].items()})
    return graph


def check_version(data: Any, kind: str, version: int, what: str) -> None:
    """Refuse data of another kind or version.

    Args:
        data: as it was read.
        kind: the entry that has the version.
        version: the one that is read.
        what: the data in a word, for messages.

    Raises:
        FormatError: another kind, or another version.
    """
    if not isinstance(data, Mapping) or kind not in data:
        raise FormatError(f"this is no {what}: it has no entry {kind!r}. Give what dgraph wrote as one.")
    if data[kind] != version:
        raise FormatError(
            f"this {what} is of version {data[kind]!r} of its form, and this dgraph reads version {version}; read it "
            f"with the dgraph that wrote it, or write it anew."
        )


@contextmanager
def damaged(what: str) -> Iterator[None]:
    """Context in which errors of reading data say that it is damaged, and errors of dgraph stay as they are.

    Raises:
        FormatError: an entry is missing, or has a value that it cannot have.
    """
    try:
        yield
    except DgraphError:
        raise
    except KeyError as error:
        raise FormatError(f"this {what} is damaged: it has no entry {error}.") from error
    except (TypeError, ValueError, IndexError, AttributeError, RuntimeError, RecursionError) as error:
        first = str(error).partition("\n")[0]
        raise FormatError(f"this {what} is damaged: {type(error).__name__}: {first}.") from error


def tensor_data(tensor: Tensor) -> dict[str, Any]:
    """Dtype and shape of a tensor as plain values."""
    return {"dtype": dtype_text(tensor.dtype), "shape": list(tensor.shape)}


def dtype_text(dtype: torch.dtype) -> str:
    """The name of a dtype without its module: "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of that name.

    Raises:
        FormatError: no dtype of this torch.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise FormatError(f"there is no dtype {name!r}.")
    return found


def stand_in(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """A tensor in the memory of one element, which is NaN where the dtype has that, so that no run mistakes it."""
    one = torch.tensor(math.nan if dtype.is_floating_point else 0)
    return one.to(dtype=dtype, device=device).expand(shape)


def _weight(
    graph: Graph, said: Mapping[str, Any], tensors: Mapping[str, Tensor] | None, device: torch.device
) -> Tensor:
    """The tensor of a weight: the given one, the part of it that a rank has, or a stand-in."""
    name, dtype, shape = said["weight"], dtype_of(said["dtype"]), tuple(said["shape"])
    if tensors is None:
        return graph.own[name] if name in graph.own else stand_in(dtype, shape, device)
    if name not in tensors:
        raise FormatError(
            f"the weights that are given have no {name!r}, {said['dtype']}{said['shape']}. A weight that a pass made "
            f"is not the model's: give those of such a graph (Graph.tensors), or save them (weights=True)."
        )
    tensor = tensors[name]
    if tuple(tensor.shape) != shape and name in graph.divided:
        tensor = graph.divided[name].take(tensor)
    if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
        got = f"{dtype_text(tensor.dtype)}{list(tensor.shape)}"
        raise FormatError(f"weight {name!r} of the graph is {said['dtype']}{said['shape']}, got {got}.")
    return tensor


def _call(graph: Graph, said: Mapping[str, Any], targets: Mapping[str, Any], nodes: Mapping[str, Node]) -> Node:
    args, kwargs = _value(said["args"], nodes), _values(said.get("kwargs", {}), nodes)
    if said["op"] not in targets:
        raise FormatError(f"node {said['name']!r} calls {said['op']!r}, which is not among the graph's ops.")
    node = graph.fx.create_node("call_function", targets[said["op"]], tuple(args), kwargs, name=said["name"])
    node.meta.update(_values(said.get("meta", {}), nodes))  # which the types of some ops depend on
    node.meta["val"] = Evaluator(graph.symbols).call(node)
    if (got := graph.type_text(node)) != said["type"]:
        raise FormatError(f"node {node.name!r} calls {said['op']!r}, which gives {got}; the graph has {said['type']}.")
    return node


def _name(target: Any) -> str:
    if isinstance(target, OpOverload):
        return str(target)
    if target is not operator.getitem:
        raise FormatError(f"op {target} is neither a registered op nor operator.getitem, so no file can name it.")
    return _GETITEM


def _target(name: str, schema: str) -> OpOverload:
    found = _registered(name)
    if found is None:  # the package that registers it may not have been imported
        load_ops()
        found = _registered(name)
    if found is None:
        raise FormatError(f"there is no op {name!r}; install or import the package that registers it.")
    if not _is_of_tensors(found):
        raise FormatError(f"op {name!r} is not of tensors, so no graph has it: {found._schema}.")
    # An op of torch stays compatible when it gets an argument more; an op of a package promises nothing.
    if (got := str(found._schema)) != schema and found.namespace != "aten":
        raise FormatError(f"op {name!r} takes {got}, and the graph was made for {schema}; make it anew.")
    return found


def _is_of_tensors(op: OpOverload) -> bool:
    """Say whether an op computes on tensors, or makes one of numbers: others print, or read and write files."""
    takes, gives = ([str(value.type) for value in values] for values in (op._schema.arguments, op._schema.returns))
    made = any("Tensor" in kind for kind in gives) and not any("str" in kind for kind in takes)
    return made or any("Tensor" in kind for kind in takes)


def _registered(name: str) -> OpOverload | None:
    namespace, _, rest = name.partition(".")
    op, _, overload = rest.rpartition(".")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), op), overload)
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, OpOverload) else None


def _input_data(spec: InputSpec) -> dict[str, Any]:
    return {**asdict(spec), "dtype": dtype_text(spec.dtype), "shape": list(spec.shape), "initial": _plain(spec.initial)}


def _input_of(said: Mapping[str, Any]) -> InputSpec:
    plain = {**said, "dtype": dtype_of(said["dtype"]), "shape": tuple(said["shape"])}
    return InputSpec(**{**plain, "initial": _value(said["initial"], {})})


def _part_of(said: Mapping[str, Any]) -> Part:
    return Part(**{**said, "ranges": tuple((begin, end) for begin, end in said["ranges"])})


def _adapter_data(adapter: Adapter) -> dict[str, Any]:
    return {
        name: {"down": tensor_data(rank.down), "up": tensor_data(rank.up), "scale": rank.scale}
        for name, rank in adapter.weights.items()
    }


def _adapter_of(said: Mapping[str, Any], device: torch.device) -> Adapter:
    """Stand-ins for an adapter."""

    def like(one: Mapping[str, Any]) -> Tensor:
        return stand_in(dtype_of(one["dtype"]), tuple(one["shape"]), device)

    ranks = {name: LowRank(like(one["down"]), like(one["up"]), one["scale"]) for name, one in said["weights"].items()}
    return Adapter(said["name"], ranks)


# Values that JSON has no word for are written as {"kind": value}.
def _plain(value: Any) -> Any:
    if isinstance(value, Node):
        return {"node": value.name}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_text(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, (torch.memory_format, torch.layout)):
        return {"torch": str(value).removeprefix("torch.")}
    raise FormatError(f"an argument of type {type(value).__name__} has no plain form.")


def _values(said: Mapping[str, Any], nodes: Mapping[str, Node]) -> dict[str, Any]:
    return {name: _value(value, nodes) for name, value in said.items()}


def _value(data: Any, nodes: Mapping[str, Node]) -> Any:
    if isinstance(data, list):
        return [_value(v, nodes) for v in data]
    if not isinstance(data, dict):
        return data
    ((kind, value),) = data.items()
    if kind == "node":
        if value not in nodes:
            raise FormatError(f"a node reads {value!r}, which does not stand before it.")
        return nodes[value]
    if kind == "float":
        return float(value)
    if kind == "device":
        return torch.device(value)
    if kind in ("dtype", "torch") and isinstance(
        found := getattr(torch, value, None), (torch.dtype, torch.memory_format, torch.layout)
    ):
        return found
    raise FormatError(f"unknown value {kind}: {value}.")

"""Graphs in files: JSON in the form of `dgraph.ir.stored_graph`, and weights beside it in safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as tensor_bytes
from torch import Tensor

from dgraph.errors import FormatError, InputError
from dgraph.families import Model
from dgraph.families.adapters import Adapter, LowRank
from dgraph.families.weights import weights_of
from dgraph.ir.graph import Graph
from dgraph.ir.stored_graph import damaged, from_data, to_data
from dgraph.ir.verifier import verify
from dgraph.types.texts import parse_json, read_text

WEIGHTS = ".safetensors"
"""End of the name of the file with the weights of a graph."""
_TIED = "tied"
_BY_LINE = ("nodes", "inputs")


def save(graph: Graph, path: str | Path, weights: bool = False) -> None:
    """Write a graph; see `Graph.save`."""
    where, inside = Path(path), b""
    if where.suffix == WEIGHTS:
        raise InputError(f"{where} is the name of the file with the weights; call that of the graph {where.stem}.json.")
    data = to_data(graph)
    if weights:
        inside, data[_TIED] = pack_weights(graph)
    try:
        if weights:
            where.with_suffix(WEIGHTS).write_bytes(inside)
        where.write_text(graph_text(data), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{where} cannot be written: {error.strerror}.") from None


def load(path: str | Path, weights: Model | Graph | Mapping[str, Tensor] | None = None) -> Graph:
    """Read and verify a graph; see `Graph.load`."""
    where = Path(path)
    data = read_graph_text(read_text(where, str(where)))
    if weights is None and isinstance(data, Mapping) and _TIED in data:
        beside = where.with_suffix(WEIGHTS)
        try:
            found = unpack_weights(data, beside.read_bytes())
        except OSError as error:
            raise InputError(
                f"{beside}, which has the weights of this graph, cannot be read: {error.strerror}. Give weights=."
            ) from None
        graph = from_data(data, *found)
    else:
        tensors, adapter = _given(weights)
        graph = from_data(data, tensors, adapter=adapter)
    verify(graph, by="Graph.load")
    return graph


def graph_text(data: Mapping[str, Any]) -> str:
    """A graph's data as JSON, with a line for each node, so that texts can be compared."""

    def text(name: str, value: Any) -> str:
        if name not in _BY_LINE:
            return json.dumps(value)
        return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n]" if value else "[]"

    return "{\n" + ",\n".join(f"{json.dumps(name)}: {text(name, value)}" for name, value in data.items()) + "\n}\n"


def read_graph_text(text: str) -> Any:
    """The data of a graph's JSON.

    Raises:
        FormatError: it is not JSON.
    """
    try:
        return parse_json(text)
    except InputError as error:
        raise FormatError(f"this graph is damaged: {error}.") from None


def pack_weights(graph: Graph) -> tuple[bytes, dict[str, str]]:
    """A graph's weights, and those of its adapter, as safetensors; and the names that tensors have besides.

    Returns:
        The bytes, and by name of a tensor that is another one, the name of that one.
    """
    named, tied, first = dict[str, Tensor](), dict[str, str](), dict[Any, str]()
    for name, tensor in {**graph.tensors, **_of_adapter(graph.adapter)}.items():
        place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        if tensor.numel() and place in first:
            tied[name] = first[place]
        else:
            first[place] = name
            named[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return tensor_bytes(named), tied


def unpack_weights(data: Mapping[str, Any], content: bytes) -> tuple[dict[str, Tensor], None, Adapter | None]:
    """The inverse of `pack_weights`, as arguments of `from_data`; the tensors lie on the graph's device, if it is here.

    Raises:
        FormatError: damaged weights.
    """
    tensors = parse_safetensors(content, "the weights of this graph")
    with damaged("graph"):
        device = torch.device(data["device"])
        if device.type == "cuda" and not torch.cuda.is_available():
            device = torch.device("cpu")
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        tensors |= {name: tensors[of] for name, of in data[_TIED].items()}
        adapter = None
        if "adapter" in data:
            ranks = {
                name: LowRank(tensors[f"adapter/{name}/down"], tensors[f"adapter/{name}/up"], said["scale"])
                for name, said in data["adapter"]["weights"].items()
            }
            adapter = Adapter(data["adapter"]["name"], ranks)
    return tensors, None, adapter


def parse_safetensors(content: bytes, what: str) -> dict[str, Tensor]:
    """Tensors by name.

    Raises:
        FormatError: the content is not safetensors.
    """
    try:
        return parse_tensors(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise FormatError(f"{what} are damaged: {str(error).partition(chr(10))[0]}.") from None


def _of_adapter(adapter: Adapter | None) -> dict[str, Tensor]:
    ranks = {} if adapter is None else adapter.weights
    return {f"adapter/{name}/{part}": getattr(rank, part) for name, rank in ranks.items() for part in ("down", "up")}


def _given(weights: Any) -> tuple[Mapping[str, Tensor] | None, Adapter | None]:
    """Tensors by name, and the adapter that came with them."""
    if weights is None:
        return None, None
    if isinstance(weights, Graph):
        return weights.tensors, weights.adapter
    if isinstance(weights, Model):
        return weights_of(weights.module, weights.prefix), weights.adapter
    if isinstance(weights, Mapping):
        return weights, None
    raise InputError(
        f"weights of a graph are a dgraph.Model (dgraph.load), a Graph or tensors by name, got "
        f"{type(weights).__name__}."
    )

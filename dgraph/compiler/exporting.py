"""A phase as a file of torch.export (.pt2), which plain torch runs: the ops of dgraph, and nothing of the compiler.

    import torch, dgraph.ops
    program = torch.export.load("step.pt2").module()
    outputs = program(**inputs)        # by name, as `CompiledModel.graph(phase).inputs` declares them

Weights are in the file. Caches are inputs, and written in place. A program that only writes caches gives `cu_rows`
back, since torch stores no program without results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from dgraph.errors import InputError, LoweringError
from dgraph.ir.graph import Graph
from dgraph.lowering.footprint import size_of
from dgraph.private.torch import sizes_from_zero
from dgraph.types.card import counted
from dgraph.types.nodes import args_of
from dgraph.types.shapes import DTYPES, Dim, InputSpec

SUFFIX = ".pt2"
ABOUT = "dgraph.json"
"""Entry beside the program: model, recipe, phase, and the declarations of inputs and outputs."""
_SIZES = (3, 4, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 19, 21, 22, 23)
"""Example sizes, one for each symbol, so that torch takes no two for one, and none for a size that it specialises."""

_RESHAPE, _CLONE = torch.ops.aten.reshape.default, torch.ops.aten.clone.default


@dataclass(frozen=True)
class Exported:
    """Record of an exported phase.

    Attributes:
        file: the file that was written.
        phase: name of the phase.
        inputs, outputs: their names, in order.
        size: bytes of the file.
    """

    file: Path
    phase: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    size: int

    def __str__(self) -> str:
        return (
            f"{self.file}: {self.phase}, {counted(len(self.inputs), 'input')}, {counted(len(self.outputs), 'output')}"
        )


def exported_program(graph: Graph) -> torch.export.ExportedProgram:
    """The program of a phase's graph, with all sizes that the graph leaves open left open.

    Args:
        graph: of a phase, whole on one device.

    Raises:
        InputError: a rank's part of a model.
        LoweringError: torch.export refuses the graph.
    """
    if graph.sharding is not None:
        raise InputError("a rank's part of a model calls collectives of its group; export the whole model.")
    symbols = dict.fromkeys(_symbol(size) for spec in graph.inputs.values() for size in spec.shape)
    names = [name for name in symbols if name]
    sizes = dict(zip(names, _SIZES, strict=False))
    dims = {name: torch.export.Dim(name) for name in names}
    inputs = {name: _example(spec, sizes, graph.device) for name, spec in graph.inputs.items()}
    shapes = {name: _dims(spec, dims) for name, spec in graph.inputs.items()}
    try:
        with torch.no_grad(), sizes_from_zero():
            return torch.export.export(_module(graph), (), inputs, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # torch.export fails in many ways
        raise LoweringError(
            f"torch.export refuses this program: {type(error).__name__}: {str(error).partition(chr(10))[0]}."
        ) from error


def export(graph: Graph, path: str | Path, phase: str, about: Mapping[str, Any]) -> Exported:
    """Write a phase's graph to a file.

    Args:
        graph, phase: of a phase, and its name.
        path: the file, which ends in .pt2.
        about: plain values that say how the graph was made; stored beside the program.

    Raises:
        InputError: a file of another name, or one that cannot be written. Also as `exported_program`.
        LoweringError: as `exported_program`.
    """
    file = check_file(path)
    program = exported_program(graph)
    said = {
        **about,
        "phase": phase,
        "inputs": {
            name: {"dtype": DTYPES[spec.dtype], "shape": list(spec.shape), "per": spec.per, "in_place": spec.in_place}
            for name, spec in graph.inputs.items()
        },
        "outputs": list(graph.outputs),
    }
    try:
        torch.export.save(program, file, extra_files={ABOUT: json.dumps(said)})
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror}.") from None
    return Exported(file, phase, tuple(graph.inputs), graph.outputs, file.stat().st_size)


def check_file(path: str | Path) -> Path:
    """Refuse a file that could not be written, before any work is done.

    Raises:
        InputError: its name does not end in .pt2, or its folder does not exist.
    """
    file = Path(path)
    if file.suffix != SUFFIX:
        raise InputError(f"{file} is no name for an exported program; end it in {SUFFIX}.")
    if not file.absolute().parent.is_dir():
        raise InputError(f"{file} cannot be written: there is no folder {file.absolute().parent}.")
    return file


def _symbol(size: Dim) -> str:
    """Name of the symbol in a declared size; "" for a number."""
    return "" if isinstance(size, int) else size.partition("+")[0]


def _example(spec: InputSpec, sizes: Mapping[str, int], device: torch.device) -> Tensor:
    return spec.empty([size_of(size, sizes) for size in spec.shape], device).zero_()


def _dims(spec: InputSpec, dims: Mapping[str, Any]) -> dict[int, Any]:
    """The open sizes of an input by position."""
    return {i: size_of(size, dims) for i, size in enumerate(spec.shape) if not isinstance(size, int)}


def _module(graph: Graph) -> torch.fx.GraphModule:
    """A graph as a module of torch: weights are its buffers, run-time inputs its arguments by name."""
    root, own = nn.Module(), torch.fx.Graph()
    mapping: dict[Node, Node] = {}
    for name in graph.inputs:
        mapping[graph.input(name)] = own.placeholder(name)
    for node in graph.nodes:
        if "weight" in node.meta:
            _put(root, node.meta["weight"], graph.tensors[node.meta["weight"]].detach())
            mapping[node] = own.get_attr(node.meta["weight"])
        elif node.op == "call_function":
            if node.target is _RESHAPE and not args_of(node)[0].meta["val"].is_contiguous():
                # Torch asks of rows that lie apart whether there is only one, and then refuses one.
                base = args_of(node)[0]
                mapping[base] = own.call_function(_CLONE, (mapping[base],), {"memory_format": torch.contiguous_format})
            mapping[node] = own.node_copy(node, lambda n: mapping[n])
            mapping[node].meta.clear()  # types belong to this process
    results = {name: mapping[node] for name, node in graph.results().items()}
    own.output(results or {"cu_rows": mapping[graph.input("cu_rows")]})
    return torch.fx.GraphModule(root, own)


def _put(root: nn.Module, name: str, tensor: Tensor) -> None:
    """Make a tensor the buffer of a dotted name; a part of a larger storage is copied, since files keep whole ones."""
    *path, leaf = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    root.register_buffer(leaf, tensor if whole else tensor.clone(memory_format=torch.contiguous_format))

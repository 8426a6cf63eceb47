"""Regions as functions: eager, or compiled once per text by Inductor."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.errors import InputError, LoweringError
from dgraph.graph import Graph
from dgraph.lowering.schedule import Region
from dgraph.nodes import args_of
from dgraph.ops import op_of
from dgraph.shapes import DTYPES, Symbols
from dgraph.torch_private import compile_region, inductor_settings

BACKENDS = ("inductor", "eager")

RegionFunction = Callable[..., Sequence[Tensor]]
"""Takes the region's inputs in order, returns its outputs in order."""


class RegionCompiler:
    """Makes region functions; equal texts share one.

    Attributes:
        backend: "inductor", or "eager" to run the same regions op by op (for debugging).
        compiled: texts that were compiled here, in order.
        reused: how often a function that existed was handed out again.
    """

    def __init__(self, backend: str = "inductor", progress: Callable[[str], None] | None = None):
        if backend not in BACKENDS:
            raise InputError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}.")
        self.backend = backend
        self.compiled: list[str] = []
        self.reused = 0
        self._progress = progress
        self._functions: dict[str, RegionFunction] = {}

    def function(self, graph: Graph, region: Region) -> RegionFunction:
        """The function of a region.

        Raises:
            LoweringError: Inductor cannot compile it, or what it compiled accepts only the size it was shown.
        """
        text = region_text(graph, region)
        if text in self._functions:
            self.reused += 1
            return self._functions[text]
        module = _module(graph, region)
        # One op leaves nothing to fuse, and eager kernels need no compilation.
        single = sum(n.target is not operator.getitem for n in region.nodes) == 1
        if self.backend == "eager" or single:
            function: RegionFunction = module.forward
        else:
            function = self._compile(text, module, graph.device)
        self._functions[text] = function
        return function

    def _compile(self, text: str, module: torch.fx.GraphModule, device: torch.device) -> RegionFunction:
        with _LOCK:
            if text not in _COMPILED:
                if self._progress is not None:
                    self._progress(f"compiling region {len(self.compiled) + 1}")
                _COMPILED[text] = _inductor(module, device)
            self.compiled.append(text)
            return _COMPILED[text]


# A compiled region is a function of its text alone, so it serves every model in the process that has the same region.
_COMPILED: dict[str, RegionFunction] = {}
_LOCK = threading.Lock()


def region_text(graph: Graph, region: Region) -> str:
    """A region's identity: types of its inputs, ops and arguments by number, outputs; no names, no weights' values."""
    numbers: dict[Node, str] = {}
    symbols: dict[str, str] = {}
    lines = [f"device {graph.device.type}"]

    def type_of(value: Any) -> str:
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(type_of, value))})"
        if not isinstance(value, Tensor):
            return type(value).__name__
        dims = []
        for size in value.shape:
            text = graph.symbols.text(size)
            dims.append(text if isinstance(size, int) else symbols.setdefault(text, f"s{len(symbols)}"))
        return f"{DTYPES.get(value.dtype, value.dtype)}[{', '.join(dims)}]"

    for node in region.inputs:
        numbers[node] = f"%{len(numbers)}"
        lines.append(f"{numbers[node]} = input: {type_of(node.meta['val'])}")
    for node in region.nodes:
        args = torch.fx.map_arg((args_of(node), node.kwargs), lambda n: _Named(numbers[n]))
        numbers[node] = f"%{len(numbers)}"
        lines.append(f"{numbers[node]} = {node.target}{args}: {type_of(node.meta['val'])}")
    lines.append(f"return {', '.join(numbers[n] for n in region.outputs)}")
    return "\n".join(lines)


class _Named(str):
    """A string that prints without quotes inside a tuple."""

    def __repr__(self) -> str:
        return str(self)


def _module(graph: Graph, region: Region) -> torch.fx.GraphModule:
    """A region as a module of its own, with types over symbols of its own; inline ops become their references."""
    own, sizes = torch.fx.Graph(), Symbols()
    mapping: dict[Node, Node] = {}
    for i, node in enumerate(region.inputs):
        mapping[node] = own.placeholder(f"x{i}")
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            raise LoweringError(f"{node.name} crosses into a region but is {graph.type_text(node)}, not a tensor.")
        shape = [s if isinstance(s, int) else graph.symbols.text(s) for s in value.shape]
        mapping[node].meta["val"] = sizes.empty(shape, value.dtype, value.device)
    for node in region.nodes:
        args, kwargs = torch.fx.map_arg((args_of(node), node.kwargs), lambda n: mapping[n])
        op = op_of(node.target)
        target: Any = op.reference if op is not None else node.target
        mapping[node] = own.call_function(target, args, kwargs)
        fakes = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with sizes.mode, torch.no_grad():
            mapping[node].meta["val"] = target(*fakes[0], **fakes[1])
    own.output(tuple(mapping[n] for n in region.outputs))
    return torch.fx.GraphModule(torch.nn.Module(), own)


def _inductor(module: torch.fx.GraphModule, device: torch.device) -> RegionFunction:
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    try:
        function = compile_region(module, [n.meta["val"] for n in placeholders], inductor_settings(device))
        with torch.no_grad():
            for rows in (3, 5):  # Inductor may have specialised to one size without a word
                function(*(_example(n.meta["val"], rows) for n in placeholders))
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise LoweringError(
            f"Inductor cannot compile this region: {reason}\n{module.code.strip()}\n"
            f"Use backend='eager' to run it op by op."
        ) from error
    return function


def _example(value: Tensor, rows: int) -> Tensor:
    return torch.zeros([s if isinstance(s, int) else rows for s in value.shape], dtype=value.dtype, device=value.device)

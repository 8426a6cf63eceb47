"""Regions as functions: eager, or compiled once per text by Inductor."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.cache.store import Store
from dgraph.errors import InputError, LoweringError
from dgraph.lowering.inductor import Compiled, RegionFunction, Source, compiled, known
from dgraph.ops import op_of
from dgraph.types.nodes import args_of, op_name
from dgraph.types.shapes import DTYPES, Symbols

if TYPE_CHECKING:  # neither says how a region is compiled, so a key of compiled code need not follow them
    from dgraph.ir.graph import Graph
    from dgraph.lowering.schedule import Region

AUTO = "auto"
BACKENDS = ("inductor", "eager", AUTO)

_LOOK_UP = ("embedding", "index", "index_select", "gather")
"""Ops that read by numbers which they do not bound themselves."""


class NotStored(Exception):
    """A region is not compiled yet, and its compiler only loads them."""


class RegionCompiler:
    """Make region functions; equal texts share one.

    Attributes:
        backend: "inductor", or "eager" to run the same regions op by op (for debugging).
        stored_only: True to raise `NotStored` for a region that is not compiled yet. "auto" is "inductor" with this.
        store: where compiled regions are stored for later processes; None for nowhere.
        compiled: texts that Inductor compiled for this compiler, in order.
        loaded: texts that need not be compiled: they came from the store, or an earlier program of this process.
        unstored: texts that could not be put into the store.
        reused: number of times that an existing function was handed out again.
    """

    def __init__(
        self, backend: str = "inductor", progress: Callable[[str], None] | None = None, store: Store | None = None
    ):
        if backend not in BACKENDS:
            raise InputError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}.")
        self.stored_only = backend == AUTO
        self.backend, self.store = "inductor" if self.stored_only else backend, store
        self.compiled: list[str] = []
        self.loaded: list[str] = []
        self.unstored: list[str] = []
        self.reused = 0
        self._progress = progress or (lambda what: None)
        self._functions: dict[str, RegionFunction] = {}

    def function(self, graph: Graph, region: Region) -> RegionFunction:
        """The function of a region.

        Raises:
            LoweringError: Inductor cannot compile it, or the compiled code accepts only the size it was shown.
            NotStored: it is not compiled yet, and `stored_only` is set.
        """
        text = region_text(graph, region)
        if text in self._functions:
            self.reused += 1
            return self._functions[text]
        if self.backend == "eager" or _is_one_kernel(region):
            function: RegionFunction = _op_by_op(graph, region, text).forward
        else:
            inputs = [n.meta["val"] for n in region.inputs]
            settings = {"assert_indirect_indexing": False} if _reads_in_bounds(region) else {}
            source = Source(text, lambda: _module(graph, region), inputs, graph.device, _inlined(region), settings)
            made = known(source, self.store) if self.stored_only else self._compiled(source)
            # Code that this process alone has would be lacking in a saved program, and in the next process.
            if made is None or (self.stored_only and self.store is not None and not made.stored):
                raise NotStored(text)
            function = made.function
            (self.compiled if made.new else self.loaded).append(text)
            if self.store is not None and not made.stored:
                self.unstored.append(text)
        self._functions[text] = function
        return function

    def _compiled(self, source: Source) -> Compiled:
        count = len(self._functions) + 1
        return compiled(source, self.store, lambda doing: self._progress(f"{doing} region {count}"))


def _op_by_op(graph: Graph, region: Region, text: str) -> torch.fx.GraphModule:
    """A region as a module that runs it op by op; programs share those of equal texts, as long as one has them."""
    key = text, _inlined(region)
    if (module := _OP_BY_OP.get(key)) is None:
        module = _OP_BY_OP[key] = _module(graph, region, typed=False)
    return module


_OP_BY_OP: WeakValueDictionary[tuple[str, tuple[Callable[..., Any], ...]], torch.fx.GraphModule] = WeakValueDictionary()


def _is_one_kernel(region: Region) -> bool:
    """True if nothing is left to fuse: one op of torch. An inlined op of dgraph is several."""
    calls = [n for n in region.nodes if n.target is not operator.getitem]
    return len(calls) == 1 and op_of(calls[0].target) is None


def _reads_in_bounds(region: Region) -> bool:
    """True if the compiled code need not check the numbers by which it looks rows up.

    Inductor cannot see that a number is below a symbolic size, and on a GPU a check costs a branch in every kernel.
    Numbers from outside (token ids) are always checked.
    """
    bounded = any((op := op_of(n.target)) is not None and op.in_bounds for n in region.nodes)
    return bounded and not any(op_name(n.target) in _LOOK_UP for n in region.nodes)


def region_text(graph: Graph, region: Region) -> str:
    """Identity of a region: types of its inputs, ops and arguments by number, outputs; no names, no weights' values."""
    numbers: dict[Node, str] = {}
    symbols: dict[str, str] = {}
    there = _sizes_of(graph, region)
    lines = [f"device {graph.device.type}"]

    def size_of(text: str) -> str:
        name, plus, offset = text.partition("+")
        if plus and name in there:
            return f"{size_of(name)}+{offset}"
        return symbols.setdefault(text, f"s{len(symbols)}")

    def type_of(value: Any) -> str:
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(type_of, value))})"
        if not isinstance(value, Tensor):
            return type(value).__name__
        dims = []
        for size in value.shape:
            text = graph.symbols.text(size)
            dims.append(text if isinstance(size, int) else size_of(text))
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


def _inlined(region: Region) -> tuple[Callable[..., Any], ...]:
    """References of the ops that `_module` replaces by these."""
    ops = (op_of(node.target) for node in region.nodes)
    return tuple(dict.fromkeys(op.reference for op in ops if op is not None))


def _sizes_of(graph: Graph, region: Region) -> set[str]:
    """Every size of an input, as text."""
    values = (node.meta["val"] for node in region.inputs)
    return {graph.symbols.text(size) for value in values if isinstance(value, Tensor) for size in value.shape}


def _own_size(size: str, there: Collection[str]) -> str:
    """A symbolic size as a region may declare it: `b+1` is a symbol of its own where no input has the size `b`.

    Torch 2.11 compiles no function whose inputs show a symbol inside sums only.
    """
    name, plus, offset = size.partition("+")
    return size if not plus or name in there else f"{name}_plus_{offset}"


def _module(graph: Graph, region: Region, typed: bool = True) -> torch.fx.GraphModule:
    """A region as a module of its own; inline ops become their references.

    typed: with types over symbols of its own, which only a compiler needs.
    """
    own = torch.fx.Graph()
    mapping: dict[Node, Node] = {}
    for i, node in enumerate(region.inputs):
        mapping[node] = own.placeholder(f"x{i}")
        if not isinstance(node.meta["val"], Tensor):
            raise LoweringError(f"{node.name} crosses into a region but is {graph.type_text(node)}, not a tensor.")
    for node in region.nodes:
        args, kwargs = torch.fx.map_arg((args_of(node), node.kwargs), lambda n: mapping[n])
        op = op_of(node.target)
        target: Any = op.reference if op is not None else node.target
        mapping[node] = own.call_function(target, args, kwargs)
    if typed:
        _type(graph, region, mapping)
    own.output(tuple(mapping[n] for n in region.outputs))
    return torch.fx.GraphModule(torch.nn.Module(), own)


def _type(graph: Graph, region: Region, mapping: Mapping[Node, Node]) -> None:
    """Type the nodes of a region's module."""
    sizes = Symbols(large=graph.device.type == "cuda")
    texts = _sizes_of(graph, region)
    for node in region.inputs:
        value = node.meta["val"]
        shape = [s if isinstance(s, int) else _own_size(graph.symbols.text(s), texts) for s in value.shape]
        mapping[node].meta["val"] = sizes.empty(shape, value.dtype, value.device)
    for node in region.nodes:
        mine = mapping[node]
        target: Any = mine.target
        args, kwargs = torch.fx.map_arg((mine.args, mine.kwargs), lambda n: n.meta["val"])
        mine.meta["val"] = sizes.run(target, args, kwargs)

"""Predict the memory that a lowered program allocates while it runs, without running it.

Its own instructions run, in their order and with the executor's own frees, on fake tensors of the sizes that are asked
for. So a change of schedule, of chunks or of a pass is a change here, too. An op of ours gives its fake results, and
says how much it needs for itself beside them (`Op.workspace`). A region that runs op by op does so here. A compiled one
is walked node by node. Operands and results of library products lie in memory, and so do the results of the region. All
other values are fused into their readers, and exist for one element at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.errors import InputError
from dgraph.families.quantised import QuantisedRows, QuantisedWeight
from dgraph.ir.graph import Graph
from dgraph.ir.layers import layers_of, linear_of
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.instructions import Instruction, instead, single
from dgraph.lowering.peephole import Fusion
from dgraph.lowering.schedule import Region
from dgraph.ops import OPS, Op, op_of
from dgraph.private.torch import StorageWatch, fake_mode
from dgraph.types.nodes import args_of, is_view, op_name, viewed
from dgraph.types.shapes import InputSpec, without_window

HEAD = "LM head"
GROUPS = ("attention", "projections", "feed-forward", "norms", HEAD, "other")
"""Groups of the nodes of a program.

- attention: attention with the values that it reads and writes.
- projections: the linear layers before and after attention.
- feed-forward: the feed-forward network.
- norms: the norms and sums around them.
- LM head: everything after the last layer.
- other: everything before the first layer.
"""

GRAIN = {"cuda": 512}
"""Granularity in bytes of torch's allocator, by type of device; 1 elsewhere."""

# The compiler hands these ops to a library, so their operands and results lie in memory.
_LIBRARY = {"linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "topk", "sort"}


@dataclass(frozen=True)
class Footprint:
    """Bytes that a run of a program allocates beside weights, inputs and caches.

    Attributes:
        peak: most that are allocated at a time.
        groups: the same while nodes of a group run (see `GROUPS`), by group, those that the program has.
    """

    peak: int
    groups: dict[str, int]


@torch.no_grad()
def footprint(program: LoweredProgram, sizes: Mapping[str, int]) -> Footprint:
    """Predict the bytes that a run allocates.

    The program must not run meanwhile, since its instructions have other functions then.

    Args:
        program: a lowered one.
        sizes: of the symbols in the declared shapes of its inputs: "N" rows, "b" sequences, "P" pages of a sequence,
            ... (see `InputSpec`). Every row is taken to live on where rows are dropped.

    Raises:
        InputError: a symbol of its inputs without a size.
    """
    graph, mode = program.graph, fake_mode()
    run = _Run(graph, program.backend != "eager")
    with mode:
        inputs = {name: _empty(spec, sizes, graph.device) for name, spec in program.inputs.items()}
    instructions = list(single(each for stage in program.lowered for each in (*stage.bridge, *stage.instructions)))
    with instead(instructions, run.function), mode, run.watch:
        program.on_stand_ins(inputs, run.like, sizes["N"])
    return Footprint(run.watch.peak, {name: run.peaks[name] for name in GROUPS if name in run.peaks})


def size_of(dim: int | str, sizes: Mapping[str, Any]) -> Any:
    """A declared size, 4, "N" or "b+1", as what stands for its symbol: a number, or an open size of torch.

    Raises:
        InputError: a symbol without a size.
    """
    if isinstance(dim, int):
        return dim
    name, _, more = dim.partition("+")
    name = name if name in sizes else without_window(name)  # each window has as many as all positions
    if name not in sizes:
        raise InputError(f"size {name!r} of an input is not given; sizes has {', '.join(sizes) or 'none'}.")
    return sizes[name] + int(more) if more else sizes[name]


def _empty(spec: InputSpec, sizes: Mapping[str, int], device: torch.device) -> Tensor:
    return torch.empty([size_of(dim, sizes) for dim in spec.shape], dtype=spec.dtype, device=device)


class _Run:
    """One run on fake tensors.

    Attributes:
        watch: counts the bytes.
        peaks: most live bytes while a node of a group ran, by group.
    """

    def __init__(self, graph: Graph, compiled: bool):
        self.device, self.compiled = graph.device, compiled
        self.watch = StorageWatch(GRAIN.get(graph.device.type, 1), self._seen)
        self.peaks: dict[str, int] = {}
        self._groups = groups_of(graph)
        self._group = "other"

    def _seen(self, live: int) -> None:
        self.peaks[self._group] = max(self.peaks.get(self._group, 0), live)

    def like(self, weight: Tensor) -> Tensor:
        """Stand-in for a weight; it takes no memory."""
        size, stride = weight.shape, weight.stride()
        return self._quietly(torch.empty_strided, size, stride, dtype=weight.dtype, device=weight.device)

    def function(self, instruction: Instruction) -> Callable[..., Any]:
        """Stand-in for the function of an instruction."""
        origin, function = instruction.origin, instruction.function
        if isinstance(origin, Region):
            walk = self._walked_fused if self.compiled else self._walked
            return lambda *args: walk(origin, args)
        if isinstance(origin, Fusion):
            return lambda *args: self._of_fusion(origin, function, args)
        op, node = instruction.op, origin.node if origin is not None else None
        assert op is not None
        return lambda *args: self._called(op, node, args)

    def _called(self, op: Op, node: Node | None, args: Sequence[Any]) -> Any:
        self._enter(node)
        result = self._quietly(op.overload, *(_dense(arg, args) for arg in args))
        self.watch.note(result)
        if op.workspace is not None:
            self.watch.rise(op.workspace(self.device, *args))
        return result

    def _of_fusion(self, fused: Fusion, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run fused calls: values are computed where they are read, but for the attention before a rounding."""
        if op_of(fused.made.target) is None:  # in place
            self._enter(fused.made)
            return self._quietly(function, *args)
        values = {n: value for n, value in zip(fused.args, args, strict=True) if isinstance(n, Node)}
        space = 0
        for node in fused.nodes:
            op, own = op_of(node.target), _filled(args_of(node), values)
            if op is not None and (node is fused.made or not op.inline):
                values[node] = self._called(op, node, own)
                space = max(space, op.workspace(self.device, *own) if op.workspace is not None else 0)
            else:
                values[node] = self._quietly(_call, node, values)
        self.watch.rise(space)  # workspace of an attention, held while its rounded result exists
        return values[fused.made]

    def _walked(self, region: Region, args: Sequence[Tensor]) -> tuple[Any, ...]:
        """Run a region node by node; values without further readers are freed."""
        values: dict[Node, Any] = dict(zip(region.inputs, args, strict=True))
        freed = _freed_after(region)
        for node in region.nodes:
            self._enter(node)
            values[node] = _call(node, values)
            for done in freed.get(node, ()):
                del values[done]
        return tuple(values[n] for n in region.outputs)

    def _walked_fused(self, region: Region, args: Sequence[Tensor]) -> tuple[Any, ...]:
        """Run a region as compiled code does it. A value that is not in memory holds its sources until it is read."""
        held: dict[Node, tuple[Any, ...]] = {n: (value,) for n, value in zip(region.inputs, args, strict=True)}
        in_memory, freed = _in_memory(region), _freed_after(region)
        for node in region.nodes:
            self._enter(node)
            value = self._quietly(_call, node, {n: held[n][0] for n in node.all_input_nodes})
            sources = [held[n] for n in node.all_input_nodes]
            held[node] = (value,) if is_view(node) or node in in_memory else (value, *sources)
            del sources
            done = freed.get(node, ())
            if node in in_memory and _name(node) not in _LIBRARY:
                # A kernel may write over a value that it is the last to read, if that is as large.
                for n in done:
                    if n in in_memory and _bytes(held[n][0]) == _bytes(value):
                        del held[n]
            if node in in_memory:
                self.watch.note(value)
            for n in done:
                held.pop(n, None)
            del value
        return tuple(held[n][0] for n in region.outputs)

    def _enter(self, node: Node | None) -> None:
        self._group = self._groups.get(node, "other") if node is not None else "other"

    def _quietly(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.watch.quiet = True
        try:
            return function(*args, **kwargs)
        finally:
            self.watch.quiet = False


def _dense(arg: Any, args: Sequence[Any]) -> Any:
    """Quantised weights and rows in the form of an op's schema, in the dtype of the rows; other arguments unchanged."""
    quantised = isinstance(arg, (QuantisedWeight, QuantisedRows))
    return arg.values.new_empty(arg.shape, dtype=args[0].dtype) if quantised else arg


def groups_of(graph: Graph) -> dict[Node, str]:
    """Group of each call of a graph, by its place; see `GROUPS`."""
    attention = {layer.index: _module(layer.attention) for layer in layers_of(graph)}
    products = {(n.meta["layer"], _module(n)) for n in graph.calls if _multiplies(n)}
    found, after = {}, False
    for node in reversed(graph.calls):
        layer, module = node.meta["layer"], _module(node)
        if layer is None:
            found[node] = "other" if after else HEAD
        elif module == attention.get(layer):
            found[node] = "projections" if linear_of(node) is not None else "attention"
        else:
            found[node] = "feed-forward" if module and (layer, module) in products else "norms"
        after = after or layer is not None
    return found


def _module(node: Node) -> str:
    """The module of its layer that a call came from: "self_attn" of "self_attn.q_proj"."""
    return str(node.meta.get("role") or "").partition(".")[0]


def _multiplies(node: Node) -> bool:
    return linear_of(node) is not None or op_of(node.target) is OPS["experts"]


def _in_memory(region: Region) -> set[Node]:
    """Nodes of a compiled region whose values are written to memory."""
    found = {viewed(node) for node in region.outputs}
    for node in region.nodes:
        if _name(node) in _LIBRARY:
            found.update(map(viewed, (node, *node.all_input_nodes)))
    return found.intersection(region.nodes)


def _freed_after(region: Region) -> dict[Node, list[Node]]:
    """By node of a region, the values made in it that nothing reads after it."""
    last: dict[Node, Node] = {}
    for node in region.nodes:
        last.update(dict.fromkeys((*node.all_input_nodes, node), node))
    freed: dict[Node, list[Node]] = {}
    for value, reader in last.items():
        if value not in region.inputs and value not in region.outputs:
            freed.setdefault(reader, []).append(value)
    return freed


def _call(node: Node, values: Mapping[Node, Any]) -> Any:
    """A node's result; an op that is inlined runs as its reference does."""
    op = op_of(node.target)
    function: Any = op.reference if op is not None and op.inline else node.target
    kwargs = torch.fx.map_arg(node.kwargs, values.__getitem__)
    return function(*_filled(args_of(node), values), **kwargs)


def _filled(args: Sequence[Any], values: Mapping[Node, Any]) -> Any:
    return torch.fx.map_arg(tuple(args), values.__getitem__)


def _name(node: Node) -> str:
    return op_name(node.target)


def _bytes(value: Any) -> int:
    return value.untyped_storage().nbytes() if isinstance(value, Tensor) else -1

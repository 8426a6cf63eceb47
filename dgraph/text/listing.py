"""A graph as plain values: named results, relative names. Text, JSON, HTML and diffs are made of it.

Names say nothing about fx or the version of torch:

    %3              the third value of the same layer
    %cos            a value outside the layers, by its op (%mul, %mul_1, ... where an op occurs again)
    layers[0].%3    a value of another layer
    %h              a value that a run of equal layers hands from one to the next; the run's header says where it starts
    q_proj.weight   a weight, relative to its layer; likewise `k_cache` is the layer's own `k_cache_3`
    b, t, N, b*t    a size; reads of sizes are not listed, the size stands where it is used
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from dgraph.frontend.places import split_layer
from dgraph.ir.graph import Graph
from dgraph.ops import op_of
from dgraph.types.nodes import op_name
from dgraph.types.shapes import DTYPES


@dataclass(frozen=True)
class Ref:
    """A named thing among the arguments of a call.

    Attributes:
        kind: "value", "carried", "input", "weight", "size" or "constant" (a dtype, a device).
        name: as it reads inside its own layer.
        layer: layer of a value, or the layer that the name of a weight or input is relative to.
    """

    kind: str
    name: str
    layer: int | None = None


@dataclass(frozen=True)
class Line:
    """One call.

    Attributes:
        results: a name per result, None for one that no call reads; empty for a call that only writes.
        op: its name.
        args, kwargs: literals, `Ref`s and tuples of them.
        types: a type per result.
        role, by, source: as in the graph.
        rows: row sets of the results, None where a result has none.
        cut: the stage that starts after this call ("suffix on K rows"); None where no stage does.
        nodes: node of each result, None for one that no call reads; equal lines may have other nodes.
    """

    results: tuple[str | None, ...]
    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    types: tuple[str, ...]
    rows: tuple[str | None, ...]
    role: str
    by: str
    source: str
    cut: str | None
    nodes: tuple[Node | None, ...] = field(default=(), compare=False, repr=False)

    def references(self) -> list[Ref]:
        """Every reference in order of occurrence."""
        return list(_refs((self.args, self.kwargs)))


@dataclass(frozen=True)
class Section:
    """Consecutive calls of one layer.

    Attributes:
        layer: its index, or None outside the layers.
        place: "in layers[3]", or "before", "between" or "after the layers".
        lines: in order.
    """

    layer: int | None
    place: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Listing:
    """A graph as plain values.

    Attributes:
        graph: the listed graph.
        sections: in order, layer by layer.
        outputs: per output its reference.
    """

    graph: Graph
    sections: tuple[Section, ...]
    outputs: dict[str, Ref]


def listing(graph: Graph) -> Listing:
    """List a graph."""
    lister = _Lister(graph)
    sections = lister.sections()
    outputs = {name: lister.reference(node, None) for name, node in graph.results().items()}
    return Listing(graph, sections, outputs)


def arguments_in(graph: Graph) -> Callable[[Any, int | None], Any]:
    """Give a function that says how a node or constant reads as an argument of a call in a layer."""
    lister = _Lister(graph)
    lister.sections()
    return lister._plain


class _Lister:
    """Walks a graph once, front to back, and names its values."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.names: dict[Node, Ref] = {}
        self.parts: dict[Node, list[Node]] = {}
        self.counts: Counter[int | None] = Counter()
        self.ops: Counter[str] = Counter()
        self.cuts = 0
        for node in graph.calls:
            several = isinstance(node.meta["val"], (tuple, list)) and len(node.users) > 0
            if several and all(u.target is operator.getitem for u in node.users):
                self.parts[node] = list(node.users)

    def sections(self) -> tuple[Section, ...]:
        found: list[tuple[int | None, list[Line]]] = []
        for node in self.graph.calls:
            if _is_size(node) or (node.target is operator.getitem and node.args[0] in self.parts):
                continue
            layer = node.meta["layer"]
            if not found or found[-1][0] != layer:
                found.append((layer, []))
            found[-1][1].append(self._line(node))
        return tuple(Section(layer, _place(i, found), tuple(lines)) for i, (layer, lines) in enumerate(found))

    def _line(self, node: Node) -> Line:
        value, layer = node.meta["val"], node.meta["layer"]
        results: list[str | None] = []
        values: list[Any] = []
        nodes: list[Node | None] = [node]
        if node in self.parts:
            values = list(value)
            taken = {int(part.args[1]): part for part in reversed(self.parts[node])}  # type: ignore[arg-type]
            for i, name in enumerate(self._new_names(node, len(values))):
                results.append(name if i in taken else None)
            nodes = [taken.get(i) for i in range(len(values))]
            for part in self.parts[node]:
                self.names[part] = Ref("value", str(results[int(part.args[1])]), layer)  # type: ignore[arg-type]
        elif value is not None:
            values = [value]
            results += self._new_names(node, 0)
            self.names[node] = Ref("value", str(results[0]), layer)
        return Line(
            tuple(results),
            op_name(node.target),
            self._arguments(node, layer),
            tuple((k, self._plain(v, layer)) for k, v in node.kwargs.items()),
            tuple(map(self.graph.symbols.type_text, values)),
            tuple(map(self.graph.symbols.row_set, values)),
            node.meta.get("role", ""),
            node.meta.get("by", ""),
            node.meta.get("source") or "",
            self._cut(node),
            tuple(nodes if values else ()),
        )

    def _new_names(self, node: Node, parts: int) -> list[str]:
        """Names of a call's results: numbers inside a layer, the op's name outside."""
        layer = node.meta["layer"]
        if layer is not None:
            start = self.counts[layer]
            self.counts[layer] += max(parts, 1)
            return [f"%{start + i}" for i in range(max(parts, 1))]
        op = op_name(node.target).rpartition(".")[2]
        name = f"%{op}_{self.ops[op]}" if self.ops[op] else f"%{op}"
        self.ops[op] += 1
        return [f"{name}.{i}" for i in range(parts)] if parts else [name]

    def _cut(self, node: Node) -> str | None:
        op = op_of(node.target)
        if op is None or not op.cut:
            return None
        self.cuts += 1
        return f"suffix{f' {self.cuts}' if self.cuts > 1 else ''} on {node.meta.get('rows', '?')} rows"

    def reference(self, node: Node, layer: int | None) -> Ref:
        """A node as an argument of a call in `layer`."""
        if "weight" in node.meta:
            index, rest = split_layer(node.meta["weight"])
            own = layer is not None and index == layer
            return Ref("weight", rest if own else node.meta["weight"], layer if own else None)
        if "input" in node.meta:
            base, _, index_text = node.meta["input"].rpartition("_")
            spec = self.graph.inputs[node.meta["input"]]
            table = bool(spec.window) and not spec.in_place  # it has the number of a window, not of a layer
            own = layer is not None and index_text == str(layer) and not table
            return Ref("input", base if own else node.meta["input"], layer if own else None)
        if _is_size(node):
            return Ref("size", self.graph.symbols.text(node.meta["val"]))
        return self.names.get(node) or Ref("value", f"%{node.name}", node.meta["layer"])  # several results as one

    def _arguments(self, node: Node, layer: int | None) -> tuple[Any, ...]:
        """Arguments in order. An op's own layer, as a number, reads as `layer`, so that equal layers read alike."""
        schema = getattr(node.target, "_schema", None)
        names = [a.name for a in schema.arguments] if schema is not None else []
        own = [name == "layer" and layer is not None and a == layer for name, a in zip(names, node.args, strict=False)]
        own += [False] * (len(node.args) - len(own))
        return tuple(
            Ref("constant", "layer") if mine else self._plain(a, layer) for mine, a in zip(own, node.args, strict=True)
        )

    def _plain(self, value: Any, layer: int | None) -> Any:
        if isinstance(value, Node):
            return self.reference(value, layer)
        if isinstance(value, (tuple, list)):
            return tuple(self._plain(v, layer) for v in value)
        if isinstance(value, torch.dtype):
            return Ref("constant", DTYPES.get(value, str(value)))
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        return Ref("constant", str(value))


def _place(index: int, sections: list[tuple[int | None, list[Line]]]) -> str:
    layer = sections[index][0]
    if layer is not None:
        return f"in layers[{layer}]"
    inner = [i for i, (other, _) in enumerate(sections) if other is not None]
    if not inner:
        return "all calls"
    if index < inner[0]:
        return "before the layers"
    return "after the layers" if index > inner[-1] else "between the layers"


def _is_size(node: Node) -> bool:
    return isinstance(node.meta["val"], (int, torch.SymInt))


def _refs(value: Any) -> Iterable[Ref]:
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _refs(item)


def map_refs(value: Any, change: Callable[[Ref], Any]) -> Any:
    """Nested arguments with every reference replaced."""
    if isinstance(value, Ref):
        return change(value)
    return tuple(map_refs(v, change) for v in value) if isinstance(value, tuple) else value

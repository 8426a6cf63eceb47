"""Scheduling: a graph as alternating regions and calls, cut into stages.

Some ops are opaque to a compiler (attention over a paged cache, the selection of rows); all others act row by row and
fuse. A *region* is everything that fuses between two opaque calls. In a transformer nearly all regions are alike:
out-projection, residual, norm, feed-forward, residual, norm, qkv-projection, rotary embedding. With weights as inputs
their texts are equal, so one is compiled and serves every layer, stage and bucket. On a GPU some calls absorb ops
that would else be a part of a region (`dgraph.lowering.peephole`).

A node is placed as late as possible: in the region of its first reader. So a value lives no longer than it must. Values
that a layer derives from shared tables (cos, sin) are derived inside that layer's region. An op that is declared to run
ahead, because every layer reads its result, is placed as early as possible instead. Nothing moves across a stage cut,
and a reader of an input that is written in place moves across no write of it.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from dgraph.errors import LoweringError
from dgraph.ir.graph import Graph
from dgraph.ir.quantised_operands import executing_op, inputs_of, is_fused_operand, readers_of
from dgraph.lowering.peephole import Fusion, fusions_of, results_of
from dgraph.ops import Op, op_of
from dgraph.types.nodes import args_of, where


@dataclass(frozen=True)
class Region:
    """Nodes that are compiled together.

    Attributes:
        nodes: in order.
        inputs: values from outside, in order of first use (weights and run-time inputs among them).
        outputs: values that are read outside, in order.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]


@dataclass(frozen=True)
class Call:
    """One opaque call, and the nodes that name its results (one node, or one per part of a tuple).

    Attributes:
        node: the call.
        results: the parts of its result, with the node of each.
        op: the op that runs it.
    """

    node: Node
    results: tuple[tuple[int | None, Node], ...]
    op: Op

    @property
    def inputs(self) -> Sequence[Node]:
        """The values that it reads, each once."""
        return inputs_of(self.node.all_input_nodes)


@dataclass(frozen=True)
class Stage:
    """Steps that run without a host read.

    Attributes:
        name: as `schedule` was told for an uncut graph, else "prefix", "suffix", "suffix 2", ...
        steps: in order.
        rows: the row set that the stage runs on (N, K, ...).
        cut: the call after which the next stage starts; None in the last stage.
    """

    name: str
    steps: tuple[Region | Call | Fusion, ...]
    rows: str
    cut: Call | None


def schedule(graph: Graph, fused: bool | None = None, name: str = "step") -> tuple[Stage, ...]:
    """Cut a graph into stages of regions and calls.

    Args:
        graph: a phase's.
        fused: True if calls absorb others (`dgraph.lowering.peephole`); None: on a GPU.
        name: of the only stage of an uncut graph.

    Raises:
        LoweringError: an attention over a padded batch is left in the graph; PackRows has to run first.
    """
    for node in graph.find("attention"):
        raise LoweringError(
            f"{where(node)}: attention over a padded batch cannot be lowered; put PackRows in the recipe."
        )
    fuses = graph.device.type == "cuda" if fused is None else fused
    units = _Units(graph, fusions_of(graph) if fuses else {})
    levels = _levels(units)
    placed = _placed(units, levels)
    stages: list[Stage] = []
    steps: list[Region | Call | Fusion] = []
    rows = "N"
    members: dict[int, list[Node]] = defaultdict(list)
    calls: dict[int, list[Node]] = defaultdict(list)
    for node in units.nodes:
        if node in placed:
            members[placed[node]].append(node)
        elif units.is_opaque(node):
            calls[levels[node]].append(node)
    for level in sorted(members.keys() | calls.keys()):
        if level in members:
            steps.append(_region(members[level]))
        for node in calls[level]:
            if node in units.fused:
                steps.append(units.fused[node])
                continue
            op = executing_op(node)
            assert op is not None  # it is opaque
            call = Call(node, results_of(node), op)
            if _is_cut(node):
                stages.append(Stage("", tuple(steps), rows, call))
                steps, rows = [], node.meta["rows"]
            else:
                steps.append(call)
    stages.append(Stage("", tuple(steps), rows, None))
    names = _stage_names(len(stages), name)
    return tuple(Stage(name, s.steps, s.rows, s.cut) for name, s in zip(names, stages, strict=True))


class _Units:
    """The calls of a graph as they are scheduled.

    Attributes:
        fused: the calls that absorb others, by node.
        nodes: in order, without those that are absorbed.
    """

    def __init__(self, graph: Graph, fused: Mapping[Node, Fusion]):
        self.graph, self.fused = graph, fused
        self._absorbed = {each: node for node, found in fused.items() for each in found.absorbed}
        self.nodes = [node for node in graph.calls if node not in self._absorbed and not is_fused_operand(node)]

    def is_opaque(self, node: Node) -> bool:
        """True if nothing fuses with a node."""
        return node in self.fused or _is_opaque(node)

    def is_part(self, node: Node) -> bool:
        """True if a node picks one result of a node with which nothing fuses."""
        return node.target is operator.getitem and self.is_opaque(args_of(node)[0])

    def inputs(self, node: Node) -> Sequence[Node]:
        """Nodes that a node reads."""
        return self.fused[node].inputs if node in self.fused else inputs_of(node.all_input_nodes)

    def readers(self, node: Node) -> list[Node]:
        """Nodes that read a node; an absorbed call counts as the call that absorbs it."""
        return [self._absorbed.get(reader, reader) for reader in readers_of(node)]


def _stage_names(count: int, only: str) -> Iterable[str]:
    if count == 1:
        return (only,)
    return ("prefix", "suffix", *(f"suffix {i}" for i in range(2, count)))


def _is_opaque(node: Node) -> bool:
    op = executing_op(node)
    return op is not None and not op.inline


def _is_cut(node: Node) -> bool:
    op = op_of(node.target)
    return op is not None and op.cut


def _runs_ahead(node: Node) -> bool:
    op = op_of(node.target)
    return op is not None and op.ahead


def _written_by(node: Node) -> list[Node]:
    """The inputs that an opaque call writes in place."""
    op = op_of(node.target)
    return op.written(args_of(node)) if op is not None else []


def _levels(units: _Units) -> dict[Node, int]:
    """The level of each node: region l runs before all opaque calls of level l, and these in the graph's order.

    A node after an opaque call is a level higher than it; opaque calls that wait for nothing but each other share one.
    Levels of opaque calls never fall along the graph, so they keep their order and no cache is read before its write. A
    compiled node that reads a cache waits for the writes before it, as for a call whose result it reads. The writes
    after it are on no lower level than it. A cut is on the level of the last thing before it.
    """
    levels: dict[Node, int] = {}
    written: dict[Node, int] = {}
    read: dict[Node, int] = {}
    lowest = 0
    for node in units.nodes:
        if units.is_part(node):
            levels[node] = levels[args_of(node)[0]]
            continue
        opaque, level = units.is_opaque(node), 0
        for arg in units.inputs(node):
            if arg in levels:
                after_call = units.is_opaque(arg) or units.is_part(arg)
                level = max(level, levels[arg] + (1 if after_call and not opaque else 0))
            elif arg in written and not opaque:
                level = max(level, written[arg] + 1)
        if opaque:
            level = lowest = max(level, lowest, *(read.get(cache, 0) for cache in _written_by(node)))
        if _is_cut(node):
            level = lowest = max(level, *levels.values(), 0)
        levels[node] = level
        if opaque:
            written.update(dict.fromkeys(_written_by(node), level))
        else:
            read.update({arg: max(level, read.get(arg, 0)) for arg in node.all_input_nodes if arg not in levels})
    return levels


def _placed(units: _Units, levels: dict[Node, int]) -> dict[Node, int]:
    """Level of the region of each node that is not opaque: that of its first reader.

    The level is never after a cut, nor after a later write of an input of the node. An op that runs ahead is on its own
    level.
    """
    cuts = [n for n in units.nodes if _is_cut(n)]
    end = max(levels.values(), default=0) + 1
    placed: dict[Node, int] = {}
    later: dict[Node, int] = {}
    for node in reversed(units.nodes):
        if units.is_opaque(node):
            later.update(dict.fromkeys(_written_by(node), levels[node]))
        if units.is_opaque(node) or units.is_part(node):
            continue
        at = min((placed.get(u, levels.get(u, end)) for u in units.readers(node)), default=end)
        bounds = [levels[c] for c in cuts if node < c]
        bounds += [later[a] for a in node.all_input_nodes if a in later]
        placed[node] = levels[node] if _runs_ahead(node) else min([at, *bounds])
        if isinstance(node.meta["val"], (tuple, list)):  # only its parts leave a region
            placed.update(dict.fromkeys(node.users, placed[node]))
    return placed


def _region(members: list[Node]) -> Region:
    inside = set(members)
    inputs = dict.fromkeys(a for n in members for a in n.all_input_nodes if a not in inside)
    outputs = [n for n in members if any(u not in inside for u in n.users)]
    return Region(tuple(members), tuple(inputs), tuple(outputs))

"""Chunks of rows: run instructions on some rows at a time, so that the values between them stay small.

A transformer acts row by row except in attention. So the instructions between two calls that look at other rows can run
on one part of the rows after the other. Their values on the way (gate and up, their product, the normed rows) exist for
that part only. The largest of these is six times as wide as the hidden state. For a prompt of 32k rows it would be the
largest tensor of a forward.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.ir.aten_rules import axes_of
from dgraph.ir.graph import Graph
from dgraph.lowering.instructions import AnyInstruction, Instruction, RowChunks
from dgraph.lowering.peephole import Fusion
from dgraph.lowering.schedule import Call, Region
from dgraph.ops import OPS, op_of
from dgraph.types.nodes import args_of, is_view, viewed
from dgraph.types.shapes import Symbols, is_row_set

CHUNK_ROWS = 24576
"""Most rows of a chunk.

They are far more than fill a device. Results of chunks are copied together, and a stage that runs in chunks is not
captured. So a batch of a few sequences of usual length runs whole. Yet for a prompt of 32k tokens, the values between
instructions stay small beside keys and values.
"""


@dataclass(frozen=True)
class Slicing:
    """Cutting of a step into chunks.

    Attributes:
        rows: the row set, which is the first dimension of everything that has rows.
        count: the argument with the number of live rows; None if the step need not know it.
    """

    rows: str
    count: Node | None = None


def slicing_of(graph: Graph, step: Region | Call | Fusion) -> Slicing | None:
    """Cutting of a step into chunks; None if the step looks at several rows at once, or at none."""
    if isinstance(step, Region):
        rows = _rows_of_region(graph.symbols, step)
        return Slicing(rows) if rows else None
    if isinstance(step, Fusion):
        rows = _row_set(graph.symbols, step.inputs[0])
        alike = all(_row_set(graph.symbols, node) in (rows, "") for node in step.inputs)
        return Slicing(rows) if step.by_row and is_row_set(rows) and alike else None
    op, args = step.op, args_of(step.node)
    if op.count is None and op is not OPS["linear"]:
        return None
    by_row = op.values(op.by_row, args)
    found = {_row_set(graph.symbols, n) for n in by_row}
    rows = found.pop() if len(found) == 1 else ""
    if not is_row_set(rows) or any(_row_set(graph.symbols, n) for n in step.node.all_input_nodes if n not in by_row):
        return None
    return Slicing(rows, op.counter(args))


def in_chunks(
    graph: Graph,
    origins: Sequence[Region | Call | Fusion],
    instructions: Sequence[Instruction],
    numbers: Mapping[Node, int],
    outside: Collection[int],
    limit: int,
) -> tuple[AnyInstruction, ...]:
    """Join the instructions of a stage that run in chunks.

    Args:
        graph: the graph of the instructions.
        origins: the region or call that each instruction was lowered from.
        instructions: in order.
        numbers: registers of nodes.
        outside: registers that something outside of `instructions` reads.
        limit: rows of a chunk, at least 1.
    """
    slicings = [slicing_of(graph, origin) for origin in origins]
    last = {register: i for i, instruction in enumerate(instructions) for register in instruction.reads()}
    found: list[AnyInstruction] = []
    for rows, group in groupby(range(len(instructions)), key=lambda i: one.rows if (one := slicings[i]) else None):
        at = list(group)
        members = instructions[at[0] : at[-1] + 1]
        if rows is None:
            found += members
            continue
        after = {register for register, reader in last.items() if reader > at[-1]}.union(outside)
        counts = {one.count for i in at if (one := slicings[i]) is not None and one.count is not None}
        joined = _joined(graph, origins[at[0] : at[-1] + 1], members, counts, numbers, after, limit)
        found += [joined] if joined else members
    return tuple(found)


def _joined(
    graph: Graph,
    origins: Sequence[Region | Call | Fusion],
    members: Sequence[Instruction],
    counts: Collection[Node],
    numbers: Mapping[Node, int],
    after: Collection[int],
    limit: int,
) -> RowChunks | None:
    """Join instructions that follow each other; None if chunks would save nothing."""
    nodes = [n for o in origins for n in _made_by(o)]
    outputs = {n for n in nodes if numbers.get(n) in after}
    held = {viewed(n) for n in outputs}
    if all(n in held or is_view(n) or not _row_set(graph.symbols, n) for n in nodes):
        return None
    outside: dict[Node, None] = {}
    inside = set(nodes)
    for origin in origins:
        outside.update(dict.fromkeys(n for n in origin.inputs if n not in inside))
    rowed = [n for n in outside if _row_set(graph.symbols, n)]
    # A count differs from chunk to chunk, so nothing else may read it, and it must be there before the first.
    plain = {n for o in origins if isinstance(o, Region) for n in o.inputs}
    if any(n in plain or n not in outside for n in counts):
        return None
    return RowChunks(
        members,
        [numbers[n] for n in rowed],
        sorted(numbers[n] for n in counts),
        [numbers[n] for n in nodes if n in outputs],
        limit,
    )


def _made_by(origin: Region | Call | Fusion) -> Sequence[Node]:
    """Nodes whose values a step makes."""
    return origin.nodes if isinstance(origin, Region) else [part for _, part in origin.results]


def _rows_of_region(symbols: Symbols, region: Region) -> str:
    """The one row set of a region that acts row by row; "" if it does not."""
    found = {_row_set(symbols, node) for node in (*region.inputs, *region.nodes)} - {""}
    if len(found) != 1 or _MIXED in found:
        return ""
    if not all(_acts_by_row(symbols, node) for node in region.nodes):
        return ""
    return found.pop() if all(_row_set(symbols, node) for node in region.outputs) else ""


def _acts_by_row(symbols: Symbols, node: Node) -> bool:
    """True if a row of a node's result depends only on the same row of its arguments; none of these is mixed."""
    target, args = node.target, args_of(node)
    rowed = [n for n in node.all_input_nodes if _row_set(symbols, n)]
    if target is operator.getitem:
        return isinstance(args[0].meta["val"], (tuple, list))
    if bool(rowed) != bool(_row_set(symbols, node)):
        return False
    tags: Collection[Any] = getattr(target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags or target._schema.is_mutable:  # type: ignore[union-attr]
        return False
    if not rowed:
        return True
    if (op := op_of(target)) is not None:
        return set(rowed) <= set(op.values(op.by_row, args))
    axes = axes_of(node)
    return axes is not None and all(passage.dims[0] == 0 for passage in axes.passages if passage.node in rowed)


_MIXED = "?"
"""Row set of a value with rows outside its first dimension, or with sizes that are no tensor's."""


def _row_set(symbols: Symbols, node: Node) -> str:
    """The row set that is the first dimension of a value; "" if it has no rows at all."""
    value = node.meta["val"]
    found = {_rows_of_tensor(symbols, v) for v in (value if isinstance(value, (tuple, list)) else (value,))}
    return found.pop() if len(found) == 1 else _MIXED


def _rows_of_tensor(symbols: Symbols, value: Any) -> str:
    if not isinstance(value, Tensor):
        return _MIXED
    if not any(is_row_set(name) for size in value.shape for name in symbols.names_in(size)):
        return ""
    first = symbols.row_set(value)
    rest = (name for size in value.shape[1:] for name in symbols.names_in(size))
    return first if first and not any(map(is_row_set, rest)) else _MIXED

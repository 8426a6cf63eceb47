"""Row orders: which rows a value is over, and in which order.

Values over one row set need not belong together. `list_kept` moves rows to the front and keeps their number N. Then row
i of a moved value is not row i of one that stayed, though both are over N. So a row set is followed from the inputs on,
with the list by which its rows were taken. Offsets are followed alike, and lists of row numbers with the rows that they
number.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from dgraph.ir.graph import ALL, DECISION, Graph
from dgraph.ops import op_of
from dgraph.types.nodes import args_of, op_name, where
from dgraph.types.shapes import is_row_set

_LISTS = ("keep_index", "list_kept")
_DECISION = (*DECISION, "confidence", "margin", "entropy")


class Orders:
    """The row orders of a graph.

    Attributes:
        of: order of each value over rows, by node: a row set, or one with the list by which its rows were taken.
        offsets: order of each value that holds offsets per sequence.
        numbers: for each list of row numbers, the order of the rows that they number.
        lists: for each order but that of all rows, the call that lists its rows.
        broken: one message per call that reads values of several orders and may not.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.of: dict[Node, str] = {}
        self.offsets: dict[Node, str] = {}
        self.numbers: dict[Node, str] = {}
        self.lists: dict[str, Node] = {}
        self.broken: list[str] = []
        for node in graph.fx.nodes:
            if node.op == "placeholder":
                if node.meta.get("input") == "cu_rows":
                    self.offsets[node] = ALL
                elif rows := graph.row_set(node):
                    self.of[node] = rows
            elif node.op == "call_function" and node.target is not operator.getitem:
                self._call(node)

    def _call(self, node: Node) -> None:
        op, read = op_of(node.target), node.all_input_nodes
        name = op.name if op is not None else ""
        if name in _LISTS:
            flags = args_of(node)[0]
            self._one(node, read)
            order = node.meta.get("rows") or f"{self.of.get(flags, ALL)} listed by {node.name}"
            self.lists[order] = node
            for part in _parts(node):
                if args_of(part)[1] == 1:
                    self.offsets[part] = order
                    continue
                self.of[part] = order
                if flags in self.of:
                    self.numbers[part] = self.of[flags]
        elif name == "compact":
            self._gather(node)
        else:
            own = [] if op is None else [a for a in op.values(op.own_rows, args_of(node)) if isinstance(a, Node)]
            if own:
                self._some(node, own)
                read = sorted(read, key=lambda arg: arg in own)
            elif op is None or not op.gathers:
                self._one(node, read)
            self._give(node, [self.of[arg] for arg in read if arg in self.of])
            if node.target is torch.ops.aten.masked_fill.Scalar and args_of(node)[0] in self.numbers:
                self.numbers[node] = self.numbers[args_of(node)[0]]

    def _gather(self, node: Node) -> None:
        values, index = args_of(node)
        wanted = self.numbers.get(index)
        if wanted is None:
            self.broken.append(
                f"{where(node)} (dgraph.compact) gathers by {index.name}, which may number rows of any sequence; "
                f"expected a list of dgraph.list_kept or dgraph.keep_index (Graph.keep_rows makes one)"
            )
        for value in values:
            if wanted is not None and self.of.get(value, wanted) != wanted:
                self.broken.append(
                    f"{where(node)} (dgraph.compact) gathers {value.name} over {self.of[value]} by {index.name}, whose "
                    f"numbers are of rows {wanted}"
                )
        for part in _parts(node):
            value = values[args_of(part)[1]]
            if index in self.of:
                self.of[part] = self.of[index]
            if value in self.numbers:
                self.numbers[part] = self.numbers[value]

    def _one(self, node: Node, values: Sequence[Node]) -> None:
        """These arguments of a call are of one order; a size that was read early is of the earlier row set."""
        found: dict[str, str] = {}
        for arg in values:
            if (order := self.of.get(arg) or self.offsets.get(arg)) is not None:
                found.setdefault(order, arg.name)
        sets = {order.partition(" ")[0] for order in found}
        for arg in values:
            size = arg.meta["val"]
            if isinstance(size, torch.SymInt):
                names = self.graph.symbols.names_in(size)
                found.update({name: arg.name for name in names if is_row_set(name) and name not in sets})
        if len(found) > 1:
            got = ", ".join(f"{name} over {order}" for order, name in sorted(found.items()))
            self.broken.append(
                f"{where(node)} ({op_name(node.target)}) mixes row sets: {got}; expected one; compact the others, and "
                f"redirect offsets to those of the rows (Graph.keep_rows does both)"
            )

    def _some(self, node: Node, own: Sequence[Node]) -> None:
        """A call of which some arguments have rows of their own: one order for these, one for the others, and offsets
        of no others."""
        for values in (own, [arg for arg in node.all_input_nodes if arg not in own]):
            self._one(node, [arg for arg in values if arg not in self.offsets])
        rows = {self.of[a] for a in node.all_input_nodes if a in self.of}
        for arg in node.all_input_nodes:
            if arg in self.offsets and rows and self.offsets[arg] not in rows:
                self.broken.append(
                    f"{where(node)} ({op_name(node.target)}) takes {arg.name}, offsets of rows {self.offsets[arg]}, "
                    f"but its rows are {', '.join(sorted(rows))}; redirect it to the offsets of these"
                )

    def _give(self, node: Node, orders: list[str]) -> None:
        """A result is of the first order whose rows it has; those of arguments with rows of their own come last."""

        def of(value: Any) -> str | None:
            rows = self.graph.symbols.row_set(value)
            return next((order for order in orders if order.partition(" ")[0] == rows), rows)

        value = node.meta["val"]
        if not isinstance(value, (tuple, list)):
            if order := of(value):
                self.of[node] = order
            return
        for part in _parts(node):
            if order := of(value[args_of(part)[1]]):
                self.of[part] = order


def list_of(part: Node) -> Node | None:
    """The `list_kept` that a node is the row numbers or the offsets of; None if it is of none."""
    made = args_of(part)[0] if part.target is operator.getitem else None
    op = None if made is None else op_of(made.target)
    return made if op is not None and op.name == "list_kept" else None


def broken_decision(orders: Orders) -> Iterator[str]:
    """Violations of a rule: decisions are over all rows of the step in their order, or over the rows in `kept`.

    The host commits a token by the number of its row: without `kept` it would take the tokens of other rows.
    """
    results = orders.graph.results()
    decided = {name: orders.of[results[name]] for name in _DECISION if results.get(name) in orders.of}
    if not decided:
        return
    kept = results.get("kept")
    if kept is None:
        for name, order in decided.items():
            if order != ALL:
                yield (
                    f"output {name} is over rows {order}, made by {results[name].meta['by'] or 'the model'}, and no "
                    f"output 'kept' says which these are of all rows {ALL}; shorten rows with Graph.keep_rows, which "
                    f"adds it"
                )
        return
    for name, order in decided.items():
        if order != orders.of.get(kept):
            yield f"output {name} is over rows {order}, output kept over {orders.of.get(kept)}; expected one row set"
    if orders.numbers.get(kept) != ALL:
        got = orders.numbers.get(kept, "nothing that is known")
        yield (
            f"output kept ({where(kept)}) numbers the rows of {got}; expected numbers among all rows {ALL}, through "
            f"each list on the way (Graph.numbers_of)"
        )


def _parts(node: Node) -> list[Node]:
    return [user for user in node.users if user.target is operator.getitem]

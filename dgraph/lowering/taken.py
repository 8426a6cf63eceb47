"""Pass quantised operands to GEMM kernels without dequantising them: stored weights, and rows in 8 bits.

A product by `dgraph::dequantise` of a weight reads the inputs of the dequantisation: values, scales and zeros, as one
`dgraph.families.quantised.QuantisedWeight`. The dequantised weight never lies in memory. A linear layer is then a call
of `dgraph::linear`, and no part of a region; ops that multiply by weights say so (`Op.stored`). Where any other op
reads the dequantised weight, it is computed, like any other value.

A lookup of ids in such a weight is `dgraph::embedding_stored`, which dequantises the rows that it reads.

A product that reads rounded rows (`dgraph::round_rows`) takes them as numbers and scales, as one
`dgraph.families.quantised.QuantisedRows` (`Op.rounded`). Its weight must be stored in numbers of the same kind with a
scale for each of its rows. `as_taken` rewrites such products. Rounding then makes numbers and scales, which fuse into
the op that makes the rows, and the rounded values never lie in memory.

Where rows are listed, only the device knows their number. A fused op would run on as many as there is room for; on a
GPU a kernel rounds only the listed rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.fx import Node

from dgraph.ir.graph import Graph
from dgraph.ir.linears import unit_of
from dgraph.ir.row_order import list_of
from dgraph.ir.stored_weights import stored_of
from dgraph.ops import OPS, Op, op_of
from dgraph.types.nodes import args_of

aten = torch.ops.aten

LINEAR = aten.linear.default
_WEIGHTS, _ROWS = OPS["dequantise"].overload, OPS["dequantise_rows"].overload


def is_taken(node: object) -> bool:
    """True if a node dequantises a weight, or rows, and is read only by products that take the quantised form."""
    if not isinstance(node, Node) or node.target not in (_WEIGHTS, _ROWS):
        return False
    return bool(node.users) and all(_takes(user, node) for user in node.users)


def _takes(user: Node, value: Node) -> bool:
    """True if a call multiplies by a weight, or by rounded rows, and reads them in no other place."""
    args = args_of(user)
    op = OPS["linear"] if user.target is LINEAR else op_of(user.target)
    if op is None or user.kwargs:
        return False
    names = op.stored if value.target is _WEIGHTS else op.rounded
    return sum(arg is value for arg in op.values(names, args)) == sum(arg is value for arg in args) > 0


def as_taken(graph: Graph, on_gpu: bool = False) -> Graph:
    """Rewrite a graph so that products take rounded rows as quantised, and lookups read quantised weights as stored.

    Returns the graph itself if it has neither.

        before  %6 = dgraph.round_rows(%5, 'int8')                                       f32[N, 64]
                %7 = linear(%6, %4)                                                      f32[N, 32]
        after   %6, %7 = dgraph.quantise_rows(%5, 'int8')                                (i8[N, 64], f32[N, 1])
                %8 = dgraph.dequantise_rows(%6, %7, torch.float32)                       f32[N, 64]
                %9 = linear(%8, %4)                                                      f32[N, 32]

    Rows that are gathered are rounded after the gather, which gives a product the same values.

    on_gpu: rows that products count by a list are normed and rounded by a kernel that stops after them. A product of
    gate and up by packed rows becomes `dgraph::rows_glu`, where rows are taken as quantised or are of 16 bits. Packed
    rows are all of a step's, or those that an eviction kept. Gate and up are then never stored.
    """
    graph = _rounded_as_taken(graph, on_gpu)
    return _with_units(graph) if on_gpu and "cu_rows" in graph.inputs else graph


def _rounded_as_taken(graph: Graph, on_gpu: bool) -> Graph:
    """Rewrite rounded rows and lookups of a graph; gated units are left as they are."""
    if not graph.find("round_rows") and not _lookups_in(graph):
        return graph
    graph = graph.copy()
    for node in _lookups_in(graph):
        (*stored, block, dtype), ids = args_of(args_of(node)[0]), args_of(node)[1]
        first = args_of(node)[2] if node.target is OPS["embedding_part"].overload else None
        args = (*stored, ids, first, block, dtype)
        graph.replace(node, graph.call(OPS["embedding_stored"], args, before=node, by=node.meta["by"]))
    for node in graph.find("round_rows"):
        for gather in [user for user in node.users if user.target is OPS["compact"].overload]:
            _round_after(graph, node, gather)
    for node in graph.find("round_rows"):
        if _can_be_taken(node):
            by = node.meta["by"]
            if (count := _count_of(node) if on_gpu else None) is None:
                made = graph.call(OPS["quantise_rows"], args_of(node), before=node, by=by)
            else:
                _stop_norm_after(graph, node, count)
                made = graph.call(OPS["rows_quantise"], (*args_of(node), count), before=node, by=by)
            args = (*graph.parts(made, 2, by), node.meta["val"].dtype)
            graph.replace(node, graph.call(OPS["dequantise_rows"], args, before=node, by=by))
    graph.sweep()
    return graph


def _with_units(graph: Graph) -> Graph:
    """Replace the gated units of a graph by calls where that pays; the graph itself if it has no such units."""
    if not _units_in(graph):
        return graph
    graph = graph.copy()
    for linear, product in _units_in(graph):
        rows = graph.row_set(linear)
        assert rows is not None  # it has packed rows
        args = (*(*args_of(linear), None)[:3], graph.offsets_of(rows))
        graph.replace(product, graph.call(OPS["rows_glu"], args, before=linear, by=linear.meta["by"]))
    graph.sweep()
    return graph


def _units_in(graph: Graph) -> list[tuple[Node, Node]]:
    """Linear layers over packed rows, with the product silu(gate) * up after each, where `dgraph::rows_glu` pays.

    It pays for rounded rows, and for rows of 16 bits where its kernel multiplies these as fast as the library does.
    """
    found = []
    roles = graph.device.type != "cuda" or torch.cuda.get_device_capability(graph.device) == (9, 0)
    for node in graph.calls:
        if node.target is LINEAR and graph.row_set(args_of(node)[0]) is not None:
            unit = unit_of(node) if _takes_both(node) or (roles and _is_short(node)) else None
            if isinstance(unit, Node):
                found.append((node, unit))
    return found


def _is_short(node: Node) -> bool:
    """True if a linear layer multiplies rows of 16 bits by a weight of the model, or by one that it takes as stored."""
    x, weight = args_of(node)[:2]
    dtypes = {x.meta["val"].dtype, weight.meta["val"].dtype}
    return ("weight" in weight.meta or is_taken(weight)) and len(dtypes) == 1 and dtypes.pop().itemsize == 2


def _lookups_in(graph: Graph) -> list[Node]:
    """Lookups of ids in a weight that is dequantised."""
    targets = aten.embedding.default, OPS["embedding_part"].overload
    return [node for node in graph.calls if node.target in targets and args_of(node)[0].target is _WEIGHTS]


def _round_after(graph: Graph, rounded: Node, gather: Node) -> None:
    """Move a rounding behind a gather: gather the rows before they are rounded, and round the gathered rows."""
    (values, index), (x, kind) = args_of(gather), args_of(rounded)
    for part in list(gather.users):
        if values[args_of(part)[1]] is rounded:
            again = graph.call(OPS["round_rows"], (part, kind), before=part.next, by=rounded.meta["by"])
            graph.redirect(part, again, after=again)
    gather.args = ([x if value is rounded else value for value in values], index)


def _can_be_taken(rounded: Node) -> bool:
    """True if all readers of rounded rows are products that take them as quantised, and their weights as stored."""
    kind = args_of(rounded)[1]
    for user in rounded.users:
        args = args_of(user)
        op = OPS["linear"] if user.target is LINEAR else op_of(user.target)
        if op is None or user.kwargs or rounded not in op.values(op.rounded, args):
            return False
        if sum(arg is rounded for arg in args) > 1:
            return False
        for weight in op.values(op.stored, args):
            stored = stored_of(weight)
            if not is_taken(weight) or stored is None or stored.row_kind != kind:
                return False
    return bool(rounded.users)


def _count_of(rounded: Node) -> Node | None:
    """Node that counts rounded rows [N, d] for all their readers; None if they are not listed on the device."""
    ops = [(op_of(user.target), args_of(user)) for user in rounded.users]
    counts = {None if op is None else op.counter(args) for op, args in ops}
    count = counts.pop() if len(counts) == 1 and rounded.meta["val"].dim() == 2 else None
    return count if count is not None and list_of(count) is not None else None


def _stop_norm_after(graph: Graph, rounded: Node, count: Node) -> None:
    """Let a norm of rows that only the rounding reads stop after the counted rows."""
    norm = args_of(rounded)[0]
    if norm.target is OPS["rms_norm"].overload and len(norm.users) == 1:
        counted = graph.call(OPS["rows_norm"], (*args_of(norm), count), before=norm, by=norm.meta["by"])
        graph.replace(norm, counted)


def _takes_both(node: Node) -> bool:
    """True if a linear layer takes rows as quantised, and a weight as stored."""
    x, weight = args_of(node)[:2]
    return x.target is _ROWS and is_taken(x) and is_taken(weight)


def run_by(node: Node) -> Op | None:
    """The op of dgraph that runs a call; None for calls of torch."""
    op = op_of(node.target)
    if op is None and node.target is LINEAR and is_taken(args_of(node)[1]):
        return OPS["linear"]
    return op


def arguments_of(node: Node, op: Op) -> tuple[object, ...]:
    """Arguments of a call in the form that the op which runs it takes."""
    args = args_of(node)
    return args if op is op_of(node.target) else (*args, None)[: len(op.arguments)]


def inputs_of(nodes: Iterable[Node]) -> Sequence[Node]:
    """Values that a call of these arguments reads, each once; a weight that is taken as stored counts by its parts."""
    found: dict[Node, None] = {}
    for node in nodes:
        found.update(dict.fromkeys(node.all_input_nodes if is_taken(node) else (node,)))
    return tuple(found)


def readers_of(node: Node) -> list[Node]:
    """Calls that read a value; a dequantisation that is taken counts as its own readers."""
    return [reader for user in node.users for reader in (user.users if is_taken(user) else (user,))]

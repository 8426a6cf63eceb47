"""The row rule: each request's rows, and each sequence's state, depend on its own entries alone.

Rows, sequences, keys, pages and entries of a program are those of many requests, side by side along the leading
dimension of a value. An op may act on each entry by itself, as `dgraph.ir.aten_rules` says of ops of torch. An op of
`dgraph.ops` may look at several rows where it declares how it tells sequences apart. Everything else mixes requests.
A mixed value may be returned as a number for the whole step, but may reach no row, no state and no cache.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.ir.aten_rules import Rule, rule_of
from dgraph.ir.axes import Axes, Call
from dgraph.ir.graph import DECISION, Graph
from dgraph.ops import Op, op_of
from dgraph.types.nodes import args_of, op_name, where
from dgraph.types.shapes import OFFSETS, Symbols, is_row_set, leads, without_window

DRAWS = (
    "draws numbers, which depend on every draw before it, of whichever request; expected draws by seed "
    "and position of a row (dgraph.runtime.sampling.random_numbers)"
)
ADVICE = (
    "To look at several rows, define an op that says how it tells sequences apart (Op.by_row, Op.gathers, Op.apart_by)"
)


def broken_rows(graph: Graph) -> Iterator[str]:
    """One message per call that mixes the entries of several requests in what reaches one of them.

    A captured batch [b, t, ...] is not looked at: `PackRows` reads the same table when it packs it.
    """
    if any(spec.shape[:2] == ("b", "t") for spec in graph.inputs.values()):
        return
    mixed: dict[Node, Node] = {}
    why: dict[Node, str] = {}
    told: set[Node] = set()
    for node in graph.calls:
        origin = next((mixed[arg] for arg in node.all_input_nodes if arg in mixed), None)
        if origin is None and (said := _said(graph.symbols, node)) is not None:
            origin, why[node] = node, said
        if origin is None:
            continue
        mixed[node] = origin
        op = op_of(node.target)
        if op is not None and op.mutates and origin not in told:
            told.add(origin)
            yield _message(origin, why[origin], f"{where(node)} ({op_name(node.target)}) writes it to a cache")
    for name, value in graph.results().items():
        origin = mixed.get(value)
        belongs = name in DECISION or bool(_entries(graph.symbols, value.meta["val"]))
        if origin is not None and belongs and origin not in told:
            told.add(origin)
            yield _message(origin, why[origin], f"output {name} depends on it")


def _message(node: Node, why: str, reach: str) -> str:
    return f"{where(node)} ({op_name(node.target)}) {why}; {reach}. {ADVICE}"


def _said(symbols: Symbols, node: Node) -> str | None:
    """The fault of a call, or None; kept by op and types, so that equal layers ask once."""
    if node.target is operator.getitem and isinstance(args_of(node)[0].meta["val"], (tuple, list)):
        return None
    args = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    op = op_of(node.target)
    rule = rule_of(node.target)
    key = (node.target if op is None else op, rule, symbols.key(args), symbols.key(node.meta["val"]))
    said = symbols.rows.get(key, "")
    if said == "":
        said = _of_torch(symbols, node, rule) if op is None or rule is not None else _of_op(symbols, node, op)
        symbols.rows[key] = said
    return said


# -- ops of dgraph.ops -------------------------------------------------------------------------------------------


def _of_op(symbols: Symbols, node: Node, op: Op) -> str | None:
    args = dict(zip(op.arguments, args_of(node), strict=False)) | node.kwargs
    rows = {name: found for name, value in args.items() if (found := _rows(symbols, value))}
    if op.gathers or not rows:
        return None
    if not op.by_row:
        offsets = any(isinstance(a, Node) and _is_offsets(symbols, a) for a in args.values())
        if offsets or args.get(op.apart_by or "") is not None:
            return None
        text = ", ".join(f"{name} over {found}" for name, found in rows.items())
        return (
            f"looks at all of {text}, and nothing says how it tells sequences apart; expected an op that acts row by "
            f"row (Op.by_row), or one that takes offsets {OFFSETS} or says what serves instead (Op.apart_by)"
        )
    for name, found in rows.items():
        if name not in op.by_row and name != op.count:
            return (
                f"reads {name} over {found} for every row, but acts row by row on {', '.join(op.by_row)} alone "
                f"(Op.by_row); expected {name} to have no rows"
            )
    sets = {found for name, found in rows.items() if name in op.by_row}
    for value in _tensors(node.meta["val"]):
        if value.dim() and symbols.text(value.shape[0]) not in sets:
            return (
                f"acts row by row on rows {', '.join(sorted(sets))} (Op.by_row), but makes {symbols.type_text(value)}; "
                f"expected these rows as its first dimension"
            )
    return None


def _rows(symbols: Symbols, value: Any) -> str | None:
    """The rows, sequences or keys that lead an argument, or one of a list of them."""
    nodes = [n for n in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(n, Node)]
    sizes = (tensor.shape[0] for n in nodes for tensor in _tensors(n.meta["val"]) if tensor.dim())
    return next((text for size in sizes if is_row_set(text := symbols.text(size)) or text in ("M", "b")), None)


def _is_offsets(symbols: Symbols, node: Node) -> bool:
    return symbols.type_text(node.meta["val"]).endswith(f"[{OFFSETS}]")


# -- ops of torch ------------------------------------------------------------------------------------------------


def _of_torch(symbols: Symbols, node: Node, rule: Rule | None) -> str | None:
    made = [value for value in _tensors(node.meta["val"]) if _entries(symbols, value)]
    read = [n for n in node.all_input_nodes if _entries(symbols, n.meta["val"])]
    if not made and not read:
        return DRAWS if Call(node).draws else None
    if rule is None:
        got = ", ".join(symbols.type_text(n.meta["val"]) for n in read) or symbols.type_text(node.meta["val"])
        return (
            f"is in no table of ops, and has {got}; expected an op of which dgraph.ir.aten_rules says what it does to "
            f"rows. Add an entry with dgraph.ir.aten_rules.register, or use ops that are known"
        )
    call = Call(node)
    for name, value in call.values.items():
        count = next((n for n in _sizes_in(value) if _entries(symbols, n.meta["val"])), None)
        if count is not None and name not in rule.sizes:
            size = symbols.text(count.meta["val"])
            return f"reads how many there are ({size}) as {name}; expected a value that is the same in every batch"
    return _passes(symbols, call, rule.axes(call))


def _passes(symbols: Symbols, call: Call, axes: Axes) -> str | None:
    """Every leading dimension of entries becomes the leading dimension of every result, and these come from nowhere
    else."""
    led: set[str] = set()
    for passage in axes.passages:
        shape, text = call.shape(passage.node), symbols.type_text(call.type(passage.node))
        if text.endswith(f"[{OFFSETS}]") or any(_is_table(symbols.text(size)) for size in shape):
            return (
                f"computes on {passage.name} {text}, which says where rows or pages of sequences lie; expected only "
                f"ops of dgraph.ops to read it"
            )
        for at, to in enumerate(passage.dims):
            over = symbols.text(shape[at])
            if not leads(symbols.names_in(shape[at])):
                continue
            if to is None:
                return (
                    f"works along dimension {at} of {passage.name} {text}, which runs over {over}; expected an op that "
                    f"acts on each of {over} by itself"
                )
            if at or to:
                got = f"takes dimension {at} of {passage.name} {text}, which runs over {over}, to dimension {to}"
                return f"{got}; expected it to lead argument and result"
            led.add(over)
    for value in _tensors(call.type(call.node)):
        for at, size in enumerate(value.shape):
            over = symbols.text(size)
            if _is_table(over):
                return f"makes {symbols.type_text(value)}, a table of pages; expected tables that are inputs"
            alike = at in axes.repeated and is_plain(over)
            if leads(symbols.names_in(size)) and (at or not (over in led or alike)):
                got = f"makes {symbols.type_text(value)}, whose dimension {at} runs over {over}"
                return f"{got}; expected the entries of an argument, in their number and order, to lead it"
    return None


def is_plain(text: str) -> bool:
    """True if a size is one symbol: N, but neither 2*N nor N+1."""
    return text.isidentifier()


def _is_table(text: str) -> bool:
    return without_window(text) == "P"


def _sizes_in(value: Any) -> Iterator[Node]:
    """The nodes in an argument that are sizes."""
    for part in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(part, Node) and isinstance(part.meta["val"], torch.SymInt):
            yield part


def _entries(symbols: Symbols, value: Any) -> bool:
    """True if a type has a size that depends on the requests of a step."""
    if isinstance(value, torch.SymInt):
        return leads(symbols.names_in(value))
    return any(leads(symbols.names_in(size)) for tensor in _tensors(value) for size in tensor.shape)


def _tensors(value: Any) -> list[Tensor]:
    parts = value if isinstance(value, (list, tuple)) else (value,)
    return [part for part in parts if isinstance(part, Tensor)]

"""Dumps: a graph as text for people, and as plain values for programs. `listing` says how names are formed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.fx import Node

from dgraph.errors import InputError
from dgraph.ir.graph import Graph
from dgraph.spec import ModelSpec
from dgraph.text.folding import Group, fold
from dgraph.text.listing import Line, Listing, listing
from dgraph.text.notation import fold_names, input_type, layers_text, line_text, plain, ranges_text, show, type_text
from dgraph.types.shapes import DTYPES, without_window

CALL_WIDTH = 92
"""Greatest width of the column of calls; a longer call pushes its own type to the right."""
WIDTH = 116
"""Width at which the lists of the header are wrapped."""
TYPE_WIDTH = 24
"""Greatest width of the column of types; a longer type pushes its own pass to the right."""

CUT = "-- stage cut: "

_SYMBOLS = {
    "N": "rows of a step",
    "b": "sequences",
    "t": "tokens of the longest sequence",
    "P": "pages of one sequence",
    "pages": "pages of the cache",
    "M": "key rows read from the cache",
    "entries": "entries of the packed caches",
    "sequences": "sequences of the packed caches",
    "page": "positions of a page",
}


def dump(graph: Graph, full: bool = False, layer: int | None = None) -> str:
    """A graph as text: a header, then its calls with equal layers folded.

        layers[0..35] x36   %h = %embedding, then layers[-1].%23
          %0 = dgraph.rms_norm(%h, input_layernorm.weight, 1e-06)                 bf16[N, 4096]   PackRows
          %1 = linear(%0, self_attn.q_proj+k_proj+v_proj.weight)                  bf16[N, 6144]   FuseProjections

    The columns are: the call, its type, the pass that made it (nothing for the captured model).

    Args:
        graph: captured, or after any pass.
        full: write every layer out.
        layer: only this layer.

    Raises:
        InputError: no such layer.
    """
    found = listing(graph)
    shown = [
        (b.heading, [row for line in b.lines for row in table_rows(line, b.layer)]) for b in blocks(found, full, layer)
    ]
    widths = column_widths(row for _, rows in shown for row in rows)
    out = header(found) if layer is None else [_title(graph)]
    for heading, rows in shown:
        out += ["", heading, *(f"  {row_text(row, widths)}" for row in rows)]
    if layer is None:
        out += ["", return_line(found)]
    return "\n".join(out) + "\n"


def to_json(graph: Graph, full: bool = False, layer: int | None = None) -> dict[str, Any]:
    """A graph as plain values, as `dump` prints it; arguments are names (strings), numbers, None, or lists of them.

    Raises:
        InputError: no such layer.
    """
    found = listing(graph)
    return {
        "spec": graph.spec.to_json(),
        "passes": list(graph.history),
        "symbols": dict(symbols(found)),
        "inputs": [{"name": s.name, "type": input_type(s)} for s in graph.inputs.values()],
        "weights": {"tensors": len(graph.tensors), "elements": _elements(graph)},
        **_sharding(graph),
        "groups": [block.to_json() for block in blocks(found, full, layer)],
        "outputs": [
            {"name": name, "value": show(ref), "type": graph.type_text(graph.result(name))}
            for name, ref in found.outputs.items()
        ],
    }


@dataclass(frozen=True)
class Block:
    """Calls under one heading of a dump.

    Attributes:
        heading: the place and the values that are carried there.
        layers: first and last layer, or None outside the layers.
        layer: the layer that the lines are of.
        carried: value of each carried name.
        lines: the calls.
    """

    heading: str
    layers: tuple[int, int] | None
    layer: int | None
    carried: dict[str, str]
    lines: tuple[Line, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "layers": None if self.layers is None else list(self.layers),
            "carried": self.carried,
            "nodes": [
                {
                    "results": list(line.results),
                    "op": line.op,
                    "args": plain(line.args, self.layer),
                    "kwargs": {k: plain(v, self.layer) for k, v in line.kwargs},
                    "types": list(line.types),
                    "rows": list(line.rows),
                    "role": line.role,
                    "by": line.by,
                    "source": line.source,
                    "cut": line.cut,
                }
                for line in self.lines
            ],
        }


def blocks(found: Listing, full: bool = False, layer: int | None = None) -> list[Block]:
    """The groups to show: folded, written out, or of one layer.

    Raises:
        InputError: no such layer.
    """
    if layer is not None:
        groups = [g for g in fold(found.sections) if g.layers is not None and g.layers[0] <= layer <= g.layers[1]]
        if not groups:
            known = ranges_text(s.layer for s in found.sections if s.layer is not None)
            raise InputError(f"the graph has no layer {layer}; its layers are {known or 'none'}.")
        return [_block(g, layer) for g in groups]
    out = []
    for group in fold(found.sections):
        if full and group.layers is not None:
            out += [_block(group, n) for n in range(group.layers[0], group.layers[1] + 1)]
        else:
            out.append(_block(group, None))
    return out


def _block(group: Group, only: int | None) -> Block:
    layers = group.layers if only is None else (only, only)
    carried = {}
    for c in group.carried:
        if only is None:
            carried[c.name] = f"{show(c.first)}, then layers[-1].{c.then.name}"
        else:
            carried[c.name] = show(group.bindings(only)[c.name])
    place = group.place if layers is None else layers_text(layers)
    heading = "   ".join([place, *(f"{name} = {what}" for name, what in carried.items())])
    return Block(heading, layers, None if group.layers is None else group.layers[0], carried, group.lines)


def symbols(found: Listing) -> Iterator[tuple[str, str]]:
    """The symbols that occur in types, and their meanings."""
    kinds = [input_type(s) for s in found.graph.inputs.values()]
    kinds += [kind for section in found.sections for line in section.lines for kind in line.types]
    used = dict.fromkeys(name for kind in kinds for name in re.findall(r"[A-Za-z]\w*", kind.partition("[")[2]))
    for name, meaning in _SYMBOLS.items():
        if name in used:
            yield name, meaning
    for name in used:
        if (all_pages := without_window(name)) != name and all_pages in _SYMBOLS:
            yield name, f"{_SYMBOLS[all_pages]} for windows of {name.removeprefix(f'{all_pages}_')}"
    for section in found.sections:
        for line in section.lines:
            if line.cut is not None:
                rows = next(r for r in line.rows if r is not None)
                yield rows, f"rows kept by {line.op} {section.place}"


# -- parts of a dump ---------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A row of the table: a call, its type, the pass that made it."""

    call: str
    type: str = ""
    by: str = ""

    @property
    def is_cut(self) -> bool:
        """True for the line of a stage cut."""
        return self.call.startswith(CUT)


def table_rows(line: Line, layer: int | None) -> Iterator[Row]:
    """A call as rows: several for one that takes a list to a list (`compact`), one more for a stage cut after it."""
    listed = line.args[0] if line.args and isinstance(line.args[0], tuple) else ()
    if len(listed) == len(line.results) > 3:
        names = [r or "_" for r in line.results]
        others = ", ".join(["[...]", *(show(a, layer) for a in line.args[1:])])
        yield Row(f"{names[0]} ... {names[-1]} = {line.op}({others})", "", line.by)
        for name, value, kind in zip(names, listed, line.types, strict=True):
            yield Row(f"  {name} <- {show(value, layer)}", kind)
    else:
        yield Row(line_text(line, layer), type_text(line), line.by)
    if line.cut is not None:
        yield Row(f"{CUT}{line.cut} ".ljust(CALL_WIDTH, "-"))


def column_widths(rows: Iterable[Row]) -> tuple[int, int]:
    """Widths of the columns of calls and types."""
    listed = list(rows)
    calls, types = ([len(r[i]) for r in listed] for i in (0, 1))
    return min(max(calls, default=0), CALL_WIDTH), min(max(types, default=0), TYPE_WIDTH)


def row_text(row: Row, widths: tuple[int, int]) -> str:
    """A row in its columns."""
    return f"{row.call:<{widths[0]}}  {row.type:<{widths[1]}}  {row.by}".rstrip()


def _title(graph: Graph) -> str:
    spec = graph.spec
    dtype = DTYPES.get(spec.dtype, str(spec.dtype))
    return (
        f"{spec.family}: {spec.layers} layers, hidden {spec.hidden}, {spec.heads} heads and {spec.kv_heads} KV heads "
        f"of {spec.head_dim}, vocabulary {spec.vocab}, {dtype}, blocks of {spec.block_length}{_modes(spec)}"
    )


def _modes(spec: ModelSpec) -> str:
    """Text about the modes of a model that has two, else empty."""
    seen = "what comes before it" if spec.encoding == "causal" else "its block"
    return f", denoised, then encoded (a row sees {seen}) with the next token" if spec.next_token else ""


def header(found: Listing) -> list[str]:
    """The lines before the calls."""
    graph = found.graph
    out = [_title(graph)]
    for i, step in enumerate(graph.history or ("none: as captured",)):
        out.append(f"{'passes' if i == 0 else '':<9} {step}")
    out += wrapped("symbols", [f"{name} = {meaning}" for name, meaning in symbols(found)])
    out += wrapped("inputs", _inputs(found))
    out += wrapped("weights", [f"{len(graph.tensors)} tensors", f"{_elements(graph):,} elements"])
    if graph.sharding is not None:
        out.append(f"{'sharded':<9} {graph.sharding}, as one of them sees it")
        out += wrapped(
            "divided", fold_names({n: f"{graph.type_text(w)} {graph.divided[n].kind}" for n, w in divided(graph)})
        )
    return out


def divided(graph: Graph) -> list[tuple[str, Node]]:
    """The weights of which a rank has a part, in order."""
    return [(name, node) for name, node in graph.weight_nodes().items() if name in graph.divided]


def wrapped(title: str, items: Iterable[str]) -> list[str]:
    """Lines of items after a title, separated by commas, broken only between items."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + 2 + len(item) <= WIDTH:
            lines[-1] += f", {item}"
        else:
            lines = [*lines[:-1], lines[-1] + ","] if lines else []
            lines.append(f"{title if not lines else '':<9} {item}")
    return lines


def _inputs(found: Listing) -> list[str]:
    """Declarations of the inputs, folded."""
    return fold_names({s.name: input_type(s) for s in found.graph.inputs.values()})


def _sharding(graph: Graph) -> dict[str, Any]:
    """Ranks that a graph is divided over, and each weight's part; empty for a whole graph."""
    if graph.sharding is None:
        return {}
    parts = {name: {"type": graph.type_text(node), "kind": graph.divided[name].kind} for name, node in divided(graph)}
    return {"sharding": {"world": graph.sharding.world, "group": graph.sharding.group, "divided": parts}}


def _elements(graph: Graph) -> int:
    return sum(t.numel() for t in graph.tensors.values())


def return_line(found: Listing) -> str:
    """The last line of a dump: the outputs of the graph."""
    return f"return {', '.join(f'{name}={show(ref)}' for name, ref in found.outputs.items()) or 'nothing'}"

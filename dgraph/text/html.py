"""A dump, a diff or a comparison as one self-contained page: collapsible layers, colours of row sets or of distances.

A box is as wide as the page. The call of a wider line wraps, so that type and pass are never cut off; on a narrow
page these stand below their call. Colours follow the reader's light or dark scheme.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from dgraph.ir.graph import Graph
from dgraph.text.diff import Diff, GroupDiff
from dgraph.text.listing import Ref, listing
from dgraph.text.writer import Block, Row, blocks, header, return_line, symbols, table_rows
from dgraph.viewer.page import page

ROW_SETS = 5
"""Row sets with a colour of their own; after these the colours come again."""
SHADES = 5
"""Shades of marked values."""
_SAME = "\N{NO-BREAK SPACE}"
_KINDS = {"+": "added", "-": "removed", _SAME: "same"}


def to_html(graph: Graph, full: bool = False, layer: int | None = None) -> str:
    """A graph as a page; takes what `dgraph.text.dump` takes.

    Raises:
        InputError: no such layer.
    """
    found = listing(graph)
    rows = dict.fromkeys(r for s in found.sections for line in s.lines for r in line.rows if r is not None)
    colours = {name: f"rows-{i % ROW_SETS}" for i, name in enumerate(rows)}
    meanings = dict(symbols(found))
    keys = "".join(
        f'<li class="{colour}">{escape(name)}<span>{escape(meanings.get(name, ""))}</span></li>'
        for name, colour in colours.items()
    )
    title, *declared = header(found)
    body = "".join(_block(block, colours) for block in blocks(found, full, layer))
    return _page(
        title,
        graph.spec.family,
        title.partition(": ")[2],
        f'<pre tabindex="0" aria-label="Passes, inputs and weights">{_lines(declared)}</pre>\n'
        f'<ul class="keys" aria-label="Row sets">{keys}</ul>\n',
        f"{body}<pre>{_lines([return_line(found)])}</pre>\n",
    )


@dataclass(frozen=True)
class Mark:
    """Mark of a value on a page.

    Attributes:
        shade: from 0, the faintest, to `SHADES` - 1.
        note: text after the call.
    """

    shade: int
    note: str


def marked_to_html(
    title: str, summary: str, keys: Sequence[str], graphs: Mapping[str, tuple[Graph, Mapping[Ref, Mark]]]
) -> str:
    """Graphs with marked values as a page; every layer is written out.

    Args:
        title: of the page.
        summary: text in columns.
        keys: meaning of each shade.
        graphs: by heading.
    """
    shades = "".join(f'<li class="shade-{shade}">{escape(text)}</li>' for shade, text in enumerate(keys))
    boxes = []
    for heading, (graph, marks) in graphs.items():
        found = listing(graph)
        boxes.append(f"<h2>{escape(heading)}</h2>\n")
        boxes += [_block(block, {}, marks) for block in blocks(found, full=True)]
        boxes.append(f"<pre>{_lines([return_line(found)])}</pre>\n")
    return _page(
        title,
        title,
        "",
        f'<pre class="table" tabindex="0" aria-label="Summary">{escape(summary)}</pre>\n'
        f'<ul class="keys" aria-label="Shades">{shades}</ul>\n',
        "".join(boxes),
    )


def diff_to_html(found: Diff) -> str:
    """A diff as a page: its summary, then the calls that changed, layers that changed alike together."""
    old, new = found.names
    summary, _, changes = str(found).partition(f"\n--- {old}\n")
    if not changes:
        return _page(f"{old} and {new}", f"{old} and {new}", "no difference", "", "")
    title, _, tables = summary.partition("\n")
    groups = [group for group in found.groups if any(group.total(mark) for mark in "-+~")]
    return _page(
        f"{old} to {new}",
        f"{old} \N{RIGHTWARDS ARROW} {new}",
        title.partition(": ")[2],
        f'<pre class="table" tabindex="0" aria-label="Summary">{escape(tables.strip(chr(10)))}</pre>\n',
        "".join(_details(group.title, "", _changes(group)) for group in groups),
    )


def _page(title: str, heading: str, below: str, before: str, body: str) -> str:
    """A page of graphs: a heading with a line below it, what is declared, and the boxes."""
    return page(
        f"{title} - dgraph",
        f'<header><h1>{escape(heading)}</h1>\n<p class="quiet">{escape(below)}</p></header>\n<main>\n{before}'
        f'<div id="boxes">\n{body}</div>\n</main>\n',
        styles=("look.css", "graph.css"),
        script="graph.js",
    )


def _lines(lines: Iterable[str]) -> str:
    """Lines of the header, which wrap below their values."""
    return "".join(f'<span class="line">{escape(line)}</span>' for line in lines)


def _details(title: str, note: str, rows: Iterable[str]) -> str:
    noted = f"<code>{escape(note)}</code>" if note else ""
    return f"<details open><summary>{escape(title)}{noted}</summary><table>\n{''.join(rows)}</table></details>\n"


def _block(block: Block, colours: Mapping[str, str], marks: Mapping[Ref, Mark] | None = None) -> str:
    """The calls under a heading, with a colour by their rows, or marks by their results."""
    title, _, carried = block.heading.partition("   ")
    layer = None if block.layers is None else block.layers[0]

    def rows() -> Iterator[str]:
        for line in block.lines:
            colour = next((colours.get(r, "") for r in line.rows if r is not None), "")
            marked = [(marks or {}).get(Ref("value", name, layer)) for name in line.results if name is not None]
            mark = max((each for each in marked if each is not None), key=lambda each: each.shade, default=None)
            for row in table_rows(line, block.layer):
                yield _row(row, colour, shade=mark)

    return _details(title, carried, rows())


def _row(row: Row, colour: str = "", mark: str = "", shade: Mark | None = None) -> str:
    """A call as a row of a table; `mark` is that of a diff."""
    if row.is_cut:
        return f'<tr class="cut"><td colspan="3">{escape(row.call.strip(" -"))}</td></tr>\n'
    kinds = [_KINDS[mark]] if mark else [] if shade is None else [f"shade-{shade.shade}"]
    kind = f' class="{kinds[0]}"' if kinds else ""
    coloured = f' class="{colour}"' if colour else ""
    note = "" if shade is None else f"<span>{escape(shade.note)}</span>"
    return (
        f'<tr{kind}><td class="call">{escape(f"{mark} " if mark else "")}{escape(row.call)}{note}</td>'
        f'<td{coloured}>{escape(row.type)}</td><td class="by">{escape(row.by)}</td></tr>\n'
    )


def _changes(group: GroupDiff) -> Iterator[str]:
    """Every call of the layers, as it was and as it is; those that did not change are faint."""
    for change in group.changes:
        pairs: Sequence[tuple[str, Iterable[Row]]] = [("-", change.before), ("+", change.after)]
        if change.mark == " ":
            pairs = [(_SAME, change.after)]
        for mark, rows in pairs:
            yield from (_row(row, mark=mark) for row in rows)

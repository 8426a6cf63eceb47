"""A dump as one self-contained page: collapsible layers, a colour per row set.

A box is as wide as the page. Of a line that is wider its call wraps, so that type and pass are never cut off; on a
narrow page these stand below their call. Colours follow the reader's light or dark scheme.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from dgraph.graph import Graph
from dgraph.text.listing import listing
from dgraph.text.writer import Block, blocks, header, return_line, symbols, table_rows

_COLOURS = (
    ("#2563eb", "#60a5fa"),
    ("#b45309", "#fbbf24"),
    ("#047857", "#34d399"),
    ("#9333ea", "#c084fc"),
    ("#db2777", "#f472b6"),
)
"""Of the row sets, in the order in which they are made (N, K, K1, ...), on light and on dark."""


def _palette(dark: bool) -> str:
    """The row sets' colours as variables of the page."""
    return " ".join(f"--rows-{i}: {pair[dark]};" for i, pair in enumerate(_COLOURS))


_STYLE = f"""
:root {{
  color-scheme: light dark; {_palette(False)}
  --page: #fff; --text: #1f2937; --faint: #6b7280; --box: #f3f4f6; --title: #f9fafb; --line: #e5e7eb; --cut: #be185d;
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    {_palette(True)}
    --page: #111827; --text: #e5e7eb; --faint: #9ca3af; --box: #1f2937; --title: #1f2937; --line: #374151;
    --cut: #f472b6;
  }}
}}
"""

_STYLE += """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1200px; padding: 0 1rem; }
body { color: var(--text); background: var(--page); }
pre, table { font: 12.5px/1.6 ui-monospace, monospace; }
pre { background: var(--box); padding: .8rem 1rem; border-radius: 6px; white-space: pre-wrap; overflow-wrap: anywhere; }
details { border: 1px solid var(--line); border-radius: 6px; margin: .6rem 0; overflow-x: auto; }
summary { padding: .4rem .8rem; cursor: pointer; font-weight: 600; background: var(--title); }
summary code { font-weight: 400; color: var(--faint); margin-left: 1rem; }
table { border-collapse: collapse; margin: .3rem .8rem .6rem; width: calc(100% - 1.6rem); }
td { padding: 0 1.5rem 0 0; white-space: pre; vertical-align: top; }
td.call { width: 100%; white-space: pre-wrap; overflow-wrap: anywhere; padding-left: 4ch; text-indent: -4ch; }
td.by { color: var(--faint); padding-right: 0; }
tr.cut td { color: var(--cut); font-weight: 600; border-top: 2px dashed var(--cut); }
.line { display: block; padding-left: 12ch; text-indent: -12ch; }
.key { display: inline-block; margin-right: 1.5rem; }
.key i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em; }
@media (max-width: 700px) {
  tr, td, td.call { display: block; width: auto; }
  td { white-space: pre-wrap; overflow-wrap: anywhere; padding-right: 0; }
  td + td { padding-left: 4ch; }
  tr { padding-bottom: .3rem; }
  summary code { margin-left: .5rem; overflow-wrap: anywhere; }
}
"""


def to_html(graph: Graph, full: bool = False, layer: int | None = None) -> str:
    """A graph as a page; takes what `dgraph.text.dump` takes.

    Raises:
        InputError: no such layer.
    """
    found = listing(graph)
    rows = dict.fromkeys(r for s in found.sections for line in s.lines for r in line.rows if r is not None)
    colours = {name: f"var(--rows-{i % len(_COLOURS)})" for i, name in enumerate(rows)}
    meanings = dict(symbols(found))
    keys = "".join(
        f'<span class="key"><i style="background:{colour}"></i>{escape(name)}: {escape(meanings.get(name, ""))}</span>'
        for name, colour in colours.items()
    )
    body = "".join(_details(block, colours) for block in blocks(found, full, layer))
    title, *declared = header(found)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>{escape(graph.spec.family)}</h1><p>{escape(title)}</p>\n"
        f"<pre>{_lines(declared)}</pre>\n<p>{keys}</p>\n{body}<pre>{_lines([return_line(found)])}</pre>\n"
        "</body></html>\n"
    )


def _lines(lines: Iterable[str]) -> str:
    """Lines of the header, which wrap below their values."""
    return "".join(f'<span class="line">{escape(line)}</span>' for line in lines)


def _details(block: Block, colours: dict[str, str]) -> str:
    title, _, carried = block.heading.partition("   ")
    note = f"<code>{escape(carried)}</code>" if carried else ""
    rows = "".join(_rows(block, colours))
    return f"<details open><summary>{escape(title)}{note}</summary><table>\n{rows}</table></details>\n"


def _rows(block: Block, colours: dict[str, str]) -> Iterator[str]:
    for line in block.lines:
        colour = next((colours[r] for r in line.rows if r is not None), "")
        style = f' style="color:{colour}"' if colour else ""
        for row in table_rows(line, block.layer):
            if row.is_cut:
                yield f'<tr class="cut"><td colspan="3">{escape(row.call.strip(" -"))}</td></tr>\n'
            else:
                yield (
                    f'<tr><td class="call">{escape(row.call)}</td><td{style}>{escape(row.type)}</td>'
                    f'<td class="by">{escape(row.by)}</td></tr>\n'
                )

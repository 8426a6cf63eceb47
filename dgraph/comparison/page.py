"""A comparison as a page: the graphs of the second side, coloured by distance."""

from __future__ import annotations

from dgraph.comparison.report import Comparison, measures
from dgraph.text.html import Mark, marked_to_html
from dgraph.text.listing import Ref

SHARES = (0.0, 1e-6, 1e-4, 1e-2)
"""Distances as shares of magnitudes up to which a value has the shades from 0 on; those beyond have the last one."""
KEYS = ("the same", *(f"up to {share:g}" for share in SHARES[1:]), f"more than {SHARES[-1]:g} of the magnitude")


def to_html(found: Comparison) -> str:
    """A comparison as a self-contained page: tables, then each program with its values where they differ the most."""
    marks: dict[str, dict[Ref, Mark]] = {name: {} for name in found.graphs}
    for program, named, step, difference in found.by_node():
        shade = next((n for n, share in enumerate(SHARES) if difference.share <= share), len(SHARES))
        note = f"{measures(difference)} in {step}" if difference.most else ""
        marks[program][named.ref] = Mark(shade, note)
    graphs = {name: (graph, marks[name]) for name, graph in found.graphs.items()}
    first, second = found.names
    return marked_to_html(f"{first} and {second}", str(found), KEYS, graphs)

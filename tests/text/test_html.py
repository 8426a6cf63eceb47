"""Pages of graphs: they say what the texts say, need nothing beside themselves, and fit light, dark and any width."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

import dgraph
from dgraph.ir.graph import Graph
from dgraph.recipes import RECIPES, build
from dgraph.text.diff import Diff, diff
from dgraph.text.html import ROW_SETS, diff_to_html, to_html
from dgraph.text.writer import dump
from dgraph.viewer import FILES


def step(graph: Graph, recipe: str) -> Graph:
    return dgraph.rewrite(graph, build(RECIPES, recipe, graph.spec, {}))["step"].graph


@pytest.fixture(scope="module")
def focus(captured: Graph) -> Graph:
    return step(captured, "focus")


@pytest.fixture(scope="module")
def dense_to_focus(captured: Graph, focus: Graph) -> Diff:
    return diff(step(captured, "dense"), focus, ("dense", "focus"))


class Balanced(HTMLParser):
    """A page's text; every tag must be closed by its own."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert all(name not in ("src", "href", "style") for name, _ in attrs), "the page is to need nothing else"
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: str) -> str:
    """The text of a page."""
    found = Balanced()
    found.feed(page)
    assert found.open == []
    return found.text


def rules(name: str = "graph.css") -> dict[str, str]:
    """What a style says by selector, before its first media query."""
    plain = re.sub(r"/\*.*?\*/", "", (FILES / name).read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"([^{}]+)\{([^{}]*)\}", plain.partition("@media")[0])
    return {selector.strip(): " ".join(body.split()) for selector, body in found}


def test_the_page_holds_the_same_calls(focus: Graph) -> None:
    text = read(to_html(focus))
    for line in dump(focus).split("\n\n", 1)[1].splitlines():
        if line.startswith("  "):
            assert re.split(r"\s{2,}", line.strip())[0].strip("- ") in text
    assert "<- positions" in text


def test_the_page_of_a_diff_holds_its_summary_and_its_changes(dense_to_focus: Diff) -> None:
    page = diff_to_html(dense_to_focus)
    text, said = read(page), str(dense_to_focus)
    summary, _, body = said.partition("\n--- dense\n")
    for line in summary.splitlines()[1:]:
        assert line in text
    assert summary.splitlines()[0].partition(": ")[2] in text
    changed = [line for line in body.splitlines() if re.match(r"[-+] ", line)]
    assert len(changed) > 5
    for line in changed:
        assert re.split(r"\s{2,}", line[4:].strip())[0].strip("- ") in text
    groups = [group for group in dense_to_focus.groups if any(group.total(mark) for mark in "-+~")]
    for kind, mark, side in (("added", "+", "after"), ("removed", "-", "before")):
        rows = [row for g in groups for c in g.changes if c.mark in f"{mark}~" for row in getattr(c, side)]
        assert page.count(f'<tr class="{kind}">') == sum(not row.is_cut for row in rows)


def test_the_page_of_no_difference_says_so(captured: Graph) -> None:
    assert "no difference" in read(diff_to_html(diff(captured, captured, ("one", "other"))))


def test_wide_lines_of_the_page_wrap_in_their_call(focus: Graph) -> None:
    found = rules()
    assert "white-space: pre-wrap" in found["td.call"]
    assert "overflow-wrap: anywhere" in found["td.call"], "a call may break anywhere, so it never widens the table"
    assert "width: 100%" in found["td.call"], "and takes what type and pass leave"
    assert "white-space: pre;" in found["td"], "which are not broken"
    assert "overflow-x: auto" in found["details"], "what is wider still scrolls in its box"
    rows = re.findall(r"<tr>(.*?)</tr>", to_html(focus))
    assert rows
    assert all(re.fullmatch(r'<td class="call">.*</td><td.*>.*</td><td class="by">.*</td>', row) for row in rows)


def test_the_page_is_for_any_width_and_for_light_and_dark(focus: Graph) -> None:
    page = to_html(focus)
    found = rules()
    assert "pre-wrap" in found["pre"]
    assert "overflow-wrap: anywhere" in found["pre"], "passes and inputs are not cut off"
    narrow = (FILES / "graph.css").read_text(encoding="utf-8").partition("@media (max-width: 700px)")[2]
    assert "display: block" in narrow, "type and pass stand below their call"
    light, dark = page.split("@media (prefers-color-scheme: dark)")
    used, given = set(re.findall(r"var\((--[\w-]+)\)", page)), re.compile(r"(--[\w-]+): #")
    assert {f"--rows-{i}" for i in range(ROW_SETS)} | {"--paper", "--ink"} <= used
    assert used - {"--sans", "--mono"} <= set(given.findall(light)) == set(given.findall(dark))
    assert re.findall(r"[^-] ?color: #", page) == [], "every colour has its like in the other scheme"

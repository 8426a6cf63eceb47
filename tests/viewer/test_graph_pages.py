"""The pages of graphs in a browser: boxes open and close, and wide content scrolls in its box."""

from __future__ import annotations

from pathlib import Path

import dgraph
from dgraph.comparison.page import to_html as comparison_to_html
from dgraph.ir.graph import Graph
from dgraph.recipes import RECIPES, build
from dgraph.text.diff import diff
from dgraph.text.html import diff_to_html, to_html
from tests.viewer.conftest import Open


def test_pages_of_graphs(captured: Graph, open_page: Open, tmp_path: Path) -> None:
    step = dgraph.rewrite(captured, build(RECIPES, "focus", captured.spec, {}))["step"].graph
    pages = {"dump": to_html(step), "diff": diff_to_html(diff(captured, step, ("captured", "focus step")))}
    pages["comparison"] = comparison_to_html(dgraph.compare(captured, step))
    for name, page in pages.items():
        (tmp_path / f"{name}.html").write_text(page, encoding="utf-8")
    found = open_page((tmp_path / "dump.html").as_uri())
    boxes = found.locator("details").count()
    assert boxes > 2
    assert found.locator("details[open]").count() == boxes
    found.keyboard.press("c")
    assert found.locator("details[open]").count() == 0
    found.keyboard.press("j")
    found.keyboard.press("j")
    found.keyboard.press("Enter")
    assert found.locator("details").nth(1).get_attribute("open") is not None
    found.get_by_role("button", name="Open all").click()
    assert found.locator("details[open]").count() == boxes
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    for name in pages:
        narrow = open_page((tmp_path / f"{name}.html").as_uri(), 320, 700, color_scheme="dark")
        assert narrow.evaluate(wide) == 0, name

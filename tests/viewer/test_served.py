"""The page that `dgraph serve` serves, over a small model, in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import dgraph
from tests.cli.folders import write_checkpoint
from tests.viewer.conftest import Open
from tests.viewer.test_browser import REFUSED, ask, cells, done, place

pytest.importorskip("fastapi", reason="needs the extra serve: pip install -e '.[serve]'")

PROMPT = "w3 w4 w5"
LENGTH = 24


@dataclass
class Site:
    """A server over a small model under two recipes, and what each says of the prompt."""

    url: str
    expected: list[dgraph.Result]


@pytest.fixture(scope="module")
def site(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    from tests.serve.live import Live

    model = dgraph.load(write_checkpoint(tmp_path_factory.mktemp("served") / "small"))
    models = {recipe: dgraph.optimize(model, recipe, backend="eager") for recipe in ("focus", "dense")}
    assert model.tokenizer is not None
    ids = model.tokenizer.encode_chat([{"role": "user", "content": PROMPT}])
    expected = [found.generate(input_ids=[ids], max_new_tokens=LENGTH) for found in models.values()]
    engines = {name: found.engine(max_sequences=2, max_tokens=256) for name, found in models.items()}
    with Live(engines) as server:
        yield Site(server.url, expected)


def test_two_recipes_denoise_side_by_side(site: Site, open_page: Open) -> None:
    page = open_page(site.url)
    page.fill('[name="max_tokens"]', str(LENGTH))
    ask(page, PROMPT)
    done(page)
    assert page.locator(".panel h2").all_inner_texts() == ["focus", "dense"]
    for panel, result in enumerate(site.expected):
        assert result.texts is not None
        shown = page.locator(".panel").nth(panel)
        tokens = shown.locator('.canvas .cell[data-state="token"]')
        assert tokens.count() == len(result.token_ids[0])
        assert "".join(tokens.all_inner_texts()).split() == "".join(result.texts[0].split()).split()
        names, values = (shown.locator(f".counters {tag}").all_inner_texts() for tag in ("dt", "dd"))
        counters = dict(zip(names, values, strict=True))
        assert counters["rows/token"] == f"{result.stats.kept_rows / LENGTH:.1f}"
        assert ("left out" in counters) == (panel == 0), "FOCUS evicts rows, dense none"
    longest = max(result.stats.sequence_steps[0] for result in site.expected)
    assert place(page) == f"step {longest} of {longest}"
    page.locator(".replay input").focus()
    page.keyboard.press("Home")
    assert cells(page) == []
    evicted = []
    for _ in range(longest):
        page.keyboard.press("ArrowRight")
        assert cells(page)
        evicted += cells(page, "evicted")
    assert evicted


def test_a_setting_that_cannot_be_is_told_of(site: Site, open_page: Open) -> None:
    page = open_page(site.url, complains=REFUSED)
    page.evaluate("document.getElementById('ask').noValidate = true")
    page.fill('[name="threshold"]', "7")
    ask(page)
    page.wait_for_selector("#message:visible")
    assert "threshold" in page.inner_text("#message-text")
    assert page.locator("#viewer").is_hidden()

"""Short descriptions of what the public functions return, as text and as HTML."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

import dgraph
from dgraph.ir.graph import Graph
from dgraph.text.diff import diff
from dgraph.types.card import Card, Described, counted, quoted
from tests.compiled import compiled
from tests.tiny import draw


@pytest.fixture(scope="module")
def made(model: dgraph.Model) -> dgraph.CompiledModel:
    return compiled(model, "focus")


@pytest.fixture(scope="module")
def result(made: dgraph.CompiledModel) -> dgraph.Result:
    return made.generate(input_ids=[draw(5), draw(6), draw(7), draw(8)], max_new_tokens=4)


class Tags(HTMLParser):
    """Names of the tags of a page, each closed again, and its text."""

    def __init__(self, page: str):
        super().__init__()
        self.names: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert all(name == "style" for name, _ in attrs)
        self.names.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


SAFE = {"div", "strong", "table", "tr", "th", "td", "code", "details", "summary", "pre"}


def test_every_description_is_short_and_its_html_says_the_same(
    made: dgraph.CompiledModel, result: dgraph.Result, captured: Graph
) -> None:
    step = made.graph()
    for described in (
        made,
        made.model,
        made.recipe,
        captured,
        step,
        diff(captured, step),
        dgraph.explain(made),
        result,
        result.stats,
    ):
        assert isinstance(described, Described)
        text = repr(described)
        assert 2 <= len(text.splitlines()) <= 12
        page: Any = described._repr_html_()  # type: ignore[attr-defined]
        tags = Tags(page)
        assert set(tags.names) <= SAFE
        assert tags.open == []
        for _, fact in described.card().facts:
            assert fact in tags.text


def test_an_optimized_model_says_what_it_is(made: dgraph.CompiledModel) -> None:
    text = repr(made)
    assert text.startswith("CompiledModel Qwen3ForCausalLM under focus\n")
    for fact in ("4 layers, blocks of 8", "weights  float32", "cpu, eager, buckets exact", "rows N -> K", "generate("):
        assert fact in text
    assert "generate(input_ids=" in text, "it has no tokenizer"
    with_tokenizer = replace(made.model, tokenizer=object())
    other = dgraph.CompiledModel.__new__(dgraph.CompiledModel)
    other.__dict__.update(made.__dict__, model=with_tokenizer)
    assert "generate(TEXT).texts" in repr(other)


def test_a_result_shows_the_beginnings_of_its_texts(result: dgraph.Result) -> None:
    assert repr(result).startswith("Result of 4 prompts: ")
    assert "1 more" in repr(result)
    other = replace(result, texts=["<script>alert(1)</script>" * 9, "b", "c", "d"])
    assert "'<script>" in repr(other)
    assert max(map(len, repr(other).splitlines())) < 80
    assert "<script>" not in other._repr_html_()  # type: ignore[operator]


def test_statistics_say_how_fast(result: dgraph.Result) -> None:
    text = repr(result.stats)
    assert text.startswith("GenerationStats of 4 prompts\n")
    assert f"{result.stats.tokens_per_second:.1f} tokens per second" in text
    assert repr(dgraph.Result([], [], type(result.stats)())), "nothing at all"


def test_html_is_escaped_wherever_a_text_stands() -> None:
    bad = "<b onclick='x'>&\""
    page = Card(bad, ((bad, bad), ("none", "")), bad).to_html()
    assert Tags(page).names.count("b") == 0
    assert Tags(page).text.count(bad) == 4
    assert "none" not in page


def test_words() -> None:
    assert [counted(n, "row") for n in (0, 1, 1200)] == ["0 rows", "1 row", "1,200 rows"]
    assert quoted("a" * 99, 10) == "'aaaaaaa...'"

"""The page of papers: every figure and table is there, commands parse, records exist and have the figures quoted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.records import pages, record_of
from tests import dry_run

ROOT = Path(__file__).parents[1]
COUNTS = {"FOCUS": (15, 6), "dLLM-Serve": (8, 4), "MaskKV": (9, 13), "DyLLM": (10, 7)}
"""Figures and tables of each paper, by their own numbers, appendices included."""
NUMBER = re.compile(r"(?<![\w.])(?<!\w-)\d[\d,]*(?:\.\d+)?(?![\w])")
"""A number that is no part of a name, such as that of SDAR-8B."""


@pytest.fixture(scope="module")
def papers() -> ModuleType:
    """The module of docs/site, which is no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs" / "site")
        import papers  # type: ignore[import-not-found]
    return papers


def test_every_figure_and_table_is_listed_once(papers: ModuleType) -> None:
    found = papers.read()
    assert {*found} == {*COUNTS}
    for name, (figures, tables) in COUNTS.items():
        wanted = {f"Figure {n + 1}" for n in range(figures)} | {f"Table {n + 1}" for n in range(tables)}
        items = [item.item for item in found[name]]
        listed = {item.partition(",")[0] for item in items}
        assert {item for item in listed if not item.startswith("Section ")} == wanted, name
        assert len(items) == len(set(items)), name
        assert papers.paper_of(name).arxiv, name


def test_commands_parse_or_await_what_they_need(papers: ModuleType) -> None:
    """A command that runs since its work is there loses its mark."""
    wrong, stale = [], []
    for name, items in papers.read().items():
        for item in items:
            failed = [found for command in (*item.commands, *item.elsewhere) if (found := why_not(command, item.at))]
            if failed and not item.awaits:
                wrong.append((name, item.item, failed))
            if item.awaits and not failed:
                stale.append((name, item.item, item.awaits))
    assert wrong == []
    assert stale == [], 'the commands of these run: take "awaits" off in docs/papers.json'


def why_not(command: str, at: str) -> str:
    """Reason why a command would not run; "" if it would, or is one of an earlier commit."""
    if at:
        assert re.fullmatch(r"[0-9a-f]{7}", at)
        return ""
    try:
        dry_run.check(command)
    except dry_run.Wrong as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("dgraph eval tiny_llada -r dyllm:tau=0.995 --sweep response_only_period=4,8 --threshold 0.9", ""),
        ("dgraph bench --shape sdar-8b -o recommit=false --against dense", ""),
        ("dgraph bench serve --model tiny_sdar --load 0.5,0.9 --scheduler static", ""),
        ("dgraph eval tiny_llada -r dylm", "dylm"),
        ("dgraph eval tiny_llada -r dyllm:tao=0.9", "tao"),
        ("dgraph eval tiny_llada -r maskkv:selector=nobody", "nobody"),
        ("dgraph eval tiny_llada -r dyllm --sweep every=-1", "every must be"),
        ("dgraph eval tiny_llada --distributed", "--distributed"),
        ("dgraph eval --limit 3", "model"),
        ("python -m benchmarks.dyllm_speed --arms dllm_cache --per-step 1", ""),
        ("python -m benchmarks.dyllm_speed --arms nothing", "2"),
        ("python -m benchmarks.no_such_script", "no_such_script"),
        ("python -m dgraph.evaluate.harness run --model dgraph --model_args pretrained=a,recipe=focus --tasks b", ""),
        ("python -m dgraph.evaluate.harness run --model dgraph --model_args pretrained=a,alhpa=2 --tasks b", "alhpa"),
        ("pip install dgraph", "begins neither"),
    ],
)
def test_a_dry_run_finds_what_would_fail(command: str, why: str) -> None:
    found = why_not(command, "")
    assert why in found
    assert bool(why) == bool(found)


def test_records_exist_and_have_the_figures_quoted(papers: ModuleType) -> None:
    on_pages = {f"{page}/{name}" for page, each in pages().items() for name in each.records}
    for name, items in papers.read().items():
        for item in items:
            assert {*item.records} <= on_pages, (name, item.item)
            texts = [json.dumps((r.title, r.columns, r.rows, r.note)) for r in map(record_of, item.records)]
            known = {number.replace(",", "") for text in texts for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)}
            quoted = [number.replace(",", "") for number in NUMBER.findall(item.ours)]
            assert [number for number in quoted if number not in known] == [], (name, item.item)


def test_the_harness_has_the_tasks(papers: ModuleType) -> None:
    manager = pytest.importorskip("lm_eval.tasks").TaskManager()
    asked = {t for items in papers.read().values() for i in items for c in i.elsewhere for t in dry_run.tasks_of(c)}
    assert asked
    assert asked - {*manager.all_tasks} == set()


def test_the_page_has_every_item_and_command(papers: ModuleType) -> None:
    text = papers.tables()
    for items in papers.read().values():
        for item in items:
            assert item.item in text
            assert [command for command in (*item.commands, *item.elsewhere) if f"\n{command}\n" not in text] == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"verdict": "perhaps"}, "verdict must be one of"),
        ({"verdict": "holds", "ours": ""}, "needs theirs, ours and a command"),
        ({"verdict": "fails", "why": ""}, "needs its reason"),
        ({"verdict": "open", "commands": []}, "needs the command that would tell"),
        ({"records": []}, "names its records"),
    ],
)
def test_a_verdict_has_what_it_is_based_on(papers: ModuleType, change: dict[str, Any], why: str) -> None:
    whole = {
        "item": "Table 1",
        "subject": "speed",
        "verdict": "fails",
        "theirs": "2 times",
        "ours": "1 time",
        "why": "another engine",
        "records": ["focus/embedded"],
        "commands": ["dgraph recipes"],
    }
    assert papers.Item.of(whole).verdict == papers.FAILS
    with pytest.raises(ValueError, match=why):
        papers.Item.of(whole | change)

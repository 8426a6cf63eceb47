"""`benchmarks/records.py`: pages equal what records give, records are whole, and quoted figures are in them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import records
from benchmarks.records import NOT_RECORDED, RECORDS, RESULTS, Record, headlines, pages, record_of, written

ROOT = Path(__file__).parents[2]
NAMES = [f"{page}/{name}" for page, each in pages().items() for name in each.records]
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def numbers_of(text: str) -> list[str]:
    """Numbers of a text, without separators of thousands."""
    return [number.replace(",", "") for number in NUMBER.findall(text)]


def figures_of(names: list[str]) -> set[float]:
    """Every number of records."""
    texts = [json.dumps((r.title, r.columns, r.rows, r.note)) for r in map(record_of, names)]
    return {float(number) for text in texts for number in numbers_of(text)}


def test_pages_are_those_that_records_give() -> None:
    expected = written()
    assert {path.name for path in RESULTS.glob("*.md")} == {f"{name}.md" for name in pages()}
    assert [path.name for path, text in expected.items() if path.read_text("utf-8") != text] == []


def test_pages_are_at_most_80_kb() -> None:
    assert sum(path.stat().st_size for path in written()) <= 80_000


def test_every_record_is_on_a_page_and_written_in_one_form() -> None:
    files = {str(path.relative_to(RECORDS).with_suffix("")): path for path in RECORDS.glob("*/*.json")}
    assert sorted(files) == sorted(NAMES)
    assert [name for name in NAMES if files[name].read_text("utf-8") != record_of(name).dumped()] == []


def test_commands_name_scripts_that_are_there() -> None:
    """A record whose script is gone names the commit that has it."""
    gone = []
    for name in NAMES:
        record = record_of(name)
        scripts = re.findall(r"((?:benchmarks|models)\.[\w.]+\w)", " ".join(record.command))
        there = all((ROOT / f"{script.replace('.', '/')}.py").exists() for script in scripts)
        if not there and not record.command_at:
            gone.append(name)
        assert record.command != (NOT_RECORDED,) or not record.command_at
    assert gone == []


@pytest.mark.parametrize("field", [*Record.__dataclass_fields__])
def test_a_record_without_a_field_is_refused(field: str) -> None:
    value = json.loads((RECORDS / f"{NAMES[0]}.json").read_text("utf-8"))
    assert Record.of(value).rows
    del value[field]
    with pytest.raises(ValueError, match=f"fields missing: \\['{field}'\\]"):
        Record.of(value)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"commit": ""}, r"empty fields: \['commit'\]"),
        ({"date": "28.11.2026"}, "expected YYYY-MM-DD"),
        ({"note": "One. Two. Three."}, "at most two sentences"),
        ({"rows": [["1"]]}, "cells a row"),
        ({"more": 1}, "unknown: \\['more'\\]"),
    ],
)
def test_a_record_of_the_wrong_form_is_refused(change: dict[str, Any], why: str) -> None:
    value = json.loads((RECORDS / f"{NAMES[0]}.json").read_text("utf-8"))
    with pytest.raises(ValueError, match=why):
        Record.of(value | change)


def test_headlines_are_figures_of_their_records() -> None:
    for each in headlines():
        figures = figures_of(each["records"])
        quoted = [number for cell in each["cells"][2:] for number in numbers_of(cell)]
        assert [number for number in quoted if float(number) not in figures] == [], each


def test_speeds_and_costs_of_the_readme_are_figures_of_records() -> None:
    """Figures of its table of methods are compared as they are rounded there."""
    figures = figures_of(NAMES)
    text = (ROOT / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| \[`\w+`\]\(benchmarks/results/\w+\.md\) \|(.*)$", text, flags=re.MULTILINE)
    assert len(rows) >= 8
    for row in rows:
        speed, quality = row.split("|")[2:4]
        quoted = [*re.findall(r"\d+\.\d+", speed.partition("×")[0]), *re.findall(r"\d+\.\d+", quality)]
        for number in quoted:
            places = len(number.partition(".")[2])
            assert any(f"{figure:.{places}f}" == number for figure in figures), (row, number)


def test_a_table_of_a_script_becomes_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pages.json").write_text("{}")
    monkeypatch.setattr(records, "RECORDS", tmp_path)
    setting = "NVIDIA H200; torch 2.11.0, Python 3.12.3; 2026-11-28; `python -m benchmarks.kernels`"
    table = {"title": "Times", "columns": ["rows", "ms"], "rows": [["8", 0.12345]], "note": ""}
    (tmp_path / "out.json").write_text(json.dumps({"setting": setting, "tables": [table]}))
    records.add("kernels/times", tmp_path / "out.json", 0, "a957c51")
    made = record_of("kernels/times")
    assert (made.command, made.date, made.rows) == (("python -m benchmarks.kernels",), "2026-11-28", (("8", "0.123"),))
    assert pages()["kernels"].records == ("times",)
    assert made.dumped() == (tmp_path / "kernels" / "times.json").read_text()

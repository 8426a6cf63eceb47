"""`dgraph recipes`, `policies`, `passes`, `models`: the index of what there is, and how tables fit a terminal."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

import pytest

from dgraph import plugins
from dgraph.cli import listing, output
from tests.cli.conftest import Run
from tests.golden_files import check_golden
from tests.test_public import imported_by

KINDS = ("recipes", "policies", "passes", "models")


def test_the_index_is_what_is_declared() -> None:
    check_golden(str(listing.INDEX), listing.index_text())


@pytest.mark.parametrize("kind", KINDS)
def test_a_listing_imports_nothing_heavy(kind: str) -> None:
    assert imported_by(kind) == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_index_and_the_declarations_say_the_same(kind: str) -> None:
    assert listing.listed(kind) == listing.declared(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [None, 80, 60])
def test_a_listing_is_readable_on_a_narrow_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, kind: str, width: int | None
) -> None:
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    shown = run(kind).stdout
    assert max(map(len, shown.splitlines())) <= (width or 80)
    words = shown.split()
    for entry in listing.listed(kind):
        assert entry[next(iter(entry))] in words
        assert set(entry["summary"].split()) <= set(words)


def test_a_package_that_adds_a_recipe_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("mine", "tests.cli.test_listing:mine", "dgraph.recipes")
    monkeypatch.setattr(plugins, "entry_points", lambda group: {"mine": point} if group == "dgraph.recipes" else {})
    monkeypatch.setattr(listing, "entry_points", plugins.entry_points)
    plugins.load.cache_clear()
    found = {entry["recipe"]: entry for entry in listing.listed("recipes")}
    every = {"max_num_logits": None, "kv_dtype": None}
    assert found["mine"].pop("meaning").keys() == {"size", *every}
    assert found["mine"] == {
        "recipe": "mine",
        "summary": "Nothing new.",
        "papers": [],
        "costs": [],
        "options": {"size": 3, **every},
    }
    assert "focus" in found


def test_a_recipe_explains_its_options(run: Run) -> None:
    shown = run("recipes", "focus").stdout
    assert "Paper: FOCUS: DLLMs Know How to Tame Their Compute Bound, arXiv 2601.23278" in shown
    assert "CPU, 2 cores (x86_64), 2026-11-23, a1f947a" in shown
    words = " ".join(shown.split())
    assert "retention over the average number of decoded tokens per step, at least 1" in words
    assert "signal=delta+select=top+keep=0+signal_pool=3+after=1" in words
    (entry,) = json.loads(run("recipes", "focus", "--json").stdout)["recipes"]
    assert entry["options"].keys() == entry["meaning"].keys() >= {"alpha", "ablation", "kv_dtype"}
    assert "signal" not in entry["options"], "former options are not shown"
    assert "Did you mean 'focus'" in run("recipes", "focsu").stderr


def mine(spec: Any, size: int = 3) -> Any:
    """Nothing new."""


def test_folders_of_models_are_where_they_are_installed() -> None:
    folders = [Path(entry["folder"]) for entry in listing.listed("models") if entry["folder"] is not None]
    assert folders
    assert all((folder / "config.json").is_file() for folder in folders)
    stored = [entry["folder"] for entry in json.loads(listing.INDEX.read_text())["models"]]
    assert not any(os.path.isabs(folder) for folder in stored if folder is not None)


WIDE = (
    ("arm", "tokens per second", "milliseconds of a step", "rows", "remark"),
    "a remark of a dozen words that says at some length what was seen",
)


@pytest.mark.parametrize("width", [80, 100])
def test_any_table_fits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    titles, remark = WIDE
    output.print_table(titles, [("dense", "12.5", "80", "1024", remark), ("focus", "25", "40", "512", "")])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    assert {"dense", "12.5", "1024", "512"} <= set(shown.split())
    assert set(remark.split()) <= set(shown.split())


def test_in_a_pipe_a_table_of_results_is_as_wide_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    titles, remark = WIDE
    output.print_table(titles, [("dense", "12.5", "80", "1024", remark)])
    head, row = capsys.readouterr().out.splitlines()
    assert row.index(remark) == head.index("remark")


@pytest.mark.parametrize("said", ["", "0", "wide", "-3"])
def test_columns_that_are_no_number_say_nothing(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv("COLUMNS", said)
    assert output.columns() is None

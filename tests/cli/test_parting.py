"""`dgraph compare` and `dgraph bisect`: what they print and write, and how they end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dgraph.comparison import bisect as bisect_module
from dgraph.lowering import executor
from tests.cli.conftest import Run
from tests.comparison.test_bisect import broken_launcher

SHORT = ("-p", "w3 w4 w5", "--max-new-tokens", "6", "--steps", "3")


def test_compare_prints_steps_and_layers_and_writes_files(run: Run, folder: Path) -> None:
    result = run(
        "compare", folder, "--to", "focus", "-o", "full_steps=0", *SHORT, "--json", "a.json", "--html", "a.html"
    )
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("small dense -> small focus: ")
    assert next(line for line in lines if line.startswith("step ")).split()[-1] == "tokens"
    assert any(line.startswith("layers[1] ") for line in lines)
    found = json.loads(Path("a.json").read_text())
    assert found["from"] == "small dense"
    assert len(found["steps"]) == sum(re.match(r"prompt |step \d", line) is not None for line in lines)
    assert Path("a.html").read_text().startswith("<!doctype html>")


def test_bisect_ends_with_1_where_something_parts(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fine = run("bisect", folder, "-r", "dense", "--backend", "eager")
    assert (fine.exit_code, fine.stderr) == (0, "")
    assert fine.stdout.splitlines()[-1] == "No results part."
    monkeypatch.setattr(executor, "launcher", broken_launcher)
    wrong = run("bisect", folder, "-r", "dense", "--backend", "eager", "--json", "b.json")
    assert wrong.exit_code == 1
    assert "kernels (lowering) is the first after which results part" in wrong.stdout
    fault: dict[str, Any] = json.loads(Path("b.json").read_text())["fault"]
    assert (fault["name"], fault["made"][0]["op"]) == ("kernels", "dgraph.paged_attention")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("compare", "tiny_sdar"), "both sides would be the same; give --to, --dtype"),
        (("compare", "tiny_sdar", "--to", "focsu"), "unknown recipe 'focsu'. Did you mean 'focus'"),
        (("compare", "tiny_sdar", "--to", "focus", "-o", "alhpa=1"), "unknown option of 'dense' or 'focus' 'alhpa'"),
        (("compare", "tiny_sdar", "--dtype", "fp3"), "unknown dtype 'fp3'"),
        (("compare", "tiny_sdar", "--backend", "fast"), "backend must be one of"),
        (("compare", "tiny_sdar", "--to", "focus", "--steps", "2", "--threshold", "0.5"), "are two rules"),
        (("compare", "tiny_sdar", "--to", "focus", "--json", "no/a.json"), "--json no/a.json cannot be written"),
        (("compare", "tiny_sdar", "--to", "focus", "--html", "no/a.html"), "--html no/a.html cannot be written"),
        (("compare", "tiny_sdar", "--to", "focus", "--tolerance", "-1"), "tolerance must be"),
        (("bisect", "tiny_sdar", "-r", "focsu"), "unknown recipe 'focsu'"),
        (("bisect", "tiny_sdar", "--tolerance", "-1"), "tolerance must be"),
        (("bisect", "tiny_sdar", "--backend", "fast"), "backend must be one of"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_before_a_model_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], message: str
) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("dgraph.comparison.compare.load", loaded)
    monkeypatch.setattr(bisect_module, "resolve", loaded)
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert message in result.stderr

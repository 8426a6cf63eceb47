"""`benchmarks/engine_load.py`: every part on a small model, and what is left of a run that is cut."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import engine_load
from benchmarks.engine_load import main, products_seconds
from dgraph.bench.floor import Device, work_of
from dgraph.bench.products import Shape
from dgraph.bench.serve import LoadTest, ServedLoad
from dgraph.engine.stats import EngineStats
from tests.cli.folders import write_checkpoint
from tests.compiled import compiled

NOTHING = EngineStats(0, 0, {}, 0, 0, 0, 0, 0, {}, {}, 0, 0.0, 0, 0, 0, 0)


def measured(tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tables by title, and data, of a run on a small model."""
    model = ("--model", str(write_checkpoint(tmp_path / "small")), "--recipe", "dense", "--backend", "eager")
    load = ("--requests", "6", "--prompt", "uniform:5-20", "--tokens", "uniform:4-12", "--load-requests", "4")
    arms = ("--sequences", "2", "--policies", "look_ahead", "static", "--clients", "1", "2", "--load", "0.9")
    files = ("--json", str(tmp_path / "out.json"), "--markdown", str(tmp_path / "out.md"))
    common = ("--block", "8", "--steps", "8", "--device", "cpu", "--rounds", "1", *files)
    assert main([*model, *load, *arms, *common, *arguments]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    tables = {table["title"]: table for table in found["tables"]}
    assert [line[4:] for line in (tmp_path / "out.md").read_text().splitlines() if line[:4] == "### "] == list(tables)
    return tables, found["data"]


@pytest.mark.release
def test_all_parts_are_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables, data = measured(tmp_path)
    start, steps, streams, policies, clients, offline = tables.values()
    assert list(data["start_up"]) == start["columns"] == ["weights", "optimize", "engine", "first load"]
    assert data["steps"]["tokens"] == 2 * int(steps["note"].split()[-3])
    assert steps["rows"][0][1] == pytest.approx(1e3 * data["steps"]["seconds"] / data["steps"]["steps"])
    assert [one["label"] for one in data["streams"]] == ["Engine.stream", "over HTTP"]
    assert [row[0] for row in streams["rows"][2:]] == ["Engine.stream, mean", "over HTTP, mean"]
    assert [row[:2] for row in policies["rows"]] == [["look_ahead", 0.9], ["static", 0.9]]
    assert [row[0] for row in clients["rows"]] == [1, 2]
    floor = clients["columns"].index("floor %")
    assert all(row[floor] > 0 for row in clients["rows"])
    assert [row[0] for row in offline["rows"]] == ["engine, static", "engine, look_ahead", "generate, batches of 1"]
    assert offline["note"].startswith("6 requests at the start, 6 pages"), "of which the longest request may take 4"
    assert offline["rows"][0][offline["columns"].index("ratio")] == 1
    assert data["notes"] == []
    said = capsys.readouterr().out
    assert all(f"] {title}: " in said for title in tables if title != "Start, in seconds")
    assert all(f"] {stage}: " in said for stage in data["start_up"])


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_second_arm_leaves_the_first(
    sent: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, before = LoadTest.run, signal.getsignal(sent)

    def run(test: LoadTest, *given: Any, clients: int = 0, count: int | None = None, **more: Any) -> ServedLoad:
        if clients == 2 and count == 8:
            more["progress"] = lambda done, of: signal.raise_signal(sent)
        return loads(test, *given, clients=clients, count=count, **more)

    monkeypatch.setattr(LoadTest, "run", run)
    tables, data = measured(tmp_path, "--parts", "clients", "offline")
    assert list(tables) == ["Start, in seconds", "Concurrency", "Notes"]
    assert [row[0] for row in tables["Concurrency"]["rows"]] == [1]
    assert data["1 clients"]["clients"] == 1
    (note,) = data["notes"]
    assert note.startswith("cut after ")
    assert signal.getsignal(sent) == before


def test_nothing_is_begun_when_time_is_over(tmp_path: Path) -> None:
    _, data = measured(tmp_path, "--seconds", "0")
    late = ["steps", "the server", "policies", "1 clients", "2 clients", "offline, static"]
    assert data["notes"] == [f"{what}: not begun after 0 s" for what in late]


def test_a_part_that_fails_is_told_and_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> None:
        raise RuntimeError("CUDA out of memory\nand more")

    monkeypatch.setattr(engine_load, "steps", fails)
    with pytest.raises(AssertionError):  # it says that a part failed
        measured(tmp_path, "--parts", "steps", "clients")
    data = json.loads((tmp_path / "out.json").read_text())["data"]
    assert data["notes"] == ["steps: RuntimeError: CUDA out of memory"]
    assert "2 clients" in data


class OneSecondARow(Device):
    """A device on which each product takes so many seconds as it has rows."""

    def measure(self, shape: Shape, dtype: torch.dtype, counts: Iterable[int]) -> None:
        """Nothing is."""

    def product(self, shape: Shape, dtype: torch.dtype, rows: int) -> float:
        return float(rows)


def test_the_floor_counts_products_of_each_stage_and_of_prompts() -> None:
    program = compiled("tiny_sdar", "focus")
    stats = replace(NOTHING, steps=10, rows={"prefill": 50, "prefix": 300, "suffix": 80})
    device = OneSecondARow(torch.device("cpu"), _bandwidth=float("inf"))
    before, after = (sum(found.values()) for found in work_of(program.graph("step")).products)
    (prompt,) = (sum(found.values()) for found in work_of(program.graph("prefill")).products)
    expected = 300 * before + 80 * after + 50 * prompt
    assert products_seconds(program, stats, device) == pytest.approx(expected)
    assert before + after == 48

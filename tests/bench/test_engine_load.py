"""`benchmarks/engine_load.py`: every part on a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.engine_load import main
from tests.cli.folders import write_checkpoint


@pytest.mark.release
def test_all_parts_are_measured_and_written(tmp_path: Path) -> None:
    model = ("--model", str(write_checkpoint(tmp_path / "small")), "--recipe", "dense", "--backend", "eager")
    load = ("--requests", "6", "--prompt", "uniform:5-20", "--tokens", "uniform:4-12", "--load-requests", "4")
    arms = ("--sequences", "2", "--policies", "look_ahead", "static", "--clients", "1", "2", "--load", "0.9")
    out = tmp_path / "out.json"
    main([*model, *load, *arms, "--block", "8", "--steps", "8", "--device", "cpu", "--json", str(out)])
    offline, policies, clients = json.loads(out.read_text())["tables"]
    assert [row[0] for row in offline["rows"]] == ["generate, batches of 2", "engine, static", "engine, look_ahead"]
    ratio = offline["columns"].index("ratio")
    assert offline["rows"][1][ratio] == 1
    assert [row[:2] for row in policies["rows"]] == [["look_ahead", 0.9], ["static", 0.9]]
    assert [row[0] for row in clients["rows"]] == [1, 2]

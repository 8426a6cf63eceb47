"""The benchmark of recipes in combinations runs on a tiny model, and a gate computes the share that it is given."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import combinations


@pytest.mark.release
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = "--model tiny_llada --batch 2 --prompt 24 --tokens 16 --block 8 --steps 4 --dense-steps 3 --repeat 1"
    arms = "--share 0 1 --arms dense dllm_serve:delay=0 dllm_serve+dyllm+focus:delay=0 --backend eager --device cpu"
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["combinations", *sizes.split(), *arms.split(), "--json", str(out)])
    combinations.main()
    found = json.loads(out.read_text(encoding="utf-8"))
    (table,) = [each for each in found["tables"] if each["title"] == "tiny_llada, weights as loaded"]
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    assert [(row["arm"], row["salient"]) for row in rows] == [
        ("dense", ""),
        ("dllm_serve:delay=0", ""),
        ("dllm_serve+dyllm+focus:delay=0", 0.0),
        ("dllm_serve+dyllm+focus:delay=0", 1.0),
    ]
    assert rows[0]["x dense"] == 1.0
    assert all(row["tok/s"] > 0 and row["KV GB"] > 0 for row in rows)
    assert found["data"]["notes"] == []

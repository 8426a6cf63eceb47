"""The benchmark of sparse recipes runs from its first section to its last, on a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import maskkv_speed

TINY = "--layers 2 --tokens 16 --block 8 --pairs 4 --full 0 --full-steps 1 --backend eager --device cpu"


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str) -> dict[str, Any]:
    """The JSON of a run on a tiny model."""
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["maskkv_speed", *TINY.split(), *options.split(), "--json", str(out)])
    maskkv_speed.main()
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def test_each_part_saves_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(tmp_path, monkeypatch, "--ablation --prompt 64")
    parts = found["data"]["ablation"]
    whole, projected, excluded, online, offline = parts.values()
    assert list(parts) == [row[0] for row in found["tables"][0]["rows"]]
    assert whole["logits"] == (64 + 16) * 500 * 4, "every row of the canvas, in fp32"
    assert projected["logits"] == excluded["logits"] == offline["logits"] == 16 * 500 * 4
    assert whole["first"] == projected["first"] > excluded["first"] > offline["first"]
    assert (online["first"], online["later"]) == (excluded["first"], offline["later"])
    # 2 layers of 4 heads keep 60 positions less, each with a key and a value of 16 numbers in fp32
    assert excluded["later"] - offline["later"] >= 2 * 4 * 60 * 2 * 16 * 4


@pytest.mark.release
def test_several_lengths_end_with_a_table_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = ["maskkv", "fast_dllm:cache=prefix", "dllm_cache", "sparse_dllm"]
    found = run(tmp_path, monkeypatch, f"--sections prompt --prompt 24,40 --arms vanilla {' '.join(arms)}")
    *each, both = found["tables"]
    assert [table["title"].partition(", 16")[0] for table in each] == ["1 sequence, prompt 24", "1 sequence, prompt 40"]
    assert both["columns"] == ["arm", "24 ms/token", "24 peak GB", "40 ms/token", "40 peak GB"]
    assert sorted(row[0] for row in both["rows"]) == sorted(["original loop", *arms])
    assert all(found["data"][f"{arm} at {length}"]["kv_bytes"] > 0 for arm in arms for length in (24, 40))


@pytest.mark.release
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = "--layers 2 --prompt 40 --tokens 16 --block 8 --batch 2 --contexts 48 --batch-tokens 16 --full-steps 1"
    arms = "--arms maskkv fast_dllm dllm_serve --full 5 --backend eager --device cpu"
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["maskkv_speed", *sizes.split(), *arms.split(), "--json", str(out)])
    maskkv_speed.main()
    found = json.loads(out.read_text(encoding="utf-8"))
    assert {"maskkv", "fast_dllm", "dllm_serve"} <= found["data"].keys()
    for arm in ("maskkv", "fast_dllm", "dllm_serve"):
        assert found["data"][arm]["kv_bytes"] > 0
        assert len(found["data"][arm]["ms"]) == 16

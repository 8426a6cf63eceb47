"""The benchmark of sparse recipes runs from its first section to its last, on a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import maskkv_speed


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

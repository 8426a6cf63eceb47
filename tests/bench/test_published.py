"""benchmarks.published: whole on tiny sizes, and what is left of a run in which something fails or time is over."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import published
from benchmarks.published import ARMS, Figure, Run
from dgraph.models.shapes import SHAPES

TINY = ("--tiny", "--device", "cpu", "--backend", "eager", "--repeat", "1")


def figure(arm: str, sequences: int, groups: dict[str, float] | None = None) -> Figure:
    compared = ARMS[arm].published.get(sequences, "none")
    return Figure(arm, sequences, 33, 8, 2.0, 3.0, 0.5, 0.1, 64.0, None, None, groups, compared)


def data_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())["data"]
    return found


@pytest.mark.release
@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_on_tiny_sizes(arm: str, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    assert published.main([*TINY, "--arms", arm, "--batch", "2", "1", "--json", str(file)]) == 0
    found = data_of(file)["figures"]
    assert [(one["arm"], one["sequences"], one["rows"]) for one in found] == [(arm, 1, 8), (arm, 2, 16)]
    # Of gemma two canvases, of which the first is encoded; of nemotron two blocks whose first token is known, too.
    assert {one["steps"] for one in found} == ({33} if arm.startswith("gemma") else {16})
    for one in found:
        assert 0 < one["ms"] <= one["slowest"]
        assert 0 < one["prefill"] < one["seconds"]
        assert one["floor"]["total"] > 0
        assert ("experts" in one["floor"]) == arm.startswith("gemma")
    assert any("experts of a layer" in note for note in data_of(file)["notes"]) == (arm == "gemma")


def test_what_fails_is_told_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, text = tmp_path / "out.json", tmp_path / "out.md"
    begun: list[str] = []

    def measure(run: Run, name: str, batches: Sequence[int], times: object) -> None:
        begun.append(name)
        run.figures.append(figure(name, batches[0], {"GEMM": 1.5, "idle": 0.25} if name == "nemotron" else None))
        if name == "gemma":
            raise RuntimeError("CUDA out of memory\nand more")
        # What came before is in the files.
        assert [one["arm"] for one in data_of(file)["figures"]] == ["gemma"]

    monkeypatch.setattr(published, "measure", measure)
    files = ["--json", str(file), "--markdown", str(text)]
    assert published.main([*TINY, "--arms", "gemma", "nemotron", "--batch", "8", "1", *files]) == 1
    assert begun == ["gemma", "nemotron"]
    assert data_of(file)["notes"] == ["gemma: RuntimeError: CUDA out of memory"]
    assert "| nemotron | 1 | 8 | 33 | 2 | - | - | 3 | 64 | 100 | - | 5.6 ms |" in text.read_text()
    assert "### nemotron-8b: ms of a step by kernels" in text.read_text()
    assert "| nemotron | 1 | 1.5 | 0.25 |" in text.read_text()
    assert "gemma-26b-a4b: ms of a step" not in text.read_text(), "it was not profiled"
    assert "gemma: RuntimeError: CUDA out of memory" in capsys.readouterr().out


def test_nothing_is_begun_when_time_is_over(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    assert published.main([*TINY, "--seconds", "-1", "--json", str(file)]) == 0
    assert data_of(file) == {"figures": [], "notes": [f"{name}: not begun after -1 s" for name in ARMS]}


def test_the_arms_are_of_shapes_that_exist() -> None:
    assert {arm.protocol.shape for arm in ARMS.values()} <= set(SHAPES)
    assert ARMS["gemma"].batches == (1, 8, 32)
    assert ARMS["nemotron"].published[128] == "66.2 ms"

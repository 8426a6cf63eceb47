"""`dgraph match`: the patterns of a file on the graph of a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run

UNITS = """
import torch
import torch.nn.functional as F
import dgraph


@dgraph.Pattern
def gated_unit(x, gate, up):
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def refuse(match):
    return f"eps is {match['eps']}"


norm = dgraph.Pattern(lambda x, weight, eps: torch.ops.dgraph.rms_norm(x, weight, eps), refuse)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "patterns.py"
    path.write_text(UNITS, encoding="utf-8")
    return path


@pytest.mark.usefixtures("captured_once")
def test_matches_and_near_misses_by_layer(run: Run, folder: Path, file: Path) -> None:
    lines = run("match", folder, file, "-r", "focus").stdout.splitlines()
    assert lines[0].startswith("gated_unit: 0 matches, ")
    assert any("2 of 4 nodes: getitem stands where linear is expected" in line for line in lines), "one product of both"
    lines = run("match", folder, file, "-r", "focus", "--after", "PackRows").stdout.splitlines()
    assert lines[0].startswith("gated_unit: 2 matches, ")
    assert "layers[0..1] x2" in lines[1]
    assert "gated_unit(" in lines[1]
    assert "mlp.gate_proj.weight, mlp.up_proj.weight)" in lines[1]
    assert any(line.endswith("1 of 1 nodes: eps is 1e-06") for line in lines)


@pytest.mark.usefixtures("captured_once")
def test_matches_as_json(run: Run, folder: Path, file: Path) -> None:
    result = run("match", folder, file, "--layer", "1", "--json")
    units, norms = json.loads(result.stdout)["patterns"]
    (match,) = units["matches"]
    assert (units["pattern"], match["layer"]) == ("gated_unit", 1)
    assert match["values"]["gate"] == "model.layers.1.mlp.gate_proj.weight"
    assert list(match["nodes"]) == ["linear", "silu", "linear_1", "mul"]
    assert {miss["reason"] for miss in norms["misses"]} == {"eps is 1e-06"}
    assert {(miss["found"], miss["calls"], miss["layer"]) for miss in norms["misses"]} == {(1, 1, 1)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 3\n", "has no pattern; write @dgraph.Pattern above a function."),
        ("x = y\n", "cannot be run: NameError: name 'y' is not defined"),
        ("def f(:\n", "cannot be run: SyntaxError: "),
        ("import dgraph\n@dgraph.Pattern\ndef f(x):\n    return x\n", "pattern f returns "),
        (None, "cannot be run: FileNotFoundError: "),
    ],
)
def test_a_file_without_patterns_is_refused(
    run: Run, folder: Path, tmp_path: Path, text: str | None, said: str
) -> None:
    path = tmp_path / "other.py"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    result = run("match", folder, path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


def test_an_option_needs_a_recipe(run: Run, folder: Path, file: Path) -> None:
    result = run("match", folder, file, "-o", "alpha=2")
    assert result.exit_code == 2
    assert "unknown option of 'captured' 'alpha'" in result.stderr

"""`dgraph bundle` and `dgraph replay`: the command that a failure shows writes a bundle, which fails alike."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from dgraph.bundles import FOLDER
from dgraph.errors import LoweringError
from dgraph.lowering.executor import LoweredProgram
from tests.cli.conftest import Run

STEP = ("-p", "w1 w2", "--backend", "eager", "--max-new-tokens", 8, "--threshold", 1.0, "-o", "alpha=inf")


def test_a_step_by_hand(run: Run, folder: Path) -> None:
    result = run("bundle", folder, *STEP, "--step", 1, "--out", "step.zip")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("step.zip: step 1 of small under focus (step, ")
    found = run("replay", "step.zip", "--model", folder, "--json")
    assert found.exit_code == 0
    assert json.loads(found.stdout)["same"] is True
    without = run("replay", "step.zip")
    assert without.exit_code == 2
    assert "does not have the weights of small" in without.stderr
    inside = run("bundle", folder, *STEP, "--step", 1, "--with-weights", "--json")
    assert json.loads(inside.stdout)["file"] == "bundle.zip"
    found = run("replay", "bundle.zip")
    assert (found.exit_code, found.stdout.splitlines()[-1]) == (0, "the same")


def test_a_failure_shows_the_command(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise LoweringError("this step is broken")

    monkeypatch.delenv(FOLDER, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(LoweredProgram, "_on", broken)
        failed = run("generate", folder, *STEP)
        assert failed.exit_code == 2
        message, note = failed.stderr.splitlines()
        assert message == "error: this step is broken"
        command = shlex.split(note.rpartition(": ")[2])
        assert command[:3] == ["dgraph", "bundle", str(folder)]
        assert command[-4:] == ["--step", "0", "--out", "bundle.zip"]
        made = run(*command[1:])
        assert made.exit_code == 0, made.stderr
        assert "dgraph.errors.LoweringError: this step is broken" in made.stdout
        again = run("replay", "bundle.zip", "--model", folder)
        assert (again.exit_code, again.stdout.splitlines()[-1]) == (0, "the same")
    mended = run("replay", "bundle.zip", "--model", folder)
    assert (mended.exit_code, mended.stdout.splitlines()[-1]) == (1, "not the same")


def test_the_short_option_is_that_of_the_recipe(run: Run, folder: Path) -> None:
    result = run("bundle", folder, "-p", "w1", "-o", "step.zip")
    assert result.exit_code == 2
    assert "the file is --out step.zip" in result.stderr
    assert run("replay", "nowhere.zip").stderr == "error: nowhere.zip cannot be read: No such file or directory.\n"

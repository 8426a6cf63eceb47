"""`dgraph profile`: the tables, the JSON, and what it refuses."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from dgraph.cli.units import read_size
from dgraph.engine.memory.profile import Profile
from dgraph.engine.scheduling.cost_model import CostModel
from dgraph.errors import InputError
from tests.cli.conftest import Run
from tests.cli.refusals import refused


def test_memory_by_what_has_it(run: Run, folder: Path, tmp_path: Path) -> None:
    args = ("--rows", 64, "--memory", "64M", "--steps", "--backend", "eager", "--json", "p.json")
    result = run("profile", folder, "-r", "dense", *args)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    written = json.loads((tmp_path / "p.json").read_text())
    found = Profile.from_json(written)
    assert (found.rows, found.memory) == (64, 64 << 20)
    lines = result.stdout.splitlines()
    assert lines[0] == f"small under dense on cpu: 64 rows, logits of 64, {found.sequences} sequences"
    names = [line[: len("keys and values")].strip() for line in lines]
    for name in ("weights", "activations", "feed-forward", "LM head", "state", "guard", "keys and values", "in all"):
        assert name in names
    fits = {str(length): found.fits(length) for length in found.lengths}
    assert written["fits"] == fits
    assert [[length, str(count)] for length, count in fits.items()] == [
        line.split()[:2] for line in lines[lines.index("") + 1 :] if line.split()[:1] in [[length] for length in fits]
    ]
    assert CostModel.read(tmp_path / "p.json") == CostModel.fit(found.steps)


def test_what_cannot_be_written_is_said_after_what_was_found(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text = Path.write_text

    def full(path: Path, *args: Any, **options: Any) -> int:
        if path.name == "p.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_text(path, *args, **options)

    monkeypatch.setattr(Path, "write_text", full)
    result = run("profile", folder, "-r", "dense", "--rows", 64, "--backend", "eager", "--json", "p.json")
    assert "keys and values" in result.stdout
    assert result.exit_code == 2
    assert result.stderr == "error: --json p.json cannot be written: No space left on device.\n"


def test_what_does_not_fit_is_said(run: Run, folder: Path) -> None:
    result = run("profile", folder, "-r", "dense", "--rows", 64, "--memory", 1000, "--backend", "eager")
    assert result.exit_code == 0, result.stderr
    assert "Nothing is left for keys and values: " in result.stdout


@pytest.mark.parametrize(
    ("text", "size"), [("24G", 24 << 30), ("1.5GiB", 3 << 29), ("512 MB", 512 << 20), ("1000", 1000), (None, None)]
)
def test_sizes(text: str | None, size: int | None) -> None:
    assert read_size("--memory", text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "many", "3T", "G"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="--memory takes a number of bytes"):
        read_size("--memory", text)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--rows", 0), "--rows must be at least 1, got 0"),
        (("--logit-rows", 0), "--logit-rows must be at least 1, got 0"),
        (("--rows", 3), "rows=3: a step has room for a block of"),
        (("--json", "no/where.json"), "--json no/where.json cannot be written: there is no folder no"),
        (("--json", "."), "--json . cannot be written: it is a folder"),
        (("--shape", "--fact", "block_length=4"), "a published shape has its own"),
    ],
)
def test_bad_input(run: Run, folder: Path, args: tuple[Any, ...], message: str) -> None:
    refused(run("profile", folder, "-r", "dense", "--backend", "eager", *args), message)

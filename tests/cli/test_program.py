"""Programs in files on the command line: `dgraph compile --to`, `dgraph generate FOLDER`, `dgraph export`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Run

ASKED = ("-p", "w1 w2", "--max-new-tokens", 8)


@pytest.fixture
def saved(run: Run, folder: Path, tmp_path: Path) -> Path:
    out = tmp_path / "program"
    result = run("compile", folder, "-r", "focus", "--backend", "eager", "--to", out, "--with-weights")
    assert result.exit_code == 0, result.stderr
    assert f"{out}: 1 artifact, with weights, " in result.stdout
    return out


def test_generate_opens_a_saved_program(run: Run, folder: Path, saved: Path) -> None:
    found = run("generate", saved, "--trust", *ASKED, "--json")
    assert found.exit_code == 0, found.stderr
    wanted = json.loads(run("generate", folder, "-r", "focus", "--backend", "eager", *ASKED, "--json").stdout)
    told = json.loads(found.stdout)
    assert (told["token_ids"], told["recipe"]) == (wanted["token_ids"], wanted["recipe"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "contains compiled code that dgraph will run"),
        (("--trust", "-r", "dense"), "--recipe was settled when this program was saved"),
        (("--trust", "--device", "cpu"), "--device was settled"),
        (("--trust", "--data", "in.jsonl", "--out", "out.jsonl"), "--data needs a model, and got a saved program"),
        (("--trust", "--no-cache"), "leave --no-cache out"),
    ],
)
def test_generate_refuses_what_a_program_does_not_take(
    more: tuple[str, ...], message: str, run: Run, saved: Path
) -> None:
    result = run("generate", saved, *ASKED, *more)
    assert result.exit_code == 2
    assert message in result.stderr


def test_trust_is_for_programs_and_weights_for_folders(run: Run, folder: Path) -> None:
    result = run("generate", folder, *ASKED, "--trust")
    assert (result.exit_code, "--trust is for the folder of a saved program" in result.stderr) == (2, True)
    result = run("compile", folder, "--with-weights")
    assert (result.exit_code, "--with-weights puts the weights into the folder of --to" in result.stderr) == (2, True)


def test_export_writes_a_program_of_torch(run: Run, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prefill.pt2"
    result = run("export", folder, "-r", "dense", "--phase", "prefill", "--out", file, "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert (told["file"], told["size"]) == (str(file), file.stat().st_size)
    placeholders = torch.export.load(file).graph_signature.user_inputs
    assert list(placeholders) == told["inputs"]
    wrong = run("export", folder, "-o", "step.pt2", "--out", file)
    assert (wrong.exit_code, "the file is --out step.pt2" in wrong.stderr) == (2, True)

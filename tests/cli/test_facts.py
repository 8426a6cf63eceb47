"""`--fact NAME=VALUE`: what holds of a model instead of what its folder says, wherever a command loads one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dgraph.cli.options import facts
from dgraph.errors import CheckpointError, InputError, UnknownName
from dgraph.plans.calibration import Calibration
from tests.cli.conftest import Run
from tests.cli.folders import write_checkpoint
from tests.tiny import BLOCK

FACT = ("--fact", f"block_length={BLOCK}", "--fact", "eos_ids=1,5")


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that does not say its block length."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "silent", block_size=None)


def test_each_is_read_as_the_type_of_its_field() -> None:
    given = ["block_length=4", "eos_ids=1,5", "attention=bidirectional", "layer_importance=0.5,1", "logit_shift=1"]
    assert facts(given) == {
        "block_length": 4,
        "eos_ids": (1, 5),
        "attention": "bidirectional",
        "layer_importance": (0.5, 1.0),
        "logit_shift": 1,
    }
    assert facts(["eos_ids="]) == {"eos_ids": ()}
    assert facts(None) == {}
    for text, kind, message in [
        ("block_length", InputError, "--fact takes NAME=VALUE, got 'block_length'"),
        ("block_lenght=4", UnknownName, "unknown fact 'block_lenght'. Did you mean 'block_length'"),
        ("layers=4", UnknownName, "unknown fact 'layers'"),
        ("block_length=four", InputError, "fact block_length is a whole number, got 'four'"),
        ("eos_ids=1,x", InputError, "fact eos_ids is a whole number, got 'x'"),
    ]:
        with pytest.raises(kind) as refused:
            facts([text])
        assert message in str(refused.value)


def test_a_folder_without_a_block_length_can_be_used(run: Run, silent: Path, folder: Path) -> None:
    said = run("generate", silent, "-p", "w3 w4", "--backend", "eager", "--max-new-tokens", 8, "--no-cache")
    assert said.exit_code == 2
    assert "--fact block_length=4" in " ".join(said.stderr.split())
    asked = ("-p", "w3 w4", "--backend", "eager", "--max-new-tokens", 8, "--no-cache")
    found, wanted = run("generate", silent, *asked, *FACT[:2]), run("generate", folder, *asked)
    assert (found.exit_code, found.stdout) == (0, wanted.stdout), found.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "MODEL", "-p", "w3"),
        ("dump", "MODEL"),
        ("dump", "MODEL", "-r", "focus"),
        ("diff", "MODEL"),
        ("explain", "MODEL"),
        ("compile", "MODEL"),
        ("calibrate", "MODEL", "--prompts", "FILE"),
        ("eval", "MODEL", "--data", "FILE"),
        ("bench", "-m", "MODEL"),
        ("bench", "record", "-m", "MODEL", "--out", "trace.json"),
    ],
    ids=lambda command: "-".join(command[:2]).replace("-MODEL", "").replace("--m", ""),
)
def test_every_command_hands_them_on(
    run: Run, silent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    result, seen = handed(run, silent, tmp_path, monkeypatch, (*command, *FACT))
    assert (result.exit_code, result.stderr) == (2, "error: seen\n")
    assert seen == [{"block_length": BLOCK, "eos_ids": (1, 5)}]


def handed(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> tuple[Any, list[dict[str, Any]]]:
    """What a command gives, and the facts that it loads the model with; nothing is loaded."""
    seen: list[dict[str, Any]] = []

    def load(
        name: Any, dtype: Any = None, device: Any = None, opened: bool = False, low_rank: Any = None, **facts: Any
    ) -> Any:
        seen.append(facts)
        raise InputError("seen")

    monkeypatch.setattr("dgraph.families.loading.load", load)
    monkeypatch.setattr("dgraph.bench.load.load_model", load)
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "w3 w4", "answer": "w5"}\n', encoding="utf-8")
    places = {"MODEL": model, "FILE": file}
    return run(*[places.get(word, word) for word in command]), seen


MEASURED = Calibration("sdar", 2, 64, 1, 4, None, (0.5, 0.25), (0.0, 0.0), (0.75, 0.5))


def test_measurements_of_a_file_are_facts(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    MEASURED.write(file)
    measured = {"layer_importance": (0.5, 0.25), "attention_similarity": (0.75, 0.5)}
    assert facts(None, str(file)) == measured
    given = facts(["layer_importance=1,2", "block_length=4"], str(file))
    assert given == {**measured, "layer_importance": (1.0, 2.0), "block_length": 4}
    with pytest.raises(CheckpointError, match=r"missing\.json is no calibration"):
        facts(None, str(tmp_path / "missing.json"))


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "MODEL", "-p", "w3"),
        ("compile", "MODEL"),
        ("eval", "MODEL", "--data", "FILE"),
        ("bench", "-m", "MODEL"),
        ("serve", "MODEL"),
    ],
    ids=lambda command: command[0],
)
def test_commands_take_measurements_from_a_file(
    run: Run, silent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    MEASURED.write(tmp_path / "c.json")
    result, seen = handed(run, silent, tmp_path, monkeypatch, (*command, "--calibration", str(tmp_path / "c.json")))
    assert (result.exit_code, result.stderr) == (2, "error: seen\n")
    assert seen == [MEASURED.facts]


def test_a_published_shape_has_its_own(run: Run) -> None:
    result = run("bench", "--shape", "sdar-8b", *FACT)
    assert result.exit_code == 2
    assert "--fact is for --model" in result.stderr

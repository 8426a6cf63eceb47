"""`dgraph calibrate`: the table, the JSON, the file, which prompts it takes, and what it refuses."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

import dgraph
from dgraph.cli.calibrate import OWN_SEEDS, prompts_of
from dgraph.evaluate.questions import drawn, stored
from dgraph.evaluate.tasks import TASKS as BUNDLED
from dgraph.evaluate.tasks import questions_of
from dgraph.families import embedded
from dgraph.models.tasks import TASKS, is_held_out
from dgraph.plans.calibration import FILE, read_calibration
from tests.cli.conftest import Run
from tests.cli.folders import WINDOW, write_checkpoint
from tests.cli.refusals import refused


@pytest.fixture
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"w3 w{i}"}) + "\n" for i in range(4, 8)))
    return file


@pytest.fixture
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "small")


def test_an_embedded_model_is_calibrated_on_its_tasks(run: Run, tmp_path: Path) -> None:
    result = run("calibrate", "tiny_llada", "--count", 2, "--out", "c.json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    found = read_calibration(tmp_path / "c.json")
    assert (found.prompts, found.seed, found.max_new_tokens) == (2, 0, 64)
    titles, *rows = result.stdout.partition("\n\n")[0].splitlines()
    assert titles.split() == ["layer", "importance", "spread", "attention"]
    assert [row.split()[:4] for row in rows] == [
        [str(i), f"{found.importance[i]:.4f}", f"{found.spread[i]:.4f}", f"{found.similarity[i]:.4f}"]
        for i in range(12)
    ]
    bars = [row.count("#") for row in rows]
    assert bars[0] == max(bars) == 40
    assert bars[5] == round(40 * found.importance[5] / found.importance[0]) > 0
    assert result.stdout.endswith("2 prompts, 64 masks after each; written to c.json\n")
    shipped = read_calibration(embedded()["tiny_llada"].folder / FILE)
    assert found.importance == pytest.approx(shipped.importance, abs=4 * max(shipped.spread))


def test_a_checkpoint_is_calibrated_where_it_lies(run: Run, small: Path, prompts: Path) -> None:
    result = run("calibrate", small, "--prompts", prompts, "--count", 3, "--tokens", 5, "--json")
    assert result.exit_code == 0, result.stderr
    value = json.loads(result.stdout)
    found = read_calibration(small / FILE)
    assert value == {"model": "small", "file": str(small / FILE), **json.loads((small / FILE).read_text())}
    assert (found.prompts, found.max_new_tokens, found.seed) == (3, 5, None)
    texts = ["w3 w4", "w3 w5", "w3 w6"]
    assert found == dgraph.calibrate(small, texts, max_new_tokens=5)
    assert dgraph.load(small).spec.layer_importance == found.importance


def test_a_damaged_calibration_is_made_anew(run: Run, small: Path, prompts: Path) -> None:
    (small / FILE).write_text("{")
    result = run("calibrate", small, "--prompts", prompts)
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: ")
    assert "is no calibration" in result.stderr
    assert read_calibration(small / FILE).prompts == 4
    assert run("calibrate", small, "--prompts", prompts).stderr == ""


def test_another_command_warns_once_of_a_damaged_one(run: Run, small: Path) -> None:
    (small / FILE).write_text("{}")
    result = run("dump", small)
    assert result.exit_code == 0
    assert result.stderr.count("warning: ") == 1
    assert "expected an object of format 1, got None" in " ".join(result.stderr.split())


@pytest.mark.parametrize(("model", "count"), [("tiny_llada", 7), ("tiny_sdar", 60)])
def test_prompts_are_held_out_of_training_and_of_evaluation(model: str, count: int) -> None:
    found = prompts_of(model, count, seed=0)
    assert len(found) == len(set(found)) == count
    assert all(map(is_held_out, found))
    assert not set(found) & {q.prompt for q in stored(model)}
    rare = {"follow"}  # a few hundred in all
    for task in set(TASKS) - rare:
        assert not set(found) & {q.prompt for q in drawn(model, [task], 50, seed=0)}
    assert found == prompts_of(model, count, seed=0)
    assert found != prompts_of(model, count, seed=1)


@pytest.mark.parametrize("model", ["smol_sdar", "smol_llada"])
def test_a_model_that_reads_english_is_asked_bundled_tasks(model: str) -> None:
    found = prompts_of(model, 60, seed=0)
    assert len(set(found)) == 60
    task_of = {question.prompt: task for task in BUNDLED for question in questions_of(task)}
    counts = Counter(task_of[prompt] for prompt in found)
    assert set(counts) == set(BUNDLED)
    assert set(counts.values()) == {5, 6}
    assert not set(found) & {q.prompt for q in stored(model)}
    assert found == prompts_of(model, 60, seed=0)
    assert found != prompts_of(model, 60, seed=1)


def test_every_task_has_its_share() -> None:
    found = prompts_of("tiny_llada", 7, seed=0)
    prompts = {q.prompt: q.task for q in drawn("tiny_llada", [], 200, OWN_SEEDS)}
    assert [prompts[prompt] for prompt in found] == [*TASKS, *list(TASKS)[:2]]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--count", 0), ("--count must be at least 1, got 0",)),
        (("--tokens", 0), ("--tokens must be at least 1, got 0",)),
        (("--tokens", WINDOW), (f"more than the {WINDOW} of sdar",)),
        (("--prompts", "missing.jsonl"), ("--prompts missing.jsonl cannot be read",)),
        (("--out", "missing/c.json"), ("--out missing/c.json cannot be written", "there is no folder missing")),
        (("--out", "."), ("--out . cannot be written: it is a folder",)),
        (("--device", "moon"), ("device 'moon' cannot be used",)),
    ],
)
def test_bad_input_is_refused(
    run: Run, small: Path, prompts: Path, options: tuple[object, ...], parts: tuple[str, ...]
) -> None:
    before = sorted(small.iterdir())
    given = () if "--prompts" in options else ("--prompts", prompts)
    refused(run("calibrate", small, *given, *options), *parts)
    assert sorted(small.iterdir()) == before


def test_a_model_without_tasks_needs_prompts(run: Run, small: Path) -> None:
    refused(run("calibrate", small), "comes with no tasks to draw prompts from; give --prompts FILE.jsonl")
    refused(run("calibrate", "tiny_sdra"), "unknown model 'tiny_sdra'. Did you mean 'tiny_sdar'")
    refused(run("calibrate", "missing/model"), "missing/model is not a checkpoint folder")


def test_a_folder_that_cannot_be_written_is_said_before_anything_runs(
    run: Run, small: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: not (mode == os.W_OK and Path(path) == small))
    monkeypatch.setattr(dgraph, "calibrate", lambda *_, **__: pytest.fail("measured"))
    message = f"{small / FILE} cannot be written: the folder is read-only for you; give --out FILE"
    refused(run("calibrate", small, "--prompts", prompts), message)


def test_help_has_an_example(run: Run) -> None:
    result = run("calibrate", "--help")
    assert result.exit_code == 0
    assert "dgraph calibrate tiny_llada --out calibration.json" in result.stdout

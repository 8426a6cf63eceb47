"""`dgraph eval`: tables, JSON, files and plot; resuming; what it refuses; what is left after Ctrl-C."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dgraph
from dgraph.compiler.saving import save_quantised
from dgraph.evaluate import run as runs
from dgraph.evaluate.judge import Judge
from dgraph.evaluate.run import Evaluation
from dgraph.families import embedded
from tests.cli.conftest import Run
from tests.cli.folders import write_checkpoint
from tests.cli.refusals import refused
from tests.evaluate import programs
from tests.evaluate.judges import write_judge
from tests.recipes.bidirectional import setup_of

SMALL = ("--backend", "eager", "--max-new-tokens", 12)


@pytest.fixture(autouse=True)
def tests_share_models_and_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dgraph, "load", programs.load)
    monkeypatch.setattr(runs, "optimize", programs.optimize)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = [{"task": task, "prompt": f"w3 w{i}", "answer": "w9"} for i in range(5) for task in ("one", "two")]
    file = tmp_path_factory.mktemp("data") / "data.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(scope="session")
def judge_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_judge(tmp_path_factory.mktemp("judges") / "small_judge")


def test_an_evaluation_prints_tables_and_resumes(run: Run, folder: Path, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = ("eval", folder, "--data", data, "--count", 4, *SMALL, "--sweep", "alpha=1.2,1.8", "--out", "r.jsonl")
    result = run(*command, "--plot", "plot.png")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    rows = [line for line in result.stdout.splitlines() if line.startswith(("dense", "focus"))]
    focus = ["focus, alpha=1.2; threshold=0.9", "focus, alpha=1.8; threshold=0.9"]
    expected = [*2 * ["dense; threshold=0.9", *focus], *focus]  # arms, tasks, differences
    assert [row.split("  ")[0] for row in rows] == expected
    assert "difference (2 compared)" in result.stdout
    assert "EM % (95 %)" in result.stdout
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "plot-salient.png").exists()
    results = (tmp_path / "r.jsonl").read_text()
    assert results.count("\n") == 3 * 4, "the tasks here have the same prompts, so they share results"
    assert run(*command).stdout == result.stdout
    assert (tmp_path / "r.jsonl").read_text() == results
    found = json.loads(run(*command, "--json").stdout)
    assert found["max_new_tokens"] == 12
    dense, focus = found["arms"][:2]
    assert (found["comparisons"], dense["paired"], focus["paired"]["prompts"]) == (2, None, 8)
    assert (dense["prompts"], dense["scored"], set(dense["tasks"])) == (8, 8, {"one", "two"})
    assert (dense["against"], focus["against"]) == (None, "dense; threshold=0.9")
    assert focus["recipe"] == {"recipe": "focus", "options": {"alpha": 1.2}}
    assert focus["agreement"]["prompts"] == 8


def test_distributions_are_printed_written_and_drawn(run: Run, folder: Path, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = ("eval", folder, "--data", data, "--count", 2, *SMALL, "-r", "dense", "--against", "none")
    result = run(*command, "--distributions", "found.json")
    assert result.exit_code == 0, result.stderr
    (steps,) = (part for part in result.stdout.split("\n\n") if part.startswith("tokens of a step"))
    assert "dense; threshold=0.9" in steps
    assert sorted(file.name for file in tmp_path.iterdir()) == ["found.json", "found.png"]
    (found,) = json.loads((tmp_path / "found.json").read_text()).values()
    assert sum(found["tokens per step"].values()) > 0
    assert len(found["importance"]["block"]) == len(found["cosine"]["means"])
    told = json.loads(run(*command, "--distributions", "found.json", "--json").stdout)
    assert told["distributions"] == {"dense; threshold=0.9": found}


def test_salient_rows_are_printed_kept_and_drawn(
    run: Run, folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    canvas = replace(setup_of("llada").model, tokenizer=programs.load(folder).tokenizer)
    monkeypatch.setattr(dgraph, "load", lambda *_: canvas)
    arms = ("-r", "dyllm:tau=0.9,full_steps=2", "-r", "dense", "--against", "none", "--steps", 8)
    command = ("eval", folder, "--data", data, "--count", 2, *SMALL, *arms, "--out", "r.jsonl")
    result = run(*command, "--plot", "plot.png")
    assert result.exit_code == 0, result.stderr
    (table,) = (part for part in result.stdout.split("\n\n") if part.startswith("salient rows"))
    assert table.count("dyllm, tau=0.9") == 1
    assert "dense" not in table
    assert sorted(file.name for file in tmp_path.iterdir()) == ["plot-salient.png", "plot.png", "r.jsonl"]
    assert run(*command).stdout == result.stdout
    dyllm, dense = json.loads(run(*command, "--json").stdout)["arms"]
    assert dense["salience"] is None
    assert dyllm["salience"]["prompts"] == 2, "the tasks here have the same prompts"
    assert dyllm["salience"]["by_step"][:2] == [1.0, 1.0]
    assert 0 < dyllm["salience"]["mean"] < 1


def test_a_judge_reads_the_responses_once(run: Run, folder: Path, data: Path, judge_folder: Path) -> None:
    command = ("eval", folder, "--data", data, "--count", 2, *SMALL, "--judge", judge_folder, "--out", "r.jsonl")
    result = run(*command)
    assert result.exit_code == 0, result.stderr
    (table,) = (part for part in result.stdout.split("\n\n") if "perplexity" in part)
    shown = [(line.split(";")[0], line.split()[2]) for line in table.splitlines()[1:]]
    assert shown == [(arm, task) for arm in ("dense", "focus") for task in ("one", "two")], "a line for each task"
    assert all(line.split()[3] == "2" for line in table.splitlines()[1:]), "of the responses to it"
    found = json.loads(run(*command, "--json").stdout)
    assert found["judge"]["model"] == judge_folder.name
    for arm in found["arms"]:
        judged = arm["judged"]
        assert judged["responses"] == 4
        assert judged["perplexity"] == pytest.approx(math.exp(judged["nll_per_token"]))
        assert judged["tokens"] == 4 * arm["tokens_per_response"], "the judge has the same vocabulary"
    paired = found["arms"][1]["paired"]["nll"]
    dense, focus = (arm["judged"]["nll_per_token"] for arm in found["arms"])
    assert paired["value"] == pytest.approx(focus - dense)
    assert paired["low"] <= paired["value"] <= paired["high"]
    with monkeypatch_of_forward() as calls:
        assert run(*command).stdout == result.stdout
    assert calls == []


@contextmanager
def monkeypatch_of_forward() -> Iterator[list[Any]]:
    """What a judge is given to read, meanwhile."""
    calls: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Judge, "_forward", lambda self, part: calls.append(part) or [])
        yield calls


def test_tasks_that_come_along(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Evaluation] = []
    monkeypatch.setattr(Evaluation, "run", lambda self, tell: seen.append(self))
    monkeypatch.setattr(Evaluation, "check", lambda self: None)
    assert run("eval", folder, "--task", "gsm8k", "--task", "bbh/navigate", "--limit", 3).exit_code == 0
    assert run("eval", "tiny_sdar", "--task", "sort", "--task", "svamp", "--count", 2).exit_code == 0
    assert run("eval", folder, "--task", "svamp", "--count", 2, "--seed", 1).exit_code == 0
    alone, mixed, drawn = seen
    assert alone.tasks == ["gsm8k", "bbh/navigate"]
    assert (len(alone.questions), alone.max_new_tokens) == (6, 256)
    assert mixed.tasks == ["sort", "svamp"]
    assert {q.prompt for q in drawn.questions}.isdisjoint(q.prompt for q in mixed.questions)


def test_a_damaged_line_is_decoded_again(run: Run, folder: Path, data: Path, tmp_path: Path) -> None:
    command = ("eval", folder, "--data", data, *SMALL, "-r", "dense", "--against", "none", "--out", "r.jsonl", "--json")
    whole = run(*command)
    file = tmp_path / "r.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([lines[0], lines[1][:40] + "\n", *lines[2:]]))
    again = run(*command)
    assert again.exit_code == 0
    assert "warning: r.jsonl: 1 damaged line(s) left out (2); results that they held are decoded again." in again.stderr
    figures = [json.loads(result.stdout)["arms"][0]["tasks"]["one"] for result in (whole, again)]
    assert {**figures[0], "seconds": 0} == {**figures[1], "seconds": 0}
    assert len(file.read_text().splitlines()) == len(lines) + 1


def test_recipes_rules_and_their_options(run: Run, folder: Path, data: Path) -> None:
    arms = ("-r", "dense:block_cache=dc", "-r", "focus", "-o", "alpha=1.8", "--against", "none")
    rules = ("--policy", "fixed_steps:steps=4", "--policy", "dream_entropy", "--sweep", "steps=2,4")
    result = run("eval", folder, "--data", data, "--task", "two", "--count", 1, *SMALL, *arms, *rules, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)["arms"]
    assert [arm["label"] for arm in found] == [
        f"{recipe}; {rule}, steps={steps}"
        for recipe in ("dense, block_cache=dc", "focus, alpha=1.8")
        for rule in ("fixed_steps", "dream_entropy")
        for steps in (2, 4)
    ]
    assert {arm["agreement"] for arm in found} == {None}


def test_an_embedded_model_has_prompts_and_a_length(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Evaluation] = []
    monkeypatch.setattr(Evaluation, "run", lambda self, tell: seen.append(self))
    tasks = ("--task", "sort", "--task", "follow")
    assert run("eval", "tiny_sdar", *tasks, "--count", 2).exit_code == 0
    assert run("eval", "tiny_sdar", *tasks, "--seed", 7).exit_code == 0
    stored, fresh = seen
    assert stored.max_new_tokens == 96
    assert [q.task for q in stored.questions] == ["sort", "sort", "follow", "follow"]
    assert [q.task for q in fresh.questions] == ["sort"] * 50 + ["follow"] * 50
    assert not {q.prompt for q in stored.questions if q.task == "sort"} & {q.prompt for q in fresh.questions}
    assert run("eval", "tiny_sdar", "--task", "hard", "--task", "sort", "--count", 2).exit_code == 0
    hard = ("math", "needle", "sort", "trace")
    assert [q.task for q in seen[-1].questions] == ["sort"] * 2 + [f"hard/{name}" for name in hard for _ in range(2)]


def test_weights_of_a_folder_beside_formats_and_the_model_itself(
    run: Run, folder: Path, data: Path, tmp_path: Path
) -> None:
    stored = save_quantised(folder, tmp_path / "stored", "int4").folder
    command = ("eval", folder, "--data", data, "-r", "dense", "--count", 3, *SMALL, "--out", "r.jsonl", "--json")
    result = run(*command, "--weights", "int4", "--weights", stored)
    assert result.exit_code == 0, result.stderr
    arms = json.loads(result.stdout)["arms"]
    assert [arm.get("weights") for arm in arms] == [None, "int4", str(stored)]
    assert [arm["against"] for arm in arms] == [None, *2 * [arms[0]["label"]]]
    responses = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    by_arm = {arm["label"]: [r["token_ids"] for r in responses if r.get("arm") == arm["label"]] for arm in arms}
    assert by_arm[arms[1]["label"]] == by_arm[arms[2]["label"]] != []


def test_a_folder_of_weights_must_hold_the_same_model(run: Run, folder: Path, data: Path) -> None:
    other = embedded()["tiny_llada"].folder
    result = run("eval", folder, "--data", data, "-r", "dense", "--count", 1, *SMALL, "--weights", other)
    refused(result, "tiny_llada holds another model, 12 layers of 256, 2048 ids, blocks of", "(llada); --weights takes")


def test_a_folder_may_come_with_prompts(run: Run, data: Path, tmp_path: Path) -> None:
    own = write_checkpoint(tmp_path / "own")
    (own / "held_out.jsonl").write_text(data.read_text())
    result = run("eval", own, "-r", "dense", "--against", "none", "--count", 1, *SMALL, "--json")
    assert result.exit_code == 0, result.stderr
    assert set(json.loads(result.stdout)["arms"][0]["tasks"]) == {"one", "two"}


def test_what_was_decoded_before_ctrl_c_is_printed_and_kept(
    run: Run, folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, calls = Evaluation._decode, []

    def interrupted(self: Evaluation, *args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return decode(self, *args)

    monkeypatch.setattr(Evaluation, "_decode", interrupted)
    result = run("eval", folder, "--data", data, "--max-batch", 3, *SMALL, "--out", "r.jsonl")
    assert result.exit_code == 130
    assert "\ndense; threshold=0.9  " in result.stdout
    assert "focus" not in result.stdout
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 3


def test_arms_that_cannot_be_run_are_told(run: Run, folder: Path, data: Path) -> None:
    arms = ("-r", "dense", "-r", "focus", "--policy", "joint_threshold", "--against", "none")
    result = run("eval", folder, "--data", data, "--count", 1, *SMALL, *arms)
    assert result.exit_code == 0, result.stderr
    assert "focus; joint_threshold could not be run: JointThreshold replaces decoded tokens" in result.stderr
    refused(run("eval", folder, "--data", data, "--count", 1, *SMALL, *arms[2:]), "no arm could be run")


BAD: list[tuple[tuple[Any, ...], tuple[str, ...]]] = [
    (("-r", "focsu"), ("unknown recipe 'focsu'. Did you mean 'focus'",)),
    (("-r", "focus:alhpa=2"), ("unknown option of recipe 'focus' 'alhpa'. Did you mean 'alpha'",)),
    (("-o", "alpha=x"), ("option alpha is a number (inf allowed), got 'x'",)),
    (("-o", "alpha=0.5"), ("alpha must be at least 1",)),
    (("-o", "cache=dual"), ("unknown option of 'focus' 'cache'",)),
    (("--against", "dens"), ("unknown recipe 'dens'. Did you mean 'dense'",)),
    (("--policy", "dinfr"), ("unknown decode policy 'dinfr'. Did you mean 'dinfer'",)),
    (("--policy", "factor:factr=2"), ("unknown option of decode policy 'factor' 'factr'",)),
    (("--policy", "factor:factor=x"), ("option factor is a number",)),
    (("--policy", "dream:steps=x"), ("option steps is a whole number",)),
    (("--policy", "factor", "--threshold", 0.9), ("unknown option of decode policy 'factor' 'threshold'",)),
    (("--threshold", 2), ("threshold is a probability in (0, 1], got 2",)),
    (("--threshold", 0.5, "--steps", 3), ("give either threshold (0.5) or steps (3), not both",)),
    (("--sweep", "alpha"), ("--sweep takes KEY=V1,V2,..., got 'alpha'",)),
    (("--sweep", "alpha=1,,2"), ("--sweep takes KEY=V1,V2,...",)),
    (("--sweep", "tua=1,2"), ("unknown option to sweep 'tua'",)),
    (("--sweep", "steps=2,x"), ("option steps is a whole number, got 'x'",)),
    (("--data", "missing.jsonl"), ("--data missing.jsonl cannot be read",)),
    (("--seed", 3), ("--seed draws prompts of the model's tasks; leave it out beside --data",)),
    (("--task", "three"), ("unknown task 'three'. Known: one, two",)),
    (("--count", 0), ("--count must be at least 1, got 0",)),
    (("--max-batch", 0), ("--max-batch must be at least 1, got 0",)),
    (("--max-new-tokens", 5000), ("more than the 256 of sdar",)),
    (("--out", "no/such/r.jsonl"), ("--out no/such/r.jsonl cannot be written",)),
    (("--plot", "no/such/p.png"), ("--plot no/such/p.png cannot be written",)),
    (("--plot", "p.pnq"), ("--plot p.pnq cannot be written: 'pnq' is not one of the formats", "png")),
    (("--judge", "bsae"), ("bsae is no autoregressive model", "pip install 'dgraph[smol]'")),
    (("--buckets", "some"), ("buckets must be 'exact'",)),
    (("--backend", "indcutor"), ("backend must be one of",)),
    (("--dtype", "int8"), ("unknown dtype 'int8'",)),
    (("--device", "cuda:99"), ("device 'cuda:99' cannot be used",)),
]


@pytest.mark.parametrize(("args", "parts"), BAD, ids=[" ".join(map(str, a)) for a, _ in BAD])
def test_eval_refuses(run: Run, folder: Path, data: Path, args: tuple[Any, ...], parts: tuple[str, ...]) -> None:
    given = () if "--data" in args else ("--data", data)
    refused(run("eval", folder, *given, *args), *parts)


def test_eval_refuses_to_write_results_into_another_file(run: Run, folder: Path, data: Path) -> None:
    before = data.read_text()
    refused(run("eval", folder, "--data", data, "--out", data), "holds no results of an evaluation; name another file")
    assert data.read_text() == before


def test_eval_refuses_models_without_prompts(run: Run, folder: Path) -> None:
    refused(run("eval", folder), "comes with no held-out prompts; give --data FILE.jsonl")
    refused(run("eval", folder, "--seed", 1), "comes with no held-out prompts")
    refused(run("eval", "tiny_sdar", "--task", "gsm8"), "unknown task 'gsm8'. Did you mean 'gsm8k'")
    refused(run("eval", "tiny_sdra"), "unknown model 'tiny_sdra'. Did you mean 'tiny_sdar'")


def test_a_plot_needs_answers_and_matplotlib(
    run: Run, folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    refused(run("eval", "tiny_sdar", "--task", "text", "--plot", "p.png"), "none of these prompts has an answer")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(run("eval", folder, "--data", data, "--plot", "p.png"), "pip install 'dgraph[bench]'")


def test_help_has_an_example(run: Run) -> None:
    result = run("eval", "--help")
    assert result.exit_code == 0
    said = " ".join(result.stdout.replace("│", " ").split())
    assert "dgraph eval tiny_sdar" in said
    assert "pip install 'dgraph[smol]'" in said, "brackets of an extra are no markup"

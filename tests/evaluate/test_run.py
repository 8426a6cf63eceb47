"""An evaluation: what it counts is what decoding counts, and it goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dgraph.compiler.compiled_model import CompiledModel
from dgraph.evaluate import run as runs
from dgraph.evaluate.arms import Choice, expand
from dgraph.evaluate.questions import Question
from dgraph.evaluate.report import arms_table, lines, percent, plot, tables, tasks_table
from dgraph.evaluate.results import Keys, Store
from dgraph.evaluate.run import Evaluation, State
from dgraph.families import Model
from tests.evaluate.programs import load, optimize

QUESTIONS = [
    Question(task, f"{first} w{i}", "w9") for task, first in (("one", "w3"), ("two", "w5 w6")) for i in range(4)
]
Make = Callable[..., Evaluation]


@pytest.fixture(scope="session")
def model(folder: Path) -> Model:
    return load(folder)


@pytest.fixture
def make(model: Model, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr(runs, "optimize", optimize)

    def build(path: Path | None = None, recipes: tuple[str, ...] = ("focus",), **sweeps: Any) -> Evaluation:
        sweeps = sweeps or {"threshold": [0.05, 0.9]}
        arms, references = expand(model.spec, [Choice(r) for r in recipes], [Choice("")], sweeps, Choice("dense"))
        keys = Keys("weights", {"max_new_tokens": 12})
        return Evaluation(model, arms, references, QUESTIONS, Store(path), keys, 12, max_batch=3, backend="eager")

    return build


def test_scores_are_those_of_the_decode_loop(make: Make, model: Model) -> None:
    evaluation = make()
    evaluation.check()
    evaluation.run()
    assert [arm.label for arm in evaluation.arms] == [
        f"{recipe}; threshold={threshold}" for threshold in (0.05, 0.9) for recipe in ("dense", "focus")
    ]
    for arm in evaluation.arms:
        program = optimize(model, arm.built, backend="eager")
        result = program.generate([q.prompt for q in QUESTIONS], max_new_tokens=12, policy=arm.policy)
        score = evaluation.score(arm)
        assert [found.token_ids for _, found in evaluation.found(arm)] == result.token_ids
        assert score.steps_per_prompt == sum(result.stats.sequence_steps) / len(QUESTIONS)
        assert score.tokens_per_step == result.stats.tokens_per_step
        assert score.rows_per_token == result.stats.rows_per_token
    dense, focus = evaluation.arms[2:]
    assert evaluation.score(dense).agreement is None
    agreement = evaluation.score(focus).agreement
    assert agreement is not None
    ids = [[found.token_ids for _, found in evaluation.found(arm)] for arm in (dense, focus)]
    assert agreement.identical == sum(a == b for a, b in zip(*ids, strict=True))
    assert evaluation.score(dense, "two").prompts == 4


def test_a_run_goes_on_where_it_stopped(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make()
    whole.run()
    path = tmp_path / "results.jsonl"
    stopped = make(path)
    decode, calls = Evaluation._decode, []

    def until(self: Evaluation, *args: Any) -> Any:
        calls.append(args)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return decode(self, *args)

    monkeypatch.setattr(Evaluation, "_decode", until)
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    assert len(Store(path)) == 8 + 3, "three batches of the first arm, one of the second"
    resumed = make(path)
    seen: list[State] = []
    resumed.run(seen.append)
    assert len(calls) == 5 + 12 - 4
    assert (seen[0].total, seen[-1].done) == (32, 32)
    assert min(state.done for state in seen) >= 11
    for arm in whole.arms:
        mine, others = resumed.score(arm).to_json(), whole.score(arm).to_json()
        assert {**mine, "seconds": 0} == {**others, "seconds": 0}
    calls.clear()
    again = make(path)
    again.run()
    assert calls == []
    assert again.to_json() == resumed.to_json()


def test_results_serve_another_selection_of_arms(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "r.jsonl").run()
    other = make(tmp_path / "r.jsonl", threshold=[0.9])
    monkeypatch.setattr(Evaluation, "_decode", lambda *_: pytest.fail("decoded again"))
    other.run()
    assert other.score(other.arms[0]).prompts == len(QUESTIONS)


def test_equal_recipes_are_compiled_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def count(model: Model, recipe: Any, **settings: Any) -> CompiledModel:
        compiled.append(recipe.name)
        return optimize(model, recipe, **settings)

    monkeypatch.setattr(runs, "optimize", count)
    make().run()
    assert compiled == ["dense", "focus"]


def test_an_arm_that_fails_leaves_the_others(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Evaluation._decode

    def small(self: Evaluation, program: CompiledModel, *args: Any) -> Any:
        if program.recipe.name == "dense":
            raise RuntimeError("CUDA out of memory. Tried to allocate 20 GiB.\nmore")
        return decode(self, program, *args)

    monkeypatch.setattr(Evaluation, "_decode", small)
    evaluation = make(threshold=[0.9])
    evaluation.run()
    assert evaluation.failed == {"dense; threshold=0.9": "CUDA out of memory. Tried to allocate 20 GiB."}
    assert [row[0] for row in arms_table(evaluation)[1]] == ["focus; threshold=0.9"]
    assert evaluation.score(evaluation.arms[1]).agreement is None
    monkeypatch.setattr(Evaluation, "_decode", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make().run()


def test_tables_and_lines(make: Make, tmp_path: Path) -> None:
    evaluation = make(alpha=[1.2, 1.8], threshold=[0.05, 0.9])
    assert tables(evaluation) == []
    evaluation.run()
    titles, rows = tables(evaluation)[1]
    assert titles == ("EM % (95 %)", "one", "two")
    assert rows[0][1:] == ("0 (0 to 49)", "0 (0 to 49)")
    found = lines(evaluation)
    assert {label: [value for value, _ in points] for label, points in found.items()} == {
        "dense; over threshold": ["0.05", "0.9"],
        "focus; threshold=0.05; over alpha": ["1.2", "1.8"],
        "focus; threshold=0.9; over alpha": ["1.2", "1.8"],
    }
    evaluation.questions = [q for q in QUESTIONS if q.task == "one"]
    assert tasks_table(evaluation)[1] == [], "one task is the first table's"
    pytest.importorskip("matplotlib")
    plot(evaluation, tmp_path / "plot.png", "title")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_prompts_without_answers_have_no_exact_match(make: Make, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    evaluation = make(threshold=[0.9])
    evaluation.questions = [Question("text", "w3 w4", None)]
    evaluation.run()
    assert arms_table(evaluation)[1][0][1:3] == ("1", "n/a")
    with pytest.raises(runs.InputError, match="none of these prompts has an answer"):
        plot(evaluation, tmp_path / "plot.png", "title")


def test_shares_print_short() -> None:
    assert [percent(share) for share in (None, 0.0, 1.0, 0.985, 2 / 3)] == ["n/a", "0", "100", "98.5", "66.7"]

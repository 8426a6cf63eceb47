"""A conversion by a plan: what each stage leaves, goes on from and refuses; and all of them in miniature."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import dgraph
from dgraph import parallel
from dgraph.errors import InputError
from dgraph.evaluate.tasks import TASKS, questions_of
from dgraph.families import DIFFERENCE
from tests.models.test_convert import _counted, causal_folder
from training import convert, dialogues, stages
from training.pairs import Pair, read_pairs
from training.rename import SHE
from training.stages import Plan, Work

TINY = {"rank": 2, "steps": 3, "rows": 2, "length": 128, "learnt": 64, "held_out": 4, "rate": 1e-2}
MODELS = {"causal": {**TINY, "shift": 1, "complementary": True}, "both_ways": {**TINY, "form": "bidirectional"}}
SOLD = {"question": "Of 98 pens 33 are sold.", "answer": "98 - 33 = <<98-33=65>>65 are left.\n#### 65"}
PROBLEM = {"question": "2 and 2?", "answer": "They are 2 + 2 = <<2+2=4>>4.\n#### 4"}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan over a tiny base, with ten problems."""
    folder = tmp_path_factory.mktemp("plan")
    base = causal_folder(folder / "base", tie_word_embeddings=True)
    (folder / "problems.jsonl").write_text(f"{json.dumps(PROBLEM)}\n\n" * 10 + json.dumps(SOLD))
    described = {
        "base": str(base),
        "judge": str(base),
        "dialogues": 14,
        "dialogue_rows": 4,
        "asked": 2,
        "problems": {"gsm8k": str(folder / "problems.jsonl")},
        "variants": {"gsm8k": 3},
        "calculations": {"gsm8k": 5},
        "times": {"gsm8k": 0.5, "gsm8k_renumbered": 2},
        "tasks": {"gsm8k": 2},
        "new_tokens": 32,
        "backend": "eager",
        "megabytes": 0.03,
        "models": MODELS,
    }
    (folder / "plan.json").write_text(json.dumps(described))
    return folder / "plan.json"


def run(plan: Path, stage: str, out: Path, *more: str) -> None:
    stages.main([str(plan), stage, "--out", str(out), "--device", "cpu", *more])


def test_dialogues_that_are_asked_are_not_trained_on(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dialogues, "_turns", _counted)
    run(plan, "dialogues", tmp_path, "--minutes", "0")
    assert "0 of 14 dialogues; the same command goes on" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"training\.jsonl is not there yet; run the stage dialogues to its end"):
        run(plan, "train", tmp_path)
    run(plan, "dialogues", tmp_path)
    training = read_pairs(tmp_path / "training.jsonl")
    asked = [json.loads(line)["prompt"] for line in (tmp_path / "questions.jsonl").read_text().splitlines()]
    assert (len(training), len(asked)) == (12, 2)
    assert not {pair.prompt for pair in training} & set(asked)
    assert {pair.ended for pair in training} == {True, False}
    problem = Pair(f"2 and 2?\n{TASKS['gsm8k'].ask}", "They are 2 + 2 = 4.\n#### 4")
    assert read_pairs(tmp_path / "gsm8k.jsonl")[:-1] == [problem] * 10
    varied = read_pairs(tmp_path / "gsm8k_renumbered.jsonl")
    assert 1 < len(varied) == len(set(varied)) <= 3
    for pair in varied:
        pens, sold = map(int, re.findall(r"\d+", pair.prompt.partition("\n")[0]))
        assert pair.response == f"{pens} - {sold} = {pens - sold} are left.\n#### {pens - sold}"
    assert len(read_pairs(tmp_path / "gsm8k_calculations.jsonl")) == 5
    before = (tmp_path / "training.jsonl").read_bytes()
    run(plan, "dialogues", tmp_path)
    assert (tmp_path / "training.jsonl").read_bytes() == before
    (tmp_path / "apart.jsonl").write_text(json.dumps({"task": "dialogue", "prompt": training[3].prompt}) + "\n")
    apart = {**json.loads(plan.read_text()), "without": str(tmp_path / "apart.jsonl")}
    (tmp_path / "apart.json").write_text(json.dumps(apart))
    run(tmp_path / "apart.json", "dialogues", tmp_path)
    assert read_pairs(tmp_path / "training.jsonl") == [*training[:3], *training[4:]]
    written = (tmp_path / "dialogues.jsonl").read_text()
    fact = json.dumps(questions_of("facts", 1)[0].prompt)
    (tmp_path / "dialogues.jsonl").write_text(written.replace(json.dumps(training[4].prompt), fact))
    run(plan, "dialogues", tmp_path)
    assert read_pairs(tmp_path / "training.jsonl") == [*training[:4], *training[5:]], "what a task asks is not learnt"


def test_solutions_keep_their_notes_and_people_get_other_names_where_the_plan_says_so(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialogues, "_turns", _counted)
    asked = "Kim has 90 pens and sells 40. How many does Kim have left?"
    solved = "Kim has 90 - 40 = <<90-40=50>>50 left.\n#### 50"
    (tmp_path / "kim.jsonl").write_text(json.dumps({"question": asked, "answer": solved}))
    described = json.loads(plan.read_text()) | {"problems": {"gsm8k": str(tmp_path / "kim.jsonl")}}
    described |= {"notes": True, "names": True, "variants": {"gsm8k": 20}, "calculations": {"gsm8k": 40}}
    (tmp_path / "plan.json").write_text(json.dumps(described))
    run(tmp_path / "plan.json", "dialogues", tmp_path)
    assert read_pairs(tmp_path / "gsm8k.jsonl") == [Pair(f"{asked}\n{TASKS['gsm8k'].ask}", solved)]
    names = set()
    for pair in read_pairs(tmp_path / "gsm8k_renumbered.jsonl"):
        found = re.fullmatch(r"(\w+) has (\d+) - (\d+) = <<(\d+-\d+)=(\d+)>>(\d+) left\.\n#### (\d+)", pair.response)
        assert found is not None, pair.response
        name, pens, sold, noted, *results = found.groups()
        assert noted == f"{pens}-{sold}"
        assert set(results) == {str(int(pens) - int(sold))}
        assert pair.prompt.startswith(f"{name} has {pens} pens and sells {sold}. How many does {name} have")
        names.add(name)
    assert len(names) > 3
    assert names <= {*SHE}
    said = [pair.response for pair in read_pairs(tmp_path / "gsm8k_calculations.jsonl")]
    assert 10 < sum("<<" in each for each in said) < 40


def test_a_run_gets_the_settings_and_the_mixture_of_the_plan(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "training.jsonl").touch()
    for name in ("gsm8k", "gsm8k_renumbered", "gsm8k_calculations"):
        (tmp_path / f"{name}.jsonl").touch()
    seen: list[Any] = []
    monkeypatch.setattr(convert, "main", lambda argv: seen.append(convert._arguments(argv)))
    run(plan, "train", tmp_path, "--minutes", "2")
    assert [args.out for args in seen] == [tmp_path / name for name in MODELS]
    for args, settings in zip(seen, MODELS.values(), strict=True):
        assert {key: getattr(args, key) for key in settings} == settings
        assert [convert.data_of(text) for text in args.data] == [
            (tmp_path / "training.jsonl", 1.0),
            (tmp_path / "gsm8k.jsonl", 0.5),
            (tmp_path / "gsm8k_renumbered.jsonl", 2.0),
            (tmp_path / "gsm8k_calculations.jsonl", 1.0),
        ]
        assert (args.minutes, args.mask_token, args.dialogues) == (2.0, None, 0)
    assert (seen[0].complementary, seen[1].complementary) == (True, False)
    assert (seen[0].begin, seen[1].begin) == (None, None)
    begun = {**json.loads(plan.read_text()), "begin": {"both_ways": "small"}}
    (tmp_path / "begun.json").write_text(json.dumps(begun))
    run(tmp_path / "begun.json", "train", tmp_path)
    assert [args.begin for args in seen[2:]] == [None, Path("small")]


def test_stages_in_another_order_are_refused(plan: Path, tmp_path: Path) -> None:
    for stage, said in (("compress", "causal/model is not there yet; run the stage train"), ("evaluate", "compress")):
        with pytest.raises(SystemExit, match=said):
            run(plan, stage, tmp_path)
    with pytest.raises(SystemExit, match=r"plan\.json has no model 'smol'; it has causal, both_ways"):
        run(plan, "train", tmp_path, "--model", "smol")


def test_stages_of_one_process_are_refused_on_ranks(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in parallel.VARIABLES:
        monkeypatch.setenv(name, "2")
    with pytest.raises(SystemExit, match="error: the stage compress runs in one process; start it without torchrun"):
        run(plan, "compress", tmp_path)


def test_a_mean_is_made_of_what_is_compressed(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    described = json.loads(plan.read_text()) | {"means": {"both": ["causal", "causal"]}}
    (tmp_path / "plan.json").write_text(json.dumps(described))
    seen: list[Any] = []

    def made(*args: Any, **options: Any) -> dict[str, int]:
        seen.append((*args, options))
        return {"bytes": 1}

    monkeypatch.setattr(stages, "compress", made)
    with pytest.raises(SystemExit, match=r"causal.small is not there yet; run the stage compress --model causal first"):
        run(tmp_path / "plan.json", "compress", tmp_path, "--model", "both")
    with pytest.raises(SystemExit, match=r"has no model 'both'; it has causal, both_ways\."):
        run(tmp_path / "plan.json", "train", tmp_path, "--model", "both")
    small = tmp_path / "causal" / stages.SMALL
    small.mkdir(parents=True)
    (small / DIFFERENCE).touch()
    run(tmp_path / "plan.json", "compress", tmp_path, "--model", "both")
    out = tmp_path / "both" / stages.SMALL
    assert seen == [(tmp_path / "causal", out, 0.03, {"device": "cpu", "mean": [small, small]})]
    out.mkdir(parents=True)
    (out / "compression.json").touch()
    os.utime(small / DIFFERENCE, (0, 0))
    os.utime(small, (0, 0))
    run(tmp_path / "plan.json", "compress", tmp_path, "--model", "both")
    assert "is there already" in capsys.readouterr().out
    assert len(seen) == 1


def test_an_evaluation_that_fails_is_told(plan: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small = tmp_path / "causal" / stages.SMALL
    small.mkdir(parents=True)
    (small / DIFFERENCE).touch()
    with pytest.raises(InputError, match="the evaluation of causal ended with 2; the same command goes on"):
        Work(Plan.read(plan), tmp_path, "cpu").evaluate("causal")
    assert "has no config.json" in capfd.readouterr().err


WRONG = [
    ("[]", r"expected an object of base, models, .*, got a list"),
    ('{"base": "b", "model": {}}', r"got 'model'"),
    ('{"base": "b"}', r"base and models are needed"),
    ('{"base": "b", "models": {}}', r"models must name at least one"),
    ('{"base": "b", "models": {"m": {"ranks": 1}}}', r"ranks of m is no setting; known: form, steps"),
    ('{"base": "b", "models": {"m": {"shift": 2}}}', r"shift must be 0 or 1, got 2"),
    ('{"base": "b", "models": {"m": {}}, "problems": {"gsm": "x"}}', r"problems names 'gsm', expected one of gsm8k"),
    ('{"base": "b", "models": {"m": {}}, "times": {"gsm8k": 1}}', r"times names 'gsm8k', expected one of dialogues\."),
    ('{"base": "b", "models": {"m": {}}, "variants": {"gsm8k": 1}}', r"variants names 'gsm8k', expected one of "),
    ('{"base": "b", "models": {"m": {}}, "dialogues": 5, "asked": 5}', r"asked must be fewer than the 5 dialogues"),
    ('{"base": "b", "models": {"m": {}}, "means": {"n": ["o"]}}', r"the mean n names 'o', expected one of m\."),
    ('{"base": "b", "models": {"m": {}}, "means": {"m": ["m"]}}', r"a mean has a name of its own .*got 'm' of"),
    ('{"base": "b", "models": {"m": {}}, "means": {"n": []}}', r"and one model at least, got 'n' of \[\]"),
    ("{", r"cannot be read"),
]


@pytest.mark.parametrize(("text", "said"), WRONG)
def test_a_plan_that_says_nothing_sensible_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(InputError, match=rf"plan\.json.*{said}"):
        Plan.read(tmp_path / "plan.json")


def test_problems_of_another_form_are_refused(tmp_path: Path) -> None:
    for line in ("{", '["a"]', '{"question": "a"}', '{"question": "a", "answer": 1}'):
        (tmp_path / "x.jsonl").write_text(f"{json.dumps(PROBLEM)}\n{line}\n")
        with pytest.raises(InputError, match="line 2: expected"):
            stages.problems(tmp_path / "x.jsonl")


def test_the_plan_of_the_converted_models_can_be_read() -> None:
    plan = Plan.read(Path(stages.__file__).with_name("smol.json"))
    assert list(plan.models) == ["smol_sdar", "smol_llada"]
    assert plan.megabytes * len(plan.models) <= 20
    more = Plan.read(Path(stages.__file__).with_name("smol_more.json"))
    assert set(more.begin) == set(more.models) == {"smol_sdar"}
    later = {"smol_sums.json": "smol_sdar", "smol_llada_sums.json": "smol_llada"}
    later |= {"smol_notes.json": "smol_sdar", "smol_llada_likely.json": "smol_llada"}
    for name, model in later.items():
        sums = Plan.read(Path(stages.__file__).with_name(name))
        assert set(sums.begin) == set(sums.models) == {model}
        assert sums.without == f"models/{model}/held_out.jsonl"
    assert more.models["smol_sdar"]["rank"] == plan.models["smol_sdar"]["rank"]


def test_processes_draw_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [("Ann has 48 pens and buys 26 more. How many?", "She has 48 + 26 = <<48+26=74>>74 pens.\n#### 74")] * 3
    monkeypatch.setattr(stages, "CHUNK", 2)
    alone = list(stages.variants(found, 2)), list(stages.calculations_of(found, "gsm8k", 5))
    monkeypatch.setattr(stages, "MANY", 0)
    assert (list(stages.variants(found, 2)), list(stages.calculations_of(found, "gsm8k", 5))) == alone
    assert [len(each) > 4 for each in alone] == [True, True]
    with pytest.raises(InputError, match="the 1 solutions of gsm8k note no calculation as <<48/2=24>>"):
        list(stages.calculations_of([("2 and 2?", "#### 4")], "gsm8k", 1))


@pytest.mark.release
def test_all_stages_in_miniature(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each stopped once where it can be, and what comes out is loaded and was measured."""
    monkeypatch.setattr(dialogues, "_turns", _counted)
    for stage in stages.STAGES[:2]:
        run(plan, stage, tmp_path, "--minutes", "0")
        run(plan, stage, tmp_path)
    said = capsys.readouterr().out
    assert said.count("1 of 3 steps") == said.count("3 of 3 steps") == len(MODELS)
    run(plan, "compress", tmp_path)
    run(plan, "evaluate", tmp_path)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    reports, measured = lines[: len(MODELS)], lines[len(MODELS) :]
    assert all(report["bytes"] <= 30_000 and report["squared_difference_kept"] > 0.9 for report in reports)
    assert [line["model"] for line in measured] == [name for name in MODELS for _ in "ab"]
    assert [line["prompts"] for line in measured] == [2] * 4
    assert all(line["judged"] is not None for line in measured)
    assert [line["exact_match"] is None for line in measured] == [False, True] * 2
    run(plan, "compress", tmp_path)
    assert capsys.readouterr().out.count("is there already") == len(MODELS)
    for name, attention in (("causal", "block_causal"), ("both_ways", "bidirectional")):
        assert dgraph.load(tmp_path / name / stages.SMALL).spec.attention == attention

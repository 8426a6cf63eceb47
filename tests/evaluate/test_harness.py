"""The adapter for lm-evaluation-harness; against the harness itself where it is installed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dgraph
from dgraph.errors import InputError, UnknownName
from dgraph.evaluate import harness
from dgraph.evaluate.harness import NO_LIKELIHOOD, Adapter, Request, adapter_of, register, single_turn
from dgraph.evaluate.questions import stored
from tests.evaluate import programs

REQUESTS: list[tuple[dict[str, Any], Request]] = [
    ({}, Request(256, (), None)),
    ({"until": ["\n\n", ""], "max_gen_toks": 32}, Request(32, ("\n\n",), None)),
    ({"until": "Q:", "max_new_tokens": 7, "max_tokens": 9}, Request(7, ("Q:",), None)),
    ({"until": None, "max_gen_toks": None, "max_completion_tokens": "12"}, Request(12, (), None)),
    ({"temperature": 0.5}, Request(256, (), 0.5)),
    ({"temperature": 0}, Request(256, (), 0.0)),
    ({"do_sample": False}, Request(256, (), 0.0)),
    ({"temperature": 0.5, "do_sample": False}, Request(256, (), 0.0)),
    ({"temperature": 0.5, "do_sample": True}, Request(256, (), 0.5)),
]


@pytest.mark.parametrize(("settings", "request_"), REQUESTS)
def test_a_request_is_what_the_task_says(settings: dict[str, Any], request_: Request) -> None:
    assert Request.of(settings) == request_


def test_a_request_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="max_gen_toks must be at least 1, got 0"):
        Request.of({"max_gen_toks": 0})
    with pytest.raises(InputError, match="until must be a list of texts"):
        Request.of({"until": [3]})


class Program:
    """Stands in for a compiled program: says which call answered which prompt."""

    def __init__(self, attention: str = "block_causal") -> None:
        tokenizer = SimpleNamespace(encode=lambda text: [1] * len(text))
        self.model = SimpleNamespace(name="fake", tokenizer=tokenizer)
        aligned = attention == "block_causal"
        self.spec = SimpleNamespace(block_length=8, attention=attention, aligned=aligned, max_positions=45)
        self.calls: list[tuple[list[str], dict[str, Any]]] = []

    def generate(self, prompts: Sequence[str], **settings: Any) -> Any:
        self.calls.append((list(prompts), settings))
        return SimpleNamespace(texts=[f"{len(self.calls)} {prompt}" for prompt in prompts])


def test_equal_requests_share_batches_and_answers_keep_their_order() -> None:
    program = Program()
    adapter = Adapter(program, 2, {"seed": 3})  # type: ignore[arg-type]
    short, long = {"max_gen_toks": 4, "until": ["."]}, {"max_gen_toks": 9, "temperature": 1.0}
    told: list[tuple[int, str]] = []
    asked = [("a", short), ("b", long), ("c", short), ("d", short)]
    assert adapter.answer(asked, lambda *what: told.append(what)) == ["1 a", "3 b", "1 c", "2 d"]
    assert told == [(0, "1 a"), (2, "1 c"), (3, "2 d"), (1, "3 b")]
    settings = {"max_new_tokens": 4, "stop": (".",), "temperature": None, "seed": 3}
    assert program.calls[0] == (["a", "c"], settings)
    assert program.calls[2] == (["b"], {"max_new_tokens": 9, "stop": (), "temperature": 1.0, "seed": 3})


@pytest.mark.parametrize(("attention", "room"), [("block_causal", 40), ("bidirectional", 45)])
def test_a_limit_is_cut_to_the_window(attention: str, room: int) -> None:
    program = Program(attention)
    Adapter(program).answer([("a" * 30, {}), ("b" * 30, {"max_gen_toks": 5})])  # type: ignore[arg-type]
    assert [settings["max_new_tokens"] for _, settings in program.calls] == [room - 30, 5]
    with pytest.raises(InputError, match=r"a context of 45 tokens leaves no room in the 45 positions of fake"):
        Adapter(program).answer([("a" * 45, {})])  # type: ignore[arg-type]


def test_stop_strings_end_a_response(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "load", programs.load)
    monkeypatch.setattr(harness, "optimize", programs.optimize)
    adapter = adapter_of(str(folder), "dense", backend="eager", threshold=1.0, batch_size="auto")
    assert adapter.batch == 16
    (whole,) = adapter.answer([("w3 w4", {"max_gen_toks": 12})])
    words = whole.split()
    assert len(words) > 3
    (cut,) = adapter.answer([("w3 w4", {"max_gen_toks": 12, "until": [words[2]]})])
    assert cut == whole[: whole.index(words[2])]


def test_model_arguments_that_cannot_be_used_are_refused(folder: Path) -> None:
    for settings, kind, message in [
        ({"recipe": "focsu"}, UnknownName, "unknown recipe 'focsu'"),
        ({"alhpa": 2}, UnknownName, "unknown option of recipe 'dense' 'alhpa'"),
        ({"policy": "dinfr"}, UnknownName, "unknown decode policy 'dinfr'"),
        ({"threshold": 2}, InputError, "threshold is a probability"),
        ({"dtype": "int9"}, UnknownName, "unknown dtype 'int9'"),
    ]:
        with pytest.raises(kind, match=message):
            adapter_of(str(folder), backend="eager", **settings)  # type: ignore[arg-type]


def test_a_chat_is_one_turn_of_a_user() -> None:
    assert single_turn([{"role": "user", "content": "hello"}]) == "hello"
    with pytest.raises(InputError, match="got system, user; leave out --system_instruction"):
        single_turn([{"role": "system", "content": "x"}, {"role": "user", "content": "hello"}])


def test_without_the_harness_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(InputError, match=r"install it with: pip install 'dgraph\[eval\]'"):
        register()


def test_the_harness_runs_a_local_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm_eval, tasks = pytest.importorskip("lm_eval"), pytest.importorskip("lm_eval.tasks")
    for name, value in (("HF_HOME", str(tmp_path / "hf")), ("HF_DATASETS_OFFLINE", "1"), ("HF_HUB_OFFLINE", "1")):
        monkeypatch.setenv(name, value)
    questions = [q for q in stored("tiny_sdar") if q.task == "sort"][:12]
    lines = (json.dumps({"prompt": q.prompt, "answer": q.answer}) + "\n" for q in questions)
    (tmp_path / "sort.jsonl").write_text("".join(lines))
    task = {
        "task": "dgraph_sort",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": str(tmp_path / "sort.jsonl")},
        "test_split": "train",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 64},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "task.yaml").write_text(json.dumps(task))  # JSON is YAML
    cls = register()
    assert register() is cls
    model = cls(pretrained="tiny_sdar", recipe="focus", alpha=1.5, backend="eager")
    manager = tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = lm_eval.simple_evaluate(model=model, tasks=["dgraph_sort"], task_manager=manager, bootstrap_iters=0)
    got = found["results"]["dgraph_sort"]["exact_match,none"]
    program = dgraph.optimize("tiny_sdar", "focus", backend="eager", alpha=1.5)
    texts = program.generate([q.prompt for q in questions], max_new_tokens=64).texts
    assert texts is not None
    same = sum(q.answer == text for q, text in zip(questions, texts, strict=True))
    assert got == same / len(questions), "its exact match is of the whole text"
    with pytest.raises(NotImplementedError) as refused:
        model.loglikelihood([])
    assert str(refused.value) == NO_LIKELIHOOD

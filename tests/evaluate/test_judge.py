"""The judge against the plain loss of transformers; repetition; what is kept in the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dgraph.errors import CheckpointError, InputError
from dgraph.evaluate import judge as judges
from dgraph.evaluate.judge import Judge, Judged, repetition
from dgraph.evaluate.results import Store
from dgraph.families.causal import load_causal
from tests.evaluate.judges import write_judge

RESPONSES = [("w5 w6", "w7 w8 w9"), ("w5", "w9"), ("w3 w4 w5 w6", "w7 " * 40), ("w3", "")]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return Judge(load_causal(str(write_judge(tmp_path_factory.mktemp("judges") / "one"))), "weights")


def plain(judge: Judge, prompt: str, text: str) -> float:
    """Summed loss of the response's tokens, by transformers."""
    before, after = judge.model.tokenizer.encode(prompt), judge.model.tokenizer.encode_text(text)
    if not after:
        return 0.0
    ids, model = torch.tensor([before + after]), judge.model.module.model
    labels = torch.tensor([[-100] * len(before) + after])
    return float(model(input_ids=ids, labels=labels).loss.detach()) * len(after)


@pytest.mark.parametrize("budget", [judges.LOGITS, 1], ids=["one forward", "one forward each"])
def test_the_nll_is_the_loss_of_transformers(judge: Judge, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judges, "LOGITS", budget)
    parts = list(judge.read(RESPONSES))
    assert len(parts) == (1 if budget > 1 else len(RESPONSES))
    found = {one.key: one for part in parts for one in part}
    for prompt, text in RESPONSES:
        one = found[judge.key(prompt, text)]
        assert one.judge_tokens == len(text.split())
        assert one.nll == pytest.approx(plain(judge, prompt, text), rel=1e-5)


def test_what_the_window_has_no_room_for_is_left_out(judge: Judge) -> None:
    keys = {one.key for part in judge.read([("w5 " * 250, "w6 " * 6), ("w5 " * 250, "w6 " * 7)]) for one in part}
    assert keys == {judge.key("w5 " * 250, "w6 " * 6)}


def test_a_key_is_of_judge_prompt_and_text(judge: Judge) -> None:
    other = Judge(judge.model, "others")
    keys = {judge.key("a", "b"), judge.key("a", "c"), judge.key("b", "b"), judge.key("a\nb", ""), other.key("a", "b")}
    assert len(keys) == 5


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([], (0, 0)),
        ([1, 2, 3], (0, 0)),
        ([1, 2, 3, 4], (0, 1)),
        ([1, 2, 3, 4, 1, 2, 3, 4], (1, 5)),
        ([7] * 10, (6, 7)),
    ],
)
def test_repetition_counts_what_stands_there_before(ids: list[int], expected: tuple[int, int]) -> None:
    assert repetition(ids) == expected


def test_judgements_are_kept_beside_results(tmp_path: Path) -> None:
    store = Store(tmp_path / "r.jsonl")
    one = Judged("k", 1.25, 3)
    store.add_judged([one, one])
    assert (tmp_path / "r.jsonl").read_text() == json.dumps({"key": "k", "nll": 1.25, "judge_tokens": 3}) + "\n"
    again = Store(tmp_path / "r.jsonl")
    assert again.judged("k") == one
    again.add_judged([one])
    assert (tmp_path / "r.jsonl").read_text().count("\n") == 1


def test_a_folder_that_is_no_judge_is_refused(tmp_path: Path, judge: Judge) -> None:
    with pytest.raises(InputError, match=r"nothing is no autoregressive model: give .* pip install 'dgraph\[smol\]'"):
        load_causal(str(tmp_path / "nothing"))
    folder = write_judge(tmp_path / "no_tokenizer")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        load_causal(str(folder))
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    folder = write_judge(tmp_path / "more_layers")
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match=r"more_layers lacks 9 tensors, as model\.layers\.2"):
        load_causal(str(folder))
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "sdar"}))
    with pytest.raises(CheckpointError, match="is no autoregressive model that transformers reads"):
        load_causal(str(folder))

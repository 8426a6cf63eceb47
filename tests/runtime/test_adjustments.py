"""Adjustments of logits: their tables against formulas, and within the LM head as from whole logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import dgraph
from dgraph.errors import InputError
from dgraph.ops import OPS
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.loop.variants import ADJUSTED, LOGITS, variant_of
from dgraph.runtime.sampling.adjustments import adjustments, check_adjustments, logit_addend, logit_scale, with_ids
from dgraph.runtime.sampling.sampler import Sampler
from tests.compiled import compiled
from tests.engine.alone import check_as_alone
from tests.serve.asking import WORDS

CPU = torch.device("cpu")
EVERY: list[dict[str, Any]] = [
    {"logit_bias": {964: -100, 30: 3}},
    {"bad_words": [":", 964]},
    {"allowed_token_ids": [414, 30, 964, 761]},
    {"repetition_penalty": 5.0},
    {"presence_penalty": 20.0, "frequency_penalty": 4.0},
    {"min_p": 0.3, "temperature": 1.5, "seed": 4},
]


@pytest.fixture(scope="module")
def sdar() -> dgraph.CompiledModel:
    return compiled("tiny_sdar", "focus", full_steps=0)


def test_tables_are_the_formulas() -> None:
    one = Decoding(logit_bias={1: 2.0}, bad_words=[3], presence_penalty=0.5, frequency_penalty=0.25)
    other = Decoding(allowed_token_ids=[0, 4], logit_bias=[(4, -1)], repetition_penalty=1.5, min_p=0.2)
    adjust = adjustments([one, other], 2, 6, CPU)
    canvas = torch.tensor([[2, 2, 1, 1, 4, 5], [2, 3, 4, 5, 5, 5]])
    addend = logit_addend(adjust, canvas, torch.tensor([2, 2]), True)
    inf = math.inf
    assert addend.tolist() == [[0, 1, 0, -inf, -0.75, -0.75], [0, -inf, -inf, -inf, -1, -inf]]
    assert logit_scale(adjust, canvas, True).tolist() == [[1] * 6, [1, 1, 1.5, 1.5, 1.5, 1.5]]
    assert torch.equal(adjust["min_p"], torch.tensor([0.0, 0.2]))
    assert torch.equal(logit_addend(adjust, canvas, torch.tensor([2, 2]), False), adjust["bias"])


def test_neutral_tables_change_no_bit() -> None:
    g = torch.Generator().manual_seed(0)
    h, weight = torch.randn(9, 8, generator=g), torch.randn(33, 8, generator=g)
    rows = torch.ones(9, dtype=torch.bool), torch.tensor([0.0, 0.7, 1.0] * 3), torch.arange(9)
    neutral = adjustments([], 2, 33, CPU)
    tables = torch.ones(2, 33), neutral["bias"], neutral["min_p"]
    got = torch.ops.dgraph.lm_head_adjusted(h, weight, None, *rows, 4, 7, False, torch.arange(9) % 2, *tables)
    want = torch.ops.dgraph.lm_head(h, weight, None, *rows, 4, 7)
    assert all(map(torch.equal, got, want))
    assert OPS["lm_head_adjusted"].kernel is not None


@pytest.mark.parametrize("asked", EVERY, ids=lambda asked: next(iter(asked)))
def test_the_lm_head_gives_what_whole_logits_give(sdar: dgraph.CompiledModel, asked: dict[str, Any]) -> None:
    ways = Decoding(max_new_tokens=16, **asked), Decoding(max_new_tokens=16, **asked, top_k=2047)
    assert [variant_of([way]) for way in ways] == [ADJUSTED, LOGITS]
    one, other = (sdar.generate(WORDS, way).token_ids for way in ways)
    assert one == other
    if "min_p" not in asked:
        assert one != sdar.generate(WORDS, max_new_tokens=16).token_ids or "presence_penalty" in asked
    banned = {964, 30} if "bad_words" in asked else set()
    assert not banned & set(one[0])
    assert set(one[0]) <= set(asked.get("allowed_token_ids", one[0]))


def test_a_batch_is_what_each_request_is_alone(sdar: dgraph.CompiledModel) -> None:
    settings = [Decoding(max_new_tokens=12), *(Decoding(max_new_tokens=12, **asked) for asked in EVERY)]
    ids = sdar.model.tokenizer.encode_text(WORDS)  # type: ignore[union-attr]
    check_as_alone(sdar, [ids] * len(settings), settings, max_sequences=8, max_tokens=256)


def test_a_batch_in_which_no_request_asks_runs_the_main_programs() -> None:
    assert variant_of([Decoding(stop_token_ids=[5]), Decoding(temperature=1.0)]) == ""
    assert variant_of([Decoding(), Decoding(min_p=0.1)]) == ADJUSTED


def test_stop_tokens(sdar: dgraph.CompiledModel) -> None:
    whole = sdar.generate(WORDS, max_new_tokens=16)
    ids = whole.token_ids[0]
    assert sdar.generate(WORDS, max_new_tokens=16, stop_token_ids=[ids[3]]).token_ids[0] == ids[:3]
    kept: dict[str, Any] = {"max_new_tokens": 16, "include_stop_str_in_output": True}
    assert sdar.generate(WORDS, stop_token_ids=[ids[3]], **kept).token_ids[0] == ids[:4]
    assert sdar.generate(WORDS, stop_token_ids=[ids[3]], min_tokens=5, **kept).token_ids[0] != ids[:4]
    assert sdar.generate(WORDS, stop=["####"], **kept).texts == [whole.texts[0].partition("####")[0] + "####"]  # type: ignore[index]
    with sdar.engine(max_sequences=2, max_tokens=256) as engine:
        (found,) = engine.generate([WORDS], Decoding(stop_token_ids=[ids[3]], **kept))
        assert (list(found.token_ids), found.finish_reason) == (ids[:4], "stop")
        (found,) = engine.generate([WORDS], Decoding(stop=["####"], **kept))
        assert str(found.text).endswith("####")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"logit_bias": {5: math.inf}}, "expected a finite number"),
        ({"logit_bias": {-1: 1.0}}, "expected a token id, at least 0"),
        ({"logit_bias": [(1, 1), (1, 2)]}, "an id twice"),
        ({"allowed_token_ids": []}, "allows no id"),
        ({"bad_words": "word"}, "got the string"),
        ({"repetition_penalty": 0}, "above 0"),
        ({"presence_penalty": math.nan}, "from -100 to 100"),
        ({"min_p": 1.5}, r"a share in \[0, 1\]"),
    ],
)
def test_wrong_values_are_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        Decoding(**given)
    assert caught.value.field == next(iter(given))


def test_what_a_model_cannot_serve_is_refused(sdar: dgraph.CompiledModel) -> None:
    spec = sdar.spec
    with pytest.raises(InputError, match=f"id {spec.vocab}, but"):
        sdar.generate(WORDS, logit_bias={spec.vocab: 1.0})
    with pytest.raises(InputError, match="leaves no id"):
        sdar.generate(WORDS, allowed_token_ids=[7], bad_words=[7])
    with pytest.raises(InputError, match="takes texts of one token each"):
        sdar.generate(WORDS, bad_words=["a longer text"])
    with pytest.raises(InputError, match="does not edit"):
        sdar.generate(WORDS, presence_penalty=1.0, policy="llada2.1")
    with pytest.raises(InputError, match="no tokenizer"):
        check_adjustments(spec, Decoding(bad_words=["x"]), {"logit_addend"})
    with pytest.raises(InputError, match="AdjustLogits"):
        check_adjustments(spec, Decoding(min_p=0.5), {"token"})


def test_json_and_texts() -> None:
    chosen = Decoding(logit_bias={5: 1.5}, allowed_token_ids=[1, 5], stop_token_ids=[2], bad_words=[3], min_p=0.5)
    assert Decoding.from_json(chosen.to_json()) == chosen
    assert Decoding(logit_bias={"5": 1.5}) == Decoding(logit_bias=[(5, 1.5)])  # type: ignore[dict-item]
    assert hash(chosen)

    class Words:
        def encode_part(self, text: str) -> list[int]:
            return {"yes": [7], " yes": [8], "no": [1, 2], " no": [9]}[text]

    assert with_ids(Decoding(bad_words=["yes", "no", 4]), Words()).bad_words == (7, 8, 9, 4)
    assert not Sampler(min_p=0.1).needs_logits

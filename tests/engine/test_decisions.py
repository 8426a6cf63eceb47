"""Decisions: probabilities of labels in a slot, as plain PyTorch gives them, between the steps of whoever runs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

from dgraph.compiler.compiled_model import CompiledModel
from dgraph.engine.engine import EngineClosed
from dgraph.errors import EngineBusy, InputError
from dgraph.runtime.loop.label_scoring import Scorer
from dgraph.testing import TinyModel, models, prompts
from tests.engine.plain import PLAIN, logits

LABELS = [[5], [9], [11, 3], [7, 7, 2], [4, 8]]


def wanted(tiny: TinyModel, prompt: list[int], labels: list[list[int]], before: list[int], after: list[int]) -> Tensor:
    """One canvas for each label, written out."""
    spec, begin, scores = tiny.model.spec, len(prompt) + len(before), []
    for label in labels:
        canvas = [*prompt, *before, *[spec.mask_id] * len(label), *after]
        if spec.attention == "block_causal":
            known = 0 if spec.aligned else begin
            canvas += [spec.mask_id] * (-(len(canvas) - known) % spec.block_length)
        found = logits(tiny, canvas, begin).log_softmax(dim=1)
        places = [begin + place - spec.logit_shift for place in range(len(label))]
        if spec.next_token:
            places[0] = begin - 1
        scores.append(sum(found[place, token] for place, token in zip(places, label, strict=True)))
    return torch.stack(scores).softmax(dim=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("tiny", PLAIN, ids=str)
def test_probabilities_are_those_of_plain_pytorch(tiny: TinyModel) -> None:
    made = tiny.optimized("focus" if str(tiny) in ("sdar", "llada") else "dense")
    first, second, third = prompts(tiny)
    with made.engine(max_sequences=2, max_tokens=64) as engine:
        for prompt, before, after in (
            (first, [], []),
            (second, [1, 2], [6]),
            (third, [], [8, 9, 10, 12, 13, 14, 15, 16]),  # the last ones lie in another block than the slot
            (first, [1], []),  # longer labels reach into the next block
        ):
            found = engine.decide(prompt, LABELS, before=before, after=after).result(30)
            assert sum(found) == pytest.approx(1)
            expected = wanted(tiny, prompt, LABELS, before, after)
            torch.testing.assert_close(torch.tensor(found).double(), expected, atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def made() -> CompiledModel:
    (tiny,) = models(None, "sdar")
    return tiny.optimized("focus")


def test_decisions_between_the_steps_of_requests_disturb_none(made: CompiledModel) -> None:
    (tiny,) = models(None, "sdar")
    several, settings = prompts(tiny), {"max_new_tokens": 20, "threshold": 0.5, "ignore_eos": True}
    plain = made.generate(input_ids=several, **settings).token_ids

    async def both() -> tuple[list[list[int]], list[list[float]]]:
        asked = [engine.decide(prompt, LABELS[:2]) for prompt in several for _ in range(2)]
        responses = asyncio.to_thread(engine.generate, several, **settings)
        found = await asyncio.gather(responses, *asked)
        return [one.token_ids for one in found[0]], list(found[1:])

    with made.engine(max_sequences=2, max_tokens=64) as engine:
        said, decided = asyncio.run(both())
        assert engine.stats.free_pages == engine.stats.pages
        alone = [engine.decide(prompt, LABELS[:2]).result(30) for prompt in several]
    assert said == plain
    assert decided == [each for each in alone for _ in range(2)]


def test_a_decision_fails_alone(made: CompiledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Scorer.__call__

    def fails_on_one(self: Scorer, question: Any) -> list[float]:
        if question.prompt == (1,):
            raise RuntimeError("out of memory")
        return answer(self, question)

    monkeypatch.setattr(Scorer, "__call__", fails_on_one)
    with made.engine(max_sequences=2, max_tokens=64) as engine:
        bad, good = engine.decide([1], LABELS), engine.decide([2], LABELS)
        with pytest.raises(RuntimeError, match="out of memory"):
            bad.result(30)
        assert len(good.result(30)) == len(LABELS)
        assert engine.alive


def test_what_cannot_be_decided_is_refused(made: CompiledModel) -> None:
    mask = made.spec.mask_id
    with made.engine(max_sequences=2, max_tokens=64, queue=2) as engine:
        for prompt, labels, more, message in (
            ([1], [1], {}, r"label 0 is 1, expected a list of ids, as \[1\]"),
            ([1], [[1]], {"after": 2}, r"after is 2, expected a list of ids, as \[2\]"),
            ([], [[1]], {}, "a decision needs a prompt and at least one label, got 0 tokens of prompt and 1 labels"),
            ([1], [], {}, "a decision needs a prompt and at least one label"),
            (None, [[1]], {}, "prompt 0: expected a list, got None"),
            ([1], 5, {}, "labels: expected a list, got 5"),
            ([1], [[2], []], {}, "label 1 is empty; give at least one token"),
            ([1], [[mask]], {}, "label 0: token 0 is the mask token"),
            ([mask], [[1]], {}, "prompt 0: token 0 is the mask token"),
            ([1], [[2]], {"before": [1 << 20]}, "before: token 0 is 1048576, outside the vocabulary"),
            ([1], [[2]], {"after": ["x"]}, "after: token 0 is 'x', expected an integer id"),
            ([1] * 60, [[2, 3, 4]], {"after": [1, 2]}, "this decision takes 65 positions, more than 64"),
        ):
            with pytest.raises(InputError, match=message):
                engine.decide(prompt, labels, **more)
        for pair in ([[1]], ([1], [[2]], 3), 5):
            with pytest.raises(InputError, match=r"question 1 is a prompt and its labels, as .*, got "):
                engine.decide_all([([1], [[2]]), pair])  # type: ignore[list-item]
        with engine._wake:  # the engine waits meanwhile
            asked = [engine.decide([1], [[2], [3]]) for _ in range(2)]
            with pytest.raises(EngineBusy, match="2 requests wait, of 2 that may"):
                engine.decide([1], [[2]])
            assert asked[1].cancel()
        assert len(asked[0].result(30)) == 2
    with pytest.raises(EngineClosed):
        engine.decide([1], [[2]])


def test_an_engine_that_closes_tells_who_waits(made: CompiledModel) -> None:
    engine = made.engine(max_sequences=2, max_tokens=64)
    kept = engine.decide([1], LABELS)
    engine.close(drain=True)
    assert len(kept.result(0)) == len(LABELS)

"""Arithmetic of the scores."""

from __future__ import annotations

import json

import pytest

from dgraph.evaluate.questions import Question
from dgraph.evaluate.results import Result
from dgraph.evaluate.scores import Agreement, Score, equal_tokens, wilson


def result(prompt: str, text: str, ids: list[int], steps: int = 2, decoded: int = 8, rows: int = 24) -> Result:
    return Result(prompt, "arm", "task", prompt, None, text, ids, steps, decoded, rows, 0.5)


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),
    [
        # Newcombe (1998), Statistics in Medicine 17, table I, method 3 (score interval, no continuity correction); the
        # last is n / (n + z^2).
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0),
    ],
)
def test_intervals_are_the_published_ones(hits: int, count: int, low: float, high: float) -> None:
    assert wilson(hits, count) == pytest.approx((low, high), abs=5e-5)


def test_an_interval_of_nothing_is_everything() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


def test_equal_tokens_are_counted_over_the_longer_response() -> None:
    assert equal_tokens([1, 2, 3], [1, 5, 3]) == (2, 3)
    assert equal_tokens([1, 2], [1, 2, 3, 4]) == (2, 4)
    assert equal_tokens([], []) == (0, 0)


def test_agreement_counts_prompts_and_tokens() -> None:
    pairs = [([1, 2, 3], [1, 2, 3]), ([1, 2], [1, 3, 4]), ([], [])]
    found = Agreement.of((result("p", "", a), result("p", "", b)) for a, b in pairs)
    assert found == Agreement(prompts=3, identical=2, equal=4, tokens=6)
    assert (found.identical_share, found.equal_share) == (2 / 3, 4 / 6)
    assert Agreement.of([]) is None
    empty = Agreement.of([(result("p", "", []), result("p", "", []))])
    assert empty is not None
    assert empty.equal_share == 1.0


def test_a_score_sums_over_prompts() -> None:
    questions = [Question("sums", "a", "1"), Question("sums", "b", "2"), Question("text", "c", None)]
    results = [result("a", "1", [1]), result("b", "3", [3], steps=4, rows=40), result("c", "?", [7, 8])]
    score = Score.of(list(zip(questions, results, strict=True)), {"a": results[0], "c": result("c", "", [7, 9])})
    assert (score.prompts, score.scored, score.hits, score.exact_match) == (3, 2, 1, 0.5)
    assert score.steps_per_prompt == 8 / 3
    assert score.tokens_per_step == 24 / 8
    assert score.rows_per_token == 88 / 24
    assert score.seconds == 1.5
    assert score.agreement == Agreement(2, 1, 2, 3), "prompts that both arms have answered"
    value = score.to_json()
    assert json.loads(json.dumps(value)) == value
    assert value["interval_95"] == list(wilson(1, 2))


def test_a_score_of_nothing() -> None:
    score = Score.of([])
    assert (score.exact_match, score.steps_per_prompt, score.tokens_per_step, score.rows_per_token) == (None, 0, 0, 0)
    assert score.agreement is None

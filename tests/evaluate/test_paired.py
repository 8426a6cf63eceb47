"""Paired differences: published intervals, the exact test, and the bootstrap against what theory says."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from dgraph.evaluate.judge import Judged
from dgraph.evaluate.paired import Accuracy, Difference, Paired, bootstrap
from dgraph.evaluate.questions import Question
from tests.evaluate.test_scores import result


def test_the_interval_of_paired_shares_is_the_published_one() -> None:
    """Newcombe (1998), Statistics in Medicine 17, 2635-2650, method 10."""
    found = Accuracy(36, 12, 2, 0).difference()
    assert (found.value, found.low, found.high) == pytest.approx((0.2, 0.0569, 0.3404), abs=5e-5)


def test_arms_that_never_differ_still_leave_room() -> None:
    found = Accuracy(0, 0, 0, 10).difference()
    assert found.value == 0
    assert found.low == pytest.approx(-found.high)
    assert found.high > 0.2


def test_the_other_way_round_is_the_same_with_signs_changed() -> None:
    one, other = Accuracy(5, 9, 3, 4), Accuracy(5, 3, 9, 4)
    a, b = one.difference(), other.difference()
    assert (a.value, a.low, a.high) == pytest.approx((-b.value, -b.high, -b.low))
    assert one.p == other.p


@pytest.mark.parametrize(
    ("mine", "other", "p"),
    [(0, 0, 1.0), (1, 0, 1.0), (5, 5, 1.0), (0, 6, 2 / 2**6), (1, 9, 2 * 11 / 2**10), (300, 700, 0.0)],
)
def test_mcnemar_is_a_fair_coin(mine: int, other: int, p: float) -> None:
    assert Accuracy(3, mine, other, 3).p == pytest.approx(p, abs=1e-12)


def test_accuracy_counts_pairs() -> None:
    pairs = [(True, True), (True, False), (True, False), (False, True), (False, False)]
    assert Accuracy.of(pairs) == Accuracy(1, 2, 1, 1)


def test_the_bootstrap_of_means_is_as_wide_as_theory_says() -> None:
    generator = np.random.default_rng(3)
    here, there = generator.normal(1, 1, 400), generator.normal(0, 1, 400)
    found = bootstrap([(a, 1, b, 1) for a, b in zip(here, there, strict=True)])
    assert found is not None
    half = 1.96 * np.std(here - there) / math.sqrt(400)
    assert found.value == pytest.approx(np.mean(here - there))
    assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half), abs=0.1 * half)


def test_the_bootstrap_draws_prompts_and_repeats() -> None:
    same = [(float(i), 10, float(i), 10) for i in range(20)]
    assert bootstrap(same) == Difference(0, 0, 0), "both arms are drawn together"
    pairs = [(float(i % 5), 1 + i % 3, 1.0, 2) for i in range(20)]
    assert bootstrap(pairs) == bootstrap(pairs)
    assert bootstrap(pairs, seed=1) != bootstrap(pairs)


@pytest.mark.parametrize("pairs", [[], [(1, 1, 1, 1)], [(0, 0, 1, 1)] * 3])
def test_too_little_for_a_bootstrap(pairs: list[tuple[float, float, float, float]]) -> None:
    assert bootstrap(pairs) is None


def test_an_arm_against_another() -> None:
    questions = [Question("sums", "a", "1"), Question("sums", "b", "2"), Question("text", "c", None)]
    here = [result("a", "1", [1] * 8), result("b", "3", [3] * 4), result("c", "x", [1, 2, 3, 4, 5])]
    there = [result("a", "1", [1, 2, 3, 4]), result("b", "2", [3] * 4), result("c", "y", [1, 2, 3, 4])]
    judged = {"1": Judged("", 2.0, 2), "3": Judged("", 3.0, 1), "2": Judged("", 1.0, 1), "x": Judged("", 9.0, 9)}
    found = Paired.of(list(zip(questions, here, there, strict=True)), lambda r: judged.get(r.text))
    assert found is not None
    assert found.accuracy == Accuracy(1, 0, 1, 0)
    assert found.nll is not None
    assert found.nll.value == pytest.approx(5 / 3 - 3 / 3), "of the two prompts whose responses were judged in both"
    assert found.tokens is not None
    assert found.tokens.value == pytest.approx((17 - 12) / 3)
    assert found.repetition is not None
    assert found.repetition.value == pytest.approx(4 / 8 - 0)
    value = found.to_json()
    assert json.loads(json.dumps(value)) == value
    assert (value["accuracy"]["p"], value["accuracy"]["difference"]["value"]) == (1.0, -0.5)
    assert Paired.of([]) is None

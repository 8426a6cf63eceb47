"""How answers are found in responses."""

from __future__ import annotations

from fractions import Fraction

import pytest

from dgraph.evaluate.comparisons import number, option, read_number, says, verdict, words

NUMBERS = [
    ("#### 18", 18),
    ("She makes 9 * 2 = $18.\n#### 18.", 18),
    ("#### $1,234,567.50 a year", Fraction(2469135, 2)),
    ("#### 2,125 dollars", 2125),
    ("####-10", -10),
    ("#### −3", -3),
    ("#### -$5", -5),
    ("#### $-5", -5),
    ("#### 18 eggs in 2 days", 18),
    ("#### 3 #### 4", 4),
    ("3 #### none", None),
    ("#### ", None),
    ("The answer is 42.", 42),
    ("16 - 3 - 4 = 9 eggs, so 9", 9),
    ("so it is 16 - 3", 3),
    ("so it is 16-3", 3),
    ("It costs $ 1,319, not $13,20.", 20),
    ("half of it: .5", Fraction(1, 2)),
    ("#### 3/4 of a cup", Fraction(3, 4)),
    ("#### 3 / 4", Fraction(3, 4)),
    ("#### 1 3/4 cups", Fraction(7, 4)),
    ("#### -1 1/2", Fraction(-3, 2)),
    (r"is $\boxed{18}$.", 18),
    (r"#### \frac{3}{4}", Fraction(3, 4)),
    (r"#### -\dfrac{1}{2}", Fraction(-1, 2)),
    ("1/0", None),
    ("6/2=3", 3),
    ("50%", 50),
    ("18.0", 18),
    ("no number", None),
    ("", None),
]


@pytest.mark.parametrize(("text", "expected"), NUMBERS, ids=[text for text, _ in NUMBERS])
def test_a_number_is_found(text: str, expected: Fraction | int | None) -> None:
    assert read_number(text) == expected


def test_whole_numbers_must_be_met_and_others_to_two_decimals() -> None:
    assert number("18", "#### 18.00")
    assert not number("18", "#### 18.001")
    assert not number("18", "nothing")
    assert number("0.8333333333333334", "#### 0.83")
    assert number("0.8333333333333334", "#### 5/6")
    assert not number("0.8333333333333334", "#### 0.8")
    assert number("276,000", "#### 276000")


def test_an_answer_without_a_number_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="must hold one, got 'five'"):
        number("five", "5")


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("#### (B)", True),
        ("#### B.", True),
        ("(A) is wrong, so the answer is (B) 12/25/1937.", True),
        ("(B), no: (C)", False),
        ("A day later it is B", True),
        ("#### b", False),
        ("#### ABBA", False),
        ("", False),
    ],
)
def test_an_option_is_a_letter(text: str, right: bool) -> None:
    assert option("(B)", text) is right


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("#### Yes", True),
        ("#### yes.", True),
        ("No, wait: yes", True),
        ("Yes #### No", False),
        ("Yesterday", False),
        ("#### True", False),
        ("", False),
    ],
)
def test_a_verdict_is_a_word(text: str, right: bool) -> None:
    assert verdict("Yes", text) is right


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("#### barn damp it&t", True),
        ("#### Barn, damp, it&t.", True),
        ("First barn.\nSorted: barn damp it&t\n", True),
        ("barn\ndamp\nit&t", False),
        ("#### damp barn it&t", False),
        ("#### barn damp", False),
        ("", False),
    ],
)
def test_words_are_in_order(text: str, right: bool) -> None:
    assert words("barn damp it&t", text) is right


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("Paris", "It is paris, the capital of France.", True),
        ("Paris", "A comparison; Parisian. #### Rome", False),
        ("7 | seven", "There are Seven days.", True),
        ("7 | seven", "7 days", True),
        ("7 | seven", "There are 17 days, or seventeen.", False),
        ("New York", "In New York.", True),
        ("New York", "York is new.", False),
        ("O", "Gold is Au.", False),
        ("Au", "", False),
    ],
)
def test_an_answer_is_said_anywhere_as_whole_words(answer: str, text: str, right: bool) -> None:
    assert says(answer, text) is right

"""Calculations to be done: every result is right, numbers are others of about the size, each depends on its number."""

from __future__ import annotations

import random
import re
from fractions import Fraction

import pytest

from training.calculations import BLANK, documents, expressions, redrawn, sentences, text_of
from training.renumber import NOTE, calculated, without_notes

SOLUTIONS = [
    "48/2 = <<48/2=24>>24, 48 + 24 = <<48+24=72>>72",
    "$4.50 x 3 = $<<4.5*3=13.5>>13.50, 150*30/100 = <<150*30/100=45>>45, (7+50)-9 = <<(7 + 50)-9=48>>48",
    "It is <<5=5>>5, rounded <<10/3=3>>3, and <<x+2=4>>4, of 1,200 <<1,200*.5=600>>600",
]
KNOWN = ["48/2", "48+24", "4.5*3", "150*30/100", "(7+50)-9", "1,200*.5"]


def test_notes_that_are_calculations_and_right_are_taken() -> None:
    assert expressions(SOLUTIONS) == KNOWN


@pytest.mark.parametrize("known", KNOWN)
def test_other_numbers_have_a_value_that_can_be_written(known: str) -> None:
    rng = random.Random(0)
    made = [found for found in (redrawn(known, rng) for _ in range(200)) if found is not None]
    assert len(made) > 150
    assert len({text for text, _ in made}) > 30
    signs = re.sub(r"[\d.,]+", "n", known)
    for text, value in made:
        assert re.sub(r"[\d.,]+", "n", text) == signs
        assert value == calculated(text) > 0
        assert (100 * value).denominator == 1
        assert value.denominator == 1 or calculated(known).denominator > 1


def test_what_has_no_value_is_left_out() -> None:
    assert redrawn("0*5", random.Random(0)) is None


def test_amounts_of_money_have_both_digits() -> None:
    assert [text_of(Fraction(n), money) for n, money in (("10.5", False), ("10.5", True), ("10", True))] == [
        "10.5",
        "10.50",
        "10",
    ]


LINES = ["He has 48/2 = <<48/2=24>>24 pens left.", "So $4.50 x 3 = $<<4.5*3=13.5>>13.50 for 3 of them"]
OTHERS = [
    "Since he had 7 before, 48 + 24 = <<48+24=72>>72",
    "6 - 3 = <<6-3=3>>3 are left",
    "2 + 2 = <<2+2=4>>4 and 4 + 4 = <<4+4=8>>8",
    "Four and four are <<4+4=8>>8",
]


def test_sentences_have_one_calculation_and_nothing_that_would_contradict_it() -> None:
    assert sentences(["\n".join([*LINES, *OTHERS]), "No number at all"]) == LINES


def test_a_sentence_is_asked_without_its_result() -> None:
    asked = [found for found in documents(KNOWN, LINES, range(200), "ASK") if BLANK in found[0]]
    assert len(asked) > 50
    pens = re.compile(r"He has (\d+)/(\d+) = (\S+) pens left\.")
    price = re.compile(r"So \$(\S+) x (\d+) = \$(\S+) for (\d+) of them")
    seen = set()
    for question, answer in asked:
        for gap, line in zip(question.splitlines()[1:], answer.splitlines(), strict=True):
            pattern = pens if line.startswith("He") else price
            one, other, result, *same = pattern.fullmatch(line).groups()
            assert Fraction(result) == (Fraction(one) / int(other) if pattern is pens else Fraction(one) * int(other))
            assert same in ([], [other])
            assert pattern.fullmatch(gap).groups() == (one, other, BLANK, *same)
            seen.add(line)
    assert len(seen) > 60


def test_every_line_of_an_answer_is_right_and_is_of_what_is_asked() -> None:
    kinds = [0, 0]
    for question, answer in documents(KNOWN, [], range(400), "ASK"):
        in_words = question.endswith("\nASK")
        kinds[in_words] += 1
        *lines, last = answer.splitlines() if in_words else [*answer.splitlines(), ""]
        results = []
        for line in lines:
            sides, result = line.replace("$", "").split("=")
            plain = sides.replace("x", "*").replace("×", "*").replace("÷", "/").replace(" ", "")
            assert calculated(plain) == Fraction(result.strip()), line
            results.append(result.strip())
        if in_words:
            assert last == f"#### {results[-1]}"
            begun = [re.split("[-+*x×/÷]", line)[0].strip() for line in lines]
            assert begun[1:] == results[:-1], "each step goes on from the last"
        else:
            assert [line.rpartition("=")[0].strip() for line in lines] == question.splitlines()[1:]
    assert min(kinds) > 50


def test_answers_note_what_they_calculate_where_solutions_do() -> None:
    listed = noted = 0
    for question, answer in documents(KNOWN, LINES, range(400), "ASK", notes=True):
        notes = NOTE.findall(answer)
        if BLANK in question or question.endswith("\nASK"):
            noted += 1
            lines = [line for line in answer.splitlines() if not line.startswith("####")]
            assert len(notes) == len(lines)
            for line, (expression, result) in zip(lines, notes, strict=True):
                assert calculated(expression) == Fraction(result), line
                assert Fraction(re.search(r">>([\d.]*\d)", line)[1]) == Fraction(result), "it follows its note"
        else:
            assert (without_notes(answer), notes) == (answer, [])
            listed += not re.search(r"[ x×÷$]", answer)
    assert noted > 150
    assert listed > 70, "most of the others are written as notes are"


def test_a_sentence_says_its_result_once() -> None:
    assert sentences(["It takes 7 days, since 14/2 = <<14/2=7>>7", "14/2 = <<14/2=7>>7 days"]) == [
        "14/2 = <<14/2=7>>7 days"
    ]


def test_a_document_depends_on_its_number_alone() -> None:
    every = list(documents(KNOWN, LINES, range(20), "ASK"))
    assert list(documents(KNOWN, LINES, range(7, 9), "ASK")) == every[7:9]
    assert len(set(every)) == 20

"""Word problems with other numbers: what changes with what, what stays, and what is refused."""

from __future__ import annotations

import random
import re

import pytest

from training.renumber import NOTE, as_it_is, calculated, renumbered, value_of, without_notes

CLIPS = (
    "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many did she sell?",
    "She sold 48/2 = <<48/2=24>>24 clips in May.\nTogether these are 48+24 = <<48+24=72>>72 clips.\n#### 72",
)
MONEY = (
    "A lamp costs $1,600 and a table $89, 25% of it in cash. What is paid in cash, if it is 6 pm?",
    "Both cost 1,600 + 89 = $<<1600+89=1689>>1,689.\nIn cash: .25*1689 = $<<.25*1689=422.25>>422.25\n#### 422.25",
)


def drawn(problem: tuple[str, str], count: int = 40) -> list[tuple[str, str]]:
    found = (renumbered(*problem, random.Random(seed)) for seed in range(count))
    return [made for made in found if made is not None]


@pytest.mark.parametrize("problem", [CLIPS, MONEY])
def test_a_problem_with_its_own_numbers_is_what_it_was(problem: tuple[str, str]) -> None:
    assert as_it_is(*problem) == (problem[0], without_notes(problem[1]))


def test_what_is_calculated_follows_the_numbers_of_the_question() -> None:
    made = drawn(CLIPS)
    assert len(set(made)) > 10
    for question, answer in made:
        (first,) = map(int, re.findall(r"\d+", question))
        assert first != 48
        assert first % 2 == 0
        assert 24 <= first <= 96
        half = first // 2
        lines = (f"She sold {first}/2 = {half} clips in May.", f"Together these are {first}+{half} = {3 * half} clips.")
        assert answer == "\n".join([*lines, f"#### {3 * half}"])


def test_notes_that_stay_are_of_the_new_numbers_without_commas_and_needless_zeros() -> None:
    for seed in range(40):
        clips, plain = (renumbered(*CLIPS, random.Random(seed), notes=notes) for notes in (True, False))
        assert (clips is None) == (plain is None)
        if clips is not None:
            assert (clips[0], without_notes(clips[1])) == plain
            assert all(calculated(made) == value_of(result) for made, result in NOTE.findall(clips[1]))
            assert len(NOTE.findall(clips[1])) == 2
    made = [found for seed in range(40) if (found := renumbered(*MONEY, random.Random(seed), notes=True))]
    assert made
    for _, answer in made:
        (both, sum_of), (share, paid) = NOTE.findall(answer)
        assert "," not in both + sum_of + share + paid
        assert calculated(share) == value_of(paid)
        assert not paid.endswith(".50")


def test_numbers_are_written_as_they_were_and_shares_and_hours_stay() -> None:
    made = drawn(MONEY)
    assert made
    for question, answer in made:
        found = re.fullmatch(r"A lamp costs \$(\d?,?\d+) and a table \$(\d+), 25% .* if it is 6 pm\?", question)
        assert found is not None, question
        lamp, table = (int(found[n].replace(",", "")) for n in (1, 2))
        assert lamp % 100 == 0
        assert lamp > table
        whole = answer.split("$")[1].split(".\n")[0]
        assert whole == f"{lamp + table:,}"
        paid = answer.rpartition("#### ")[2]
        assert float(paid) == (lamp + table) / 4
        assert len(paid.partition(".")[2]) in (0, 1, 2)


REFUSED = {
    "nothing that may change": ("He has 2 dogs in 1900 and 12 cats.", "<<2+12=14>>14\n#### 14"),
    "a number in words": ("Five and 5 are?", "<<5+5=10>>10\n#### 10"),
    "a number of nowhere": ("He buys 38 pens.", "He pays 38*83 = <<38*83=3154>>3154\n#### 3154"),
    "a result that is in the question": ("Of 38 pens 19 are red.", "<<38/2=19>>19 and 19\n#### 19"),
    "a note that rounds": ("38 pens for 3 boys.", "<<38/3=12.7>>12.7\n#### 12.7"),
    "a note that is none": ("He buys 38 pens.", "<<38 pens=38>>38\n#### 38"),
    "an open bracket": ("He buys 38 pens.", "<<(38+1=39>>39\n#### 39"),
    "division by nothing": ("He buys 38 pens.", "<<38/(1-1)=0>>0\n#### 0"),
    "no notes": ("He buys 38 pens.", "38 pens\n#### 38"),
    "two meanings": ("He buys 38 pens and 41 cups.", "<<38+3=41>>41, <<41+38=79>>79\n#### 79"),
    "half a note": ("He buys 38 pens.", "<<38+1=39>>39 <<39>>\n#### 39"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_followed_is_refused(why: str) -> None:
    made = drawn(REFUSED[why])
    if why == "two meanings":  # 41 is a result, so it stays, and 38 may not change without it
        assert all("38" in question for question, _ in made)
    else:
        assert not made


def test_results_stay_whole_positive_and_the_order_of_numbers_is_kept() -> None:
    problem = ("Of 96 pens 33 are lost, the rest goes to 3 boys.", "<<96-33=63>>63, <<63/3=21>>21 each.\n#### 21")
    made = drawn(problem)
    assert made
    for question, answer in made:
        pens, lost, boys = map(int, re.findall(r"\d+", question))
        assert pens > lost > boys
        assert (pens - lost) % boys == 0
        assert answer.endswith(f"#### {(pens - lost) // boys}")


def test_notes_are_found_as_they_are_written() -> None:
    assert NOTE.findall("a <<1+1=2>>2 <<=>> <<3*(2-1)=3>>3") == [("1+1", "2"), ("", ""), ("3*(2-1)", "3")]

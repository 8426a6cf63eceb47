"""Word problems about other people: who is replaced by whom, and what stays."""

from __future__ import annotations

import random

from training.rename import HE, NAME, SHE, renamed

QUESTION = "Kim gave Tom's sister Mary 4 of Kim's pens. Kimberly and Mark had none."
ANSWER = "Kim and Mary have 4, Tom none. Joe looks on."


def test_names_change_alike_wherever_they_stand() -> None:
    seen = set()
    for seed in range(60):
        question, answer = renamed(QUESTION, ANSWER, random.Random(seed))
        kim, tom, mary = NAME.findall(question)[:3]
        joe = NAME.findall(answer)[-1]
        assert question == f"{kim} gave {tom}'s sister {mary} 4 of {kim}'s pens. Kimberly and Mark had none."
        assert answer == f"{kim} and {mary} have 4, {tom} none. {joe} looks on."
        assert len({kim, tom, mary, joe}) == 4
        assert {kim, mary} <= {*SHE}
        assert {tom, joe} <= {*HE}
        seen.add((kim, tom, mary))
    assert len(seen) > 50
    assert any(kim == "Kim" for kim, _, _ in seen), "some stay"


def test_no_name_is_of_both_and_none_is_twice() -> None:
    assert len({*HE, *SHE}) == len(HE) + len(SHE)


def test_a_problem_without_names_is_as_it_was() -> None:
    assert renamed("2 and 2?", "4", random.Random(0)) == ("2 and 2?", "4")

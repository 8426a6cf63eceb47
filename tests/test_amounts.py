"""What runs by default and what only in a release."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.amounts import drawn, every_pair, every_value, first_cases
from tests.conftest import pytest_collection_modifyitems

HERE = Path(__file__)
AXES = (("letter", "abc"), ("number, flag", [(1, True), (2, False)]), ("size", range(5)))


def by_default(parameters: pytest.MarkDecorator) -> list[tuple[Any, ...]]:
    """The values of all cases, but of those that only a release runs."""
    return [case.values for case in parameters.args[1] if not case.marks]


@pytest.mark.parametrize(("several", "together"), [(every_value, 1), (every_pair, 2)])
def test_what_runs_by_default_has_every_meeting_of_values(several: Any, together: int) -> None:
    names, cases = several(*AXES).args
    assert names == "letter, number, flag, size"
    whole = [(letter, *both, size) for letter in AXES[0][1] for both in AXES[1][1] for size in AXES[2][1]]
    assert [case.values for case in cases] == whole, "all of them run in a release"
    chosen = by_default(several(*AXES))

    def meetings(found: Sequence[tuple[Any, ...]]) -> set[Any]:
        return {meeting for case in found for meeting in itertools.combinations(enumerate(case), together)}

    assert meetings(chosen) == meetings(whole)
    assert len(chosen) == (5 if together == 1 else 15)


def test_values_are_met_evenly() -> None:
    chosen = by_default(every_value(("family", "abc"), ("case", range(9))))
    assert [[family for family, _ in chosen].count(each) for each in "abc"] == [3, 3, 3]


def test_the_first_cases_run_by_default() -> None:
    _, cases = first_cases(2, "word", ("a", (1, 2), "c")).args
    assert [(case.values, [mark.name for mark in case.marks]) for case in cases] == [
        (("a",), []),
        (((1, 2),), []),
        (("c",), ["release"]),
    ]
    assert by_default(first_cases(1, "word, size", [("a", 1), ("b", 2)])) == [("a", 1)]


def test_a_test_is_drawn_few_times_or_many() -> None:
    seen: list[tuple[str, int]] = []

    @drawn(3, 20, number=st.integers(0, 1000))
    def test(word: str, number: int) -> None:
        """Its words."""
        seen.append((word, number))

    (parameters,) = test.pytestmark
    few, many = parameters.args[1]
    assert (few, many.values, [mark.name for mark in many.marks]) == (3, (20,), ["release"])
    assert (test.__name__, test.__doc__) == ("test", "Its words.")
    test(examples=3, word="x")
    first = seen.copy()
    assert len(first) == 3
    seen.clear()
    test(examples=3, word="x")
    assert seen == first, "the same every time"


# -- which tests a command runs ------------------------------------------------------------------------------------


def run_by(command: str, folder: Path) -> list[str]:
    """Of a test, a release test and one with parameters, those that a command line runs."""

    class Item(SimpleNamespace):
        def get_closest_marker(self, name: str) -> bool | None:
            return name in self.marks or None

    names = {"plain": (), "slow": ("release",), "each[1]": ("release",), "each[2]": ()}
    items: list[Any] = [
        Item(path=HERE, nodeid=f"tests/test_amounts.py::{name}", marks=marks) for name, marks in names.items()
    ]
    told: list[Any] = []
    args, _, marks = command.partition("-m ")
    config: Any = SimpleNamespace(
        getoption={"markexpr": marks}.get,
        args=args.split(),
        invocation_params=SimpleNamespace(dir=folder),
        hook=SimpleNamespace(pytest_deselected=lambda items: told.extend(items)),
    )
    pytest_collection_modifyitems(config, items)
    found = [item.nodeid.partition("::")[2] for item in items]
    assert sorted(found + [item.nodeid.partition("::")[2] for item in told]) == sorted(names)
    return found


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("", ["plain", "each[2]"]),
        ("tests/test_amounts.py", ["plain", "each[2]"]),
        ("-m gpu", ["plain", "each[2]"]),
        ("-m release", ["plain", "slow", "each[1]", "each[2]"]),
        ("tests/test_amounts.py::slow", ["plain", "slow", "each[2]"]),
        ("tests/test_amounts.py::each", ["plain", "each[1]", "each[2]"]),
        ("tests/test_amounts.py::each[1]", ["plain", "each[1]", "each[2]"]),
        ("tests/test_others.py::slow", ["plain", "each[2]"]),
    ],
)
def test_a_release_test_runs_if_it_is_asked_for(command: str, found: list[str]) -> None:
    assert run_by(command, HERE.parents[1]) == found
    if "::" in command:
        assert run_by(command.replace("tests/", ""), HERE.parent) == found, "wherever it is asked"

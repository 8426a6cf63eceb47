"""How much of a test runs by default. All of it runs in a release: what is left out is marked `release`."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy

Axis = tuple[str, Iterable[Any]]
"""Names and values as `pytest.mark.parametrize` takes them."""


def every_value(*axes: Axis) -> pytest.MarkDecorator:
    """Parametrize over the product of the axes: by default every value is met once, evenly with those of other axes."""
    return _covering(1, axes)


def every_pair(*axes: Axis) -> pytest.MarkDecorator:
    """Parametrize over the product of the axes: by default every two values of two axes meet."""
    return _covering(2, axes)


def first_cases(few: int, names: str, cases: Iterable[Any], **how: Any) -> pytest.MarkDecorator:
    """Parametrize over cases of which the first few run by default, the others in a release.

    how: more arguments of `pytest.mark.parametrize`.
    """
    several = "," in names
    params = [
        pytest.param(*(case if several else (case,)), marks=() if number < few else pytest.mark.release)
        for number, case in enumerate(cases)
    ]
    return pytest.mark.parametrize(names, params, **how)


def _covering(strength: int, axes: Sequence[Axis]) -> pytest.MarkDecorator:
    places = [[*enumerate(values)] for _, values in axes]
    cells = [*itertools.product(*places)]
    chosen = _chosen(strength, [tuple(at for at, _ in cell) for cell in cells])
    several = ["," in names for names, _ in axes]
    params = []
    for number, cell in enumerate(cells):
        values = [value if many else (value,) for many, (_, value) in zip(several, cell, strict=True)]
        marks = () if number in chosen else pytest.mark.release
        params.append(pytest.param(*itertools.chain(*values), marks=marks))
    return pytest.mark.parametrize(", ".join(names for names, _ in axes), params)


def _chosen(strength: int, cells: Sequence[tuple[int, ...]]) -> set[int]:
    """Of the product of axes, few cells in which every `strength` values of different axes meet: one by one the cell
    with most new meetings, of several the one whose values were taken least, of those the first.
    """
    meetings = [{*itertools.combinations(enumerate(cell), strength)} for cell in cells]
    missing, taken, chosen = set().union(*meetings), Counter[tuple[int, int]](), set()
    while missing:
        best = max(
            range(len(cells)),
            key=lambda n: (len(meetings[n] & missing), -sum(taken[value] for value in enumerate(cells[n]))),
        )
        chosen.add(best)
        missing -= meetings[best]
        taken.update(enumerate(cells[best]))
    return chosen


def drawn(few: int, many: int, **strategies: SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:
    """Run a test on `few` drawn examples, which are the same every time; in a release on `many` besides."""

    def of(test: Callable[..., None]) -> Any:
        def on_examples(examples: int, **others: Any) -> None:
            @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
            @given(**strategies)
            def drawing(**values: Any) -> None:
                test(**others, **values)

            drawing()

        names = ["examples", *(name for name in inspect.signature(test).parameters if name not in strategies)]
        keyword = inspect.Parameter.KEYWORD_ONLY
        on_examples.__signature__ = inspect.Signature([inspect.Parameter(name, keyword) for name in names])  # type: ignore[attr-defined]
        on_examples.__name__, on_examples.__doc__ = test.__name__, test.__doc__
        on_examples.__module__ = test.__module__
        on_examples.place_as = test  # type: ignore[attr-defined]  # where pytest says that it lies
        return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.release)])(on_examples)

    return of

"""How the tiles of a product are divided among programs."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any

import pytest

from tests.ops.triton.compiled import found_by
from tests.ops.triton.divisions import CASES

pytestmark = pytest.mark.usefixtures("interpreted")  # skipped like others where Triton cannot interpret


@cache
def _listed() -> dict[str, Any]:
    return found_by("divided")


@pytest.mark.parametrize("name", CASES)
def test_every_iteration_of_every_tile_is_somebodys(name: str) -> None:
    case, tiles = CASES[name], defaultdict(list)
    for program in _listed()[name]:
        for whole, r, c, first, last, *_ in program:
            assert 0 <= first < last <= case.iterations
            assert not whole or (first, last) == (0, case.iterations)
            tiles[r, c].append((first, last))
    assert len(tiles) == case.tiles
    for parts in tiles.values():
        ends = [end for part in sorted(parts) for end in part]
        assert (ends[0], ends[-1]) == (0, case.iterations)
        assert ends[1:-1:2] == ends[2::2], "one begins where the other ends"


@pytest.mark.parametrize("name", CASES)
def test_the_shares_of_a_tile_know_each_other(name: str) -> None:
    """They are counted in one place, lie behind one another in the workspace, and are added up in their order."""
    case, taken = CASES[name], []
    shared = defaultdict(list)
    for program in _listed()[name]:
        for _, r, c, first, last, place, own, count, begins in program:
            if last - first < case.iterations:
                shared[place, begins, count, r, c].append((first, own))
                taken.append(begins + own)
    assert len({place for place, *_ in shared}) == len(shared)
    assert all(0 <= place < case.programs for place, *_ in shared)
    assert len(set(taken)) == len(taken)
    assert all(0 <= slot < case.programs * (2 if case.even else 1) for slot in taken)
    for (_, _, count, _, _), parts in shared.items():
        assert [own for _, own in sorted(parts)] == list(range(count))
        assert count <= case.splits + case.even
    for program in _listed()[name]:
        assert sum(last - first < case.iterations for _, _, _, first, last, *_ in program) <= (2 if case.even else 1)


def test_even_shares_keep_more_programs_busy_where_that_saves_a_quarter() -> None:
    longest = {
        name: max(sum(last - first for _, _, _, first, last, *_ in program) for program in _listed()[name])
        for name in CASES
    }
    shorter = {name for name in CASES if not name.endswith("even") and longest[f"{name}, even"] < longest[name]}
    assert shorter == {"one tile for three programs of four", "sizes that end within tiles"}
    assert longest["one tile for three programs of four, even"] == 24
    assert longest["one tile for three programs of four"] == 32

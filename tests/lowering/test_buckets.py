"""Buckets: which row count a stage is padded to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dgraph.errors import InputError
from dgraph.lowering.buckets import Buckets


def test_exact_pads_nothing_but_an_empty_step() -> None:
    buckets = Buckets.of("exact")
    assert [buckets(n) for n in (0, 1, 2, 127, 1000)] == [1, 1, 2, 127, 1000]
    assert Buckets.of(None) == buckets == Buckets()


def test_hybrid_is_the_papers_list() -> None:
    """Powers of two up to 128, then multiples of 256 (FOCUS, section 5)."""
    buckets = Buckets.of("hybrid")
    listed = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024]
    assert sorted({buckets(n) for n in range(1025)}) == listed
    for rows in range(1, 1025):
        assert buckets(rows) == min(b for b in listed if b >= rows)


def test_fine_pads_less_between_128_and_4096() -> None:
    buckets = Buckets.of("fine")
    listed = [1, 2, 4, 8, 16, 32, 64, 128, *range(192, 1025, 64), *range(1152, 4097, 128), *range(4352, 6145, 256)]
    assert sorted({buckets(n) for n in range(6145)}) == listed
    for rows in range(1, 6145, 7):
        assert buckets(rows) == min(b for b in listed if b >= rows)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([8], {0: 8, 1: 8, 8: 8, 9: 16, 16: 16, 17: 24}),
        ([32, 4, 4, 100], {1: 4, 4: 4, 5: 32, 33: 100, 100: 100, 101: 200, 201: 300}),
        ((1, 3), {1: 1, 2: 3, 4: 6, 7: 9}),
        (range(2, 7, 2), {1: 2, 3: 4, 6: 6, 7: 12}),
    ],
)
def test_a_list_rounds_up_to_its_sizes_and_then_to_multiples_of_the_last(sizes: Any, expected: dict[int, int]) -> None:
    buckets = Buckets.of(sizes)
    assert {rows: buckets(rows) for rows in expected} == expected


@pytest.mark.parametrize("value", ["exact", "hybrid", "fine", [4, 8], Buckets("list", (3,))])
def test_a_bucket_is_never_smaller_and_rounding_twice_changes_nothing(value: Any) -> None:
    buckets = Buckets.of(value)
    for rows in range(1, 600):
        assert buckets(rows) >= rows
        assert buckets(buckets(rows)) == buckets(rows)
        assert buckets(rows) <= buckets(rows + 1)


def test_as_the_option_that_makes_them() -> None:
    for value, plain in (("exact", "exact"), ("hybrid", "hybrid"), ("fine", "fine"), ([8, 4, 8], [4, 8])):
        buckets = Buckets.of(value)
        assert buckets.to_json() == plain
        assert json.loads(json.dumps(buckets.to_json())) == plain
        assert Buckets.of(buckets.to_json()) == buckets
        assert Buckets.of(buckets) is buckets


@pytest.mark.parametrize("value", ["big", [], [0], [4, -8], [4.0], ["4"], [True], 8, 4.5, [8, "a"]])
def test_values_that_are_no_buckets(value: Any) -> None:
    with pytest.raises(InputError, match=r"buckets must be 'exact', 'hybrid', .* or a list of row counts") as caught:
        Buckets.of(value)
    assert repr(value) in str(caught.value)

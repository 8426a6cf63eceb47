"""Budgets of layers: worked examples of each rule, sums, order, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import combinations, pairwise

import pytest

from dgraph.errors import InputError
from dgraph.plans.budgets import maskkv, pyramid, squeeze, uniform

AVERAGES = (0, 1, 7, 32, 256, 511)


def profile(layers: int, seed: int) -> list[float]:
    drawn = random.Random(seed)
    return [drawn.random() for _ in range(layers)]


def test_uniform() -> None:
    assert uniform(3, 32) == (32, 32, 32)


def test_maskkv_divides_the_rest_by_the_sums_of_the_groups() -> None:
    # base 40 each; 60 * 4 = 240 to share; the outer two have 3 of 4 parts of the importance.
    assert maskkv(100, [2.0, 0.5, 0.5, 1.0]) == (130, 70, 70, 130)
    # 2 of 6 layers at each end have half of it: 360 by 2, over 4 and over 2 layers.
    assert maskkv(100, [1, 1, 2, 0, 0, 0], boundary=2) == (85, 85, 130, 130, 85, 85)


def test_maskkv_rounds_every_part_down() -> None:
    # base int(.4 * 33) = 13; 20 * 5 = 100 to share: int(100 / 3) = 33 to two layers, 67 to three.
    assert maskkv(33, [1, 2, 1, 1, 1], beta=0.4) == (13 + 16, 13 + 22, 13 + 22, 13 + 22, 13 + 16)


def test_maskkv_at_the_ends_of_its_settings() -> None:
    assert maskkv(64, [1, 9, 9, 1], beta=1) == (64,) * 4
    assert maskkv(64, [1, 0, 0, 1], beta=0) == (128, 0, 0, 128)
    assert maskkv(64, [1, 9, 9, 1], boundary=0) == (64,) * 4
    assert maskkv(64, [1, 9, 9, 1], boundary=2) == maskkv(64, [1, 9, 9, 1], boundary=50) == (64,) * 4
    assert maskkv(64, [0, 0, 0]) == (64,) * 3
    assert maskkv(64, [0.3]) == (64,)


def test_maskkv_gives_the_more_important_group_more() -> None:
    for importance, more in (([0.9, 0.1, 0.2, 0.8], True), ([0.1, 0.9, 0.8, 0.2], False)):
        found = maskkv(128, importance)
        assert found[0] == found[-1]
        assert found[1] == found[2]
        assert (found[0] > found[1]) == more


def test_pyramid_descends_in_equal_steps() -> None:
    assert pyramid(5, 100, beta=10) == (190, 145, 100, 55, 10)
    assert pyramid(2, 40, beta=20) == (78, 2)
    assert pyramid(4, 30, beta=20) == (58, 39, 20, 1)  # 58.5, 39.5, 20.5, 1.5
    assert pyramid(1, 77) == (77,)
    assert pyramid(6, 77, beta=1) == (77,) * 6


@pytest.mark.parametrize("layers", [2, 3, 28, 33])
@pytest.mark.parametrize("average", AVERAGES)
def test_pyramid_never_rises_and_has_the_average_in_the_middle(layers: int, average: int) -> None:
    found = pyramid(layers, average)
    assert all(one >= other for one, other in pairwise(found))
    assert found[-1] == average // 20
    if layers % 2:
        assert found[layers // 2] == average


def test_squeeze_takes_from_the_most_similar() -> None:
    # Groups {.1, .15}, {.5}, {.9, .95}: two layers keep 40, the other three share 500 - 80.
    assert squeeze(100, [0.1, 0.9, 0.5, 0.15, 0.95]) == (140, 40, 140, 140, 40)
    assert squeeze(33, [0.1, 0.9, 0.5, 0.15, 0.95], share=0.5) == (44, 16, 44, 44, 16)  # 16.5, 133 / 3
    assert squeeze(100, [0.1, 0.9, 0.5, 0.15, 0.95], share=1) == (100,) * 5
    assert squeeze(100, [0.1, 0.9, 0.5, 0.15, 0.95], groups=2) == (140, 40, 140, 140, 40)
    assert squeeze(100, [0.1, 0.9, 0.5, 0.15, 0.95], groups=5, share=0) == (125, 125, 125, 125, 0)


def test_squeeze_never_parts_equal_layers() -> None:
    assert squeeze(100, [0.5] * 4) == (100,) * 4
    assert squeeze(100, [0.5, 0.5, 0.7, 0.5, 0.7], share=0.4) == (140, 140, 40, 140, 40)
    assert squeeze(100, [0.3]) == (100,)


@pytest.mark.parametrize("groups", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_squeeze_finds_the_best_clusters(groups: int, seed: int) -> None:
    values = profile(9, seed)
    ordered = sorted(values)

    def spread(split: tuple[int, ...]) -> float:
        parts = [ordered[a:b] for a, b in pairwise((0, *split, 9))]
        return sum(sum((x - sum(part) / len(part)) ** 2 for x in part) for part in parts)

    best = min(combinations(range(1, 9), groups - 1), key=spread)
    found = squeeze(100, values, groups=groups, share=0)
    assert [layer for layer in range(9) if found[layer] == 0] == [
        layer for layer in range(9) if values[layer] >= ordered[best[-1]]
    ]


RULES: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "uniform": uniform,
    "maskkv": lambda layers, average: maskkv(average, profile(layers, average)),
    "maskkv, wide": lambda layers, average: maskkv(average, profile(layers, 1), boundary=3, beta=0.13),
    "pyramid": pyramid,
    "pyramid, steep": lambda layers, average: pyramid(layers, average, beta=7.3),
    "squeeze": lambda layers, average: squeeze(average, profile(layers, average)),
    "squeeze, in two": lambda layers, average: squeeze(average, profile(layers, 2), share=0.33, groups=2),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layers", [1, 2, 5, 32, 48])
def test_sums_stay_below_the_average_and_near_it(rule: str, layers: int) -> None:
    for average in AVERAGES:
        found = RULES[rule](layers, average)
        assert len(found) == layers
        assert all(type(pairs) is int and pairs >= 0 for pairs in found)
        assert average * layers - 2 * layers < sum(found) <= average * layers


@pytest.mark.parametrize("rule", RULES)
def test_a_larger_average_gives_no_layer_much_less(rule: str) -> None:
    """Up to one pair, which rounding of another part may take."""
    if rule in ("maskkv", "squeeze"):
        return  # their profile changes with the average here
    for average in range(60):
        for before, after in zip(RULES[rule](12, average), RULES[rule](12, average + 1), strict=True):
            assert after >= before - 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: uniform(0, 8), "at least one layer, got 0"),
        (lambda: uniform(2, -1), "average must be an integer of at least 0, in pairs per KV head, got -1"),
        (lambda: pyramid(2, 2.5), "average must be an integer of at least 0, in pairs per KV head, got 2.5"),  # type: ignore[arg-type]
        (lambda: pyramid(4, 8, beta=0.5), "beta must be a number of at least 1 .*, got 0.5"),
        (lambda: pyramid(4, 8, beta=float("inf")), "beta must be a number of at least 1 .*, got inf"),
        (lambda: maskkv(8, []), "at least one layer, got 0"),
        (lambda: maskkv(8, [1, 1], beta=1.2), r"beta must be a number in \[0, 1\], got 1.2"),
        (lambda: maskkv(8, [1, 1], boundary=-1), "boundary must be an integer of at least 0, .*, got -1"),
        (lambda: maskkv(8, [1, -1]), "importance must be a finite number of at least 0 .*, got -1 for layer 1"),
        (lambda: maskkv(8, [float("nan")]), "importance must be a finite number .*, got nan for layer 0"),
        (lambda: squeeze(8, []), "at least one layer, got 0"),
        (lambda: squeeze(8, [1, 2], share=-0.1), r"share must be a number in \[0, 1\], got -0.1"),
        (lambda: squeeze(8, [1, 2], groups=1), "groups must be an integer of at least 2, got 1"),
        (lambda: squeeze(8, [1, float("inf")]), "similarity must be a finite number for each layer, got inf"),
    ],
)
def test_wrong_values_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()

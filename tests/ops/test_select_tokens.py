"""dgraph::select_tokens against the FOCUS rules, written as a loop over one sequence."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.draws import cu_rows_of

Result = tuple[list[bool], list[int], int]


def ceil_fp32(value: float, average: float) -> float:
    product = torch.tensor(value, dtype=torch.float32) * torch.tensor(max(average, 1.0), dtype=torch.float32)
    return math.inf if product.isinf() else math.ceil(product.item())


def select_slowly(
    score: list[float],
    masked: list[bool],
    positions: list[int],
    limit: list[int],
    average: float,
    reached: int,
    alpha: float,
    keep: int,
    holds: list[bool] | None = None,
) -> Result:
    """The rules for one sequence, on Python values. holds: the op's `masked`."""
    holds = masked if holds is None else holds
    if not positions:
        return [], [], reached
    candidates = [i for i, flag in enumerate(masked) if flag]
    size = len(candidates)
    budget = min(size, keep) if keep > 0 else min(size, ceil_fp32(alpha, average))
    kept = set(range(len(positions)))
    if 0 < budget < size:
        mean = sum(score[i] for i in candidates) / size
        deviation = math.sqrt(sum((score[i] - mean) ** 2 for i in candidates) / size)
        base = {i for i in candidates if score[i] >= mean + deviation}
        if keep > 0 or len(base) < budget:
            base = set(sorted(candidates, key=lambda i: (-score[i], i))[: int(budget)])
        kept = set(base)
        for i, j in itertools.pairwise(candidates):
            if j in base and positions[j] - positions[i] == 1:
                kept.add(i)
        rightmost = max(positions[i] for i in kept)
        kept |= {i for i, flag in enumerate(holds) if flag and reached < positions[i] < rightmost}
    flags = [i in kept or not flag for i, flag in enumerate(holds)]
    last = max(position for position, flag in zip(positions, flags, strict=True) if flag)
    return flags, [min(x, last + 1) for x in limit], max(reached, last)


def random_sequence(rng: random.Random, block: int) -> dict[str, Any]:
    start = block * rng.randint(0, 3)
    count = rng.choice([0, 1, 2, 3, block // 2, block])
    positions = sorted(rng.sample(range(start, start + block), min(count, block)))
    earlier = [start - 2, start - 1] if start and rng.random() < 0.3 and positions else []
    levels = rng.choice([None, None, 1, 2, 4])
    share = rng.choice([0.0, 0.5, 0.9, 1.0])
    n = len(positions) + len(earlier)
    scores = [rng.gauss(0, 1) if levels is None else float(rng.randint(0, levels)) for _ in range(n)]
    return {
        "score": torch.tensor(scores).tolist(),  # rounded to fp32
        "masked": [False] * len(earlier) + [rng.random() < share for _ in positions],
        "positions": earlier + positions,
        "limit": [start] * len(earlier) + [start + block] * len(positions),
        "average": rng.choice([0.0, 1.0, 1.5, rng.uniform(1, 4)]),
        "reached": start - 1 + rng.choice([0, 0, rng.randint(0, block)]),
    }


def call(batch: list[dict[str, Any]], alpha: float, keep: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = {name: [x for s in batch for x in s[name]] for name in ("score", "masked", "positions", "limit")}
    holds = [x for s in batch for x in s["holds"]] if "holds" in batch[0] else None
    return torch.ops.dgraph.select_tokens(
        torch.tensor(rows["score"], dtype=torch.float32),
        torch.tensor(rows["masked"], dtype=torch.bool),
        torch.tensor(rows["positions"], dtype=torch.int64),
        cu_rows_of([len(s["positions"]) for s in batch]),
        torch.tensor(rows["limit"], dtype=torch.int32),
        torch.tensor([s["average"] for s in batch], dtype=torch.float32),
        torch.tensor([s["reached"] for s in batch], dtype=torch.int32),
        alpha,
        keep,
        None if holds is None else torch.tensor(holds, dtype=torch.bool),
    )


def one(score: list[float], alpha: float = 1.5, keep: int = 0, **changes: Any) -> Result:
    """A block that starts at 0, all masked, with consecutive positions unless changed."""
    n = len(score)
    sequence = {
        "score": score,
        "masked": [True] * n,
        "positions": list(range(n)),
        "limit": [n] * n,
        "average": 1.0,
        "reached": n,  # no placeholder is missing, so that the other rules show
        **changes,
    }
    kept, limit, reached = call([sequence], alpha, keep)
    return kept.tolist(), limit.tolist(), int(reached)


def kept_rows(result: Result) -> list[int]:
    return [i for i, flag in enumerate(result[0]) if flag]


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_against_the_loop_on_random_batches(seed: int, holds: bool) -> None:
    """holds: which rows hold masks is said, and independent of which are candidates."""
    rng = random.Random(seed)
    for _ in range(10):
        batch = [random_sequence(rng, rng.choice([4, 16, 32])) for _ in range(rng.randint(1, 6))]
        for sequence in batch if holds else ():
            sequence["holds"] = [rng.random() < 0.7 for _ in sequence["positions"]]
        alpha, keep = rng.choice([1.0, 1.2, 1.5, 3.0, math.inf]), rng.choice([0, 0, 0, 1, 5])
        kept, limit, reached = call(batch, alpha, keep)
        at = 0
        for i, sequence in enumerate(batch):
            end = at + len(sequence["positions"])
            expected = select_slowly(**sequence, alpha=alpha, keep=keep)
            assert (kept[at:end].tolist(), limit[at:end].tolist(), int(reached[i])) == expected, sequence
            at = end


def test_budget_without_outliers_is_the_top_scores() -> None:
    assert kept_rows(one([0, 4, 1, 5, 2, 3], alpha=4.0, positions=[0, 2, 4, 6, 8, 10])) == [1, 3, 4, 5]


def test_outliers_may_exceed_the_budget() -> None:
    # mean 4, population deviation sqrt(24): three scores of 10 are above 8.9, and the budget is 1
    score = [0.0, 10.0, 0.0, 10.0, 0.0, 10.0, 1.0, 1.0]
    assert kept_rows(one(score, alpha=1.0, positions=[2 * i for i in range(8)])) == [1, 3, 5]
    assert kept_rows(one(score, keep=1, positions=[2 * i for i in range(8)])) == [1]


def test_the_deviation_is_that_of_the_population() -> None:
    # mean 1/2, population deviation 1/2: the ones reach the threshold exactly; the sample deviation is larger
    assert kept_rows(one([1.0, 0.0, 1.0, 0.0], alpha=1.0, positions=[0, 2, 4, 6])) == [0, 2]


def test_ties_take_the_lower_row() -> None:
    score = [1.0, 2.0, 2.0, 2.0, 2.0, 0.0, 0.0, 0.0]
    assert kept_rows(one(score, alpha=2.0, keep=2, positions=[3 * i for i in range(8)])) == [1, 2]


def test_equal_scores_all_reach_the_threshold() -> None:
    assert kept_rows(one([0.1] * 7)) == list(range(7))


def test_context_is_one_hop_from_the_base_selection() -> None:
    assert kept_rows(one([0, 0, 0, 0, 9, 0, 0], alpha=1.0)) == [3, 4]  # not 2, which precedes a context row
    assert kept_rows(one([0, 0, 0, 0, 9, 0], alpha=1.0, positions=[0, 1, 2, 3, 5, 6])) == [4]  # a gap
    # the list neighbour is two positions away, the positional neighbour is decoded and kept anyway
    masked = [True, True, True, False, True, True]
    assert kept_rows(one([0, 0, 0, 0, 9, 0], alpha=1.0, masked=masked)) == [3, 4]


def test_placeholders_left_of_the_rightmost_kept_row_are_kept() -> None:
    score = [0.0, 0, 0, 0, 0, 9, 0, 0]
    assert kept_rows(one(score, alpha=1.0, reached=-1)) == [0, 1, 2, 3, 4, 5]
    assert kept_rows(one(score, alpha=1.0, reached=2)) == [3, 4, 5]
    assert kept_rows(one(score, alpha=1.0, reached=4)) == [4, 5]


def test_limit_and_progress_follow_the_last_kept_row() -> None:
    score = [0.0, 0, 9, 0, 0, 0]
    assert one(score, alpha=1.0, reached=3)[1:] == ([3] * 6, 3)
    assert one(score, alpha=1.0, reached=-1, limit=[2] * 6)[1:] == ([2] * 6, 2)
    decoded_tail = [True] * 5 + [False]
    assert one(score, alpha=1.0, reached=1, masked=decoded_tail)[1:] == ([6] * 6, 5)


def test_rows_that_hold_tokens_stay_and_masks_that_predict_none_go() -> None:
    """A block of 8 in which row i predicts position i + 1: 0, 3 and 4 are decoded."""
    block: dict[str, Any] = {"masked": [True, True, False, False, True, True, True, False], "reached": 7}
    block["holds"] = [False, True, True, False, False, True, True, True]
    sixth = [0.0, 0, 0, 0, 0, 9, 0, 0]
    assert kept_rows(one(sixth, alpha=1.0, **block)) == [0, 3, 4, 5]
    assert kept_rows(one(sixth, alpha=1.0, **{**block, "reached": 1})) == [0, 2, 3, 4, 5], "a placeholder"
    assert kept_rows(one(sixth, alpha=1.0, average=5.0, **block)) == list(range(8)), "none is evicted"
    fifth = one([0.0, 0, 0, 0, 9, 0, 0, 0], alpha=1.0, **block)
    assert fifth[1] == [5] * 8, "the last row is out of sight"
    del block["holds"]
    assert kept_rows(one(sixth, alpha=1.0, **block)) == [2, 3, 4, 5, 7], "the candidates are what is evicted"


def test_budget_is_computed_in_fp32() -> None:
    # 1.1 * 10 is above 11 in float64 and exactly 11 in fp32
    score = [float(i) for i in range(20)]
    result = one(score, alpha=1.1, average=10.0, positions=[2 * i for i in range(20)], limit=[40] * 20)
    assert len(kept_rows(result)) == 11


def test_an_infinite_alpha_keeps_everything() -> None:
    assert one([3.0, 1.0, 2.0], alpha=math.inf, average=0.0, reached=-1) == ([True] * 3, [3] * 3, 2)


def test_a_sequence_without_rows_keeps_its_progress() -> None:
    empty = {"score": [], "masked": [], "positions": [], "limit": [], "average": 1.0, "reached": 7}
    kept, limit, reached = call([empty, empty], 1.5, 0)
    assert (len(kept), len(limit), reached.tolist()) == (0, 0, [7, 7])


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.nan])
def test_alpha_must_be_positive(alpha: float) -> None:
    with pytest.raises(InputError, match="alpha must be above 0"):
        one([1.0, 2.0], alpha=alpha)

"""The oracle's importance, selection, commit and cache rules on small cases worked out by hand."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle.focus import choose, ready_columns, stopped
from tests.oracle.models import mask_id, random_weights, tiny_config
from tests.oracle.qwen3 import Cache, forward
from tests.oracle.scoring import Eviction, EvictRows, history_budget, importance, select_rows


def test_importance_is_the_pooled_softmax_over_masked_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(6, 4, 16, generator=generator), torch.randn(6, 2, 16, generator=generator)
    masked = [True, False, True, True, False, True]
    rows = [0, 2, 3, 5]
    expected = torch.zeros(6)
    for head in range(4):
        for i in rows:
            scores = [float(q[i, head] @ k[j, head // 2]) / 4.0 for j in rows]
            pooled = torch.tensor([max(scores[max(0, j - 1) : j + 2]) for j in range(4)])
            expected[rows] += pooled.softmax(0)
    torch.testing.assert_close(importance(q, k, masked), expected)
    assert float(importance(q, k, masked).sum()) == pytest.approx(4 * 4)
    assert not importance(q, k, [False] * 6).any()


def select(score: list[float], positions: list[int] | None = None, **options: Any) -> list[int]:
    options = {"average": 1.0, "reached": 99, "alpha": 1.0} | options
    masked = options.pop("masked", [True] * len(score))
    return select_rows(score, masked, positions or list(range(len(score))), **options)


def test_selection_rules() -> None:
    far = [0, 10, 20, 30, 40, 50]  # no neighbours
    assert select([0, 0, 9, 0, 0, 0], far) == [2]
    assert select([5, 5, -9, 4, -5, 0], far, alpha=3.0) == [0, 1, 3]
    assert select([5, 5, -5, -5], far[:4]) == [
        0,
        1,
    ]  # N_sigma above the history: equal to the threshold counts
    assert select([2, 2, 2, 2, 2, -9], far, alpha=2.0) == [
        0,
        1,
    ]  # none above the deviation: ties, lower first
    assert select([1, 1, 1, 1, 1, 1], far, alpha=2.0) == list(range(6))  # no deviation: all are above
    assert select([2, 2, 2, 2, 2, -9], far, keep=3) == [0, 1, 2]
    assert select([9, 8, -9, -9, -9, 7], far, keep=1) == [0]  # no N_sigma with a fixed budget
    assert select([0, 0, 9, 0, 0, 0], far, alpha=1.1, average=5.0) == list(range(6))
    assert select([0, 0, 9, 0, 0, 0], far, alpha=float("inf")) == list(range(6))


def test_selection_keeps_the_predecessor_one_hop_and_fills_unprocessed_positions() -> None:
    score = [0.0, 0.0, 0.0, 9.0, 0.0, 0.0]
    assert select(score) == [2, 3]
    assert select(score, [0, 1, 2, 4, 5, 6]) == [3]
    assert select(score, reached=-1) == [0, 1, 2, 3]
    assert select(score, reached=0) == [1, 2, 3]
    masked = [False, True, False, True, True, True]  # rows that are not masked stay, and are no predecessor
    assert select(score, masked=masked) == [0, 2, 3]
    assert select([9, 0, 0, 0, 0, 0], masked=[False] * 6) == list(range(6))


@pytest.mark.parametrize("after", [1, 2])
def test_eviction_writes_all_rows_up_to_layer_after_and_the_kept_rows_in_deeper_layers(after: int) -> None:
    config = tiny_config()
    weights = random_weights(config, 0)
    positions, tokens = list(range(16)), [5, 6, *[mask_id(config)] * 14]
    masked, limits = [False] * 2 + [True] * 14, [16] * 16
    cache = Cache(config, 16, weights["model.norm.weight"])
    with torch.no_grad():
        forward(weights, config, tokens, positions, limits, cache)
        before = [k.clone() for k in cache.k]
        tokens[1] = 7  # changes every key and value but those of layer 0
        eviction = Eviction(after=after, select="random", keep=1, noise=lambda step, p: torch.tensor(p) == 9)
        hook = EvictRows(eviction, 0, positions, masked, limits, average=1.0, reached=15)
        h = forward(weights, config, tokens, positions, limits, cache, hook)
    assert hook.kept == [0, 1, 8, 9]
    assert h.shape == (4, config.hidden)
    for layer in range(1, config.layers):
        changed = {p for p in positions if not torch.equal(cache.k[layer][p], before[layer][p])}
        assert changed == (set(positions) if layer <= after else {0, 1, 8, 9})


def test_the_budget_is_computed_in_fp32() -> None:
    assert history_budget(1.5, 1.0, 32) == 2
    assert history_budget(1.1, 10.0, 32) == 11  # 12 in float64
    assert history_budget(1.0, 0.25, 32) == 1
    assert history_budget(float("inf"), 1.0, 32) == 32


def test_commit_rule_and_cache_rule() -> None:
    confidence = {4: (7, 0.75), 5: (8, 0.875), 6: (9, 0.5), 8: (1, 0.875)}
    assert choose(confidence, 0.75, 0) == [(5, 8), (8, 1)]  # strictly above
    assert choose(confidence, 0.99, 0) == [(5, 8)]  # the best, of equals the first
    assert choose(confidence, None, 3) == [(4, 7), (5, 8), (8, 1)]
    block = [True, True, False, True, True]
    assert ready_columns(block, "off") == set()
    assert ready_columns(block, "dc") == {0, 1, 3, 4}
    assert ready_columns(block, "dc+") == {0, 3, 4}


def test_the_average_ignores_steps_that_decode_nothing() -> None:
    block, sequence = Eviction(), Eviction(average_over="sequence")
    assert block.average([], [3]) == 1.0
    assert block.average([0, 0], [3, 0, 0]) == 1.0
    assert block.average([4, 0, 1], [3, 4, 0, 1]) == 2.5
    assert sequence.average([], []) == 1.0
    assert sequence.average([], [3]) == 3.0
    assert sequence.average([4, 0, 1], [3, 4, 0, 1]) == 2.0


def test_a_stop_token_counts_once_no_mask_is_before_it() -> None:
    assert stopped([1, 2, -1, 3], 0, 4, -1, [2])
    assert not stopped([1, -1, 2, 3], 0, 4, -1, [2])
    assert not stopped([2, 1, 1, 3], 1, 4, -1, [2])
    assert not stopped([1, 1, 1, 2], 0, 3, -1, [2])


def test_the_oracle_is_independent() -> None:
    for path in Path(__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
                assert not any(name.split(".")[0] == "dgraph" for name in names), path

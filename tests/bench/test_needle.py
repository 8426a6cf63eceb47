"""Retrieval under eviction: what is asked, which steps count as reusing what was kept, and the tables."""

from __future__ import annotations

import json

import pytest
import torch

import dgraph
from benchmarks.needle import DENSE, Arm, Bench, Prompt, Score, Scores, arms_of, cells_of, tables
from benchmarks.tables import Report
from dgraph.errors import DgraphError

TOKENS = 24
MASKKV, SERVE = Arm("h2o", 8, "maskkv", {}), Arm("dllm_serve", 0.1, "dllm_serve", {})


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(dgraph.load("tiny_llada", torch.float32), "eager", TOKENS, 2, steps=32)


@pytest.fixture(scope="module")
def prompts(bench: Bench) -> list[Prompt]:
    return bench.prompts([64], [0.0, 1.0], 1)


def arm_of(recipe: str, **options: object) -> Arm:
    return Arm(recipe, 0, recipe, options)


def test_the_needle_is_where_the_depth_says(bench: Bench) -> None:
    found = bench.prompts([64], [0.0, 0.5, 1.0], 2)
    pairs = bench.pairs_within(64)
    assert [(p.length, p.depth) for p in found] == [(64, d) for d in (0.0, 0.0, 0.5, 0.5, 1.0, 1.0)]
    for prompt in found:
        *facts, question = bench.tokenizer.decode(prompt.ids).split(". ")
        key, value = question.split()[-1].rstrip("?"), prompt.answer.rpartition("#### ")[2]
        assert len(facts) == pairs
        assert facts[round(prompt.depth * (pairs - 1))].split() == [key, "is", value]
        assert abs(len(prompt.ids) - 64) < 8


def test_every_step_of_the_dense_model_sees_the_prompt(bench: Bench, prompts: list[Prompt]) -> None:
    found = bench.cells(arm_of(DENSE), prompts)
    assert set(found) == {(64, 0.0), (64, 1.0)}
    total = Score.of(found.values())
    assert (total.prompts, total.hits, total.steps, total.reused, total.late) == (2, 2, 2 * TOKENS, 0, 0)
    assert 20 < total.tokens <= 2 * TOKENS


@pytest.mark.parametrize(
    ("recipe", "budget", "full"), [("maskkv", {"pairs": 1000}, 1), ("dllm_serve", {"ratio": 1.0, "delay": 1}, 2)]
)
def test_steps_after_the_choice_reuse_what_was_kept(
    bench: Bench, prompts: list[Prompt], recipe: str, budget: dict[str, float], full: int
) -> None:
    total = Score.of(bench.cells(arm_of(recipe, **budget), prompts).values())
    assert (total.hits, total.steps, total.reused) == (2, 2 * TOKENS, 2 * (TOKENS - full))
    assert total.tokens - 2 * full <= total.late <= total.tokens


def test_nothing_is_found_among_no_keys(bench: Bench, prompts: list[Prompt]) -> None:
    total = Score.of(bench.cells(arm_of("dllm_serve", pairs=0, ratio=0.001), prompts).values())
    assert (total.prompts, total.hits) == (2, 0)


def test_an_arm_that_cannot_be_built_says_why(bench: Bench, prompts: list[Prompt]) -> None:
    with pytest.raises(DgraphError, match="selector"):
        bench.cells(arm_of("maskkv", selector="none"), prompts)


def test_arms_come_by_budget() -> None:
    arms = arms_of(["h2o", "snapkv"], [8, 16], [0.1])
    assert [arm.label for arm in arms] == [
        DENSE, "dllm_serve, 0.1", "sparse_dllm, 0.1", "h2o, 8", "snapkv, 8", "h2o, 16", "snapkv, 16"
    ]  # fmt: skip


def results() -> dict[Arm, Scores]:
    """Two lengths and two depths, 4 prompts each; h2o finds what is deepest."""
    cells = [(n, d) for n in (128, 256) for d in (0.0, 1.0)]
    return {
        Arm(DENSE, 0, DENSE, {}): {cell: Score(4, 4, 40, 0, 30, 0) for cell in cells},
        MASKKV: {(n, d): Score(4, 4 * int(d == 1), 40, 36, 30, 27) for n, d in cells},
        Arm("h2o", 16, "maskkv", {}): {(n, d): Score(4, 4 if d else 1, 40, 36, 30, 24) for n, d in cells},
        Arm("snapkv", 16, "maskkv", {}): {cell: Score(4, 2, 40, 36, 0, 0) for cell in cells},
        SERVE: {(n, d): Score(4, n // 64, 40, 32, 30, 30) for n, d in cells},
    }


def test_tables() -> None:
    report = Report("title")
    tables(report, results(), {"squeeze": "not measured."})
    assert [len(rows) for *_, rows, _ in report.tables] == [3, 4, 2, 2, 4]
    (_, columns, rows, note), by_length, _, by_length_serve, reuse = report.tables
    assert columns == ["pairs", "8", "16"]
    assert rows[0] == ["dense", "100 (81 to 100)", "100 (81 to 100)"]
    assert rows[1] == ["h2o", "50 (28 to 72)", "62.5 (39 to 82)"]
    assert rows[2] == ["snapkv", "n/a", "50 (28 to 72)"]
    assert note == "squeeze was left out: not measured."
    assert by_length[2][0] == ["h2o, 128 tokens", "50", "62.5"]
    assert by_length_serve[2] == [["dllm_serve, 128 tokens", "50"], ["dllm_serve, 256 tokens", "100"]]
    assert reuse[2] == [
        ["dense", 10.0, "0", "0"],
        ["h2o", 10.0, "90", "85"],
        ["snapkv", 10.0, "90", "n/a"],
        ["dllm_serve", 10.0, "80", "100"],
    ]
    cells = json.loads(json.dumps(cells_of(results())))
    assert len(cells) == 20
    assert sum(cell["hits"] for cell in cells if cell["arm"] == "h2o") == 8 + 10

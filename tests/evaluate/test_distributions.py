"""Distributions of a decode against plain loops over the same steps, and their tables, JSON and plot."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dgraph.compiler.compiled_model import CompiledModel
from dgraph.evaluate import distribution_report as report
from dgraph.evaluate.distributions import COSINES, SIGMAS, Distributions, eviction_bound
from dgraph.ops import Op
from dgraph.runtime.stats import StepRecord
from tests.oracle.scoring import importance
from tests.recipes import bidirectional
from tests.recipes.block_causal import EOS, LAYERS, optimized, prompts_for, setup_for

BLOCK = 16
SETTINGS: dict[str, Any] = {"max_new_tokens": 27, "threshold": 0.6}


class Watched:
    """A decode with its distributions, and the same calls and records kept apart."""

    def __init__(self, program: CompiledModel, prompts: Sequence[Sequence[int]], **settings: Any):
        layers = program.spec.layers
        self.found = Distributions(layers, BLOCK, (EOS,))
        self.records: list[StepRecord] = []
        self.calls: list[list[tuple[Any, ...]]] = [[]]

        def see(op: Op, args: Any, result: Any) -> None:
            if op.name == "kv_write":
                self.calls[-1].append((args[0].clone(),))
            elif op.name == "paged_attention":
                self.calls[-1][-1] += (args[0].clone(), result.clone())

        def observe(record: StepRecord) -> None:
            self.found.observe(record)
            self.records.append(record)
            self.calls.append([])

        step = program.programs["step"]
        with step.observed(see), self.found.watching(step):
            program.generate(input_ids=prompts, observer=observe, **SETTINGS | settings)


@pytest.fixture(scope="module")
def dense() -> Watched:
    return Watched(optimized(setup_for(BLOCK), "dense"), prompts_for(BLOCK))


def test_tokens_of_each_step(dense: Watched) -> None:
    want: Counter[int] = Counter()
    for record in dense.records:
        for prompt in record.sequence[record.candidate].unique():
            want[int(record.committed[record.sequence == prompt].sum())] += 1
    assert dense.found.committed == want
    assert dense.found.tokens_per_step == sum(n * c for n, c in want.items()) / want.total()
    assert len(want) > 2


def test_importance_and_its_rise_are_those_of_plain_loops(dense: Watched) -> None:
    block, masks = (torch.zeros(LAYERS, 3, dtype=torch.float64) for _ in range(2))
    counts, bins = torch.zeros(3, dtype=torch.int64), torch.zeros(3, len(SIGMAS) + 1, dtype=torch.int64)
    for record, calls in zip(dense.records, dense.calls, strict=False):
        for prompt in record.sequence[record.candidate].unique():
            mine = (record.sequence == prompt).nonzero()[:, 0]
            inside = [0 <= int(record.column[row]) < BLOCK for row in mine]
            candidate = record.candidate[mine].tolist()
            scores = []
            for layer, (k, q, _) in enumerate(calls):
                both = [importance(q[mine], k[mine], member) / q.shape[1] for member in (inside, candidate)]
                scores.append(both[1].double())
                for at, row in enumerate(mine.tolist()):
                    kind = 0 if not candidate[at] else 1 if record.committed[row] else 2
                    if inside[at] and (kind == 0 or int(record.token[row]) != EOS):
                        block[layer, kind] += both[0][at]
                        masks[layer, kind] += both[1][at]
                        counts[kind] += layer == 0
            delta = (scores[1] - scores[0])[record.candidate[mine]]
            if delta.std(correction=0) > 0:
                levels = ((delta - delta.mean()) / delta.std(correction=0)).tolist()
                for row, level in zip(mine[record.candidate[mine]].tolist(), levels, strict=True):
                    if int(record.token[row]) != EOS:
                        bins[1 if record.committed[row] else 2, sum(level >= edge for edge in SIGMAS)] += 1
    found = dense.found
    assert found.rows.tolist() == [counts.tolist()] * LAYERS
    assert counts.min() > 20
    torch.testing.assert_close(found.block, block, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.candidates, masks, rtol=1e-4, atol=1e-4)
    assert (found.delta - bins).abs().sum() <= 2, "but for a level at an edge"
    assert found.delta[1:].sum() > 100


def test_cosines_are_those_of_plain_loops(dense: Watched) -> None:
    sums, counts = torch.zeros(LAYERS, dtype=torch.float64), 0
    before: dict[tuple[int, int], list[torch.Tensor]] = {}
    for record, calls in zip(dense.records, dense.calls, strict=False):
        now = {}
        for row, place in enumerate(zip(record.sequence.tolist(), record.positions.tolist(), strict=True)):
            now[place] = [context[row].flatten().double() for *_, context in calls]
            for layer, old in enumerate(before.get(place, ())):
                sums[layer] += torch.cosine_similarity(now[place][layer], old, dim=0)
                counts += layer == 0
        before = now
    torch.testing.assert_close(dense.found.cosine, sums, rtol=1e-6, atol=1e-6)
    assert dense.found.cosines.sum(dim=1).tolist() == [counts] * LAYERS
    assert counts > 100


def test_layers_after_an_eviction_are_left_out() -> None:
    found = Watched(optimized(setup_for(BLOCK), "focus", full_steps=0), prompts_for(BLOCK)).found
    assert found.rows[0].sum() > found.rows[1].sum() >= found.rows[2].sum()
    assert found.committed.total() > 10


@pytest.mark.parametrize("recipe", ["dense", "fast_dllm"])
def test_bidirectional_models_are_watched_as_well(recipe: str) -> None:
    setup = bidirectional.setup_of("llada")
    found = Watched(setup.optimized(recipe, BLOCK), bidirectional.prompts_for(BLOCK)).found
    assert found.probed
    assert found.cosines[0].sum() > 100


def test_tables_json_and_plot(dense: Watched, tmp_path: Path) -> None:
    found = {"dense": dense.found, "nothing": Distributions(LAYERS, BLOCK)}
    titles = [title[0] for title, _ in report.tables(found)]
    assert titles == [
        "tokens of a step, % of steps",
        "importance (1: equal share)",
        "delta in sigma, % of rows",
        "cosine of contexts, % of rows",
    ]
    for columns, rows in report.tables(found):
        assert all(len(row) == len(columns) for row in rows)
    (_, steps), (_, layers), (_, kinds), (_, cosines) = report.tables(found)
    assert [len(rows) for rows in (steps, layers, kinds, cosines)] == [1, LAYERS, 2, LAYERS]
    assert sum(map(float, steps[0][3:])) == pytest.approx(100, abs=0.4)
    told = json.loads(json.dumps(dense.found.to_json()))
    assert sum(told["tokens per step"].values()) == dense.found.committed.total()
    assert told["delta"]["bound"] == eviction_bound(told["delta"]["gamma"])
    assert len(told["cosine"]["rows"][0]) == len(COSINES) + 1
    assert found["nothing"].to_json()["importance"] is None
    if report.can_plot(tmp_path / "found.png"):
        report.plot(found, tmp_path / "found.png", "title")
        assert (tmp_path / "found.png").stat().st_size > 10_000
    assert not report.can_plot(tmp_path / "found.nothing")

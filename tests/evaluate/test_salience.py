"""Salient rows: means by layer and step, what the results file keeps of them, table and plot."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from dgraph.errors import InputError
from dgraph.evaluate import run as runs
from dgraph.evaluate.arms import Choice, expand
from dgraph.evaluate.questions import Question
from dgraph.evaluate.report import plot_salience, rows_table, salience_path, salience_table, tables
from dgraph.evaluate.results import Keys, Result, Store
from dgraph.evaluate.run import Evaluation
from dgraph.evaluate.salience import Counted, Salience, rows_run
from dgraph.families import Model
from dgraph.ir.graph import Graph
from dgraph.passes import Effect, Pass, Report
from dgraph.plans.papers import OURS, Paper
from dgraph.runtime.stats import GenerationStats
from dgraph.types.shapes import InputSpec
from tests.evaluate.programs import load, optimize
from tests.recipes.bidirectional import setup_of

aten = torch.ops.aten
ONE = Counted(("k1", "k2", "k3"), (0, 1), (20, 10, 20), ((20, 20), (5, 1), (2, 6)))
"""A full step, and two sparse ones: shares 0.5 and 0.1, then 0.1 and 0.3."""
TWO = Counted(("k4",), (0, 1), (4, 4), ((4, 4), (1, 4)))
"""Shorter; shares 0.25 and 1 in its only sparse step."""
QUESTIONS = [Question("one", f"w3 w{i}", "w9") for i in range(5)]
Make = Callable[..., Evaluation]


@pytest.fixture(scope="session")
def canvas(folder: Path) -> Model:
    """A bidirectional model that reads prompts."""
    model = setup_of("llada").model
    return replace(model, spec=replace(model.spec, block_length=8), tokenizer=load(folder).tokenizer)


@pytest.fixture
def make(canvas: Model, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr(runs, "optimize", optimize)

    def build(path: Path | None = None, recipes: tuple[Choice, ...] = (Choice("dyllm"),)) -> Evaluation:
        arms, references = expand(canvas.spec, recipes, [Choice("", {"steps": 8})], {})
        keys = Keys("weights", {"max_new_tokens": 16})
        return Evaluation(canvas, arms, references, QUESTIONS, Store(path), keys, 16, max_batch=2, backend="eager")

    return build


def result(key: str) -> Result:
    return Result(key, "arm", "one", "prompt", None, "text", [5], 3, 8, 24, 0.5)


def fake_stats() -> GenerationStats:
    stats = GenerationStats(salient=[[20, 20], [5, 1]])
    stats.count_stage("prefill", 7, 8, 0.0)
    for rows in (20, 10):
        stats.count_stage("prefix", rows, 32, 0.0)
        stats.count_stage("suffix", rows // 2, 32, 0.0)
    return stats


def test_a_batch_is_what_its_statistics_say() -> None:
    counted = Counted.of(["k1", "k2"], [1, 2], fake_stats())
    assert counted == Counted(("k1", "k2"), (1, 2), (20, 10), ((20, 20), (5, 1)))
    assert [counted.full(step) for step in (0, 1)] == [True, False]
    assert Counted.from_json(json.loads(json.dumps(counted.to_json()))) == counted
    assert Counted.of(["k1"], [], GenerationStats()) is None


def test_means_of_one_batch_by_hand() -> None:
    salience = Salience.of([(ONE, 3)])
    assert salience is not None
    assert salience.by_layer == pytest.approx([(0.5 + 0.1) / 2, (0.1 + 0.3) / 2])
    assert salience.by_step == pytest.approx([1.0, 0.3, 0.2])
    assert [salience.cell(step, 1) for step in range(3)] == [None, *map(pytest.approx, (0.1, 0.3))]
    assert salience.mean() == pytest.approx(0.25)
    assert salience.mean(2, 3) == pytest.approx(0.2)
    assert salience.mean(0, 1) is None
    assert salience.to_json() == {
        "prompts": 3,
        "mean": salience.mean(),
        "layers": [0, 1],
        "by_layer": salience.by_layer,
        "by_step": salience.by_step,
    }


def test_batches_weigh_by_their_prompts() -> None:
    salience = Salience.of([(ONE, 3), (TWO, 1)])
    assert salience is not None
    assert salience.prompts == 4
    assert salience.by_layer == pytest.approx([(3 * 0.5 + 3 * 0.1 + 0.25) / 7, (3 * 0.1 + 3 * 0.3 + 1) / 7])
    assert salience.by_step == pytest.approx([1.0, (3 * 0.6 + 1.25) / 2 / 4, 0.2])
    shifted = replace(TWO, rows=(4, 4), salient=((1, 3), (4, 4)))
    mixed = Salience.of([(ONE, 1), (shifted, 1)])
    assert mixed is not None
    assert mixed.by_step == pytest.approx([(1 + 0.5) / 2, (0.3 + 1) / 2, 0.2]), "full for one of two, both times"
    assert mixed.cell(0, 0) == 0.25, "of the batch for which it was sparse"


def test_without_sparse_steps_there_is_no_mean() -> None:
    assert Salience.of([]) is None
    full = Salience.of([(replace(TWO, rows=(4,), salient=((4, 4),)), 1)])
    assert full is not None
    assert (full.mean(), full.by_layer, full.by_step) == (None, None, [1.0])


def test_the_file_keeps_batches_and_resumes(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    Store(path).add([result("k1"), result("k2"), result("k3")], ONE)
    store = Store(path)
    store.add([result("k4")], TWO)
    for one in (store, Store(path)):
        assert len(one) == 4
        assert one.counted(["k1", "k4", "k3", "k1", "k9"]) == [(ONE, 2), (TWO, 1)]
    again = replace(TWO, keys=("k4", "k5"))
    store.add([result("k4"), result("k5")], again)
    for one in (store, Store(path)):
        assert one.counted(["k4", "k5"]) == [(TWO, 1), (again, 1)], "a result keeps the batch that it came from"
    before = path.read_text()
    store.add([result("k4")], again)
    assert path.read_text() == before


def test_a_file_without_batches_is_read(tmp_path: Path) -> None:
    Store(tmp_path / "r.jsonl").add([result("k1")])
    assert '"batch"' not in (tmp_path / "r.jsonl").read_text()
    assert Store(tmp_path / "r.jsonl").counted(["k1"]) == []


@pytest.mark.parametrize(
    ("entry", "value"),
    [("batch", []), ("batch", [3]), ("rows", [20, 10]), ("rows", [20, 0, 20]), ("layers", [0]), ("salient", 3)],
)
def test_a_damaged_batch_costs_its_counts_alone(tmp_path: Path, entry: str, value: Any) -> None:
    path = tmp_path / "r.jsonl"
    Store(path).add([result("k1")], ONE)
    head, *rest = path.read_text().splitlines(keepends=True)
    path.write_text("".join([json.dumps({**json.loads(head), entry: value}) + "\n", *rest]))
    with pytest.warns(UserWarning, match=r"1 damaged line\(s\) left out \(1\)"):
        store = Store(path)
    assert store.get("k1") == result("k1")
    assert store.counted(["k1"]) == []


def test_a_torn_write_is_decoded_again_with_its_counts(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    Store(path).add([result("k4")], TWO)
    path.write_text(path.read_text().splitlines(keepends=True)[0][:30])
    with pytest.warns(UserWarning, match="damaged"):
        store = Store(path)
    store.add([result("k4")], TWO)
    with pytest.warns(UserWarning, match="damaged"):
        assert Store(path).counted(["k4"]) == [(TWO, 1)]


def test_an_evaluation_counts_what_decoding_counts(make: Make, canvas: Model, tmp_path: Path) -> None:
    cache = Choice("dllm_cache", {"response_interval": 4, "rho": 0.5})
    evaluation = make(tmp_path / "r.jsonl", (Choice("dyllm", {"tau": 0.9, "full_steps": 2}), cache))
    evaluation.run()
    for arm, layers in zip(evaluation.arms, ([0, 1, 2], [1, 2]), strict=True):
        program = optimize(canvas, arm.built, backend="eager")
        total, weight = [0.0] * len(layers), 0
        for first in range(0, len(QUESTIONS), 2):
            batch = QUESTIONS[first : first + 2]
            prompts = [q.prompt for q in batch]
            stats = program.generate(prompts, max_new_tokens=16, policy=arm.policy).stats
            for rows, salient in zip(stats.step_rows, stats.salient, strict=True):
                if min(salient) < rows:
                    weight += len(batch)
                    total = [t + len(batch) * n / rows for t, n in zip(total, salient, strict=True)]
        found = evaluation.salience(arm)
        assert found is not None
        assert found.prompts == len(QUESTIONS)
        assert list(found.layers) == layers
        assert found.by_layer == pytest.approx([t / weight for t in total])
        assert 0 < min(found.by_layer or [0]) < 1
    again = make(tmp_path / "r.jsonl", (Choice("dyllm", {"tau": 0.9, "full_steps": 2}), cache))
    assert again.to_json() == evaluation.to_json()
    assert [arm["salience"]["layers"] for arm in again.to_json()["arms"]] == [[0, 1, 2], [1, 2]]
    titles, rows = tables(again)[-1]
    assert titles[:5] == ("salient rows, % of a sparse step", "all", "layer 0", "layer 1", "layer 2")
    assert len(titles) == 5 + 4
    assert rows[1][2] == "n/a", "dLLM-Cache runs its first layer on all rows"


def test_an_interrupted_run_merges(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make()
    whole.run()
    decode, calls = Evaluation._decode, []

    def once(self: Evaluation, *args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return decode(self, *args)

    monkeypatch.setattr(Evaluation, "_decode", once)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "r.jsonl").run()
    resumed = make(tmp_path / "r.jsonl")
    resumed.run()
    assert len(calls) == 4
    assert resumed.salience(resumed.arms[0]) == whole.salience(whole.arms[0])


def test_table_by_hand(make: Make) -> None:
    evaluation = make()
    (arm,) = evaluation.arms
    keys = [evaluation.keys.of(arm, q.prompt) for q in QUESTIONS[:3]]
    results = [replace(result(key), prompt=q.prompt) for key, q in zip(keys, QUESTIONS, strict=False)]
    evaluation.store.add(results, replace(ONE, keys=tuple(keys)))
    titles, (row,) = salience_table(evaluation)
    assert titles[1:] == ("all", "layer 0", "layer 1", "layer 2", "step 0", "step 1", "step 2")
    assert row == (arm.label, "25", "30", "20", "n/a", "n/a", "30", "20")


@dataclass(frozen=True)
class EvenRows(Pass):
    """A pass from outside: layer 1 runs on even rows; `counts` False makes the output `salient` by hand."""

    counts: bool = True

    effect: ClassVar[Effect] = Effect.APPROXIMATE
    summary: ClassVar[str] = "layer 1 on even rows"
    papers: ClassVar[tuple[Paper, ...]] = OURS
    signature: ClassVar[frozenset[str]] = frozenset({"full", "salient", "a_cache_*", "f_cache_*"})

    def run(self, graph: Graph, report: Report) -> None:
        layer = graph.row_layer(graph.find("paged_attention", 1)[0])
        assert not isinstance(layer, str), layer
        call = graph.calling(report.name)
        full = graph.add_input(InputSpec("full", torch.bool, ("N",)))
        odd = call(
            layer.write, aten.eq.Scalar, call(layer.write, aten.remainder.Scalar, graph.input("positions"), 2), 1
        )
        flags = call(layer.write, aten.logical_or.default, full, call(layer.write, aten.logical_not.default, odd))
        graph.run_rows(layer, flags, by=report.name)
        if self.counts:
            graph.count_rows([flags], by=report.name)
        else:
            total = call(graph.output, aten.sum.dim_IntList, flags, [0], True)
            graph.set_outputs({**graph.results(), "salient": total})
        graph.sweep()
        report.did("even rows", 1)


def with_pass(evaluation: Evaluation, step: Pass) -> Evaluation:
    (arm,) = evaluation.arms
    evaluation.arms = [replace(arm, built=arm.built.inserting(step, after="CacheKV"))]
    return evaluation


def test_a_pass_from_outside_counts_the_rows_that_it_runs(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    evaluation = with_pass(make(path, (Choice("fast_dllm"),)), EvenRows())
    evaluation.run()
    (arm,) = evaluation.arms
    found = evaluation.salience(arm)
    assert found is not None
    assert found.layers == (1,)
    batches = evaluation.store.counted(evaluation.keys.of(arm, q.prompt) for q in QUESTIONS)
    rows = sum(sum(counts) for counted, _ in batches for counts in counted.salient)
    decoded = sum(result.decoded for _, result in evaluation.found(arm))
    assert evaluation.rows_run(arm) == {1: pytest.approx(rows / decoded)}
    titles, (row,) = rows_table(evaluation)
    assert titles == ("rows that a layer ran on, per token", "mean", "layer 0", "layer 1", "layer 2")
    assert row[1:] == (f"{rows / decoded:.1f}", "n/a", f"{rows / decoded:.1f}", "n/a")
    again = with_pass(make(path, (Choice("fast_dllm"),)), EvenRows())
    assert again.salience(arm) == found, "the file says which layer it was"


def test_counts_of_an_unknown_make_are_refused_with_advice(make: Make) -> None:
    evaluation = with_pass(make(recipes=(Choice("fast_dllm"),)), EvenRows(counts=False))
    evaluation.run()
    (said,) = evaluation.failed.values()
    assert said.startswith(
        "output salient is made by sum_dim_int_list, and nothing says which layers it counts. Make it"
    )
    assert evaluation.to_json()["arms"][0]["salience"] is None


def test_rows_run_by_hand() -> None:
    # Three prompts of ONE ran on 27 and 27 rows, and half of TWO's on (4 + 1) / 2 and (4 + 4) / 2.
    two = replace(TWO, keys=("k4", "k5"))
    assert rows_run([(ONE, 3), (two, 1)], 10) == {0: pytest.approx(2.95), 1: pytest.approx(3.1)}
    assert rows_run([], 0) == {}


def test_a_recipe_without_salience_has_no_table_and_no_plot(make: Make, tmp_path: Path) -> None:
    evaluation = make(recipes=(Choice("dense"),))
    evaluation.run()
    assert evaluation.salience(evaluation.arms[0]) is None
    assert evaluation.to_json()["arms"][0]["salience"] is None
    assert salience_table(evaluation)[1] == []
    assert len(tables(evaluation)) == 1
    plot_salience(evaluation, tmp_path / "p.png", "title")
    assert list(tmp_path.iterdir()) == []


def test_a_plot_per_evaluation(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    evaluation = make(recipes=(Choice("dense"), Choice("dyllm"), Choice("dllm_cache")))
    evaluation.run()
    path = salience_path(tmp_path / "plot.png")
    assert path.name == "plot-salient.png"
    plot_salience(evaluation, path, "title")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match="cannot be written"):
        plot_salience(evaluation, tmp_path / "no" / "p.png", "title")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pip install 'dgraph\[bench\]'"):
        plot_salience(evaluation, path, "title")

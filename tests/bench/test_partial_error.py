"""What the errors of partial attention are measured to be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import dgraph
from benchmarks.partial_error import Compare, Errors, Measured, errors, measure, plot, quantiles, tables
from benchmarks.tables import Report
from dgraph.ops import OPS
from tests.recipes.bidirectional import LAYERS, Setup, setup_of

PROMPTS = [[11, 12, 13, 14, 15], [21, 22, 23]]


@pytest.fixture(scope="module")
def setup() -> Setup:
    return setup_of("llada")


@pytest.fixture(scope="module")
def measured(setup: Setup) -> Measured:
    return measure(setup.optimized("dyllm", 8, tau=0.9, full_steps=2), PROMPTS, 16)


def test_errors_by_hand() -> None:
    got = torch.tensor([[[3.0], [4.0]], [[0.0], [2.0]], [[1.0], [1.0]]])
    exact = torch.tensor([[[3.0], [0.0]], [[0.0], [1.0]], [[1.0], [1.0]]])
    l2, angle = errors(got, exact)
    assert l2.tolist() == pytest.approx([4 / 3, 1.0, 0.0])
    assert angle.tolist() == pytest.approx([1 - 0.6, 0.0, 0.0])


def test_quantiles_are_values_that_were_met() -> None:
    assert quantiles(torch.arange(100.0).flip(0)) == (49.0, 94.0)
    assert quantiles(torch.tensor([7.0])) == (7.0, 7.0)


def test_nothing_is_updated_above_a_tau_of_one(setup: Setup) -> None:
    found = measure(setup.optimized("dyllm", 8, tau=2.0, full_steps=2), PROMPTS, 16)
    assert (found.updated, found.worst_exact, found.over()) == (0.0, 0.0, None)


def test_an_update_is_not_exact_and_a_salient_row_is(measured: Measured) -> None:
    assert measured.worst_exact == 0.0
    assert 0 < measured.updated < 1
    everything = measured.over()
    assert everything is not None
    assert 0 < everything.l2.max() < torch.inf
    assert everything.angle.max() > 0
    assert 0 < everything.prompt.sum() < len(everything.prompt)
    assert measured.layers == list(range(LAYERS))
    assert {step for step, _ in measured.found} <= set(range(2, measured.steps)), "the first two steps are full"
    assert {layer for _, layer in measured.found} == set(range(LAYERS))
    parts = [measured.over(layer=layer) for layer in range(LAYERS)]
    assert sum(len(p.l2) for p in parts if p is not None) == len(everything.l2)


def test_a_row_is_compared_with_attention_over_the_same_keys() -> None:
    samples = OPS["partial_attention"].samples(torch.Generator().manual_seed(0))
    args = next(s.args for s in samples if s.name == "some rows")
    q, k_cache, v_cache, _, index, cu_changed, c_cache, *_, table, cu_rows, limit, scale, _ = args
    compare = Compare([5], [100, 100])
    called = (*args[:6], c_cache.clone(), *args[7:])
    context, salient = OPS["partial_attention"].overload(*called)
    compare(OPS["partial_attention"], called, (context, salient))
    exact = OPS["paged_attention"].overload(q, k_cache, v_cache, table, cu_rows, limit, scale)
    rows = sorted(set(range(len(q))) - set(index[: int(cu_changed[-1])].tolist()))
    assert len(rows) < len(q)
    ((at, found),) = compare.found.items()
    assert at == (0, 5)
    assert found.l2.tolist() == pytest.approx(
        [float((context[r] - exact[r]).norm() / exact[r].norm()) for r in rows], rel=1e-4
    )
    assert compare.updated == len(rows)


def test_a_program_without_partial_attention_is_refused(setup: Setup) -> None:
    with pytest.raises(ValueError, match="'dense' has no partial attention"):
        measure(dgraph.optimize(setup.model, "dense", backend="eager"), PROMPTS, 8)


def test_tables_and_plot(measured: Measured, tmp_path: Path) -> None:
    report = Report("title")
    tables(report, {0.9: measured})
    titles = [columns for _, columns, _, _ in report.tables]
    assert titles[0] == ["error", *(f"layer {n}" for n in range(LAYERS)), "updated"]
    assert titles[2] == ["error", "prompt", "response", "all", "updated"]
    everything = measured.over()
    assert everything is not None
    half, most = quantiles(everything.l2)
    assert report.tables[2][2][0][3] == f"{half:.2g} / {most:.2g}"
    report.write(None, tmp_path / "r.json")
    cells = json.loads((tmp_path / "r.json").read_text())["data"]["0.9"]["cells"]
    assert sum(cell["rows"] for cell in cells) == len(everything.l2)
    pytest.importorskip("matplotlib")
    plot({0.9: measured}, tmp_path / "p.png", "title")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_errors_join() -> None:
    one = Errors(torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([True]))
    both = Errors.of([one, Errors(torch.tensor([3.0]), torch.tensor([4.0]), torch.tensor([False]))])
    assert (both.l2.tolist(), both.angle.tolist(), both.prompt.tolist()) == ([1.0, 3.0], [2.0, 4.0], [True, False])
    assert both.where(both.prompt).l2.tolist() == [1.0]

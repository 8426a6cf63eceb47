"""Cost models: what they say, and what is fitted to measured steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dgraph.engine.scheduling.cost_model import LLADA_8B_H200, CostModel
from dgraph.errors import InputError

COSTS = CostModel(rows=(10, 20, 40), seconds=(1.0, 1.0, 3.0), per_key=0.5, constant=0.25)


def test_steps_are_linear_between_what_was_measured() -> None:
    assert [COSTS.products(rows) for rows in (1, 10, 15, 20, 30, 40, 60)] == [1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 5.0]
    assert COSTS.step(30, 4) == 0.25 + 2.0 + 2.0
    assert COSTS.step(0, 0) == 0.0
    assert CostModel((8,), (2.0,)).products(16) == 4.0


def test_rows_that_are_enough() -> None:
    assert COSTS.enough(15) == 15, "up to the knee a row is for free"
    model = CostModel((100, 200), (1.0, 2.0))
    assert [model.enough(1000, times) for times in (1.0, 1.5, 8.0, 99.0)] == [1, 150, 800, 1000]
    assert 1500 < LLADA_8B_H200.enough(8192) < 2000


def test_a_fit_finds_the_model_again() -> None:
    truth = CostModel((8, 64, 512), (0.004, 0.005, 0.03), per_key=2e-6)
    samples = [(r, k, truth.step(r, k)) for r in (8, 16, 64, 128, 256, 512) for k in (100, 5000, 90000)]
    found = CostModel.fit(samples, knots=(8, 64, 512))
    assert found.seconds == pytest.approx(truth.seconds)
    assert found.per_key == pytest.approx(truth.per_key)
    whole = CostModel.fit(samples)
    assert whole.rows == (8, 16, 64, 128, 256, 512)
    assert all(whole.step(r, k) == pytest.approx(s) for r, k, s in samples)
    assert CostModel.fit([(4, 0, 1.0), (8, 0, 2.0)]).seconds == pytest.approx((1.0, 2.0))
    assert len(CostModel.fit([(r, 0, r * 0.1) for r in range(1, 60)]).rows) == 16
    with pytest.raises(InputError, match="3 row counts needs at least as many steps, got 2"):
        CostModel.fit([(4, 0, 1.0), (8, 0, 2.0)], knots=(1, 2, 3))


def test_json(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(COSTS.to_json()))
    assert CostModel.read(file) == COSTS
    for text in ("{", '{"rows": [1]}', '{"rows": [1], "seconds": [1], "colour": 1}', "[]"):
        file.write_text(text)
        with pytest.raises(InputError, match="cost model"):
            CostModel.read(file)
    with pytest.raises(InputError, match="cannot be read"):
        CostModel.read(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("rows", "seconds", "message"),
    [
        ((1, 2), (1.0,), "as many seconds as row counts, got 1 and 2"),
        ((), (), "as many seconds as row counts"),
        ((2, 1), (1.0, 1.0), "must ascend"),
        ((1, 2), (1.0, -1.0), "must not be negative"),
    ],
)
def test_tables_that_make_no_sense(rows: tuple[int, ...], seconds: tuple[float, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        CostModel(rows, seconds)

"""Products by stored weights in plain torch, against the weights that they stand for."""

from __future__ import annotations

import pytest
import torch

from dgraph.families.quantised import KINDS, ROW_KINDS, WHOLE, Format, QuantisedRows, quantise, quantised_rows
from dgraph.ops.products import stored
from dgraph.ops.products.stored import multiply
from tests.amounts import every_pair

FORMATS = (
    Format("fp8"),
    Format("fp8", (8, 16)),
    Format("int8"),
    Format("int8", (WHOLE, WHOLE)),
    Format("int8", (1, 8), zeros=True),
    Format("int4"),
    Format("int4", (1, 8), zeros=True),
)
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@every_pair(
    ("format", FORMATS),
    ("dtype", list(TOLERANCE)),
    ("rows", [1, 5, 40]),
    ("biased", [False, True]),
)
def test_products_are_those_of_the_weights_that_are_stood_for(
    format: Format, dtype: torch.dtype, rows: int, biased: bool
) -> None:
    draw = torch.Generator().manual_seed(rows)
    weight = quantise(torch.randn((24, 48), generator=draw), format)
    x = torch.randn((2, rows, 48), generator=draw).to(dtype)
    bias = torch.randn(24, generator=draw).to(dtype) if biased else None
    got = multiply(x, weight, bias)
    want = torch.nn.functional.linear(x.double(), weight.dequantised(torch.float64))
    want = want if bias is None else want + bias
    assert (got.dtype, got.shape) == (dtype, want.shape)
    assert (got.double() - want).norm() <= TOLERANCE[dtype] * want.norm()


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f"{f.kind} {f.block}")
def test_some_rows_at_a_time_give_the_same(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    weight, x = quantise(torch.randn((40, 32), generator=draw), format), torch.randn((3, 32), generator=draw)
    want = multiply(x, weight)
    monkeypatch.setattr(stored, "AT_A_TIME", 100)
    torch.testing.assert_close(multiply(x, weight), want, rtol=1e-5, atol=1e-5)


def test_every_float8_is_read_as_what_it_is() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = values[values.float().isfinite()].view(1, -1)
    numbers, more = stored._numbers(values, torch.float32)
    assert torch.equal(numbers * more, values.float())
    assert numbers.numel() == 254
    assert float((numbers * more).max()) == KINDS["fp8"].reach


def test_a_weight_of_no_rows_gives_nothing() -> None:
    assert multiply(torch.ones(3, 8), quantise(torch.ones(0, 8), Format("int8"))).shape == (3, 0)


@every_pair(("kind", ROW_KINDS), ("dtype", list(TOLERANCE)), ("rows", [0, 1, 40]), ("biased", [False, True]))
def test_numbers_by_numbers_are_what_they_stand_for(kind: str, dtype: torch.dtype, rows: int, biased: bool) -> None:
    draw = torch.Generator().manual_seed(rows)
    weight = quantise(torch.randn((24, 48), generator=draw), Format(kind))
    x = QuantisedRows(*quantised_rows(torch.randn((2, rows, 48), generator=draw).to(dtype), kind), dtype)
    bias = torch.randn(24, generator=draw).to(dtype) if biased else None
    got = multiply(x, weight, bias)
    want = torch.nn.functional.linear(x.values.double() * x.scales.double(), weight.dequantised(torch.float64))
    want = want if bias is None else want + bias
    assert (got.dtype, got.shape) == (dtype, want.shape)
    assert (got.double() - want).norm() <= TOLERANCE[dtype] * want.norm()


def test_sums_of_int8_are_exact() -> None:
    x = QuantisedRows(
        torch.full((1, 70000), 127, dtype=torch.int8), torch.ones(1, 1, dtype=torch.float64), torch.float64
    )
    weight = quantise(torch.full((1, 70000), 127.0), Format("int8"))
    assert float(multiply(x, weight)) == 70000 * 127 * 127  # more than fp32 says

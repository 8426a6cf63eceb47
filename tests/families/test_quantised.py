"""What a quantised weight is, against the definition written out element by element."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dgraph.errors import InputError, UnknownName
from dgraph.families.quantised import (
    KINDS,
    ROW_KINDS,
    WHOLE,
    Format,
    QuantisedRows,
    QuantisedWeight,
    quantise,
    quantised_rows,
)
from dgraph.ops import OPS
from dgraph.private.torch import product_of_int8

BLOCKS = (None, (1, 16), (4, 8), (WHOLE, WHOLE))


def plain(found: QuantisedWeight) -> Tensor:
    """The weight by the definition, element by element."""
    *stack, rows, columns = found.shape
    high, wide = (size if n == WHOLE else n for n, size in zip(found.block, (rows, columns), strict=True))
    weight = torch.empty(found.shape)
    for item in [()] if not stack else [(i,) for i in range(stack[0])]:
        for r in range(rows):
            for c in range(columns):
                place = (*item, r // high, c // wide)
                if found.values.dtype == torch.uint8:
                    number = float(int(found.values[(*item, r, c // 2)]) >> 4 * (c % 2) & 15)
                    zero = 8.0
                else:
                    number, zero = float(found.values[(*item, r, c)]), 0.0
                if found.zeros is not None:
                    zero = float(found.zeros[place])
                weight[(*item, r, c)] = (number - zero) * float(found.scales[place])
    return weight


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize(
    ("kind", "zeros"), [("fp8", False), ("int8", False), ("int8", True), ("int4", False), ("int4", True)]
)
def test_a_weight_is_stored_to_half_a_step(kind: str, zeros: bool, block: tuple[int, int] | None) -> None:
    weight = torch.randn((2, 9, 22), generator=torch.Generator().manual_seed(1))
    weight[0, 0] = 0.0
    found = quantise(weight, Format(kind, block, zeros))
    assert found.shape == weight.shape
    assert found.values.dtype == KINDS[kind].dtype
    back = found.dequantised(torch.float32)
    torch.testing.assert_close(back, plain(found))
    assert (back[0, 0] == 0).all()
    step = torch.maximum(weight.abs() / 16, torch.tensor(2.0**-9)) if kind == "fp8" else torch.ones(())
    scales = torch.ones_like(weight)
    for r in range(9):
        for c in range(22):
            high, wide = (s if n == WHOLE else n for n, s in zip(found.block, (9, 22), strict=True))
            scales[:, r, c] = found.scales[:, r // high, c // wide]
    bound = step * 1.001 if kind == "fp8" else scales * (1.001 if zeros else 0.501)
    assert ((back - weight).abs() <= torch.maximum(bound, scales * 2.0**-9)).all()


def test_what_the_numbers_are_can_be_read() -> None:
    weight = torch.tensor([[-7.5, -1.0, 0.0, 3.0]])
    found = quantise(weight, Format("int4"))
    assert found.scales.tolist() == [[1.0]]
    assert found.values.tolist() == [[0 + 16 * 7, 8 + 16 * 11]]  # -7.5 is rounded to -8, stored as 0
    found = quantise(torch.tensor([[0.0, 1.0, 15.0, 3.0]]), Format("int4", zeros=True))
    assert (found.scales.tolist(), found.zeros.tolist()) == ([[1.0]], [[0.0]])  # type: ignore[union-attr]
    assert found.values.tolist() == [[16 * 1, 15 + 16 * 3]]
    found = quantise(torch.tensor([[-127.0, 5.0]]), Format("int8"))
    assert (found.values.tolist(), found.scales.tolist()) == ([[-127, 5]], [[1.0]])
    assert found.nbytes == 2 + 4


def test_large_weights_are_rounded_as_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn((14, 24), generator=torch.Generator().manual_seed(2))
    for format in (Format("int4", (1, 8)), Format("fp8", (4, 8)), Format("int8")):
        whole = quantise(weight, format)
        monkeypatch.setattr("dgraph.families.quantised._AT_A_TIME", 50)
        parts = quantise(weight, format)
        monkeypatch.undo()
        assert torch.equal(whole.values.view(torch.uint8), parts.values.view(torch.uint8))
        assert torch.equal(whole.scales, parts.scales)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Format("int4", (0, 4)), "at least 1 each"),
        (lambda: Format("fp8", zeros=True), "zero of their own"),
        (lambda: quantise(torch.ones(4), Format("int8")), r"got torch.float32 \[4\]"),
        (lambda: quantise(torch.ones((4, 4), dtype=torch.int8), Format("int8")), "got torch.int8"),
        (lambda: quantise(torch.ones((4, 3)), Format("int4")), "even number of columns"),
        (lambda: quantise(torch.tensor([[1.0, torch.inf]]), Format("int8")), "not finite"),
        (lambda: quantise(torch.tensor([[1.0, torch.nan]]), Format("fp8")), "not finite"),
        (
            lambda: QuantisedWeight(torch.ones((4, 4)), torch.ones((4, 2)), None, (1, WHOLE)).dequantised(
                torch.float32
            ),
            r"has scales \[4, 1\], got \[4, 2\]",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()  # type: ignore[operator]


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(UnknownName, match="int8"):
        Format("int7")


# -- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_rows_on_the_grid_of_their_scale_lose_nothing(kind: str) -> None:
    numbers = torch.tensor([[448.0, -1.75, 0.0, 2.0**-9], [-448.0, 3.5, 60.0, 1.0]])
    if kind == "int8":
        numbers = torch.tensor([[127.0, -3.0, 0.0, 1.0], [-127.0, 126.0, 64.0, -1.0]])
    x = numbers * torch.tensor([[2.0**-7], [4.0]])
    values, scales = quantised_rows(x, kind)
    assert torch.equal(values.float(), numbers)
    assert scales.flatten().tolist() == [2.0**-7, 4.0]
    assert torch.equal(OPS["round_rows"].overload(x, kind), x)


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_rows_are_near_what_they_were(kind: str) -> None:
    x = torch.randn((50, 64), generator=torch.Generator().manual_seed(0))
    found = OPS["round_rows"].overload(x, kind)
    most = x.abs().amax(-1, keepdim=True)
    step = most / 127 / 2 if kind == "int8" else torch.maximum(x.abs() / 16, most / 448 * 2.0**-10)
    assert ((found - x).abs() <= step * 1.0001).all()
    assert not torch.equal(found, x)


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_rows_of_zeros_and_rows_that_are_not_finite(kind: str) -> None:
    x = torch.ones(5, 4)
    x[0], x[1, 2], x[2, 0], x[3] = 0.0, torch.inf, torch.nan, 1e-44
    values, scales = quantised_rows(x, kind)
    assert (values[:4].float() == 0).all()
    assert scales[[0, 3], 0].tolist() == [1.0, 1.0]
    assert scales[[1, 2], 0].isnan().all()
    found = QuantisedRows(values, scales, torch.float32).dequantised()
    assert found[[1, 2]].isnan().all()
    assert torch.equal(found[4], x[4])


@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_number_of_a_row_is_the_reach_and_none_lies_beyond(kind: str, dtype: torch.dtype) -> None:
    """Whatever the scale and its reciprocal are rounded to; below the least scale numbers are small."""
    draw, reach = torch.Generator().manual_seed(1), KINDS[kind].reach
    sizes = torch.rand((4000, 1), generator=draw, dtype=torch.float64) * 154 - 77
    x = (torch.rand((4000, 3), generator=draw, dtype=torch.float64) * 10.0**sizes).clamp(max=3e38).to(dtype)
    x[0], x[1] = 3.4e38, 1.1754944e-38 * reach
    values, scales = quantised_rows(x, kind)
    least = x.abs().amax(-1) / reach < torch.finfo(dtype).tiny
    assert 0 < int(least.sum()) < 4000 if dtype == torch.float32 else not least.any()
    assert (values[~least].float().abs().amax(-1) == reach).all()
    assert (scales[least] == 1).all()
    assert (values[least].float() == 0).all()


def test_rows_in_a_format_that_is_none_of_theirs() -> None:
    with pytest.raises(UnknownName, match="unknown format of rows 'int4'"):
        quantised_rows(torch.ones(2, 4), "int4")


@pytest.mark.parametrize("columns", [1, 2, 3, 64, 65])
@pytest.mark.parametrize("rows", [1, 5, 32])
def test_sums_of_products_of_int8_are_exact(rows: int, columns: int) -> None:
    x = torch.randint(-128, 128, (2, rows, columns), dtype=torch.int8)
    weight = torch.randint(-128, 128, (7, columns), dtype=torch.int8)
    assert torch.equal(product_of_int8(x, weight).long(), x.long() @ weight.long().t())

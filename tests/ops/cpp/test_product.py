"""The kernel of products by stored weights on a CPU, against what the weights stand for and against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.codecache import CppCodeCache

import dgraph
from dgraph.errors import LoweringError
from dgraph.families.quantised import WHOLE, Format, QuantisedRows, QuantisedWeight, quantise, quantised_rows, spread
from dgraph.ops.products import stored
from dgraph.ops.products.cpp import product
from dgraph.private.inductor import load_cpp
from tests.amounts import every_pair

FORMATS = (
    Format("fp8"),
    Format("fp8", (16, 32)),
    Format("fp8", (3, 20)),  # a chunk has two scales
    Format("int8"),
    Format("int8", (WHOLE, WHOLE)),
    Format("int8", (1, 64), zeros=True),
    Format("int8", (5, 7), zeros=True),
    Format("int4"),
    Format("int4", (2, 20)),
    Format("int4", (1, WHOLE), zeros=True),
    Format("int4", (1, 64), zeros=True),
)
SHAPES = ((64, 128), (37, 96), (5, 2050), (130, 1056), (1, 34))
"""Whole panels and chunks, and what is left of each; columns past what is converted at a time."""
TOLERANCE = {torch.float32: 2**-20, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Of the sum of what is summed, without signs."""


def drawn(shape: tuple[int, int], format: Format) -> tuple[torch.Generator, QuantisedWeight]:
    draw = torch.Generator().manual_seed(shape[0])
    return draw, quantise(torch.randn(shape, generator=draw), format)


def in_torch(monkeypatch: pytest.MonkeyPatch, x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(product, "serves", lambda x, weight: False)
        return stored.multiply(x, weight, bias)


@every_pair(
    ("format", FORMATS),
    ("shape", SHAPES),
    ("dtype", list(TOLERANCE)),
    ("rows", [1, 2, 5, 6, 7, 13, 40]),
    ("biased", [False, True]),
)
def test_products_are_those_of_the_weights_that_are_stood_for(
    format: Format,
    shape: tuple[int, int],
    dtype: torch.dtype,
    rows: int,
    biased: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw, weight = drawn(shape, format)
    x = torch.randn((rows, shape[1]), generator=draw).to(dtype)
    bias = torch.randn(shape[0], generator=draw).to(dtype) if biased else None
    assert product.serves(x, weight), "this test needs a C++ compiler"
    got = product.multiply(x, weight, bias)
    parts = x.double(), weight.dequantised(torch.float64), torch.zeros(()) if bias is None else bias.double()
    want, close = F.linear(*parts[:2]) + parts[2], TOLERANCE[dtype] * (F.linear(*map(abs, parts[:2])) + abs(parts[2]))
    assert (got.dtype, got.shape) == (dtype, want.shape)
    assert ((got.double() - want).abs() <= close).all()
    assert ((in_torch(monkeypatch, x, weight, bias).double() - got.double()).abs() <= 3 * close).all()


@every_pair(("format", FORMATS), ("dtype", [torch.float32, torch.bfloat16]), ("columns", [96, 100, 2112]))
def test_a_row_gives_the_same_bits_whatever_is_beside_it(format: Format, dtype: torch.dtype, columns: int) -> None:
    draw, weight = drawn((50, columns), format)
    x = torch.randn((23, columns), generator=draw).to(dtype)
    together = product.multiply(x, weight, None)
    for count in (1, 3, 6, 7):
        assert torch.equal(product.multiply(x[:count], weight, None), together[:count])
    ones = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(product.multiply(x, weight, None), together)
    finally:
        torch.set_num_threads(ones)


@every_pair(
    ("format", [Format("int8"), Format("int8", (WHOLE, WHOLE)), Format("int8", (16, WHOLE))]),
    ("shape", [*SHAPES, (200, 4100), (96, 64)]),
    ("dtype", [torch.float32, torch.bfloat16]),
    ("rows", [1, 15, 16, 17, 33]),
    ("biased", [False, True]),
)
def test_rows_in_int8_are_multiplied_as_they_are(
    format: Format,
    shape: tuple[int, int],
    dtype: torch.dtype,
    rows: int,
    biased: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw, weight = drawn(shape, format)
    x = QuantisedRows(*quantised_rows(torch.randn((2, rows, shape[1]), generator=draw).to(dtype), "int8"), dtype)
    bias = torch.randn(shape[0], generator=draw).to(dtype) if biased else None
    sums = x.values.double() @ weight.values.double().T
    scaled = sums * x.scales.double() * spread(weight.scales, weight.block, weight.shape)[:, 0].double()
    want = scaled if bias is None else scaled + bias.double()
    close = (2**-8 if dtype == torch.bfloat16 else 2**-20) * (
        scaled.abs() + (0 if bias is None else bias.double().abs())
    )
    with monkeypatch.context() as patch:
        patch.setattr(product, "multiply_numbers", lambda x, weight, bias: None)
        in_torch = stored.multiply(x, weight, bias)
    assert ((in_torch.double() - want).abs() <= close).all()
    got = product.multiply_numbers(x, weight, bias)
    if got is None:
        pytest.skip("needs a CPU with AMX")
    assert (got.dtype, got.shape) == (dtype, want.shape)
    assert ((got.double() - want).abs() <= close).all()
    assert stored.multiply(x, weight, bias).equal(got)


def test_rows_in_int8_that_it_does_not_serve() -> None:
    _, weight = drawn((20, 64), Format("int8"))
    numbers, scales = quantised_rows(torch.randn(3, 64), "int8")
    apart = QuantisedWeight(weight.values.t().contiguous().t(), weight.scales, None, weight.block)
    assert product.multiply_numbers(QuantisedRows(numbers, scales, torch.float32), apart, None) is None
    assert product.multiply_numbers(QuantisedRows(numbers, scales.double(), torch.float64), weight, None) is None
    assert product.multiply_numbers(QuantisedRows(numbers[:0], scales[:0], torch.float32), weight, None) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_float8_is_read_as_what_it_is(dtype: torch.dtype) -> None:
    """A row of the identity times a weight of all of them, with few rows and with many."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = values[values.float().isfinite()].repeat(2)[:256].view(8, 32)
    weight = QuantisedWeight(values, torch.ones(8, 1), None, (1, WHOLE))
    x = torch.eye(32, dtype=dtype)
    for rows in (x[:5], x):
        assert torch.equal(product.multiply(rows, weight, None).float(), values.float().t()[: len(rows)])


def test_what_is_not_a_number_stays_in_its_row() -> None:
    draw, weight = drawn((20, 64), Format("int8"))
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn((9, 64), generator=draw).to(dtype)
        x[4, 3] = torch.nan
        got = product.multiply(x, weight, None)
        assert got[4].isnan().all()
        assert got[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


def test_what_it_does_not_serve_runs_in_torch() -> None:
    _, weight = drawn((20, 64), Format("int8"))
    stack = QuantisedWeight(weight.values[None], weight.scales[None], None, weight.block)
    apart = QuantisedWeight(weight.values.t().contiguous().t(), weight.scales, None, weight.block)
    x = torch.randn(3, 64)
    assert product.serves(x, weight)
    assert not product.serves(x.double(), weight)
    assert not product.serves(x[:0], weight)
    assert not product.serves(x, stack)
    assert not product.serves(x, apart)
    torch.testing.assert_close(stored.multiply(x, apart), stored.multiply(x, weight), rtol=1e-5, atol=1e-5)


def test_without_a_compiler_products_run_in_torch_and_that_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, name: str) -> None:
        raise LoweringError("InvalidCxxCompiler: no working C++ compiler.")

    _, weight = drawn((20, 64), Format("fp8"))
    x = torch.randn(3, 64)
    want = stored.multiply(x, weight)
    monkeypatch.setattr(product, "load_cpp", refuse)
    product._kernels.cache_clear()
    try:
        with pytest.warns(dgraph.DgraphWarning, match=r"plain torch.*InvalidCxxCompiler.*dgraph doctor") as said:
            got = [stored.multiply(x, weight) for _ in range(2)]
        assert len(said) == 1
    finally:
        product._kernels.cache_clear()
    for each in got:
        torch.testing.assert_close(each, want, rtol=1e-5, atol=1e-5)


def test_each_kind_of_cpu_has_a_kernel_of_its_own_in_a_cache_that_machines_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inductor's key has the source and `-march=native`, and no word of which CPU that was."""
    sources = []
    monkeypatch.setattr(CppCodeCache, "load", lambda source, *args, **options: sources.append(source))
    for features in ("avx2", "avx2 avx512_bf16", "avx2"):
        monkeypatch.setattr("dgraph.private.inductor.processor_features", lambda now=features: now)
        with pytest.raises(AttributeError):  # there is no library
            load_cpp("int one() { return 1; }", "one")
    assert sources[0] == sources[2] != sources[1]

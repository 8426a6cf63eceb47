"""The product by warps in roles: what it chooses from, that it compiles here, and on a GPU that it is right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dgraph.ops import OPS
from dgraph.quantised import ROW_KINDS, Format, quantise, quantised_rows
from tests.ops.triton.compiled import found_by
from tests.ops.triton.interpreter import Interpreter
from tests.ops.triton.problems import compare, expected, flat, product, settled

pytest.importorskip("triton", reason="needs Triton")


@pytest.mark.parametrize("itemsize", [1, 2], ids=["8 bits", "16 bits"])
@pytest.mark.parametrize("pair", [False, True], ids=["linear", "unit"])
def test_every_number_of_rows_has_tiles_that_the_ring_holds(pair: bool, itemsize: int) -> None:
    from dgraph.ops.triton import product_cases as of

    for rows in (1, 15, 16, 17, 32, 33, 64, 65, 128, 5000, of.ANY):
        fitting = [case for case in of.cases(pair, itemsize) if case.above < rows <= case.up_to]
        assert len({case.columns for case in fitting}) == len(fitting) > 0
        assert all(case.rows == 128 or rows <= case.rows for case in fitting)
    for case in of.cases(pair, itemsize):
        stages, units = (int(f(case.rows, case.columns)) for f in (of._stages, of._units))
        assert 4 <= stages <= of.MOST_STAGES.value
        assert stages * units * (case.rows + case.columns) <= 64 * of.BOXES.value
        parts = [[int(size) for size in part] for part in of._parts(case.rows, case.columns, pair)]
        assert sum(high * wide for high, wide in parts if wide) == case.rows * case.columns
        read = [case.rows, *(part[0 if case.rows < 128 else 1] for part in parts)]
        begins = [int(place) for place in of._ring(case.rows, case.columns, pair)]
        assert [place % size for place, size in zip(begins, read, strict=True) if size] == [0] * sum(map(bool, read))


def test_division_in_floating_point_is_that_of_integers() -> None:
    """With the two units in the last place that a GPU's division may be off, up to the largest number promised."""
    a = torch.cat([torch.arange(5000), torch.randint(1 << 20, (200_000,)), torch.tensor([1 << 20])])
    for divisor in (1, 2, 3, 7, 48, 131, 132, 1000, 4095, 65_537, 1 << 20):
        exact = (a + 0.5).float() / divisor
        for found in (exact, exact * (1 + 2.0**-22), exact * (1 - 2.0**-22)):
            assert torch.equal(found.long(), a // divisor)
            multiples = a // divisor * divisor
            assert torch.equal(((multiples + 0.5).float() / divisor).long(), multiples // divisor)


@pytest.mark.parametrize("name", ["rows_linear", "rows_glu"])
def test_elsewhere_the_tiling_is_one_of_tiles(interpreted: Interpreter, name: str) -> None:
    from dgraph.ops.triton.rows_linear import WIDE

    args = product(33, 50, 48, 80)
    result, _ = interpreted(name, args, tiling=replace(WIDE, roles=True))
    compare(settled(name, args, flat(result)), expected(name, args))


@pytest.mark.release
def test_it_compiles_for_the_device_it_is_made_for() -> None:
    found = found_by("compiled_product")
    # Four instructions of 32 bytes for each box along the inner dimension and each accumulator. Few rows: two boxes,
    # and of tiles by 16, 32 and 64 rows one accumulator in each of two widths; many rows: 1, 1, 2 and 1. Of units few
    # rows have two accumulators, and the wider tiles one box; many rows have 1 and 1. The last are of 256 columns.
    for dtype, multiplied, widest in (("bf16", "bf16", 1), ("fp8e4nv", "e4m3", 0), ("i8", "s8", 0)):
        assert found[f"{dtype} linear"]["products"] == 4 * (2 * 3 * 2 + 4 + widest)
        assert found[f"{dtype} unit"]["products"] == 4 * (2 * 3 * 2 + 3 * 2 + 1 + widest)
        assert found[f"{dtype} linear"]["of"] == found[f"{dtype} unit"]["of"] == [multiplied]
    for kind in found.values():
        assert kind["registers moved between roles"]
        assert kind["shared"] < 227 << 10
        assert kind["stores of 16 bytes"] > 0
        assert kind["values of shares that go alone"] == 0
        assert kind["before its wait"] == []


SIZES = {
    "whole tiles": (256, 256, (128, 256)),
    "shares of every tile": (1024, 1536, (1, 16, 17, 64, 65, 300, 1000)),
    "one tile": (4096, 64, (5, 70)),
    "sizes that end within tiles": (200, 1032, (9, 33, 130, 1000)),
    "columns that do not end at 16 bytes": (80, 36, (9, 33, 130)),
    "no rows": (128, 128, (0,)),
}


def on_a_gpu(name: str, args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    from dgraph.ops.triton import hopper

    if not hopper.understood(torch.device("cuda", 0)):
        pytest.skip("needs a GPU of compute capability 9.0")
    return tuple(None if t is None else t.to("cuda", dtype if t.is_floating_point() else t.dtype) for t in args)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", ["rows_linear", "rows_glu"])
@pytest.mark.parametrize("size", SIZES)
def test_it_on_a_gpu(size: str, name: str, bias: bool, dtype: torch.dtype) -> None:
    """Rows that are not live hold NaN, and so does what lies beside x; equal calls give equal bits."""
    from dgraph.ops.triton import product_roles

    d_in, d_out, counts = SIZES[size]
    for rows in counts:
        args = product(rows, 1000, d_in, 2 * d_out if name == "rows_glu" else d_out, bias=bias)
        there = on_a_gpu(name, args, dtype)
        assert product_roles.fits(*there[:2])
        want = expected(name, tuple(None if t is None else t.to(dtype).float() for t in args[:3]) + args[3:])
        first, second = (settled(name, args, [OPS[name].overload(*there)]) for _ in range(2))
        compare(first, want, 2e-2)
        assert torch.equal(first[0].nan_to_num(), second[0].nan_to_num())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rows_linear", "rows_glu"])
def test_every_case_on_a_gpu(name: str) -> None:
    """Also where another would have been faster."""
    from dgraph.ops.triton import product_cases
    from dgraph.ops.triton import product_roles as roles

    pair = name == "rows_glu"
    for case in product_cases.cases(pair):
        for d_in, d_out in ((1024, 1536), (4096, 256)):
            for rows in {case.above + 1, min(case.up_to, 700)}:
                args = product(rows, 700, d_in, d_out, bias=True)
                x, weight, bias, cu_rows = on_a_gpu(name, args, torch.bfloat16)
                out = x.new_full((700, d_out // 2 if pair else d_out), torch.nan)
                roles.launch(x, weight, bias, cu_rows, out, (case,), 132, 8, pair)
                want = expected(name, tuple(t.bfloat16().float() for t in args[:3]) + args[3:])
                compare([out[:rows]], [want[0][:rows]], 2e-2)
                assert out[rows:].isnan().all(), "padding rows are not written"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize("pair", [False, True], ids=["linear", "unit"])
def test_every_case_of_numbers_of_8_bits_on_a_gpu(pair: bool, kind: str) -> None:
    """Also where another would have been faster."""
    from dgraph.ops.triton import product_cases
    from dgraph.ops.triton import product_roles as roles

    for case in product_cases.cases(pair, 1):
        for d_in, d_out in ((12288, 256), (208, 1040)):
            for rows in {case.above + 1, min(case.up_to, 700)}:
                values = product(rows, 700, d_in, d_out, bias=True)
                x, weight, bias, cu_rows = on_a_gpu("rows_linear", values, torch.bfloat16)
                numbers, scales = quantised_rows(x.nan_to_num(), kind)
                stored = quantise(weight, Format(kind))
                out = x.new_full((700, d_out // 2 if pair else d_out), torch.nan)
                by = scales, stored.scales, 1
                roles.launch(numbers, stored.values, bias, cu_rows, out, (case,), 132, 8, pair, by)
                want = numbers[:rows].double() * scales[:rows] @ stored.dequantised(torch.float64).T + bias
                if pair:
                    gate, up = want.chunk(2, 1)
                    want = torch.nn.functional.silu(gate) * up
                assert (out[:rows] - want).norm() <= 5e-3 * want.norm()
                assert out[rows:].isnan().all(), "padding rows are not written"


@pytest.mark.gpu
def test_calls_of_a_graph_count_in_counters_of_their_own() -> None:
    """Two products whose tiles are shared, one after the other, replayed on other numbers of rows."""
    from dgraph.ops import counters

    args = product(200, 700, 2048, 2048)
    x, weight, _, cu_rows = on_a_gpu("rows_linear", args, torch.bfloat16)
    call = OPS["rows_linear"].overload

    def twice() -> Tensor:
        found: Tensor = call(call(x, weight, None, cu_rows), weight, None, cu_rows)
        return found

    eager = {}
    for rows in (40, 200, 130):
        cu_rows[-1] = rows
        eager[rows] = twice()[:rows].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), counters.shared():
        out = twice()
    for rows in (130, 40, 40, 200):
        cu_rows[-1] = rows
        graph.replay()
        assert torch.equal(out[:rows], eager[rows])

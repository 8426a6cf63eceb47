"""The product by warps in roles: what it chooses from, that it compiles here, and on a GPU that it is right."""

from __future__ import annotations

from dataclasses import replace
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dgraph.families.quantised import ROW_KINDS, Format, quantise, quantised_rows
from dgraph.ops import OPS
from tests.ops.triton.compiled import found_by
from tests.ops.triton.interpreter import Interpreter
from tests.ops.triton.problems import compare, expected, flat, product, settled

pytest.importorskip("triton", reason="needs Triton")


@pytest.mark.parametrize("itemsize", [1, 2], ids=["8 bits", "16 bits"])
@pytest.mark.parametrize("pair", [False, True], ids=["linear", "unit"])
def test_every_number_of_rows_has_tiles_that_the_ring_holds(pair: bool, itemsize: int) -> None:
    from dgraph.ops.products.triton import product_cases as of

    for rows in (1, 15, 16, 17, 32, 33, 64, 65, 128, 5000, of.ANY):
        fitting = [case for case in of.cases(pair, itemsize) if case.above < rows <= case.up_to]
        assert len({case.columns for case in fitting}) == len(fitting) > 0
        assert all(case.rows == 128 or rows <= case.rows for case in fitting)
        kept = of.cases(pair, itemsize, most=rows)
        assert set(fitting) <= set(kept) <= set(of.cases(pair, itemsize))
        assert all(case.above < rows for case in kept), "none is compiled that no row takes"
    for case in of.cases(pair, itemsize):
        stages, units = (int(f(case.rows, case.columns)) for f in (of._stages, of._units))
        assert 4 <= stages <= of.MOST_STAGES.value
        assert stages * units * (case.rows + case.columns) <= 64 * of.BOXES.value
        parts = [int(size) for size in of._parts(case.rows, case.columns)]
        assert sum(parts) == case.columns
        begins = [int(place) for place in of._ring(case.rows, case.columns)]
        read = zip(begins, [case.rows, *parts], strict=True)
        assert all(place % size == 0 for place, size in read if size)


@pytest.mark.parametrize("pair", [False, True], ids=["linear", "unit"])
def test_boxes_fill_what_the_ring_has_for_a_tile(pair: bool) -> None:
    """Each row of the weight comes once. In a unit half of the columns are gate's, and up's are the same ones."""
    from dgraph.ops.products.triton import product_cases as of

    for case in of.cases(pair):
        boxes = [tuple(map(int, box)) for box in of._boxes(case.rows, case.columns, pair)]
        parts, begins = of._parts(case.rows, case.columns), of._ring(case.rows, case.columns)[1:]
        places = sorted(place + i for place, _, _, _, size in boxes for i in range(size))
        assert places == [int(begin) + i for begin, wide in zip(begins, parts, strict=True) for i in range(int(wide))]
        assert all(place % size == every % size == 0 for place, every, _, _, size in boxes)
        columns = [sorted(c + i for _, _, c, up, size in boxes if up == half for i in range(size)) for half in (0, 1)]
        wanted = list(range(case.columns // 2 if pair else case.columns))
        assert columns == [wanted, wanted if pair else []]


def chosen(rows: int, d_out: int, deep: int, pair: bool, itemsize: int) -> tuple[int, int, int]:
    """Rows and columns of the tile that a product takes on a device of 132 multiprocessors, and shares at most."""
    from dgraph.ops.products.triton import product_cases as of

    def run(function: Any, names: dict[str, Any]) -> Any:
        return FunctionType(function.fn.__code__, names)

    def lesser(a: Any, b: Any) -> Tensor:
        return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))

    names: dict[str, Any] = {"LOW": of.LOW.value, "BYTES": of.BYTES.value, "_quotient": lambda a, b: a // b}
    names["gl"] = SimpleNamespace(
        to_tensor=torch.tensor, float32=torch.float32, constexpr=None, static_range=range, minimum=lesser,
        maximum=lambda a, b: -lesser(-a, -b), where=torch.where, cdiv=lambda a, b: -(-torch.as_tensor(a) // b),
    )  # fmt: skip
    names |= {each.fn.__name__: run(each, names) for each in (of._times_of_few, of._times_of_many)}
    cases = of.cases(pair, itemsize)
    sizes = tuple((case.above, case.up_to, case.rows, case.columns, case.splits) for case in cases)
    case, splits = run(of._choose, names)(torch.tensor(rows), d_out, torch.tensor(deep), sizes, 132, pair)
    return cases[case].rows, cases[case].columns, int(splits)


@pytest.mark.parametrize(
    ("rows", "d_out", "deep", "pair", "tile"),
    [
        # Few rows: the sizes of 8B models in 8 bits, each of which was the fastest on an H100, or within 3 % of it.
        (32, 12288, 32, False, (64, 32, 1)),
        (32, 6144, 32, False, (64, 48, 1)),
        (32, 4096, 32, False, (64, 32, 1)),
        (32, 4096, 96, False, (64, 32, 1)),
        (64, 4096, 96, False, (64, 32, 1)),
        (32, 3584, 28, False, (64, 32, 1)),
        (32, 12288, 32, True, (64, 64, 1)),
        (32, 126464, 32, False, (64, 96, 1)),
        # Of so few columns a tile is shared, unless that takes longer than to read its part of the weight alone.
        (32, 64, 96, False, (64, 32, 8)),
        (32, 64, 4, False, (64, 32, 1)),
        # Many rows.
        (128, 4096, 32, False, (128, 64, 1)),
        (2048, 12288, 32, False, (128, 192, 1)),
    ],
)
def test_which_tiles_are_taken(rows: int, d_out: int, deep: int, pair: bool, tile: tuple[int, int, int]) -> None:
    assert chosen(rows, d_out, deep, pair, 1) == tile


def test_division_in_floating_point_is_that_of_integers() -> None:
    """With the two units in the last place that a GPU's division may be off, up to the largest number promised."""
    a = torch.cat([torch.arange(5000), torch.randint(1 << 20, (200_000,)), torch.tensor([1 << 20])])
    for divisor in (1, 2, 3, 7, 48, 131, 132, 1000, 4095, 65_537, 1 << 20):
        exact = (a + 0.5).float() / divisor
        for found in (exact, exact * (1 + 2.0**-22), exact * (1 - 2.0**-22)):
            assert torch.equal(found.long(), a // divisor)
            multiples = a // divisor * divisor
            assert torch.equal(((multiples + 0.5).float() / divisor).long(), multiples // divisor)


@pytest.mark.parametrize(
    ("rows", "roles", "taken"), [(64, True, "ours"), (65, True, "library"), (64, False, "library"), (129, True, "ours")]
)
def test_which_units_are_one_product(monkeypatch: pytest.MonkeyPatch, rows: int, roles: bool, taken: str) -> None:
    """Of some numbers of rows the library's product and an activation after it take less time."""
    from dgraph.ops.products.triton import rows_glu

    monkeypatch.setattr(rows_glu.product_roles, "fits", lambda x, weight: roles)
    monkeypatch.setattr(rows_glu, "launch", lambda *args, **options: "ours")
    monkeypatch.setattr(rows_glu.experts, "gate", lambda *args, **options: "library")
    x, weight = torch.zeros(rows, 16).bfloat16(), torch.zeros(32, 16).bfloat16()
    assert rows_glu.kernel(x, weight, None, torch.tensor([0, rows])) == taken


@pytest.mark.parametrize("name", ["rows_linear", "rows_glu"])
def test_elsewhere_the_tiling_is_one_of_tiles(interpreted: Interpreter, name: str) -> None:
    from dgraph.ops.products.triton.rows_linear import WIDE

    args = product(33, 50, 48, 80)
    result, _ = interpreted(name, args, tiling=replace(WIDE, roles=True))
    compare(settled(name, args, flat(result)), expected(name, args))


@pytest.mark.release
def test_it_compiles_for_the_device_it_is_made_for() -> None:
    found = found_by("compiled_product")
    # Four instructions of 32 bytes for each box along the inner dimension and each accumulator. Few rows: two boxes; by
    # 32 and 64 columns one accumulator, by 48 and 96 two, and of units one in each of two widths. Many rows: one box;
    # of 64, 96, 128, 192 and 256 columns 96 and 192 have two accumulators, and units one in each of two widths.
    for dtype, multiplied, widest in (("bf16", "bf16", 1), ("fp8e4nv", "e4m3", 0), ("i8", "s8", 0)):
        assert found[f"{dtype} linear"]["products"] == 4 * (2 * (1 + 2 + 1 + 2) + (1 + 2 + 1 + 2) + widest)
        assert found[f"{dtype} unit"]["products"] == 4 * (2 * 2 + 1 + widest)
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
    from dgraph.ops.products.triton import product_roles

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
    from dgraph.ops.products.triton import product_cases
    from dgraph.ops.products.triton import product_roles as roles

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
    from dgraph.ops.products.triton import product_cases
    from dgraph.ops.products.triton import product_roles as roles

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

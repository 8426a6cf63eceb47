"""Products by quantised weights: every op that takes them, its reference and its kernel, interpreted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from dgraph.families.quantised import ROW_KINDS, WHOLE, Format, QuantisedRows, quantise, quantised_rows
from dgraph.ops import OPS, Op, Sample
from dgraph.ops.draws import cu_rows_of
from dgraph.ops.products.stored import multiply
from tests.amounts import every_value
from tests.ops.triton.compiled import found_by
from tests.ops.triton.interpreter import Interpreter
from tests.ops.triton.problems import compare, expected, flat, heading, settled

PRODUCTS = [op for op in OPS.values() if op.stored]
FORMATS = (
    Format("fp8"),
    Format("int8"),
    Format("int4", (1, 4)),
    Format("int4", zeros=True),
    Format("fp8", (4, 8)),
    Format("int8", (WHOLE, WHOLE), zeros=True),
)


def samples_of(op: Op) -> list[Sample]:
    return list(op.samples(torch.Generator().manual_seed(7)))


def stored(op: Op, args: tuple[Any, ...], format: Format) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """The arguments with quantised weights, and with what these stand for; None for sizes that have no 4-bit form."""
    taken, plain = [], []
    for name, value in zip(op.arguments, args, strict=False):
        if name in op.stored:
            if format.kind == "int4" and value.shape[-1] % 2:
                return None
            weight = quantise(value, format)
            taken.append(weight)
            plain.append(weight.dequantised(torch.float32))
        else:
            taken.append(value)
            plain.append(value)
    return tuple(taken), tuple(plain)


def test_every_product_takes_weights_as_they_are_stored() -> None:
    assert {op.name for op in PRODUCTS} == {
        "linear",
        "rows_linear",
        "rows_glu",
        "lm_head",
        "lm_head_part",
        "lm_head_adjusted",
        "lm_head_measured",
        "experts",
    }


@every_value(("op", PRODUCTS), ("format", FORMATS))
def test_samples(interpreted: Interpreter, op: Op, format: Format) -> None:
    found = 0
    for sample in samples_of(op)[:4]:
        both = stored(op, sample.args, format)
        if both is None:
            continue
        found += 1
        taken, plain = both
        want = expected(op.name, plain)
        for result in (op.reference(*copy.deepcopy(taken)), interpreted(op.name, taken)[0]):
            got = settled(op.name, plain, flat(result))
            compare(got, want[: len(got)])  # what it writes comes after
    assert found


@every_value(
    ("format", FORMATS),
    ("rows, live", [(21, None), (40, 17), (5, 9)]),
    ("pair", [False, True]),
)
def test_tiles_over_all_rows_and_over_some(
    interpreted: Interpreter, format: Format, rows: int, live: int | None, pair: bool
) -> None:
    draw = torch.Generator().manual_seed(3)
    weight = quantise(torch.randn((2 * 37, 72), generator=draw), format)
    x, bias = torch.randn((rows, 72), generator=draw), torch.randn(2 * 37, generator=draw)
    want = multiply(x, weight, bias)
    if pair:
        gate, up = want.chunk(2, 1)
        want = torch.nn.functional.silu(gate) * up
    count = None if live is None else cu_rows_of((live,))
    (got, _) = interpreted("stored", (x, weight, bias, count, pair), "launch")
    some = min(rows, rows if live is None else live)
    torch.testing.assert_close(got[:some], want[:some], rtol=2e-4, atol=2e-4)


@every_value(("format", (*FORMATS, Format("int4", (1, 32)))), ("pair", [False, True]))
def test_tiles_that_several_programs_share(interpreted: Interpreter, format: Format, pair: bool) -> None:
    """Eight shares of a tile, the last one shorter, where a CPU counts as four multiprocessors."""
    from dgraph.ops.products.triton.stored import Tile

    draw = torch.Generator().manual_seed(8)
    weight, x = quantise(torch.randn((24, 984), generator=draw), format), torch.randn((9, 984), generator=draw)
    want = multiply(x, weight)
    if pair:
        gate, up = want.chunk(2, 1)
        want = torch.nn.functional.silu(gate) * up
    tile = Tile(16, 16, 32, 16, 4, 1, programs=16)
    (got, _) = interpreted("stored", (x, weight, None, None, pair, tile), "launch")
    torch.testing.assert_close(got, want, rtol=2e-4, atol=1e-3)


@every_value(("format", FORMATS), ("pair", [False, True]))
def test_many_rows_have_the_weight_dequantised(interpreted: Interpreter, format: Format, pair: bool) -> None:
    draw = torch.Generator().manual_seed(9)
    weight, x = quantise(torch.randn((74, 136), generator=draw), format), torch.randn((150, 136), generator=draw)
    (got, _) = interpreted("stored", (weight, x), "taken")
    torch.testing.assert_close(got, weight.dequantised(torch.float32), rtol=1e-6, atol=1e-6)
    name = "rows_glu" if pair else "rows_linear"
    args = x, weight, None, cu_rows_of((140,))
    (got, _), want = interpreted(name, args), OPS[name].reference(*args)
    torch.testing.assert_close(got[:140], want[:140], rtol=2e-4, atol=1e-3)
    taken = OPS[name].workspace
    assert taken is not None
    assert taken(torch.device("cuda"), *args) == weight.dequantised(torch.float32).nbytes
    assert not taken(torch.device("cuda"), x[:128], *args[1:])


@every_value(
    ("kind", ROW_KINDS),
    ("rows, live", [(21, None), (140, 130), (5, 9), (40, 17), (0, None)]),
    ("pair", [False, True]),
    ("biased", [False, True]),
)
def test_numbers_by_numbers(
    interpreted: Interpreter, kind: str, rows: int, live: int | None, pair: bool, biased: bool
) -> None:
    draw = torch.Generator().manual_seed(6)
    weight = quantise(torch.randn((2 * 37, 272), generator=draw), Format(kind))
    x = QuantisedRows(*quantised_rows(torch.randn((rows, 272), generator=draw), kind), torch.float32)
    bias = torch.randn(2 * 37, generator=draw) if biased else None
    want = multiply(x, weight, bias)
    if pair:
        gate, up = want.chunk(2, 1)
        want = torch.nn.functional.silu(gate) * up
    count = None if live is None else cu_rows_of((live,))
    (got, _) = interpreted("eight_bits", (x, weight, bias, count, pair), "launch")
    some = min(rows, rows if live is None else live)
    assert got.shape == want.shape
    torch.testing.assert_close(got[:some], want[:some], rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("name", [op.name for op in OPS.values() if op.rounded])
def test_every_op_that_takes_rows_in_8_bits_gives_what_its_reference_does(interpreted: Interpreter, name: str) -> None:
    op, found = OPS[name], 0
    for sample in [s for s in samples_of(op) if s.args[0].numel()][:3]:
        args = in_numbers(op, sample.args, "int8")
        want = settled(name, sample.args, flat(op.reference(*copy.deepcopy(args))))
        compare(settled(name, sample.args, flat(interpreted(name, args)[0])), want, 2e-4)
        found += 1
    assert found


def in_numbers(op: Op, args: tuple[Any, ...], kind: str) -> tuple[Any, ...]:
    """The arguments with rows and weights in 8 bits."""
    named = dict(zip(op.arguments, args, strict=False))
    of_rows = {name: QuantisedRows(*quantised_rows(named[name], kind), torch.float32) for name in op.rounded}
    return tuple({**named, **of_rows, **{name: quantise(named[name], Format(kind)) for name in op.stored}}.values())


@every_value(("kind", ROW_KINDS), ("chunk", [4, 100]), ("packed", [False, True]), ("listed", [False, True]))
def test_candidates_in_8_bits(interpreted: Interpreter, kind: str, chunk: int, packed: bool, listed: bool) -> None:
    h, *rest, _, suppress = heading(21, vocab=50, d=20)
    if packed:
        h = torch.cat([h[rest[2]], h[~rest[2]]])
    args = in_numbers(OPS["lm_head"], (h, *rest, chunk, suppress, packed), kind)
    got, _ = interpreted("lm_head", args, listed=listed)
    compare(flat(got), OPS["lm_head"].reference(*args), 2e-4)


@pytest.mark.parametrize("bounds", [(0, 0, 9), (4, 4, 15), (30, 31, 40)])
def test_rows_of_experts(interpreted: Interpreter, bounds: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(4)
    weight = quantise(torch.randn((3, 40, 24), generator=draw), Format("int4", (1, 8)))
    x = torch.randn((40, 24), generator=draw)
    got, _ = interpreted("stored", (x, weight, torch.tensor(bounds, dtype=torch.int32)), "multiply_grouped")
    for expert, (begin, end) in enumerate(zip((0, *bounds), bounds, strict=False)):
        want = multiply(x[begin:end], weight[expert])
        torch.testing.assert_close(got[begin:end], want, rtol=1e-4, atol=1e-4)


@pytest.mark.release
def test_numbers_go_to_the_matrix_units_of_a_gpu_that_need_not_be_there() -> None:
    pytest.importorskip("triton")
    found = found_by("compiled_eight_bits")
    assert len(found) == 16 + 24
    multiplied = {"fp8e4nv": "e4m3", "i8": "s8", "words": "bf16"}
    assert all(kinds == [multiplied[name.split()[0]]] for name, kinds in found.items()), found


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f"{f.kind} {f.block}")
@pytest.mark.parametrize("rows", [1, 17, 64, 100, 200])
def test_a_gpu_multiplies_by_what_is_stored(format: Format, rows: int) -> None:
    draw = torch.Generator("cuda").manual_seed(5)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device="cuda", dtype=torch.bfloat16)

    weight, x = quantise(values(512, 384), format), values(rows, 384)
    got = OPS["linear"].on_gpu(x, weight, None)
    want = torch.nn.functional.linear(x.double(), weight.dequantised(torch.float64))
    assert (got - want).norm() <= 1e-2 * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize("high", [1, WHOLE])
@pytest.mark.parametrize("rows", [1, 17, 64, 200])
def test_a_gpu_multiplies_numbers_by_numbers(kind: str, high: int, rows: int) -> None:
    draw = torch.Generator("cuda").manual_seed(5)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device="cuda", dtype=torch.bfloat16)

    weight = quantise(values(512, 4096), Format(kind, (high, WHOLE)))
    x = QuantisedRows(*quantised_rows(values(rows, 4096), kind), torch.bfloat16)
    got = OPS["linear"].on_gpu(x, weight, None)
    want = torch.nn.functional.linear(x.values.double() * x.scales.double(), weight.dequantised(torch.float64))
    assert (got - want).norm() <= 5e-3 * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize("rows", [3, 40, 400])
def test_a_gpu_multiplies_numbers_by_numbers_in_every_expert(kind: str, rows: int) -> None:
    """Every fifth row goes to none."""
    draw = torch.Generator("cuda").manual_seed(5)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device="cuda", dtype=torch.bfloat16)

    x = QuantisedRows(*quantised_rows(values(rows, 1024), kind), torch.bfloat16)
    choice = torch.rand((rows, 8), generator=draw, device="cuda").argsort(-1)[:, :3]
    choice[::5] = -1
    stacks = [quantise(values(8, *shape) / shape[-1] ** 0.5, Format(kind)) for shape in ((1536, 1024), (1024, 768))]
    args = x, choice, values(rows, 3).abs(), *stacks, "silu", kind
    got, want = OPS["experts"].on_gpu(*args), OPS["experts"].reference(*args)
    assert (got - want).float().norm() <= 1e-2 * want.float().norm()
    assert not got[::5].any()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize("listed", [False, True])
def test_a_gpu_decides_by_candidates_in_8_bits(kind: str, listed: bool) -> None:
    h, *rest, _, suppress = heading(70, vocab=4096, d=256)
    args = [None if x is None else x.cuda() for x in (h, *rest)]
    args = [*in_numbers(OPS["lm_head"], (*args, 32, suppress, False), kind)]
    got, want = OPS["lm_head"].on_gpu(*args, listed=listed), OPS["lm_head"].reference(*args)
    assert (got[0] == want[0]).float().mean() > 0.95  # logits that are summed in another order may be level
    torch.testing.assert_close(got[1][got[0] == want[0]], want[1][got[0] == want[0]], rtol=1e-2, atol=1e-3)

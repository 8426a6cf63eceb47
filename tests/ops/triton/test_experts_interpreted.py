"""Routing and experts in Triton: against the references and the loop over rows, interpreted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from dgraph.errors import InputError
from dgraph.families.quantised import ROW_KINDS, WHOLE, Format, QuantisedRows, QuantisedWeight, quantise, quantised_rows
from dgraph.ops import OPS
from dgraph.ops.experts.experts import gated
from tests.amounts import every_value
from tests.ops.triton.compiled import found_by
from tests.ops.triton.interpreter import Interpreter
from tests.ops.triton.mixtures import draw, literal, mixture, routing, sharing

route, experts = OPS["route"].reference, OPS["experts"].reference
FORMS = ("by_grouping", "by_masking", "kernel")

# -- routing -----------------------------------------------------------------------------------------------------


def check_routing(interpreted: Interpreter, *args: Any) -> None:
    (choice, weight), _ = interpreted("route", args)
    wanted, weights = route(*args)
    assert choice.equal(wanted)
    assert_close(weight, weights, rtol=1e-5, atol=1e-6)


@every_value(
    ("biased, score", [(True, "sigmoid"), (False, "sigmoid"), (True, "softmax"), (False, "softmax")]),
    (
        "count, groups, top_groups, topk",
        [
            (256, 8, 4, 8),
            (256, 1, 1, 8),
            (16, 8, 4, 8),  # all of what is open
            (12, 3, 2, 5),
            (35, 5, 5, 3),
            (10, 5, 1, 2),
            (97, 1, 1, 97),
            (1, 1, 1, 1),
            (1200, 2, 1, 9),
        ],
    ),
)
def test_routing_in_any_groups(
    interpreted: Interpreter, count: int, groups: int, top_groups: int, topk: int, score: str, biased: bool
) -> None:
    check_routing(interpreted, *routing(7, count, groups, top_groups, topk, score=score, biased=biased))


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_ties_of_experts_and_groups_go_to_the_lower_id(interpreted: Interpreter, levels: int) -> None:
    values = torch.randint(0, levels, (25, 24), generator=torch.Generator().manual_seed(levels)).float()
    for groups, top_groups in ((1, 1), (6, 2), (3, 3)):
        check_routing(interpreted, values, None, "sigmoid", groups, top_groups, 5, True, 1.0)
        check_routing(interpreted, values, None, "softmax", groups, top_groups, 5, False, 1.0)


def test_a_bias_that_rules_out_nearly_all(interpreted: Interpreter) -> None:
    """Ranks of minus infinity tie with those of closed groups."""
    bias = torch.full((12,), -torch.inf)
    bias[[7, 10]] = torch.tensor([-3.0, 2.0])
    for groups, top_groups in ((1, 1), (3, 2), (6, 2)):
        check_routing(interpreted, draw(9, 12), bias, "sigmoid", groups, top_groups, 4, True, 1.0)


def test_logits_and_bias_in_bf16_and_in_three_dimensions(interpreted: Interpreter) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        logits, bias = draw(2, 3, 20).to(dtype), draw(20, seed=1).to(dtype)
        check_routing(interpreted, logits, bias, "sigmoid", 4, 2, 3, True, 1.5)


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
@pytest.mark.parametrize("groups", [1, 4])
def test_whatever_a_row_holds_it_goes_to_experts_and_changes_no_other(
    interpreted: Interpreter, score: str, groups: int
) -> None:
    logits = draw(7, 12)
    rules = None, score, groups, groups, 3, True, 1.0
    (choice, weight), _ = interpreted("route", (logits, *rules))
    broken = logits.clone()
    broken[1], broken[2, 5], broken[4], broken[6, ::2] = torch.nan, torch.nan, torch.inf, -torch.inf
    (found, other), _ = interpreted("route", (broken, *rules))
    assert found.equal(route(broken, *rules)[0]), "no number is above all others"
    for row in found.tolist():
        assert len(set(row)) == 3
        assert set(row) <= set(range(12))
    whole = torch.tensor([0, 3, 5])
    assert found[whole].equal(choice[whole])
    assert other[whole].equal(weight[whole])
    bias = torch.zeros(12)
    bias[[3, 8]] = torch.tensor([torch.nan, -torch.nan])
    check_routing(interpreted, logits, bias, *rules[1:])


def test_routing_that_cannot_be(interpreted: Interpreter) -> None:
    for rules, message in ((("tanh", 1, 1, 2), "score must be one of"), (("sigmoid", 5, 1, 2), "5 equal groups")):
        with pytest.raises(InputError, match=message):
            interpreted("route", (draw(3, 16), None, *rules, True, 1.0))


@pytest.mark.parametrize(
    ("experts", "capacity", "biased", "block"), [(256, 48, True, 32), (12, 5, False, 3), (97, 97, True, 1)]
)
def test_blocks_that_share_experts(
    interpreted: Interpreter, experts: int, capacity: int, biased: bool, block: int
) -> None:
    args = sharing(40, experts, capacity, block=block, biased=biased)
    found, _ = interpreted("block_experts", args)
    assert found.equal(OPS["block_experts"].reference(*args))
    check_routing(interpreted, *args[:2], "sigmoid", 1, 1, min(5, capacity), True, 2.5, found)


# -- experts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k", "count"), [(1, 1, 1), (5, 8, 9), (1500, 3, 7), (1024, 4, 3), (4097, 1, 2)])
def test_slots_are_numbered_in_order(interpreted: Interpreter, n: int, k: int, count: int) -> None:
    """More of them than a block, too; choices may name no expert by any number."""
    generator = torch.Generator().manual_seed(n)
    choice = torch.randint(-1, count + 1, (n, k), generator=generator)
    choice[torch.rand((n, k), generator=generator) < 0.02] = 2**32 + count - 1
    (ends, rank), _ = interpreted("experts", (choice, count), function="ordered")
    flat = choice.flatten()
    assert ends.tolist() == [int(((flat >= 0) & (flat <= e)).sum()) for e in range(count)]
    for expert in range(count):
        mine = rank[flat == expert]
        assert mine.equal(torch.arange(len(mine)).int())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "k", "count", "d", "f"), [(1, 1, 2, 8, 8), (7, 3, 5, 40, 24), (40, 4, 16, 16, 8)])
def test_every_form_is_the_literal_sum(
    interpreted: Interpreter, form: str, n: int, k: int, count: int, d: int, f: int
) -> None:
    args = mixture(n, k, count, d, f)
    got, _ = interpreted("experts", args, function=form)
    assert_close(got, literal(*args).float(), rtol=1e-5, atol=1e-6)


def in_numbers(args: tuple[Tensor, ...], kind: str) -> tuple[Any, ...]:
    """A mixture whose rows and weights are in 8 bits."""
    x, choice, weight, gate_up, down = args
    rows = QuantisedRows(*quantised_rows(x, kind), x.dtype)
    return rows, choice, weight, quantise(gate_up, Format(kind)), quantise(down, Format(kind))


@every_value(
    ("kind", ROW_KINDS),
    ("sizes", [(1, 1, 2, 8, 8), (7, 3, 5, 40, 24), (9, 3, 4, 48, 32), (40, 2, 3, 300, 8), (5, 2, 3, 24, 2100)]),
    ("activation", ["silu", "gelu_tanh"]),
    ("between", [True, False]),
)
def test_numbers_by_numbers_in_every_expert(
    interpreted: Interpreter, kind: str, sizes: tuple[int, ...], activation: str, between: bool
) -> None:
    args = *in_numbers(mixture(*sizes), kind), activation, kind if between else None
    got, _ = interpreted("experts", args)
    assert_close(got, experts(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize("weights", ["as they are", "in other numbers"])
def test_rows_are_rounded_between_products_by_other_weights(interpreted: Interpreter, kind: str, weights: str) -> None:
    x, choice, weight, *stacks = mixture(9, 3, 4)
    if weights != "as they are":
        stacks = [quantise(each, Format("int4", (1, 8))) for each in stacks]  # type: ignore[misc]
    args = x, choice, weight, *stacks, "silu", kind
    got, _ = interpreted("experts", args)
    assert_close(got, experts(*args), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(got, experts(*args[:-1]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_rows_between_are_rounded_as_the_reference_rounds(interpreted: Interpreter, kind: str) -> None:
    """Of gates so large that silu leaves them as they are, so that nothing else is inexact."""
    up, ends = draw(20, 45), torch.tensor([4, 4, 17], dtype=torch.int32)
    up[3], up[5, 7], up[6, 0], up[7] = 0.0, torch.nan, torch.inf, up[7] * 1e-38
    got, _ = interpreted("experts_rounded", (torch.cat([torch.full_like(up, 64.0), up], 1), ends, kind, True), "gate")
    values, scales = quantised_rows(64 * up[:17], kind)
    assert_close(got.scales[:17], scales, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.values[:17].float(), values.float())


@pytest.mark.release
def test_numbers_of_experts_go_to_the_matrix_units_of_a_gpu_that_need_not_be_there() -> None:
    found = found_by("compiled_experts")
    products = {name: kinds for name, kinds in found.items() if "between" not in name}
    assert len(products) == 8
    assert all(kinds == ["e4m3" if name.startswith("fp8") else "s8"] for name, kinds in products.items()), found
    for name in found.keys() - products.keys():
        assert found[name][-1] == "div.rn.f32", "divisions are those of the reference"
        assert ("e4m3" in found[name][0]) == name.startswith("fp8"), found


@pytest.mark.release
def test_sums_of_float8_leave_the_matrix_units_in_each_iteration() -> None:
    """There they are added up in fewer bits than fp32 has; of others they stay."""
    found = found_by("compiled_grouped")
    assert len(found) == 16
    units = [kinds for name, kinds in found.items() if "unit" in name]
    assert units == [["bf16", "beside"]] * 4, "their activation adds up, too"
    found = {name: kinds for name, kinds in found.items() if "unit" not in name}
    expected = {"bf16": ["bf16"], "fp8": ["e4m3", "beside"], "int8": ["s8"]}
    assert all(kinds == expected[name.partition(" ")[0]] for name, kinds in found.items()), found


def test_a_row_that_is_not_finite_changes_no_other(interpreted: Interpreter) -> None:
    x, *rest = mixture(6, 2, 3)
    x[2, 5] = torch.inf
    args = *in_numbers((x, *rest), "int8"), "silu", "int8"
    (got, _), want = interpreted("experts", args), experts(*args)
    assert got[2].isnan().all()
    assert_close(got, want, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert want[torch.arange(6) != 2].isfinite().all()


def test_rows_wider_than_a_block(interpreted: Interpreter) -> None:
    args = mixture(5, 2, 3, 1500, 1100)
    got, _ = interpreted("experts", args)
    assert_close(got, literal(*args).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("which", ["one expert", "more experts than rows", "no expert"])
def test_routings_of_any_skew(interpreted: Interpreter, form: str, which: str) -> None:
    x, choice, weight, gate_up, down = mixture(30, 3, 70)
    if which == "one expert":
        choice = torch.full_like(choice, 41)
    elif which == "more experts than rows":
        x, choice, weight = x[:4], choice[:4], weight[:4]
    else:
        choice, weight = torch.where(choice % 2 == 0, -1, 70), torch.full_like(weight, torch.nan)
    got, _ = interpreted("experts", (x, choice, weight, gate_up, down), function=form)
    assert_close(got, literal(x, choice, weight, gate_up, down).float(), rtol=1e-5, atol=1e-6)
    assert which != "no expert" or not got.any()


@pytest.mark.parametrize("form", FORMS)
def test_every_form_in_bf16(interpreted: Interpreter, form: str) -> None:
    args = tuple(t.bfloat16() if t.is_floating_point() else t for t in mixture(20, 3, 6))
    got, _ = interpreted("experts", args, function=form)
    assert got.dtype == torch.bfloat16
    assert_close(got.double(), literal(*args), rtol=2e-2, atol=2e-2)
    assert_close(got, experts(*args), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("form", ["reference", *FORMS])
def test_experts_without_rows_and_rows_without_experts(interpreted: Interpreter, form: str) -> None:
    """What is in either does not matter."""
    x, choice, weight, gate_up, down = mixture(9, 2, 6)
    choice[:, 1] = -1
    choice[:, 0] = 4
    choice[3, 0] = 77
    weight[:, 1], weight[3], x[3] = torch.nan, torch.nan, torch.nan
    for other in (0, 1, 2, 3, 5):
        gate_up[other], down[other] = torch.nan, torch.nan
    args = x, choice, weight, gate_up, down
    got = experts(*args) if form == "reference" else interpreted("experts", args, function=form)[0]
    gate, up = (x @ gate_up[4].T).chunk(2, dim=-1)
    want = weight[:, :1] * ((gate * gate.sigmoid() * up) @ down[4].T)
    assert not got[3].any()
    live = torch.arange(9) != 3
    assert_close(got[live], want[live], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["reference", *FORMS])
def test_the_order_of_experts_changes_no_bit(interpreted: Interpreter, form: str) -> None:
    x, choice, weight, gate_up, down = mixture(12, 3, 5)
    order = torch.tensor([3, 0, 4, 1, 2])
    renamed = torch.where(choice < 0, choice, order.argsort()[choice.clamp(min=0)])
    calls = (x, renamed, weight, gate_up[order], down[order]), (x, choice, weight, gate_up, down)
    if form == "reference":
        one, other = (experts(*args) for args in calls)
    else:
        one, other = (interpreted("experts", args, function=form)[0] for args in calls)
    assert torch.equal(one, other)


def test_rows_choices_and_weights_may_be_views(interpreted: Interpreter) -> None:
    args = mixture(9, 3, 5)
    views = *(torch.cat([t, torch.full_like(t, 2)], 1)[:, : t.shape[1]] for t in args[:3]), *args[3:]
    got, _ = interpreted("experts", views)
    assert_close(got, literal(*args).float(), rtol=1e-5, atol=1e-6)


def test_no_rows_no_slots_and_float64(interpreted: Interpreter) -> None:
    x, choice, weight, *weights = mixture(4, 2, 3)
    assert interpreted("experts", (x[:0], choice[:0], weight[:0], *weights))[0].shape == (0, 16)
    assert not interpreted("experts", (x, choice[:, :0], weight[:, :0], *weights))[0].any()
    doubled = tuple(t.double() if t.is_floating_point() else t for t in (x, choice, weight, *weights))
    assert_close(interpreted("experts", doubled)[0], literal(*doubled))


class Operations(TorchDispatchMode):
    """Names of the operations of torch that compute something, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in ("empty", "empty_like", "transpose", "view"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class Launches:
    """In place of a kernel: notes that it was launched."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen = name, seen

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.seen.append(self.name)


def test_experts_are_three_launches_and_two_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device there are no values that a host could read; there a grouped product is of bf16 alone. Where
    experts have many rows, the products are the library's, and their activation a launch of its own.
    """
    from dgraph.ops.experts.triton import experts as module
    from dgraph.ops.experts.triton import grouped

    seen: list[str] = []
    product, unit = "_multiply_rows_of_groups", "_multiply_units_of_groups"
    for name in ("_order_slots", "_spread_rows", "_gate_rows", "_sum_slots"):
        monkeypatch.setattr(module, name, Launches(name, seen))
    for name in (product, unit):
        monkeypatch.setattr(grouped, name, Launches(name, seen))
    args = [t.to("meta", torch.bfloat16 if t.is_floating_point() else t.dtype) for t in mixture(6, 2, 4)]
    with Operations() as operations:
        out = module.by_grouping(*args)
    assert (out.shape, out.dtype) == ((6, 16), torch.bfloat16)
    assert seen == ["_order_slots", "_spread_rows", unit, product, "_sum_slots"]
    assert not operations.names
    seen.clear()
    monkeypatch.setattr(grouped, "TILES", (replace(grouped.TILES[0], up_to=2),))
    with Operations() as operations:
        module.by_grouping(*args)
    assert seen == ["_order_slots", "_spread_rows", "_gate_rows", "_sum_slots"]
    assert operations.names == ["_grouped_mm"] * 2
    assert module.by_masking(*args).shape == (6, 16)


def test_rows_of_8_bits_and_their_scales_are_spread_by_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from dgraph.ops.experts.triton import experts as module

    seen: list[str] = []
    monkeypatch.setattr(module, "_spread_rows", Launches("_spread_rows", seen))
    x = QuantisedRows(*quantised_rows(torch.randn(6, 16), "int8"), torch.float32).each(lambda part: part.to("meta"))
    choice, ends, rank = (torch.empty(n, dtype=torch.int32, device="meta") for n in ((6, 2), 4, 12))
    with Operations() as operations:
        rows, place = module.spread(x, choice, ends, rank)
    assert isinstance(rows, QuantisedRows)
    assert (rows.values.shape, rows.scales.shape, place.shape) == ((12, 16), (12, 1), (12,))
    assert (seen, operations.names) == (["_spread_rows"], [])


def test_a_route_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from dgraph.ops.experts.triton import route as module

    seen: list[str] = []
    monkeypatch.setattr(module, "_route", Launches("_route", seen))
    logits, bias, *rules = routing(5, 32, 4, 2, 3, biased=True)
    assert isinstance(bias, Tensor)
    args = logits.to("meta"), bias.to("meta"), *rules
    with Operations() as operations:
        choice, weight = module.kernel(*args)
    assert choice.shape == weight.shape == (5, 3)
    assert seen == ["_route"]
    assert operations.names == []


@pytest.mark.parametrize(("rows", "columns", "depth"), [(16, 64, 32), (32, 16, 64), (64, 128, 16)])
def test_products_of_groups_of_any_size(interpreted: Interpreter, rows: int, columns: int, depth: int) -> None:
    """Groups of no row, of several tiles, up to the last row and not; rows that no group has are not written."""
    from dgraph.ops.products.triton.stored import Tile

    for groups, out, into, n in ((4, 40, 24, 90), (5, 16, 32, 7), (3, 130, 64, 70)):
        generator = torch.Generator().manual_seed(groups)
        x, weight = draw(n, into), draw(groups, out, into, seed=1)
        for last in (n, n - 3):
            ends = torch.randint(0, last + 1, (groups,), generator=generator).sort().values.int()
            ends[0], ends[-1] = 0, last
            x[last:] = torch.nan
            tile = Tile(0, rows, columns, depth, 4, 2)
            found, _ = interpreted("grouped", (x, weight, ends), "multiply", tile=tile)
            begin = 0
            for end, by in zip(ends.tolist(), weight, strict=True):
                assert_close(found[begin:end], x[begin:end] @ by.T, rtol=1e-4, atol=1e-4)
                begin = end


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(16, 64, 32), (32, 32, 64), (64, 128, 16)])
def test_units_of_groups_of_any_size(interpreted: Interpreter, rows: int, columns: int, depth: int, silu: bool) -> None:
    """The product with its activation; a tile reads gate rows beyond their end, and rows of the next group."""
    from dgraph.ops.products.triton.stored import Tile

    for groups, size, into, n in ((4, 20, 24, 90), (5, 8, 32, 7), (3, 65, 64, 70)):
        x, weight = draw(n, into), draw(groups, 2 * size, into, seed=1) * into**-0.5
        ends = torch.randint(0, n - 2, (groups,), generator=torch.Generator().manual_seed(n)).sort().values.int()
        ends[0], ends[-1] = 0, n - 3
        x[n - 3 :] = torch.nan
        tile = Tile(0, rows, columns, depth, 4, 2)
        found, _ = interpreted("grouped", (x, weight, ends, silu), "multiply_units", tile=tile)
        assert found.shape == (n, size)
        begin = 0
        for end, by in zip(ends.tolist(), weight, strict=True):
            want = gated(x[begin:end] @ by.T, "silu" if silu else "gelu_tanh")
            assert_close(found[begin:end], want, rtol=1e-4, atol=1e-4)
            begin = end


def numbers_by_group(
    kind: str, n: int, groups: int, out: int, into: int, block: tuple[int, int] = (1, WHOLE)
) -> tuple[QuantisedRows, QuantisedWeight, Tensor]:
    """Rows in 8 bits, such weights, and bounds of groups, of which some have no row; two rows are of no group."""
    x = draw(n, into)
    ends = torch.randint(0, n - 1, (groups,), generator=torch.Generator().manual_seed(n)).sort().values.int()
    ends[0], ends[-1] = 0, n - 2
    weight = quantise(draw(groups, out, into, seed=1), Format(kind, block))
    return QuantisedRows(*quantised_rows(x, kind), x.dtype), weight, ends


@every_value(
    ("kind", ROW_KINDS),
    ("high", [1, 16, WHOLE]),
    ("sizes", [(90, 4, 40, 80), (7, 5, 16, 32), (70, 3, 130, 160), (3, 2, 24, 16)]),
    ("tile", [(16, 64, 32), (32, 16, 128), (64, 128, 64), (16, 32, 256)]),
)
def test_numbers_by_numbers_of_groups_of_any_size(
    interpreted: Interpreter, kind: str, high: int, sizes: tuple[int, ...], tile: tuple[int, ...]
) -> None:
    from dgraph.ops.products.triton.stored import Tile

    x, weight, ends = numbers_by_group(kind, *sizes, (high, WHOLE))
    found, _ = interpreted("grouped", (x, weight, ends), "multiply", tile=Tile(0, *tile, 4, 2))
    begin = 0
    for end, by in zip(ends.tolist(), weight.dequantised(torch.float32), strict=True):
        assert_close(found[begin:end], x.dequantised()[begin:end] @ by.T, rtol=1e-4, atol=1e-4)
        begin = end


@pytest.mark.parametrize("kind", ["plain", *ROW_KINDS])
def test_rows_that_no_group_has_are_not_written(interpreted: Interpreter, kind: str) -> None:
    x, weight, ends = numbers_by_group("int8" if kind == "plain" else kind, 20, 3, 40, 48)
    args = (x.dequantised(), weight.dequantised(torch.float32), ends) if kind == "plain" else (x, weight, ends)
    call = interpreted._pool.submit
    call(torch.use_deterministic_algorithms, True).result()  # with which new memory holds NaN
    found, _ = interpreted("grouped", args, "multiply")
    call(torch.use_deterministic_algorithms, False).result()
    assert found[:18].isfinite().all()
    assert found[18:].isnan().all()


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_which_kernel_multiplies_numbers_of_groups(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The one that loads in bulk, of few rows whose numbers lie as it wants them."""
    from dgraph.ops.experts.triton import experts_rounded, grouped

    def kernel(x: QuantisedRows, weight: QuantisedWeight, ends: Tensor) -> str:
        seen.clear()
        x = x.each(lambda part: part.to("meta"))
        weight = replace(weight, values=weight.values.to("meta"), scales=weight.scales.to("meta"))
        assert experts_rounded.multiply_grouped(x, weight, ends.to("meta")).shape == (len(x), weight.shape[1])
        (name,) = seen
        return name

    seen: list[str] = []
    bulk, pointers = "_multiply_rows_of_groups", "_multiply_group_numbers"
    monkeypatch.setattr(grouped, bulk, Launches(bulk, seen))
    monkeypatch.setattr(experts_rounded, pointers, Launches(pointers, seen))
    x, weight, ends = numbers_by_group(kind, 6, 2, 8, 32)
    assert kernel(x, weight, ends) == bulk
    assert kernel(*numbers_by_group(kind, 6, 2, 8, 24)) == pointers, "rows of 24 bytes"
    across = replace(weight, values=weight.values.transpose(1, 2).contiguous().transpose(1, 2))
    assert kernel(x, across, ends) == pointers
    monkeypatch.setattr(grouped, "TILES_OF_NUMBERS", (replace(grouped.TILES_OF_NUMBERS[0], up_to=2),))
    assert kernel(x, weight, ends) == pointers, "more rows than there are tiles for"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_products_of_groups_do_not_pay_before_hopper(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    from dgraph.ops.experts.triton import grouped

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with FakeTensorMode():
        x, weight = (torch.empty(shape, dtype=dtype, device="cuda") for shape in ((6, 32), (2, 8, 32)))
        assert not grouped.pays(x, weight)


def test_where_products_of_groups_pay() -> None:
    from dgraph.ops.experts.triton import grouped

    x, weight = torch.zeros(6, 8), torch.zeros(2, 4, 8)
    assert grouped.pays(x, weight)
    assert not grouped.pays(torch.zeros(grouped.TILES[-1].up_to * 2 + 1, 8), weight)
    assert not grouped.pays(x[:, :5].contiguous(), torch.zeros(2, 4, 5)), "rows of 20 bytes"
    assert not grouped.pays(x, weight.transpose(1, 2).contiguous().transpose(1, 2))
    assert not grouped.pays(x.bfloat16(), weight)
    assert not grouped.pays(x.bfloat16(), weight.bfloat16()), "the interpreter takes these for integers"
    assert not grouped.pays(x.double(), weight.double())
    for dtype in (torch.int8, torch.float8_e4m3fn):
        assert grouped.pays(torch.zeros(6, 32).to(dtype), torch.zeros(2, 4, 32).to(dtype))

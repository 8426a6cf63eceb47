"""Canonical form on hand-built graphs: what is raised, what only looks like it, and that neither changes a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from dgraph.errors import CaptureError
from dgraph.frontend.canonicalise import canonicalise
from dgraph.ir.graph import Graph
from tests.tiny import Hand, interpret, ops_of

aten = torch.ops.aten
D = 16

Build = Callable[..., Node]


def graph_of(build: Build, dtype: torch.dtype = torch.float32) -> Graph:
    """x [N, 3, D], a weight w [D], and cos, sin [N, 1, D]; one output y."""
    hand = Hand()
    hand.layer = 0
    x = hand.input("x", "N", 3, D, dtype=dtype)
    w = hand.weight("layers.0.w", D, dtype=dtype)
    cos, sin = (hand.input(name, "N", 1, D, dtype=dtype) for name in ("cos", "sin"))
    return hand.returns(y=build(hand.call, x, w, cos, sin))


def inputs_of(dtype: torch.dtype, rows: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"x": (rows, 3, D), "cos": (rows, 1, D), "sin": (rows, 1, D)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def canonical(build: Build, dtype: torch.dtype = torch.float32) -> Graph:
    """The canonical graph, held to the values of the graph as it was written down."""
    graph, inputs = graph_of(build, dtype), inputs_of(dtype)
    before = interpret(graph, inputs)["y"]
    canonicalise(graph)
    after = interpret(graph, {n: inputs[n] for n in graph.inputs})["y"]
    assert after.dtype == before.dtype
    assert torch.equal(after, before)
    return graph


# -- RMSNorm -----------------------------------------------------------------------------------------------------


def norm(
    call: Any,
    x: Node,
    w: Node,
    *_: Node,
    wide: torch.dtype | None = None,
    power: float = 2,
    reduce: Any = aten.mean.dim,
    dims: tuple[int, ...] = (-1,),
    eps: Any = 1e-6,
    squared: Callable[[Any, Node], Node] | None = None,
    alpha: dict[str, Any] | None = None,
    mean_dtype: dict[str, Any] | None = None,
    weight_first: bool = True,
    swap: bool = False,
    scale: Callable[[Any, Node], Node] | None = None,
) -> Node:
    """The spelling of Llama and Qwen, with one thing changed at a time."""
    x32 = call(aten.to.dtype, x, wide) if wide is not None else x
    of = squared(call, x32) if squared else x32
    mean = call(reduce, call(aten.pow.Tensor_Scalar, of, power), list(dims), True, **(mean_dtype or {}))
    rsqrt = call(aten.rsqrt.default, call(aten.add.Tensor, mean, eps, **(alpha or {})))
    scaled = call(aten.mul.Tensor, rsqrt, x32) if swap else call(aten.mul.Tensor, x32, rsqrt)
    if wide is not None:
        scaled = call(aten.to.dtype, scaled, x.meta["val"].dtype)
    if scale is not None:
        w = scale(call, w)
    return call(aten.mul.Tensor, w, scaled) if weight_first else call(aten.mul.Tensor, scaled, w)


@pytest.mark.parametrize("change", [{}, {"weight_first": False}, {"swap": True}, {"eps": 0.5}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rms_norm_is_raised(change: dict[str, Any], dtype: torch.dtype) -> None:
    graph = canonical(lambda *a: norm(*a, **change), dtype)
    (node,) = graph.calls
    assert ops_of(graph) == ["dgraph.rms_norm"]
    assert node.args[1] is graph.weight("layers.0.w")
    assert node.args[2] == change.get("eps", 1e-6)
    assert (node.meta["layer"], node.meta["role"], node.meta["by"]) == (0, "block", "")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_with_casts_is_raised(dtype: torch.dtype) -> None:
    assert ops_of(canonical(lambda *a: norm(*a, wide=torch.float32), dtype)) == ["dgraph.rms_norm"]


def test_a_cast_that_changes_nothing_is_no_cast() -> None:
    assert ops_of(canonical(lambda *a: norm(*a, wide=torch.float32))) == ["dgraph.rms_norm"]


def by_a_computed_weight(call: Any, w: Node) -> Node:
    return call(aten.add.Tensor, w, 1.0)


NORM_MISSES: dict[str, dict[str, Any]] = {
    "mean over another dim": {"dims": (1,)},
    "mean over two dims": {"dims": (1, 2)},
    "sum instead of mean": {"reduce": aten.sum.dim_IntList},
    "fourth power instead of square": {"power": 4},
    "mean of another value": {"squared": lambda call, x: call(aten.add.Tensor, x, 1.0)},
    "eps counted twice": {"alpha": {"alpha": 2}},
    "mean in another dtype": {"mean_dtype": {"dtype": torch.float64}},
    "computed in a wider dtype": {"wide": torch.float64},
}


@pytest.mark.parametrize("name", NORM_MISSES)
def test_what_only_looks_like_rms_norm_is_left_alone(name: str) -> None:
    assert "dgraph.rms_norm" not in ops_of(canonical(lambda *a: norm(*a, **NORM_MISSES[name])))


def test_a_norm_in_half_precision_is_left_alone() -> None:
    """The op would compute it in fp32: better, but not what was captured."""
    assert "dgraph.rms_norm" not in ops_of(canonical(norm, torch.bfloat16))


def test_a_norm_over_a_computed_eps_or_an_input_as_weight_is_left_alone() -> None:
    def computed(call: Any, x: Node, w: Node, cos: Node, sin: Node) -> Node:
        return norm(call, x, w, eps=call(aten.mul.Tensor, w, w))

    def by_input(call: Any, x: Node, w: Node, cos: Node, sin: Node) -> Node:
        return norm(call, x, call(aten.select.int, cos, 1, 0))

    assert "dgraph.rms_norm" not in ops_of(canonical(computed))


@pytest.mark.parametrize("change", [{}, {"swap": True}, {"weight_first": False}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_whose_weight_is_not_stored_is_one_without(dtype: torch.dtype, change: dict[str, Any]) -> None:
    """An input as the weight, a computed one, or none at all: what is computed is the same, bit for bit."""
    hand, plain = Hand(), Hand()
    for one in (hand, plain):
        x, w = one.input("x", "N", D, dtype=dtype), one.input("w", D, dtype=dtype)
        wide = None if dtype == torch.float32 else torch.float32
        one.returns(
            y=norm(one.call, x, w, wide=wide, **change),
            z=norm(one.call, x, w, wide=wide, scale=by_a_computed_weight, **change),
        )
    canonicalise(hand.graph)
    assert ops_of(hand.graph).count("dgraph.rms_norm") == 2
    assert all(node.args[1] is None for node in hand.graph.find("rms_norm"))
    values = {"x": torch.randn(5, D).to(dtype), "w": torch.randn(D).to(dtype)}
    got, want = interpret(hand.graph, values), interpret(plain.graph, values)
    assert got["y"].equal(want["y"])
    assert got["z"].equal(want["z"])


def test_an_interior_value_that_is_read_elsewhere_stays() -> None:
    def build(call: Any, x: Node, w: Node, *_: Node) -> Node:
        mean = call(aten.mean.dim, call(aten.pow.Tensor_Scalar, x, 2), [-1], True)
        rsqrt = call(aten.rsqrt.default, call(aten.add.Tensor, mean, 1e-6))
        return call(aten.add.Tensor, call(aten.mul.Tensor, w, call(aten.mul.Tensor, x, rsqrt)), rsqrt)

    assert ops_of(canonical(build)) == ["pow", "mean", "add", "rsqrt", "dgraph.rms_norm", "add"]


# -- rotary embedding --------------------------------------------------------------------------------------------


def rope(
    call: Any,
    x: Node,
    w: Node,
    cos: Any,
    sin: Any,
    *,
    sign: Any = aten.neg.default,
    first: tuple[Any, ...] = (-1, D // 2, 2**63 - 1),
    second: tuple[Any, ...] = (-1, 0, D // 2),
    flip: bool = False,
    dim: int = -1,
    alpha: dict[str, Any] | None = None,
    of: Callable[[Any, Node], Node] | None = None,
    swap: bool = False,
) -> Node:
    """The half-split spelling, with one thing changed at a time."""
    source = of(call, x) if of else x
    upper = call(sign, call(aten.slice.Tensor, source, *first))
    lower = call(aten.slice.Tensor, source, *second)
    half = call(aten.cat.default, [lower, upper] if flip else [upper, lower], dim)
    plain, rotated = call(aten.mul.Tensor, x, cos), call(aten.mul.Tensor, half, sin)
    terms = (rotated, plain) if swap else (plain, rotated)
    return call(aten.add.Tensor, *terms, **(alpha or {}))


@pytest.mark.parametrize(
    "change",
    [{}, {"swap": True}, {"dim": 2}, {"first": (2, D // 2, D), "second": (2, 0, D // 2)}, {"second": (-1, None, 8)}],
)
def test_rope_is_raised(change: dict[str, Any]) -> None:
    graph = canonical(lambda *a: rope(*a, **change))
    (node,) = graph.calls
    assert ops_of(graph) == ["dgraph.rope"]
    assert node.args == tuple(graph.input(n) for n in ("x", "cos", "sin"))
    assert (node.meta["layer"], node.meta["role"]) == (0, "block")


ROPE_MISSES: dict[str, dict[str, Any]] = {
    "wrong half negated": {"flip": True},
    "nothing negated": {"sign": aten.relu.default},
    "another split": {"first": (-1, 4, D), "second": (-1, 0, 4)},
    "every second column": {"first": (-1, 1, D, 2), "second": (-1, 0, D, 2)},
    "the lower half twice": {"first": (-1, 0, D // 2)},
    "sine counted twice": {"alpha": {"alpha": 2}},
    "halves of another value": {"of": lambda call, x: call(aten.mul.Tensor, x, 2.0)},
}


@pytest.mark.parametrize("name", ROPE_MISSES)
def test_what_only_looks_like_rope_is_left_alone(name: str) -> None:
    assert "dgraph.rope" not in ops_of(canonical(lambda *a: rope(*a, **ROPE_MISSES[name])))


def test_rope_with_numbers_for_tables_is_left_alone() -> None:
    graph = canonical(lambda call, x, w, cos, sin: rope(call, x, w, 2.0, 3.0))
    assert "dgraph.rope" not in ops_of(graph)


def test_rope_halves_along_another_dimension_are_left_alone() -> None:
    hand = Hand()
    x, cos = hand.input("x", "N", D, D), hand.input("cos", "N", 1, D)
    graph = hand.returns(y=rope(hand.call, x, x, cos, cos, first=(1, 8, D), second=(1, 0, 8), dim=1))
    canonicalise(graph)
    assert "dgraph.rope" not in ops_of(graph)


# -- repeated heads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "kept"), [(2, 2), (4, 2)], ids=["all heads", "two of four heads"])
def test_heads_are_unrepeated_only_where_all_are_repeated(heads: int, kept: int) -> None:
    hand = Hand()
    q, x = hand.input("q", "b", 4, "t", D), hand.input("x", "b", heads, "t", D)
    some = hand.call(aten.slice.Tensor, hand.call(aten.unsqueeze.default, x, 2), 1, 0, kept)
    repeated = hand.call(aten.expand.default, some, [-1, -1, 2, -1, -1])
    k = hand.call(aten.flatten.using_ints, repeated, 1, 2)
    graph = hand.returns(y=hand.call(aten.scaled_dot_product_attention.default, q, k, k))
    inputs = {"q": torch.randn(2, 4, 3, D), "x": torch.randn(2, heads, 3, D)}
    before = interpret(graph, inputs)["y"]
    canonicalise(graph)
    torch.testing.assert_close(interpret(graph, inputs)["y"], before)
    assert ("expand" in ops_of(graph)) == (kept < heads)


# -- the table of angles -----------------------------------------------------------------------------------------


def angles(
    *,
    weight: tuple[int, ...] = (4,),
    keep: tuple[int, int | None] = (0, 2**63 - 1),
    wide: torch.dtype = torch.float32,
    dims: tuple[int, int] = (1, 2),
    offset: float | None = None,
) -> Graph:
    """Frequencies [b, 4, 1] @ positions [b, 1, t], transposed, as transformers spells it; one change at a time."""
    hand = Hand()
    positions, f = hand.input("positions", "b", "t", dtype=torch.int64), hand.weight("inv_freq", *weight)
    for dim in range(1, 4 - len(weight)):
        f = hand.call(aten.unsqueeze.default, f, 0 if dim == 1 else 2)
    b = hand.call(aten.sym_size.int, positions, 0)
    f = hand.call(aten.expand.default, f, [b, -1, 1])
    row = hand.call(aten.unsqueeze.default, hand.call(aten.slice.Tensor, positions, 1, *keep), 1)
    row = hand.call(aten.to.dtype, row, wide)
    f = hand.call(aten.to.dtype, f, wide)
    if offset is not None:
        row = hand.call(aten.add.Tensor, row, offset)
    product = hand.call(aten.transpose.int, hand.call(aten.matmul.default, f, row), *dims)
    return hand.returns(y=hand.call(aten.cos.default, product))


def check_angles(graph: Graph) -> list[str]:
    inputs = {"positions": torch.arange(12).reshape(3, 4) * 3}
    before = interpret(graph, inputs)["y"]
    canonicalise(graph)
    after = interpret(graph, inputs)["y"]
    assert torch.equal(after, before)
    assert after.dtype == before.dtype
    return ops_of(graph)


@pytest.mark.parametrize("dims", [(1, 2), (2, 1), (-1, -2), (-2, -1)])
def test_a_table_of_angles_is_positions_times_frequencies(dims: tuple[int, int]) -> None:
    assert check_angles(angles(dims=dims)) == ["unsqueeze", "to", "mul", "cos"]


@pytest.mark.parametrize(
    "change",
    [
        {"weight": (4, 1)},
        {"weight": (1, 4, 1)},
        {"keep": (1, None)},
        {"keep": (0, 2)},
        {"wide": torch.float64},
        {"wide": torch.bfloat16},
        {"offset": 1.0},
    ],
    ids=str,
)
def test_what_only_looks_like_a_table_of_angles_keeps_its_values(change: dict[str, Any]) -> None:
    check_angles(angles(**change))


# -- no-ops ------------------------------------------------------------------------------------------------------


def test_no_ops_are_dropped() -> None:
    def build(call: Any, x: Node, w: Node, cos: Node, sin: Node) -> Node:
        x = call(aten.detach.default, call(aten.alias.default, call(aten.clone.default, x)))
        x = call(aten.dropout.default, call(aten.contiguous.default, x), 0.5, False)
        x = call(aten.mul.Tensor, call(aten.to.dtype, x, torch.float32), 1.0)
        x = call(aten.slice.Tensor, x, 2, 0, D)
        return call(aten.add.Tensor, x, cos)

    assert ops_of(canonical(build)) == ["add"]


@pytest.mark.parametrize(
    ("build", "left"),
    [
        (lambda call, x, w, cos, sin: call(aten.to.dtype, x, torch.float64), ["to"]),
        (lambda call, x, w, cos, sin: call(aten.slice.Tensor, x, 2, 0, 8), ["slice"]),
        (lambda call, x, w, cos, sin: call(aten.mul.Tensor, x, 0.5), ["mul"]),
        (lambda call, x, w, cos, sin: call(aten.expand.default, w, [3, -1]), ["expand"]),
        (lambda call, x, w, cos, sin: call(aten.view.default, x, [-1, D]), ["reshape"]),
        (lambda call, x, w, cos, sin: call(aten.mul.Tensor, call(aten.to.dtype, x, torch.int64), 1.0), ["to", "mul"]),
    ],
    ids=["cast", "slice", "scale", "expand", "view", "integer times one"],
)
def test_what_computes_something_stays(build: Build, left: list[str]) -> None:
    assert ops_of(canonical(build)) == left


def test_dead_code_goes_with_its_inputs_and_weights() -> None:
    def build(call: Any, x: Node, w: Node, cos: Node, sin: Node) -> Node:
        call(aten.mul.Tensor, call(aten.add.Tensor, x, w), sin)
        return call(aten.relu.default, call(aten.add.Tensor, x, cos))

    graph = canonical(build)
    assert ops_of(graph) == ["add", "relu"]
    assert list(graph.inputs) == ["x", "cos"]
    assert graph.tensors == {}


def test_a_value_between_two_calls_of_a_layer_belongs_to_it() -> None:
    hand = Hand()
    x = hand.input("x", "N", D)
    hand.layer = 1
    a = hand.call(aten.relu.default, x)
    hand.layer = None
    helper = hand.call(aten.neg.default, a)
    shared = hand.call(aten.sin.default, x)
    hand.layer = 1
    b = hand.call(aten.add.Tensor, helper, shared)
    graph = hand.returns(y=b)
    canonicalise(graph)
    assert [n.meta["layer"] for n in graph.calls] == [1, 1, None, 1]


# -- attention ---------------------------------------------------------------------------------------------------


def attention_graph(*extra: Any, **options: Any) -> Graph:
    hand = Hand()
    q = hand.input("q", "b", 4, "t", 8)
    k, v = (hand.input(name, "b", 2, "t", 8) for name in "kv")
    hand.layer = 1
    return hand.returns(y=hand.call(aten.scaled_dot_product_attention.default, q, k, v, *extra, **options))


@pytest.mark.parametrize(
    ("extra", "options", "scale"),
    [
        ((), {"enable_gqa": True}, 8**-0.5),
        ((None, 0.0, False), {"enable_gqa": True}, 8**-0.5),
        ((), {"scale": 0.25, "enable_gqa": True}, 0.25),
        ((), {"attn_mask": None, "is_causal": False, "enable_gqa": True}, 8**-0.5),
    ],
)
def test_sdpa_gets_its_dgraph_name(extra: tuple[Any, ...], options: dict[str, Any], scale: float) -> None:
    graph = attention_graph(*extra, **options)
    canonicalise(graph)
    (node,) = graph.find("attention")
    assert node.args == (graph.input("q"), graph.input("k"), graph.input("v"), scale)
    assert node.meta["layer"] == 1
    assert graph.type_text(node) == "f32[b, 4, t, 8]"


@pytest.mark.parametrize(
    ("extra", "name"),
    [((None, 0.5), "dropout_p=0.5"), ((None, 0.0, True), "is_causal=True")],
)
def test_sdpa_with_more_than_scores_is_refused(extra: tuple[Any, ...], name: str) -> None:
    with pytest.raises(CaptureError, match=rf"op scaled_dot_product_attention in module block \(layer 1.*{name}"):
        canonicalise(attention_graph(*extra, enable_gqa=True))


def test_sdpa_with_a_mask_is_refused() -> None:
    hand = Hand()
    q = hand.input("q", "b", 4, "t", 8)
    mask = hand.input("mask", "t", "t")
    graph = hand.returns(y=hand.call(aten.scaled_dot_product_attention.default, q, q, q, mask))
    with pytest.raises(CaptureError, match=r"in module the model \(outside the layers.*attn_mask=mask"):
        canonicalise(graph)


def test_canonicalising_twice_changes_nothing(captured: Graph) -> None:
    again = captured.copy()
    canonicalise(again)
    assert ops_of(again) == ops_of(captured)

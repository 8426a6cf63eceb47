"""Patterns: what they bind, what they refuse, how near misses are explained, and rewrites of what they met."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Node

import dgraph
from dgraph.errors import InputError, UnknownName, VerifyError
from dgraph.ir import matching
from dgraph.ir.graph import Graph
from dgraph.ir.matching import Match, Matches, Miss, match_at
from dgraph.ir.pattern import Pattern
from dgraph.ir.verifier import verify
from dgraph.ops import OPS
from dgraph.passes import CacheKV, CountRows, EvictTokens, FuseProjections
from dgraph.passes.base import Effect, Pass, Report
from tests.golden_files import check_golden
from tests.tiny import Hand, interpret, ops_of, report_of, rewritten

aten, ops = torch.ops.aten, torch.ops.dgraph
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "write-a-pass.md"
WIDTH = 4


@Pattern
def gated_unit(x: Any, gate: Any, up: Any) -> Any:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


@Pattern
def split_unit(product: Any, n: Any, dim: Any) -> Any:
    gate, up = aten.split_with_sizes(product, [n, n], dim)
    return F.silu(gate) * up


def unit(change: Callable[[Hand, Node, Node], object] = lambda *_: None, turned: bool = False) -> Graph:
    """y = silu(x @ gate.T) * (x @ up.T) in layer 0; `change` is given the silu and the product."""
    hand = Hand()
    hand.layer = 0
    x, gate, up = hand.input("x", "N", WIDTH), hand.weight("gate", WIDTH, WIDTH), hand.weight("up", WIDTH, WIDTH)
    silu = hand.call(aten.silu.default, hand.call(aten.linear.default, x, gate))
    other = hand.call(aten.linear.default, x, up)
    product = hand.call(aten.mul.Tensor, *((other, silu) if turned else (silu, other)))
    hand.returns(y=product)
    change(hand, silu, product)
    return hand.graph


def stack(layers: int) -> Graph:
    """Gated units on a residual stream."""
    hand = Hand()
    x = hand.input("x", "N", WIDTH)
    for hand.layer in range(layers):
        gate, up = (hand.weight(f"layers.{hand.layer}.{name}", WIDTH, WIDTH) for name in ("gate", "up"))
        silu = hand.call(aten.silu.default, hand.call(aten.linear.default, x, gate))
        x = hand.call(aten.add.Tensor, x, hand.call(aten.mul.Tensor, silu, hand.call(aten.linear.default, x, up)))
    return hand.returns(y=x)


def only(found: Matches) -> Match:
    (match,) = found
    return match


def reason(graph: Graph, pattern: Any) -> str:
    """The deepest near miss, where there is no match."""
    found = graph.match(pattern)
    assert len(found) == 0
    return str(found.misses[0])


# -- what a match gives ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turned", [False, True])
def test_a_match_names_values_and_calls_in_the_order_of_the_pattern(turned: bool) -> None:
    graph = unit(turned=turned)
    match = only(graph.match(gated_unit))
    assert match.values == (graph.input("x"), graph.weight("gate"), graph.weight("up"))
    assert [match["linear"], match["silu"], match["linear_1"], match["mul"]] == list(match.nodes)
    assert [node.target for node in match.nodes] == [
        aten.linear.default, aten.silu.default, aten.linear.default, aten.mul.Tensor
    ]  # fmt: skip
    assert (match.layer, match.root) == (0, graph.result("y"))
    assert str(match) == f"{match.root.name}: x=x, gate=gate, up=up"
    with pytest.raises(UnknownName, match=r"unknown name in pattern gated_unit 'gat'\. Did you mean 'gate'"):
        match["gat"]


def test_a_plain_function_is_a_pattern_and_matches_are_of_one_layer_if_asked() -> None:
    graph = stack(3)
    assert [match.layer for match in graph.match(gated_unit.function)] == [0, 1, 2]
    assert [match.layer for match in graph.match(gated_unit, layer=1)] == [1]
    assert graph.match(gated_unit)[1:][0].layer == 1


def split(sizes: list[int], first: int = 0) -> Graph:
    """silu(part) of a split value, times the other part where both are of one size."""
    hand = Hand()
    parts = hand.graph.parts(hand.call(aten.split_with_sizes.default, hand.input("x", "N", 8), sizes, 1), 2, "")
    silu = hand.call(aten.silu.default, parts[first])
    return hand.returns(y=hand.call(aten.mul.Tensor, silu, parts[1 - first]) if sizes == [4, 4] else silu)


def test_constants_may_be_wildcards_and_parts_of_several_results_are_told_apart() -> None:
    match = only(split([4, 4]).match(split_unit))
    assert (match["n"], match["dim"]) == (4, 1)
    assert list(match.bound) == ["product", "n", "dim", "split_with_sizes", "getitem", "getitem_1", "silu", "mul"]
    assert reason(split([4, 4], first=1), split_unit) == "4 of 5 nodes: 1 stands where 0 is expected"
    first = Pattern(lambda product, n: F.silu(aten.split_with_sizes(product, [n, n], 1)[0]))
    assert reason(split([5, 3]), first) == "3 of 3 nodes: n is 5 in one place and 3 in another"
    assert reason(split([2, 2, 4]), first) == "3 of 3 nodes: [2, 2, 4] stands where [n, n] is expected"


def test_anything_stands_for_one_argument_or_for_the_rest() -> None:
    graph = split([5, 3])
    assert [m["x"].name for m in graph.match(lambda x: aten.split_with_sizes.default(x, ...))] == ["x"]
    assert [m["n"] for m in graph.match(lambda x, n: aten.split_with_sizes.default(x, [n, ...], 1))] == [5]
    said = "0 of 1 nodes: split_with_sizes_default has dim=1, of which the pattern says nothing"
    assert reason(graph, lambda x, sizes: aten.split_with_sizes.default(x, sizes)) == said


# -- what counts as one kind -------------------------------------------------------------------------------------


def test_a_function_is_every_overload_and_an_overload_is_itself() -> None:
    hand = Hand()
    x = hand.input("x", "N", WIDTH)
    hand.returns(y=hand.call(aten.add.Scalar, hand.call(aten.add.Tensor, x, x), 2))
    graph = hand.graph
    for pattern in (lambda a, b: a + b, lambda a, b: torch.add(a, b), lambda a, b: aten.add(a, b)):
        assert len(graph.match(pattern)) == 2
    assert len(graph.match(lambda a: a.add(2.0))) == 1
    found = graph.match(lambda a, b: aten.mul.Tensor(aten.add.Tensor(a, b), b))
    assert (len(found), found.misses) == (0, [])
    scalar = graph.match(lambda a: aten.neg(aten.add.Scalar(a, 2)))
    assert (len(scalar), len(scalar.misses)) == (0, 0)
    assert only(graph.match(lambda a, b: aten.add.Scalar(aten.add.Tensor(a, a), b)))["b"] == 2
    assert reason(graph, lambda a, b: aten.add.Scalar(aten.add.Scalar(a, a), b)) == (
        "1 of 2 nodes: aten.add.Tensor stands where add is expected"
    )


def test_the_form_that_counts_rows_is_of_one_kind_with_the_op(packed: Graph) -> None:
    graph = rewritten(packed, FuseProjections(), CacheKV(), EvictTokens(), CountRows())
    linears = graph.match(lambda x, weight, bias: F.linear(x, weight, bias))
    assert {match.root.target for match in linears} == {aten.linear.default, OPS["rows_linear"].overload}
    assert len(graph.match(lambda x, weight, bias: aten.linear.default(x, weight, bias))) < len(linears)
    assert {op.live_form_of for op in OPS.values()} == {None, "linear", "dgraph.rms_norm", "dgraph.quantise_rows"}
    for op in OPS.values():
        if op.live_form_of is not None:
            base = aten.linear.default if op.live_form_of == "linear" else OPS[op.live_form_of[7:]].overload
            assert len(base._schema.arguments) == len(op.arguments) - 1 == op.arguments.index(str(op.count))


def test_a_quantised_weight_is_bound_as_the_product_reads_it() -> None:
    hand = Hand()
    x, w = hand.input("x", "N", 8), hand.stored(6, 8)
    hand.returns(y=hand.call(aten.linear.default, x, w))
    assert only(hand.graph.match(lambda x, weight: F.linear(x, weight)))["weight"] is w


@pytest.mark.parametrize(
    ("pattern", "kwargs", "found"),
    [
        (lambda a, b: a + b, {}, 1),
        (lambda a, b: a + b, {"alpha": 2}, 0),
        (lambda a, b: aten.add.Tensor(a, b, alpha=2), {"alpha": 2}, 1),
        (lambda a, b: aten.add.Tensor(a, b, ...), {"alpha": 2}, 1),
    ],
)
def test_an_argument_that_the_pattern_does_not_name_has_its_default(pattern: Any, kwargs: Any, found: int) -> None:
    hand = Hand()
    hand.returns(y=hand.call(aten.add.Tensor, hand.input("a", "N"), hand.input("b", "N"), **kwargs))
    assert len(hand.graph.match(pattern)) == found
    if not found:
        assert reason(hand.graph, pattern).endswith("has alpha=2, of which the pattern says nothing")


def cast(on_way: Any) -> Graph:
    hand = Hand()
    x = hand.call(aten.neg.default, hand.input("x", "N", WIDTH))
    between = x if on_way is None else hand.call(*on_way(x))
    return hand.returns(y=hand.call(aten.silu.default, between))


@pytest.mark.parametrize(
    "on_way",
    [lambda x: (aten.to.dtype, x, torch.float64), lambda x: (aten.reshape.default, x, [-1])],
    ids=["cast", "reshape"],
)
def test_casts_and_views_are_not_passed_over(on_way: Any) -> None:
    said = reason(cast(on_way), lambda x: F.silu(-x))
    assert said in (
        "1 of 2 nodes: to stands where neg is expected",
        "1 of 2 nodes: reshape stands where neg is expected",
    )


def test_a_pattern_may_allow_a_cast() -> None:
    pattern = Pattern(lambda x: F.silu(Pattern.cast(-x)))
    match = only(cast(None).match(pattern))
    assert match["cast"] is match["neg"]
    assert len(match.nodes) == 2
    match = only(cast(lambda x: (aten.to.dtype, x, torch.float64)).match(pattern))
    assert match["cast"].target is aten.to.dtype
    assert [node.target for node in match.nodes] == [aten.neg.default, aten.to.dtype, aten.silu.default]
    assert "reshape stands where neg" in reason(cast(lambda x: (aten.reshape.default, x, [-1])), pattern)
    read = match.graph
    read.set_outputs({**read.results(), "z": match["cast"]})
    assert reason(read, pattern) == "1 of 2 nodes: cast has a second user, output"
    assert len(read.match(Pattern(pattern.function, shared=["cast"]))) == 1


def test_methods_are_ops_and_take_sizes_one_by_one() -> None:
    graph = cast(lambda x: (aten.reshape.default, x, [-1, 2]))
    assert only(graph.match(lambda x, n: F.silu(x.view(-1, n))))["n"] == 2
    assert only(graph.match(lambda x, sizes: F.silu(x.reshape(sizes))))["sizes"] == [-1, 2]


# -- outside users, overlaps, checks -----------------------------------------------------------------------------


def second_user(hand: Hand, silu: Node, product: Node) -> None:
    hand.returns(y=product, z=hand.call(aten.neg.default, silu))


def test_what_stands_inside_has_no_users_outside_unless_allowed() -> None:
    graph = unit(second_user)
    assert reason(graph, gated_unit) == "3 of 4 nodes: silu has a second user, neg"
    (miss,) = graph.match(gated_unit).misses
    assert (miss.call, miss.reader, miss.root, miss.layer) == ("silu", graph.result("z"), graph.result("y"), 0)
    assert miss.to_json()["reader"] == graph.result("z").name
    assert len(graph.match(Pattern(gated_unit.function, shared=True))) == 1
    assert len(graph.match(Pattern(gated_unit.function, shared=["silu"]))) == 1
    assert len(graph.match(Pattern(gated_unit.function, shared=["linear"]))) == 0


def test_a_program_that_returns_an_inner_value_is_a_user() -> None:
    graph = unit(lambda hand, silu, product: hand.returns(y=product, z=silu))
    assert reason(graph, gated_unit) == "3 of 4 nodes: silu has a second user, output"


def sums(count: int) -> Graph:
    hand = Hand()
    total = hand.input("x", "N")
    for i in range(count):
        total = hand.call(aten.add.Tensor, total, hand.input(f"x{i}", "N"))
    return hand.returns(y=total)


def test_matches_that_overlap_are_resolved_in_order() -> None:
    graph = sums(5)
    found = graph.match(lambda a, b, c: a + b + c)
    assert [match.root for match in found] == [graph.calls[1], graph.calls[3]]
    assert [match["a"].name for match in found] == ["x", graph.calls[1].name]
    last = next(miss for miss in found.misses if miss.root is graph.calls[4])
    assert str(last) == f"1 of 2 nodes: {graph.calls[3].name} is in an earlier match"
    shared = Pattern(lambda a, b, c: a + b + c, shared=True)
    assert len(graph.match(shared)) == 2, "the last call of a match is never another one's"


def test_a_check_refuses_with_a_reason_and_the_other_order_is_tried() -> None:
    hand = Hand()
    x, w = hand.input("x", "N", WIDTH), hand.weight("w", WIDTH)
    graph = hand.returns(y=hand.call(aten.mul.Tensor, x, w))
    is_weight = Pattern(
        lambda a, b: a * b, lambda m: None if "weight" in m["a"].meta else f"{m['a'].name} is no weight"
    )
    assert only(graph.match(is_weight)).values == (w, x)
    is_input = Pattern(lambda a, b: a * b, lambda m: "both are needed")
    assert reason(graph, is_input) == "1 of 1 nodes: both are needed"


def test_misses_are_in_order_of_depth() -> None:
    hand = Hand()
    x = hand.input("x", "N", WIDTH)
    shallow = hand.call(aten.mul.Tensor, hand.call(aten.neg.default, x), x)
    silu = hand.call(aten.silu.default, hand.call(aten.relu.default, x))
    hand.returns(a=shallow, b=hand.call(aten.mul.Tensor, silu, x))
    found = hand.graph.match(gated_unit)
    assert [str(miss) for miss in found.misses] == [
        "2 of 4 nodes: relu stands where linear is expected",
        "1 of 4 nodes: neg stands where silu is expected",
    ]
    assert isinstance(match_at(hand.graph, gated_unit, shallow), Miss)


def test_two_calls_of_a_pattern_are_two_calls_of_the_graph() -> None:
    hand = Hand()
    relu = hand.call(aten.relu.default, hand.input("x", "N"))
    hand.returns(y=hand.call(aten.mul.Tensor, relu, relu))
    assert "would stand for two calls" in reason(hand.graph, lambda a, b: torch.relu(a) * torch.relu(b))
    assert len(hand.graph.match(lambda a: a * a)) == 1


def test_the_work_grows_with_the_graph_and_not_with_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    ways = matching._Search._ways

    def counted(*args: Any) -> Any:
        nonlocal steps
        steps += 1
        return ways(*args)

    monkeypatch.setattr(matching._Search, "_ways", counted)
    small, large = stack(5), stack(40)

    def work(graph: Graph) -> int:
        nonlocal steps
        steps = 0
        graph.match(gated_unit)
        graph.match(lambda a, b, c: a + b * c)
        return steps

    assert work(large) == 8 * work(small)


# -- rewrites ----------------------------------------------------------------------------------------------------


def test_a_function_takes_the_place_of_every_match() -> None:
    graph = stack(3)
    for match in graph.match(lambda x, gate, up: aten.add(x, gated_unit(x, gate, up))):
        match.replace(lambda x, gate: aten.neg.default(aten.linear.default(x, gate)), by="Test")
    graph.sweep()
    verify(graph, "Test")
    assert ops_of(graph) == ["linear", "neg"] * 3
    assert {(n.meta["by"], n.meta["role"]) for n in graph.calls} == {("Test", "block")}
    assert [n.meta["layer"] for n in graph.find("neg")] == [0, 1, 2]
    y = x = torch.randn(5, WIDTH)
    for layer in range(3):
        y = -y @ graph.tensors[f"layers.{layer}.gate"].t()
    torch.testing.assert_close(interpret(graph, {"x": x})["y"], y)


def test_a_node_takes_the_place_and_what_is_read_elsewhere_stays() -> None:
    graph = unit(second_user)
    match = only(graph.match(Pattern(gated_unit.function, shared=["silu"])))
    assert match.replace(match["x"]) is graph.input("x")
    assert ops_of(graph) == ["linear", "silu", "neg"]
    assert graph.result("y") is graph.input("x")


def test_a_later_match_sees_what_an_earlier_one_became() -> None:
    graph = sums(4)
    for match in graph.match(lambda a, b: a + b):
        made = match.replace(lambda a, b: aten.mul.Tensor(a, b), by="Test")
        assert match["a"] in made.all_input_nodes
    verify(graph, "Test")
    assert ops_of(graph) == ["mul"] * 4


def test_a_list_has_what_stands_there_now_and_a_parameter_may_have_the_name_of_an_op() -> None:
    hand = Hand()
    a, b = hand.input("a", "N", 2), hand.input("b", "N", 2)
    inner = hand.call(aten.cat.default, [a, b], 1)
    graph = hand.returns(y=hand.call(aten.cat.default, [inner, b], 1))
    first, last = graph.match(lambda cat: torch.cat(cat, 1))
    assert (first["cat"], first["cat_1"], last["cat"]) == ([a, b], inner, [inner, b])
    made = first.replace(lambda cat: aten.concat.default(cat, 1), by="Test")
    assert last["cat"] == [made, b]
    last.replace(lambda cat: aten.concat.default(cat, 1), by="Test")
    verify(graph, "Test")


@pytest.mark.parametrize(
    ("function", "error", "said"),
    [
        (lambda x, gate: F.linear(x, gate), InputError, "calls linear, which names several overloads; name one"),
        (lambda x: aten.neg.default(Pattern.cast(x)), InputError, "calls cast, which names several overloads"),
        (lambda x, down: aten.mul.Tensor(x, down), UnknownName, "unknown name in pattern gated_unit 'down'"),
        (lambda x, gate: aten.linear.default(aten.neg.default(x), 3), VerifyError, "does not accept its arguments"),
        (lambda x: 3, InputError, "gives 3 for"),
    ],
)
def test_a_refused_rewrite_leaves_the_graph_as_it_was(function: Any, error: type[Exception], said: str) -> None:
    graph = unit()
    before = [(node.name, node.args) for node in graph.nodes]
    match = only(graph.match(gated_unit))
    with pytest.raises(error, match=said):
        match.replace(function, by="Test")
    assert [(node.name, node.args) for node in graph.nodes] == before


@dataclass(frozen=True)
class Negate(Pass):
    """Units become negations of their input."""

    effect = Effect.APPROXIMATE
    summary = "units become negations"
    changes_weights = True

    def run(self, graph: Graph, report: Report) -> None:
        for match in report.matched(graph.match(gated_unit), near=3):
            match.replace(lambda x: aten.neg.default(x), by=report.name)
            report.did("unit -> neg", match.layer)
        graph.sweep()


def test_matches_are_counted_in_the_report_of_a_pass() -> None:
    report = report_of(stack(3), Negate())
    assert (report.matches, len(report.applied), report.skipped) == ({"gated_unit": 3}, 3, [])
    assert report.to_json()["matches"] == {"gated_unit": 3}
    missed = report_of(unit(second_user), Negate())
    assert [skipped.reason for skipped in missed.skipped] == ["3 of 4 nodes: silu has a second user, neg"]
    assert missed.matches == {"gated_unit": 0}


# -- patterns that are none --------------------------------------------------------------------------------------


def reads_sizes(x: Any) -> Any:
    return torch.relu(x) if x.shape[0] > 1 else x


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: x, "returns .*; expected the result of one call"),
        (lambda x: None, "returns None; expected the result of one call"),
        (lambda x, y: (x + y, x * y), "expected the result of one call"),
        (lambda x, y: -x, "never reads y; leave that out"),
        (lambda x: (-x, torch.relu(x))[1], "never reads neg; leave that out"),
        (lambda x, n: torch.relu(x)[..., :n], r"takes \[.*\] of a value; take a part by its number"),
        (lambda x: torch.relu(x).float(), "calls float, which is no op of torch or of a package"),
        (lambda x: abs(x) // 2 & 1, "calls and_, which is no op"),
        (lambda x, eps=1e-6: x + eps, "eps=1e-06 must be a plain parameter, as eps, which binds one value"),
        (lambda *x: x[0] + x[1], r"\*x must be a plain parameter, as x"),
        (lambda x: x + len(x), "cannot be run with stand-ins for values: "),
        (reads_sizes, "pattern reads_sizes "),
    ],
)
def test_a_function_that_is_no_pattern_is_refused(function: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Pattern(function)


def test_shared_names_calls_of_the_pattern() -> None:
    with pytest.raises(InputError, match="shared names 'gelu'; its calls are linear, silu, linear_1, mul"):
        Pattern(gated_unit.function, shared=["gelu"])


# -- what users are shown ----------------------------------------------------------------------------------------


def test_the_example_of_the_guide_runs(captured: Graph) -> None:
    code = next(c for c in GUIDE.read_text("utf-8").split("```python\n")[1:] if "dgraph.Pattern" in c).partition("```")[
        0
    ]
    assert len(code.splitlines()) <= 12
    names: dict[str, Any] = {}
    exec(compile(code, str(GUIDE), "exec"), names)
    assert isinstance(names["gated_unit"], dgraph.Pattern)
    assert len(captured.match(names["gated_unit"])) == 4


def test_matches_as_text(captured: Graph, evicted: Graph) -> None:
    from dgraph.text.matches import text_of

    def aten_gelu(x: Any) -> Any:
        return F.gelu(x)

    @Pattern
    def normed_rotation(x: Any, weight: Any, eps: Any, cos: Any, sin: Any) -> Any:
        return ops.rope(ops.rms_norm(x, weight, eps), cos, sin)

    texts = [
        text_of(g, [g.match(p) for p in (gated_unit, normed_rotation, split_unit, aten_gelu)])
        for g in (captured, evicted)
    ]
    check_golden("matches.txt", "\n\n".join(texts) + "\n")

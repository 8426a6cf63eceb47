"""The graph: building, reading, sweeping, carrying inputs across a gather; its symbols and their text."""

from __future__ import annotations

import operator
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.fx import Node

from dgraph.errors import UnknownName, VerifyError
from dgraph.ir.graph import Graph
from dgraph.ir.verifier import verify
from dgraph.ops import OPS
from dgraph.passes.chunk_lm_head import CANDIDATE
from dgraph.types.nodes import is_view, viewed
from dgraph.types.shapes import InputSpec, Symbols, is_row_set
from tests.tiny import Hand, interpret, ops_of, tiny_spec

aten = torch.ops.aten


def small() -> Hand:
    """y = relu(x) + w over rows N."""
    hand = Hand()
    x, w = hand.input("x", "N", 4), hand.weight("layers.0.w", 4)
    hand.layer = 0
    hand.returns(y=hand.call(aten.add.Tensor, hand.call(aten.relu.default, x), w))
    return hand


def test_weights_come_first_then_inputs_then_calls_then_the_output() -> None:
    hand = small()
    hand.weight("late", 3)
    hand.input("later", "b")
    kinds = [n.meta.get("weight") or n.meta.get("input") or n.op for n in hand.graph.nodes]
    assert kinds == ["layers.0.w", "late", "x", "later", "call_function", "call_function", "output"]
    assert list(hand.graph.weight_nodes()) == ["layers.0.w", "late"]
    assert list(hand.graph.inputs) == ["x", "later"]


def test_nodes_know_type_place_and_maker() -> None:
    graph = small().graph
    add = graph.result("y")
    new = graph.call(aten.neg.default, (add,), before=graph.output, by="Test", like=add, source="f.py:3")
    assert graph.type_text(new) == "f32[N, 4]"
    assert (new.meta["layer"], new.meta["role"], new.meta["by"], new.meta["source"]) == (0, "block", "Test", "f.py:3")
    here = graph.call(aten.neg.default, (add,), before=add.next, by="Test")
    assert here.meta["layer"] == 0, "without `like`, the place is that of the node before which it stands"
    assert graph.row_set(new) == "N"
    assert graph.row_set(graph.weight("layers.0.w")) is None


def test_a_call_that_does_not_fit_names_node_layer_and_types() -> None:
    graph = small().graph
    add, w = graph.result("y"), graph.weight("layers.0.w")
    with pytest.raises(VerifyError) as caught:
        graph.call(aten.mm.default, (add, w), before=graph.output, by="Test", like=add)
    message = str(caught.value)
    for part in ("layer 0 (block)", "made by Test", "mm does not accept", "add_tensor: f32[N, 4]", "f32[4]"):
        assert part in message


def test_a_name_is_given_once() -> None:
    graph = small().graph
    with pytest.raises(VerifyError, match=r"weight 'layers\.0\.w' is in the graph already"):
        graph.add_weight("layers.0.w", torch.zeros(1))
    same = graph.add_input(InputSpec("x", torch.float32, ("N", 4)))
    assert same is graph.input("x")
    with pytest.raises(VerifyError, match=r"input 'x' is declared as .*'N', 4.*cannot also be .*'N', 5.*another name"):
        graph.add_input(InputSpec("x", torch.float32, ("N", 5)))


def test_find_knows_ops_of_dgraph_and_of_torch() -> None:
    hand = Hand()
    x, w = hand.input("x", "N", 4), hand.weight("w", 4, 4)
    linear, other = hand.call(aten.linear.default, x, w), hand.call(OPS["linear"], x, w, None)
    parts = hand.call(aten.split.Tensor, other, 2, 1)
    (first,) = hand.graph.parts(parts, 1, "")
    graph = hand.returns(y=first, z=linear)
    assert graph.find("linear") == [linear, other]
    assert graph.find("aten::linear") == [linear]
    assert graph.find("split") == [parts]
    assert graph.find("getitem") == [first]
    assert graph.find("softmax") == []
    for wrong, close in (("linea", "'linear'"), ("packed_atention", "'packed_attention'"), ("aten::liner", "")):
        with pytest.raises(UnknownName, match=rf"unknown op '{wrong}'\..*{close}"):
            graph.find(wrong)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (
            lambda graph: graph.weight("layer.0.w"),
            "unknown weight of this graph 'layer.0.w'.* Did you mean 'layers.0.w'",
        ),
        (lambda graph: graph.result("yy"), "unknown output of this graph 'yy'.* Did you mean 'y'"),
        (lambda graph: graph.input("positionss"), "unknown input of this graph 'positionss'.* Known: x"),
    ],
)
def test_a_name_that_a_graph_has_not_is_refused(read: Callable[[Graph], Node], message: str) -> None:
    hand = Hand()
    x, w = hand.input("x", "N", 4), hand.weight("layers.0.w", 4)
    graph = hand.returns(y=hand.call(aten.add.Tensor, x, w))
    with pytest.raises(UnknownName, match=message):
        read(graph)


@pytest.mark.parametrize(
    ("target", "args", "message"),
    [
        (aten.linear.default, ("x",), "linear does not accept its arguments .x: f32.N, 4..: .*missing value.*'weight'"),
        (aten.mm.default, ("x", "x"), "mm does not accept .* It takes aten::mm.Tensor self, Tensor mat2. -> Tensor"),
        (aten.add.Tensor, ("x", torch.ones(4)), r"add does not accept its arguments \(x: f32\[N, 4\], Tensor\)"),
        (torch.relu, ("x",), "^t calls .*relu.*; expected an overload of an op, as torch.ops.aten.neg.default"),
        (aten.relu, ("x",), "^t calls aten.relu; expected an overload"),
    ],
)
def test_a_call_that_has_no_type_is_refused_in_a_line(
    target: Any, args: tuple[Any, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    hand = Hand()
    x = hand.input("x", "N", 4)
    graph = hand.returns(y=hand.call(aten.relu.default, x))
    before = list(graph.fx.nodes)
    with pytest.raises(VerifyError, match=message) as caught:
        graph.call(target, tuple(x if arg == "x" else arg for arg in args), before=graph.output, by="t")
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert list(graph.fx.nodes) == before, "nothing of it is left"
    assert capfd.readouterr().err == "", "torch says nothing beside"


def test_find_input_weight_result() -> None:
    hand = Hand()
    x, w = hand.input("x", "N", 8), hand.weight("w", 8)
    hand.layer = 0
    first = hand.call(OPS["rms_norm"], x, w, 1e-6)
    hand.layer = 1
    second = hand.call(OPS["rms_norm"], first, w, 1e-6)
    graph = hand.returns(a=first, b=second)
    assert graph.find("rms_norm") == [first, second]
    assert graph.find("rms_norm", 1) == [second]
    assert graph.find("rope") == []
    assert graph.result("b") is second
    assert graph.results() == {"a": first, "b": second}
    assert graph.output.meta["val"] == (first.meta["val"], second.meta["val"])


def test_parts_stand_after_their_call_in_order() -> None:
    hand = Hand()
    x = hand.input("x", "N", 8)
    split = hand.call(aten.split_with_sizes.default, x, [2, 6], 1)
    after = hand.call(aten.relu.default, x)
    first, second = hand.graph.parts(split, 2, "Test")
    order = hand.graph.calls
    assert order == [split, first, second, after]
    assert [hand.graph.type_text(n) for n in (first, second)] == ["f32[N, 2]", "f32[N, 6]"]
    assert first.target is operator.getitem


def test_sweep_removes_what_nobody_reads_but_keeps_writes() -> None:
    hand = Hand(layers=1)
    k = hand.input("k", "N", 2, 4)
    positions, cu_rows = (
        hand.input("positions", "N", dtype=torch.int64),
        hand.input("cu_rows", "b+1", dtype=torch.int32),
    )
    table = hand.input("page_table", "b", "P", dtype=torch.int32)
    k_cache, v_cache = (hand.input(f"{n}_cache_0", "pages", "page", 2, 4) for n in "kv")
    hand.input("unread", "N")
    w = hand.weight("w", 4)
    scaled = hand.call(aten.mul.Tensor, k, w)
    hand.call(aten.relu.default, hand.call(aten.neg.default, scaled))
    hand.call(OPS["kv_write"], k, k, k_cache, v_cache, positions, table, cu_rows)
    graph = hand.returns()
    assert graph.sweep() == 3
    assert ops_of(graph) == ["dgraph.kv_write"]
    assert list(graph.inputs) == ["k", "positions", "cu_rows", "page_table", "k_cache_0", "v_cache_0"]
    assert graph.tensors == {}
    assert graph.sweep() == 0
    verify(graph)


def test_live_after_lists_values_that_cross_a_point() -> None:
    hand = Hand()
    x, w = hand.input("x", "N", 4), hand.weight("w", 4)
    a = hand.call(aten.relu.default, x)
    b = hand.call(aten.neg.default, a)
    c = hand.call(aten.add.Tensor, b, w)
    d = hand.call(aten.add.Tensor, c, a)
    graph = hand.returns(y=d, early=b)
    assert graph.live_after(a) == [a]
    assert graph.live_after(b) == [a, b]
    assert graph.live_after(c) == [a, b, c]
    assert graph.live_after(d) == [b, d]
    assert x in hand.graph.live_after(x)


def test_redirect_turns_only_later_readers() -> None:
    hand = Hand()
    x = hand.input("x", "N", 4)
    early = hand.call(aten.relu.default, x)
    new = hand.call(aten.neg.default, x)
    late = hand.call(aten.add.Tensor, x, early)
    graph = hand.returns(y=late)
    graph.redirect(x, new, after=new)
    assert early.args == (x,)
    assert new.args == (x,), "the new value still reads the old one"
    assert late.args == (new, early)


def test_some_readers_can_be_left_out() -> None:
    hand = Hand()
    x = hand.input("x", "N", 4)
    a = hand.call(aten.relu.default, x)
    one, other = hand.call(aten.neg.default, a), hand.call(aten.abs.default, a)
    graph = hand.returns(one=one, other=other)
    assert graph.live_after(a, but=(one,)) == [a]
    assert graph.live_after(a, but=(one, other)) == []
    graph.redirect(a, x, after=a, but=(other,))
    assert (one.args, other.args) == ((x,), (a,))


def test_what_stands_after_a_gather_reads_its_rows() -> None:
    hand = Hand()
    x, flags, cu_rows = (
        hand.input("x", "N", 4),
        hand.input("flags", "N", dtype=torch.bool),
        hand.input("cu_rows", "b+1", dtype=torch.int32),
    )
    y, limit = hand.call(aten.relu.default, x), hand.input("limit", "N")
    first = hand.call(aten.add.Tensor, y, x)
    late, whole = hand.call(aten.mul.Tensor, first, y), hand.call(aten.neg.default, x)
    graph = hand.returns(late=late, whole=whole, limit=limit)
    kept = graph.keep_rows(flags, before=first, by="Test", counted=True, but=(whole, graph.output))
    (compact,) = graph.find("compact")
    assert compact.args == ([x, y], kept.index)
    assert kept.cu_rows is graph.offsets_of("K")
    assert graph.offsets_of("N") is cu_rows
    assert [graph.row_set(n) for n in first.all_input_nodes] == ["K", "K"]
    assert [graph.row_set(n) for n in (late, whole, limit)] == ["K", "N", "N"]
    assert "kept" not in graph.outputs


@pytest.mark.parametrize("at", [0, 1, 2])
def test_parts_of_a_result_are_gathered_on_whichever_side_they_are_taken(at: int) -> None:
    """Rows are kept before the second part of a split, before what reads it, or before what reads both."""
    hand = Hand()
    x, flags = hand.input("x", "N", 4), hand.input("flags", "N", dtype=torch.bool)
    cu_rows = hand.input("cu_rows", "b+1", dtype=torch.int32)
    split = hand.call(aten.split_with_sizes.default, x, [2, 2], 1)
    first = hand.call(aten.neg.default, hand.call(operator.getitem, split, 0))
    later = [hand.call(operator.getitem, split, 1)]
    later.append(hand.call(aten.relu.default, later[0]))
    later.append(hand.call(aten.add.Tensor, first, later[1]))
    graph = hand.returns(logits=later[2], offsets=cu_rows)
    graph.keep_rows(flags, before=later[at], by="Test")
    verify(graph)
    value = torch.arange(12.0).reshape(3, 4)
    kept = torch.tensor([True, False, True])
    out = interpret(graph, {"x": value, "flags": kept, "cu_rows": torch.tensor([0, 2, 3]).int()})
    assert out["logits"].tolist() == (-value[:, :2] + value[:, 2:].relu())[kept].tolist()
    assert (out["kept"].tolist(), out["offsets"].tolist()) == ([0, 2], [0, 1, 2])


def kept_twice(order: tuple[int, int]) -> Graph:
    """Rows are kept by two flags, one before each of two calls; the passes come in that order."""
    hand = Hand()
    x, cu_rows = hand.input("x", "N"), hand.input("cu_rows", "b+1", dtype=torch.int32)
    graph = hand.graph
    flags = [hand.input(f"flag{i}", "N", dtype=torch.bool) for i in range(2)]
    calls = [hand.call(aten.neg.default, x)]
    calls.append(hand.call(aten.relu.default, calls[0]))
    hand.returns(logits=hand.call(aten.abs.default, calls[1]), last=cu_rows)
    for i in order:
        graph.keep_rows(graph.on_rows_of(flags[i], calls[i].all_input_nodes[0], "Test"), before=calls[i], by="Test")
        verify(graph)
    return graph


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_rows_kept_twice_are_numbered_among_all(order: tuple[int, int]) -> None:
    """Whichever comes first; each reads the offsets of what is left."""
    graph = kept_twice(order)
    flags = torch.tensor([[1, 0, 1, 1, 0, 1], [1, 1, 0, 1, 1, 1]]).bool()
    x = -torch.arange(6.0)
    out = interpret(graph, {"x": x, "cu_rows": torch.tensor([0, 4, 6]).int(), "flag0": flags[0], "flag1": flags[1]})
    assert out["kept"].tolist() == [0, 3, 5]
    assert out["logits"].tolist() == [0.0, 3.0, 5.0]
    assert out["last"].tolist() == [0, 2, 3]


def test_what_is_no_flag_per_row_keeps_none() -> None:
    hand = Hand()
    x, flags = hand.input("x", "N"), hand.input("flags", "N", dtype=torch.bool)
    y = hand.call(aten.neg.default, x)
    graph = hand.returns(y=y)
    with pytest.raises(VerifyError, match=r"x is f32\[N\]; rows are kept by a flag for each, bool\[N\]"):
        graph.keep_rows(x, before=y, by="Test")
    with pytest.raises(VerifyError, match=r"no input cu_rows .*run PackRows first"):
        graph.keep_rows(flags, before=y, by="Test")


def test_a_copy_shares_weights_and_symbols_and_nothing_else() -> None:
    graph = small().graph
    other = graph.copy()
    assert other.tensors["layers.0.w"] is graph.tensors["layers.0.w"]
    assert other.symbols is graph.symbols
    x = torch.randn(3, 4)
    assert torch.equal(interpret(other, {"x": x})["y"], interpret(graph, {"x": x})["y"])
    before = ops_of(graph)
    other.add_weight("more", torch.zeros(2))
    other.add_input(InputSpec("z", torch.float32, ("b",)))
    other.result("y").meta["layer"] = 9
    other.set_outputs({"z": other.call(aten.neg.default, (other.result("y"),), before=other.output, by="t")})
    other.history += ("t",)
    assert ops_of(graph) == before
    assert (graph.outputs, graph.history, list(graph.inputs), list(graph.tensors)) == (
        ("y",),
        (),
        ["x"],
        ["layers.0.w"],
    )
    assert graph.result("y").meta["layer"] == 0
    verify(graph)


def test_propagate_recomputes_what_others_inherit() -> None:
    graph = small().graph
    x = graph.input("x")
    graph.inputs["x"] = InputSpec("x", torch.float32, ("N", 3, 4))
    x.meta["val"] = graph.symbols.empty(("N", 3, 4), torch.float32)
    assert graph.type_text(graph.result("y")) == "f32[N, 4]"
    graph.propagate()
    assert graph.type_text(graph.result("y")) == "f32[N, 3, 4]"
    assert graph.symbols.type_text(graph.output.meta["val"]) == "(f32[N, 3, 4])"


def gathered() -> tuple[Hand, torch.fx.Node]:
    """x over N gathered to K; returns the gathered value."""
    hand = Hand()
    x, keep = hand.input("x", "N", 4), hand.input("keep", "N", dtype=torch.bool)
    cu_rows = hand.input("cu_rows", "b+1", dtype=torch.int32)
    graph = hand.graph
    cut = graph.call(OPS["keep_index"], (keep, cu_rows, -1), before=graph.output, by="", rows=graph.new_row_set())
    index, _ = graph.parts(cut, 2, "")
    (row,) = graph.parts(graph.call(OPS["compact"], ([x], index), before=graph.output, by=""), 1, "")
    graph.set_outputs({"y": row})
    return hand, row


def test_a_cut_makes_a_row_set_of_its_own() -> None:
    hand, row = gathered()
    graph = hand.graph
    (cut,) = graph.find("keep_index")
    assert graph.type_text(cut) == "(i64[K], i32[b+1])"
    assert graph.row_set(row) == "K"
    assert graph.new_row_set() == "K1"
    assert [is_row_set(n) for n in ("N", "K", "K1", "K23", "Kx", "b", "pages")] == [True] * 4 + [False] * 3


def test_an_input_is_carried_through_the_gather_once() -> None:
    hand, row = gathered()
    graph = hand.graph
    graph.add_input(CANDIDATE)
    carried = graph.on_rows_of("candidate", row, "Test")
    assert graph.type_text(carried) == "bool[K]"
    assert graph.on_rows_of("candidate", row, "Test") is carried
    (compact,) = graph.find("compact")
    assert compact.args[0] == (graph.input("x"), graph.input("candidate"))
    assert graph.on_rows_of("candidate", graph.input("x"), "Test") is graph.input("candidate")
    graph.set_outputs({"y": row, "candidate": carried})
    verify(graph)
    keep = torch.tensor([True, False, True])
    inputs = {"x": torch.randn(3, 4), "keep": keep, "cu_rows": torch.tensor([0, 3]).int(), "candidate": ~keep}
    out = interpret(graph, inputs)
    assert torch.equal(out["y"], inputs["x"][keep])
    assert out["candidate"].tolist() == [False, False]


def test_an_input_that_is_not_declared_is_named() -> None:
    graph = gathered()[0].graph
    with pytest.raises(UnknownName, match=r"unknown input of this graph 'cu_row'.*cu_rows"):
        graph.input("cu_row")


def test_an_input_that_nothing_carries_is_an_error() -> None:
    hand = Hand()
    hand.input("masked", "N", dtype=torch.bool)
    other = hand.input("h", "K", 4)
    with pytest.raises(VerifyError, match=r"masked has rows N; nothing carries them to K"):
        hand.graph.on_rows_of("masked", other, "Test")


def test_symbols() -> None:
    symbols = Symbols()
    assert symbols.size("N") is symbols.size("N")
    value = symbols.empty(("b+1", "N", 3), torch.bfloat16)
    assert symbols.type_text(value) == "bf16[b+1, N, 3]"
    assert symbols.names_in(value.shape[0]) == {"b"}
    assert symbols.names_in(value.shape[2]) == frozenset()
    assert symbols.type_text((value, None, 4)) == "(bf16[b+1, N, 3], (), 4)"
    assert symbols.row_set(value) is None
    assert symbols.row_set(symbols.empty((), torch.int64)) is None
    assert symbols.row_set(None) is None
    names = [f"K{i}" for i in range(1, 12)]
    sizes = [symbols.size(n) for n in ["N", "b", "K", *names]]
    texts = [symbols.text(s) for s in sizes]
    assert texts == ["N", "b", "K", *names], "no two symbols are one"
    real = symbols.of(torch.zeros(2, 3, dtype=torch.bool))
    assert symbols.type_text(real) == "bool[2, 3]"


def test_symbols_have_hints_of_their_own_however_many_there_are() -> None:
    symbols = Symbols()
    hints = [int(symbols.size(f"pages_{window}").node.hint) for window in range(40)]
    assert len(set(hints)) == 40
    assert hints[:4] == [11, 13, 17, 19]


def test_graphs_alike_are_typed_once() -> None:
    def graph() -> Graph:
        hand = Hand()
        return hand.returns(y=hand.call(aten.mul.Tensor, hand.input("x", "N", 4, 7), hand.weight("w", 4, 7)))

    first = graph()
    known = len(first.symbols.results)
    second = graph()
    assert second.symbols is first.symbols
    assert second.result("y").meta["val"] is first.result("y").meta["val"]
    assert len(first.symbols.results) == known


def test_threads_type_calls_at_once() -> None:
    symbols = Symbols()

    def shapes(first: int) -> list[str]:
        found = []
        for width in range(first, first + 12):
            x = symbols.shared((f"K{width}", width), torch.float32)
            found.append(symbols.type_text(symbols.run(aten.add.Tensor, (x, x), {})))
        return found

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(shapes, range(20, 28))) == [
            [f"f32[K{width}, {width}]" for width in range(first, first + 12)] for first in range(20, 28)
        ]


def test_only_numbers_of_rows_are_large() -> None:
    hints = [int(size.node.hint) for size in map(Symbols(large=True).size, ("N", "K2", "M", "b", "pages", "page", "P"))]
    assert all(hint > 1000 for hint in hints[:3])
    assert all(hint < 100 for hint in hints[3:])


@pytest.mark.parametrize("large", [False, True])
def test_types_and_what_stands_for_them(large: bool) -> None:
    symbols = Symbols(large)
    one, other = (symbols.empty(("N", 4), torch.float32) for _ in range(2))
    assert one is not other
    shared = symbols.shared(("N", 4), torch.float32)
    assert shared is symbols.shared(["N", 4], torch.float32)
    assert len({symbols.key(value) for value in (one, other, shared)}) == 1
    unlike = [
        symbols.shared(*t) for t in ((("N", 5), torch.float32), (("b", 4), torch.float32), (("N", 4), torch.int64))
    ]
    unlike += [one.t(), symbols.of(torch.zeros(4))]
    assert len({symbols.key(value) for value in (one, *unlike)}) == len(unlike) + 1
    assert symbols.key([one, 2, None]) == symbols.key([other, 2, None]) != symbols.key((one, 2, None))
    assert symbols.key({"a": 1}) != symbols.key({"a": True})


def test_the_device_is_that_of_the_weights() -> None:
    assert small().graph.device == torch.device("cpu")
    assert Graph(tiny_spec()).device == torch.device("cpu")
    graph = Graph(tiny_spec())
    graph.add_weight("w", torch.empty(2, device="meta"))
    assert graph.device == torch.device("meta")


def test_dropping_an_input() -> None:
    hand = Hand()
    hand.input("x", "N")
    hand.graph.drop_input("x")
    assert hand.graph.inputs == {}
    assert [n.op for n in hand.graph.nodes] == ["output"]


def test_views_are_what_their_schema_says() -> None:
    hand = Hand()
    made = hand.call(aten.relu.default, hand.input("x", "N", 8))
    heads = hand.call(aten.reshape.default, made, [-1, 2, 4])
    halves = hand.call(aten.split_with_sizes.default, heads, [1, 1], 1)
    part = hand.call(operator.getitem, halves, 0)
    turned = hand.call(aten.transpose.int, part, 1, 2)
    for node in (heads, halves, part, turned):
        assert is_view(node)
        assert viewed(node) is made
    same, wide = (hand.call(aten.to.dtype, turned, dtype) for dtype in (torch.float32, torch.float64))
    assert viewed(same) is made
    assert viewed(wide) is wide, "a copy in another dtype"
    assert not is_view(hand.call(OPS["rms_norm"], made, hand.weight("w", 8), 1e-6)), "ops of dgraph give no views"

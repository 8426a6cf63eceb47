"""The verifier: for each rule a graph that breaks it and nothing else, and the message that says so."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

import pytest
import torch
from torch.fx import Node

from dgraph.errors import VerifyError
from dgraph.ir.graph import Graph
from dgraph.ir.verifier import RULES, Signature, reads_host, verify
from dgraph.ops import OPS, define
from dgraph.ops.kv.scales import FLOAT8
from dgraph.passes.base import Pass
from dgraph.ranks.sharding import Part, Sharding
from dgraph.types.shapes import InputSpec
from tests.tiny import Hand, rewritten

aten = torch.ops.aten


def sound() -> Hand:
    """A norm over rows N, a linear and a cached attention in layer 0; it breaks no rule."""
    hand = Hand(layers=1)
    x, w = hand.input("x", "N", 8), hand.weight("layers.0.norm", 8)
    positions = hand.input("positions", "N", dtype=torch.int64)
    cu_rows, limit = hand.input("cu_rows", "b+1", dtype=torch.int32), hand.input("limit", "N", dtype=torch.int32)
    table = hand.input("page_table", "b", "P", dtype=torch.int32)
    k_cache, v_cache = (hand.input(f"{n}_cache_0", "pages", "page", 2, 4) for n in "kv")
    hand.layer = 0
    normed = hand.call(OPS["rms_norm"], x, w, 1e-6)
    k = hand.call(aten.reshape.default, normed, [-1, 2, 4])
    hand.call(OPS["kv_write"], k, k, k_cache, v_cache, positions, table, cu_rows)
    read = hand.call(OPS["paged_attention"], k, k_cache, v_cache, table, cu_rows, limit, 0.5)
    hand.layer = None
    hand.returns(y=hand.call(aten.relu.default, read))
    return hand


def test_a_sound_graph_breaks_no_rule(captured: Graph, packed: Graph, cached: Graph, evicted: Graph) -> None:
    verify(sound().graph)
    for graph in (captured, packed, cached, evicted):
        before = [(n.name, str(n.meta["val"])) for n in graph.nodes]
        verify(graph)
        assert [(n.name, str(n.meta["val"])) for n in graph.nodes] == before, "verifying leaves a graph as it is"


def share_of_a_sum(graph: Graph) -> Node:
    """x @ down.T, of which a rank has some inputs, and the same again, reshaped and added."""
    graph.sharding = Sharding(2)
    down = graph.add_weight("layers.0.down", torch.zeros(6, 8))
    graph.divided["layers.0.down"] = Part.of("row", 1, [(0, 8)])
    at = graph.output
    first, second = (graph.call(aten.linear.default, (graph.input("x"), down), before=at, by="Test") for _ in range(2))
    halves = [graph.call(aten.reshape.default, (value, [-1, 2, 3]), before=at, by="Test") for value in (first, second)]
    total = graph.call(aten.add.Tensor, tuple(halves), before=at, by="Test")
    return graph.call(aten.mul.Tensor, (total, 0.5), before=at, by="Test")


def test_a_partial_sum_may_be_reshaped_added_and_scaled_before_its_sum() -> None:
    graph = sound().graph
    total = graph.over_ranks(share_of_a_sum(graph), "Test")
    after = graph.call(aten.relu.default, (total,), before=graph.output, by="Test")
    graph.set_outputs({**graph.results(), "after": after})
    verify(graph)


# -- one breakage per rule ---------------------------------------------------------------------------------------


def partial_sum_read(graph: Graph) -> None:
    share = share_of_a_sum(graph)
    graph.call(aten.relu.default, (share,), before=graph.output, by="Test")


def partial_sum_in_a_residual(graph: Graph) -> None:
    share = share_of_a_sum(graph)
    whole = graph.call(aten.reshape.default, (graph.input("x"), [-1, 2, 4]), before=share, by="Test")
    part = graph.call(aten.slice.Tensor, (whole, 2, 0, 3), before=share, by="Test")
    graph.call(aten.add.Tensor, (part, share), before=graph.output, by="Test")


def partial_sum_returned(graph: Graph) -> None:
    graph.set_outputs({**graph.results(), "share": share_of_a_sum(graph)})


def foreign_node(graph: Graph) -> None:
    with graph.fx.inserting_before(graph.output):
        graph.fx.get_attr("weight").meta.update(layer=None, role="", by="Test", val=None)


def call_of_a_function(graph: Graph) -> None:
    last = graph.result("y")
    with graph.fx.inserting_before(graph.output):
        graph.fx.call_function(torch.neg, (last,)).meta.update(last.meta)


def bare_placeholder(graph: Graph) -> None:
    with graph.fx.inserting_before(graph.calls[0]):
        graph.fx.placeholder("who")


def second_output(graph: Graph) -> None:
    graph.fx.output((graph.calls[0],))


def unnamed_output(graph: Graph) -> None:
    graph.outputs = ("y", "z")


def read_before_definition(graph: Graph) -> None:
    norm, reshape = graph.calls[:2]
    reshape.append(norm)


def value_of_another_graph(graph: Graph) -> None:
    graph.result("y").args = (sound().graph.calls[0],)


def call_past_the_graph(graph: Graph) -> None:
    with graph.fx.inserting_before(graph.output):
        graph.fx.call_function(aten.relu.default, (graph.result("y"),))


def shrunken_weight(graph: Graph) -> None:
    graph.tensors["layers.0.norm"] = torch.ones(4)


def cast_weight(graph: Graph) -> None:
    graph.tensors["layers.0.norm"] = torch.ones(8, dtype=torch.bfloat16)


def lost_weight(graph: Graph) -> None:
    del graph.tensors["layers.0.norm"]


def redeclared_input(graph: Graph) -> None:
    graph.inputs["x"] = InputSpec("x", torch.float32, ("N", 9))


def undeclared_input(graph: Graph) -> None:
    del graph.inputs["limit"]


def input_without_placeholder(graph: Graph) -> None:
    graph.inputs["z"] = InputSpec("z", torch.float32, ("N",))


def host_read(graph: Graph) -> None:
    total = graph.call(aten.sum.default, (graph.result("y"),), before=graph.output, by="Test")
    with graph.fx.inserting_before(graph.output):
        item = graph.fx.call_function(aten.item.default, (total,))
    item.meta.update(layer=3, role="mlp", by="Test", val=1.0)


def two_row_sets(graph: Graph) -> None:
    other = graph.add_input(InputSpec("other", torch.float32, ("K", 2, 4)))
    with graph.fx.inserting_before(graph.output):
        node = graph.fx.call_function(aten.add.Tensor, (graph.result("y"), other))
    node.meta.update(layer=0, role="", by="Test", val=graph.result("y").meta["val"])


def stale_size(graph: Graph) -> None:
    """A reshape of values over K to a size that was read from values over N."""
    other = graph.add_input(InputSpec("other", torch.float32, ("K", 2, 4)))
    size = graph.call(aten.sym_size.int, (graph.input("x"), 0), before=graph.output, by="Test")
    with graph.fx.inserting_before(graph.output):
        node = graph.fx.call_function(aten.reshape.default, (other, [size, 8]))
    node.meta.update(layer=2, role="self_attn", by="Test", val=other.meta["val"])


def stale_type(graph: Graph) -> None:
    graph.calls[1].meta["val"] = graph.symbols.empty(("N", 4, 2), torch.float32)


def wrong_dtype(graph: Graph) -> None:
    graph.calls[0].meta["val"] = graph.symbols.empty(("N", 8), torch.bfloat16)


def unfit_argument(graph: Graph) -> None:
    reshape = graph.calls[1]
    reshape.args = (reshape.args[0], [-1, 3, 4])


def rolled(graph: Graph) -> None:
    y = graph.call(aten.roll.default, (graph.result("y"), [1], [0]), before=graph.output, by="Test")
    graph.set_outputs({"y": y})


def write_in_place(graph: Graph) -> None:
    y = graph.result("y")
    node = graph.call(aten.add_.Tensor, (y, 1.0), before=graph.output, by="Test")
    graph.set_outputs({"y": node})


def write_to_a_value(graph: Graph) -> None:
    (write,) = graph.find("kv_write")
    k, v, _, v_cache, *rest = write.args
    computed = graph.call(aten.neg.default, (graph.input("k_cache_0"),), before=write, by="Test")
    write.args = (k, v, computed, v_cache, *rest)


def view_of_what_is_written(graph: Graph) -> None:
    cache = graph.input("k_cache_0")
    y = graph.call(aten.select.int, (cache, 0, 0), before=graph.output, by="Test")
    graph.set_outputs({"y": y})


def read_before_write(graph: Graph) -> None:
    (write,), (read,) = graph.find("kv_write"), graph.find("paged_attention")
    read.append(write)


def offsets_of_other_rows(graph: Graph) -> None:
    """Queries of kept rows, with offsets of all."""
    (read,) = graph.find("paged_attention")
    flag = graph.add_input(InputSpec("flag", torch.bool, ("N",)))
    kept = graph.keep_rows(flag, before=read, by="Test")
    read.replace_input_with(kept.cu_rows, graph.input("cu_rows"))


def listed_by_hand(graph: Graph) -> tuple[torch.fx.Node, torch.fx.Node, torch.fx.Node]:
    """Before the attention, its rows by a flag, moved to the front of as many as there were; the list, its offsets and
    the queries."""
    (read,) = graph.find("paged_attention")
    flag = graph.add_input(InputSpec("flag", torch.bool, ("N",)))
    kept = graph.call(OPS["list_kept"], (flag, graph.input("cu_rows")), before=read, by="Test")
    index, cu_rows = graph.parts(kept, 2, "Test")
    (q,) = graph.parts(graph.call(OPS["compact"], ([read.args[0]], index), before=read, by="Test"), 1, "Test")
    return index, cu_rows, q


def rows_in_two_orders(graph: Graph) -> None:
    """One row set, but row i of the queries is not row i of the limit."""
    _, cu_rows, q = listed_by_hand(graph)
    (read,) = graph.find("paged_attention")
    read.args = (q, *read.args[1:4], cu_rows, *read.args[5:])


def offsets_of_another_order(graph: Graph) -> None:
    index, _, q = listed_by_hand(graph)
    (read,) = graph.find("paged_attention")
    limit = graph.call(OPS["compact"], ([graph.input("limit")], index), before=read, by="Test")
    read.args = (q, *read.args[1:5], *graph.parts(limit, 1, "Test"), *read.args[6:])


def numbers_of_other_rows(graph: Graph) -> None:
    """A list of all rows, used on those that went on."""
    (read,) = graph.find("paged_attention")
    index, _, _ = listed_by_hand(graph)
    kept = graph.keep_rows(graph.input("flag"), before=read, by="Test")
    graph.call(OPS["compact"], ([read.args[0]], index), before=read, by="Test")
    assert kept.index is not index


def decided(graph: Graph) -> torch.fx.Node:
    """The program decides: a logit of each row; rows are kept before the attention."""
    (read,) = graph.find("paged_attention")
    flag = graph.add_input(InputSpec("flag", torch.bool, ("N",)))
    graph.set_outputs({"logits": graph.result("y")})
    graph.keep_rows(flag, before=read, by="Test")
    return flag


def forgotten_kept(graph: Graph) -> None:
    decided(graph)
    graph.set_outputs({"logits": graph.result("logits")})


def kept_of_other_rows(graph: Graph) -> None:
    decided(graph)
    graph.set_outputs({**graph.results(), "kept": graph.input("positions")})


def kept_among_the_kept(graph: Graph) -> None:
    """A second list, whose numbers are those of rows that were kept before."""
    last = graph.find("paged_attention")[0].next
    flag = graph.on_rows_of(decided(graph), last, "Test")
    again = graph.keep_rows(flag, before=last, by="Test")
    graph.set_outputs({**graph.results(), "kept": again.index})


def float8_without_scales(graph: Graph) -> None:
    (read,) = graph.find("paged_attention")
    caches = [graph.add_input(InputSpec(f"{n}_rounded", FLOAT8, ("pages", "page", 2, 4))) for n in "kv"]
    graph.call(OPS["paged_attention"], (read.args[0], *caches, *read.args[3:]), before=read, by="Test")


def float8_copied_and_read(graph: Graph) -> None:
    (write,), (read,) = graph.find("kv_write"), graph.find("paged_attention")
    cache = graph.add_input(InputSpec("k_rounded", FLOAT8, ("pages", "page", 2, 4)))
    copied = graph.call(OPS["feature_read"], (cache, *write.args[4:7]), before=read, by="Test")
    graph.call(aten.unsqueeze.default, (copied, 0), before=read, by="Test")


def added_rows_that_an_op_does_not_know(graph: Graph) -> None:
    """The attention is told of them, but not the write of keys."""
    graph.add_rows(by="Test")
    (write,) = graph.find("kv_write")
    write.args = write.args[:-1]


BREAKAGES: list[tuple[str, Callable[[Graph], None], str]] = [
    ("straight", foreign_node, r"outside the layers, node weight, made by Test is a get_attr; expected placeholders"),
    ("straight", call_of_a_function, r"calls neg; expected an overload of an op, as torch\.ops\.aten\.neg\.default"),
    ("straight", bare_placeholder, r"placeholder who is neither weight nor input"),
    ("straight", second_output, r"the graph has 2 output nodes"),
    ("straight", unnamed_output, r"output returns 1 values under the names \('y', 'z'\)"),
    (
        "order",
        read_before_definition,
        r"layer 0 \(block\), node reshape_default reads rms_norm_default",
    ),
    (
        "order",
        value_of_another_graph,
        r"relu_default reads rms_norm_default, defined after it or not in this graph",
    ),
    ("tags", call_past_the_graph, r"node relu_default_1 has no meta \['val', 'layer', 'role', 'by'\]"),
    ("weights", shrunken_weight, r"weight layers\.0\.norm: got \(4,\) torch\.float32, expected f32\[8\]"),
    ("weights", cast_weight, r"weight layers\.0\.norm: got \(8,\) torch\.bfloat16, expected f32\[8\]"),
    ("weights", lost_weight, r"weight layers\.0\.norm has a placeholder but no tensor"),
    ("inputs", redeclared_input, r"input x: got type f32\[N, 8\], expected f32\[N, 9\] as it is declared"),
    ("inputs", undeclared_input, r"input limit has a placeholder but no declaration"),
    ("inputs", input_without_placeholder, r"input z has a declaration but no placeholder"),
    ("host", host_read, r"layer 3 \(mlp\), node item_default, made by Test calls item"),
    (
        "rows",
        two_row_sets,
        r"add_tensor, made by Test \(add\) mixes row sets: other over K, relu_default over N",
    ),
    ("rows", stale_size, r"layer 2 \(self_attn\), node reshape.*mixes row sets: other over K, sym_size_int over N"),
    (
        "rows",
        offsets_of_other_rows,
        r"layer 0 \(block\), node paged_attention_default \(dgraph\.paged_attention\) mixes row sets: "
        r"getitem_\d+ over K, cu_rows over N; .*redirect offsets",
    ),
    ("rows", rows_in_two_orders, r"mixes row sets: limit over N, getitem_\d+ over N listed by list_kept_default; exp"),
    ("rows", offsets_of_another_order, r"mixes row sets: cu_rows over N, getitem_\d+ over N listed by list_kept"),
    ("rows", numbers_of_other_rows, r"gathers getitem_\d+ over K by getitem\w*, whose numbers are of rows N"),
    ("added", added_rows_that_an_op_does_not_know, r"\(dgraph\.kv_write\) takes an added row for one of the sequence"),
    ("decision", forgotten_kept, r"output logits is over rows K, made by the model, and no output 'kept' says which"),
    ("decision", kept_of_other_rows, r"output logits is over rows K, output kept over N; expected one row set"),
    ("decision", kept_among_the_kept, r"output kept \(.*made by Test\) numbers the rows of K; expected .* all rows N"),
    (
        "partial sums",
        partial_sum_read,
        r"node relu_default\w*, made by Test \(relu\) reads mul_tensor, of which each rank has a share only "
        r"\(by weight layers\.0\.down\); .*Graph\.over_ranks\(mul_tensor\)",
    ),
    (
        "partial sums",
        partial_sum_in_a_residual,
        r"made by Test \(add\) reads mul_tensor, of which each rank has a share",
    ),
    ("partial sums", partial_sum_returned, r"output share reads mul_tensor"),
    ("types", stale_type, r"node reshape_default: got type f32\[N, 4, 2\], expected f32\[N, 2, 4\]"),
    ("types", wrong_dtype, r"node rms_norm_default: got type bf16\[N, 8\], expected f32\[N, 8\]"),
    ("types", unfit_argument, r"layer 0 \(block\), node reshape_default: reshape does not accept its arguments"),
    (
        "requests",
        rolled,
        r"roll_default, made by Test \(roll\) works along dimension 0 of self f32\[N, 2, 4\]",
    ),
    ("writes", write_in_place, r"node add__tensor, made by Test \(add_\) writes in place"),
    ("writes", write_to_a_value, r"node kv_write_default writes neg_default; expected a run-time input"),
    ("writes", view_of_what_is_written, r"made by Test \(select\) reads k_cache_0, which is written in place"),
    (
        "writes",
        read_before_write,
        r"node paged_attention_default \(dgraph.paged_attention\) reads k_cache_0 before its write",
    ),
    (
        "scales",
        float8_without_scales,
        r"\(dgraph.paged_attention\) reads k_rounded as k_cache, which is stored in float8",
    ),
    (
        "scales",
        float8_copied_and_read,
        r"made by Test \(unsqueeze\) reads feature_read_default as an argument",
    ),
]


@pytest.mark.parametrize(("rule", "breaks", "message"), BREAKAGES, ids=lambda v: getattr(v, "__name__", None))
def test_a_broken_graph_gives_its_rules_message(rule: str, breaks: Callable[[Graph], None], message: str) -> None:
    graph = sound().graph
    breaks(graph)
    with pytest.raises(VerifyError) as caught:
        verify(graph, by="SomePass")
    text = str(caught.value)
    assert text.startswith(f"after SomePass: rule '{rule}' (")
    assert re.search(message, text), text


def test_every_rule_is_broken_once_and_has_a_demand() -> None:
    assert {rule for rule, _, _ in BREAKAGES} == {rule.name for rule in RULES}
    assert all(rule.demands for rule in RULES)
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_ops_that_read_values_are_host_reads() -> None:
    reads = ("item", "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")
    assert all(reads_host(getattr(aten, name).default) for name in reads)
    assert reads_host(aten.repeat_interleave.Tensor)
    calm = (aten.linear.default, aten.index.Tensor, aten.argmax.default, OPS["keep_index"].overload, operator.getitem)
    assert not any(map(reads_host, calm))


def test_a_rule_lists_at_most_five_violations() -> None:
    hand = Hand()
    x = hand.input("x", "N", 8)
    for _ in range(7):
        x = hand.call(aten.relu.default, x)
    graph = hand.returns(y=x)
    for node in graph.calls:
        del node.meta["by"]
    with pytest.raises(VerifyError) as caught:
        verify(graph)
    assert str(caught.value).startswith("after capture: rule 'tags'")
    assert str(caught.value).count("has no meta ['by']") == 5


# -- the signature -----------------------------------------------------------------------------------------------


def changed(change: Callable[[Graph], None], may: set[str] | None = None, weights: bool = False) -> None:
    graph = sound().graph
    before = Signature.of(graph)
    change(graph)
    verify(graph, "SomePass", before, frozenset(may or ()), weights)


def add_input(graph: Graph) -> None:
    node = graph.add_input(InputSpec("extra_0", torch.float32, ("N", 2, 4)))
    sum_ = graph.call(aten.add.Tensor, (graph.result("y"), node), before=graph.output, by="Test")
    graph.set_outputs({"y": sum_})


def drop_input(graph: Graph) -> None:
    (read,) = graph.find("paged_attention")
    zeros = graph.call(aten.zeros_like.default, (graph.input("positions"),), before=read, by="Test")
    limit = graph.call(aten.to.dtype, (zeros, torch.int32), before=read, by="Test")
    read.args = (*read.args[:5], limit, read.args[6])
    graph.drop_input("limit")


def rename_output(graph: Graph) -> None:
    graph.set_outputs({"z": graph.result("y")})


def other_values(graph: Graph) -> None:
    graph.tensors["layers.0.norm"] = torch.zeros_like(graph.tensors["layers.0.norm"])


def replace_weight(graph: Graph) -> None:
    old = graph.weight("layers.0.norm")
    graph.replace(old, graph.add_weight("layers.0.other", torch.zeros(8)))
    del graph.tensors["layers.0.norm"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (add_input, r"input extra_0 was added; the pass declares changes of x alone; add the name to `signature`"),
        (drop_input, r"input limit was removed; the pass declares changes of x alone; add the name to `signature`"),
        (rename_output, r"output y was removed.*\n.*output z was added"),
        (replace_weight, r"weights changed \(layers\.0\.norm, layers\.0\.other\); the pass does not declare it"),
        (other_values, r"weights changed \(layers\.0\.norm\); the pass does not declare it"),
    ],
)
def test_undeclared_changes_are_refused(change: Callable[[Graph], None], message: str) -> None:
    with pytest.raises(VerifyError, match=r"after SomePass: rule 'signature' \(only declared changes\)") as caught:
        changed(change, {"x"})
    assert re.search(message, str(caught.value))


@pytest.mark.parametrize(
    ("change", "may", "weights"),
    [
        (add_input, {"extra_0"}, False),
        (add_input, {"extra_*"}, False),
        (drop_input, {"limit"}, False),
        (rename_output, {"y", "z"}, False),
        (replace_weight, set(), True),
        (other_values, set(), True),
    ],
)
def test_declared_changes_are_allowed(change: Callable[[Graph], None], may: set[str], weights: bool) -> None:
    changed(change, may, weights)


def test_without_a_signature_before_nothing_is_compared() -> None:
    graph = sound().graph
    add_input(graph)
    verify(graph)


def test_a_pass_that_breaks_a_rule_is_named() -> None:
    class Breaks(Pass):
        from dgraph.passes.base import Effect

        effect = Effect.EXACT
        summary = "breaks a rule"

        def run(self, graph: Graph, report: object) -> None:
            graph.calls[0].meta["val"] = None
            report.did("broke it")  # type: ignore[attr-defined]

    with pytest.raises(VerifyError, match=r"after Breaks: rule 'types'"):
        rewritten(sound().graph, Breaks())


# -- ops from outside --------------------------------------------------------------------------------------------


def peek(q: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    return q + memory.sum()


@pytest.mark.parametrize("early", [True, False])
def test_an_op_from_outside_reads_a_cache_after_its_write(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgraph.ops.registry.OPS", {})  # leaves no trace in the table
    op = define(f"outside_verify::peek_{early}", peek, samples=lambda generator: (), contract="", by_row=("q",))
    graph = sound().graph
    write = next(n for n in graph.calls if n.target is OPS["kv_write"].overload)
    at = write if early else write.next
    seen = graph.call(op, (write.args[0], graph.input("v_cache_0")), before=at, by="Test", like=write)
    graph.set_outputs({**graph.results(), "seen": seen})
    if not early:
        verify(graph)
        return
    with pytest.raises(VerifyError, match=r"\(outside_verify.peek_True\) reads v_cache_0 before its write; expected"):
        verify(graph)


def test_an_op_may_say_that_it_looks_at_the_size_of_a_cache_alone() -> None:
    graph = sound().graph
    write = next(n for n in graph.calls if n.target is OPS["kv_write"].overload)
    args = (*write.args[4:], graph.input("v_cache_0"))
    slots = graph.call(OPS["row_slots"], args, before=graph.calls[0], by="Test")
    graph.set_outputs({**graph.results(), "slots": slots})
    verify(graph)


def test_arguments_with_rows_of_their_own_have_the_same_ones() -> None:
    hand = Hand(layers=1)
    q, k, other = hand.input("q", "N", 4, 8), hand.input("k", "K", 2, 8), hand.input("other", "K1", dtype=torch.int64)
    ints = {n: hand.input(n, *shape, dtype=torch.int32) for n, shape in INTS.items()}
    positions = hand.input("positions", "N", dtype=torch.int64)
    args = (q, k, positions, other, *ints.values(), 0.5, 0, 1)
    hand.returns(votes=hand.call(OPS["kv_votes"], *args))
    with pytest.raises(VerifyError, match=r"kv_votes\) mixes row sets: k over K, other over K1; expected one"):
        verify(hand.graph)


INTS = {"cu_rows": ("b+1",), "cu_keys": ("b+1",), "limit": ("N",), "window": ("b", 2), "action": ("b",)}

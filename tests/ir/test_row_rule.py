"""The row rule: what mixes the rows of requests is refused by name, and what is accepted gives each request its own."""

from __future__ import annotations

import functools
import operator
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from dgraph.errors import VerifyError
from dgraph.ir.aten_kinds import pointwise
from dgraph.ir.aten_rules import RULES, Rule, register
from dgraph.ir.graph import Graph
from dgraph.ir.verifier import verify
from dgraph.ops import OPS, Op, define
from dgraph.types.shapes import InputSpec, Symbols, is_row_set, leads
from tests.tiny import Hand, interpret

aten = torch.ops.aten

Body = Callable[[Hand, Node], Node]


@functools.cache
def bare() -> Graph:
    """Inputs per row, per sequence and per page. Graphs share its symbols, and so the types of equal calls."""
    hand = Hand(layers=1)
    hand.input("x", "N", 8)
    hand.input("row", "N")
    hand.input("flag", "N", dtype=torch.bool)
    hand.input("input_ids", "N", dtype=torch.int64)
    hand.input("positions", "N", dtype=torch.int64)
    hand.input("cu_rows", "b+1", dtype=torch.int32)
    hand.input("page_table", "b", "P", dtype=torch.int32)
    hand.input("level", "b")
    hand.input("cache", "pages", "page", 8)
    hand.weight("w", 8, 8)
    return hand.graph


def program(body: Body) -> Graph:
    """Logits [N, 8] by a body of x [N, 8] in layer 0."""
    hand = Hand(layers=1)
    hand.graph, hand.layer = bare().copy(), 0
    made = body(hand, hand.graph.input("x"))
    hand.layer = None
    return hand.returns(logits=hand.call(aten.linear.default, made, hand.graph.weight("w")))


def size(h: Hand, x: Node, dim: int = 0) -> Node:
    return h.call(aten.sym_size.int, x, dim)


def by(target: Any, *args: Any, **kwargs: Any) -> Body:
    """One op of x."""
    return lambda h, x: h.call(target, x, *args, **kwargs)


def part(target: Any, *args: Any, at: int = 0) -> Body:
    """One of several results of an op of x."""
    return lambda h, x: h.call(operator.getitem, h.call(target, x, *args), at)


def beside(*made: Body) -> Body:
    """x plus what ops make of it, one after the other."""

    def body(h: Hand, x: Node) -> Node:
        value = x
        for step in made:
            value = step(h, value)
        return h.call(aten.add.Tensor, x, value)

    return body


def product_of_rows(h: Hand, x: Node) -> Node:
    return h.call(aten.mm.default, h.call(aten.mm.default, x, h.call(aten.t.default, x)), x)


def twice(h: Hand, x: Node) -> Node:
    doubled = h.call(aten.cat.default, [x, x], 0)
    return h.call(aten.slice.Tensor, doubled, 0, 3, h.call(aten.sym_size.int, x, 0))


def halves(h: Hand, x: Node) -> Node:
    folded = h.call(aten.reshape.default, x, [-1, 4])
    return h.call(aten.reshape.default, h.call(aten.relu.default, folded), [-1, 8])


def there_and_back(h: Hand, x: Node) -> Node:
    turned = h.call(aten.softmax.int, h.call(aten.transpose.int, x, 0, 1), 1)
    return h.call(aten.transpose.int, turned, 0, 1)


def norm_over_rows(h: Hand, x: Node) -> Node:
    return h.call(aten.layer_norm.default, x, [size(h, x), 8])


def first_row(h: Hand, x: Node) -> Node:
    return h.call(aten.expand.default, h.call(aten.slice.Tensor, x, 0, 0, 1), [size(h, x), 8])


def row_by_number(h: Hand, x: Node) -> Node:
    return h.call(aten.index_select.default, x, 0, h.graph.input("positions"))


def rows_at(h: Hand, x: Node) -> Node:
    return h.call(aten.index.Tensor, x, [h.graph.input("positions")])


def sums_of_all(h: Hand, x: Node) -> Node:
    flat = h.call(aten.cumsum.default, h.call(aten.reshape.default, x, [-1]), 0)
    return h.call(aten.reshape.default, flat, [-1, 8])


def numbered(h: Hand, x: Node) -> Node:
    numbers = h.call(aten.arange.default, size(h, x))
    return h.call(aten.add.Tensor, x, h.call(aten.unsqueeze.default, numbers, 1))


def counted(h: Hand, x: Node) -> Node:
    return h.call(aten.div.Tensor, x, size(h, x))


def filled_with_count(h: Hand, x: Node) -> Node:
    return h.call(aten.add.Tensor, x, h.call(aten.full.default, [8], size(h, x)))


def against_columns(h: Hand, x: Node) -> Node:
    pairs = h.call(aten.mul.Tensor, h.call(aten.unsqueeze.default, h.graph.input("row"), 1), h.graph.input("row"))
    return h.call(aten.mm.default, pairs, x)


def shifted_by_where(h: Hand, x: Node) -> Node:
    flag = h.call(aten.unsqueeze.default, h.graph.input("flag"), 1)
    return h.call(aten.where.self, flag, x, h.call(aten.roll.default, x, [1], [0]))


def scattered(h: Hand, x: Node) -> Node:
    index = h.call(aten.expand.default, h.call(aten.unsqueeze.default, h.graph.input("positions"), 1), [-1, 8])
    return h.call(aten.scatter_add.default, x, 0, index, x)


def scattered_to_the_first(h: Hand, x: Node) -> Node:
    index = h.call(aten.zeros.default, [2, 1], dtype=torch.int64)
    return h.call(aten.scatter.value, x, 1, index, 9.0)


def scattered_by_number(h: Hand, x: Node) -> Node:
    index = h.call(aten.zeros.default, [2, 8], dtype=torch.int64)
    return h.call(aten.scatter.value, x, 0, index, 9.0)


def one_row_for_all(h: Hand, x: Node) -> Node:
    return h.call(aten._reshape_alias.default, x, [size(h, x), 8], [0, 1])


def attends_to_some(h: Hand, x: Node) -> Node:
    heads = h.call(aten.reshape.default, x, [-1, 2, 4])
    pairs = h.call(aten.scaled_dot_product_attention.default, heads, heads, heads, None, 0.5)
    return h.call(aten.reshape.default, pairs, [size(h, x), 8])


def noisy(h: Hand, x: Node) -> Node:
    return h.call(aten.add.Tensor, x, h.call(aten.randn.default, [8]))


def gathered(h: Hand, x: Node) -> Node:
    index = h.call(aten.expand.default, h.call(aten.unsqueeze.default, h.graph.input("positions"), 1), [-1, 8])
    return h.call(aten.gather.default, x, 0, index)


def convolved(h: Hand, x: Node) -> Node:
    kernel = h.weight("kernel", 8, 8, 3)
    columns = h.call(aten.t.default, x)
    return h.call(aten.t.default, h.call(aten.conv1d.default, columns, kernel, None, [1], [1]))


def attends(h: Hand, x: Node) -> Node:
    return h.call(aten.scaled_dot_product_attention.default, x, x, x)


def of_all_states(h: Hand, x: Node) -> Node:
    return h.call(aten.mul.Tensor, x, h.call(aten.mean.default, h.graph.input("level")))


def of_a_cache(h: Hand, x: Node) -> Node:
    return h.call(aten.add.Tensor, x, h.call(aten.amax.default, h.graph.input("cache"), [0, 1]))


def of_offsets(h: Hand, x: Node) -> Node:
    last = h.call(aten.select.int, h.graph.input("cu_rows"), 0, -1)
    return h.call(aten.add.Tensor, x, last)


def by_letters(h: Hand, x: Node) -> Node:
    return h.call(aten.einsum.default, "nd,md,me->ne", [x, x, x])


def one_row_set_too_many(h: Hand, x: Node) -> Node:
    doubled = h.call(aten.repeat.default, x, [2, 1])
    both = h.call(aten.unbind.int, h.call(aten.reshape.default, doubled, [2, -1, 8]), 0)
    return h.call(operator.getitem, both, 0)


def in_two(h: Hand, x: Node) -> Node:
    """[2, N, 4]: the -1 is N by accident, and entry i of it is no row."""
    folded = h.call(aten.softmax.int, h.call(aten.reshape.default, x, [2, -1, 4]), -1)
    return h.call(aten.reshape.default, folded, [-1, 8])


MIXING: list[tuple[str, Body, str, str]] = [
    ("roll", by(aten.roll.default, [1], [0]), "roll", "works along dimension 0 of self f32[N, 8]"),
    ("roll all", by(aten.roll.default, [1]), "roll", "works along dimension 0"),
    ("flip", by(aten.flip.default, [0]), "flip", "which runs over N; expected an op that acts on each of N"),
    ("cumsum", by(aten.cumsum.default, 0), "cumsum", "works along dimension 0"),
    ("cumsum of everything", sums_of_all, "reshape", "works along dimension 0"),
    ("softmax", by(aten.softmax.int, 0), "softmax", "works along dimension 0"),
    ("softmax from the end", by(aten.softmax.int, -2), "softmax", "works along dimension 0"),
    ("centred", beside(by(aten.mean.dim, [0], True)), "mean", "works along dimension 0"),
    ("most of rows", beside(by(aten.amax.default, [0], True)), "amax", "works along dimension 0"),
    ("variance of all", beside(by(aten.var.correction, None)), "var", "works along dimension 0"),
    ("norm of all", beside(by(aten.linalg_vector_norm.default)), "linalg_vector_norm", "works along dimension 0"),
    ("argmax of rows", beside(by(aten.argmax.default, 0)), "argmax", "works along dimension 0"),
    ("sort", part(aten.sort.default, 0), "sort", "works along dimension 0"),
    ("topk", beside(part(aten.topk.default, 1, 0)), "topk", "works along dimension 0"),
    ("max of rows", beside(part(aten.max.dim, 0)), "max", "works along dimension 0"),
    ("norm over rows", norm_over_rows, "layer_norm", "reads how many there are (N) as normalized_shape"),
    ("twice", twice, "cat", "works along dimension 0 of tensors f32[N, 8]"),
    ("repeated", one_row_set_too_many, "repeat", "works along dimension 0"),
    ("halves", in_two, "reshape", "works along dimension 0 of self f32[N, 8]"),
    ("two of each", halves, "reshape", "works along dimension 0 of self f32[N, 8]"),
    ("product of rows", product_of_rows, "t", "takes dimension 0 of self f32[N, 8], which runs over N, to dimension 1"),
    ("there and back", there_and_back, "transpose", "to dimension 1; expected it to lead argument and result"),
    ("first row", first_row, "slice", "works along dimension 0"),
    ("index_select", row_by_number, "index_select", "works along dimension 0"),
    ("index", rows_at, "index", "works along dimension 0"),
    ("gather", gathered, "gather", "works along dimension 0"),
    ("scatter", scattered, "scatter_add", "works along dimension 0"),
    ("scatter to some rows", scattered_to_the_first, "scatter", "works along dimension 0 of self f32[N, 8]"),
    ("scatter by number", scattered_by_number, "scatter", "works along dimension 0 of self f32[N, 8]"),
    ("strides", one_row_for_all, "_reshape_alias", "is in no table of ops, and has f32[N, 8]"),
    ("dropped attention", attends_to_some, "scaled_dot_product_attention", "works along dimension 0 of query"),
    ("one draw for all", noisy, "randn", "draws numbers, which depend on every draw before it, of whichever request"),
    ("where", shifted_by_where, "roll", "works along dimension 0"),
    ("second dimension", beside(by(aten.unsqueeze.default, 0), by(aten.amax.default, [0])), "unsqueeze", "to dim"),
    ("pad", by(aten.constant_pad_nd.default, [0, 0, 1, 0]), "constant_pad_nd", "works along dimension 0"),
    ("windows", beside(by(aten.unfold.default, 0, 2, 1), by(aten.amax.default, [0, 2])), "unfold", "works along"),
    ("conv1d", convolved, "t", "to dimension 1"),
    ("attention of torch", attends, "scaled_dot_product_attention", "works along dimension 0 of key"),
    ("einsum", by_letters, "einsum", "works along dimension 0"),
    ("rows against columns", against_columns, "mul", "takes dimension 0 of other f32[N], which runs over N, to dim"),
    ("row numbers", numbered, "arange", "is in no table of ops, and has"),
    ("number of rows", counted, "div", "reads how many there are (N) as other"),
    ("a value of the number", filled_with_count, "full", "reads how many there are (N) as fill_value"),
    ("draws", by(aten.rand_like.default), "rand_like", "is in no table of ops, and has f32[N, 8]"),
    ("dropout", by(aten.dropout.default, 0.5, True), "dropout", "works along dimension 0"),
    ("memory as it is", by(aten.empty_like.default), "empty_like", "is in no table of ops"),
    ("an op nobody knows", by(aten.renorm.default, 2, 1, 1.0), "renorm", "Add an entry with dgraph.ir.aten_rules"),
    ("state of others", of_all_states, "mean", "works along dimension 0 of self f32[b], which runs over b"),
    ("cache of others", of_a_cache, "amax", "works along dimension 0 of self f32[pages, page, 8]"),
    ("offsets", of_offsets, "select", "computes on self i32[b+1], which says where rows or pages of sequences lie"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "op", "why"), [m[1:] for m in MIXING], ids=[m[0] for m in MIXING])
def test_what_mixes_requests_is_refused_by_pass_node_and_op(body: Body, op: str, why: str) -> None:
    graph = program(body)
    for node in graph.calls:
        node.meta["by"] = "Mix"
    with pytest.raises(VerifyError) as caught:
        verify(graph, by="Mix")
    text = str(caught.value)
    assert re.search(rf"layer 0 \(block\), node {op}\w*", text), text
    assert why in text
    assert text.startswith("after Mix: rule 'requests' (no request depends on the rows, the state or the number of ")
    assert f"made by Mix ({op})" in text
    assert "output logits depends on it. To look at several rows, define an op that says how" in text


def of_tokens(h: Hand, x: Node) -> Node:
    return h.call(aten.add.Tensor, x, h.call(aten.embedding.default, h.weight("e", 97, 8), h.graph.input("input_ids")))


def of_a_table(h: Hand, x: Node) -> Node:
    return h.call(aten.add.Tensor, x, h.call(aten.index.Tensor, h.weight("e", 97, 8), [h.graph.input("positions")]))


def of_zeros(h: Hand, x: Node) -> Node:
    zeros = h.call(aten.zeros.default, [size(h, x), 8])
    return h.call(aten.add.Tensor, x, h.call(aten.add.Tensor, zeros, h.call(aten.full_like.default, x, 2.0)))


def of_a_constant_per_row(h: Hand, x: Node) -> Node:
    return h.call(aten.mul.Tensor, x, h.call(aten.expand.default, h.weight("c", 1, 8), [size(h, x), 8]))


def of_halves(h: Hand, x: Node) -> Node:
    parts = h.call(aten.unbind.int, h.call(aten.reshape.default, x, [-1, 2, 4]), 1)
    first, second = h.graph.parts(parts, 2, "")
    return h.call(aten.reshape.default, h.call(aten.stack.default, [second, first], 1), [-1, 8])


def of_heads(h: Hand, x: Node) -> Node:
    """Attention of each row's heads to each other: rows are what torch calls a batch."""
    heads = h.call(aten.reshape.default, x, [-1, 2, 4])
    pairs = h.call(aten.scaled_dot_product_attention.default, heads, heads, heads)
    return h.call(aten.reshape.default, pairs, [size(h, x), 8])


def of_row_choices(h: Hand, x: Node) -> Node:
    best = h.call(operator.getitem, h.call(aten.topk.default, x, 8, 1), 1)
    return h.call(aten.gather.default, x, 1, best)


def of_states(h: Hand, x: Node) -> Node:
    """A state goes on, each sequence's by itself."""
    level = h.call(aten.mul.Tensor, h.graph.input("level"), 0.5)
    h.call(aten.where.self, h.call(aten.lt.Scalar, level, 0.1), level, h.call(aten.neg.default, level))
    return x


LEGAL: list[Body] = [
    by(aten.roll.default, [1], [1]),
    by(aten.flip.default, [-1]),
    by(aten.cumsum.default, 1),
    by(aten.softmax.int, -1),
    by(aten.layer_norm.default, [8]),
    by(aten.dropout.default, 0.5, False),
    lambda h, x: h.call(aten.where.ScalarOther, h.call(aten.gt.Scalar, x, 0), x, 0.0),
    lambda h, x: h.call(aten.prelu.default, x, h.weight("slope", 8)),
    by(aten.slice.Tensor, 0, 0, 2**63 - 1),
    part(aten.sort.default, 1),
    beside(by(aten.mean.dim, [1], True)),
    beside(by(aten.reshape.default, [-1, 1, 8]), by(aten.squeeze.dim, 1)),
    of_tokens,
    of_a_table,
    of_zeros,
    of_a_constant_per_row,
    of_halves,
    of_heads,
    of_row_choices,
    of_states,
]


@pytest.mark.parametrize("body", LEGAL)
def test_what_keeps_rows_apart_is_accepted(body: Body) -> None:
    verify(program(body))


def test_a_number_for_the_whole_step_may_be_returned_and_reach_no_row() -> None:
    graph = program(lambda h, x: x)
    flags = graph.call(aten.stack.default, ([graph.input("flag")] * 2,), before=graph.output, by="Test")
    total = graph.call(aten.sum.dim_IntList, (flags, [1]), before=graph.output, by="Test")
    graph.set_outputs({**graph.results(), "counts": total})
    verify(graph)
    scaled = graph.call(
        aten.mul.Tensor,
        (graph.input("x"), graph.call(aten.select.int, (total, 0, 0), before=graph.output, by="Test")),
        before=graph.output,
        by="Test",
    )
    graph.set_outputs({"logits": scaled, "counts": total})
    with pytest.raises(VerifyError, match=r"node stack_default, made by Test \(stack\) takes dimension 0 of tensors"):
        verify(graph)


def test_what_is_mixed_must_not_be_written_to_a_cache() -> None:
    graph = program(lambda h, x: x)
    rolled = graph.call(aten.roll.default, (graph.input("x"), [1], [0]), before=graph.output, by="Test")
    args = (rolled, *(graph.input(n) for n in ("cache", "positions", "page_table", "cu_rows")))
    graph.call(OPS["feature_write"], args, before=graph.output, by="Test")
    with pytest.raises(VerifyError, match=r"roll_default, made by Test .* \(dgraph\.feature_write\) writes it"):
        verify(graph)


def test_no_table_of_pages_is_made_by_a_program() -> None:
    graph = program(lambda h, x: x)
    sizes = [
        graph.call(aten.sym_size.int, (graph.input(name), dim), before=graph.output, by="Test")
        for name, dim in (("level", 0), ("page_table", 1))
    ]
    table = graph.call(aten.zeros.default, (sizes,), {"dtype": torch.int32}, before=graph.output, by="Test")
    args = (*(graph.input(n) for n in ("x", "cache", "positions")), table, graph.input("cu_rows"))
    graph.call(OPS["feature_write"], args, before=graph.output, by="Test")
    with pytest.raises(VerifyError, match=r"zeros_default, made by Test .*makes i32\[b, P\], a table of pages"):
        verify(graph)


def test_a_state_that_is_returned_is_each_sequences_own() -> None:
    graph = program(lambda h, x: x)
    rolled = graph.call(aten.roll.default, (graph.input("level"), [1], [0]), before=graph.output, by="Test")
    graph.set_outputs({**graph.results(), "level": rolled})
    with pytest.raises(VerifyError, match=r"works along dimension 0 of self f32\[b\].* output level depends on it"):
        verify(graph)


# -- ops of dgraph.ops -------------------------------------------------------------------------------------------


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0, keepdim=True)


def centred_by(x: Tensor, of: Tensor) -> Tensor:
    return x - of.float().mean(0, keepdim=True)[..., None].flatten(1)


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Op]:
    """Defines an op that leaves no trace in the table."""
    monkeypatch.setattr("dgraph.ops.registry.OPS", {})
    count = iter(range(10**6))

    def made(reference: Callable[..., Any], **facts: Any) -> Op:
        name = f"outside_rows::op_{id(monkeypatch)}_{next(count)}"
        return define(name, reference, samples=lambda generator: (), contract="", **facts)

    return made


def test_an_op_that_says_nothing_is_refused_and_one_that_acts_row_by_row_is_not(outside: Callable[..., Op]) -> None:
    silent = outside(centred)
    with pytest.raises(VerifyError, match=r"looks at all of x over N, and nothing says how it tells sequences apart"):
        verify(program(by(silent)))
    verify(program(by(outside(torch_relu, by_row=("x",)))))


def torch_relu(x: Tensor) -> Tensor:
    return x.relu()


def test_an_op_reads_other_arguments_whole_and_these_have_no_rows(outside: Callable[..., Op]) -> None:
    op = outside(centred_by, by_row=("x",))
    with pytest.raises(VerifyError, match=r"reads of over N for every row, but acts row by row on x alone"):
        verify(program(lambda h, x: h.call(op, x, x)))
    verify(program(lambda h, x: h.call(op, x, h.weight("mean", 3, 8))))


def test_an_op_of_several_rows_takes_offsets_or_says_what_serves_instead(outside: Callable[..., Op]) -> None:
    taking = outside(centred_by)
    with pytest.raises(VerifyError, match=r"expected an op that acts row by row \(Op.by_row\), or one that takes off"):
        verify(program(lambda h, x: h.call(taking, x, x)))
    verify(program(lambda h, x: h.call(taking, x, h.graph.input("cu_rows"))))
    verify(program(lambda h, x: h.call(outside(centred_by, apart_by="of"), x, x)))


def test_a_result_by_rows_has_these_rows(outside: Callable[..., Op]) -> None:
    op = outside(doubled, by_row=("x",))
    with pytest.raises(VerifyError, match=r"acts row by row on rows N \(Op\.by_row\), but makes f32\[2\*N, 8\]"):
        verify(program(by(op)))


def doubled(x: Tensor) -> Tensor:
    return torch.cat([x, x])


def test_every_op_says_how_it_tells_requests_apart() -> None:
    """Each op of the package that has rows acts by row, gathers, takes offsets, or says what serves instead."""
    captured = {"attention", "dequantise"}  # of a batch; of weights
    for name, op in OPS.items():
        offsets = {"cu_rows", "cu_keys"} & {*op.arguments}
        assert op.by_row or op.gathers or op.apart_by or offsets or name in captured, name


def test_a_rule_from_outside_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgraph.ir.aten_rules.RULES", dict(RULES))
    body = by(aten.renorm.default, 2, 1, 1.0)
    register("renorm", Rule(pointwise))
    verify(program(body))


# -- sizes -------------------------------------------------------------------------------------------------------


def test_a_multiple_of_rows_is_no_row_set() -> None:
    symbols = Symbols()
    n = symbols.size("N")
    for text, number in (("2*N", 2 * n), ("N+1", n + 1), ("N+b", n + symbols.size("b"))):
        with symbols.mode:
            value = torch.empty(number, 4)
        assert symbols.row_set(value) is None, text
        assert not is_row_set(symbols.text(value.shape[0]))
        assert leads(symbols.names_in(value.shape[0])), "it still counts rows"
    assert symbols.row_set(symbols.empty(("K1", 4), torch.float32)) == "K1"


def test_a_width_that_equals_the_guess_for_rows_fixes_no_rows() -> None:
    """x [N, 11] + y [N], where 11 is the hint of N: torch would take N for 11 from then on, and the sum for rows."""
    hand = Hand(layers=1)
    width = hand.graph.symbols.size("N").node.hint
    x, y = hand.input("x", "N", width), hand.input("y", "N")
    with pytest.raises(VerifyError, match=rf"add does not accept its arguments .*it holds only where \w+ is {width}"):
        hand.call(aten.add.Tensor, x, y)
    assert hand.graph.calls == []
    assert hand.graph.type_text(x) == f"f32[N, {width}]"
    made = hand.call(aten.linear.default, x, hand.weight("w", 5, width))
    assert hand.graph.type_text(made) == "f32[N, 5]"
    verify(hand.returns(logits=made))


def forged(name: str) -> Callable[[Hand, Node], Node]:
    """Rows gathered by numbers that no list made."""

    def body(h: Hand, x: Node) -> Node:
        index = h.call(aten.neg.default, h.graph.input(name))
        return h.call(operator.getitem, h.call(OPS["compact"], [x], index), 0)

    return body


def test_rows_are_gathered_by_lists_alone() -> None:
    with pytest.raises(VerifyError, match=r"\(dgraph\.compact\) gathers by neg_default, which may number rows of any"):
        verify(program(forged("positions")))


def test_two_calls_of_one_kind_are_looked_at_once() -> None:
    graph = program(lambda h, x: h.call(aten.relu.default, h.call(aten.relu.default, x)))
    verify(graph)
    asked = dict(graph.symbols.rows)
    verify(program(lambda h, x: h.call(aten.relu.default, x)))
    assert graph.symbols.rows == asked


# -- accepted means apart ----------------------------------------------------------------------------------------

CHAIN: list[Body] = [
    *(by(op) for op in (aten.relu.default, aten.silu.default, aten.neg.default, aten.clone.default, aten.exp.default)),
    by(aten.tanh.default),
    by(aten.mul.Tensor, 0.5),
    lambda h, x: h.call(aten.add.Tensor, x, h.call(aten.unsqueeze.default, h.graph.input("row"), 1)),
    lambda h, x: h.call(aten.add.Tensor, x, h.graph.input("row")),
    lambda h, x: h.call(aten.mul.Tensor, x, h.graph.weight("w")),
    lambda h, x: h.call(aten.linear.default, x, h.graph.weight("w")),
    lambda h, x: h.call(aten.mm.default, x, h.call(aten.t.default, h.graph.weight("w"))),
    lambda h, x: h.call(aten.mm.default, h.graph.weight("w"), x),
    *LEGAL,
    *(body for name, body, *_ in MIXING if name not in ("draws", "dropout", "memory as it is")),
]


def one_chain(seed: int) -> Graph | None:
    """A program of some random ops that the verifier accepts; None if it, or torch, refuses them."""
    draw = random.Random(seed)
    picks = draw.sample(range(len(CHAIN)), draw.choice((1, 2, 3)))

    def body(h: Hand, x: Node) -> Node:
        for pick in picks:
            x = CHAIN[pick](h, x)
        return x

    try:
        graph = program(body)
        verify(graph)
    except (VerifyError, ValueError):  # ops take names once: two of a kind that add a weight
        return None
    return graph


def test_what_the_verifier_accepts_gives_each_request_what_it_gets_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    counts = 3, 4
    n = sum(counts)
    rows: dict[str, Tensor] = {
        "x": torch.randn(n, 8, generator=draw),
        "row": torch.randn(n, generator=draw),
        "flag": torch.rand(n, generator=draw) < 0.5,
        "input_ids": torch.randint(0, 97, (n,), generator=draw),
        "positions": torch.cat([torch.arange(count) for count in counts]),
    }
    level = torch.rand(2, generator=draw)
    cache = torch.randn(3, 4, 8, generator=draw)

    def inputs(graph: Graph, begin: int, end: int, first: int, last: int) -> dict[str, Tensor]:
        offsets = torch.tensor([0, *torch.tensor(counts[first:last]).cumsum(0).tolist()]).int()
        table = torch.arange(first, last).int()[:, None]
        own = {name: value[begin:end] for name, value in rows.items()}
        return own | {"cu_rows": offsets, "page_table": table, "level": level[first:last], "cache": cache}

    accepted = 0
    for seed in range(340):
        graph = one_chain(seed)
        if graph is None:
            continue
        accepted += 1
        together = interpret(graph, inputs(graph, 0, n, 0, 2))["logits"]
        for begin, end, first in ((0, counts[0], 0), (counts[0], n, 1)):
            alone = interpret(graph, inputs(graph, begin, end, first, first + 1))["logits"]
            torch.testing.assert_close(together[begin:end], alone, msg=str([node.name for node in graph.calls]))
    assert accepted > 60, "the chains are no test if few are accepted"


def test_an_input_that_a_pass_adds_is_looked_at_as_well() -> None:
    graph = program(lambda h, x: x)
    more = graph.add_input(InputSpec("more", torch.float32, ("K", 8)))
    total = graph.call(aten.sum.dim_IntList, (more, [0]), before=graph.calls[0], by="Test")
    last = graph.result("logits")
    graph.set_outputs({"logits": graph.call(aten.add.Tensor, (last, total), before=graph.output, by="Test")})
    with pytest.raises(VerifyError, match=r"sum_dim_int_list, made by Test \(sum\) works along dimension 0 of self"):
        verify(graph)

"""Which steps run in chunks of rows: those that act row by row, where something lies between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dgraph.errors import InputError
from dgraph.lowering.chunks import slicing_of
from dgraph.lowering.schedule import schedule
from dgraph.ops import OPS, define
from tests.lowering.test_chunks import chunks_of, feed_forward, lower
from tests.tiny import Hand, interpret

aten = torch.ops.aten


def test_a_feed_forward_network_does() -> None:
    program = lower(feed_forward(), 4)
    assert len(chunks_of(program)) == 1
    assert program.lowered[0].graph_rows == 4


def test_a_sum_with_what_a_cache_holds_does() -> None:
    hand = Hand()
    x, slots = hand.input("x", "N", 8), hand.input("slots", "N", dtype=torch.int64)
    held = hand.call(OPS["feature_take"], hand.input("cache", "pages", "page", 8), slots)
    wide = hand.call(aten.linear.default, hand.call(aten.add.Tensor, x, held), hand.weight("up", 24, 8))
    program = lower(hand.returns(y=hand.call(aten.silu.default, wide)), 2)
    assert len(chunks_of(program)) == 1
    inputs = {"x": torch.randn(5, 8), "slots": torch.tensor([3, -1, 0, 5, 1]), "cache": torch.randn(3, 2, 8)}
    torch.testing.assert_close(program(inputs, 5).outputs["y"], interpret(program.graph, inputs)["y"])


def test_slots_do_not_since_they_follow_from_the_number_of_a_row() -> None:
    hand = Hand()
    positions, table = hand.input("positions", "N", dtype=torch.int64), hand.input("table", "b", "P", dtype=torch.int32)
    places = (positions, table, hand.input("cu_rows", "b+1", dtype=torch.int32))
    graph = hand.returns(slots=hand.call(OPS["row_slots"], *places, hand.input("cache", "pages", "page", 8)))
    (region,) = schedule(graph)[0].steps
    assert slicing_of(graph, region) is None


Build = Callable[[Hand, Any], Any]

# Each from y [N, 8], which an op that acts row by row has made.
MIXED: dict[str, Build] = {
    "a sum over rows": lambda h, y: h.call(aten.sum.dim_IntList, y, [0]),
    "a sum over rows that keeps them": lambda h, y: h.call(
        aten.sub.Tensor, y, h.call(aten.sum.dim_IntList, y, [0], True)
    ),
    "the sum of everything": lambda h, y: h.call(aten.add.Tensor, y, h.call(aten.sum.default, y)),
    "a sum along the rows": lambda h, y: h.call(aten.cumsum.default, y, 0),
    "shares of rows": lambda h, y: h.call(aten.softmax.int, y, 0),
    "a sort of rows": lambda h, y: h.graph.parts(h.call(aten.sort.default, y, 0), 2, "")[0],
    "an order reversed": lambda h, y: h.call(aten.flip.default, y, [0]),
    "rows after rows": lambda h, y: h.call(aten.cat.default, [y, y]),
    "rows after rows, counted from the end": lambda h, y: h.call(aten.cat.default, [y, y], -2),
    "some rows": lambda h, y: h.call(aten.slice.Tensor, y, 0, 1),
    "rows against rows": lambda h, y: h.call(aten.linear.default, y, y),
    "rows turned into columns": lambda h, y: h.call(aten.transpose.int, y, 0, 1),
    "rows joined": lambda h, y: h.call(aten.reshape.default, y, [-1]),
    "rows looked up among rows": lambda h, y: h.call(aten.embedding.default, y, h.input("ids", "N", dtype=torch.int64)),
    "a draw": lambda h, y: h.call(aten.add.Tensor, y, h.call(aten.rand_like.default, y)),
}


@pytest.mark.parametrize("what", MIXED)
def test_what_mixes_rows_does_not(what: str) -> None:
    hand = Hand()
    y = hand.call(aten.relu.default, hand.call(aten.mul.Tensor, hand.input("x", "N", 8), 2.0))
    program = lower(hand.returns(z=hand.call(aten.neg.default, MIXED[what](hand, y))), 2)
    assert not chunks_of(program)
    assert program.lowered[0].graph_rows is None


ALONG: dict[str, Build] = {
    "shares": lambda h, y: h.call(aten.softmax.int, y, -1),
    "running sums": lambda h, y: h.call(aten.cumsum.default, y, 1),
    "the largest": lambda h, y: h.call(aten.amax.default, y, [-1], True),
    "columns in order": lambda h, y: h.graph.parts(h.call(aten.sort.default, y, 1), 1, "")[0],
    "columns of others": lambda h, y: h.call(aten.transpose.int, h.call(aten.unsqueeze.default, y, 1), 1, 2),
}


@pytest.mark.parametrize("what", ALONG)
def test_what_works_along_a_row_does(what: str) -> None:
    """The table of aten ops (`dgraph.ir.aten_rules`) says of each op what it does to rows."""
    hand = Hand()
    y = hand.call(aten.linear.default, hand.input("x", "N", 8), hand.weight("up", 24, 8))
    program = lower(hand.returns(z=hand.call(aten.neg.default, ALONG[what](hand, y))), 2)
    assert len(chunks_of(program)) == 1
    inputs = {"x": torch.randn(5, 8)}
    torch.testing.assert_close(program(inputs, 5).outputs["z"], interpret(program.graph, inputs)["z"])


def test_two_row_sets_do_not() -> None:
    hand = Hand()
    x, y = hand.input("x", "N", 8), hand.input("y", "K", 8)
    results = (hand.call(aten.neg.default, hand.call(aten.relu.default, value)) for value in (x, y))
    assert not chunks_of(lower(hand.returns(**dict(zip("ab", results, strict=True))), 2))


def test_what_has_nothing_between_does_not() -> None:
    """A chunk would copy the result and save nothing."""
    hand = Hand()
    x = hand.input("x", "N", 8)
    graph = hand.returns(y=hand.call(aten.reshape.default, hand.call(aten.relu.default, x), [-1, 2, 4]))
    assert not chunks_of(lower(graph, 2))


def test_a_count_that_something_else_reads_keeps_its_steps_apart() -> None:
    hand = Hand()
    x, count = hand.input("x", "N", 8), hand.input("count", 1, dtype=torch.int64)
    wide = hand.call(OPS["rows_linear"], x, hand.weight("up", 24, 8), None, count)
    scaled = hand.call(aten.mul.Tensor, hand.call(aten.silu.default, wide), count)
    assert not chunks_of(lower(hand.returns(y=scaled), 2))


@pytest.mark.parametrize("given", [0, -1, 2.0, True, "8"])
def test_a_chunk_has_rows(given: Any) -> None:
    with pytest.raises(InputError, match="chunk_rows must be a number of rows of at least 1, or None"):
        lower(feed_forward(), given)
    with pytest.raises(InputError, match="graph_rows must be a number of rows of at least 1, or None"):
        lower(feed_forward(), None, graph_rows=given)


@pytest.mark.parametrize(
    ("chunk", "graph", "most"), [(4, 9, 4), (9, 4, 4), (None, 4, 4), (4, None, 4), (None, None, None)]
)
def test_what_runs_in_chunks_or_has_too_many_rows_is_not_recorded(
    chunk: int | None, graph: int | None, most: int | None
) -> None:
    program = lower(feed_forward(), chunk, graph_rows=graph)
    assert program.graph_rows == program.lowered[0].graph_rows == most


def tripled(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """As many rows as `count` says; the others are left out."""
    out = x.new_full(x.shape, torch.nan)
    live = min(int(count[-1]), len(x))
    out[:live] = 3 * x[:live]
    return out


@pytest.mark.parametrize("by_row", [("x",), ()])
def test_an_op_from_outside_does_if_it_says_that_it_acts_row_by_row(
    by_row: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dgraph.ops.registry.OPS", type(OPS)(OPS))  # leaves no trace in the table
    name = f"outside_chunks::tripled_{len(by_row)}"
    facts: dict[str, Any] = {"by_row": by_row, "count": "count"}
    op = define(name, tripled, samples=lambda g: (), contract="", fake=lambda x, count: torch.empty_like(x), **facts)
    hand = Hand()
    x, count = hand.input("x", "N", 8), hand.input("count", 1, dtype=torch.int64)
    wide = hand.call(OPS["rows_linear"], x, hand.weight("up", 24, 8), None, count)
    narrow = hand.call(OPS["rows_linear"], hand.call(op, wide, count), hand.weight("down", 8, 24), None, count)
    program = lower(hand.returns(y=narrow), 2)
    assert bool(chunks_of(program)) == bool(by_row)
    inputs = {"x": torch.randn(5, 8), "count": torch.tensor([4])}
    found = program(inputs, 5).outputs["y"][:4]
    torch.testing.assert_close(found, interpret(program.graph, inputs)["y"][:4])

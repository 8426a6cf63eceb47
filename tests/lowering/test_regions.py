"""Regions as functions: equal texts share one, eager or compiled, at any row count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dgraph.errors import InputError, LoweringError
from dgraph.ir.graph import Graph
from dgraph.lowering import inductor
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.regions import NotStored, RegionCompiler, region_text
from dgraph.lowering.schedule import Region, schedule
from dgraph.ops import OPS
from tests.passes.scene import Scene
from tests.tiny import Hand, interpret

aten = torch.ops.aten


def regions_of(graph: Graph) -> list[Region]:
    return [s for stage in schedule(graph) for s in stage.steps if isinstance(s, Region)]


def small(
    name: str = "x", *, cols: int = 8, factor: float = 2.0, dtype: torch.dtype = torch.float32, rows: str = "N"
) -> Graph:
    """relu(norm(x) * factor): one region of three ops."""
    hand = Hand()
    x = hand.input(name, rows, cols, dtype=dtype)
    normed = hand.call(OPS["rms_norm"], x, hand.weight(f"{name}.w", cols, dtype=dtype), 1e-6)
    return hand.returns(y=hand.call(aten.relu.default, hand.call(aten.mul.Tensor, normed, factor)))


def text_of(graph: Graph) -> str:
    (region,) = regions_of(graph)
    return region_text(graph, region)


def pair(first: str, second: str) -> Graph:
    """Two values, doubled by one region."""
    hand = Hand()
    halves = hand.input("x", first), hand.input("y", second)
    x, y = (hand.call(aten.relu.default, hand.call(aten.mul.Tensor, half, 2.0)) for half in halves)
    return hand.returns(x=x, y=y)


# -- identity ----------------------------------------------------------------------------------------------------


def test_the_text_is_the_computation_and_not_its_names() -> None:
    assert text_of(small()) == text_of(small("another"))
    assert text_of(small()) == text_of(small(rows="K"))
    other = {
        "columns": small(cols=4),
        "a constant": small(factor=3.0),
        "the dtype": small(dtype=torch.bfloat16),
    }
    for what, graph in other.items():
        assert text_of(graph) != text_of(small()), what


def test_the_text_tells_sizes_that_are_one_from_sizes_that_are_two() -> None:
    def product(a: str, b: str) -> Graph:
        hand = Hand()
        x, y = hand.input("x", a, 1), hand.input("y", 1, b)
        return hand.returns(z=hand.call(aten.relu.default, hand.call(aten.mul.Tensor, x, y)))

    assert text_of(product("N", "N")) != text_of(product("N", "b"))
    assert text_of(product("N", "b")) == text_of(product("K", "P"))


def test_the_text_tells_which_argument_is_which() -> None:
    def difference(flip: bool) -> Graph:
        hand = Hand()
        x, y = hand.input("x", "N", 4), hand.input("y", "N", 4)
        first = hand.call(aten.relu.default, x)
        args = (y, first) if flip else (first, y)
        return hand.returns(z=hand.call(aten.sub.Tensor, *args))

    assert text_of(difference(False)) != text_of(difference(True))


def test_the_text_tells_keywords_and_outputs() -> None:
    def total(**keywords: Any) -> Graph:
        hand = Hand()
        x = hand.call(aten.relu.default, hand.input("x", "N", 4))
        return hand.returns(z=hand.call(aten.sum.dim_IntList, x, [1], **keywords), x=x)

    assert text_of(total()) != text_of(total(dtype=torch.float64))
    hand = Hand()
    x = hand.call(aten.relu.default, hand.input("x", "N", 4))
    alone = hand.returns(z=hand.call(aten.sum.dim_IntList, x, [1]))
    assert text_of(alone) != text_of(total())


# -- functions ---------------------------------------------------------------------------------------------------


def test_an_eager_region_computes_what_the_graph_does() -> None:
    graph = small()
    (region,) = regions_of(graph)
    compiler = RegionCompiler("eager")
    function = compiler.function(graph, region)
    x = torch.randn(5, 8)
    (got,) = function(x, graph.tensors["x.w"])
    assert torch.equal(got, interpret(graph, {"x": x})["y"])
    assert compiler.compiled == []


def test_equal_regions_share_a_function() -> None:
    compiler = RegionCompiler("eager")
    graphs = [small(), small("another"), small(factor=3.0), small(rows="K")]
    functions = [compiler.function(g, regions_of(g)[0]) for g in graphs]
    assert functions[0] is functions[1] is functions[3]
    assert functions[2] is not functions[0]
    assert compiler.reused == 2


def test_the_layers_of_a_program_share_their_functions(dense: dict[str, Graph], focus: dict[str, Graph]) -> None:
    compiler = RegionCompiler("eager")
    for graph in (dense["step"], dense["prefill"], focus["step"], focus["prefill"]):
        for region in regions_of(graph):
            compiler.function(graph, region)
    assert len(compiler._functions) == 5
    total = sum(len(regions_of(g)) for g in (dense["step"], dense["prefill"], focus["step"], focus["prefill"]))
    assert compiler.reused == total - 5


def test_an_unknown_backend() -> None:
    with pytest.raises(InputError, match=r"backend must be one of 'inductor', 'eager', 'auto', got 'cuda'"):
        RegionCompiler("cuda")


def test_a_size_that_crosses_into_a_region_is_refused() -> None:
    hand = Hand()
    x = hand.input("x", "N", 8)
    size = hand.call(aten.sym_size.int, x, 0)
    graph = hand.returns(y=hand.call(aten.relu.default, hand.call(aten.reshape.default, x, [size, 2, 4])))
    (region,) = regions_of(graph)
    cut = Region(region.nodes[1:], (size, x), region.outputs)
    with pytest.raises(LoweringError, match=r"sym_size_int crosses into a region but is N, not a tensor"):
        RegionCompiler("eager").function(graph, cut)


# -- Inductor ----------------------------------------------------------------------------------------------------


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "_COMPILED", {})


def test_one_op_is_not_worth_compiling(forgetful: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "compile_region", lambda *_: pytest.fail("compiled"))
    hand = Hand()
    x, y = hand.input("x", "N", 8), hand.input("y", "N", 8)
    graph = hand.returns(z=hand.call(aten.sub.Tensor, x, y))
    compiler = RegionCompiler("inductor")
    (got,) = compiler.function(graph, regions_of(graph)[0])(torch.ones(3, 8), torch.ones(3, 8))
    assert not got.any()
    assert compiler.compiled == []


def test_what_inductor_cannot_compile_says_so(forgetful: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no such instruction\nand much more")

    monkeypatch.setattr(inductor, "compile_region", broken)
    graph = small()
    with pytest.raises(LoweringError) as caught:
        RegionCompiler("inductor").function(graph, regions_of(graph)[0])
    message = str(caught.value)
    assert message.startswith("Inductor cannot compile this region: no such instruction\n")
    assert "relu" in message
    assert "Use backend='eager'" in message
    assert "much more" not in message


def test_a_region_that_was_compiled_for_one_size_is_refused(forgetful: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_size(module: torch.fx.GraphModule, *_: Any) -> Any:
        def run(x: Tensor, w: Tensor) -> Any:
            assert x.shape[0] == 3, "wrong size"
            return module(x, w)

        return run

    monkeypatch.setattr(inductor, "compile_region", one_size)
    graph = small()
    with pytest.raises(LoweringError, match="Inductor cannot compile this region: wrong size"):
        RegionCompiler("inductor").function(graph, regions_of(graph)[0])


def test_a_size_and_one_more_are_not_two_sizes(forgetful: None) -> None:
    """A function that was compiled for [b] and [b+1] takes no other pair of sizes."""
    compiler = RegionCompiler("inductor")
    for sizes, counts in ((("b", "b+1"), (3, 4)), (("b", "N"), (3, 9)), (("b+1", "N"), (4, 9))):
        graph = pair(*sizes)
        function = compiler.function(graph, regions_of(graph)[0])
        x, y = function(*map(torch.ones, counts))
        assert (x.tolist(), y.tolist()) == ([2.0] * counts[0], [2.0] * counts[1])
    assert compiler.reused == 1
    assert text_of(pair("b", "b+1")) == text_of(pair("K", "K+1"))


def test_a_region_may_know_a_symbol_in_a_sum_only(forgetful: None) -> None:
    """Offsets of b sequences are [b+1]; a region that reads nothing else of theirs never sees b itself."""
    hand = Hand()
    offsets = [hand.input(name, "b+1", dtype=torch.int32) for name in ("first", "second")]
    totals = [hand.call(aten.select.int, x, 0, -1) for x in offsets]
    graph = hand.returns(y=hand.call(aten.stack.default, totals))
    (region,) = regions_of(graph)
    function = RegionCompiler("inductor").function(graph, region)
    for b in (1, 2, 6):
        values = [torch.arange(b + 1, dtype=torch.int32) * scale for scale in (2, 3)]
        assert function(*values)[0].tolist() == [2 * b, 3 * b]


def reading(*, embedded: bool = False) -> Graph:
    """What rows have in a cache, found by their slots, plus x: an input, or looked up by an input."""
    hand = Hand()
    if embedded:
        x = hand.call(aten.embedding.default, hand.weight("words", 9, 4), hand.input("ids", "N", dtype=torch.int64))
    else:
        x = hand.input("x", "N", 4)
    cache = hand.input("cache", "pages", "page", 4)
    table = hand.input("page_table", "b", "P", dtype=torch.int32)
    places = (hand.input("positions", "N", dtype=torch.int64), table, hand.input("cu_rows", "b+1", dtype=torch.int32))
    held = hand.call(OPS["feature_take"], cache, hand.call(OPS["row_slots"], *places, cache))
    return hand.returns(y=hand.call(aten.add.Tensor, x, held))


def test_reads_of_a_cache_fuse_and_need_no_check(forgetful: None) -> None:
    """Several rows, pages and sequences, padding rows among them, by functions of every size."""
    graph = reading()
    slots, summed = regions_of(graph)
    compiler = RegionCompiler("inductor")
    find, add = compiler.function(graph, slots), compiler.function(graph, summed)
    for counts, pages, page in (((2, 1), 3, 4), ((5, 0, 7), 9, 2), ((1,), 1, 1)):
        rows, cache = sum(counts) + 2, torch.randn(pages, page, 4)
        positions = [i for n in counts for i in range(n)]
        inputs = {
            "x": torch.randn(rows, 4),
            "cache": cache,
            "positions": torch.tensor([*positions, 1_000_003, -5]),
            "page_table": torch.randint(-1, pages, (len(counts), 4), dtype=torch.int32),
            "cu_rows": torch.tensor([0, *counts]).cumsum(0).int(),
        }
        (found,) = find(*(inputs[n.meta["input"]] for n in slots.inputs))
        (got,) = add(*(inputs.get(n.meta.get("input"), found) for n in summed.inputs))
        assert torch.equal(got, interpret(graph, inputs)["y"])


def test_numbers_from_outside_are_checked(forgetful: None, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = []

    def fake(module: torch.fx.GraphModule, _: Any, options: dict[str, Any], *__: Any) -> Any:
        settings.append(options.get("assert_indirect_indexing", True))
        return module.forward

    monkeypatch.setattr(inductor, "compile_region", fake)
    for graph in (reading(), reading(embedded=True), small()):
        RegionCompiler("inductor").function(graph, regions_of(graph)[-1])
    assert settings == [False, True, True]


def test_a_region_is_tried_on_sizes_that_fit_each_other(forgetful: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets are one more than the sequences; a page is small, however many rows there are."""
    seen: list[dict[str, tuple[int, ...]]] = []
    graph = reading()
    region = regions_of(graph)[0]

    def note(*values: Tensor) -> None:
        seen.append({n.meta["input"]: tuple(v.shape) for n, v in zip(region.inputs, values, strict=True)})

    monkeypatch.setattr(inductor, "compile_region", lambda *_: note)
    RegionCompiler("inductor").function(graph, region)
    assert [s["positions"] for s in seen] == [(3,), (5,)]
    for shapes in seen:
        (rows,) = shapes["positions"]
        assert shapes["cu_rows"] == (shapes["page_table"][0] + 1,)
        assert shapes["cache"][1] < rows
    assert len({shapes["cache"][1] for shapes in seen}) == 2


def test_compiled_texts_serve_every_compiler_of_the_process(forgetful: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def fake(module: torch.fx.GraphModule, *_: Any) -> Any:
        made.append(module)
        return module.forward

    monkeypatch.setattr(inductor, "compile_region", fake)
    told: list[str] = []
    first, second = RegionCompiler("inductor", told.append), RegionCompiler("inductor", told.append)
    one, other = small(), small("another")
    assert first.function(one, regions_of(one)[0]) is second.function(other, regions_of(other)[0])
    assert len(made) == 1
    assert told == ["compiling region 1"]
    assert first.compiled == [text_of(one)]
    assert second.compiled == []
    assert not any(node.target is OPS["rms_norm"].overload for node in made[0].graph.nodes), "inline ops are opened up"


def test_inductor_equals_eager_and_compiles_each_distinct_region_once(
    forgetful: None, dense: dict[str, Graph], focus: dict[str, Graph], step: Scene
) -> None:
    """The step of both recipes at several row counts, by three compiled regions."""
    compiler, plain = RegionCompiler("inductor"), RegionCompiler("eager")
    for graph in (dense["step"], focus["step"]):
        compiled = LoweredProgram(graph, compiler, Buckets())
        eager = LoweredProgram(graph, plain, Buckets())
        for sequences in (4, 2):
            mine, theirs = first(step, sequences), first(step, sequences)
            rows = 8 * sequences
            got, expected = compiled(mine, rows), eager(theirs, rows)
            assert got.rows == expected.rows
            for name, value in expected.outputs.items():
                if value.is_floating_point():
                    torch.testing.assert_close(got.outputs[name], value, atol=1e-5, rtol=1e-4)
                else:
                    assert torch.equal(got.outputs[name], value), name
            for name, value in theirs.items():
                torch.testing.assert_close(mine[name], value, atol=1e-5, rtol=1e-4, equal_nan=True)
    found = [region_text(dense["step"], r) for r in regions_of(dense["step"])]
    assert compiler.compiled == [found[0], found[1], found[-1]], "first, middle, last"
    assert compiler.reused == len(found) - 3 + len(found), "all others, those of the second recipe among them"


def first(step: Scene, sequences: int) -> dict[str, Tensor]:
    """The inputs of the first sequences of the step."""
    inputs = step.copy().inputs
    rows = 8 * sequences
    cut = dict.fromkeys(("page_table", "average", "sequence_average", "reached", "block_step"), sequences)
    cut["cu_rows"] = sequences + 1
    per_row = ("input_ids", "positions", "limit", "candidate", "temperature", "seed")
    return {n: v[:rows] if n in per_row else v[: cut[n]] if n in cut else v for n, v in inputs.items()}


def test_auto_loads_what_is_compiled_and_raises_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "_COMPILED", {})
    graph = small(factor=3.25)
    (region,) = regions_of(graph)
    waiting = RegionCompiler("auto")
    assert (waiting.backend, waiting.stored_only) == ("inductor", True)
    with pytest.raises(NotStored, match="rms_norm"):
        waiting.function(graph, region)
    assert (waiting.compiled, waiting.loaded) == ([], [])
    made = RegionCompiler("inductor").function(graph, region)
    assert waiting.function(graph, region) is made
    assert (waiting.compiled, len(waiting.loaded)) == ([], 1)

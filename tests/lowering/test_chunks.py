"""Chunks of rows: the results of all rows at once, small values between them, and only where rows do not mix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dgraph.compiler.compiled_model import CompiledModel
from dgraph.ir.graph import Graph
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.chunks import CHUNK_ROWS
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.instructions import RowChunks
from dgraph.lowering.regions import RegionCompiler
from dgraph.ops import OPS
from dgraph.runtime.graphs.pool import GRAPH_ROWS, GraphPool
from dgraph.runtime.loop.session import BlockSession
from dgraph.runtime.policies import FixedSteps
from dgraph.runtime.stats import StepRecord
from tests.amounts import every_value
from tests.lowering.one_region import compilations
from tests.passes.scene import Scene
from tests.recipes.bidirectional import Setup, prompts_for, setup_of
from tests.runtime.recorder import Recorder
from tests.tiny import Hand

aten = torch.ops.aten
ROWS, BLOCK = 32, 8


def lower(graph: Graph, chunk_rows: int | None, backend: str = "eager", **options: Any) -> LoweredProgram:
    return LoweredProgram(graph, RegionCompiler(backend), Buckets(), chunk_rows=chunk_rows, **options)


def chunks_of(program: LoweredProgram) -> list[RowChunks]:
    return [step for stage in program.lowered for step in stage.instructions if isinstance(step, RowChunks)]


def feed_forward() -> Graph:
    """norm, a wide product, activation, a narrow one, and the residual; as a region of a transformer, over x [N, 8]."""
    hand = Hand()
    x = hand.input("x", "N", 8)
    normed = hand.call(OPS["rms_norm"], x, hand.weight("norm", 8), 1e-6)
    wide = hand.call(aten.silu.default, hand.call(aten.linear.default, normed, hand.weight("up", 64, 8)))
    narrow = hand.call(aten.linear.default, wide, hand.weight("down", 8, 64))
    return hand.returns(y=hand.call(aten.add.Tensor, x, narrow))


# -- results -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llada() -> Setup:
    return setup_of("llada")


def decode(made: CompiledModel, chunk_rows: int | None) -> tuple[list[list[int]], list[StepRecord], list[Tensor], int]:
    """Tokens, steps and caches of a generation, and how many calls run in chunks."""
    programs = {
        name: LoweredProgram(phase.graph, made.compiler, Buckets(), chunk_rows=chunk_rows)
        for name, phase in made.phases.items()
    }
    recipe = made.recipe
    records: list[StepRecord] = []
    session = BlockSession(
        made.spec,
        programs,
        block_cache=recipe.block_cache,  # type: ignore[arg-type]
        recommit=recipe.recommit,
        plan=recipe.plan,
        kv=recipe.kv,
    )
    found = session.generate(
        prompts_for(BLOCK),
        max_new_tokens=2 * BLOCK + 3,
        policy=FixedSteps(4),
        observer=records.append,
        keep_kv=True,
    )
    assert found.kv is not None
    caches = [part for sequence in found.kv for layer in sequence.layers for part in layer]
    return found.token_ids, records, caches, sum(len(chunks_of(program)) for program in programs.values())


@every_value(
    ("chunk_rows", [1, 7]),
    (
        "recipe, options",
        [
            ("dense", {}),
            ("fast_dllm", {}),
            ("focus", {}),
            ("dyllm", {}),
            ("dllm_cache", {}),
            ("dllm_serve", {}),
            ("maskkv", {"pairs": 6, "prompt_interval": 3}),
        ],
    ),
)
def test_a_generation_in_chunks_is_the_one_without(
    llada: Setup, recipe: str, options: dict[str, Any], chunk_rows: int
) -> None:
    made = llada.optimized(recipe, BLOCK, **options)
    mine, theirs = decode(made, chunk_rows), decode(made, None)
    assert mine[3] > 0
    assert theirs[3] == 0
    assert mine[0] == theirs[0]
    # A product of another number of rows may add up in another order.
    for got, want in zip(mine[1], theirs[1], strict=True):
        assert torch.equal(got.positions, want.positions)
        torch.testing.assert_close(got.confidence, want.confidence, atol=1e-5, rtol=1e-4)
    for cache, expected in zip(mine[2], theirs[2], strict=True):
        torch.testing.assert_close(cache, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("phase", ["prefill", "step"])
@pytest.mark.parametrize("recipe", ["dense", "focus"])
def test_block_causal_programs(request: pytest.FixtureRequest, step: Scene, recipe: str, phase: str) -> None:
    graph: Graph = request.getfixturevalue(recipe)[phase]
    mine, theirs = step.copy().inputs, step.copy().inputs
    program = lower(graph, 5)
    got, expected = program(mine, ROWS), lower(graph, None)(theirs, ROWS)
    assert chunks_of(program)
    assert got.rows == expected.rows
    for name, value in expected.outputs.items():
        torch.testing.assert_close(got.outputs[name], value, atol=1e-5, rtol=1e-4)
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, atol=1e-5, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 11])
def test_chunks_of_four_at_any_number_of_rows(rows: int) -> None:
    """Without a product of matrices: bit for bit."""
    hand = Hand()
    x, scale = hand.input("x", "N", 6), hand.input("scale", 1, 6)
    doubled = hand.call(aten.mul.Tensor, hand.call(OPS["rms_norm"], x, hand.weight("w", 6), 1e-6), scale)
    halves = hand.call(aten.split_with_sizes.default, doubled, [2, 4], -1)
    first, second = hand.graph.parts(halves, 2, "")
    graph = hand.returns(
        y=hand.call(aten.reshape.default, hand.call(aten.relu.default, second), [-1, 2, 2]),
        z=hand.call(aten.cat.default, [first, doubled], 1),
    )
    (group,) = chunks_of(program := lower(graph, 4))
    assert group.limit == 4
    inputs = {"x": torch.randn(rows, 6), "scale": torch.rand(1, 6)}
    expected = lower(graph, None)(inputs, rows).outputs
    for name, value in program(inputs, rows).outputs.items():
        assert torch.equal(value, expected[name]), name
        assert value.is_contiguous()


@pytest.mark.parametrize("fused", [False, True])
def test_calls_that_count_live_rows_count_those_of_their_chunk(fused: bool) -> None:
    """The reference fills padding rows with NaN, so a count that is too small shows, and so does one too large."""
    hand = Hand()
    x, cu_rows = hand.input("x", "N", 8), hand.input("cu_rows", "b+1", dtype=torch.int32)
    if fused:
        wide = hand.call(OPS["rows_glu"], x, hand.weight("up", 48, 8), None, cu_rows)
    else:
        wide = hand.call(OPS["rows_linear"], x, hand.weight("up", 24, 8), None, cu_rows)
        wide = hand.call(aten.silu.default, wide)
    narrow = hand.call(OPS["rows_linear"], wide, hand.weight("down", 8, 24), None, cu_rows)
    graph = hand.returns(y=narrow)
    (group,) = chunks_of(program := lower(graph, 4))
    assert len(group.members) == (2 if fused else 3)
    for live in (0, 3, 4, 6, 12):
        inputs = {"x": torch.randn(12, 8), "cu_rows": torch.tensor([0, live // 2, live], dtype=torch.int32)}
        got, want = (p(inputs, 12).outputs["y"] for p in (program, lower(graph, None)))
        torch.testing.assert_close(got[:live], want[:live])
        assert got[live:].isnan().all()


def test_norms_and_rotations_that_count_live_rows_take_the_angles_of_their_chunk() -> None:
    hand = Hand()
    x, cu_rows = hand.input("x", "N", 8), hand.input("cu_rows", "b+1", dtype=torch.int32)
    cos, sin = (hand.input(name, "N", 1, 4) for name in ("cos", "sin"))
    normed = hand.call(OPS["rows_norm"], x, hand.weight("norm", 8), 1e-6, cu_rows)
    wide = hand.call(OPS["rows_linear"], normed, hand.weight("k", 8, 8), None, cu_rows)
    heads = hand.call(aten.reshape.default, wide, [-1, 2, 4])
    rope = hand.call(OPS["rows_rope"], heads, cos, sin, cu_rows, hand.weight("head", 4), 1e-6)
    graph = hand.returns(y=rope)
    (group,) = chunks_of(program := lower(graph, 4))
    assert len(group.members) == 4
    for live in (0, 3, 4, 6, 12):
        count = torch.tensor([0, live // 2, live], dtype=torch.int32)
        inputs = {"x": torch.randn(12, 8), "cos": torch.randn(12, 1, 4), "sin": torch.randn(12, 1, 4), "cu_rows": count}
        got, want = (p(inputs, 12).outputs["y"] for p in (program, lower(graph, None)))
        torch.testing.assert_close(got[:live], want[:live])
        assert got[live:].isnan().all()


def test_compiled_regions_take_chunks_without_another_compilation() -> None:
    graph, compiler = feed_forward(), RegionCompiler()
    program = LoweredProgram(graph, compiler, Buckets(), chunk_rows=4)
    before, compiled = compilations(), list(compiler.compiled)
    for rows in (3, 4, 9, 14):
        x = torch.randn(rows, 8)
        expected = lower(graph, None)({"x": x}, rows).outputs["y"]
        torch.testing.assert_close(program({"x": x}, rows).outputs["y"], expected, atol=1e-5, rtol=1e-5)
    assert compiler.compiled == compiled
    assert compilations() == before


# -- memory ------------------------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """Rows of every tensor that an op makes in memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor) and value.dim() and value.untyped_storage().data_ptr() not in given:
                self.rows.append(len(value))
        return result


def watched(function: Callable[..., Any], seen: Allocations) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with seen:
            return function(*args)

    return run


@pytest.mark.parametrize("chunk_rows", [5, None])
def test_values_between_have_the_rows_of_a_chunk(dense: dict[str, Graph], step: Scene, chunk_rows: int | None) -> None:
    program, seen = lower(dense["prefill"], chunk_rows or ROWS), Allocations()
    groups = chunks_of(program)
    for group in groups:
        for member in group.members:
            member.function = watched(member.function, seen)
    program(step.copy().inputs, ROWS)
    assert len(groups) >= 4, "one per layer"
    assert len(seen.rows) > 10 * len(groups)
    assert max(seen.rows) == (chunk_rows or ROWS)


def test_what_lies_between_is_no_output(dense: dict[str, Graph]) -> None:
    """Of a layer leave the residual stream and queries, keys and values: nothing of the feed-forward network."""
    program = lower(dense["step"], 5)
    names = {int(slot): node for node, slot in program._numbers.items()}
    widths = {names[slot].meta["val"][0].numel() for group in chunks_of(program)[1:] for slot in group.outputs}
    spec = dense["step"].spec
    assert widths == {spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim}


# -- captured stages ---------------------------------------------------------------------------------------------


def test_a_stage_in_chunks_is_not_captured_and_says_so_once(dense: dict[str, Graph], step: Scene) -> None:
    pool = GraphPool(recorder=Recorder)
    program = lower(dense["step"], ROWS - 1, runner=pool.runner)
    expected = lower(dense["step"], None)(step.copy().inputs, ROWS)
    for _ in range(2):
        result = program(step.copy().inputs, ROWS)
        torch.testing.assert_close(result.outputs["confidence"], expected.outputs["confidence"], atol=1e-5, rtol=1e-4)
    assert pool.refused == [("step", ROWS, f"more than {ROWS - 1} rows")]
    assert not pool.recorded
    lower(dense["step"], ROWS, runner=pool.runner)(step.copy().inputs, ROWS)
    assert pool.recorded == [("step", ROWS)]


def test_a_stage_after_one_in_chunks_is_captured(focus: dict[str, Graph], step: Scene) -> None:
    pool = GraphPool(recorder=Recorder)
    program, plain = lower(focus["step"], ROWS - 1, runner=pool.runner), lower(focus["step"], ROWS - 1)
    for _ in range(3):
        mine, theirs = program(step.copy().inputs, ROWS), plain(step.copy().inputs, ROWS)
        assert mine.rows == theirs.rows
        for name, value in theirs.outputs.items():
            assert torch.equal(mine.outputs[name], value), name
    assert [(name, rows) for name, rows, _ in pool.refused] == [("prefix", ROWS)]
    assert {name for name, _ in pool.recorded} == {"suffix"}


def test_steps_of_blocks_are_captured_at_any_size(llada: Setup) -> None:
    made = llada.optimized("dense", BLOCK, fresh=True)
    made.graph_pool = GraphPool(recorder=Recorder)
    graph = made.phases["step"].graph
    assert made._lower(graph).graph_rows == CHUNK_ROWS
    made.spec = made.spec.__class__(**{**vars(made.spec), "attention": "block_causal"})
    assert made._lower(graph).graph_rows is None
    assert made._lower(graph, prompts=True).graph_rows == GRAPH_ROWS

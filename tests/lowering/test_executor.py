"""Lowered programs: the graph's values, padding that changes nothing, slots that are freed, inputs that are checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dgraph.errors import LoweringError
from dgraph.ir.graph import Graph
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.instructions import Registers
from dgraph.lowering.regions import RegionCompiler
from dgraph.lowering.stage import Living, LoweredStage, Runner, cut_rows, live_rows, run_in_order
from dgraph.ops import Op
from dgraph.ops import padded as rows
from dgraph.ops.attention import paged_attention
from dgraph.passes import CacheKV, ChunkLMHead, EvictTokens, FuseProjections
from tests.passes.scene import BLOCKS, Scene
from tests.tiny import Hand, interpret, rewritten

aten = torch.ops.aten
ROWS = 32


def lower(graph: Graph, buckets: Any = None, **options: Any) -> LoweredProgram:
    return LoweredProgram(graph, RegionCompiler("eager"), Buckets.of(buckets), **options)


@pytest.fixture(scope="module")
def inf(packed: Graph) -> Graph:
    """The focus step that evicts nothing."""
    steps = (FuseProjections(), CacheKV(), EvictTokens(alpha=math.inf), ChunkLMHead(5))
    return rewritten(packed, *steps)


# -- values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["dense", "focus"])
@pytest.mark.parametrize("phase", ["step", "prefill"])
def test_a_program_is_its_graph(request: pytest.FixtureRequest, step: Scene, recipe: str, phase: str) -> None:
    graph: Graph = request.getfixturevalue(recipe)[phase]
    mine, theirs = step.copy().inputs, step.copy().inputs
    result = lower(graph)(mine, ROWS)
    expected = interpret(graph, theirs)
    assert set(result.outputs) == set(expected) == set(graph.outputs)
    for name, value in expected.items():
        assert torch.equal(result.outputs[name], value), name
    for name, value in theirs.items():
        assert torch.equal(mine[name].nan_to_num(), value.nan_to_num()), name
    stages = 2 if (recipe, phase) == ("focus", "step") else 1
    assert len(result.rows) == len(result.padded) == len(result.seconds) == stages
    assert result.rows == result.padded
    assert result.rows[0] == ROWS
    assert all(s > 0 for s in result.seconds)


def test_layers_share_what_they_read_of_pages_and_offsets(
    dense: dict[str, Graph], step: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def counted(module: Any, name: str) -> None:
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: (calls.append(name), function(*args))[1])

    counted(paged_attention, "_pages")  # for every sequence
    counted(rows, "sequence_of")  # for the rows that are written
    program = lower(dense["step"])
    for _ in range(2):
        program(step.copy().inputs, ROWS)
        assert sorted(calls) == ["_pages"] * len(BLOCKS) + ["sequence_of"], "once, not in every layer"
        calls.clear()


def test_the_rows_of_the_suffix_are_the_kept_rows(focus: dict[str, Graph], step: Scene) -> None:
    program = lower(focus["step"])
    result = program(step.copy().inputs, ROWS)
    assert program.stage_names == ("prefix", "suffix")
    assert result.rows == (ROWS, len(result.outputs["kept"]))
    assert 0 < result.rows[1] < ROWS


def test_with_alpha_infinite_the_outputs_are_the_dense_ones_bit_for_bit(
    dense: dict[str, Graph], inf: Graph, step: Scene
) -> None:
    mine, theirs = step.copy().inputs, step.copy().inputs
    got, expected = lower(inf)(mine, ROWS), lower(rewritten_head(dense, 5))(theirs, ROWS)
    assert got.rows == (ROWS, ROWS)
    assert got.outputs["kept"].tolist() == list(range(ROWS))
    for name in ("token", "confidence", "margin", "entropy"):
        assert torch.equal(got.outputs[name], expected.outputs[name])
    for name, value in theirs.items():
        assert torch.equal(mine[name].nan_to_num(), value.nan_to_num()), name


def rewritten_head(dense: dict[str, Graph], chunk: int) -> Graph:
    """The dense step with logits of that many rows at a time."""
    graph = dense["step"].copy()
    (head,) = graph.find("lm_head")
    head.args = (*head.args[:6], chunk, head.args[7])
    return graph


def test_a_program_can_run_again(focus: dict[str, Graph], step: Scene) -> None:
    program = lower(focus["step"])
    first, second = (program(step.copy().inputs, ROWS).outputs for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        assert value.data_ptr() != second[name].data_ptr()
    weights = {n.meta.get("weight") for n in focus["step"].nodes if n.op == "placeholder"} - {None}
    assert sum(v is not None for v in program._template) == len(weights), "nothing of a run is kept"


# -- observation -------------------------------------------------------------------------------------------------


class Refused:
    """A runner that must not run, as one that replays a CUDA graph: it would call nothing."""

    def __init__(self, stage: LoweredStage):
        self.stage = stage

    def __call__(self, slots: Registers) -> Callable[[int], None]:
        raise AssertionError(f"stage {self.stage.name} ran by its own runner")


@pytest.mark.parametrize("chunk_rows", [None, 10])
def test_every_call_of_an_op_is_observed(focus: dict[str, Graph], step: Scene, chunk_rows: int | None) -> None:
    program = lower(focus["step"], chunk_rows=chunk_rows, runner=Refused)
    seen: list[tuple[Op, tuple[Any, ...], Any]] = []
    with program.observed(lambda *call: seen.append(call)):
        watched = program(step.copy().inputs, ROWS)
    names = [op.name for op, _, _ in seen]
    for name in ("kv_write", "paged_attention", "importance", "select_tokens", "lm_head"):
        expected = len(focus["step"].find(name))
        assert expected
        assert names.count(name) == expected, name
    for op, args, result in seen:
        if op.name == "paged_attention":  # the caches are as they were read: nothing wrote to them since
            assert torch.equal(op.overload(*args), result)
    (kept,) = [result for op, _, result in seen if op.name == "list_kept"]
    assert torch.equal(kept[0][: watched.rows[1]], watched.outputs["kept"])
    with pytest.raises(AssertionError, match="ran by its own runner"):
        program(step.copy().inputs, ROWS)


def test_observing_changes_no_result_and_ends(focus: dict[str, Graph], step: Scene) -> None:
    program = lower(focus["step"])
    plain, seen = program(step.copy().inputs, ROWS), []

    def fails(op: Op, args: tuple[Any, ...], result: Any) -> None:
        seen.append(op.name)
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"), program.observed(fails):
        program(step.copy().inputs, ROWS)
    assert len(seen) == 1
    with program.observed(lambda op, args, result: seen.append(op.name)):
        watched = program(step.copy().inputs, ROWS)
    length = len(seen)
    again = program(step.copy().inputs, ROWS)
    assert len(seen) == length > 1
    for name, value in plain.outputs.items():
        assert torch.equal(watched.outputs[name], value)
        assert torch.equal(again.outputs[name], value)


def test_a_call_does_not_go_through_the_dispatcher(focus: dict[str, Graph], step: Scene) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        lower(focus["step"])(step.copy().inputs, ROWS)
    assert not [event.key for event in profile.key_averages() if event.key.startswith("dgraph::")]


# -- padding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buckets", ["hybrid", [40], [5, 17, 33], [32, 64]])
@pytest.mark.parametrize("phase", ["step", "prefill"])
def test_padded_programs_give_the_same_tokens_and_caches(
    focus: dict[str, Graph], step: Scene, buckets: Any, phase: str
) -> None:
    exact, padded = step.copy().inputs, step.copy().inputs
    expected, got = lower(focus[phase])(exact, ROWS), lower(focus[phase], buckets)(padded, ROWS)
    rounding = Buckets.of(buckets)
    assert got.rows == expected.rows
    assert got.padded == tuple(rounding(r) for r in expected.rows)
    for name, value in exact.items():
        torch.testing.assert_close(padded[name], value, atol=1e-6, rtol=1e-5, equal_nan=True)
    if phase == "prefill":
        return
    live = expected.rows[-1]
    fillers = {"token": -1, "kept": -1, "confidence": -math.inf, "margin": -math.inf, "entropy": math.inf}
    for name in fillers:
        value = got.outputs[name]
        assert len(value) == got.padded[-1]
        torch.testing.assert_close(value[:live], expected.outputs[name], atol=1e-6, rtol=1e-5)
        assert (value[live:] == fillers[name]).all()
    assert torch.equal(got.outputs["reached"], expected.outputs["reached"])
    torch.testing.assert_close(got.outputs["score"][:ROWS], expected.outputs["score"], atol=1e-5, rtol=1e-5)


def test_inputs_are_left_unpadded(dense: dict[str, Graph], step: Scene) -> None:
    inputs = step.copy().inputs
    before = {n: (v, v.shape) for n, v in inputs.items()}
    lower(dense["step"], [64])(inputs, ROWS)
    for name, (value, shape) in before.items():
        assert inputs[name] is value
        assert value.shape == shape


def test_no_rows_at_all(dense: dict[str, Graph], focus: dict[str, Graph], step: Scene) -> None:
    """A step in which every sequence is done pads to one row, which does nothing."""
    per_row = ("input_ids", "positions", "limit", "candidate", "temperature", "seed")
    inputs = {n: v[:0] if n in per_row else v for n, v in step.copy().inputs.items()}
    inputs["cu_rows"] = torch.zeros(5, dtype=torch.int32)
    before = {n: v.clone() for n, v in inputs.items()}
    for graph in (dense["step"], focus["step"], dense["prefill"]):
        result = lower(graph)(inputs, 0)
        assert set(result.rows) == {0}
        assert set(result.padded) == {1}
        if "token" in result.outputs:
            assert result.outputs["token"].tolist() == [-1]
        for name, value in before.items():
            assert torch.equal(inputs[name].nan_to_num(), value.nan_to_num()), name


# -- inputs ------------------------------------------------------------------------------------------------------


def test_it_says_what_it_reads(dense: dict[str, Graph], focus: dict[str, Graph]) -> None:
    always = {"input_ids", "positions", "limit", "cu_rows", "page_table"}
    caches = {f"{n}_cache_{i}" for n in "kv" for i in range(4)}
    head = {"candidate", "temperature", "seed"}
    assert lower(dense["prefill"]).inputs.keys() == always | caches
    assert lower(dense["step"]).inputs.keys() == always | caches | head
    assert lower(focus["step"]).inputs.keys() == always | caches | head | {"sequence_average", "reached"}
    assert lower(dense["step"]).stage_names == ("step",)


@pytest.mark.parametrize("name", ["input_ids", "candidate", "page_table", "k_cache_2"])
def test_a_missing_input(dense: dict[str, Graph], step: Scene, name: str) -> None:
    inputs = step.copy().inputs
    del inputs[name]
    with pytest.raises(LoweringError, match=rf"input '{name}' is missing; this program reads .*cu_rows, input_ids"):
        lower(dense["step"])(inputs, ROWS)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("input_ids", Tensor.int, r"input 'input_ids' is torch\.int32, expected torch\.int64"),
        ("candidate", Tensor.float, r"input 'candidate' is torch\.float32, expected torch\.bool"),
        ("v_cache_1", Tensor.bfloat16, r"input 'v_cache_1' is torch\.bfloat16, expected torch\.float32"),
        ("positions", lambda t: t[:-1], r"input 'positions' has 31 rows, expected at least 32"),
    ],
)
def test_an_input_that_does_not_fit(
    dense: dict[str, Graph], step: Scene, name: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    inputs = step.copy().inputs
    before = inputs["k_cache_0"].clone()
    inputs[name] = change(inputs[name])
    with pytest.raises(LoweringError, match=message):
        lower(dense["step"], [40])(inputs, ROWS)
    assert torch.equal(inputs["k_cache_0"].nan_to_num(), before.nan_to_num()), "nothing has run"


def test_rows_after_the_live_ones_are_padding(dense: dict[str, Graph], step: Scene) -> None:
    expected = lower(dense["step"], [40])(step.copy().inputs, ROWS).outputs
    inputs = step.copy().inputs
    for name in ("input_ids", "positions", "limit", "candidate", "temperature", "seed"):
        inputs[name] = torch.cat([inputs[name], torch.zeros(60, dtype=inputs[name].dtype)])
    found = lower(dense["step"], [40])(inputs, ROWS).outputs
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_more_inputs_than_it_reads_are_ignored(dense: dict[str, Graph], step: Scene) -> None:
    inputs = {**step.copy().inputs, "noise": torch.zeros(3)}
    assert lower(dense["step"])(inputs, ROWS).rows == (ROWS,)


# -- slots -------------------------------------------------------------------------------------------------------


class Watch:
    """A runner that looks at the slots after every step."""

    def __init__(self) -> None:
        self.stages: list[LoweredStage] = []
        self.alive: list[set[int]] = []

    def __call__(self, stage: LoweredStage) -> Runner:
        self.stages.append(stage)

        def run(slots: Registers, rows: int) -> Living:
            cut_rows(slots, () if stage.index is None else (stage.index,), rows)
            for step in (*stage.bridge, *stage.instructions):
                assert all(slots[s] is not None for s in step.reads()), "a value was freed too early"
                step.run(slots)
                self.alive.append({i for i, v in enumerate(slots) if v is not None})
            return partial(live_rows, slots, stage)

        return lambda slots: partial(run, slots)


@pytest.mark.parametrize("recipe", ["dense", "focus"])
def test_a_slot_is_freed_after_its_last_reader(request: pytest.FixtureRequest, step: Scene, recipe: str) -> None:
    graph: Graph = request.getfixturevalue(recipe)["step"]
    watch = Watch()
    program = LoweredProgram(graph, RegionCompiler("eager"), Buckets(), runner=watch)
    program(step.copy().inputs, ROWS)
    steps = [s for stage in watch.stages for s in (*stage.bridge, *stage.instructions)]
    given = {i for i, n in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    results = set(program._outputs.values())
    cuts = {slot for cut in program._cuts if cut is not None for slot in (cut.index, cut.offsets)}
    for i, alive in enumerate(watch.alive):
        later = {slot for s in steps[i + 1 :] for slot in s.reads()}
        assert alive - given - results - cuts <= later, f"step {i} leaves values that nobody reads"
    most = max(len(alive - given) for alive in watch.alive)
    assert most < len(watch.alive), "fewer values at a time than steps"


def test_what_a_lowered_stage_reads_and_gives(focus: dict[str, Graph], step: Scene) -> None:
    watch = Watch()
    program = LoweredProgram(focus["step"], RegionCompiler("eager"), Buckets(), runner=watch)
    assert tuple(watch.stages) == program.lowered
    prefix, suffix = program.lowered
    assert (prefix.name, suffix.name) == ("prefix", "suffix")
    assert prefix.bridge == ()
    assert len(suffix.bridge) == 1, "the gather"
    (gather,) = suffix.bridge
    (cut,) = [cut for cut in program._cuts if cut is not None]
    assert prefix.instructions[-1] is cut.instruction, "rows are listed before the read"
    assert (prefix.index, suffix.index) == (None, cut.index)
    assert suffix.sources == set(gather.args[0])
    assert prefix.sources == set()
    names = {slot: name for name, (slot, _) in program._inputs.items()}
    assert {names[s] for s in prefix.ahead} == {"temperature", "seed"}
    assert suffix.ahead == ()
    assert {names[s] for s in prefix.in_place} == {f"{n}_cache_{i}" for n in "kv" for i in (0, 1)}
    assert {names[s] for s in suffix.in_place} == {f"{n}_cache_{i}" for n in "kv" for i in (1, 2, 3)}
    outputs = {slot: name for name, slot in program._outputs.items()}
    assert {outputs[s] for s in prefix.outputs if s in outputs} == {"reached", "score", "kept"}
    assert {cut.index, cut.offsets} <= set(prefix.outputs)
    assert {outputs[s] for s in suffix.outputs} == {"token", "confidence", "margin", "entropy"}
    assert (prefix.last, suffix.last) == (False, True)
    assert (prefix.live, suffix.live) == (cut.offsets, None)
    for stage in program.lowered:
        written = {s for x in (*stage.bridge, *stage.instructions) for s in x.writes()}
        read = {s for x in (*stage.bridge, *stage.instructions) for s in x.reads()}
        assert set(stage.outputs) <= written
        assert set(stage.inputs) <= read - written
        assert stage.in_place <= set(stage.inputs)
        assert stage.sources <= set(stage.inputs) - stage.in_place
        weights = {i for i, v in enumerate(program._template) if v is not None}
        assert read - written - weights == set(stage.inputs)


def test_weights_are_read_at_every_run(dense: dict[str, Graph], step: Scene) -> None:
    """Weights are arguments of the regions, not constants in them: a changed weight counts at once."""
    graph = dense["step"].copy()
    graph.tensors = {n: t.detach().clone() for n, t in graph.tensors.items()}
    program = lower(graph)
    before = program(step.copy().inputs, ROWS).outputs["confidence"]
    graph.tensors["model.norm.weight"].mul_(0.5)
    after = program(step.copy().inputs, ROWS).outputs["confidence"]
    assert not torch.equal(before, after)
    assert all(not t.requires_grad for t in program._template if t is not None)


def test_a_program_of_no_calls() -> None:
    hand = Hand()
    x = hand.input("x", "N", 4)
    program = lower(hand.returns(y=x))
    given = torch.randn(3, 4)
    assert torch.equal(program({"x": given}, 3).outputs["y"], given)
    assert run_in_order(program.lowered[0]) is not None
    assert program({"x": given}, 3).rows == (3,)

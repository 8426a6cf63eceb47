"""What a program allocates: predicted from its steps, worked out by hand, and seen by a watcher of storages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dgraph
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.engine.memory.dummy_step import DummyStep
from dgraph.engine.memory.measure import measure
from dgraph.errors import InputError
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.footprint import GROUPS, HEAD, footprint, groups_of
from dgraph.lowering.instructions import single
from dgraph.lowering.peephole import Fusion
from dgraph.lowering.schedule import Call, Region
from dgraph.ops import OPS
from dgraph.ops.lm_head.lm_head import CACHED_LOGITS
from dgraph.ops.statistics import ENTROPY, declare
from dgraph.private.torch import StorageWatch, fake_mode
from dgraph.testing.models import TinyModel, models
from dgraph.types.nodes import op_name
from tests.compiled import compiled
from tests.tiny import BLOCK

N = 256
SIZES = {"N": N, "b": 2, "P": 1, "pages": 1, "page": BLOCK}


@pytest.fixture(scope="module")
def dense(model: dgraph.Model) -> CompiledModel:
    return compiled(model, "dense", max_num_logits=32)


def test_a_watcher_counts_storages_from_their_making_to_their_end() -> None:
    given, watch = torch.ones(100, 10), StorageWatch(grain=512)
    with watch:
        first = given + 1
        view = first[3:]
        given.add_(1)
        given[2:].mul_(2)
        assert watch.live == 4096  # 4000 bytes, in units of 512
        del first
        assert watch.live == 4096
        second = view * 2
        del view
        assert (watch.live, watch.peak) == (4096, 8192)
        watch.quiet = True
        third = second + 1
        watch.quiet = False
        assert watch.live == 4096
        watch.note(third)
        watch.note(third)
        assert watch.live == 8192
        watch.rise(1000)
        assert (watch.live, watch.peak) == (8192, 9192)
    del second, third
    assert watch.live == 0


def test_a_watcher_counts_fake_tensors_as_well() -> None:
    with fake_mode() as mode:
        given = torch.empty(1000, 1000)
    watch = StorageWatch()
    with mode, watch:
        made = torch.nn.functional.linear(given, given)
        assert watch.live == 4_000_000
        del made
    assert (watch.live, watch.peak) == (0, 4_000_000)


def test_compiled_code_keeps_what_a_library_reads_and_gives(
    dense: CompiledModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = dense.programs["step"]
    monkeypatch.setattr(program, "backend", "inductor")
    found = footprint(program, SIZES)
    # When the feed-forward network multiplies: the stream before the layer, the attention and its projection, from
    # which the stream after it is computed anew, gate and up, their product, and the tables of the rotation.
    assert found.groups["feed-forward"] == found.peak == 4 * N * (64 + 64 + 64 + 2 * 128 + 128 + 2 * 16)


def test_logits_without_a_bound_are_those_of_all_rows() -> None:
    made = compiled("tiny_sdar", "dense")
    sizes = DummyStep(N, made.spec.block_length, 64, made.page_size).sizes
    vocabulary = made.spec.vocab
    for rows in (N, N // 2):  # half of them are as many as are decided together
        found = footprint(made.with_logit_rows(rows).programs["step"], sizes)
        assert found.groups[HEAD] == 4 * N * 256 + N * (8 + 3 * 4) + 4 * (rows * vocabulary + CACHED_LOGITS)


def test_groups_are_told_by_where_a_node_stands(dense: CompiledModel) -> None:
    graph = dense.graph()
    found = {name: [op_name(n.target) for n, group in groups_of(graph).items() if group == name] for name in GROUPS}
    assert found["projections"] == ["linear"] * 8  # q|k|v and o, of four layers
    assert found["feed-forward"].count("linear") == 8
    assert found["attention"].count("dgraph.paged_attention") == found["attention"].count("dgraph.kv_write") == 4
    assert set(found["norms"]) == {"dgraph.rms_norm", "add"}
    assert set(found[HEAD]) == {"dgraph.rms_norm", "dgraph.lm_head", "getitem"}
    assert "embedding" in found["other"]


def prediction(made: CompiledModel, name: str, length: int) -> tuple[int, int]:
    """Bytes as predicted and as seen, for 256 rows of a program."""
    blocks = made.spec.attention == "block_causal" and name == "step"
    step = DummyStep(N, made.spec.block_length if blocks else length, length, made.page_size)
    seen = measure(made.programs[name], step)
    assert seen is not None
    return footprint(made.programs[name], step.sizes).peak, seen.peak


@pytest.mark.parametrize("tiny", models(), ids=str)
def test_predicted_is_what_a_watcher_sees_on_every_family(tiny: TinyModel) -> None:
    made = tiny.optimized("dense")
    for name in made.programs:
        predicted, seen = prediction(made, name, 64)
        assert predicted == pytest.approx(seen, rel=0.1), name  # the vocabulary is as small as what is left out


# A step of tiny_llada keeps its tables of the rotation, 64 KiB of 4.5 MB, for longer than is predicted.
@pytest.mark.parametrize(("name", "recipe", "within"), [("tiny_sdar", "focus", 0.01), ("tiny_llada", "dyllm", 0.02)])
def test_predicted_is_what_a_watcher_sees(name: str, recipe: str, within: float) -> None:
    made = compiled(name, recipe)
    for program in made.programs:
        predicted, seen = prediction(made, program, 128)
        assert predicted == pytest.approx(seen, rel=within), program


@pytest.mark.release
def test_predicted_is_what_compiled_code_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code for a CPU allocates past the dispatcher; here it is made to go through it."""
    from torch._inductor.codecache import PyCodeCache

    made = dgraph.optimize("tiny_sdar", "dense", max_num_logits=16)
    program, step = made.programs["step"], DummyStep(N, made.spec.block_length, 64, made.page_size)
    inputs = step.inputs(program.inputs.values(), torch.device("cpu"))
    program(inputs, step.rows)
    for module in PyCodeCache.modules:
        if hasattr(module, "empty_strided_cpu"):
            allocate = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)  # noqa: E731
            monkeypatch.setattr(module, "empty_strided_cpu", allocate)
    with StorageWatch() as watch:
        program(inputs, step.rows)
    # What a step keeps of its sequences while it runs, for its references, is not predicted: rows, flags, pages, masks.
    assert watch.peak - footprint(program, step.sizes).peak == 992 * step.sequences
    assert measure(program, step) is None


def test_chunks_of_rows_are_followed(dense: CompiledModel) -> None:
    graph = dense.graph("prefill")
    peaks = [
        footprint(LoweredProgram(graph, dense.compiler, Buckets(), chunk_rows=rows), SIZES).peak for rows in (None, 32)
    ]
    step = DummyStep(N, 64, 64, dense.page_size)
    seen = measure(LoweredProgram(graph, dense.compiler, Buckets(), chunk_rows=32), step)
    assert seen is not None
    assert peaks[1] < 0.8 * peaks[0]
    assert peaks[1] == pytest.approx(seen.peak, rel=0.05)


def test_what_calls_take_along_takes_no_memory(dense: CompiledModel) -> None:
    """Sums of the stream are added up in its own buffer, and queries are rotated where they are read."""
    graph = dense.graph("step")
    made = LoweredProgram(graph, dense.compiler, Buckets(), fused=True)
    assert {type(step.origin) for step in single(made.lowered[0].instructions)} == {Fusion, Call, Region}
    step = DummyStep(N, BLOCK, 64, dense.page_size)
    fused, apart = (footprint(program, step.sizes) for program in (made, dense.programs["step"]))
    assert fused.groups["feed-forward"] == apart.groups["feed-forward"] - 4 * N * 64
    assert fused.groups["norms"] < apart.groups["norms"]
    seen = measure(made, step)
    assert seen is not None
    assert fused.peak == pytest.approx(seen.peak, rel=0.05)


def test_a_size_that_is_not_given_is_named(dense: CompiledModel) -> None:
    with pytest.raises(InputError, match="size 'P' of an input is not given; sizes has N, b"):
        footprint(dense.programs["step"], {"N": 8, "b": 1, "pages": 1, "page": 8})


@pytest.mark.parametrize(
    "name",
    [
        *("lm_head", "lm_head_adjusted", "lm_head_measured", "lm_head_part", "experts", "rows_glu", "rows_linear"),
        *("vocabulary_attention", "vocabulary_part"),
    ],
)
def test_a_declared_workspace_is_what_the_reference_takes(name: str) -> None:
    op, generator = OPS[name], torch.Generator().manual_seed(0)
    workspace, draw = op.workspace, lambda *shape: torch.randn(shape, generator=generator)
    assert workspace is not None
    rows, width, out = 96, 32, 512
    live = torch.tensor([0, rows])
    head = (
        draw(rows, width),
        draw(out, width),
        None,
        torch.ones(rows).bool(),
        torch.zeros(rows),
        torch.zeros(rows).long(),
    )
    measured = torch.arange(rows), torch.arange(rows), torch.zeros(rows, 1, 2)
    adjusting = torch.zeros(rows).long(), torch.ones(2, out), torch.zeros(2, out), torch.zeros(2)
    args: dict[str, tuple[Any, ...]] = {
        "lm_head": (*head, 40, 3),
        "lm_head_part": (*head, 40, 3, False, torch.tensor([out]), 2 * out),
        "lm_head_adjusted": (*head, 40, 3, False, *adjusting),
        "lm_head_measured": (*head, 40, 3, False, *measured, declare((ENTROPY,))),
        "experts": (
            draw(rows, width),
            torch.arange(rows * 2).remainder(4).reshape(rows, 2),
            draw(rows, 2),
            draw(4, 2 * out, width),
            draw(4, width, out),
        ),
        "rows_glu": (draw(rows, width), draw(2 * out, width), None, live),
        "rows_linear": (draw(rows, width), draw(out, width), None, live),
        "vocabulary_attention": (*head[:2], *head[4:], live, 30.0, 3),
        "vocabulary_part": (*head[:2], *head[4:], live, None, 3, torch.tensor([out]), 2 * out),
    }
    with torch.no_grad(), StorageWatch() as watch:
        result = op.reference(*args[name])
    assert watch.peak - watch.live == pytest.approx(workspace(torch.device("cpu"), *args[name]), rel=0.1)
    del result

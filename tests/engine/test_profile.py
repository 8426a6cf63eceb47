"""The profiler: bytes worked out by hand, what follows from them, what is kept, and what is refused."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dgraph
from dgraph.cache.key import Key, differences
from dgraph.cache.store import Store
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.engine.memory import peaks
from dgraph.engine.memory.dummy_step import _VALUES, DummyStep
from dgraph.engine.memory.kv_cost import KVCost
from dgraph.engine.memory.profile import CPU_MEMORY, ROWS, Profile, profile, weight_bytes
from dgraph.engine.scheduling.cost_model import CostModel
from dgraph.errors import InputError
from dgraph.lowering.footprint import HEAD, footprint
from dgraph.lowering.tuning import Tuning
from dgraph.plans.kv import KVPlan
from dgraph.runtime.graphs.pool import GraphPool
from dgraph.runtime.loop.step_inputs import STEP_INPUTS
from dgraph.testing.models import models
from dgraph.testing.ranks import ranks
from tests.amounts import first_cases
from tests.compiled import compiled

ROW = 64  # values of a row of the stream, and 4 bytes each
POSITION = 4 * 2 * 2 * 16 * 4  # layers, keys and values, KV heads, their width, bytes


@pytest.fixture(scope="module")
def dense(model: dgraph.Model) -> CompiledModel:
    return compiled(model, "dense", max_num_logits=32)


@pytest.fixture(scope="module")
def found(dense: CompiledModel) -> Profile:
    return profile(dense, rows=256, memory=1 << 24)


def test_weights_count_once_however_they_are_stacked(dense: CompiledModel, found: Profile) -> None:
    inside = 4 * 64 * (64 + 32 + 32) + 4 * 64 * 64 + 4 * 3 * 64 * 128  # q|k|v, o, gate, up and down of four layers
    norms = 4 * (64 + 64 + 16 + 16) + 64
    assert found.weights == weight_bytes(dense) == 4 * (2 * 97 * 64 + inside + norms + 8 + 8)  # two tables of 8 angles


def test_keys_and_values_of_a_position(found: Profile) -> None:
    assert found.kv_cost == KVCost(POSITION, 8, None, (), True, 8, 0)
    assert found.kv_cost.sequence(20, 4) == 24 * POSITION
    assert found.pages(8) == found.kv // (8 * POSITION)
    assert found.fits(20) == found.kv // (24 * POSITION)


def test_logits_with_and_without_a_bound(found: Profile) -> None:
    per_row = 4 * ROW + 8 + 3 * 4  # the stream, a token, and three numbers
    assert (found.rows, found.logit_rows) == (256, 32)
    # The last norm op by op takes more than logits of all rows, and their softmax.
    assert found.unbounded == found.groups[HEAD] == 256 * 5 * 4 * ROW
    assert found.groups[HEAD] > 256 * (per_row + 2 * 97 * 4)


def test_what_is_left_is_for_keys_and_values(found: Profile) -> None:
    inputs = 256 * (8 + 8 + 4 + 1 + 4 + 8) + 4 * 33 + 4 * 32 * 512  # per row, offsets, and a table of 512 pages each
    assert found.state == inputs + 8 * 32 * 4096
    assert found.measured is not None
    assert found.predicted == pytest.approx(found.measured, rel=0.02)
    assert found.activations == max(found.measured, found.predicted)
    assert found.kv == found.left == (1 << 24) - found.weights - found.activations - found.state
    assert found.guard == found.libraries == found.graphs == 0
    assert found.lengths == (512, 1024, 2048, 4096)
    assert replace(found, positions=3000).lengths == (512, 1024, 2048, 3000)
    assert replace(found, positions=64).lengths == (64,)


def test_a_bound_frees_memory_for_sequences(dense: CompiledModel) -> None:
    wide = profile(dense, rows=4096, memory=1 << 25)
    assert wide.without_bound == max(wide.activations, wide.unbounded)
    other = replace(wide, memory=1 << 30, unbounded=wide.activations + (10 << 20))
    assert other.fits(512) - other.fits(512, bounded=False) == pytest.approx((10 << 20) / (512 * POSITION), abs=1)


def test_graphs_take_what_they_hold_or_will(model: dgraph.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiled(model, "dense")
    made.graph_pool = GraphPool()  # as on a GPU, before anything is recorded
    first = profile(made, rows=256)
    budget = peaks.Budget.of(made, 256, None)
    inputs = 256 * (8 + 8 + 4 + 1 + 4 + 8) + 4 * 33 + 4 * 32 * 512  # of a step, and of the prompt of one sequence:
    inputs += 256 * (8 + 8 + 4) + 4 * 2 + 4 * 512
    shared = max(footprint(program, budget.step(made, n).sizes).peak for n, program in made.programs.items())
    assert first.graphs == shared + inputs
    made.graph_pool.bytes = first.graphs + 1000
    assert profile(made, rows=256).left == first.left - 1000
    made.graph_pool.bytes = 0
    monkeypatch.setattr(made.programs["prefill"], "graph_rows", 64)  # more rows run without a graph
    smaller = profile(made, rows=256).graphs
    assert smaller < first.graphs
    monkeypatch.setattr(made.programs["step"], "graph_rows", 64)
    assert profile(made, rows=256).graphs < smaller


def test_graphs_of_dummy_steps_are_gone_after_they_were_timed(
    model: dgraph.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, timed = compiled(model, "dense"), []

    def seconds(program: Any, step: DummyStep) -> float:
        program.itself = program  # as a recorded graph refers to its program and back
        timed.append(weakref.ref(program))
        return 1.0

    monkeypatch.setattr(peaks, "seconds", seconds)
    made.graph_pool = GraphPool()
    assert profile(made, rows=8, steps=True, measured=False).steps
    assert [one() for one in timed] == [None, None]


def test_too_little_memory_leaves_nothing(dense: CompiledModel) -> None:
    small = profile(dense, rows=256, memory=1 << 20)
    assert (small.kv, small.pages(8), small.fits(8)) == (0, 0, 0)
    assert small.left < 0


def test_defaults_and_another_bound(dense: CompiledModel) -> None:
    given = profile(dense)
    assert (given.rows, given.memory) == (ROWS["cpu"], CPU_MEMORY)
    assert (given.sequences, given.logit_rows) == (given.rows // 8, 32)
    assert profile(dense, rows=64, logit_rows=16).logit_rows == 16
    assert profile(dense, rows=64, logit_rows=640, sequences=3).logit_rows == 64


def test_as_json_and_back(found: Profile) -> None:
    timed = replace(found, steps=((8, 64, 0.5), (16, 128, 0.75)))
    assert Profile.from_json(json.loads(json.dumps(timed.to_json()))) == timed
    with pytest.raises(InputError, match="has no entry 'weights'"):
        Profile.from_json({k: v for k, v in timed.to_json().items() if k != "weights"})


@pytest.mark.parametrize(("family", "recipe"), [("sdar", "dense"), ("llada", "dyllm"), ("sdar", "dllm_serve")])
def test_keys_and_values_in_float8_count_as_they_are_stored(family: str, recipe: str) -> None:
    """A byte each, and four bytes of a scale for those of a KV head; other caches stay as they are."""
    (tiny,) = models(None, family)
    spec = tiny.model.spec
    plain, rounded = (profile(tiny.optimized(recipe, kv_dtype=dtype), rows=64) for dtype in (None, "fp8"))
    vectors, less = 2 * spec.layers * spec.kv_heads, spec.dtype.itemsize * spec.head_dim - spec.head_dim - 4
    assert plain.kv_cost.position - rounded.kv_cost.position == vectors * less
    assert rounded.kv_cost.page_bytes < plain.kv_cost.page_bytes
    for one, other in zip(plain.kv_cost.packed, rounded.kv_cost.packed, strict=True):
        assert (one[1], other[1]) == (4, 4), "positions"
    session = tiny.optimized(recipe, kv_dtype="fp8")._session
    assert session.kv.position_bytes == rounded.kv_cost.position


@pytest.mark.parametrize("options", [{}, {"update": False}, {"partial": False}], ids=str)
def test_contexts_and_features_of_a_block_causal_model_have_places_for_two_blocks(options: dict[str, Any]) -> None:
    (tiny,) = models(None, "sdar")
    spec = tiny.model.spec
    dense, gated = (
        profile(tiny.optimized(name, **more), rows=64).kv_cost for name, more in (("dense", {}), ("dyllm", options))
    )
    own = spec.layers * (spec.heads * spec.head_dim + spec.hidden) * 4
    assert (gated.position, gated.rings) == (dense.position, ((1, own, 2),))
    assert gated.sequence(728, 128) == dense.sequence(728, 128) + 2 * spec.block_length * own == 389_120
    assert gated.sequence(728, 128) < 1.05 * dense.sequence(728, 128)
    assert gated.sequence(128, 64) <= 1.3 * dense.sequence(128, 64)


def test_contexts_and_features_of_other_models() -> None:
    """Of two modes a step forwards one block; a bidirectional model may come back to any position."""
    for family, rings, positions in (("nemotron", 1, 0), ("llada", 0, 1)):
        (tiny,) = models(None, family)
        spec = tiny.model.spec
        cost = profile(tiny.optimized("dyllm"), rows=64).kv_cost
        own = spec.layers * (spec.heads * spec.head_dim + spec.hidden) * 4
        assert cost.rings == ((1, own, 1),) * rings
        assert cost.position == spec.layers * 2 * spec.kv_heads * spec.head_dim * 4 + positions * own


@pytest.mark.parametrize("family", ["llada", "sdar"])
def test_packed_keys_have_no_pages_where_they_were(family: str) -> None:
    (tiny,) = models(None, family)
    made = tiny.optimized("dllm_serve", ratio=0.5)
    cost = profile(made, rows=64).kv_cost
    spec = made.spec
    layers, head = spec.layers, spec.head_dim * 4
    assert cost.position == layers * 2 * spec.kv_heads * head
    entry = 4 if spec.attention == "block_causal" else 2 * head + 4
    assert {layer[1:3] for layer in cost.packed} == {(entry, spec.kv_heads)}
    assert len(cost.packed) == layers
    block = spec.block_length
    length, response = 10 * block, 2 * block
    pages = length if spec.attention == "block_causal" else response + (spec.logit_shift > 0)
    entries = spec.kv_heads * (length // 2) * cost.packed[0][1] + 4 * spec.kv_heads
    assert cost.sequence(length, response) == -(-pages // block) * block * cost.position + layers * entries


def test_keys_that_later_blocks_choose_from_take_no_more_than_their_positions() -> None:
    """Of 1,024 tokens with a response of 128, half of which a head keeps; focus drops rows, and no keys."""

    def bytes_of(name: str, recipe: str, **options: Any) -> tuple[int, dgraph.ModelSpec]:
        made = compiled(name, recipe, **options)
        return profile(made, rows=64, measured=False).kv_cost.sequence(1024, 128), made.spec

    for dtype, most in ((None, 1.008), ("fp8", 1.028)):
        dense, spec = bytes_of("tiny_sdar", "dense", kv_dtype=dtype)
        assert dense == 1024 * spec.layers * spec.kv_heads * 2 * (spec.head_dim + 4 if dtype else spec.head_dim * 4)
        positions = spec.layers * spec.kv_heads * 4 * (512 + 1)  # and a count of each head
        for recipe in ("dllm_serve", "sparse_dllm", "dllm_serve+focus"):
            assert bytes_of("tiny_sdar", recipe, kv_dtype=dtype)[0] == dense + positions
        assert dense + positions < most * dense


def test_a_window_of_the_response_leaves_its_prompt_out() -> None:
    plan = KVPlan(window="response", pairs=(4,))
    cost = KVCost(position=100, page=8, plan=plan, packed=((0, 10, 2, 8), (1, 10, 2, 8)), causal=True, block=4, shift=0)
    assert cost.sequence(32, 10) == 2 * 8 * 100 + 2 * (10 * 4 * 2 + 8)  # from position 16 on
    assert replace(cost, causal=False, shift=1).sequence(32, 10) == 2 * 8 * 100 + 2 * (10 * 4 * 2 + 8)
    for causal in (False, True):
        paged = replace(cost, causal=causal, plan=replace(plan, kept="pages"))
        assert paged.sequence(32, 10) == 4 * 8 * 100 + 2 * (10 * 4 * 2 + 8), "every position has a place in the pages"
    anywhere = replace(cost, page=1, after=4)  # blocks begin anywhere, and the window where the prompt ends
    assert anywhere.sequence(33, 10) == (10 + 4) * 100 + 2 * (10 * 4 * 2 + 8)
    assert KVCost.from_json(json.loads(json.dumps(cost.to_json()))) == cost
    shared = replace(cost, packed=((0, 10, 2, 8, 4), (1, 10, 2, 8, 4)))  # budgets of four heads, two on other ranks
    assert shared.sequence(32, 10) == 2 * 8 * 100 + 2 * (10 * 4 * 4 + 8)
    assert KVCost.from_json(json.loads(json.dumps(shared.to_json()))) == shared
    assert replace(cost, plan=None, after=4).sequence(32, 10) == 5 * 8 * 100  # its last block may end after it
    with pytest.raises(InputError, match="1 to 32, got 33"):
        cost.sequence(32, 33)


def test_what_was_measured_is_kept(model: dgraph.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiled(model, "dense")
    made.compiler.store = Store(tmp_path)
    monkeypatch.setattr(peaks, "seconds", lambda program, step: 1e-3 * step.rows)
    calls: list[str] = []
    guess = profile(made, rows=64, measured=False, progress=calls.append)
    assert (guess.measured, calls) == (None, ["predicting prefill", "predicting step"])
    first = profile(made, rows=64)
    assert first.measured is not None
    assert guess == replace(first, measured=None)
    calls.clear()
    assert profile(made, rows=64, measured=False) == first
    assert profile(made, rows=64, memory=1 << 30, progress=calls.append) == replace(first, memory=1 << 30)
    assert calls == []
    timed = profile(made, rows=64, steps=True, progress=calls.append)
    assert replace(timed, steps=()) == first
    assert calls[:1] == ["timing 8 rows over 1024 keys"]
    assert [step[0] for step in timed.steps] == [8, 8, 16, 16, 32, 32, 64, 64]
    assert CostModel.fit(timed.steps).step(32, 0) == pytest.approx(0.032)
    assert profile(made, rows=64, steps=True, progress=lambda what: pytest.fail(what)) == timed
    assert profile(made, rows=128, progress=calls.append).rows == 128
    assert "measuring step" in calls


def test_a_damaged_entry_is_measured_anew(model: dgraph.Model, tmp_path: Path) -> None:
    made = compiled(model, "dense")
    made.compiler.store = store = Store(tmp_path)
    first = profile(made, rows=64)
    (entry,) = store.entries.iterdir()
    key = peaks._key(made, peaks.Budget.of(made, 64, None))
    store.put(key, {peaks.FILE: b'{"predicted": 1}'}, replace=True)
    with pytest.warns(dgraph.DgraphWarning, match=f"{entry.name[:12]}.*set aside and rebuilt"):
        assert profile(made, rows=64) == first


def key_of(made: CompiledModel, rows: int = 64) -> Key:
    return peaks._key(made, peaks.Budget.of(made, rows, None))


def names_that_differ(first: CompiledModel, second: CompiledModel) -> list[str]:
    return [found.name for found in differences(key_of(first), key_of(second))]


@first_cases(1, "recipe", ["dllm_serve", "focus", "dense"])
def test_programs_that_are_made_alike_have_one_key(recipe: str) -> None:
    first, second = (dgraph.optimize("tiny_llada", recipe, backend="eager", weights="int8") for _ in range(2))
    assert first.model is not second.model
    assert names_that_differ(first, second) == []
    assert names_that_differ(first, first.with_logit_rows(first.recipe.logit_rows or 1)) == []


def test_how_weights_are_stored_is_in_the_key(model: dgraph.Model) -> None:
    stored = (None, "int8", "fp8", "int4", "int4:block=1x32", "int4:zeros=true", "int8:lm_head=true", "w8a8-int8")
    made = [dgraph.optimize(model, "dense", backend="eager", weights=weights) for weights in stored]
    assert len({key_of(one).digest for one in made}) == len(stored)
    assert names_that_differ(made[0], made[1]) == ["program prefill", "program step"]


def test_buckets_pages_and_tilings_are_in_the_key(model: dgraph.Model) -> None:
    def made(buckets: Any) -> CompiledModel:
        return dgraph.optimize(model, "dense", backend="eager", buckets=buckets)

    given, plain, changed = made([32, 64]), made("exact"), made("exact")
    assert names_that_differ(given, made([64, 32])) == []
    assert names_that_differ(given, made([16, 64])) == ["buckets"]
    assert names_that_differ(plain, made("hybrid")) == ["buckets"]
    changed.page_size *= 2
    assert names_that_differ(plain, changed) == ["page"]
    changed.page_size //= 2
    changed.programs["step"].tuning = Tuning(torch.device("cpu"), None)
    assert names_that_differ(plain, changed) == ["tuned"]


def test_ranks_are_in_the_key() -> None:
    (tiny,) = models(None, "sdar")

    def part(world: int) -> tuple[Key, ...]:
        return tuple(ranks(world, lambda rank: key_of(tiny.on_rank(rank, world, "dense"))))

    (whole, alone), (first, second) = (key_of(tiny.optimized("dense")), *part(1)), part(2)
    assert first == second, "of all ranks"
    assert [found.name for found in differences(whole, first)] == ["ranks", "program prefill", "program step"]
    assert first.inputs["ranks"] == "over 2 ranks (tp)"
    assert len({key.digest for key in (whole, alone, first)}) == 3


def test_the_sources_of_products_on_a_cpu_are_in_the_key(dense: CompiledModel) -> None:
    names = ("product.py", "product.cpp", "product_numbers.cpp")
    assert {f"source dgraph/ops/products/cpp/{name}" for name in names} <= key_of(dense).inputs.keys()


def test_a_step_is_timed_as_it_runs(dense: CompiledModel) -> None:
    timed = profile(dense, rows=16, steps=True).steps
    assert [step[:2] for step in timed] == [(8, 1024), (8, 4096), (16, 2048), (16, 8192)]
    assert all(0 < step[2] < 10 for step in timed)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rows": 0}, "rows must be a number of at least 1, or None, got 0"),
        ({"rows": 7}, "rows=7: a step has room for a block of 8 rows at least"),
        ({"logit_rows": -1}, "logit_rows must be a number of at least 1, or None, got -1"),
        ({"memory": 1.5}, "memory must be a number of at least 1, or None, got 1.5"),
        ({"sequences": True}, "sequences must be a number of at least 1, or None, got True"),
    ],
)
def test_bad_budgets_are_refused(dense: CompiledModel, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        profile(dense, **settings)


def test_rows_of_a_measured_step_hold_all_ids_in_turn(dense: CompiledModel) -> None:
    step = peaks.Budget.of(dense, 64, None).step(dense, "step")
    inputs = step.inputs(dense.programs["step"].inputs.values(), torch.device("cpu"))
    assert inputs["input_ids"].tolist() == [i % dense.spec.vocab for i in range(step.rows)]


@pytest.mark.parametrize("ask", [lambda p: p.pages(0), lambda p: p.fits(0), lambda p: p.fits(8, 0)])
def test_bad_questions_are_refused(found: Profile, ask: Callable[[Profile], int]) -> None:
    with pytest.raises(InputError, match=r"at least 1|1 to"):
        ask(found)


def test_a_recipe_that_keeps_all_logits_has_no_bound(dense: CompiledModel) -> None:
    recipe = dense.recipe.keeping_logits()
    assert recipe.logit_rows is None
    assert dense.recipe.with_logit_rows(5).logit_rows == 5
    made = CompiledModel(dense.model, dense.captured, recipe, dense.compiler, dense.programs["step"].buckets)
    with pytest.raises(InputError, match=r"recipe 'dense' has no bound on rows of logits; add the pass ChunkLMHead"):
        made.with_logit_rows(5)


def test_a_dummy_step_gives_what_the_decode_loop_offers() -> None:
    assert _VALUES.keys() <= STEP_INPUTS.keys()
    step = DummyStep(rows=10, width=4, length=12, page=8)
    assert (step.sequences, step.keys, step.pages) == (3, 36, 2)
    values = {name: value(step) for name, value in _VALUES.items()}
    assert values["positions"].tolist() == [8, 9, 10, 11, 8, 9, 10, 11, 8, 9]
    assert values["cu_rows"].tolist() == [0, 4, 8, 10]
    assert _VALUES["input_ids"](replace(step, vocab=4)).tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert values["page_table"].tolist() == [[0, 1]] * 3
    assert values["average"].isinf().all()
    assert torch.equal(replace(step, keeps=False)._input(_spec("average", "b"), {}), torch.ones(3))
    with pytest.raises(InputError, match="1 to 12 rows per sequence; got 10 rows, 8 positions per page and 13 rows"):
        DummyStep(rows=10, width=13, length=12, page=8)


def _spec(name: str, *shape: str) -> Any:
    from dgraph.types.shapes import InputSpec

    return InputSpec(name, torch.float32, shape)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["fast_dllm", "focus"])
def test_predicted_is_measured_on_a_gpu(recipe: str) -> None:
    """Two layers of LLaDA-8B at 16,384 rows; more of them need more weights and caches, and the same activations."""
    from dgraph.models.shapes import random_model

    shape = random_model("llada-8b", "cuda", num_hidden_layers=2)
    made = dgraph.optimize(shape, recipe, artifacts=False)
    for bound in (None, 16384):
        seen = profile(made, rows=16384, logit_rows=bound)
        assert seen.measured is not None
        assert seen.predicted == pytest.approx(seen.measured, rel=0.03), bound

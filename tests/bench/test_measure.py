"""Arms under one script: equal commits in every step, kept rows as scripted, floors that follow the rows."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from dgraph.api import CompiledModel, optimize
from dgraph.bench import products
from dgraph.bench.arms import Arm, ablation, without
from dgraph.bench.floor import Device, Product, Reading, StepCount, Work, floor_of, work_of
from dgraph.bench.load import Load, endless, prompts_of
from dgraph.bench.measure import Bench, Counter
from dgraph.bench.products import Mixture, Shape
from dgraph.bench.report import stages_table
from dgraph.bench.traces import kept_rows, synthesise
from dgraph.compiler import base_graph as captured
from dgraph.compiler.phases import HOPPER, lowering_passes, rewrite
from dgraph.families import Model
from dgraph.families import load as load_model
from dgraph.ops.registry import Op
from dgraph.ops.statistics import KL
from dgraph.passes import (
    CountRows,
    EvictTokens,
    FuseGLU,
    FuseProjections,
    GateFFN,
    MeasureRows,
    PartialAttention,
    QuantizeWeights,
)
from dgraph.passes.base import Pass
from dgraph.recipes import RECIPES, Ablation, Recipe, build
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.policies import Renoise
from dgraph.testing import models
from tests.cli.folders import write_checkpoint
from tests.passes.sparse_step import family_of
from tests.recipes.bidirectional import prompts_for, setup_of
from tests.tiny import rewritten

BLOCK, TOKENS = 8, 40
TRACE = synthesise(BLOCK, 5.0, 3.0, histories=7)


@pytest.fixture(scope="module", autouse=True)
def arms_share_a_capture() -> Iterator[None]:
    """It is most of their time here, and passes leave it as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured, "capture_or_load", functools.cache(captured.capture_or_load))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return endless(load_model(write_checkpoint(tmp_path_factory.mktemp("bench") / "small")))


def recipe(model: Model, name: str, **options: object) -> Recipe:
    return build(RECIPES, name, model.spec, options)


@pytest.fixture(scope="module")
def scripted(model: Model) -> CompiledModel:
    return optimize(model, "focus", backend="eager", ablation=Ablation(select="scripted"))


@pytest.fixture(scope="module")
def bench(model: Model) -> Bench:
    load = Load(prompts_of(model, [16, 3, 13, 8]), Decoding(max_new_tokens=TOKENS, policy=TRACE.script()), TRACE)
    return Bench(model, load, Device(torch.device("cpu"), samples=2), backend="eager", repeat=1)


def test_arms_under_a_script_commit_the_same_in_every_step(model: Model, bench: Bench) -> None:
    arms = [
        Arm("dense", recipe(model, "dense")),
        Arm("focus", recipe(model, "focus", ablation=Ablation(select="scripted"))),
    ]
    dense, focus = (bench(arm) for arm in arms)
    assert dense.committed == focus.committed
    assert dense.steps == focus.steps == len(dense.committed)
    assert focus.stats.rows_per_token < dense.stats.rows_per_token
    assert min(focus.floor.total, dense.floor.total) > 0
    for measured in (dense, focus):
        assert sum(c.rows[-1] for c in measured.counts) == measured.stats.kept_rows
        assert measured.ratio == measured.step / measured.floor.total > 0
        assert measured.median > 0
        assert measured.memory.other is None
        positions = sum(-(-(len(p) + TOKENS) // BLOCK) * BLOCK for p in bench.load.prompts)
        assert measured.memory.kv == 2 * 2 * 2 * 16 * 4 * positions, "in whole pages"
        assert all(c.head <= c.rows[-1] for c in measured.counts)


@pytest.mark.parametrize("recommit", [False, True])
def test_the_rows_are_those_of_the_trace(model: Model, recommit: bool) -> None:
    """Whole blocks of one prompt, from the trace's first history on."""
    program = optimize(model, "focus", backend="eager", ablation=Ablation(select="scripted"), recommit=recommit)
    counter = Counter(evicts=True)
    blocks = len(TRACE.histories)
    prompt = [[3] * (BLOCK * blocks)]  # its decoded blocks have the numbers blocks, blocks + 1, ...
    stats = program.generate(
        input_ids=prompt, max_new_tokens=BLOCK * blocks, policy=TRACE.script(), observer=counter
    ).stats
    counts = [kept_rows(h, BLOCK) for h in TRACE.histories]
    commits = [BLOCK if recommit else late for _, late in counts][:-1]  # nobody reads the last block's
    assert stats.rows["suffix"] == sum(after for after, _ in counts) + sum(commits)
    assert counter.committed == [len(s.committed) for h in TRACE.histories for s in h]
    assert [c.head for c in counter.counts] == [len(s.kept or ()) for h in TRACE.histories for s in h]


def test_the_importance_is_computed_all_the_same(scripted: CompiledModel) -> None:
    graph = scripted.graph("step")
    assert len(graph.find("importance")) == 2
    assert graph.inputs["script"].shape == ("N",)
    (select,) = graph.find("select_tokens")
    assert select.args[-2] == 1.0


def test_floors_are_positive_and_grow_with_the_rows(scripted: CompiledModel) -> None:
    work, device = work_of(scripted.graph("step")), Device(torch.device("cpu"), samples=3)
    assert [sum(shapes.values()) for shapes in work.products] == [5, 3]  # layer 0 and q|k|v of layer 1 on all rows
    assert [sum(reads.values()) for reads in work.attentions] == [1, 1]
    assert work.head == (97, 64)
    floors = [floor_of(work, [StepCount((n, n // 2), ({0: n}, {0: n}), n // 2)], device) for n in (64, 2048)]
    assert 0 < floors[0].total < floors[1].total
    assert 0 < (floors[0].attention or 0) < (floors[1].attention or 0)
    assert floor_of(work, [], device).total == 0.0


def test_a_last_layer_on_masked_rows_counts_as_those() -> None:
    setup = setup_of("llada")
    program = setup.optimized("dense", 16)
    work = work_of(program.graph("step"))
    # Fused projections: four products a layer, but in the last one keys and values on all rows, four on masked ones.
    assert [sum(shapes.values()) for shapes in work.products] == [2 * 4 + 1, 4]
    rounded, spec = work_of(setup.optimized("dense", 16, kv_dtype="fp8").graph("step")), setup.model.spec
    queries = 2 * spec.heads * spec.head_dim * 4
    read = Reading(2 * spec.kv_heads * spec.head_dim * 4, queries, 0)
    assert (work.masked, work.attentions, work.listed) == (True, ({read: 2}, {read: 1}), {})
    (read_rounded,) = rounded.attentions[0]
    assert read_rounded.key_bytes == 2 * spec.kv_heads * (spec.head_dim + 4), "a byte each, and a scale"
    measured = work_of(rewritten(program.graph("step"), MeasureRows((KL(),))))
    assert (measured.head, measured.masked) == (work.head, True), "a head that also measures rows is one"
    counter = Counter.of(program, work)
    stats = program.generate(input_ids=prompts_for(16), max_new_tokens=32, steps=4, observer=counter).stats
    assert [c.rows[0] for c in counter.counts] == stats.step_rows
    assert all(c.rows[1] == c.head < c.rows[0] for c in counter.counts)
    assert all(0 < c.keys[1][0] <= c.keys[0][0] for c in counter.counts)
    gated = work_of(setup.optimized("dyllm", 16, update=False).graph("step"))
    assert len(gated.products) == 2
    assert sum(gated.listed.values()) > 0
    assert gated.products[1] == work.products[1], "the last layer is not gated"


@pytest.mark.parametrize("family", ["llada", "llada2"])
def test_layers_on_salient_rows_count_as_one_row(family: str) -> None:
    """Of both ways in which a projection may take a part of a weight, too."""
    cached = family_of(family).cached
    plain, gated = (work_of(rewritten(cached, *passes)) for passes in ((), (GateFFN(), PartialAttention())))
    assert not plain.listed
    (all_rows,) = plain.products
    (known,) = gated.products
    assert gated.listed
    assert sum(gated.listed.values()) + sum(known.values()) >= sum(all_rows.values())
    device = Device(torch.device("cpu"), samples=2)
    count = StepCount((512,), ({0: 0},), 0)
    assert floor_of(gated, [count], device).linear < floor_of(plain, [count], device).linear


def test_experts_count_as_their_products() -> None:
    """On all rows where all are routed, and as one row where only salient rows are."""
    cached = family_of("llada2").cached
    work = work_of(cached)
    mixture = Mixture(experts=16, chosen=3, hidden=64, inner=24)
    assert [{s: n for s, n in shapes.items() if isinstance(s, Mixture)} for shapes in work.products] == [{mixture: 2}]
    partial, gated = (work_of(rewritten(cached, step)) for step in (PartialAttention(), GateFFN()))
    assert [partial.products[0][mixture], gated.listed[Product(mixture)]] == [2, 2]
    assert Product(mixture) not in partial.listed
    assert mixture not in gated.products[0]

    device = Device(torch.device("cpu"), samples=2)
    count = [StepCount((64,), ({0: 64},), 0)]
    device._times[mixture, work.dtype] = {1: 1.0, 64: 3.0}
    without = replace(work, multiplied=({p: n for p, n in work.multiplied[0].items() if p.shape != mixture},))
    found, less = floor_of(work, count, device), floor_of(without, count, device)
    assert (found.experts, less.experts) == (6.0, 0.0)
    assert found.total == pytest.approx(less.total + 6.0)
    assert found.to_json()["experts"] == 6000.0
    assert "experts" not in less.to_json()
    assert floor_of(gated, count, device).experts == 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_experts_are_timed_on_rows_at_random(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows take longer; calls read several routings, and sets of weights only where one fits into the cache."""
    mixture, seen = Mixture(6, 2, 64, 32), []
    device = Device(torch.device("cpu"), samples=2)
    device.measure(mixture, dtype, [1, 4000])
    assert 0 < device.product(mixture, dtype, 1) < device.product(mixture, dtype, 4000)
    for name in ("_grouped", "_one_by_one"):
        monkeypatch.setattr(products, name, lambda *args: seen.append(args))
    size = 3 * 64 * 32 * dtype.itemsize
    for rows, cold, sets, count in ((9, 1.0, 1, 2), (1, 5 * size, 1, 3), (9, 13 * size, 3, 3), (9, 1e12, 64, 64)):
        seen.clear()
        products.calls_of(mixture, dtype, torch.device("cpu"), cold)(rows)
        assert (len({id(args[3]) for args in seen}), len(seen)) == (sets, count)
        for x, between, ends, gate_up, down in seen:
            assert (len(x), len(between), int(ends[-1])) == (2 * rows, 2 * rows, 2 * rows)
            assert (gate_up.shape, down.shape) == ((6, 64, 64), (6, 64, 32))
            assert ends.diff(prepend=torch.zeros(1).int()).max() <= rows, "a row's experts are distinct"
    assert len({tuple(args[2].tolist()) for args in seen}) > 1


@pytest.mark.parametrize("counting", [(GateFFN(),), (EvictTokens(), CountRows())], ids=["salient", "kept"])
def test_an_activation_within_a_product_leaves_the_floor_as_it_is(counting: tuple[Pass, ...]) -> None:
    before = rewritten(family_of("sdar").cached, FuseProjections(), *counting)
    after = rewritten(before, FuseGLU())
    assert after.find("rows_glu")
    assert work_of(after) == work_of(before)


@pytest.mark.parametrize(("family", "recipe"), [("llada", "dense"), ("llada", "dyllm"), ("sdar", "focus")])
def test_what_a_gpu_fuses_leaves_the_floor_as_it_is(family: str, recipe: str) -> None:
    (tiny,) = models(None, family)
    made = tiny.quantised(QuantizeWeights("int8", activations=True, lm_head=True))
    graphs = [
        rewrite(made.graph, made.recipe(recipe), lowering_passes(capability))["step"].graph
        for capability in (None, HOPPER)
    ]
    assert len(graphs[0].find("rows_glu")) <= len(graphs[1].find("rows_glu")) == tiny.model.spec.layers
    assert work_of(graphs[1]) == work_of(graphs[0])


@pytest.mark.parametrize(
    ("family", "options"), [("sdar", {}), ("sdar", {"full_steps": 0}), ("sdar", {"count": "device"}), ("llada", {})]
)
def test_the_keys_are_those_that_kept_rows_see(family: str, options: dict[str, Any]) -> None:
    """Up to the last kept row, or beyond it where all keys have been written before."""
    (tiny,) = models(None, family)
    program = tiny.optimized("focus", **options)
    counter, seen = Counter.of(program, work_of(program.graph("step"))), list[int]()

    def see(op: Op, args: Sequence[Any], result: object) -> None:
        if op.name == "paged_attention":
            cu_rows, limit = args[4].tolist(), args[5]
            seen.append(sum(int(limit[a:b].max()) for a, b in pairwise(cu_rows) if b > a))

    with program.programs["step"].observed(see):
        program.generate(input_ids=[[5] * 11, [6] * 3], max_new_tokens=24, steps=6, ignore_eos=True, observer=counter)
    found = [seen[at : at + program.spec.layers] for at in range(0, len(seen), program.spec.layers)]
    assert [c.keys[0][0] for c in counter.counts] == [first for first, *_ in found]
    assert [c.keys[-1][0] for c in counter.counts] == [last for *_, last in found]
    assert any(c.rows[1] < c.rows[0] for c in counter.counts)
    hidden = any(last < first for first, *_, last in found)
    assert hidden == (options == {"full_steps": 0})


def test_layers_that_differ_count_with_their_own_heads_and_what_their_window_sees() -> None:
    """A head that keeps no logits counts as both products of vocabulary attention."""
    (tiny,) = models(None, "diffusion_gemma")
    program, spec = tiny.optimized("dense"), tiny.model.spec
    work = work_of(program.graph("step"))
    sliding = Reading(2 * 2 * 8 * 4, 2 * 4 * 8 * 4, 6)
    full = Reading(2 * 1 * 16 * 4, 2 * 4 * 16 * 4, 0)
    assert work.attentions == ({sliding: 2, full: 2},)
    (shapes,) = work.products
    assert (shapes[spec.vocab, spec.hidden], shapes[spec.hidden, spec.vocab]) == (1, 1)
    counter, rule = Counter.of(program, work), Renoise(steps=2, stability=2)
    program.generate(input_ids=[[5] * 11, [6] * 3], max_new_tokens=16, policy=rule, observer=counter)
    assert [c.rows for c in counter.counts] == [(16,)] * 5
    # Of canvases of 8 after 11 and 3 tokens, twice denoised and once encoded, then of the next ones.
    assert [c.keys[0][0] for c in counter.counts] == [19 + 11] * 3 + [27 + 19] * 2
    assert [c.keys[0][6] for c in counter.counts] == [(8 + 5) + (8 + 3)] * 3 + [(8 + 5) * 2] * 2
    device = Device(torch.device("cpu"))
    device._bandwidth = 1.0
    for shape in shapes:
        device._times[shape, work.dtype] = {1: 0.0, 64: 0.0}
    moved = 16 * 2 * (sliding.query_bytes + full.query_bytes) + 2 * (24 * sliding.key_bytes + 30 * full.key_bytes)
    assert floor_of(work, counter.counts[:1], device).attention == moved


def test_times_between_samples_are_interpolated() -> None:
    device = Device(torch.device("cpu"))
    device._times[(4, 4), torch.float32] = {8: 1.0, 16: 3.0}
    seconds = [device.product((4, 4), torch.float32, n) for n in (0, 4, 8, 12, 16, 99)]
    assert seconds == [0.0, 1.0, 1.0, 2.0, 3.0, 3.0]
    assert device.bandwidth > 0


def test_an_ablation_lacks_one_thing_at_a_time(model: Model) -> None:
    arm = Arm("focus", recipe(model, "focus"))
    labels = [a.label for a in ablation(arm, on_gpu=True)]
    assert labels == [
        "without FuseProjections",
        "without EvictTokens",
        "without ChunkLMHead",
        "block_cache=off",
        "block_cache=dc",
        "recommit=false",
        "without graphs",
    ]
    assert [a.label for a in ablation(arm, on_gpu=False)] == labels[:-1]
    assert without(arm.recipe, "EvictTokens").phase("step") == recipe(model, "dense").phase("step")
    assert without(arm.recipe, "FuseProjections").phase("prefill") != arm.recipe.phase("prefill")


def products_in(work: Work) -> set[Product]:
    """All that differ, that of the head among them."""
    return {*work.listed, *(p for products in work.multiplied for p in products), *filter(None, [work.last])}


def alike(*works: Work) -> Device:
    """A device on which each product of these takes a second, whatever its size, and which moves 1 MB in one."""
    device = Device(torch.device("cpu"))
    device._bandwidth = 1e6
    for product in {product for work in works for product in products_in(work)}:
        device._times[product.shape, works[0].dtype] = {1: 1.0, 64: 1.0}
    return device


def on_64_rows(work: Work) -> list[StepCount]:
    """One step, on as many rows and keys in each row set."""
    sets = len(work.multiplied)
    return [StepCount((64,) * sets, (dict.fromkeys(work.windows, 64),) * sets, 64)]


def test_quantised_weights_count_with_what_is_stored_of_them() -> None:
    (tiny,) = models(None, "sdar_moe")
    work = work_of(tiny.quantised(QuantizeWeights("int8", lm_head=True)).optimized("dense").graph("step"))
    spec = tiny.model.spec
    assert work.last == Product((spec.vocab, spec.hidden), 3 * spec.vocab * spec.hidden - 4 * spec.vocab)
    (mixture,) = (p for p in products_in(work) if isinstance(p.shape, Mixture))
    assert isinstance(mixture.shape, Mixture)
    values = 3 * mixture.shape.experts * mixture.shape.hidden * mixture.shape.inner
    scales = 4 * mixture.shape.experts * (2 * mixture.shape.inner + mixture.shape.hidden)
    assert mixture.spared == 3 * values - scales
    assert not any(p.spared for p in products_in(work_of(tiny.optimized("dense").graph("step"))))

    device, count = alike(work), on_64_rows(work)
    head, less = 4 * spec.vocab * spec.hidden, work.last.spared
    assert floor_of(work, count, device).head == pytest.approx(1.0 - less / 1e6)
    device._times[work.last.shape, work.dtype] = {64: 1e-9}
    assert floor_of(work, count, device).head == pytest.approx((head - less) / 1e6)
    assert floor_of(replace(work, last=Product(work.last.shape)), count, device).head == 1e-9


@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.parametrize("family", ["sdar", "sdar_moe"])
def test_where_one_layer_is_quantised_the_others_count_as_they_are(family: str, activations: bool) -> None:
    """Layers are alike, so that it is a layer's share of what is saved where all are; of experts and linear layers."""
    (tiny,) = models(None, family)
    every = QuantizeWeights("int8", activations=activations)
    one, layers = replace(every, which=("*layers.1.*",)), tiny.model.spec.layers
    quantised = [tiny.quantised(step).optimized("dense").graph("step") for step in (one, every)]
    plain, mixed, whole = map(work_of, [tiny.optimized("dense").graph("step"), *quantised])
    assert plain.products == mixed.products == whole.products
    device, count = alike(plain, mixed, whole), on_64_rows(plain)
    before, found, least = (floor_of(work, count, device) for work in (plain, mixed, whole))
    assert before.linear - found.linear == pytest.approx((before.linear - least.linear) / layers)
    assert before.experts - found.experts == pytest.approx((before.experts - least.experts) / layers)
    assert found.linear < before.linear

    def quantised_in(work: Work) -> int:
        return sum(times for products in work.multiplied for p, times in products.items() if p.spared)

    assert layers * quantised_in(mixed) == quantised_in(whole) > 0
    assert all(p.narrow == (activations and p.spared > 0) for p in products_in(mixed))


def test_a_head_that_is_quantised_leaves_a_layer_of_its_shape_as_it_is() -> None:
    shape: Shape = (97, 64)
    work = Work(({Product(shape): 1},), {}, ({},), True, Product(shape, 1000, narrow=True), torch.float32)
    assert (work.products, work.head) == (({shape: 1},), shape)
    floor = floor_of(work, on_64_rows(work), alike(work))
    assert (floor.linear, floor.head) == (1.0, 0.25)


@pytest.mark.parametrize("options", [{}, {"kv_dtype": "fp8"}], ids=str)
@pytest.mark.parametrize(
    ("family", "recipe"), [("sdar", "dllm_serve"), ("llada", "maskkv"), ("sdar", "sparse_dllm"), ("llada", "dyllm")]
)
def test_attention_that_no_count_tells_has_no_floor(family: str, recipe: str, options: dict[str, Any]) -> None:
    """It is left out, and is no 0."""
    (tiny,) = models(None, family)
    dense, work = (work_of(tiny.optimized(r, **options).graph("step")) for r in ("dense", recipe))
    device = alike(dense, work)
    known, found = (floor_of(w, on_64_rows(w), device) for w in (dense, work))
    assert known.to_json()["attention"] > 0
    assert found.attention is None
    assert "attention" not in found.to_json()
    assert found.total == found.linear + found.head > 0


def test_reports_leave_out_a_floor_that_is_not_known(model: Model, bench: Bench) -> None:
    dense, serve = (bench(Arm(name, recipe(model, name))) for name in ("dense", "dllm_serve"))
    _, rows = stages_table([dense, serve])
    assert {arm for arm, part, _ in rows if part == "attention (floor)"} == {"dense"}
    assert {arm for arm, part, _ in rows if part == "linear (floor)"} == {"dense", "dllm_serve"}
    assert "attention" not in serve.to_json()["floor_ms"]
    assert serve.ratio > 0


@pytest.mark.parametrize("recipe", ["dense", "focus", "dyllm"])
def test_rows_in_8_bits_count_with_their_bytes_and_at_the_pace_of_bytes(recipe: str) -> None:
    (tiny,) = models(None, "sdar_moe")
    step, spec = QuantizeWeights("int8", lm_head=True), tiny.model.spec
    plain = work_of(tiny.quantised(step).optimized(recipe).graph("step"))
    work = work_of(tiny.quantised(replace(step, activations=True)).optimized(recipe).graph("step"))
    router = (len(tiny.graph.tensors["model.layers.0.mlp.gate.weight"]), spec.hidden)
    assert {p.shape for p in products_in(plain) if not p.spared} == {router}
    assert products_in(work) == {replace(p, narrow=p.shape != router) for p in products_in(plain)}
    assert (work.products, work.attentions) == (plain.products, plain.attentions)

    device, count = alike(work), on_64_rows(work)
    assert floor_of(work, count, device).head == 1 / 4
    assert floor_of(work, count, device).experts == spec.layers / 4
    assert work.head == (spec.vocab, spec.hidden)
    device._times[work.head, work.dtype] = {64: 1e-9}
    of_rows = 64 * (spec.hidden + 4 + 4 * spec.vocab)
    weight = spec.vocab * (spec.hidden + 4)
    assert floor_of(work, count, device).head == pytest.approx((weight + of_rows) / 1e6)

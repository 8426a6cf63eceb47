"""QuantizeWeights: what is quantised, what is left and why, and that ranks have what one process has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dgraph
from dgraph.compiler.phases import lowerable
from dgraph.errors import InputError, PassError, UnknownName
from dgraph.families import families
from dgraph.families.quantised import KINDS, WHOLE, QuantisedWeight, quantise
from dgraph.families.weights import Quantising, Shapes, WeightSource
from dgraph.ir.graph import Graph
from dgraph.ir.quantised_operands import is_fused_operand
from dgraph.ir.stored_weights import formats_of, stored_of, tensors_of
from dgraph.ir.verifier import verify
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.regions import RegionCompiler
from dgraph.passes import FuseProjections, PackRows, QuantizeWeights, ShardTensorParallel
from dgraph.passes.base import pass_from_json
from dgraph.recipes import RECIPES
from dgraph.testing import TinyModel, models, prompts, ranks
from dgraph.types.nodes import args_of, viewed
from tests.amounts import every_value, first_cases
from tests.golden_files import check_golden
from tests.oracle.eight_bits import linear_in
from tests.parallel.divided import check_equal, run_of
from tests.tiny import MASK, Hand, interpret, ops_of, report_of, rewritten

aten = torch.ops.aten
FORMATS = (
    QuantizeWeights("fp8"),
    QuantizeWeights("int8", embeddings=True),
    QuantizeWeights("int4", (1, 8)),
    QuantizeWeights("int4", (1, 8), zeros=True, lm_head=True, router=True, embeddings=True),
    QuantizeWeights("fp8", (8, 8)),
    QuantizeWeights("int8", (WHOLE, WHOLE)),
)
EACH_FORM = ("dream", "llada2", "sdar", "sdar_moe")
"""Families of each form: dense layers and experts, one projection and several, a head of its own and a shared one."""


def inputs(seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(0, MASK, (2, 9), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "positions": torch.arange(9).expand(2, 9)}


def plain(tiny: TinyModel, step: QuantizeWeights) -> TinyModel:
    """The model whose weights are what the quantised ones stand for: the oracle, which knows nothing of quantised
    graphs but the names of the weights.
    """
    graph, found = tiny.graph.copy(), TinyModel(tiny.family, tiny.model)
    for name, format in formats_of(tiny.quantised(step).graph).items():
        graph.tensors[name] = quantise(graph.tensors[name], format).dequantised(torch.float32)
    object.__setattr__(found, "graph", graph)
    return found


def linears(graph: Graph) -> set[str]:
    """Names of the weights that linear layers and experts read."""
    targets = (aten.linear.default, dgraph.ops.OPS["experts"].overload)
    read = {arg for node in graph.calls if node.target in targets for arg in node.all_input_nodes}
    return {stored.name for arg in read if (stored := stored_of(arg)) is not None and arg.meta["val"].dim() > 1}


# -- what it does ----------------------------------------------------------------------------------------------------


@first_cases(4, "tiny", sorted(models(), key=lambda tiny: str(tiny) not in EACH_FORM), ids=str)
def test_every_linear_layer_and_expert_is_quantised_but_head_and_router(tiny: TinyModel) -> None:
    graph = tiny.quantised(QuantizeWeights("int8")).graph
    left = linears(tiny.graph) - set(formats_of(graph))
    assert all("lm_head" in name or "gate.weight" in name for name in left), left
    assert any("lm_head" in name for name in left)
    everything = tiny.quantised(QuantizeWeights("int8", lm_head=True, router=True)).graph
    left -= set(formats_of(everything))
    assert not any("lm_head" in name for name in left)
    verify(everything)


def test_it_fires_once_for_every_weight_and_says_which() -> None:
    (tiny,) = models(None, "sdar")
    report = report_of(tiny.graph, QuantizeWeights("int4", (1, 16)))
    assert [(a.layer, a.what) for a in report.applied][:7] == [
        (0, f"model.layers.0.{path}_proj.weight as int4")
        for path in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    ]
    assert len(report.applied) == 7 * tiny.model.spec.layers
    assert report.skipped == []


def test_a_layer_in_the_dump() -> None:
    (tiny,) = models(None, "sdar_moe")
    check_golden("sdar_moe_quantised.txt", dgraph.dump(tiny.quantised(FORMATS[3]).graph))


@every_value(("tiny", models(None, "llada2", "dream")), ("step", FORMATS))
def test_it_computes_what_its_weights_stand_for(tiny: TinyModel, step: QuantizeWeights) -> None:
    got = interpret(tiny.quantised(step).graph, inputs())["logits"]
    assert torch.equal(got, interpret(plain(tiny, step).graph, inputs())["logits"])
    dense = interpret(tiny.graph, inputs())["logits"]
    assert not torch.equal(got, dense)


def test_weights_that_are_numbers_of_the_format_lose_nothing() -> None:
    (tiny,) = models(None, "llada")
    for step in (QuantizeWeights("int8"), QuantizeWeights("int4", (1, 16), zeros=True)):
        once = plain(tiny, step)
        want = interpret(once.graph, inputs())["logits"]
        graph = rewritten(once.graph, step)
        torch.testing.assert_close(interpret(graph, inputs())["logits"], want, rtol=1e-4, atol=1e-4)
    same = rewritten(tiny.graph, QuantizeWeights(None))
    assert ops_of(same) == ops_of(tiny.graph)
    assert torch.equal(interpret(same, inputs())["logits"], interpret(tiny.graph, inputs())["logits"])


def test_patterns_say_which() -> None:
    (tiny,) = models(None, "sdar")
    step = QuantizeWeights("fp8", which=("*.layers.1.*", "*.down_proj.*"), but=("*.q_proj.*",))
    names = set(formats_of(tiny.quantised(step).graph))
    layer = {
        f"model.layers.1.{m}_proj.weight" for m in ("self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up")
    }
    assert names == layer | {f"model.layers.{i}.mlp.down_proj.weight" for i in range(tiny.model.spec.layers)}


def test_it_is_written_as_json_and_read_again() -> None:
    for step in (*FORMATS, *ROUNDING):
        assert pass_from_json(step.to_json(), dgraph.passes.PASSES) == step
        assert pass_from_json({**step.to_json(), "which": ["*"]}, dgraph.passes.PASSES) == step


# -- embeddings ------------------------------------------------------------------------------------------------------


def tied() -> Graph:
    """Rows of a table, and logits by the same."""
    hand = Hand()
    ids, table = hand.input("input_ids", "N", dtype=torch.int64), hand.weight("embed.weight", 13, 16)
    h = hand.call(aten.tanh.default, hand.call(aten.embedding.default, table, ids))
    return hand.returns(logits=hand.call(aten.linear.default, h, table))


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        ({"embeddings": True}, "embed.weight: the LM head reads it too, so it must stay"),
        ({"lm_head": True}, "embed.weight: embedding reads it too, so it must stay"),
    ],
)
def test_a_tied_head_and_its_embeddings_are_stored_once_or_not_at_all(chosen: dict[str, bool], reason: str) -> None:
    report = report_of(tied(), QuantizeWeights("int8", **chosen))  # type: ignore[arg-type]
    assert (report.applied, [skipped.reason for skipped in report.skipped]) == ([], [reason])
    made = rewritten(tied(), QuantizeWeights("int8", lm_head=True, embeddings=True))
    assert {name: t.dtype for name, t in made.tensors.items()} == {
        "embed.weight": torch.int8,
        "embed.weight_scale": torch.float32,
    }


@every_value(
    ("format", FORMATS),
    ("backend", ["eager", "inductor"]),
    ("activations", [False, True]),
    ("ids", [[3, 0, 12, 3], [5]]),
)
def test_ids_are_looked_up_in_what_is_stored(
    format: QuantizeWeights, backend: str, activations: bool, ids: list[int]
) -> None:
    activations &= format.block is None and format.format != "int4"
    step = replace(format, embeddings=True, lm_head=True, activations=activations)
    graph, given = rewritten(tied(), step), {"input_ids": torch.tensor(ids, dtype=torch.int64)}
    program = LoweredProgram(lowerable(graph), RegionCompiler(backend), Buckets())
    assert program.graph.find("embedding_stored")
    assert all(map(is_fused_operand, program.graph.find("dequantise"))), "no dequantised table lies in memory"
    (got,) = program(given, len(ids)).outputs.values()
    torch.testing.assert_close(got, interpret(graph, given)["logits"], rtol=1e-5, atol=1e-5)


def test_vectors_on_their_grid_lose_nothing() -> None:
    graph = tied()
    numbers = torch.randint(-127, 128, (13, 16), generator=torch.Generator().manual_seed(0))
    numbers[:, 3] = 127
    graph.tensors["embed.weight"] = numbers * torch.linspace(0.25, 2, 13)[:, None]
    given = {"input_ids": torch.arange(13)}
    made = rewritten(graph, QuantizeWeights("int8", lm_head=True, embeddings=True))
    assert torch.equal(interpret(made, given)["logits"], interpret(graph, given)["logits"])


# -- rows in 8 bits --------------------------------------------------------------------------------------------------

ROUNDING = (QuantizeWeights("fp8", activations=True), QuantizeWeights("int8", activations=True))


def test_rows_are_rounded_once_for_all_that_read_them() -> None:
    (tiny,) = models(None, "sdar")
    report = report_of(tiny.graph, ROUNDING[1])
    assert [a.what for a in report.applied if a.layer == 1 and a.what.startswith("rows")] == [
        f"rows of model.layers.1.{path}_proj.weight as int8"
        for path in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    ]
    assert len(report.applied) == 2 * 7 * tiny.model.spec.layers
    assert report.skipped == []
    graph = tiny.quantised(ROUNDING[1]).graph
    readers = [len(node.users) for node in graph.find("round_rows", 1)]
    assert readers == [3, 1, 2, 1]  # qkv, out, gate and up, down
    assert len(graph.find("round_rows")) == 4 * tiny.model.spec.layers


def test_rows_of_experts_are_rounded_once_for_all_of_them_and_between_their_products() -> None:
    (tiny,) = models(None, "llada2")
    report = report_of(tiny.graph, ROUNDING[1])
    assert [a.what for a in report.applied if a.layer == 1 and a.what.startswith("rows")] == [
        f"rows of model.layers.1.{path} as int8"
        for path in (
            "attention.query_key_value.weight",
            "attention.dense.weight",
            "mlp.experts.gate_up_proj",
            "mlp.experts.down_proj",
            *(f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")),
        )
    ]
    graph = rewritten(tiny.quantised(ROUNDING[1]).graph, PackRows())
    (experts,) = graph.find("experts", 1)
    assert args_of(experts)[5:] == ("silu", "int8")
    assert experts in args_of(experts)[0].users
    assert [len(node.users) for node in graph.find("round_rows", 1)] == [1, 1, 3, 1]  # and the shared expert


def test_a_router_that_is_not_there_is_told() -> None:
    (dense,), (mixed,) = models(None, "sdar"), models(None, "sdar_moe")
    reports = [report_of(tiny.graph, QuantizeWeights("int8", router=True)) for tiny in (dense, mixed)]
    assert [skip.reason for skip in reports[0].skipped] == ["no projection chooses experts, so there is no router"]
    assert reports[1].skipped == []


def test_rows_of_some_experts_alone() -> None:
    (tiny,) = models(None, "sdar_moe")
    stored = as_loaded(tiny, QuantizeWeights("int8"))
    for pattern, rounds, inner in (("*gate_up*", True, None), ("*down*", False, "int8")):
        graph = rewritten(stored, QuantizeWeights(None, activations=True, which=(pattern,)))
        for node in graph.find("experts"):
            assert (viewed(args_of(node)[0]).target is dgraph.ops.OPS["round_rows"].overload, args_of(node)[6]) == (
                rounds,
                inner,
            )


def test_a_layer_of_rounded_rows_in_the_dump() -> None:
    (tiny,) = models(None, "llada")
    check_golden("llada_rounded_rows.txt", dgraph.dump(tiny.quantised(ROUNDING[0]).graph))


def through_experts(layer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """dgraph::experts by silu, of any linear layer: row by row."""

    def experts(x: Tensor, choice: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for row, slot in torch.ones_like(choice).nonzero().tolist():
            expert = int(choice[row, slot])
            gate, up = layer(x[row], gate_up[expert]).chunk(2)
            out[row] += weight[row, slot] * layer(torch.nn.functional.silu(gate) * up, down[expert])
        return out

    return experts


@every_value(("tiny", models(None, "dream", "sdar", "sdar_moe", "llada2")), ("step", ROUNDING))
def test_it_computes_what_linear_layers_over_rounded_rows_do(tiny: TinyModel, step: QuantizeWeights) -> None:
    graph, names, kind = tiny.graph.copy(), formats_of(tiny.quantised(step).graph), str(step.format)
    layer = linear_in(kind, but=lambda weight: not any(weight is graph.tensors[name] for name in names))
    for node in graph.calls:
        if node.target is aten.linear.default:
            node.target = layer  # type: ignore[assignment]
    of_experts = {"experts": through_experts(linear_in(kind, but=lambda weight: False))}
    got = interpret(tiny.quantised(step).graph, inputs())["logits"]
    torch.testing.assert_close(got, interpret(graph, inputs(), of_experts)["logits"], rtol=1e-4, atol=1e-4)
    weights_alone = interpret(tiny.quantised(replace(step, activations=False)).graph, inputs())["logits"]
    assert not torch.allclose(got, weights_alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("step", ROUNDING, ids=lambda step: step.format)
def test_rows_and_weights_on_their_grids_lose_nothing(step: QuantizeWeights) -> None:
    hand = Hand()
    x = hand.input("x", "N", 4)
    hand.layer = 0
    weight = hand.weight("w.weight", 3, 4)
    graph = hand.returns(logits=hand.call(aten.linear.default, x, weight))
    reach = KINDS[str(step.format)].reach
    graph.tensors["w.weight"] = torch.tensor([[reach, 1, 2, 3], [-reach, 0, 1, 0], [reach, -4, 5, 6]]) / 64
    rows = torch.tensor([[reach, 3, 2, 1], [0, 0, 0, 0], [5, -4, -reach, 6]]) * 4
    want = interpret(graph, {"x": rows})["logits"]
    made = rewritten(graph, replace(step, lm_head=True))
    assert len(made.find("round_rows")) == 1
    assert torch.equal(interpret(made, {"x": rows})["logits"], want)
    (got,) = LoweredProgram(lowerable(made), RegionCompiler("eager"), Buckets())({"x": rows}, 3).outputs.values()
    assert torch.equal(got, want)


def as_loaded(tiny: TinyModel, step: QuantizeWeights) -> Graph:
    """A graph as it is captured of a checkpoint that came quantised."""
    graph = tiny.quantised(step).graph.copy()
    graph.history = ()
    return graph


def test_without_a_format_rows_meet_weights_that_are_stored_so() -> None:
    (tiny,) = models(None, "sdar")
    only_rows = QuantizeWeights(None, activations=True, which=("*.layers.1.*",))
    made = rewritten(as_loaded(tiny, QuantizeWeights("int8")), only_rows)
    assert {node.meta["layer"] for node in made.find("round_rows")} == {1}
    report = report_of(tiny.graph, only_rows)
    assert report.applied == []
    assert len(report.skipped) == 7
    assert "q_proj.weight is stored as it is, and so are the rows" in report.skipped[0].reason


@pytest.mark.parametrize(
    ("name", "stored", "reason"),
    [
        (
            "sdar",
            QuantizeWeights("int4", (1, 8)),
            "q_proj.weight in blocks of [1, 8]: rows meet numbers of fp8 or int8",
        ),
        ("sdar", QuantizeWeights("fp8", (8, 8)), "q_proj.weight in blocks of [8, 8]: rows meet numbers of fp8 or int8"),
        ("sdar", QuantizeWeights("int8", (1, WHOLE), zeros=True), "with one scale for each row of a weight"),
        ("sdar_moe", QuantizeWeights("int4", (1, 8)), "experts.down_proj in blocks of [1, 8]: rows meet numbers"),
    ],
    ids=str,
)
def test_every_reason_to_leave_rows(name: str, stored: QuantizeWeights, reason: str) -> None:
    (tiny,) = models(None, name)
    report = report_of(as_loaded(tiny, stored), QuantizeWeights(None, activations=True))
    assert any(reason in skipped.reason for skipped in report.skipped)
    assert report.applied == []


def test_a_rank_scales_what_it_has_of_a_row() -> None:
    (tiny,) = models(None, "llada")
    graph = tiny.quantised(ROUNDING[1]).graph
    part = rewritten(graph, ShardTensorParallel(2, rank=1))
    widths = [int(node.meta["val"].shape[-1]) for node in part.find("round_rows", 0)]
    whole = [int(node.meta["val"].shape[-1]) for node in graph.find("round_rows", 0)]
    assert widths == [whole[0], whole[1] // 2, whole[2], whole[3] // 2]


@pytest.mark.parametrize(("name", "experts"), [("dream", "split"), ("llada2", "split"), ("llada2", "parallel")])
def test_ranks_decode_by_rounded_rows(name: str, experts: str) -> None:
    (tiny,) = models(None, name)
    made, ids = tiny.quantised(replace(ROUNDING[1], lm_head=True)), prompts(tiny)

    def run(rank: int) -> list[list[int]]:
        run = made.on_rank(rank, 2, "focus", experts=experts)
        return run.generate(input_ids=ids, threshold=0.3, max_new_tokens=12).token_ids

    first, second = ranks(2, run)
    assert first == second
    assert all(first)


# -- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"format": "fp7"}, UnknownName, "fp8"),
        ({"format": "int8", "block": (0, 3)}, InputError, "at least 1 each"),
        ({"format": "int4", "activations": True}, InputError, "activations are rounded to fp8 or int8"),
        ({"block": (128, 128), "activations": True}, InputError, "one scale for each row and no zeros"),
        ({"format": "int8", "zeros": True, "activations": True}, InputError, "one scale for each row and no zeros"),
        ({"which": "*.mlp.*"}, InputError, r"\('\*\.mlp\.\*',\)"),
        ({"but": None}, InputError, "but must be patterns of names of weights"),
        ({"format": ["int4"]}, UnknownName, "fp8"),
        ({"block": 128}, InputError, "block must be two numbers, .* got 128"),
        ({"format": "int8", "zeros": "false"}, InputError, "zeros is true or false, got 'false'"),
        ({"lm_head": "false"}, InputError, "lm_head is true or false, got 'false'"),
        ({"format": None, "block": (1, 64)}, InputError, "without a format no weight is stored: leave block out"),
        ({"format": None, "zeros": True, "activations": True}, InputError, "leave zeros out, or name a format"),
        (
            {"format": None, "lm_head": True, "router": True, "activations": True},
            InputError,
            "leave lm_head, router out",
        ),
    ],
)
def test_settings_that_mean_nothing(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        QuantizeWeights(**options)


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    (tiny,) = models(None, "sdar")
    with pytest.raises(InputError, match=r"QuantizeWeights: .*'\*\.ffn\.\*'.*model\.layers\.0\.self_attn\.q_proj"):
        rewritten(tiny.graph, QuantizeWeights("int8", which=("*.ffn.*",)))
    stored = as_loaded(tiny, QuantizeWeights("int8"))
    for patterns in ({"which": ("*q_proj*", "*.ffn.*")}, {"but": ("*.ffn.*",)}):
        with pytest.raises(InputError, match=r"QuantizeWeights: .*'\*\.ffn\.\*'.*model\.layers\.0\.self_attn\.q_proj"):
            rewritten(stored, QuantizeWeights(None, activations=True, **patterns))


def test_a_weight_that_is_not_finite_is_named() -> None:
    model = families()["sdar"].random(0)
    name = "model.model.layers.1.self_attn.q_proj.weight"
    with torch.no_grad():
        dict(model.module.named_parameters())[name][1, 2] = torch.nan
    with pytest.raises(InputError, match=r"layers\.1\.self_attn\.q_proj\.weight .* not finite"):
        dgraph.optimize(model, "dense", weights="int8", backend="eager")


def reading(read: str) -> Graph:
    hand = Hand()
    x = hand.input("x", "N", 5)
    hand.layer = 0
    weight = hand.weight("w.weight", 4, 5, dtype=torch.float64 if read == "float64" else torch.float32)
    if read == "computed":
        weight = hand.call(aten.mul.Scalar, weight, 2.0)
    if read == "float64":
        x = hand.call(aten.to.dtype, x, torch.float64)
    made = hand.call(aten.linear.default, x, weight)
    if read == "twice":
        made = hand.call(aten.add.Tensor, made, hand.call(aten.sum.default, weight))
    return hand.returns(logits=made)


@pytest.mark.parametrize(
    ("read", "step", "reason"),
    [
        ("twice", QuantizeWeights("int8"), "w.weight: sum reads it too, so it must stay"),
        ("odd", QuantizeWeights("int4"), "w.weight: it has 5 columns, and two 4-bit numbers lie in a byte"),
    ],
)
def test_every_reason_to_leave_a_weight(read: str, step: QuantizeWeights, reason: str) -> None:
    graph = reading(read)
    report = report_of(graph, QuantizeWeights(step.format, lm_head=True))
    assert (report.applied, [skipped.reason for skipped in report.skipped]) == ([], [reason])


def test_a_weight_that_is_computed_is_not_looked_at() -> None:
    report = report_of(reading("computed"), QuantizeWeights("int8", lm_head=True))
    assert (report.applied, report.skipped) == ([], [])


def test_it_runs_on_a_captured_graph_alone() -> None:
    (tiny,) = models(None, "sdar")
    with pytest.raises(PassError, match="quantise it before any other pass"):
        rewritten(tiny.graph, PackRows(), QuantizeWeights("int8"))


# -- with other passes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", FORMATS[:4], ids=lambda step: f"{step.format} {step.block}")
def test_projections_are_stacked_as_they_are_stored(step: QuantizeWeights) -> None:
    (tiny,) = models(None, "sdar")
    graph = tiny.quantised(step).graph
    first, second = (rewritten(graph, PackRows(), FuseProjections()) for _ in range(2))
    name = "model.layers.1.self_attn.q_proj+k_proj+v_proj.weight"
    for made in (first, second):
        stored = {s.name: s for n in made.find("dequantise") if (s := stored_of(n)) is not None}[name]
        assert [t.data_ptr() for t in tensors_of(made, stored)] == [
            first.tensors[f"{name}{part.meta['weight'].removeprefix(name)}"].data_ptr() for part in stored.parts
        ]
    whole = quantised_in(first, name).dequantised(torch.float32)
    parts = [quantised_in(graph, f"model.layers.1.self_attn.{x}_proj.weight").dequantised(torch.float32) for x in "qkv"]
    assert torch.equal(whole, torch.cat(parts))


def quantised_in(graph: Graph, name: str) -> QuantisedWeight:
    stored = next(s for n in graph.find("dequantise") if (s := stored_of(n)) is not None and s.name == name)
    values, scales, zeros = (*tensors_of(graph, stored), None)[:3]
    assert values is not None
    assert scales is not None
    return QuantisedWeight(values, scales, zeros, stored.block)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (QuantizeWeights("fp8", (48, 8)), "a projection ends within a block of 48 rows"),
        (QuantizeWeights("fp8", but=("*.k_proj.*",)), "the projections' weights are quantised differently"),
    ],
)
def test_every_reason_to_leave_projections_apart(step: QuantizeWeights, reason: str) -> None:
    (tiny,) = models(None, "sdar")
    packed = rewritten(tiny.quantised(step).graph, PackRows())
    skipped = report_of(packed, FuseProjections()).skipped
    assert reason in skipped[0].reason


def test_rows_of_a_stacked_weight_are_views_of_what_is_stored() -> None:
    (tiny,) = models(None, "sdar")
    made = tiny.quantised(FORMATS[2]).optimized("dyllm")
    graph = made.phases["step"].graph
    names = [s.name for n in graph.find("dequantise", 1) if (s := stored_of(n)) is not None]
    assert any(name.endswith("k_proj+v_proj.weight") and "q_proj" not in name for name in names), names


# -- what is read ----------------------------------------------------------------------------------------------------


def test_weights_are_read_quantised_and_dropped_one_at_a_time() -> None:
    (tiny,) = models(None, "llada2")
    stored = {name: (tensor.detach(),) for name, tensor in tiny.graph.tensors.items()}
    hollow = tiny.graph.copy()
    hollow.tensors = {name: Shapes().take(name, tensor, None) for name, tensor in tiny.graph.tensors.items()}
    source = WeightSource(stored)
    step = FORMATS[3]
    graph = rewritten(hollow, replace(step, weights=source))
    want = tiny.quantised(step).graph
    for name, tensor in want.tensors.items():
        assert torch.equal(graph.tensors[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


@first_cases(
    3,
    "name, step, world",
    [
        ("sdar", FORMATS[0], 2),
        ("llada", FORMATS[1], 4),
        ("sdar_moe", FORMATS[3], 2),
        ("dream", FORMATS[2], 2),
        ("llada2", FORMATS[4], 2),
        ("native", FORMATS[5], 2),
    ],
    ids=str,
)
def test_ranks_decode_as_one_process_does(name: str, step: QuantizeWeights, world: int) -> None:
    (tiny,) = models(None, name)
    check_equal(tiny.quantised(step), world, "dense", {})


def test_a_rank_has_its_part_of_what_was_quantised_whole() -> None:
    (tiny,) = models(None, "sdar_moe")
    step = FORMATS[3]
    whole = tiny.quantised(step).graph
    hollow = tiny.graph.copy()
    left = rewritten(hollow, replace(step, weights=Shapes()))
    source = Quantising(None, tiny.graph.tensors, formats_of(left))
    for rank in range(2):
        want = rewritten(whole, ShardTensorParallel(2, rank=rank))
        got = rewritten(left, ShardTensorParallel(2, rank=rank, weights=source))
        assert got.tensors.keys() == want.tensors.keys()
        for name, tensor in want.tensors.items():
            assert torch.equal(got.tensors[name], tensor), name


def test_a_rank_takes_no_piece_of_a_block() -> None:
    (tiny,) = models(None, "sdar")
    graph = tiny.quantised(QuantizeWeights("int4", (1, 24))).graph
    with pytest.raises(InputError, match=r"o_proj\.weight.* along dimension 1, of which 24 columns share a scale"):
        rewritten(graph, ShardTensorParallel(2))


# -- every recipe ----------------------------------------------------------------------------------------------------


GATED = ("dyllm", "maskkv+dyllm", "dllm_serve+dyllm+focus")
"""Of the recipes with a gate, those that run by default: the gate alone, with chosen keys, and with an eviction too."""


def decoding_cases() -> list[Any]:
    """Every recipe in one format, of those with a gate some, and one recipe in every format; the others are for a
    release.
    """
    found = []
    for i, recipe in enumerate(RECIPES):
        for j, step in enumerate(FORMATS):
            alone = j == i % len(FORMATS) and ("dyllm" not in recipe or recipe in GATED)
            default = alone or recipe == "focus"
            found.append(pytest.param(recipe, step, marks=[] if default else [pytest.mark.release]))
    return found


@pytest.mark.parametrize(("recipe", "step"), decoding_cases(), ids=lambda v: v if isinstance(v, str) else v.format)
def test_tokens_are_those_of_the_weights_that_are_stood_for(recipe: str, step: QuantizeWeights) -> None:
    options = {"tau": 0.97} if recipe == "dyllm" else {"pairs": 4} if recipe.startswith("maskkv") else {}
    for tiny in models(None, "sdar_moe", "llada", "dream"):
        try:
            tiny.recipe(recipe, **options)
        except InputError:
            continue
        decoding = {"threshold": 0.3, "max_new_tokens": 12}
        got = run_of(tiny.quantised(step).optimized(recipe, **options), tiny, **decoding).result.token_ids
        want = run_of(plain(tiny, step).optimized(recipe, **options), tiny, **decoding).result.token_ids
        assert got == want, tiny
        return
    raise AssertionError(f"no family takes {recipe}")


def test_all_phases_share_what_is_stored() -> None:
    (tiny,) = models(None, "sdar")
    made = tiny.quantised(FORMATS[0]).optimized("focus")
    pointers = [
        {name: t.data_ptr() for name, t in phase.graph.tensors.items() if "layers.0." in name and t.dim() == 2}
        for phase in made.phases.values()
    ]
    shared = set.intersection(*(set(found) for found in pointers))
    assert any("weight_scale" in name for name in shared)
    assert all(len({found[name] for found in pointers}) == 1 for name in shared)

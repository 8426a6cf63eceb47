"""Every pass of every recipe is what it declares, and one that is not is named with the place where it parts."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import dgraph
from dgraph.compiler.phases import HOPPER, lowering_passes
from dgraph.errors import InputError, PassError, UnknownName
from dgraph.ir.graph import Graph
from dgraph.numerics import check_effects
from dgraph.passes import (
    PASSES,
    CacheKV,
    FuseProjections,
    PackRows,
    Pass,
    QuantizeWeights,
    ShardTensorParallel,
)
from dgraph.recipes import RECIPES, Ablation, GateOptions, Phase, Recipe
from dgraph.testing import TinyModel, models
from dgraph.testing import check_effects as check_effects_of
from tests.amounts import first_cases
from tests.numerics.wrong import Halves, HonestHalves, Hopeless, Promised, Rename, Scale, ZeroWeight

LLADA, SDAR = models(None, "llada", "sdar")
OTHERS = models(None, "dream", "fast_dllm_v2", "llada2", "diffusion_gemma")
OPTIONS = [
    ("dense", {"kv_dtype": "fp8"}),
    ("focus", {"count": "device", "ablation": Ablation(select="scripted")}),
    ("focus", {"full_steps": 1, "ablation": Ablation(keep=2)}),
    ("dyllm", {"update": False}),
    ("maskkv", {"heads": "adaptive"}),
    ("sparse_dllm", {"kv_dtype": "fp8"}),
]


def recipe(*passes: Pass) -> Recipe:
    return Recipe("made", 1, (Phase("step", passes),))


@pytest.mark.parametrize("tiny", OTHERS, ids=str)
def test_passes_of_dense_are_what_they_declare(tiny: TinyModel) -> None:
    check_effects_of(tiny, "dense", {})


@pytest.mark.release
@pytest.mark.parametrize("tiny", models(), ids=str)
@pytest.mark.parametrize("name", ["dense", "focus", "dyllm", "maskkv"])
def test_passes_are_what_they_declare_on_every_family(tiny: TinyModel, name: str) -> None:
    check_effects_of(tiny, name, {})


def gated(name: str) -> bool:
    """True for a combination with a gate, of which two run by default."""
    return "+" in name and issubclass(RECIPES[name].options, GateOptions)


SOME = [("dllm_serve+dyllm+focus", SDAR), ("maskkv+dyllm+focus", LLADA)]
NAMED = [(name, tiny) for name in sorted(RECIPES) for tiny in (LLADA, SDAR)]
NAMED = [*SOME, *sorted((case for case in NAMED if case not in SOME), key=lambda case: gated(case[0]))]


@first_cases(len(SOME) + sum(not gated(name) for name, _ in NAMED), "name, tiny", NAMED, ids=str)
def test_passes_of_a_recipe_are_what_they_declare(name: str, tiny: TinyModel) -> None:
    try:
        tiny.recipe(name)
    except InputError:
        pytest.skip("not a recipe for this model")
    check_effects_of(tiny, name, {})


@pytest.mark.parametrize("tiny", [LLADA, SDAR], ids=str)
@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_passes_of_other_settings_are_what_they_declare(tiny: TinyModel, name: str, options: dict[str, object]) -> None:
    check_effects_of(tiny, name, options)


@pytest.mark.parametrize("step", [QuantizeWeights(), ShardTensorParallel(2)])
def test_passes_of_captured_graphs_are_what_they_declare(step: Pass) -> None:
    check_effects(SDAR.graph, recipe(step))


@pytest.mark.parametrize(("tiny", "name"), [(LLADA, "dense"), (LLADA, "dyllm"), (SDAR, "focus")], ids=str)
def test_passes_that_a_gpu_needs_are_what_they_declare(tiny: TinyModel, name: str) -> None:
    made = tiny.quantised(QuantizeWeights("int8", activations=True, embeddings=True, lm_head=True))
    found = made.recipe(name)
    for step in lowering_passes(HOPPER):
        found = found.with_last(step, [phase.name for phase in found.phases])
    step = dgraph.rewrite(made.graph, found)["step"].graph
    assert len(step.find("rows_glu")) == tiny.model.spec.layers
    assert step.find("dequantise_rows")
    check_effects(made.graph, found)


def test_every_approximate_pass_says_at_which_setting_it_changes_nothing() -> None:
    for cls in PASSES.values():
        identity = cls().identity()
        assert type(identity) is cls
        assert identity.identity() == identity


def test_an_exact_pass_that_scales_is_named_with_where_it_parts() -> None:
    with pytest.raises(PassError) as caught:
        check_effects(SDAR.graph, recipe(PackRows(), Scale()))
    message = str(caught.value)
    assert message.startswith(
        "Scale(by=1.000001) declares exact, the same bits, but logits of step 1 differs on small inputs: "
    )
    place = r"The first node that parts is in layer 2 \(mlp\), node \w+, which reads \w+ \(made by Scale\): (.*)"
    found = re.search(place, message)  # numbers of nodes depend on who has used the graph before
    assert found is not None
    assert "elements differ, by up to 4." in found[1]


def test_a_pass_in_the_middle_of_a_recipe_is_found(captured: Graph, model: dgraph.Model) -> None:
    dense = dgraph.recipe("dense", model.spec)
    passes = [
        replace(phase, passes=(*phase.passes[:3], Scale(), *phase.passes[3:])) if phase.name == "step" else phase
        for phase in dense.phases
    ]
    with pytest.raises(PassError, match=r"^Scale\(.*layer 2"):
        check_effects(captured, replace(dense, phases=tuple(passes)))


def test_another_order_of_sums_is_not_exact_but_reassociates() -> None:
    with pytest.raises(PassError, match=r"^Halves\(\) declares exact.*in layer 1"):
        check_effects(SDAR.graph, recipe(PackRows(), Halves()))
    check_effects(SDAR.graph, recipe(PackRows(), HonestHalves()))


@pytest.mark.parametrize("after", [(), (FuseProjections(), CacheKV())])
def test_a_changed_weight_is_no_reassociation(after: tuple[Pass, ...]) -> None:
    with pytest.raises(PassError, match=r"^ZeroWeight\(\) declares reassociates.*layer 2 \(mlp.down_proj\)"):
        check_effects(SDAR.graph, recipe(PackRows(), *after, ZeroWeight()))


def test_an_approximate_pass_is_held_to_its_identity() -> None:
    check_effects(SDAR.graph, recipe(PackRows(), Promised(by=3.0)))
    with pytest.raises(PassError, match=r"^Promised\(by=1\.01, .*declares approximate, .* its identity, but logits"):
        check_effects(SDAR.graph, recipe(PackRows(), Promised(by=3.0, identity_by=1.01)))
    with pytest.raises(PassError, match=r"^Hopeless\(.*no setting at which it changes nothing.*method `identity`"):
        check_effects(SDAR.graph, recipe(PackRows(), Hopeless()))


def test_a_pass_that_leaves_nothing_to_compare_is_refused() -> None:
    with pytest.raises(PassError, match=r"Rename\(\) declares exact, but leaves no output or cache that was there"):
        check_effects(SDAR.graph, recipe(PackRows(), Rename()))


def test_the_check_of_the_kit_fails_as_a_test_does() -> None:
    with pytest.raises(AssertionError, match=r"^sdar: Scale"):
        check_effects_of(SDAR, recipe(PackRows(), Scale()), {})


def test_a_graph_of_a_rank_is_refused() -> None:
    graph = SDAR.graph.copy()
    dgraph.passes.run_passes(graph, [ShardTensorParallel(1)])
    with pytest.raises(InputError, match="on one process"):
        check_effects(graph, recipe(PackRows()))


def test_optimize_checks_where_it_is_asked_to(model: dgraph.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = dgraph.recipe("dense", model.spec)
    phases = [
        replace(phase, passes=(*phase.passes, Scale())) if phase.name == "step" else phase for phase in dense.phases
    ]
    wrong = replace(dense, name="wrong", phases=tuple(phases))
    dgraph.optimize(model, wrong, backend="eager")
    with pytest.raises(PassError, match=r"^Scale"):
        dgraph.optimize(model, wrong, backend="eager", check="numerics")
    monkeypatch.setenv("DGRAPH_CHECK", "numerics")
    with pytest.raises(PassError, match=r"^Scale"):
        dgraph.optimize(model, wrong, backend="eager")
    dgraph.optimize(model, wrong, backend="eager", check="")
    monkeypatch.setenv("DGRAPH_CHECK", "numeric")
    with pytest.raises(UnknownName, match=r"check \(DGRAPH_CHECK\) 'numeric'\. Did you mean 'numerics'"):
        dgraph.Compilation()


def test_weights_in_bfloat16_are_checked_within_their_rounding(captured: Graph) -> None:
    graph = captured.copy()
    graph.tensors = {name: tensor.bfloat16().to(tensor.dtype) for name, tensor in graph.tensors.items()}
    assert graph.tensors["lm_head.weight"].dtype == torch.float32
    check_effects(graph, recipe(PackRows(), FuseProjections(), CacheKV()))

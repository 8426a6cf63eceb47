"""DyLLM's gate in combinations: limits in which it changes nothing, how they run, where its passes fire, refusals."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

import dgraph
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.errors import InputError, PassError, UnknownName
from dgraph.ir.graph import Graph
from dgraph.passes import PartialAttention, QuantizeWeights
from dgraph.passes.base import Report
from dgraph.recipes import RECIPES, GateOptions, MaskKVKeys, build, check_recipe
from dgraph.recipes.compose import role_of
from dgraph.recipes.dyllm import ResponseRows
from dgraph.runtime.decoding import Decoding
from dgraph.testing import models, prompts
from dgraph.text.explain import explain
from dgraph.text.writer import dump
from tests.amounts import every_value, first_cases
from tests.engine.alone import check_as_alone
from tests.golden_files import check_golden
from tests.models.two_modes import CONFIGS, prompts_of
from tests.models.two_modes import setup_of as two_modes
from tests.oracle.models import mask_id, random_weights, tiny_config, to_transformers
from tests.recipes import bidirectional, block_causal, block_dyllm, test_focus_two_modes
from tests.recipes.test_sparse import long_prompts
from tests.tiny import tiny_spec

ALL = 999
Named = tuple[str, dict[str, Any]]
FORMS = tuple(test_focus_two_modes.FORMS)
TWO_MODES = (*FORMS, *CONFIGS)
FAST: Named = ("fast_dllm", {"first": "policy"})
DENSE: Named = ("dense", {})
RIGID = {"alpha": math.inf, "block_cache": "off"}


@dataclass(frozen=True, kw_only=True)
class ResponseKeys(MaskKVKeys, ResponseRows):
    """MaskKV's keys, and the rows of DyLLM without its gate."""

    name = "maskkv+response"


def maker(family: str) -> Callable[..., CompiledModel]:
    """Makes the recipe of a name and options for a tiny model, op by op."""
    if family in block_dyllm.FAMILIES:
        return lambda name, **given: block_causal.optimized(block_dyllm.setup_of(family), name, **given)
    if family in FORMS:
        return lambda name, **given: block_causal.optimized(test_focus_two_modes.setup_of(family), name, **given)
    if family in CONFIGS:
        return two_modes(family).optimized
    return lambda name, **given: bidirectional.setup_of(family).optimized(name, 16, **given)


def settings_of(family: str) -> dict[str, Any]:
    if family in CONFIGS:
        return {"input_ids": prompts_of(two_modes(family), (3, 13, 16)), "max_new_tokens": 19, "threshold": 0.1}
    return {"input_ids": long_prompts(), "max_new_tokens": 21, "threshold": 0.7}


# -- limits -------------------------------------------------------------------------------------------------------

CANVAS: list[tuple[Named, Named]] = [
    (("dyllm+focus", {}), ("focus", {})),
    (("dyllm+fast_dllm", {"every": 3}), ("fast_dllm", {"every": 3})),
    (("dllm_serve+dyllm", {}), ("dllm_serve", {})),
    (("sparse_dllm+dyllm", {"ratio": 0.3}), ("sparse_dllm", {"ratio": 0.3})),
    (("dllm_serve+dyllm+focus", {}), ("dllm_serve+focus", {})),
    (("maskkv+dyllm+focus", {"pairs": 6}), ("maskkv+focus", {"pairs": 6})),
    (("dyllm+fast_dllm", {"every": 1, "first": "policy"}), DENSE),
    (("dyllm+focus", RIGID), FAST),
    (("dllm_serve+dyllm", {"every": 1, "first": "policy"}), DENSE),
    (("sparse_dllm+dyllm", {"ratio": 1.0, "delay": 0}), FAST),
    (("maskkv+dyllm", {"pairs": ALL, "response_only_period": 1}), DENSE),
    (("dllm_serve+dyllm+focus", {"ratio": 1.0, "delay": 0, **RIGID}), FAST),
    (("maskkv+dyllm+focus", {"pairs": ALL, **RIGID}), FAST),
]
"""A combination, and the recipe that it is with tau above 1: the same without the gate, or one that drops nothing."""

BLOCKS: list[tuple[Named, Named]] = [
    (("dyllm+focus", {}), ("focus", {})),
    (("dllm_serve+dyllm", {}), ("dllm_serve", {})),
    (("sparse_dllm+dyllm", {"ratio": 0.3}), ("sparse_dllm", {"ratio": 0.3})),
    (("maskkv+dyllm", {"pairs": 6}), ("maskkv", {"pairs": 6})),
    (("dllm_serve+dyllm+focus", {}), ("dllm_serve+focus", {})),
    (("maskkv+dyllm+focus", {"pairs": 6}), ("maskkv+focus", {"pairs": 6})),
    (("dyllm+focus", RIGID), DENSE),
    (("maskkv+dyllm", {"pairs": ALL}), DENSE),
    (("dllm_serve+dyllm+focus", {"ratio": 1.0, **RIGID}), DENSE),
    (("maskkv+dyllm+focus", {"pairs": ALL, **RIGID}), DENSE),
]
ENCODED = [limit for limit in BLOCKS if "focus" not in limit[0][0] or limit[1] is DENSE]
"""A full step evicts nothing, and on a model of two modes FOCUS has no such step of its own."""


def check_limit(family: str, combination: Named, limit: Named) -> None:
    """The same tokens in the same steps over the same rows, all of which are salient."""
    (name, options), (other, given) = combination, limit
    got = maker(family)(name, tau=2.0, **options).generate(**settings_of(family))
    want = maker(family)(other, **given).generate(**settings_of(family))
    assert got.token_ids == want.token_ids
    assert got.stats.sequence_steps == want.stats.sequence_steps
    assert got.stats.sequence_rows == want.stats.sequence_rows
    forwarded = sum(rows for stage, rows in got.stats.rows.items() if stage not in ("prefill", "suffix"))
    assert sum(layers[0] for layers in got.stats.salient) == forwarded


@every_value(("family", bidirectional.FAMILIES), ("combination, limit", CANVAS))
def test_lossless_limits_of_a_canvas(family: str, combination: Named, limit: Named) -> None:
    check_limit(family, combination, limit)


@every_value(("family", block_dyllm.FAMILIES), ("combination, limit", BLOCKS))
def test_lossless_limits_in_blocks(family: str, combination: Named, limit: Named) -> None:
    check_limit(family, combination, limit)


@every_value(("family", TWO_MODES), ("combination, limit", ENCODED))
def test_lossless_limits_of_models_of_two_modes(family: str, combination: Named, limit: Named) -> None:
    check_limit(family, combination, limit)


@first_cases(
    2,
    "family, name, kind",
    [
        ("sdar", "dllm_serve+dyllm+focus", "int8"),
        ("llada", "maskkv+dyllm+focus", "fp8"),
        ("llada", "dllm_serve+dyllm", "int8"),
        ("dream", "dyllm+fast_dllm", "fp8"),
    ],
)
def test_lossless_limits_with_quantised_weights(family: str, name: str, kind: str) -> None:
    """And activations; with the gate a batch gives what each prompt gives alone."""
    (plain,) = models(None, family)
    tiny = plain.quantised(QuantizeWeights(kind, activations=True))
    options: dict[str, Any] = {"pairs": 4} if "maskkv" in name else {}
    settings: dict[str, Any] = {"max_new_tokens": 21, "threshold": 0.3}
    ungated = "+".join(part for part in name.split("+") if part != "dyllm")
    found = [
        tiny.optimized(each, **options, **given).generate(input_ids=prompts(tiny), **settings)
        for each, given in ((name, {"tau": 2.0}), (ungated, {}))
    ]
    assert found[0].token_ids == found[1].token_ids
    run = tiny.optimized(name, tau=0.8, **options)
    alone = [run.generate(input_ids=[prompt], **settings).token_ids[0] for prompt in prompts(tiny)]
    assert run.generate(input_ids=prompts(tiny), **settings).token_ids == alone


@pytest.mark.parametrize("family", bidirectional.FAMILIES)
def test_without_its_gate_maskkv_keeps_keys_for_the_rows_of_dyllm(family: str) -> None:
    """`maskkv` itself takes results of rows from earlier steps, so the rows are those of the gate's recipe."""
    setup = bidirectional.setup_of(family)
    plain = dgraph.optimize(setup.model, ResponseKeys(pairs=6), backend="eager")
    gated = dgraph.optimize(setup.model, "maskkv+dyllm", backend="eager", pairs=6, tau=2.0, full_steps=1)
    want, got = (made.generate(**settings_of(family)) for made in (plain, gated))
    assert got.token_ids == want.token_ids
    assert got.stats.sequence_steps == want.stats.sequence_steps


@pytest.mark.release
@pytest.mark.parametrize(("family", "name"), [("sdar", "dllm_serve+dyllm+focus"), ("llada", "maskkv+dyllm+focus")])
def test_compiled_it_is_what_it_is_op_by_op(family: str, name: str) -> None:
    made = maker(family)
    found = [made(name, backend=each, buckets="hybrid", tau=0.8) for each in ("inductor", "eager")]
    compiled, eager = (run.generate(**settings_of(family)) for run in found)
    assert compiled.token_ids == eager.token_ids
    assert compiled.stats.salient == eager.stats.salient


# -- how they run -------------------------------------------------------------------------------------------------

COMBINATIONS: list[Named] = [
    ("dyllm+focus", {}),
    ("dllm_serve+dyllm+focus", {}),
    ("maskkv+dyllm+focus", {"pairs": 6}),
    ("dllm_serve+dyllm", {}),
    ("sparse_dllm+dyllm", {}),
    ("maskkv+dyllm", {"pairs": 6}),
]
EVERY = [
    (family, *each) for family in ("sdar", "llada", "shift", "dream", "nemotron", "llada2") for each in COMBINATIONS
]
AT_ONCE = [*EVERY[::7], *(case for n, case in enumerate(EVERY) if n % 7), ("llada", "dyllm+fast_dllm", {})]
"""Every combination and every kind of model once, then the others."""


@first_cases(6, "family, name, options", AT_ONCE)
def test_a_batch_and_an_engine_give_what_each_request_gets_alone(
    family: str, name: str, options: dict[str, Any]
) -> None:
    """The engine has more requests than slots, over few pages."""
    run, settings = maker(family)(name, tau=0.8, **options), settings_of(family)
    prompts, new = settings["input_ids"], settings["max_new_tokens"]
    rules: list[dict[str, Any]] = [{"threshold": settings["threshold"]}, {"steps": 3}]
    decodings = [Decoding(max_new_tokens=new, **rules[i % 2]) for i in range(len(prompts))]
    check_as_alone(run, prompts, decodings, pages=14, max_sequences=2, max_tokens=96, max_mixed_rows=16)
    alone = [run.generate(input_ids=[prompt], max_new_tokens=new, **rules[0]) for prompt in prompts]
    together = run.generate(**settings)
    assert together.token_ids == [one.token_ids[0] for one in alone]
    assert together.stats.sequence_rows == [one.stats.sequence_rows[0] for one in alone]
    salient = [sum(map(sum, one.stats.salient)) for one in (together, *alone)]
    assert salient[0] == sum(salient[1:])


# -- where the passes fire ----------------------------------------------------------------------------------------

LAYERS = [0, 1, 2]
READ = r"dgraph\.importance also reads \w+, for all rows"
MASKED = "it runs on masked rows alone; in the next block they are others, of which nothing was kept"
FIRED: list[tuple[str, str, str, dict[str, list[int]], dict[str, dict[int, str]]]] = [
    ("llada", "dyllm+fast_dllm", "step", {"GateFFN": [0, 1], "PartialAttention": LAYERS}, {"GateFFN": {2: MASKED}}),
    (
        "llada",
        "dyllm+focus",
        "step",
        {"EvictTokens": [1], "GateFFN": [0, 1], "PartialAttention": [2]},
        {"GateFFN": {2: MASKED}, "PartialAttention": {0: READ, 1: READ}},
    ),
    *(
        (family, name, phase, {**dict.fromkeys(("GateFFN", "PartialAttention", "SparseKV"), LAYERS)}, {})
        for family, name in (("llada", "dllm_serve+dyllm"), ("llada", "maskkv+dyllm"), ("sdar", "sparse_dllm+dyllm"))
        for phase in ("select", "step")
    ),
    *(
        (
            family,
            name,
            phase,
            {"EvictTokens": [1], "GateFFN": LAYERS, "PartialAttention": [2], "SparseKV": LAYERS},
            {"PartialAttention": {0: READ, 1: READ}},
        )
        for family, name in (("llada", "maskkv+dyllm+focus"), ("sdar", "dllm_serve+dyllm+focus"))
        for phase in ("select", "step")
    ),
    ("sdar", "dllm_serve+dyllm+focus", "prefill", {"CacheKV": LAYERS}, {}),
]


def captured(family: str) -> Graph:
    made = block_dyllm.setup_of(family) if family in block_dyllm.FAMILIES else bidirectional.setup_of(family)
    return made.graph


def small() -> Graph:
    """Of two layers, both of which FOCUS reads."""
    config = tiny_config(layers=2)
    model = to_transformers(config, random_weights(config, seed=3))
    return dgraph.capture(dgraph.adopt(model, mask_id=mask_id(config), block_length=16))


def rewritten(family: str, name: str, phase: str) -> tuple[Graph, dict[str, Report]]:
    graph = captured(family)
    found = dgraph.rewrite(graph, build(RECIPES, name, graph.spec, {}))[phase]
    return found.graph, {report.name: report for report in found.reports}


def test_an_eviction_may_leave_a_small_model_no_layer_for_partial_attention() -> None:
    """Networks are gated, and the report says why keys and values of all rows are projected."""
    for name, optional in (("dyllm+focus", True), ("dllm_serve+dyllm+focus", True), ("dllm_serve+dyllm", False)):
        step = build(RECIPES, name, BLOCK_SPEC, {}).phase("step")
        assert ("PartialAttention" in step.optional) == optional
        assert "GateFFN" not in step.optional
    assert "PartialAttention" not in build(RECIPES, "dyllm+focus", BLOCK_SPEC, {"gate": False}).phase("step").optional
    with pytest.raises(PassError, match=r"PartialAttention\(.* applied nowhere"):
        dgraph.rewrite(small(), build(RECIPES, "dyllm+focus", BLOCK_SPEC, {"gate": False}))
    reports = {
        r.name: r for r in dgraph.rewrite(small(), build(RECIPES, "dyllm+focus", BLOCK_SPEC, {}))["step"].reports
    }
    assert [a.layer for a in reports["GateFFN"].applied] == [0, 1]
    assert [s.layer for s in reports["PartialAttention"].skipped] == [0, 1]


def test_an_explanation_names_all_three_parts() -> None:
    graph = captured("sdar")
    recipe = build(RECIPES, "dllm_serve+dyllm+focus", graph.spec, {})
    found = explain(dgraph.rewrite(graph, recipe), recipe)
    assert {*found.stages} == {"prefill", "select", "step"}
    prefix, suffix = found.stages["step"]
    assert (prefix.calls["dgraph.importance"], suffix.calls["dgraph.sparse_attention"]) == (2, 2)
    text = str(found)
    for said in ("top of delta", "of the feed-forward network on salient rows in layers 0..2", "block, kv_pack"):
        assert said in text
    assert re.search(READ.replace(r"\w+", r"\S+"), text)


@pytest.mark.parametrize(("family", "name", "phase", "fired", "left"), FIRED)
def test_layers_where_each_pass_fires_and_why_not_in_others(
    family: str, name: str, phase: str, fired: dict[str, list[int]], left: dict[str, dict[int, str]]
) -> None:
    """Importance reads keys of all rows in layers 0 and 1; where no keys are selected, the last layer is of masks."""
    graph, reports = rewritten(family, name, phase)
    for each in ("EvictTokens", "GateFFN", "PartialAttention", "SparseKV"):
        report = reports.get(each)
        applied = [] if report is None else [a.layer for a in report.applied]
        assert applied == fired.get(each, []), each
        skipped = {} if report is None else {s.layer: s.reason for s in report.skipped}
        assert skipped.keys() == left.get(each, {}).keys(), each
        assert all(re.fullmatch(left[each][layer], reason) for layer, reason in skipped.items()), skipped
    gates, selected = fired.get("GateFFN", []), fired.get("SparseKV", [])
    assert [node.meta["layer"] for node in graph.find("drift")] == gates
    assert [node.meta["layer"] for node in graph.find("feature_take")] == gates
    assert len(graph.find("importance")) == 2 * ("EvictTokens" in fired)
    assert len(graph.find("kv_pack")) == len(selected) * (phase == "select")
    assert [node.meta["layer"] for node in graph.find("sparse_attention")] == selected


@pytest.mark.parametrize(("family", "name"), [("sdar", "dllm_serve+dyllm+focus"), ("llada", "maskkv+dyllm+focus")])
def test_dumps_of_three_parts(family: str, name: str) -> None:
    for phase in ("select", "step"):
        check_golden(f"{family}_{name.replace('+', '_')}_{phase}.txt", dump(rewritten(family, name, phase)[0]))


# -- refusals -----------------------------------------------------------------------------------------------------

CANVAS_SPEC, BLOCK_SPEC = tiny_spec(attention="bidirectional"), tiny_spec()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "dyllm+dllm_cache",
            r"'dllm_cache' reuses .*, so no gate goes with it\. Combine 'dyllm' with a recipe that runs",
        ),
        ("maskkv+dyllm+dllm_cache", r"'dllm_cache' reuses .* already, so no gate goes with it"),
        ("focus+dyllm", r"at most one that gates rows in the layers.*; write 'dyllm\+focus'"),
        ("focus+dyllm+dllm_serve", r"; write 'dllm_serve\+dyllm\+focus'"),
        ("dyllm+maskkv", r"; write 'maskkv\+dyllm'"),
        (
            "dyllm+dyllm",
            r"'dyllm\+dyllm': a combination has at most one part that selects keys.*Leave out all but one of 'dyllm'",
        ),
        ("dyllm+dyllm+focus", r"at most one that gates rows in the layers.*Leave out all but one of 'dyllm', 'dyllm'"),
        ("maskkv+dllm_serve+dyllm", r"Leave out all but one of 'maskkv', 'dllm_serve'"),
    ],
)
def test_parts_that_do_not_go_together(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_recipe(RECIPES, name, {})


def test_unknown_parts() -> None:
    with pytest.raises(UnknownName, match=r"unknown part of a recipe 'dylm'\. Did you mean 'dyllm'"):
        build(RECIPES, "dllm_serve+dylm+focus", CANVAS_SPEC, {})


@pytest.mark.parametrize(
    ("name", "missed"),
    [
        ("dllm_serve+dyllm", "drops keys"),
        ("maskkv+dyllm", "drops keys"),
        ("dyllm+focus", "evicts rows"),
        ("dyllm+fast_dllm", "forwards a part of the response"),
        ("dyllm+dkv_cache", "skips decoded rows"),
    ],
)
def test_contexts_are_not_updated_by_steps_that_leave_something_out(name: str, missed: str) -> None:
    """By default they are not, and with `update` the recipe says how to go on."""
    spec = CANVAS_SPEC
    assert PartialAttention(0.99, update=False) in build(RECIPES, name, spec, {}).phase("step").passes
    with pytest.raises(InputError, match=rf"{re.escape(name)}: the gate carries .*{missed}.*update=False"):
        build(RECIPES, name, spec, {"update": True})


def test_steps_of_the_rows_stay_whole_when_they_are_without_the_gate() -> None:
    """An option that the gate shares with the rows has their default."""
    for name in ("dkv_cache", "vicinity", "fast_dllm", "focus", "dense"):
        plain, gated = (build(RECIPES, each, CANVAS_SPEC, {}).plan for each in (name, f"dyllm+{name}"))
        assert plain is not None
        assert gated == replace(plain, schedule=plain.schedule.sparing(1)), name


def test_every_listed_combination_is_one_of_parts_in_order() -> None:
    for name, builder in RECIPES.items():
        roles = [role_of(RECIPES[part].options) for part in name.split("+")]
        assert sorted(set(roles)) == roles
        assert issubclass(builder.options, GateOptions) == (1 in roles), name
    assert {"dllm_serve+dyllm+focus", "maskkv+dyllm+focus", "dyllm+vicinity"} < set(RECIPES)

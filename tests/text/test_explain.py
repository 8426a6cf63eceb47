"""Explanations: what applied where, what was skipped and why, stages, regions; nothing is compiled for them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from string import ascii_uppercase

import pytest
import torch

import dgraph
from dgraph.errors import InputError, UnknownName
from dgraph.ir.graph import Graph
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.regions import RegionCompiler
from dgraph.passes import Effect, Pass, QuantizeWeights, Report
from dgraph.recipes import RECIPES, Phase, Recipe, build
from dgraph.text.explain import Explanation, explain
from dgraph.text.views import explain as explain_view
from tests.tiny import rewritten


@pytest.fixture(scope="module")
def focus(captured: Graph) -> Explanation:
    recipe = build(RECIPES, "focus", captured.spec, {"alpha": float("inf")})
    return explain(dgraph.rewrite(captured, recipe), recipe)


def test_passes_say_where_they_applied(focus: Explanation) -> None:
    text = str(focus)
    assert "phase prefill" in text
    assert "phase step" in text
    assert "attention -> packed_attention in layers 0..3" in text
    assert "gate_proj+up_proj in layers 0..3" in text
    assert "values carried across the cut in layer 1\n" in text
    for name, effect in (("PackRows", "exact"), ("FuseProjections", "reassociates"), ("EvictTokens", "approximate")):
        # The tables of phases are as wide as the longest time in them.
        (line,) = {" ".join(line.split()) for line in text.splitlines() if line.startswith(f"  {name} ")}
        assert effect in line
        assert " -> " in line


def test_stages_and_their_row_sets(focus: Explanation) -> None:
    (only,) = focus.stages["prefill"]
    prefix, suffix = focus.stages["step"]
    assert (only.name, only.rows, only.cut) == ("step", "N", "")
    assert (prefix.name, prefix.rows, prefix.cut) == ("prefix", "N", "dgraph.keep_index")
    assert (suffix.name, suffix.rows, suffix.cut) == ("suffix", "K", "")
    assert only.calls == {"dgraph.kv_write": 4, "dgraph.paged_attention": 3}
    assert prefix.calls["dgraph.importance"] == 2
    assert suffix.calls["dgraph.lm_head"] == 1
    assert suffix.calls["dgraph.paged_attention"] == 3


@pytest.mark.parametrize("weights", [None, "int8"])
def test_regions_are_those_that_are_compiled(captured: Graph, focus: Explanation, weights: str | None) -> None:
    phases = dgraph.rewrite(rewritten(captured, QuantizeWeights(weights, activations=bool(weights))), focus.recipe)
    found, compiler = explain(phases, focus.recipe), RegionCompiler("eager")
    for phase in phases.values():
        LoweredProgram(phase.graph, compiler, Buckets())
    assert len(found.regions) == len(compiler._functions)
    assert sum(r.uses for r in found.regions) == len(compiler._functions) + compiler.reused
    assert [r.name for r in found.regions] == list(ascii_uppercase)[: len(found.regions)]
    assert {"sub", "lt", "masked_fill"} in [set(r.ops) for r in found.regions if r.compiled], "of the eviction"
    used = sum(n for stages in found.stages.values() for s in stages for n in s.regions.values())
    assert used == sum(r.uses for r in found.regions)
    assert any("quantise_rows" in op for region in found.regions for op in region.ops) == bool(weights)


def test_json_of_an_explanation(focus: Explanation) -> None:
    data = json.loads(json.dumps(focus.to_json(), allow_nan=False))
    assert data["recipe"]["recipe"] == "focus"
    assert data["buckets"] == "exact"
    assert [p["phase"] for p in data["phases"]] == ["prefill", "step"]
    evict = next(p for p in data["phases"][1]["passes"] if p["pass"] == "EvictTokens")
    assert evict["effect"] == "approximate"
    assert [a["layer"] for a in evict["applied"]] == [1]
    assert set(evict["seconds"]) == {"rewrite", "verify"}
    assert [s["rows"] for s in data["phases"][1]["stages"]] == ["N", "K"]
    assert {"region", "ops", "uses", "compiled"} == set(data["regions"][0])


@dataclass(frozen=True)
class Hesitate(Pass):
    """Applies nowhere, and says why."""

    effect = Effect.EXACT
    summary = "does nothing"

    def run(self, graph: Graph, report: Report) -> None:
        for node in graph.find("rms_norm"):
            if node.meta["layer"] is not None:
                report.skip("too cold", node)


def test_near_misses_are_listed_with_their_reason(captured: Graph) -> None:
    dense = build(RECIPES, "dense", captured.spec, {})
    step = Phase("step", (*dense.phase("step").passes, Hesitate()), frozenset({"Hesitate"}))
    recipe = Recipe("hesitant", 1, (dense.phase("prefill"), step))
    text = str(explain_view(captured, recipe))
    assert "not: too cold in layers 0..3" in text


def test_nothing_is_compiled(captured: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor, "standalone_compile", lambda *_, **__: pytest.fail("compiled"))
    assert "hybrid: row counts are padded, 10 to 16, 100 to 128, 1000 to 1024" in str(
        explain_view(captured, "focus", "hybrid")
    )
    assert "[8, 16]: row counts are padded, 10 to 16, 100 to 112" in str(explain_view(captured, "focus", [16, 8]))


def test_bad_input(captured: Graph) -> None:
    with pytest.raises(UnknownName, match="unknown recipe 'captured'"):
        explain_view(captured, "captured")
    with pytest.raises(InputError, match="buckets must be"):
        explain_view(captured, "focus", "some")
    with pytest.raises(InputError, match="alpha must be at least 1"):
        explain_view(captured, "focus", alpha=0.5)


def test_a_pass_says_what_it_made_and_the_memory_of_its_inputs(focus: Explanation, captured: Graph) -> None:
    reports = {report.name: report for report in focus.reports["step"]}
    packed, cached, evicted = reports["PackRows"], reports["CacheKV"], reports["EvictTokens"]
    for report in reports.values():
        assert report.nodes[1] - report.nodes[0] == report.made - report.removed
    assert packed.made
    assert packed.removed
    spec = captured.spec
    assert cached.memory == {
        "position": 2 * spec.layers * spec.kv_heads * spec.head_dim * 4,
        "sequence x P": 4,
    }
    assert {"reached", "block_step"} & {one.name for one in evicted.inputs}
    line = f"new inputs: 4 B per sequence x P, {cached.memory['position']:,} B per position"
    assert line in str(focus)
    assert f"+{cached.made} -{cached.removed}" in str(focus)
    (found,) = (p for p in focus.to_json()["phases"][1]["passes"] if p["pass"] == "CacheKV")
    assert (found["nodes_made"], found["input_bytes"]) == (cached.made, cached.memory)

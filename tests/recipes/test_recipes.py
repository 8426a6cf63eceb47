"""Recipes as values: which passes make which phase, JSON, equality, unknown names, options out of range."""

from __future__ import annotations

import gc
import json
import math
import re
import weakref
from dataclasses import FrozenInstanceError, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

import dgraph
from dgraph.errors import DgraphWarning, InputError, PassError, UnknownName
from dgraph.ir.graph import Graph
from dgraph.passes import (
    PASSES,
    BoundRows,
    CacheKV,
    ChunkLMHead,
    CountRows,
    EvictTokens,
    FuseGLU,
    FuseProjections,
    OnlyKV,
    PackRows,
    SlotKV,
)
from dgraph.passes.base import Effect, Pass, Report, pass_from_json
from dgraph.plans import papers
from dgraph.plans.papers import OURS, Paper
from dgraph.recipes import (
    RECIPES,
    Ablation,
    Builder,
    Cost,
    Focus,
    MaskKVKeys,
    Phase,
    Recipe,
    build,
    caching,
    costing,
    costs_of,
    options_of,
)
from dgraph.recipes.options import documented
from dgraph.runtime.policies import POLICIES
from dgraph.spec import ModelSpec
from tests.tiny import tiny_spec

SPEC = tiny_spec(layers=4)


def recipe(name: str, **options: Any) -> Recipe:
    return build(RECIPES, name, SPEC, options)


def test_dense_is_the_cached_forward_with_a_chunked_head() -> None:
    cached = (PackRows(), FuseProjections(), CacheKV())
    dense = recipe("dense")
    assert dense.phase("prefill").passes == (*cached, OnlyKV())
    assert dense.phase("step").passes == (*cached, ChunkLMHead(2048))
    assert (dense.name, dense.block_cache, dense.recommit) == ("dense", "off", True)
    assert [p.name for p in dense.phases] == ["prefill", "step"]


def test_focus_is_dense_with_an_eviction() -> None:
    dense, focus = recipe("dense"), recipe("focus")
    assert focus.phase("prefill") == dense.phase("prefill")
    *cached, head = dense.phase("step").passes
    assert focus.phase("step").passes == (*cached, EvictTokens(alpha=1.5, after=1, full_steps=1), head)
    assert (focus.block_cache, focus.recommit) == ("dc+", True)


def test_options_reach_their_pass() -> None:
    of_pass = {"after": 2, "signal": "importance", "select": "bottom", "keep": 4}
    ablation = Ablation(**of_pass, signal_pool=5)
    focus = recipe("focus", alpha=2.0, ablation=ablation, full_steps=0, among="block", max_num_logits=7)
    evict, head = focus.phase("step").passes[-2:]
    assert evict == EvictTokens(alpha=2.0, **of_pass, pool=5, average_over="sequence", among="block")
    for options, over in (({}, "block"), ({"average_over": "sequence"}, "sequence"), ({"full_steps": 2}, "block")):
        assert recipe("focus", **options).phase("step").passes[-2].average_over == over
    assert recipe("focus", full_steps=0, average_over="block").phase("step").passes[-2].average_over == "block"
    assert head == ChunkLMHead(7)
    counted = recipe("focus", count="device").phase("step")
    assert counted.passes == (*recipe("focus").phase("step").passes, CountRows(), FuseGLU(), BoundRows())
    assert counted.optional == {"FuseProjections", "FuseGLU", "BoundRows"}
    assert recipe("focus").phase("step").optional == {"FuseProjections"}
    loop = recipe("focus", block_cache="dc", recommit=False)
    assert (loop.block_cache, loop.recommit) == ("dc", False)
    assert recipe("dense", block_cache="dc+", max_num_logits=9).phase("step").passes[-1] == ChunkLMHead(9)


def test_options_and_their_defaults() -> None:
    assert options_of(RECIPES["dense"]) == {
        "block_cache": "off",
        "recommit": True,
        "rings": True,
        "max_num_logits": None,
        "kv_dtype": None,
    }
    focus = {
        "alpha": 1.5,
        "ablation": Ablation(),
        "full_steps": None,
        "average_over": None,
        "among": "candidates",
        "block_cache": "dc+",
        "recommit": True,
        "count": "host",
        "max_num_logits": None,
        "kv_dtype": None,
    }
    assert {option.name: option.default for option in RECIPES["focus"].listed} == focus
    former = dict.fromkeys(("signal", "select", "keep", "signal_pool", "after"))
    assert options_of(RECIPES["focus"]) == {**focus, **former}
    for name, builder in RECIPES.items():
        if "+" in name:
            parts = [options_of(RECIPES[part]) for part in name.split("+")]
            assert options_of(builder).items() <= {k: v for part in parts for k, v in part.items()}.items(), name
        assert [option.name for option in builder.accepted if not option.doc] == [], name


def test_an_entry_of_several_names_is_that_of_each() -> None:
    def several() -> None:
        """Do it.

        Args:
            heads, kv_heads: sizes, of
                most layers.
            scale: a factor: 1 for none.

        Raises:
            InputError: no.
        """

    assert documented(several.__doc__ or "") == {
        "heads": "sizes, of most layers.",
        "kv_heads": "sizes, of most layers.",
        "scale": "a factor: 1 for none.",
    }


def test_a_step_keeps_2048_rows_of_logits_unless_an_option_says_otherwise() -> None:
    assert (recipe("dense").logit_rows, recipe("dense", max_num_logits=9).logit_rows) == (2048, 9)


def test_options_are_a_recipe_too() -> None:
    assert build(RECIPES, Focus(alpha=2.0, kv_dtype="fp8"), SPEC, {}) == recipe("focus", alpha=2.0, kv_dtype="fp8")
    assert RECIPES["focus"](SPEC, alpha=2.0) == recipe("focus", alpha=2.0)
    assert Focus(alpha=2.0) == Focus(alpha=2.0) != Focus()
    with pytest.raises(InputError, match="options alpha were given beside a finished recipe"):
        build(RECIPES, Focus(), SPEC, {"alpha": 2.0})
    with pytest.raises(InputError, match=r"ablation must be a dgraph.recipes.Ablation, got 'delta'"):
        Focus(ablation="delta")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "former", "now"),
    [
        ("focus", {"signal": "importance", "after": 2}, {"ablation": Ablation(signal="importance", after=2)}),
        ("focus", {"select": "random", "keep": 4}, {"ablation": Ablation(select="random", keep=4)}),
        ("focus", {"signal_pool": 5, "ablation": Ablation(after=2)}, {"ablation": Ablation(signal_pool=5, after=2)}),
        ("maskkv+focus", {"after": 2}, {"ablation": Ablation(after=2)}),
    ],
)
def test_former_options_still_work(name: str, former: dict[str, Any], now: dict[str, Any]) -> None:
    old = [option for option in former if option != "ablation"]
    with pytest.warns(DgraphWarning) as told:
        assert recipe(name, **former) == recipe(name, **now)
    said = " ".join(str(each.message) for each in told)
    assert all(f"the option {option!r} goes with version 0.3" in said for option in old)


@pytest.mark.parametrize(("name", "options"), [("fast_dllm", {}), ("dllm_serve", {"delay": 1}), ("sparse_dllm", {})])
def test_the_family_decides_the_first_commit_of_a_block(name: str, options: dict[str, int]) -> None:
    for shift, family, other in ((0, "policy", "position"), (1, "position", "policy")):
        spec = replace(SPEC, attention="bidirectional", logit_shift=shift)
        made = build(RECIPES, name, spec, options)
        assert made.plan is not None
        assert made.plan.first == family
        for first, expected in ((other, other), ("published", family)):
            with pytest.warns(DgraphWarning, match="leave it out, the model's family decides it"):
                plan = build(RECIPES, name, spec, {"first": first, **options}).plan
            assert plan is not None
            assert plan.first == expected


def test_former_builder_functions_still_work() -> None:
    from dgraph.recipes import bidirectional, sparse

    with pytest.warns(DgraphWarning, match=r"fast_dllm goes with version 0\.3; use dgraph\.recipes\.FastDLLM"):
        old = bidirectional.fast_dllm
    spec = replace(SPEC, attention="bidirectional")
    assert old(spec, cache="prefix") == build(RECIPES, "fast_dllm", spec, {"cache": "prefix"})
    with pytest.raises(AttributeError):
        sparse.fast_dllm  # noqa: B018
    with pytest.warns(DgraphWarning, match="caching goes with version"):
        assert caching(old) is old
    with pytest.warns(DgraphWarning, match="costing goes with version"):

        @costing(Cost("tiny_sdar", "its tasks", 4, 1.0, None, None, "mine"))
        def mine(spec: ModelSpec) -> Recipe:
            """Mine."""
            return recipe("dense")

    assert costs_of(mine)[0].page == "mine"


def test_every_recipe_and_pass_names_its_papers_or_is_ours() -> None:
    for name, builder in RECIPES.items():
        assert builder.options.papers, name
        assert all(isinstance(paper, Paper) for paper in builder.options.papers), name
    assert RECIPES["maskkv+focus"].options.papers == (*MaskKVKeys.papers, *Focus.papers)
    assert [name for name, step in PASSES.items() if not step.papers] == []
    assert [name for name, rule in POLICIES.items() if not rule.papers] == []
    assert RECIPES["dense"].options.papers == OURS


def test_the_page_of_papers_lists_every_paper() -> None:
    """With its title, and no other under its number."""
    page = (Path(__file__).parents[2] / "docs" / "references.md").read_text()
    listed = {
        number: " ".join(title.split())
        for title, number in re.findall(r"\*([^*]+)\*,\s+\[arXiv ([0-9.]+)\]\(https://arxiv\.org/abs/\2\)", page)
    }
    declared = {paper.arxiv: paper.title for paper in vars(papers).values() if isinstance(paper, Paper) and paper.arxiv}
    assert declared.items() <= listed.items()
    examples = (Path(__file__).parents[2] / "examples" / "methods" / "dgraph_methods").glob("*.py")
    outside = {"2509.24014", "2606.29215"}.union(  # a method in examples, and settings of a decoding
        *(re.findall(r"\b(2\d{3}\.\d{5})\b", file.read_text()) for file in examples)
    )
    assert set(re.findall(r"arxiv\.org/abs/([0-9.]+)", page)) == set(declared) | outside


def test_recipes_do_what_they_declare() -> None:
    """The rows that a step forwards, and values that it carries over."""
    spec = replace(SPEC, attention="bidirectional")
    for name, builder in RECIPES.items():
        if "+" in name:
            continue
        made = builder(spec)
        assert made.plan is not None
        assert made.plan.region.extent is builder.options.extent, name
        carried = {p.carries for phase in made.phases for p in phase.passes} - {""}
        assert carried == {builder.options.carries} - {""}, name
        reused = {p.reuses: None for phase in made.phases for p in phase.passes if p.reuses}
        assert ", and ".join(reused) == builder.options.reuses, name


def test_defaults_say_what_they_cost() -> None:
    """From a page of results that is there and names the recipe; a combination was not measured."""
    pages = Path(__file__).parents[2] / "benchmarks" / "results"
    costs = {name: costs_of(builder) for name, builder in RECIPES.items()}
    measured = {name for name, found in costs.items() if found}
    assert measured == {*RECIPES} - {"dense", *(name for name in RECIPES if "+" in name)}
    for name in measured:
        for cost in costs[name]:
            assert name in (pages / f"{cost.page}.md").read_text().lower(), cost
            assert all((cost.hardware, cost.commit)), cost
            assert date.fromisoformat(cost.date).year == 2026
            assert cost.within is None or cost.within[0] <= cost.points <= cost.within[1]
    assert str(costs["focus"][0]).startswith("+0.0 points (-2.1 to +2.1), 1.11 x the steps: tiny_sdar, 160 prompts of")
    assert str(costs["maskkv"][0]) == "-3.3 points: tiny_llada, 30 prompts of retrieval"


# -- values ------------------------------------------------------------------------------------------------------


def test_a_recipe_is_a_value() -> None:
    assert recipe("focus") == recipe("focus", alpha=1.5)
    assert hash(recipe("focus")) == hash(recipe("focus", alpha=1.5))
    assert recipe("focus") != recipe("focus", alpha=1.6)
    assert recipe("focus") != recipe("focus", recommit=False)
    assert recipe("dense") != recipe("dense", block_cache="dc")
    assert repr(recipe("focus")) == repr(recipe("focus"))
    assert "EvictTokens(alpha=1.5, after=1" in repr(recipe("focus"))
    with pytest.raises(FrozenInstanceError):
        recipe("dense").recommit = False  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        recipe("dense").phases[0].name = "x"  # type: ignore[misc]
    assert replace(recipe("dense"), name="mine") != recipe("dense")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dense", {}),
        ("dense", {"block_cache": "dc", "recommit": False, "max_num_logits": 1}),
        ("focus", {}),
        ("focus", {"alpha": math.inf, "block_cache": "off"}),
        ("focus", {"count": "device"}),
        ("focus", {"alpha": 1.2, "ablation": Ablation("importance", "random", keep=8, after=3)}),
    ],
)
def test_json_says_all_of_a_recipe(name: str, options: dict[str, Any]) -> None:
    value = recipe(name, **options)
    text = json.dumps(value.to_json(), allow_nan=False)
    assert json.loads(text) == value.to_json()
    assert Recipe.from_json(json.loads(text)) == value
    assert value.to_json()["version"] == value.version


@dataclass(frozen=True)
class Scale(Pass):
    """A pass whose configuration has tuples."""

    layers: tuple[int, ...] = ()
    limits: tuple[tuple[float, ...], ...] = ()
    effect = Effect.APPROXIMATE
    summary = "scales"

    def run(self, graph: Graph, report: Report) -> None: ...


def test_a_field_that_is_a_tuple_comes_back_as_one() -> None:
    value = Scale((3, 5), ((0.5, math.inf), ()))
    text = json.dumps(value.to_json(), allow_nan=False)
    assert pass_from_json(json.loads(text), {"Scale": Scale}) == value


def test_a_field_that_may_change_is_refused() -> None:
    with pytest.raises(InputError, match=r"pass Scale: layers must be a value that never changes.*got \[3, 5\]"):
        Phase("step", (Scale([3, 5]),))  # type: ignore[arg-type]


def test_json_that_is_no_recipe_says_what_is_wrong() -> None:
    good = recipe("focus").to_json()
    step = good["phases"][1]

    def with_step(**entry: Any) -> dict[str, Any]:
        return {**good, "phases": [{**step, "passes": [entry]}]}

    with pytest.raises(InputError, match=r"no entry 'phases'"):
        Recipe.from_json({k: v for k, v in good.items() if k != "phases"})
    with pytest.raises(UnknownName, match=r"unknown pass 'EvictToken'. Did you mean 'EvictTokens'"):
        Recipe.from_json(with_step(**{"pass": "EvictToken"}))
    with pytest.raises(UnknownName, match=r"unknown field of pass 'EvictTokens' 'alhpa'. Did you mean 'alpha'"):
        Recipe.from_json(with_step(**{"pass": "EvictTokens", "alhpa": 2.0}))
    with pytest.raises(InputError, match=r"alpha must be at least 1"):
        Recipe.from_json(with_step(**{"pass": "EvictTokens", "alpha": 0.5}))


def test_json_tells_recipes_apart() -> None:
    texts = [
        json.dumps(recipe(name, **options).to_json())
        for name, options in (
            ("dense", {}),
            ("dense", {"block_cache": "dc+"}),
            ("focus", {}),
            ("focus", {"alpha": math.inf}),
            ("focus", {"recommit": False}),
            ("focus", {"ablation": Ablation(keep=4)}),
        )
    ]
    assert len(set(texts)) == len(texts)


# -- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("focsu", {}, r"unknown recipe 'focsu'\. Did you mean 'focus'\? ."),
        ("", {}, r"unknown recipe ''\. Known: dense, dkv_cache, dllm_cache, dllm_serve, "),
        ("focus", {"aplha": 2}, r"unknown option of recipe 'focus' 'aplha'\. Did you mean 'alpha'"),
        ("focus", {"blockcache": "off"}, r"'blockcache'\. Did you mean 'block_cache'"),
        (
            "dense",
            {"alpha": 2},
            r"unknown option of recipe 'dense' 'alpha'\. Known: block_cache, kv_dtype, max_num_logits",
        ),
        ("dense", {"spec": None}, r"unknown option of recipe 'dense' 'spec'"),
    ],
)
def test_unknown_names_have_the_closest_matches(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownName, match=message):
        recipe(name, **options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("focus", {"alpha": 0.5}, r"alpha must be at least 1"),
        ("focus", {"full_steps": "1"}, r"full_steps must be an integer, got '1'"),
        ("focus", {"full_steps": -1}, r"full_steps must be at least 0"),
        ("focus", {"ablation": Ablation(after=0)}, r"after must be a layer of at least 1"),
        ("focus", {"ablation": Ablation(after="1")}, r"after must be an integer, got '1'"),  # type: ignore[arg-type]
        ("focus", {"ablation": Ablation(signal="d")}, r"signal must be one of"),
        ("focus", {"ablation": Ablation(select="3")}, r"select must be one of .*got '3'"),
        ("focus", {"ablation": Ablation(keep=-2)}, r"keep must be 0"),
        ("focus", {"block_cache": "DC"}, r"block_cache must be one of 'off', 'dc', 'dc\+', got 'DC'"),
        ("focus", {"count": "gpu"}, r"count must be one of 'host', 'device', got 'gpu'"),
        ("dense", {"recommit": 1}, r"recommit must be True or False, got 1"),
        ("dense", {"max_num_logits": -5}, r"max_num_logits .*got -5"),
        ("dense", {"max_num_logits": 2.5}, r"max_num_logits .*got 2\.5"),
    ],
)
def test_options_out_of_range(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        recipe(name, **options)


def test_a_pass_is_inserted_into_every_phase_that_runs_the_other_one() -> None:
    dense = recipe("dense")
    made = dense.inserting(SlotKV(), after="CacheKV")
    for phase, before in zip(made.phases, dense.phases, strict=True):
        names = [p.name for p in phase.passes]
        assert names[names.index("CacheKV") + 1] == "SlotKV"
        assert [p for p in phase.passes if p != SlotKV()] == list(before.passes)
    head = dense.inserting(SlotKV(), after="ChunkLMHead")
    assert head.phase("prefill") == dense.phase("prefill") != made.phase("prefill")
    with pytest.raises(UnknownName, match=r"unknown pass of recipe 'dense' 'CachKV'\. Did you mean 'CacheKV'"):
        dense.inserting(SlotKV(), after="CachKV")


def test_an_unknown_phase() -> None:
    with pytest.raises(UnknownName, match=r"unknown phase 'stpe'\. Did you mean 'step'\? Known: prefill, step"):
        recipe("dense").phase("stpe")


# -- rewriting ---------------------------------------------------------------------------------------------------


def test_phases_share_the_work_of_a_common_beginning(captured: Graph) -> None:
    phases = dgraph.rewrite(captured, recipe("focus"))
    prefill, step = phases["prefill"], phases["step"]
    for name in ("PackRows", "FuseProjections", "CacheKV"):
        assert prefill.after(name) is step.after(name)
    assert prefill.graph is prefill.after("OnlyKV")
    assert [r.name for r in step.reports] == ["PackRows", "FuseProjections", "CacheKV", "EvictTokens", "ChunkLMHead"]
    assert len(step.snapshots) == 5
    assert step.graph.history == tuple(map(repr, recipe("focus").phase("step").passes))
    assert captured.history == ()
    stacked = [g.tensors["model.layers.0.mlp.gate_proj+up_proj.weight"] for g in (prefill.graph, step.graph)]
    assert stacked[0] is stacked[1]
    with pytest.raises(UnknownName, match="unknown pass of this phase 'OnlyKV'"):
        step.after("OnlyKV")


def test_recipes_of_one_graph_share_it_too_as_long_as_the_graph_lives(captured: Graph) -> None:
    graph = captured.copy()
    focus, dense = (dgraph.rewrite(graph, recipe(name))["step"] for name in ("focus", "dense"))
    assert dense.after("CacheKV") is focus.after("CacheKV")
    assert dense.after("CacheKV") is not dgraph.rewrite(captured, recipe("dense"))["step"].after("CacheKV")
    derived = weakref.ref(dense.graph)
    del graph, focus, dense
    gc.collect()
    assert derived() is None


@pytest.mark.parametrize("phase", ["prefill", "step"])
@pytest.mark.parametrize("name", ["dense", "focus"])
def test_the_phases_of_both_recipes_fit_one_loop(captured: Graph, name: str, phase: str) -> None:
    graph = dgraph.rewrite(captured, recipe(name))[phase].graph
    outputs: tuple[str, ...] = () if phase == "prefill" else ("token", "confidence", "margin", "entropy")
    if (name, phase) == ("focus", "step"):
        outputs += ("kept", "reached", "score")
    assert graph.outputs == outputs
    given = {"input_ids", "positions", "limit", "cu_rows", "page_table", "candidate", "temperature", "seed"}
    given |= {"average", "reached", "block_step"} | {f"{n}_cache_{i}" for n in "kv" for i in range(4)}
    assert set(graph.inputs) <= given


def test_a_phase_without_passes_is_the_captured_graph(captured: Graph) -> None:
    bare = dgraph.rewrite(captured, Recipe("bare", 1, (Phase("step", ()),)))["step"]
    assert bare.graph is captured
    assert bare.reports == bare.snapshots == ()


def test_a_pass_is_optional_only_where_the_phase_says_so(captured: Graph) -> None:
    """The same beginning twice: what one phase forgives the other does not."""
    passes = (PackRows(), OnlyKV())
    lenient, strict = Phase("prefill", passes, frozenset({"OnlyKV"})), Phase("step", passes)
    assert dgraph.rewrite(captured, Recipe("r", 1, (lenient,)))["prefill"].reports[-1].applied == []
    with pytest.raises(PassError, match=r"OnlyKV\(\) applied nowhere"):
        dgraph.rewrite(captured, Recipe("r", 1, (lenient, strict)))


def test_another_projects_recipe_is_built_like_ours() -> None:
    def mine(spec: ModelSpec, depth: int = 2) -> Recipe:
        """Keeps the first layers."""
        return Recipe("mine", 3, (Phase("step", (EvictTokens(after=depth),)),))

    builders = {**RECIPES, "mine": Builder.of("mine", mine)}
    assert build(builders, "mine", SPEC, {"depth": 3}).phase("step").passes == (EvictTokens(after=3),)
    with pytest.raises(UnknownName, match="Did you mean 'depth'"):
        build(builders, "mine", SPEC, {"depht": 3})

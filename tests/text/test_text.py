"""Dumps: goldens, folding that is true, and texts that depend on nothing but the graph."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

import dgraph
from dgraph.errors import InputError, UnknownName
from dgraph.ir.graph import Graph
from dgraph.recipes import RECIPES, Ablation, build
from dgraph.text.folding import fold
from dgraph.text.listing import listing
from dgraph.text.views import dump as dump_view
from dgraph.text.writer import dump, to_json
from tests.amounts import first_cases
from tests.golden_files import check_golden
from tests.oracle.models import random_weights, tiny_config, to_transformers
from tests.tiny import BLOCK, MASK, VOCAB, Hand

aten = torch.ops.aten
OPS = torch.ops.dgraph


def phases(graph: Graph, recipe: str, **options: Any) -> dict[str, Graph]:
    rewritten = dgraph.rewrite(graph, build(RECIPES, recipe, graph.spec, options))
    return {name: phase.graph for name, phase in rewritten.items()}


@pytest.fixture(scope="module")
def dense(captured: Graph) -> dict[str, Graph]:
    return phases(captured, "dense")


@pytest.fixture(scope="module")
def focus(captured: Graph) -> dict[str, Graph]:
    return phases(captured, "focus")


def qwen3(layers: int, seed: int) -> Graph:
    config = tiny_config(layers=layers)
    model = to_transformers(config, random_weights(config, seed))
    return dgraph.capture(dgraph.adopt(model, mask_id=MASK, block_length=BLOCK))


def native(name: str) -> Graph:
    import transformers

    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    return dgraph.capture(getattr(transformers, f"{name}ForCausalLM")(config).eval(), mask_id=MASK)


# -- goldens -----------------------------------------------------------------------------------------------------


def test_qwen3_as_captured(captured: Graph) -> None:
    check_golden("qwen3_captured.txt", dump(captured))


@first_cases(1, "name", ["Qwen2", "Llama"])
def test_other_families_as_captured(name: str) -> None:
    check_golden(f"{name.lower()}_captured.txt", dump(native(name)))


def test_phases(captured: Graph, dense: dict[str, Graph], focus: dict[str, Graph]) -> None:
    as_in_the_paper = phases(captured, "focus", full_steps=0, among="block")["step"]
    check_golden("qwen3_dense_step.txt", dump(dense["step"]))
    check_golden("qwen3_focus_step.txt", dump(focus["step"]))
    check_golden("qwen3_focus_step_as_in_the_paper.txt", dump(as_in_the_paper))
    check_golden("qwen3_prefill.txt", dump(focus["prefill"]))
    assert dump(dense["prefill"]) == dump(focus["prefill"])


# -- what a text depends on --------------------------------------------------------------------------------------


def test_another_capture_with_other_weights_has_the_same_text(captured: Graph, focus: dict[str, Graph]) -> None:
    again = qwen3(layers=4, seed=1)
    assert dump(again, full=True) == dump(captured, full=True)
    assert to_json(again) == to_json(captured)
    assert dump(phases(again, "focus")["step"]) == dump(focus["step"])


def test_the_names_of_nodes_do_not_show(focus: dict[str, Graph]) -> None:
    graph = focus["step"].copy()
    for i, node in enumerate(graph.nodes):
        node._rename(f"anything_{i}")
    assert dump(graph) == dump(focus["step"])


def test_sizes_are_written_where_they_are_used(captured: Graph) -> None:
    text = dump(captured)
    assert "sym_size" not in text
    assert "reshape(%1, [b, t, -1, 16])" in text


def test_the_length_does_not_grow_with_the_layers(captured: Graph, focus: dict[str, Graph]) -> None:
    deeper = qwen3(layers=7, seed=0)
    assert dump(deeper).count("\n") == dump(captured).count("\n") <= 60
    assert dump(phases(deeper, "dense")["step"]).count("\n") <= 60
    assert dump(phases(deeper, "focus")["step"]).count("\n") == dump(focus["step"]).count("\n") <= 125
    assert "layers[2..6] x5   %h = layers[1].%43, then layers[-1].%25" in dump(phases(deeper, "focus")["step"])


# -- folding -----------------------------------------------------------------------------------------------------


def sections_of(text: str) -> dict[str, list[str]]:
    parts = (part.splitlines() for part in text.split("\n\n"))
    return {lines[0].partition("   ")[0]: [re.sub(r"\s+", " ", line) for line in lines[1:]] for lines in parts}


def test_folded_layers_really_have_equal_lines(focus: dict[str, Graph]) -> None:
    folded, full = sections_of(dump(focus["step"])), sections_of(dump(focus["step"], full=True))
    assert [name for name in full if name.startswith("layers")] == [f"layers[{i}]" for i in range(4)]
    assert full["layers[2]"] == full["layers[3]"] == folded["layers[2..3] x2"]
    assert full["layers[0]"] != full["layers[1]"] != full["layers[2]"]


def test_every_reference_names_what_the_graph_passes(focus: dict[str, Graph]) -> None:
    """Unfold by hand: after the names that a group writes stand the values of the listing, layer by layer."""
    found = listing(focus["step"])
    sections = iter(found.sections)
    for group in fold(found.sections):
        for n in range(group.count):
            section = next(sections)
            carried = group.bindings(group.layers[0] + n) if group.layers else {}
            for line, real in zip(group.lines, section.lines, strict=True):
                assert (line.op, line.results, line.types, line.by) == (real.op, real.results, real.types, real.by)
                for name, value in zip(line.references(), real.references(), strict=True):
                    if name.kind == "carried":
                        assert carried[name.name] == value
                    elif name.layer == (group.layers or (None,))[0]:
                        assert (name.name, value.layer) == (value.name, section.layer)
                    else:
                        assert name == value


def residual(hand: Hand, x: Any, scale: float = 2.0) -> Any:
    return hand.call(aten.add.Tensor, x, hand.call(aten.mul.Tensor, x, scale))


@pytest.mark.parametrize(
    ("scales", "groups"),
    [
        ((2.0, 2.0, 2.0, 2.0), [(0, 0), (1, 3)]),  # layer 0 reads an input where the others read the layer before
        ((2.0, 3.0, 2.0, 2.0), [(0, 0), (1, 1), (2, 3)]),
        ((2.0, 2.0, 2.0, 3.0), [(0, 0), (1, 2), (3, 3)]),
    ],
)
def test_a_layer_with_another_constant_is_not_folded(scales: tuple[float, ...], groups: list[tuple[int, int]]) -> None:
    hand = Hand(layers=4)
    x = hand.input("x", "N", 16)
    for hand.layer, scale in enumerate(scales):
        x = residual(hand, x, scale)
    assert [g.layers for g in fold(listing(hand.returns(x=x)).sections)] == groups


def test_a_layer_that_reads_two_layers_back_is_not_folded() -> None:
    hand = Hand(layers=4)
    history = [hand.call(aten.relu.default, hand.input("x", "N", 16))]
    for hand.layer in range(4):
        history.append(residual(hand, history[-2 if hand.layer == 3 else -1]))
    assert [g.layers for g in fold(listing(hand.returns(x=history[-1])).sections)] == [None, (0, 2), (3, 3)]


def test_values_handed_on_and_values_shared_are_told_apart() -> None:
    hand = Hand(layers=3)
    x = hand.input("x", "N", 16)
    table, a, b = (hand.call(op, x) for op in (aten.cos.default, aten.relu.default, aten.neg.default))
    for hand.layer in range(3):
        a, b = hand.call(aten.mul.Tensor, a, table), hand.call(aten.add.Tensor, b, a)
    hand.layer = None
    text = dump(hand.returns(a=a, b=b))
    assert "layers[0..2] x3   %h = %relu, then layers[-1].%0   %h1 = %neg, then layers[-1].%1" in text
    assert "%0 = mul(%h, %cos)" in text
    assert "%1 = add(%h1, %h)" in text
    assert "return a=layers[2].%0, b=layers[2].%1" in text


def test_results_of_one_call_share_its_line() -> None:
    hand = Hand()
    x = hand.input("x", "N", 16)
    hand.layer = 0
    split = hand.call(aten.split_with_sizes.default, x, [4, 8, 4], 1)
    last, first = (hand.graph.parts(split, 3, "")[i] for i in (2, 0))
    text = dump(hand.returns(y=hand.call(aten.mul.Tensor, last, first)))
    assert "%0, %1, %2 = split_with_sizes(x, [4, 8, 4], 1)" in text
    assert "%3 = mul(%2, %0)" in text
    hand.graph.sweep()
    assert "%0, _, %2 = split_with_sizes" in dump(hand.graph)


# -- the parts of a dump -----------------------------------------------------------------------------------------


def test_the_stage_cut_and_the_gathered_values_are_drawn(focus: dict[str, Graph]) -> None:
    text = dump(focus["step"])
    assert re.search(r"keep_index\(.*\n  -- stage cut: suffix on K rows -+\n  %\d+ \.\.\. %\d+ = dgraph\.compact", text)
    assert re.search(r"\n    %\d+ <- positions +i64\[K\]\n", text)
    assert "K = rows kept by dgraph.keep_index in layers[1]" in text.replace("\n          ", " ")


def test_types_stand_in_one_column(dense: dict[str, Graph]) -> None:
    lines = [line for line in dump(dense["step"]).splitlines() if line.startswith("  %")]
    at = [line.rindex("  f32[") for line in lines if "  f32[" in line]
    assert len(at) > 25
    assert len(set(at)) == 1


def test_one_layer(focus: dict[str, Graph]) -> None:
    text = dump(focus["step"], layer=3)
    assert text.splitlines()[2] == "layers[3]   %h = layers[2].%25"
    assert sections_of(text)["layers[3]"] == sections_of(dump(focus["step"]))["layers[2..3] x2"]
    with pytest.raises(InputError, match=r"no layer 4; its layers are 0\.\.3"):
        dump(focus["step"], layer=4)


def test_json_says_what_the_text_says(focus: dict[str, Graph]) -> None:
    graph = focus["step"]
    data = json.loads(json.dumps(to_json(graph), allow_nan=False))
    assert [g["layers"] for g in data["groups"]] == [None, [0, 0], [1, 1], [2, 3], None]
    assert data["groups"][3]["carried"] == {"%h": "layers[1].%43, then layers[-1].%25"}
    select = next(n for n in data["groups"][2]["nodes"] if n["op"] == "dgraph.select_tokens")
    assert select["args"][-2:] == [1.5, 0]
    assert select["types"] == ["bool[N]", "i32[N]", "i32[b]"]
    assert select["by"] == "EvictTokens"
    linear = next(n for n in data["groups"][1]["nodes"] if n["op"] == "linear")
    assert linear["args"] == ["%0", "self_attn.q_proj+k_proj+v_proj.weight"]
    assert [o["name"] for o in data["outputs"]] == list(graph.outputs)
    assert data["passes"] == list(graph.history)
    listed = sum(
        len(g["nodes"]) * (1 if g["layers"] is None else g["layers"][1] - g["layers"][0] + 1) for g in data["groups"]
    )
    assert listed == sum(len(s.lines) for s in listing(graph).sections)
    assert len(to_json(graph, full=True)["groups"]) == 6


def test_infinity_is_a_string_in_json(captured: Graph) -> None:
    graph = phases(captured, "focus", alpha=float("inf"))["step"]
    assert ", inf, 0)" in dump(graph)
    assert '"inf"' in json.dumps(to_json(graph), allow_nan=False)


# -- from the name of a model ------------------------------------------------------------------------------------


def test_dump_by_recipe_and_pass(captured: Graph, focus: dict[str, Graph]) -> None:
    assert dump_view(captured) == dump(captured)
    assert dump_view(captured, "focus") == dump(focus["step"])
    cached = dump_view(captured, "focus", after="CacheKV")
    assert "paged_attention" in cached
    assert "importance" not in cached
    later = build(RECIPES, "focus", captured.spec, {"ablation": Ablation(after=2)})
    assert "after=2" in dump_view(captured, later)
    with pytest.raises(InputError, match="after is the name of a pass here, got 2"):
        dump_view(captured, "focus", after=2)  # type: ignore[arg-type]


def test_unknown_names_in_a_view(captured: Graph) -> None:
    with pytest.raises(UnknownName, match=r"unknown recipe 'focsu'. Did you mean 'focus'"):
        dump_view(captured, "focsu")
    with pytest.raises(UnknownName, match=r"unknown phase 'stepp'. Did you mean 'step'"):
        dump_view(captured, "focus", phase="stepp")
    with pytest.raises(UnknownName, match=r"unknown pass of this phase 'EvictToken'. Did you mean 'EvictTokens'"):
        dump_view(captured, "focus", after="EvictToken")
    with pytest.raises(UnknownName, match=r"unknown option of recipe 'focus' 'alhpa'. Did you mean 'alpha'"):
        dump_view(captured, "focus", alhpa=1.5)
    with pytest.raises(InputError, match="after='CacheKV' needs a recipe"):
        dump_view(captured, after="CacheKV")


def test_the_package_has_the_views(captured: Graph) -> None:
    assert dgraph.dump(captured, "focus", layer=1) == dump_view(captured, "focus", layer=1)
    assert not dgraph.diff(captured, "dense", "dense")
    assert not dgraph.diff(captured, "dense", "focus", after="CacheKV")
    with pytest.raises(InputError, match="after is the name of a pass here, got 2"):
        dgraph.diff(captured, "dense", "focus", after=2)  # type: ignore[arg-type]
    assert "phase prefill" in str(dgraph.explain(captured, "dense"))

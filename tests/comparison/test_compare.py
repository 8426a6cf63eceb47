"""Two sides on the same steps: values part where one of them computes something else, and not before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dgraph
from dgraph.comparison.page import KEYS, to_html
from dgraph.errors import InputError, UnknownName
from dgraph.ir.graph import Graph
from dgraph.numerics import State, small_steps
from dgraph.passes import PackRows
from dgraph.testing import TinyModel, models
from tests.cli.folders import write_checkpoint
from tests.numerics.wrong import Scale
from tests.tiny import rewritten

LLADA, SDAR = models(None, "llada", "sdar")
BLOCK = SDAR.model.spec.block_length


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("compared") / "small")


@pytest.fixture(scope="module")
def evicting() -> dgraph.Comparison:
    return dgraph.compare(SDAR.optimized("dense"), SDAR.optimized("focus", full_steps=0))


def test_an_eviction_parts_where_it_begins_and_not_before(evicting: dgraph.Comparison) -> None:
    assert evicting.first is not None
    step, node = evicting.first
    assert len(set(step.rows[1])) == 2, "rows left the second side"
    before = [each for each in evicting.steps if each.name != step.name][: evicting.steps.index(step)]
    assert all(found.difference.most == 0 for each in before for found in each.nodes)
    evicts = 1
    assert node.named.ref.layer == evicts
    assert node.named.line.op == "dgraph.paged_attention"
    layers = {found.named.ref.layer for found in step.nodes if found.difference.parts}
    assert layers >= {1, 2, 3}
    assert 0 not in layers
    assert {found.named.ref.layer for found in step.nodes} >= {0, 1, 2, 3}, "rows that stay are compared"


def test_both_sides_commit_the_tokens_of_the_first(evicting: dgraph.Comparison) -> None:
    free = SDAR.optimized("dense").generate(
        input_ids=[list(range(BLOCK + 3))], max_new_tokens=32, steps=8, ignore_eos=True
    )
    assert evicting.decided <= free.stats.decoded
    assert evicting.decided == sum(step.decided for step in evicting.steps) > 0
    left_out = [each for each in evicting.tokens if each.tokens[1] < 0]
    assert all(each.tokens[0] >= 0 for each in evicting.tokens)
    assert len(left_out) == evicting.to_json()["tokens"]["left_out"]
    dense = dgraph.compare(SDAR.optimized("dense"), SDAR.optimized("dense"))
    assert [step.decided for step in dense.steps] == [step.decided for step in evicting.steps]


EVERYTHING = {"alpha": float("inf"), "block_cache": "off"}
IDENTITIES = [
    (SDAR, "focus", EVERYTHING),
    (SDAR, "dyllm", {"tau": 1.01}),
    (LLADA, "dyllm", {"tau": 1.01, "response_only_period": 1}),
    (LLADA, "dllm_cache", {"rho": 1.0, "prompt_interval": 1}),
]


@pytest.mark.parametrize(("tiny", "method", "identity"), IDENTITIES, ids=str)
def test_nothing_parts_at_the_identity_of_a_method(tiny: TinyModel, method: str, identity: dict[str, object]) -> None:
    """Rows that a method lists or moves are found again by their numbers."""
    found = dgraph.compare(tiny.optimized("dense"), tiny.optimized(method, **identity), max_new_tokens=12, steps=4)
    assert not found, found.heading()
    assert found.tokens == []
    assert all(len(step.nodes) > 20 for step in found.steps)


def test_several_prompts_are_followed_together() -> None:
    ids = [[5, 6, 7], list(range(5, 5 + BLOCK)), list(range(3, 3 + 2 * BLOCK))]
    found = dgraph.compare(SDAR.optimized("dense"), SDAR.optimized("focus", **EVERYTHING), ids, steps=3)
    assert found.steps[0].name == "prompt"
    assert found.steps[0].programs == ("prefill", "prefill")
    assert not found
    with pytest.raises(InputError, match="prompt 0"):
        dgraph.compare(SDAR.optimized("dense"), SDAR.optimized("focus"), [[]])


def test_a_short_dtype_stays_within_its_rounding() -> None:
    found = dgraph.compare("tiny_sdar", recipe="dense", dtype="bf16", steps=2, max_new_tokens=8)
    assert not found, found.heading()
    assert found.names == ("tiny_sdar dense float32", "tiny_sdar dense bfloat16")
    assert any(each.difference.most > 0 for each in found.steps[0].nodes)
    assert found.tolerance is None


def test_quantised_weights_part_in_the_first_layer_that_has_them(folder: Path) -> None:
    which = "int8:which=*.mlp.*"
    found = dgraph.compare(folder, recipe="dense", weights=which, inputs="w3 w4 w5", max_new_tokens=12)
    assert found.first is not None
    step, node = found.first
    assert (step.name, node.named.ref.layer) == ("step 1", 0)
    assert node.named.line.op == "linear"
    assert node.named.line.role == "mlp.gate_proj+up_proj"
    assert "weights in int8" in found.names[1]


def test_a_broken_pass_is_found_in_the_decode() -> None:
    dense = SDAR.recipe("dense")
    phases = [replace(p, passes=(*p.passes[:3], Scale(by=1.5), *p.passes[3:])) for p in dense.phases]
    made = SDAR.optimized(replace(dense, name="wrong", phases=tuple(phases)))
    found = dgraph.compare(SDAR.optimized("dense"), made)
    assert found.first is not None
    assert found.first[1].named.ref.layer == 2
    text = str(found)
    assert "Values first part in prompt at layers[2]." in text
    assert "layers[1]  " in text


def test_two_graphs_are_compared_on_small_steps(packed: Graph) -> None:
    after = rewritten(packed, Scale(2.0))
    found = dgraph.compare(packed, after)
    assert [step.name for step in found.steps] == ["step 1", "step 2"]
    assert found.first is not None
    node = found.first[1]
    assert (node.named.ref.layer, node.named.line.op) == (2, "mul")
    assert not dgraph.compare(packed, packed)
    inputs = State().inputs(packed, small_steps(packed.spec)[0])
    assert inputs is not None
    assert len(dgraph.compare(packed, after, inputs).steps) == 1
    with pytest.raises(InputError, match="input 'positions' is missing"):
        dgraph.compare(packed, after, {"input_ids": inputs["input_ids"]})


def test_a_captured_graph_and_a_phase_are_compared() -> None:
    phase = dgraph.rewrite(SDAR.graph, SDAR.recipe("dense"))["step"]
    found = dgraph.compare(rewritten(SDAR.graph, PackRows()), phase)
    assert not found
    assert len(found.steps) == 2, "without a cache a graph needs all rows"


def test_the_page_colours_values_by_distance(evicting: dgraph.Comparison) -> None:
    page = to_html(evicting)
    assert all(f'class="shade-{shade}"' in page for shade in range(len(KEYS)))
    assert "absolute" in page
    assert str(evicting).splitlines()[1].replace(">", "&gt;") in page


def test_json_has_every_value_that_differs(evicting: dgraph.Comparison) -> None:
    found = evicting.to_json()
    assert found["first"]["layer"] == 1
    assert found["first"]["op"] == "dgraph.paged_attention"
    assert [layer["place"] for layer in found["layers"]][-1] == "outside the layers"
    differing = [node for step in found["steps"] for node in step["nodes"]]
    assert differing
    assert all(node["absolute"] > 0 and -1 <= node["cosine"] <= 1.0001 for node in differing)
    assert bool(evicting)
    assert "Comparison of" in repr(evicting)


def test_sides_that_cannot_be_compared_are_refused(packed: Graph) -> None:
    dense, focus = SDAR.optimized("dense"), SDAR.optimized("focus")
    with pytest.raises(InputError, match="a graph or phase is compared with another one"):
        dgraph.compare(packed, dense)
    with pytest.raises(InputError, match="the second side is 'tiny_sdar'"):
        dgraph.compare(dense, "tiny_sdar")
    with pytest.raises(InputError, match="compared as they are; leave backend out"):
        dgraph.compare(dense, focus, backend="inductor")
    with pytest.raises(InputError, match="both sides would be the same"):
        dgraph.compare("tiny_sdar")
    with pytest.raises(UnknownName, match="option of these recipes 'alhpa'"):
        dgraph.compare("tiny_sdar", to="focus", alhpa=2.0)
    with pytest.raises(InputError, match="loaded already, with its own dtype and device"):
        dgraph.compare(SDAR.model, dtype="bf16")
    with pytest.raises(InputError, match="tensors by name are for graphs"):
        dgraph.compare(dense, focus, {"input_ids": torch.zeros(1)})
    with pytest.raises(InputError, match="prompts are for optimized models"):
        dgraph.compare(packed, packed, "a prompt")


def test_a_side_that_forwards_other_rows_is_refused() -> None:
    (dream,) = models(None, "dream")
    with pytest.raises(InputError, match=r"the sides forward other rows: step lacks the row at position \d+"):
        dgraph.compare(dream.optimized("dense"), dream.optimized("fast_dllm"))


@pytest.mark.release
def test_a_canvas_that_is_drawn_again_is_refused() -> None:
    (gemma,) = models(None, "diffusion_gemma")
    made = gemma.optimized("dense")
    with pytest.raises(InputError, match="draws its canvas again in every step"):
        dgraph.compare(made, made)

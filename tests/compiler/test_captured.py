"""Graphs that recipes start from: weights are read and quantised one by one, and shared by all recipes of a model."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dgraph
from dgraph.cache.store import open_store
from dgraph.cli import app
from dgraph.compiler.base_graph import graph_of_model, quantising
from dgraph.compiler.saving import save_quantised
from dgraph.errors import InputError, PassError, UnknownName
from dgraph.families import resolve
from dgraph.families.weights import Quantising, Shapes
from dgraph.ir.stored_weights import formats_of
from dgraph.ops import OPS
from dgraph.passes import QuantizeWeights
from dgraph.private.torch import StorageWatch
from dgraph.testing import TinyModel, models
from dgraph.types.nodes import args_of
from tests.amounts import every_value
from tests.cli.folders import write_checkpoint
from tests.tiny import rewritten

PROMPT = "w3 w4 w5 w6"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "small")


def test_a_name_and_an_object_give_the_same(folder: Path) -> None:
    by_name = dgraph.optimize(folder, "focus", weights="int8", backend="eager", artifacts=False)
    by_object = dgraph.optimize(
        dgraph.load(folder), "focus", weights=QuantizeWeights("int8"), backend="eager", artifacts=False
    )
    assert len(formats_of(by_name.captured)) == 7 * by_name.spec.layers
    for name, tensor in by_object.captured.tensors.items():
        assert torch.equal(by_name.captured.tensors[name], tensor), name
    want = by_object.generate(PROMPT, max_new_tokens=8)
    assert by_name.generate(PROMPT, max_new_tokens=8).token_ids == want.token_ids
    assert by_name.model.weights is not None, "the weights were left where they are stored"


@pytest.mark.release
def test_reading_takes_the_quantised_model_and_one_weight(folder: Path) -> None:
    model = resolve(folder, opened=True)
    hollow = graph_of_model(model, open_store())
    assert all(tensor.stride(0) == 0 for tensor in model.module.parameters() if tensor.dim() > 1), "nothing was read"
    graph = rewritten(hollow, QuantizeWeights("int8", lm_head=True, weights=Shapes()))
    source = Quantising(model.weights, hollow.tensors, formats_of(graph))
    with StorageWatch() as watch:
        taken = {name: source.take(name, like, None) for name, like in graph.tensors.items() if name in source}
    stored = sum(tensor.nbytes for tensor in taken.values())
    assert stored < 0.6 * sum(tensor.nbytes for tensor in hollow.tensors.values())
    largest = max(tensor.nbytes for tensor in hollow.tensors.values())
    assert watch.peak < stored + 5 * largest, "and some of its rows in fp32"
    whole = graph_of_model(resolve(folder), open_store())
    for name, tensor in rewritten(whole, QuantizeWeights("int8", lm_head=True)).tensors.items():
        assert torch.equal(taken.get(name, tensor), tensor), name


@pytest.mark.release
def test_recipes_of_one_model_share_what_is_stored(folder: Path) -> None:
    model = resolve(folder, opened=True)
    first, second = (graph_of_model(model, open_store(), QuantizeWeights("fp8")) for _ in range(2))
    assert first is second
    other = graph_of_model(model, open_store(), QuantizeWeights("int4"))
    assert other is not first
    made = [dgraph.optimize(model, r, weights="fp8", backend="eager", artifacts=False) for r in ("focus", "dense")]
    assert made[0].captured is made[1].captured is first


def test_what_is_not_asked_for_stays_as_it_is(folder: Path) -> None:
    assert quantising(None) is None
    assert formats_of(graph_of_model(resolve(folder), open_store())) == {}


def test_names_of_what_is_quantised() -> None:
    assert quantising("fp8") == QuantizeWeights("fp8")
    assert quantising("w8a8-fp8") == QuantizeWeights("fp8", activations=True)
    assert quantising("w8a8-int8") == QuantizeWeights("int8", activations=True)
    assert quantising("w8a8") == QuantizeWeights(None, activations=True)


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("fp8:embeddings=true,lm_head=true", QuantizeWeights("fp8", embeddings=True, lm_head=True)),
        ("w8a8-int8:lm_head=yes", QuantizeWeights("int8", activations=True, lm_head=True)),
        ("int4:block=1x64,zeros=true", QuantizeWeights("int4", (1, 64), zeros=True)),
        ("int8:block=-1x-1,router=1", QuantizeWeights("int8", (-1, -1), router=True)),
        ("fp8:which=*.mlp.*,which=*.layers.0.*", QuantizeWeights("fp8", which=("*.mlp.*", "*.layers.0.*"))),
        ("fp8:but=*.down_proj.*,zeros=false", QuantizeWeights("fp8", but=("*.down_proj.*",))),
    ],
    ids=str,
)
def test_settings_after_a_name(text: str, step: QuantizeWeights) -> None:
    assert quantising(text) == step


def test_every_setting_of_the_pass_has_a_spelling() -> None:
    with pytest.raises(UnknownName) as told:
        quantising("fp8:head=true")
    named = {f.name for f in fields(QuantizeWeights)} - {"format", "activations", "weights"}
    assert set(told.value.known) == named


def test_rows_meet_what_a_checkpoint_stores(folder: Path, tmp_path: Path) -> None:
    stored = save_quantised(folder, tmp_path / "int8", "int8").folder
    want = graph_of_model(resolve(folder, opened=True), open_store(), quantising("w8a8-int8"))
    found = graph_of_model(resolve(stored, opened=True), open_store(), quantising("w8a8"))
    assert len(found.find("round_rows")) == len(want.find("round_rows")) > 0
    made = [dgraph.optimize(m, "dense", weights="w8a8", backend="eager") for m in (stored, dgraph.load(stored))]
    tokens = [one.generate(input_ids=[[1, 2, 3]], max_new_tokens=8).token_ids for one in made]
    assert tokens[0] == tokens[1]
    assert all(torch.equal(tensor, made[1].captured.tensors[name]) for name, tensor in made[0].captured.tensors.items())
    with pytest.raises(PassError, match=r"applied nowhere[^$]*q_proj\.weight is stored as it is"):
        graph_of_model(resolve(folder, opened=True), open_store(), quantising("w8a8"))


def test_the_identity_reads_what_a_folder_holds(folder: Path) -> None:
    made = [dgraph.optimize(folder, "dense", weights=w, backend="eager") for w in (None, QuantizeWeights(None))]
    want, found = (one.generate(PROMPT, max_new_tokens=8).token_ids for one in made)
    assert found == want
    assert all(torch.equal(tensor, made[1].captured.tensors[name]) for name, tensor in made[0].captured.tensors.items())


def test_ranks_take_what_a_checkpoint_stores_quantised(folder: Path, tmp_path: Path) -> None:
    model = resolve(save_quantised(folder, tmp_path / "int8", "int8").folder, opened=True)
    source, graph = model.weights, graph_of_model(model, open_store(), quantising("w8a8"))
    assert source is not None
    again = Quantising(source, graph.tensors, formats_of(graph))
    assert source.formats.keys() == formats_of(graph).keys()
    assert source.formats
    found = {name: again.take(name, tensor, None) for name, tensor in graph.tensors.items() if name in again}
    assert len(found) > 2 * len(source.formats)
    assert all(torch.equal(tensor, graph.tensors[name]) for name, tensor in found.items())


@every_value(
    ("weights", ["fp8:but=*.v_proj.*,but=*.up_proj.*", "int8:block=20x20"]),
    ("recipe", ["dense", "focus", "dyllm", "dllm_serve"]),
)
def test_projections_that_are_stored_apart_stay_apart(weights: str, recipe: str) -> None:
    (tiny,) = models(None, "sdar")
    step = quantising(weights)
    assert step is not None
    made, rounded = tiny.quantised(step).optimized(recipe), dequantised(tiny, step)
    assert not any("+" in name for name in made.graph().tensors)
    asked = {"input_ids": [[1, 2, 3], [4]], "max_new_tokens": 8, "threshold": 0.9}
    assert made.generate(**asked).token_ids == rounded.optimized(recipe).generate(**asked).token_ids


def dequantised(tiny: TinyModel, step: QuantizeWeights) -> TinyModel:
    """The same model with the weights that the quantised numbers stand for."""
    graph = rewritten(tiny.graph, step)
    module = copy.deepcopy(tiny.model.module)
    named = dict(module.named_parameters())
    for node in graph.find("dequantise"):
        values, scales, zeros, block, dtype = args_of(node)
        tensors = [None if part is None else graph.tensors[part.meta["weight"]] for part in (values, scales, zeros)]
        whole = OPS["dequantise"].reference(*tensors, block, dtype)
        named[tiny.model.prefix + values.meta["weight"]].data.copy_(whole)
    return TinyModel(tiny.family, replace(tiny.model, module=module))


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ("w8a8-int4", UnknownName, "w8a8-int8"),
        ("int7", UnknownName, "int8"),
        ("fp8:lm_hed=true", UnknownName, "unknown key of weights 'lm_hed'. Did you mean 'lm_head'"),
        ("fp8:activations=true", UnknownName, "unknown key of weights 'activations'"),
        ("fp8:lm_head", InputError, r"FORMAT\[:KEY=VALUE,...\], got 'lm_head' as KEY=VALUE in 'fp8:lm_head'"),
        ("fp8:", InputError, "got '' as KEY=VALUE"),
        ("fp8:lm_head=maybe", InputError, "lm_head is true or false, got 'maybe'"),
        ("fp8:lm_head=true,lm_head=false", InputError, "lm_head is there twice"),
        ("int4:block=64", InputError, "block is ROWSxCOLUMNS, as 1x128 .* got '64'"),
        ("int4:block=0x8", InputError, "at least 1 each"),
        ("w8a8-int8:block=1x64", InputError, "one scale for each row"),
        (8, InputError, "the name of a format"),
        (torch.int8, InputError, "got torch.int8"),
    ],
    ids=str,
)
def test_what_is_no_format_is_refused(weights: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dgraph.optimize("tiny_sdar", weights=weights, backend="eager")


def test_weights_that_were_not_read_name_both_ways(folder: Path) -> None:
    with pytest.raises(InputError, match=r"give mesh or weights to dgraph\.optimize"):
        dgraph.optimize(resolve(folder, opened=True), "dense", backend="eager")


def test_the_command_line_quantises(folder: Path) -> None:
    from typer.testing import CliRunner

    run = CliRunner().invoke
    done = run(app, ["dump", str(folder), "--weights", "int4", "--layer", "0"])
    assert done.exit_code == 0, done.output
    assert (
        "dgraph.dequantise(self_attn.q_proj.weight, self_attn.q_proj.weight_scale, None, [1, 128], f32)" in done.output
    )
    head = "int8:lm_head=true,embeddings=true"
    done = run(app, ["dump", str(folder), "--weights", head])
    assert done.exit_code == 0, done.output
    assert "dgraph.dequantise(lm_head.weight, lm_head.weight_scale," in done.output
    assert "embed_tokens.weight_scale" in done.output
    wrong = run(app, ["dump", str(folder), "--weights", "int5"])
    assert wrong.exit_code != 0
    assert "int4" in wrong.output


def test_weights_that_were_changed_are_quantised_anew(folder: Path) -> None:
    model, int8 = dgraph.load(folder), quantising("int8")
    first = graph_of_model(model, open_store(), int8)
    assert graph_of_model(model, open_store(), int8) is first
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.neg_()
    second = graph_of_model(model, open_store(), int8)
    for name in formats_of(first):
        assert torch.equal(second.tensors[name], -first.tensors[name]), name

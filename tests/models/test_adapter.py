"""Low-rank adapters in PEFT's format, added to the weights of models that do not draft by them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import dgraph
from dgraph.cli import app
from dgraph.compiler.saving import save_quantised
from dgraph.errors import CheckpointError
from dgraph.families import resolve
from dgraph.families.weights import weights_of
from dgraph.testing import models
from tests.models import test_llada
from tests.models.test_draft_adapter import write_adapter
from tests.models.test_published import CHECKPOINTS, Published
from tests.oracle import llada, llada2
from tests.oracle.decoder import forward
from tests.remote import SEQUENCES, close, logits_of, stand_in, write

CASE: Published = CHECKPOINTS[5]
"""Qwen3's names, blocks of 8, a head of its own."""
TARGETS = ["q_proj", "v_proj", "down_proj"]


def products(weights: Mapping[str, Tensor], ranks: Mapping[str, int], seed: int = 3) -> dict[str, Tensor]:
    """Tensors of an adapter in PEFT's names, for weights whose layers have these names at their end."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        rank = ranks.get(module.rpartition(".")[2])
        if rank is not None and weight.dim() == 2:
            down = torch.randn(rank, weight.shape[1], generator=generator) * 0.2
            up = torch.randn(weight.shape[0], rank, generator=generator) * 0.2
            found |= {f"base_model.model.{module}.lora_A.weight": down, f"base_model.model.{module}.lora_B.weight": up}
    return found


def added(
    weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], scales: Mapping[str, float]
) -> dict[str, Tensor]:
    """The weights with the products, an entry at a time in plain PyTorch."""
    found = dict(weights)
    for name, down in tensors.items():
        module, _, kind = name.removeprefix("base_model.model.").partition(".lora_")
        if kind == "A.weight":
            up = tensors[name.replace("lora_A", "lora_B")]
            scale = scales.get(module.rpartition(".")[2], scales.get("", 1.0))
            found[f"{module}.weight"] = weights[f"{module}.weight"] + scale * (up.double() @ down.double()).float()
    return found


def adapter_of(folder: Path, tensors: Mapping[str, Tensor], **settings: Any) -> Path:
    """A folder as PEFT 0.21 writes it."""
    usual = {"target_modules": TARGETS, "r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "qalora_group_size": 16}
    more = {"loftq_config": {}, "lora_dropout": 0.05, "init_lora_weights": True, "use_bdlora": None}
    return write_adapter(folder, tensors, **{**usual, **more, **settings})


RANKS = dict.fromkeys(TARGETS, 4)
TENSORS = products(CASE.weights, RANKS)
ADDED = added(CASE.weights, TENSORS, {"": 2.0})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and in it the folder of its adapter."""
    made = CASE.write(tmp_path_factory.mktemp("base"))
    adapter_of(made / "lora", TENSORS)
    return made


def check(model: dgraph.Model, weights: Mapping[str, Tensor]) -> None:
    """A model computes with these weights."""
    for tokens in SEQUENCES[:2]:
        close(logits_of(model, tokens), forward(weights, CASE.sizes, tokens))


# -- numbers ---------------------------------------------------------------------------------------------------------


def test_a_folder_with_an_adapter_is_the_sum(folder: Path) -> None:
    """Inside the checkpoint or by its own path; without it nothing changes."""
    assert (logits_of(dgraph.load(folder), SEQUENCES[0]) - forward(ADDED, CASE.sizes, SEQUENCES[0])).abs().max() > 0.5
    for place in ("lora", folder / "lora", str(folder / "lora")):
        check(dgraph.load(folder, adapter=place), ADDED)
    check(dgraph.load(folder), CASE.weights)


@pytest.mark.parametrize(
    ("ranks", "settings", "scales"),
    [
        (RANKS, {"use_rslora": True}, {"": 8 / math.sqrt(4)}),
        (RANKS, {"lora_alpha": 3.0}, {"": 0.75}),
        ({**RANKS, "v_proj": 2}, {"rank_pattern": {"v_proj": 2}}, {"": 2.0, "v_proj": 4.0}),
        (RANKS, {"alpha_pattern": {r"layers\.\d\.mlp\.down_proj": 2}}, {"": 2.0, "down_proj": 0.5}),
        ({"q_proj": 4}, {"target_modules": r"model\.layers\.\d+\.self_attn\.q_proj"}, {"": 2.0}),
        ({"lm_head": 4, "o_proj": 4}, {"target_modules": "all-linear"}, {"": 2.0}),
    ],
    ids=["rslora", "alpha", "ranks", "alphas", "pattern", "head"],
)
def test_ranks_scales_and_targets(
    ranks: Mapping[str, int], settings: dict[str, Any], scales: dict[str, float], folder: Path, tmp_path: Path
) -> None:
    tensors = products(CASE.weights, ranks)
    place = adapter_of(tmp_path / "lora", tensors, **settings)
    check(dgraph.load(folder, adapter=place), added(CASE.weights, tensors, scales))


def test_sums_are_rounded_once(folder: Path) -> None:
    """The adapter is not rounded to the base's bfloat16 before it is added."""
    model = dgraph.load(folder, "bfloat16", adapter="lora")
    weights = weights_of(model.module, model.prefix)
    for name, weight in ADDED.items():
        assert torch.equal(weights[name], weight.bfloat16()), name


@pytest.mark.parametrize("recipe", ["dense", "focus", "dyllm"])
def test_every_recipe_sees_plain_weights(recipe: str, folder: Path, tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", CASE.keys, ADDED)
    settings: dict[str, Any] = {"input_ids": SEQUENCES[:1], "max_new_tokens": 15, "ignore_eos": True}
    one = dgraph.optimize(folder, recipe, adapter="lora", backend="eager").generate(**settings)
    other = dgraph.optimize(whole, recipe, backend="eager").generate(**settings)
    assert one.token_ids == other.token_ids


def test_it_is_added_before_weights_are_quantised(folder: Path, tmp_path: Path) -> None:
    """One graph does not stand for another adapter of the same model."""
    whole = write(tmp_path / "whole", CASE.keys, ADDED)
    made = [
        dgraph.optimize(f, "dense", adapter=a, weights="int8", backend="eager")
        for f, a in ((folder, "lora"), (whole, None))
    ]
    first, second = (one.graph("step").tensors for one in made)
    assert first.keys() == second.keys()
    assert any(tensor.dtype == torch.int8 for tensor in first.values())
    for name, tensor in first.items():
        assert torch.allclose(tensor.float(), second[name].float(), atol=1e-6), name
    opened = dgraph.load(folder, opened=True)
    graphs = [
        dgraph.optimize(opened, "dense", adapter=a, weights="int8", backend="eager") for a in (None, folder / "lora")
    ]
    name = next(name for name, tensor in first.items() if "down_proj" in name and tensor.dtype == torch.int8)
    assert not torch.equal(*(one.graph("step").tensors[name] for one in graphs))


def test_a_rank_reads_its_part_of_the_sum(folder: Path) -> None:
    """What a rank takes of an opened model, a part at a time."""
    from dgraph.ranks.sharding import Part

    opened = dgraph.load(folder, opened=True, adapter="lora")
    assert opened.weights is not None
    for name, dim in (("model.layers.0.self_attn.q_proj.weight", 0), ("model.layers.1.mlp.down_proj.weight", 1)):
        half = Part.of("columns" if dim == 0 else "rows", dim, [(0, ADDED[name].shape[dim] // 2)])
        taken = opened.weights.take(name, torch.empty(ADDED[name].shape), half)
        close(taken, half.take(ADDED[name]))


def test_an_object_is_left_as_it_is(folder: Path) -> None:
    """Only tensors that change are copied."""
    remote = stand_in("DreamForCausalLM", CASE.keys, CASE.weights)
    model = dgraph.adopt(remote, adapter=folder / "lora")
    check(model, ADDED)
    check(dgraph.adopt(remote), CASE.weights)
    for name, parameter in remote.named_parameters():
        shared = model.module.get_parameter(f"model.{name}") is parameter
        assert shared == torch.equal(CASE.weights[name], ADDED[name]), name
    again = resolve(dgraph.load(folder), low_rank=folder / "lora")
    check(again, ADDED)


def test_names_of_a_familys_own(tmp_path: Path) -> None:
    """LLaDA's own code calls its layers as OLMo does: of a folder, and of an object."""
    tensors = products(test_llada.WEIGHTS, {"attn_out": 4, "ff_proj": 4})
    place = adapter_of(tmp_path / "lora", tensors, target_modules=["attn_out", "ff_proj"])
    weights = added(test_llada.WEIGHTS, tensors, {"": 2.0})
    whole = write(tmp_path / "LLaDA", test_llada.CONFIG, test_llada.WEIGHTS)
    for model in (
        dgraph.load(whole, adapter=place),
        dgraph.adopt(stand_in("LLaDAModelLM", test_llada.CONFIG, test_llada.WEIGHTS), adapter=place),
    ):
        close(logits_of(model, SEQUENCES[0]), llada.forward(weights, test_llada.SIZES, SEQUENCES[0]))


def test_experts_are_named_one_by_one(tmp_path: Path) -> None:
    """They lie in stacks here, and apart in the checkpoint and its adapter."""
    sizes = llada2.Config()
    weights = llada2.random_weights(sizes, 0)
    experts = {name: tensor for name, tensor in weights.items() if ".experts.1." in name}
    tensors = products({**experts, "x": torch.zeros(1)}, {"gate_proj": 2, "up_proj": 2, "down_proj": 2})
    assert len(tensors) >= 6
    place = adapter_of(tmp_path / "lora", tensors, target_modules=["gate_proj", "up_proj", "down_proj"], r=2)
    folder = write(tmp_path / "LLaDA2", llada2.keys(sizes), weights)
    whole = write(tmp_path / "whole", llada2.keys(sizes), added(weights, tensors, {"": 4.0}))
    one, other = (dgraph.load(f, adapter=a, block_length=8) for f, a in ((folder, place), (whole, None)))
    for name, tensor in weights_of(one.module, "").items():
        close(tensor, weights_of(other.module, "")[name])


def test_the_command_line_adds_one(folder: Path) -> None:
    def run(*more: str) -> list[list[int]]:
        words = ["generate", str(folder), "-p", "w3 w4 w6", "--backend", "eager", "--max-new-tokens", "12", "--json"]
        result = CliRunner().invoke(app, [*words, "--dtype", "float32", *more])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["token_ids"]

    expected = dgraph.optimize(folder, "focus", adapter="lora", backend="eager").generate(
        ["w3 w4 w6"], max_new_tokens=12
    )
    assert run("--adapter", "lora") == run("--adapter", str(folder / "lora")) == expected.token_ids != run()


def test_peft_computes_the_same(folder: Path, tmp_path: Path) -> None:
    """The library itself, over the same base, writes a folder; its unmerged forward is what is compared with."""
    peft = pytest.importorskip("peft", exc_type=ImportError)
    from transformers import Qwen3Config, Qwen3ForCausalLM

    keys = {key: value for key, value in CASE.keys.items() if key not in ("architectures", "model_type", "auto_map")}
    base = Qwen3ForCausalLM(Qwen3Config(**keys)).eval()
    base.load_state_dict(CASE.weights)
    settings = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules=["q_proj", "o_proj", "gate_proj"],
        rank_pattern={r"layers\.1\.self_attn\.o_proj": 2},
        alpha_pattern={"gate_proj": 16},
        init_lora_weights=False,
    )
    torch.manual_seed(5)
    adapted = peft.get_peft_model(base, settings)
    adapted.save_pretrained(tmp_path / "lora")
    last = torch.tensor([SEQUENCES[0]])
    with torch.no_grad():
        wanted = adapted(input_ids=last, attention_mask=torch.ones(1, 1, 9, 9)).logits[0]
    found = dgraph.load(folder, adapter=tmp_path / "lora")
    close(logits_of(found, SEQUENCES[0])[-1], wanted[-1])
    with torch.no_grad():
        merged = adapted.merge_and_unload()
    for name, tensor in weights_of(found.module, found.prefix).items():
        if name in CASE.weights:
            close(tensor, merged.get_parameter(name))


# -- refusals --------------------------------------------------------------------------------------------------------

FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        ({"use_dora": True}, {}, r"adapter_config\.json: use_dora is True, expected False"),
        ({"peft_type": "LOHA"}, {}, "peft_type is 'LOHA', expected 'LORA'"),
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights is 'pissa', expected 'gaussian'"),
        ({"a_new_kind": {"of": "product"}}, {}, r"a_new_kind is \{'of': 'product'\}, expected \{\}"),
        ({"modules_to_save": ["lm_head"]}, {}, r"modules_to_save is \['lm_head'\], expected"),
        ({"rank_pattern": {"(": 2}}, {}, "rank_pattern has a pattern that cannot be read"),
        (
            {"rank_pattern": {"q_proj": 3}},
            {},
            rf"{FIRST}\.lora_A\.weight is torch\.float32 \(4, 32\), expected .* \(3, 32\)",
        ),
        ({"alpha_pattern": {"q_proj": "x"}}, {}, "lora_alpha is 'x', expected a number"),
        (
            {"target_modules": ["v_proj", "down_proj"]},
            {},
            rf"{FIRST}\.lora_A\.weight, but target_modules .* leaves model",
        ),
        (
            {},
            {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 97)},
            "embed_tokens.lora_embedding_A",
        ),
        ({}, {f"{FIRST}.lora_magnitude_vector": torch.zeros(32)}, "has the tensor .*lora_magnitude_vector, expected"),
    ],
)
def test_what_is_no_product_is_refused_by_its_name(
    settings: dict[str, Any], change: dict[str, Tensor], message: str, folder: Path, tmp_path: Path
) -> None:
    place = adapter_of(tmp_path / "lora", {**TENSORS, **change}, **settings)
    with pytest.raises(CheckpointError, match=message):
        dgraph.load(folder, adapter=place)


def test_weights_that_take_none(folder: Path, tmp_path: Path) -> None:
    """A head that is the embedding, and weights that are stored quantised."""
    tied = CHECKPOINTS[6]
    head = {
        "base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32),
        "base_model.model.lm_head.lora_B.weight": torch.zeros(97, 4),
    }
    place = adapter_of(tmp_path / "head", head, target_modules=["lm_head"])
    with pytest.raises(CheckpointError, match=r"has the tensor base_model\.model\.lm_head\.lora_A\.weight, expected"):
        dgraph.load(tied.write(tmp_path), adapter=place)
    with pytest.raises(CheckpointError, match=r"nowhere is no folder of an adapter: it has no adapter_config\.json"):
        dgraph.load(folder, adapter="nowhere")
    saved = save_quantised(folder, tmp_path / "int8", "int8").folder
    message = r"int8 stores \d+ weights quantised, to which adapter='lora' cannot be added\. Load the checkpoint that"
    with pytest.raises(CheckpointError, match=message):
        dgraph.load(saved, adapter="lora")


def test_a_model_that_verifies_drafts_drafts_by_it() -> None:
    """Its own weights stay as they are; see test_draft_adapter.py."""
    nemotron = models(None, "nemotron")[0].model
    with pytest.raises(CheckpointError, match="nowhere is no folder of an adapter"):
        resolve(nemotron, low_rank="nowhere")

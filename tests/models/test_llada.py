"""LLaDA: official checkpoints and remote-code objects as a native Llama."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import dgraph
from dgraph.errors import CheckpointError
from dgraph.models.files import INDEX
from dgraph.models.shapes import random_model
from tests.oracle.llada import Config, forward, shapes
from tests.remote import SEQUENCES, change_tensors, check_against, close, logits_of, random_weights, stand_in, write
from tests.tiny import MASK, VOCAB

SIZES = Config()
WEIGHTS = random_weights(shapes(SIZES))
# config.json of GSAI-ML/LLaDA-8B-Instruct, at another size
CONFIG: dict[str, Any] = {
    "activation_type": "silu",
    "alibi": False,
    "alibi_bias_max": 8.0,
    "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "attention_layer_norm_with_affine": True,
    "auto_map": {"AutoModelForCausalLM": "modeling_llada.LLaDAModelLM"},
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": SIZES.hidden,
    "embedding_size": SIZES.rows,
    "eos_token_id": 5,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "mask_token_id": MASK,
    "max_sequence_length": 64,
    "mlp_hidden_size": SIZES.intermediate,
    "mlp_ratio": 4,
    "model_type": "llada",
    "multi_query_attention": None,
    "n_heads": SIZES.heads,
    "n_kv_heads": SIZES.heads,
    "n_layers": SIZES.layers,
    "pad_token_id": 5,
    "rms_norm_eps": SIZES.eps,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": SIZES.rope_theta,
    "scale_logits": False,
    "use_cache": False,
    "vocab_size": VOCAB,
    "weight_tying": False,
}


def oracle(tokens: Any) -> Tensor:
    return forward(WEIGHTS, SIZES, tokens)


def adopted(weights: dict[str, Tensor] = WEIGHTS, **config: Any) -> dgraph.Model:
    return dgraph.adopt(stand_in("LLaDAModelLM", {**CONFIG, **config}, weights))


# -- numbers -----------------------------------------------------------------------------------------------------


def test_module_graph_and_every_pass_equal_the_oracle() -> None:
    check_against(adopted(), oracle)


def test_a_row_sees_rows_after_it() -> None:
    model, tokens = adopted(), SEQUENCES[0]
    changed = [*tokens[:-1], (tokens[-1] + 1) % MASK]
    assert (logits_of(model, tokens)[0] - logits_of(model, changed)[0]).abs().max() > 1e-3


# -- loading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_an_official_folder(tmp_path: Path, shards: int) -> None:
    model = dgraph.load(write(tmp_path / "LLaDA", CONFIG, WEIGHTS, shards))
    close(logits_of(model, SEQUENCES[0]), oracle(SEQUENCES[0]))
    spec = model.spec
    assert (spec.family, spec.attention, spec.logit_shift, spec.block_length) == ("llada", "bidirectional", 0, 32)
    assert (spec.mask_id, spec.eos_ids, spec.pad_id, spec.max_positions) == (MASK, (5,), 5, 64)
    assert (spec.layers, spec.hidden, spec.heads, spec.kv_heads, spec.head_dim) == (2, 32, 4, 4, 8)
    assert (model.name, model.tokenizer, spec.vocab) == ("LLaDA", None, VOCAB)


def test_the_shards_memory_is_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[int] = set()
    original = safetensors.torch.load_file

    def noted(path: Any) -> dict[str, Tensor]:
        found = original(path)
        read.update(t.data_ptr() for t in found.values())
        return found

    monkeypatch.setattr(safetensors.torch, "load_file", noted)
    model = dgraph.load(write(tmp_path / "m", CONFIG, WEIGHTS, 2))
    assert {p.data_ptr() for p in model.module.parameters()} == read
    assert len(read) == len(WEIGHTS)


def test_a_padded_embedding(tmp_path: Path) -> None:
    model = dgraph.load(write(tmp_path / "m", {**CONFIG, "vocab_size": VOCAB - 8}, WEIGHTS))
    assert model.spec.vocab == VOCAB
    close(logits_of(model, SEQUENCES[0]), oracle(SEQUENCES[0]))
    same = dgraph.load(write(tmp_path / "n", {**CONFIG, "embedding_size": None}, WEIGHTS))
    assert same.spec.vocab == VOCAB


def test_a_feed_forward_whose_width_is_a_ratio(tmp_path: Path) -> None:
    ratio = {**CONFIG, "mlp_hidden_size": None, "mlp_ratio": SIZES.intermediate / SIZES.hidden}
    close(logits_of(dgraph.load(write(tmp_path / "m", ratio, WEIGHTS)), [3, 4]), oracle([3, 4]))


def test_a_tied_head(tmp_path: Path) -> None:
    tied = {name: w for name, w in WEIGHTS.items() if name != "model.transformer.ff_out.weight"}
    expected = forward({**tied, "model.transformer.ff_out.weight": tied["model.transformer.wte.weight"]}, SIZES, [3, 4])
    config = {**CONFIG, "weight_tying": True}
    close(logits_of(dgraph.load(write(tmp_path / "m", config, tied)), [3, 4]), expected)
    close(logits_of(adopted(tied, weight_tying=True), [3, 4]), expected)
    with pytest.raises(CheckpointError, match=r"missing: model\.transformer\.ff_out\.weight\."):
        dgraph.load(write(tmp_path / "untied", CONFIG, tied))


@pytest.mark.parametrize(("given", "kv_heads"), [({"n_kv_heads": 2}, 2), ({"multi_query_attention": True}, 1), ({}, 4)])
def test_fewer_kv_heads(given: dict[str, Any], kv_heads: int) -> None:
    keys = [name for name in WEIGHTS if "k_proj" in name or "v_proj" in name]
    fewer = {**WEIGHTS, **{name: WEIGHTS[name][: 8 * kv_heads].clone() for name in keys}}
    model = adopted(fewer, **{"n_kv_heads": None, **given})
    assert model.spec.kv_heads == kv_heads
    full = {**fewer, **{name: _repeat(fewer[name], 4 // kv_heads) for name in keys}}
    close(logits_of(model, SEQUENCES[0]), forward(full, SIZES, SEQUENCES[0]))


def _repeat(weight: Tensor, times: int) -> Tensor:
    """Each KV head for a group of query heads."""
    return weight.view(-1, 8, SIZES.hidden).repeat_interleave(times, dim=0).reshape(-1, SIZES.hidden)


def test_the_facts_of_the_published_checkpoints() -> None:
    """Where a config is silent, and beside the one stop token that it names."""
    size = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    shape = random_model("llada-8b", "cpu", torch.float32, num_key_value_heads=2, **size)
    one = Config(layers=1, hidden=8, heads=2, intermediate=8, rows=126464)
    named = {"mask_token_id": 126336, "eos_token_id": 126081, "pad_token_id": 126081}
    silent = dict.fromkeys(named)
    for ids in (named, silent):
        config = {
            **CONFIG,
            **ids,
            "d_model": 8,
            "n_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "mlp_hidden_size": 8,
            "embedding_size": 126464,
            "max_sequence_length": 4096,
        }
        spec = dgraph.adopt(stand_in("LLaDAModelLM", config, random_weights(shapes(one)))).spec
        assert replace(spec, family=shape.spec.family) == shape.spec
    assert (spec.mask_id, spec.eos_ids, spec.pad_id) == (126336, (126081, 126348), 126081)


def test_a_shape_can_be_decoded_in_blocks() -> None:
    size = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    changes = {**size, "num_key_value_heads": 2, "attention": "block_causal", "block_length": 8}
    spec = random_model("llada-8b", "cpu", torch.float32, **changes).spec
    assert (spec.attention, spec.block_length, spec.logit_shift) == ("block_causal", 8, 0)


# -- damaged folders ---------------------------------------------------------------------------------------------


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder, lambda tensors: tensors.pop(name, None))


def with_a_wrong_shape(folder: Path) -> None:
    name = "model.transformer.blocks.1.ff_proj.weight"
    change_tensors(folder, lambda t: t.update({name: t[name][:7].clone()}) if name in t else None)


def with_another_name(folder: Path) -> None:
    name = "model.transformer.ln_f.weight"
    change_tensors(folder, lambda t: t.update({"model.transformer.x.weight": t[name].clone()}) if name in t else None)


def cut_short(folder: Path) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])


def text(name: str, content: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("model.transformer.ln_f.weight"), r"missing: model\.transformer\.ln_f\.weight\. Its config\.json"),
        (with_another_name, r"unexpected: model\.transformer\.x\.weight\."),
        (
            with_a_wrong_shape,
            r"wrong shape: model\.transformer\.blocks\.1\.ff_proj\.weight is \(7, 32\), expected \(48",
        ),
        (cut_short, r"model-00002-of-00002\.safetensors is damaged or not a safetensors file"),
        (
            lambda folder: (folder / "model-00001-of-00002.safetensors").unlink(),
            r"lacks model-00001-of-00002\.safetensors, 1 of the 2 shards that model\.safetensors\.index\.json names",
        ),
        (text(INDEX, "{"), r"index\.json cannot be read as JSON"),
        (text(INDEX, "[]"), r"index\.json holds a list, expected an object with the shard of each tensor"),
        (text(INDEX, "{}"), r"index\.json has no weight_map"),
        (text(INDEX, '{"weight_map": {"a": "../x.safetensors"}}'), r"lacks \.\./x\.safetensors"),
    ],
    ids=["missing", "unexpected", "shape", "cut", "no shard", "index", "list", "no map", "outside"],
)
def test_a_damaged_folder_says_what_is_wrong(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    folder = write(tmp_path / "damaged", CONFIG, WEIGHTS, 2)
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        dgraph.load(folder)
    assert "damaged" in str(caught.value)


def test_only_the_shards_of_the_index_are_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", CONFIG, WEIGHTS, 2)
    (folder / "consolidated.safetensors").write_bytes((folder / "model-00001-of-00002.safetensors").read_bytes())
    close(logits_of(dgraph.load(folder), [1, 2]), oracle([1, 2]))


# -- what Llama is not -------------------------------------------------------------------------------------------

ODD: list[tuple[dict[str, Any], str]] = [
    ({"block_type": "sequential"}, r"block_type is 'sequential', expected 'llama': LlamaForCausalLM cannot"),
    ({"block_group_size": 2}, r"block_group_size is 2, expected 1"),
    ({"activation_type": "swiglu"}, r"activation_type is 'swiglu', expected 'silu'"),
    ({"layer_norm_type": "default"}, r"layer_norm_type is 'default', expected 'rms'"),
    ({"layer_norm_with_affine": False}, r"layer_norm_with_affine is False, expected True"),
    ({"attention_layer_norm": True}, r"attention_layer_norm is True, expected False"),
    ({"bias_for_layer_norm": True}, r"bias_for_layer_norm is True, expected False"),
    ({"include_bias": True}, r"include_bias is True, expected False"),
    ({"include_bias": None}, r"include_bias is None, expected False"),
    ({"include_qkv_bias": True}, r"include_qkv_bias is True, expected False"),
    ({"rope": False}, r"rope is False, expected True"),
    ({"alibi": True}, r"alibi is True, expected False"),
    ({"input_emb_norm": True}, r"input_emb_norm is True, expected False"),
    ({"scale_logits": True}, r"scale_logits is True, expected False"),
    ({"clip_qkv": 8.0}, r"clip_qkv is 8\.0, expected none"),
    ({"mlp_hidden_size": None, "mlp_ratio": None, "rope_theta": None}, r"mlp_hidden_size, rope_theta is missing"),
    ({"d_model": 30}, r"does not describe a LlamaForCausalLM"),
]


@pytest.mark.parametrize(("config", "message"), ODD, ids=["+".join(c) for c, _ in ODD])
def test_what_llama_cannot_represent_is_refused_by_its_key(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json:? {message}"):
        dgraph.load(write(tmp_path / "m", {**CONFIG, **config}, WEIGHTS))
    with pytest.raises(CheckpointError, match=rf"this LLaDAModelLM's config:? {message}"):
        adopted(**config)


# -- adopting ----------------------------------------------------------------------------------------------------


def test_a_model_object_is_adopted_without_a_copy() -> None:
    remote = stand_in("LLaDAModelLM", CONFIG, WEIGHTS).train()
    remote.get_parameter("model.transformer.ln_f.weight").requires_grad_(False)
    frozen = {name: p.requires_grad for name, p in remote.named_parameters()}
    model = dgraph.adopt(remote)
    close(logits_of(model, SEQUENCES[0]), oracle(SEQUENCES[0]))
    mine = sorted(p.data_ptr() for p in model.module.parameters())
    assert mine == sorted(p.data_ptr() for p in remote.parameters())
    up = model.module.get_parameter("model.model.layers.1.mlp.up_proj.weight")
    assert up is remote.get_parameter("model.transformer.blocks.1.up_proj.weight")
    assert {name: p.requires_grad for name, p in remote.named_parameters()} == frozen
    assert remote.training
    spec = dgraph.adopt(remote, mask_id=7, block_length=8, attention="block_causal").spec
    assert (spec.mask_id, spec.block_length, spec.attention) == (7, 8, "block_causal")


def test_a_model_object_that_does_not_fit() -> None:
    fewer = {name: w for name, w in WEIGHTS.items() if "blocks.0.up_proj" not in name}
    message = r"this LLaDAModelLM does not fit Llama: missing: model\.transformer\.blocks\.0\.up_proj\.weight"
    with pytest.raises(CheckpointError, match=message):
        adopted(fewer)


def test_a_config_that_names_another_family(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", {**CONFIG, "architectures": ["LLaDAOtherModelLM"]}, WEIGHTS)
    with pytest.raises(CheckpointError, match="no family loads"):
        dgraph.load(folder)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LLaDAOtherModelLM"]

"""Dream: official checkpoints and remote-code objects as a native Qwen2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dgraph
from dgraph.errors import CheckpointError
from dgraph.models.shapes import random_model
from tests.oracle.dream import Config, forward, shapes
from tests.remote import SEQUENCES, change_tensors, check_against, close, logits_of, random_weights, stand_in, write
from tests.tiny import MASK, VOCAB

SIZES = Config()
WEIGHTS = random_weights(shapes(SIZES))
# config.json of Dream-org/Dream-v0-Instruct-7B, at another size
CONFIG: dict[str, Any] = {
    "architectures": ["DreamModel"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_dream.DreamConfig", "AutoModel": "modeling_dream.DreamModel"},
    "bos_token_id": 5,
    "eos_token_id": 5,
    "hidden_act": "silu",
    "hidden_size": SIZES.hidden,
    "initializer_range": 0.02,
    "intermediate_size": SIZES.intermediate,
    "mask_token_id": MASK,
    "max_position_embeddings": 64,
    "max_window_layers": 28,
    "model_type": "Dream",
    "num_attention_heads": SIZES.heads,
    "num_hidden_layers": SIZES.layers,
    "num_key_value_heads": SIZES.kv_heads,
    "pad_token_id": 5,
    "rms_norm_eps": SIZES.eps,
    "rope_scaling": None,
    "rope_theta": SIZES.rope_theta,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": SIZES.vocab,
}


def oracle(tokens: Any) -> Tensor:
    return forward(WEIGHTS, SIZES, tokens)


def test_module_graph_and_every_pass_equal_the_oracle() -> None:
    check_against(dgraph.adopt(stand_in("DreamModel", CONFIG, WEIGHTS)), oracle)


@pytest.mark.parametrize("shards", [1, 4])
def test_an_official_folder(tmp_path: Path, shards: int) -> None:
    model = dgraph.load(write(tmp_path / "Dream", CONFIG, WEIGHTS, shards))
    close(logits_of(model, SEQUENCES[0]), oracle(SEQUENCES[0]))
    spec = model.spec
    assert (spec.family, spec.attention, spec.logit_shift, spec.block_length) == ("dream", "bidirectional", 1, 32)
    assert (spec.mask_id, spec.eos_ids, spec.pad_id, spec.max_positions) == (MASK, (5,), 5, 64)
    assert (spec.layers, spec.hidden, spec.heads, spec.kv_heads, spec.head_dim) == (2, 32, 4, 2, 8)
    assert (model.name, model.tokenizer, spec.vocab, spec.dtype) == ("Dream", None, VOCAB, torch.float32)


def test_the_facts_of_the_published_checkpoints() -> None:
    changes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    changes |= {"num_key_value_heads": 1}
    shape = random_model("dream-7b", "cpu", torch.float32, **changes)
    sizes = Config(layers=1, hidden=8, heads=2, kv_heads=1, intermediate=8, vocab=152064)
    config = {**CONFIG, **changes, "vocab_size": 152064, "max_position_embeddings": 131072}
    named = {"mask_token_id": 151666, "eos_token_id": 151643, "pad_token_id": 151643}
    for ids in (named, dict.fromkeys(named)):
        spec = dgraph.adopt(stand_in("DreamModel", {**config, **ids}, random_weights(shapes(sizes)))).spec
        assert replace(spec, family=shape.spec.family) == shape.spec
    assert (spec.mask_id, spec.eos_ids, spec.pad_id) == (151666, (151643,), 151643)
    changes |= {"attention": "block_causal", "logit_shift": 0}
    spec = random_model("dream-7b", "cpu", torch.float32, **changes).spec
    assert (spec.attention, spec.logit_shift) == ("block_causal", 0)


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder, lambda tensors: tensors.pop(name, None))


def with_a_wrong_shape(folder: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.bias"
    change_tensors(folder, lambda t: t.update({name: t[name][:7].clone()}) if name in t else None)


def with_an_output_bias(folder: Path) -> None:
    name = "model.layers.1.self_attn.o_proj."
    change_tensors(folder, lambda t: t.update({f"{name}bias": torch.zeros(32)}) if f"{name}weight" in t else None)


def cut_short(folder: Path) -> None:
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("model.layers.0.self_attn.q_proj.bias"), r"missing: model\.layers\.0\.self_attn\.q_proj\.bias\."),
        (with_a_wrong_shape, r"wrong shape: model\.layers\.1\.self_attn\.k_proj\.bias is \(7,\), expected \(16,\)"),
        (with_an_output_bias, r"unexpected: model\.layers\.1\.self_attn\.o_proj\.bias\."),
        (cut_short, r"model-00001-of-00002\.safetensors is damaged"),
    ],
    ids=["missing", "shape", "unexpected", "cut"],
)
def test_a_damaged_folder_says_what_is_wrong(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    folder = write(tmp_path / "damaged", CONFIG, WEIGHTS, 2)
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        dgraph.load(folder)
    assert "damaged" in str(caught.value)


@pytest.mark.parametrize("key", ["use_mrope", "use_sliding_window"])
def test_what_qwen2_cannot_represent_is_refused_by_its_key(tmp_path: Path, key: str) -> None:
    message = rf"config\.json: {key} is True, expected False: Qwen2ForCausalLM cannot represent"
    with pytest.raises(CheckpointError, match=message):
        dgraph.load(write(tmp_path / "m", {**CONFIG, key: True}, WEIGHTS))


def test_a_model_object_is_adopted_without_a_copy() -> None:
    remote = stand_in("DreamModel", CONFIG, WEIGHTS).train()
    remote.get_parameter("lm_head.weight").requires_grad_(False)
    frozen = {name: p.requires_grad for name, p in remote.named_parameters()}
    model = dgraph.adopt(remote)
    close(logits_of(model, SEQUENCES[0]), oracle(SEQUENCES[0]))
    for name, parameter in remote.named_parameters():
        assert model.module.get_parameter(f"model.{name}") is parameter
    assert {name: p.requires_grad for name, p in remote.named_parameters()} == frozen
    assert remote.training
    assert dgraph.adopt(remote, logit_shift=0).spec.logit_shift == 0

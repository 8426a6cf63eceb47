"""Nemotron-Labs-Diffusion: official checkpoints and remote-code objects as a native Ministral."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dgraph
from dgraph.errors import CheckpointError
from dgraph.models.shapes import random_model
from tests.oracle.two_modes import Config, Yarn, forward, shapes
from tests.remote import SEQUENCES, change_tensors, check_against, close, logits_of, random_weights, stand_in, write
from tests.tiny import MASK, draw

REMOTE = "NemotronLabsDiffusionModel"
YARN = Yarn(8.0, 4)
SIZES = Config(layers=2, head_dim=16, theta=1000.0, yarn=YARN, body="encoder", head="diffusion_head")
WEIGHTS = random_weights(shapes(SIZES))
ROPE = {
    "beta_fast": YARN.beta_fast,
    "beta_slow": YARN.beta_slow,
    "factor": YARN.factor,
    "llama_4_scaling_beta": YARN.beta,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": YARN.window,
    "rope_theta": SIZES.theta,
    "rope_type": "yarn",
}
# config.json in the layout of the published 3B, at another size
CONFIG: dict[str, Any] = {
    "architectures": [REMOTE],
    "attention_bias": False,
    "auto_map": {"AutoModel": f"modeling.{REMOTE}"},
    "block_size": 4,
    "dlm_paradigm": "bidirectional",
    "eos_token_id": 2,
    "head_dim": SIZES.head_dim,
    "hidden_act": "silu",
    "hidden_size": SIZES.hidden,
    "intermediate_size": SIZES.intermediate,
    "mask_token_id": MASK,
    "max_position_embeddings": 32,
    "mlp_bias": False,
    "model_type": "nemotron_labs_diffusion",
    "num_attention_heads": SIZES.heads,
    "num_hidden_layers": SIZES.layers,
    "num_key_value_heads": SIZES.kv_heads,
    "rms_norm_eps": SIZES.eps,
    "rope_parameters": ROPE,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": SIZES.vocab,
}


def oracle(tokens: Sequence[int]) -> Tensor:
    return forward(WEIGHTS, SIZES, tokens)[0]


def test_module_graph_and_every_pass_equal_the_oracle() -> None:
    check_against(dgraph.adopt(stand_in(REMOTE, CONFIG, WEIGHTS)), oracle)


def test_frequencies_and_queries_change_after_the_original_window() -> None:
    """Both show in this test: without either the logits are others."""
    tokens, model = draw(30, 5), dgraph.adopt(stand_in(REMOTE, CONFIG, WEIGHTS))
    close(logits_of(model, tokens), oracle(tokens))
    for other in (None, Yarn(8.0, 4, beta=0.0)):
        changed = Config(**{**vars(SIZES), "yarn": other})
        assert (forward(WEIGHTS, changed, tokens)[0][-1] - oracle(tokens)[-1]).abs().max() > 1e-3


@pytest.mark.parametrize("layout", ["rope_parameters", "rope_scaling"])
def test_an_official_folder(tmp_path: Path, layout: str) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "rope_parameters"}
    if layout == "rope_scaling":
        rope = {key: value for key, value in ROPE.items() if key != "rope_theta"}
        config |= {"rope_scaling": rope, "rope_theta": SIZES.theta}
    else:
        config |= {"rope_parameters": ROPE}
    model = dgraph.load(write(tmp_path / "Nemotron", config, WEIGHTS, 2))
    close(logits_of(model, SEQUENCES[0]), oracle(SEQUENCES[0]))
    spec = model.spec
    assert (spec.family, spec.attention, spec.encoding, spec.next_token, spec.aligned) == (
        *("nemotron", "block_causal", "causal", True, False),
    )
    assert (spec.logit_shift, spec.block_length, spec.max_positions, spec.head_dim) == (0, 4, 32, 16)
    assert (spec.mask_id, spec.eos_ids) == (MASK, (2,))


def test_the_facts_of_the_published_checkpoints() -> None:
    silent = {key: value for key, value in CONFIG.items() if key not in ("block_size", "mask_token_id", "eos_token_id")}
    sizes = Config(**{**vars(SIZES), "vocab": 128})
    with pytest.warns(dgraph.DgraphWarning, match="mask_id=100"):
        spec = dgraph.adopt(stand_in(REMOTE, {**silent, "vocab_size": 128}, random_weights(shapes(sizes)))).spec
    assert (spec.mask_id, spec.eos_ids, spec.block_length) == (100, (2,), 32)


@pytest.mark.parametrize(
    ("name", "hidden", "layers", "intermediate", "billions"),
    [
        ("nemotron-3b", 3072, 26, 9216, 3.83),
        ("nemotron-8b", 4096, 34, 14336, 8.49),
        ("nemotron-14b", 5120, 40, 16384, 13.51),
    ],
)
def test_the_published_sizes(name: str, hidden: int, layers: int, intermediate: int, billions: float) -> None:
    """Without memory: the weights only stand for themselves."""
    model = random_model(name, "cpu", torch.bfloat16, opened=True)
    spec, config = model.spec, model.module.model.config
    assert (spec.family, spec.next_token, spec.encoding, spec.block_length) == ("nemotron", True, "causal", 32)
    assert (spec.hidden, spec.layers, config.intermediate_size) == (hidden, layers, intermediate)
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.vocab, spec.mask_id) == (32, 8, 128, 131072, 100)
    count = sum(parameter.numel() for parameter in model.module.parameters())
    assert round(count / 1e9, 2) == billions


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 8}, r"config\.json: sliding_window is 8, expected none: Ministral3ForCausalLM"),
        ({"attention_bias": True}, "attention_bias is True, expected False"),
        ({"dlm_paradigm": "autoregressive"}, "dlm_paradigm is 'autoregressive', expected 'bidirectional'"),
        ({"rope_parameters": "long"}, r"rope_parameters is 'long', expected an object of keys"),
        ({"rope_parameters": {**ROPE, "llama_4_scaling_beta": None}}, "rope_parameters has no llama_4_scaling_beta"),
    ],
)
def test_what_ministral_cannot_represent_is_refused_by_its_key(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        dgraph.load(write(tmp_path / "m", {**CONFIG, **change}, WEIGHTS))


def test_a_damaged_folder_says_what_is_wrong(tmp_path: Path) -> None:
    folder = write(tmp_path / "damaged", CONFIG, WEIGHTS, 2)
    change_tensors(folder, lambda tensors: tensors.pop("diffusion_head.weight", None))
    with pytest.raises(CheckpointError, match=r"missing: diffusion_head\.weight\."):
        dgraph.load(folder)


def test_a_model_object_is_adopted_without_a_copy() -> None:
    remote = stand_in(REMOTE, CONFIG, WEIGHTS)
    model = dgraph.adopt(remote)
    own = {"diffusion_head.weight": "model.lm_head.weight"}
    for name, parameter in remote.named_parameters():
        mine = own.get(name, f"model.{name.replace('encoder.', 'model.', 1)}")
        assert model.module.get_parameter(mine) is parameter

"""Fast-dLLM v2: official checkpoints and remote-code objects as a native Qwen2."""

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
from tests.models.two_modes import compare, prompts_of, setup_of
from tests.oracle.two_modes import Config, diffuse, forward, shapes, threshold
from tests.remote import SEQUENCES, check_against, close, logits_of, random_weights, stand_in, write
from tests.tiny import MASK, VOCAB

REMOTE = "Fast_dLLM_QwenForCausalLM"
SIZES = Config(layers=2, bias=True, theta=1000.0, eps=1e-6)
WEIGHTS = random_weights(shapes(SIZES))
# config.json of Efficient-Large-Model/Fast_dLLM_v2_7B, at another size
CONFIG: dict[str, Any] = {
    "architectures": [REMOTE],
    "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": f"modeling.{REMOTE}"},
    "bd_size": 4,
    "bos_token_id": 4,
    "eos_token_id": 5,
    "hidden_act": "silu",
    "hidden_size": SIZES.hidden,
    "intermediate_size": SIZES.intermediate,
    "layer_types": ["full_attention"] * SIZES.layers,
    "mask_token_id": MASK,
    "max_position_embeddings": 64,
    "model_type": "Fast_dLLM_Qwen",
    "num_attention_heads": SIZES.heads,
    "num_hidden_layers": SIZES.layers,
    "num_key_value_heads": SIZES.kv_heads,
    "rms_norm_eps": SIZES.eps,
    "rope_scaling": None,
    "rope_theta": SIZES.theta,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": SIZES.vocab,
}


def oracle(tokens: Sequence[int]) -> Tensor:
    return forward(WEIGHTS, SIZES, tokens)[0]


def test_module_graph_and_every_pass_equal_the_oracle() -> None:
    check_against(dgraph.adopt(stand_in(REMOTE, CONFIG, WEIGHTS)), oracle)


@pytest.mark.parametrize("shards", [1, 3])
def test_an_official_folder(tmp_path: Path, shards: int) -> None:
    model = dgraph.load(write(tmp_path / "Fast_dLLM_v2", CONFIG, WEIGHTS, shards))
    close(logits_of(model, SEQUENCES[0]), oracle(SEQUENCES[0]))
    spec = model.spec
    assert (spec.family, spec.attention, spec.encoding, spec.next_token) == (
        *("fast_dllm_v2", "block_causal", "block", True),
    )
    assert (spec.logit_shift, spec.block_length, spec.aligned, spec.max_positions) == (1, 4, True, 64)
    assert (spec.mask_id, spec.eos_ids, spec.vocab, spec.dtype) == (MASK, (5,), VOCAB, torch.float32)


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    """The 1.5B has no head of its own."""
    tied = {name: value for name, value in WEIGHTS.items() if name != "lm_head.weight"}
    model = dgraph.load(write(tmp_path / "tied", {**CONFIG, "tie_word_embeddings": True}, tied))
    head, embedding = (model.module.get_parameter(f"model.{n}.weight") for n in ("lm_head", "model.embed_tokens"))
    assert head is embedding
    own = {**tied, "lm_head.weight": tied["model.embed_tokens.weight"]}
    close(logits_of(model, SEQUENCES[2]), forward(own, SIZES, SEQUENCES[2])[0])


def test_the_facts_of_the_published_checkpoints() -> None:
    silent = {key: value for key, value in CONFIG.items() if key not in ("bd_size", "mask_token_id", "eos_token_id")}
    remote = stand_in(
        REMOTE, {**silent, "vocab_size": 151936}, random_weights(shapes(Config(2, vocab=151936, bias=True)))
    )
    with pytest.warns(dgraph.DgraphWarning, match="mask_id"):
        spec = dgraph.adopt(remote).spec
    assert (spec.mask_id, spec.eos_ids, spec.block_length) == (151665, (151645,), 32)


@pytest.mark.parametrize(
    ("name", "hidden", "heads", "kv_heads", "vocab", "tied", "billions"),
    [("fast-dllm-v2-1.5b", 1536, 12, 2, 151936, True, 1.54), ("fast-dllm-v2-7b", 3584, 28, 4, 152064, False, 7.62)],
)
def test_the_published_sizes(
    name: str, hidden: int, heads: int, kv_heads: int, vocab: int, tied: bool, billions: float
) -> None:
    """Without memory: the weights only stand for themselves. A head that is tied is counted once."""
    model = random_model(name, "cpu", torch.bfloat16, opened=True)
    spec = model.spec
    assert (spec.family, spec.next_token, spec.logit_shift, spec.encoding) == ("fast_dllm_v2", True, 1, "block")
    assert (spec.hidden, spec.heads, spec.kv_heads, spec.head_dim) == (hidden, heads, kv_heads, 128)
    assert (spec.layers, spec.vocab, spec.mask_id, spec.block_length) == (28, vocab, 151665, 32)
    head, embedding = (model.module.get_parameter(f"model.{n}.weight") for n in ("lm_head", "model.embed_tokens"))
    assert (head is embedding) == tied
    count = sum(parameter.numel() for parameter in model.module.parameters())
    assert round(count / 1e9, 2) == billions


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_sliding_window": True}, r"config\.json: use_sliding_window is True, expected False: Qwen2ForCausalLM"),
        (
            {"layer_types": ["sliding_attention"]},
            r"layer_types is \['sliding_attention'\], expected 'full_attention' alone",
        ),
    ],
)
def test_what_qwen2_cannot_represent_is_refused_by_its_key(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        dgraph.load(write(tmp_path / "m", {**CONFIG, **change}, WEIGHTS))


def test_a_model_object_is_adopted_without_a_copy() -> None:
    remote = stand_in(REMOTE, CONFIG, WEIGHTS)
    model = dgraph.adopt(remote)
    for name, parameter in remote.named_parameters():
        assert model.module.get_parameter(f"model.{name}") is parameter


def test_a_prompt_of_exactly_one_block_is_read() -> None:
    """The published code begins it without that block's keys."""
    setup, records = setup_of("fast_dllm_v2", 8), []
    prompts = prompts_of(setup, (8, 8))
    prompts[1] = [*prompts[0][:2], prompts[0][2] + 1, *prompts[0][3:]]
    traces = [diffuse(setup.plain, prompt, 12, threshold(0.7)) for prompt in prompts]
    made = setup.optimized("dense")
    result = made.generate(input_ids=prompts, max_new_tokens=12, threshold=0.7, observer=records.append, keep_kv=True)
    compare(result, records, traces)
    assert result.token_ids[0] != result.token_ids[1]  # what a token of the prompt is matters

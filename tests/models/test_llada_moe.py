"""LLaDA-MoE: numbers against plain PyTorch, generations, official folders and remote-code objects."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dgraph
from dgraph.errors import CheckpointError
from dgraph.models.llada_moe import FACTS
from dgraph.models.shapes import random_model
from dgraph.passes import CacheKV, ChunkLMHead, FuseProjections, PackRows
from dgraph.testing import check_batch_equals_alone, models
from tests.models import test_sdar_moe
from tests.models.test_sdar_moe import DENSE, EXPERTS, SIZES, TOPK, WEIGHTS, WIDTH
from tests.oracle import qwen3
from tests.remote import SEQUENCES, change_tensors, check_head, logits_of, stand_in, write
from tests.tiny import caches_of, draw, interpret, rewritten, rows_of

EOS = 5
CLASS = "LLaDAMoEModelLM"
KEYS: dict[str, Any] = {
    "architectures": [CLASS],
    "model_type": "lladamoe",
    "auto_map": {"AutoModelForCausalLM": f"modeling_lladamoe.{CLASS}"},
    "vocab_size": SIZES.vocab,
    "hidden_size": SIZES.hidden,
    "dense_intermediate_size": SIZES.intermediate,
    "expert_intermediate_size": WIDTH,
    "shared_expert_intermediate_size": None,
    "num_hidden_layers": SIZES.layers,
    "num_attention_heads": SIZES.heads,
    "num_key_value_heads": SIZES.kv_heads,
    "moe_layer_freq": [int(layer != DENSE) for layer in range(SIZES.layers)],
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOPK,
    "norm_topk_prob": None,
    "qk_layernorm": True,
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "partial_rotary_factor": 1.0,
    "routed_scaling_factor": 1,
    "router_num_group": None,
    "router_topk_group": None,
    "rms_norm_eps": SIZES.eps,
    "rope_theta": SIZES.rope_theta,
    "rope_scaling": None,
    "hidden_act": "silu",
    "attention_bias": False,
    "clip_qkv": None,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "mask_token_id": SIZES.vocab - 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}


# A mixture in the layers that have a router, each expert's share the softmax itself.
FORWARD = functools.partial(qwen3.forward, feed_forward=functools.partial(test_sdar_moe.feed_forward, normalise=False))


def expected(tokens: list[int]) -> Tensor:
    """Logits [t, vocab] of a sequence in which every row sees every row."""
    t = len(tokens)
    cache = qwen3.Cache(SIZES, t, torch.ones(()))
    return qwen3.project(WEIGHTS, FORWARD(WEIGHTS, SIZES, tokens, range(t), [t] * t, cache))


def near(got: Tensor, want: Tensor) -> None:
    """Equal in fp32 but for the order of sums: 1e-5 of the largest logit."""
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))


def remote(**config: Any) -> Any:
    return stand_in(CLASS, {**KEYS, **config}, WEIGHTS)


@pytest.fixture(scope="module")
def model() -> dgraph.Model:
    return dgraph.adopt(remote(), block_length=8)


# -- numbers -----------------------------------------------------------------------------------------------------


def test_module_graph_and_every_pass_equal_the_oracle(model: dgraph.Model) -> None:
    wanted = [expected(tokens) for tokens in SEQUENCES]
    assert min(w.std() for w in wanted) > 0.5
    for tokens, logits in zip(SEQUENCES, wanted, strict=True):
        near(logits_of(model, tokens), logits)
    graph, rows = dgraph.capture(model), rows_of(SEQUENCES)
    fused = rewritten(graph, PackRows(), FuseProjections())
    near(interpret(fused, rows)["logits"], torch.cat(wanted))
    cached = rewritten(fused, CacheKV())
    inputs = {**rows, **caches_of(model.spec, [len(s) for s in SEQUENCES])}
    near(interpret(cached, inputs)["logits"], torch.cat(wanted))
    check_head(rewritten(cached, ChunkLMHead(2)), {**inputs, **rows}, torch.cat(wanted))


def generated(prompt: list[int], new: int, block: int, threshold: float) -> list[int]:
    """Block by block: what is surer than a threshold, else the surest, from a forward of the whole canvas each time."""
    mask = SIZES.vocab - 1
    canvas = [*prompt, *[mask] * new]
    for start in range(len(prompt), len(canvas), block):
        inside = range(start, min(start + block, len(canvas)))
        while masks := [p for p in inside if canvas[p] == mask]:
            logits = expected(canvas)
            logits[:, mask] = -torch.inf
            sure, token = (values.tolist() for values in logits.softmax(-1).max(-1))
            for p in [p for p in masks if sure[p] > threshold] or [max(masks, key=lambda p: sure[p])]:
                canvas[p] = token[p]
        if EOS in canvas[len(prompt) : start + block]:
            break
    response = canvas[len(prompt) :]
    return response[: response.index(EOS)] if EOS in response else response


def test_generations_are_the_oracles(model: dgraph.Model) -> None:
    """Ragged prompts, as one batch."""
    prompts = [draw(n, n) for n in (3, 9, 14)]
    run = dgraph.optimize(model, "dense", backend="eager")
    found = run.generate(input_ids=prompts, max_new_tokens=19, threshold=0.6)
    assert found.token_ids == [generated(prompt, 19, 8, 0.6) for prompt in prompts]
    assert found.stats.decoded > found.stats.steps


# -- loading and adopting ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_an_official_folder(tmp_path: Path, shards: int) -> None:
    loaded = dgraph.load(write(tmp_path / "LLaDA-MoE-7B-A1B-Instruct", KEYS, WEIGHTS, shards))
    near(logits_of(loaded, SEQUENCES[0]), expected(SEQUENCES[0]))
    spec = loaded.spec
    assert (spec.family, spec.mask_id, spec.eos_ids, spec.block_length) == ("llada_moe", SIZES.vocab - 1, (EOS,), 32)
    assert (spec.attention, spec.logit_shift, spec.max_positions) == ("bidirectional", 0, 512)


def test_the_facts_of_the_published_checkpoints() -> None:
    assert (FACTS["mask_id"], FACTS["eos_ids"], FACTS["attention"]) == (156895, (156892,), "bidirectional")
    small = {"num_hidden_layers": 1, "hidden_size": 32, "vocab_size": 97, "num_experts": 8, "block_length": 8}
    small |= {"mask_id": 96, "eos_ids": (5,), "pad_id": 0, "expert_intermediate_size": 16, "num_attention_heads": 4}
    model = random_model("llada-moe-7b-a1b", "cpu", torch.float32, num_key_value_heads=4, **small)
    assert (model.spec.heads, model.spec.head_dim, model.spec.max_positions) == (4, 8, 8192)


def test_a_remote_code_model_is_adopted_without_a_second_copy() -> None:
    model = remote()
    mine = dict(dgraph.adopt(model).module.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, WEIGHTS[name])
        if ".experts." not in name:
            assert parameter is mine[f"model.{name}"]
    own = model.get_parameter("model.layers.2.mlp.experts.5.up_proj.weight")
    assert own.data_ptr() == mine["model.model.layers.2.mlp.experts.gate_up_proj"][5, WIDTH].data_ptr()


def test_a_missing_expert(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", KEYS, WEIGHTS)
    change_tensors(folder, lambda tensors: tensors.pop("model.layers.2.mlp.experts.6.down_proj.weight"))
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.2\.mlp\.experts\.6\.down_proj\.weight\. Its"):
        dgraph.load(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_experts_per_tok": 9}, r"topk must be between 1 and the 8 experts to choose from, got 9"),
        ({"moe_router_score_function": "sigmoid"}, r"moe_router_score_function is 'sigmoid', expected 'softmax'"),
        ({"moe_router_enable_expert_bias": True}, r"moe_router_enable_expert_bias is True, expected False"),
        ({"shared_expert_intermediate_size": 24}, r"shared_expert_intermediate_size is 24, expected 0"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5, expected 1"),
        ({"qk_layernorm": False}, r"qk_layernorm is False, expected True"),
        ({"expert_intermediate_size": None}, r"expert_intermediate_size must be given, a number each"),
        ({"moe_layer_freq": [1]}, r"moe_layer_freq must have an entry for each of 3 layers, got 1"),
    ],
)
def test_a_config_that_describes_something_else(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"this {CLASS}'s config: .*{message}"):
        dgraph.adopt(remote(**config))


# -- recipes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe",
    [
        "fast_dllm",
        *(
            pytest.param(name, marks=pytest.mark.release)
            for name in ("dyllm", "vicinity", "dkv_cache", "dllm_cache", "sparse_dllm", "dllm_serve", "maskkv")
        ),
    ],
)
def test_every_recipe_of_bidirectional_families(recipe: str) -> None:
    (tiny,) = models(None, "llada_moe")
    check_batch_equals_alone(tiny, recipe, {})

"""SDAR-MoE: checkpoints with experts apart, remote-code objects and native Qwen3-MoE objects."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dgraph
from dgraph.errors import CheckpointError
from dgraph.passes import FuseProjections, PackRows
from tests.amounts import first_cases
from tests.oracle import qwen3
from tests.oracle.llada2 import experts_of, mixture, softmax_routing
from tests.oracle.models import random_weights as dense_weights
from tests.oracle.models import tiny_config
from tests.recipes.block_causal import Setup, check, optimized, prompts_for
from tests.remote import SEQUENCES, change_tensors, logits_of, stand_in, write
from tests.tiny import interpret, ops_of, rewritten, rows_of

SIZES = tiny_config(layers=3)
EXPERTS, TOPK, WIDTH, DENSE = 8, 3, 24, 1
"""Layer 1 is dense."""
KEYS: dict[str, Any] = {
    "architectures": ["SDARMoeForCausalLM"],
    "model_type": "sdar_moe",
    "auto_map": {"AutoModelForCausalLM": "modeling_sdar_moe.SDARMoeForCausalLM"},
    "vocab_size": SIZES.vocab,
    "hidden_size": SIZES.hidden,
    "intermediate_size": SIZES.intermediate,
    "moe_intermediate_size": WIDTH,
    "num_hidden_layers": SIZES.layers,
    "num_attention_heads": SIZES.heads,
    "num_key_value_heads": SIZES.kv_heads,
    "head_dim": SIZES.head_dim,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOPK,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [DENSE],
    "rms_norm_eps": SIZES.eps,
    "rope_theta": SIZES.rope_theta,
    "rope_scaling": None,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mask_token_id": SIZES.vocab - 1,
    "eos_token_id": 5,
    "pad_token_id": 0,
    "block_size": 32,
}


def weights_of(seed: int) -> dict[str, Tensor]:
    """The weights of a dense model with the feed-forwards of layers 0 and 2 replaced."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    weights = dense_weights(SIZES, seed)
    for layer in range(SIZES.layers):
        if layer != DENSE:
            path = f"model.layers.{layer}.mlp"
            weights = {n: w for n, w in weights.items() if not n.startswith(f"{path}.")}
            weights[f"{path}.gate.weight"] = normal(EXPERTS, SIZES.hidden, std=SIZES.hidden**-0.5)
            weights |= experts_of(f"{path}.experts", EXPERTS, WIDTH, SIZES.hidden, normal)
    return weights


WEIGHTS = weights_of(seed=19)
"""Of 40 seeds the one by which the decisions of DyLLM's tests are furthest from where rounding decides: 2.7e-5 between
two experts of a row, 5e-4 between a confidence and the threshold, 1.6e-5 between a cosine and tau."""


def feed_forward(x: Tensor, weight: Callable[[str], Tensor], normalise: bool = True) -> Tensor:
    """A mixture in the layers that have a router."""
    try:
        weight("gate")
    except KeyError:
        return qwen3.gated(x, weight)
    return mixture(x, weight, lambda logits: softmax_routing(logits, TOPK, normalise))


FORWARD = functools.partial(qwen3.forward, feed_forward=feed_forward)


def expected(tokens: list[int], forward: Callable[..., Tensor] = FORWARD) -> Tensor:
    """Logits [t, vocab] of a sequence in which every row sees every row."""
    t = len(tokens)
    return qwen3.project(
        WEIGHTS, forward(WEIGHTS, SIZES, tokens, range(t), [t] * t, qwen3.Cache(SIZES, t, torch.ones(())))
    )


def near(got: Tensor, want: Tensor) -> None:
    """Equal in fp32 but for the order of sums: 1e-5 of the largest logit."""
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))


def remote(**config: Any) -> Any:
    return stand_in("SDARMoeForCausalLM", {**KEYS, **config}, WEIGHTS)


def native(**config: Any) -> Any:
    """A transformers object of the same weights, its experts stacked."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    known = {k: v for k, v in {**KEYS, **config}.items() if k not in ("architectures", "model_type", "auto_map")}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**known, attn_implementation="sdpa")).eval()  # type: ignore[call-arg]
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if ".experts." in name:
                path, _, kind = name.rpartition(".")
                kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
                for e in range(EXPERTS):
                    tensor[e] = torch.cat([WEIGHTS[f"{path}.{e}.{k}.weight"] for k in kinds])
            else:
                tensor.copy_(WEIGHTS[name])
    return model


@pytest.fixture(scope="module")
def setup() -> Setup:
    model = dgraph.adopt(remote(), block_length=16)
    return Setup(SIZES, WEIGHTS, model, dgraph.capture(model))


# -- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalise", [True, False])
def test_module_graph_and_packed_graph_equal_the_oracle(normalise: bool) -> None:
    forward = functools.partial(qwen3.forward, feed_forward=functools.partial(feed_forward, normalise=normalise))
    wanted = [expected(tokens, forward) for tokens in SEQUENCES]
    model = dgraph.adopt(remote(norm_topk_prob=normalise))
    for tokens, logits in zip(SEQUENCES, wanted, strict=True):
        near(logits_of(model, tokens), logits)
    fused = rewritten(dgraph.capture(model), PackRows(), FuseProjections())
    near(interpret(fused, rows_of(SEQUENCES))["logits"], torch.cat(wanted))


def test_transformers_gives_the_same() -> None:
    """Its own loop over experts, with a mask that hides nothing."""
    model, tokens = native(), torch.tensor([SEQUENCES[0]])
    with torch.no_grad():
        logits = model(input_ids=tokens, attention_mask=torch.zeros(1, 1, 9, 9)).logits[0]
    near(logits, expected(SEQUENCES[0]))
    near(logits_of(dgraph.adopt(model, mask_id=96), SEQUENCES[0]), logits)


def test_what_the_graph_says(setup: Setup) -> None:
    first, second, third = (ops_of(setup.graph, layer) for layer in range(3))
    assert first == third
    assert (first.count("dgraph.route"), first.count("dgraph.experts"), first.count("dgraph.rope")) == (1, 1, 2)
    assert "dgraph.experts" not in second
    assert "model.layers.0.mlp.experts.gate_up_proj" in setup.graph.tensors


# -- decoding ----------------------------------------------------------------------------------------------------


@first_cases(1, "backend", ["eager", "inductor"])
def test_dense_is_the_oracle(setup: Setup, backend: str) -> None:
    options = {"evict": False, "block_cache": "off", "recommit": True, "forward": FORWARD}
    check(setup, 16, optimized(setup, "dense", backend), {"threshold": 0.7}, options)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_focus_is_the_oracle(setup: Setup, backend: str) -> None:
    check(setup, 16, optimized(setup, "focus", backend), {"threshold": 0.7}, {"forward": FORWARD})


@pytest.mark.parametrize("recipe", ["dense", "focus"])
def test_a_batch_gives_what_each_prompt_gives_alone(setup: Setup, recipe: str) -> None:
    run, prompts = optimized(setup, recipe), prompts_for(16)
    settings: dict[str, Any] = {"max_new_tokens": 40, "threshold": 0.6}
    together = run.generate(input_ids=prompts, **settings).token_ids
    assert together == [run.generate(input_ids=[p], **settings).token_ids[0] for p in prompts]


# -- loading and adopting ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_an_official_folder(tmp_path: Path, shards: int) -> None:
    config = {key: value for key, value in KEYS.items() if key != "block_size"}
    model = dgraph.load(write(tmp_path / "SDAR-30B-A3B-Chat-b16", config, WEIGHTS, shards))
    near(logits_of(model, SEQUENCES[0]), expected(SEQUENCES[0]))
    spec = model.spec
    assert (spec.family, spec.mask_id, spec.eos_ids, spec.block_length) == ("sdar_moe", 96, (5,), 16)
    assert (spec.attention, spec.logit_shift, spec.max_positions) == ("block_causal", 0, 512)


def test_a_missing_expert(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", KEYS, WEIGHTS)
    change_tensors(folder, lambda tensors: tensors.pop("model.layers.2.mlp.experts.6.down_proj.weight"))
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.2\.mlp\.experts\.6\.down_proj\.weight\. Its"):
        dgraph.load(folder)


def test_a_config_that_describes_something_else(tmp_path: Path) -> None:
    for i, (config, message) in enumerate(
        (
            ({"num_experts_per_tok": 9}, r"topk must be between 1 and the 8 experts to choose from, got 9"),
            ({"hidden_act": "gelu"}, r"hidden_act is 'gelu', expected 'silu'"),
            ({"hidden_size": "wide"}, r"does not describe a Qwen3MoeForCausalLM"),
        )
    ):
        folder = write(tmp_path / str(i), {**KEYS, **config}, WEIGHTS)
        with pytest.raises(CheckpointError, match=message):
            dgraph.load(folder)


def test_a_remote_code_model_is_adopted_without_a_second_copy() -> None:
    model = remote()
    mine = dict(dgraph.adopt(model).module.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, WEIGHTS[name])
        assert parameter.requires_grad
        if ".experts." not in name:
            assert parameter is mine[f"model.{name}"]
    own = model.get_parameter("model.layers.2.mlp.experts.5.up_proj.weight")
    assert own.data_ptr() == mine["model.model.layers.2.mlp.experts.gate_up_proj"][5, WIDTH].data_ptr()


def test_a_native_object_is_adopted_without_any_copy() -> None:
    model = native()
    kind = type(model.model.layers[0].mlp)
    mine = dict(dgraph.adopt(model, mask_id=96).module.named_parameters())
    assert {f"model.{name}": p.data_ptr() for name, p in model.named_parameters()} == {
        name: p.data_ptr() for name, p in mine.items()
    }
    assert type(model.model.layers[0].mlp) is kind  # the caller's object is as it was

"""Tiny LLaDA and Dream models whose decode is not trivial, as tests of their recipes share them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

import dgraph
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.regions import RegionCompiler
from dgraph.recipes import RECIPES, Recipe, build
from tests.oracle.canvas import llada_names
from tests.oracle.qwen3 import Config
from tests.remote import stand_in

LAYERS, VOCAB, EOS = 3, 97, 5
MASK = VOCAB - 1
T = TypeVar("T")
FAMILIES = ("llada", "dream")

LLADA: dict[str, Any] = {
    "activation_type": "silu",
    "block_type": "llama",
    "include_bias": False,
    "layer_norm_type": "rms",
    "rope": True,
    "weight_tying": False,
    "max_sequence_length": 256,
    "embedding_size": VOCAB,
}
DREAM: dict[str, Any] = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "vocab_size": VOCAB,
}


@dataclass(frozen=True, eq=False)
class Setup:
    """A model, what was captured of it, and the same weights for the oracle."""

    family: str
    config: Config
    weights: dict[str, Tensor]
    model: dgraph.Model
    graph: dgraph.Graph

    @property
    def shift(self) -> int:
        return self.model.spec.logit_shift

    def stopping_at(self, *eos_ids: int) -> Setup:
        """The same model with other stop tokens."""
        return replace(self, model=replace(self.model, spec=replace(self.model.spec, eos_ids=eos_ids)))

    def traced(
        self, generate: Callable[..., T], prompt: Sequence[int], method: Any, block: int, new: int, **rule: Any
    ) -> T:
        """What an oracle's `generate` does with a prompt under a method, in blocks of that length; new: tokens."""
        given = {"mask_id": MASK, "eos_ids": self.model.spec.eos_ids, "shift": self.shift, **rule}
        return generate(self.weights, self.config, prompt, method, max_new_tokens=new, block_length=block, **given)

    def optimized(
        self,
        recipe: str,
        block: int,
        backend: str = "eager",
        buckets: Any = None,
        fresh: bool = False,
        first: str | None = None,
        **options: Any,
    ) -> CompiledModel:
        """The recipe, for blocks of that length; equal recipes share it, with the memory that they have taken, unless
        it is to be fresh.

        first: `RowPlan.first` as a family with ("position") or without shifted logits ("policy") has it; None: its own.
        """
        model = replace(self.model, spec=replace(self.model.spec, block_length=block))
        spec = model.spec if first is None else replace(model.spec, logit_shift=int(first == "position"))
        built = build(RECIPES, recipe, spec, options)
        make = _optimized.__wrapped__ if fresh else _optimized
        return make(self, built, block, backend, Buckets.of(buckets))


@functools.lru_cache(maxsize=64)
def _optimized(setup: Setup, recipe: Recipe, block: int, backend: str, buckets: Buckets) -> CompiledModel:
    model = replace(setup.model, spec=replace(setup.model.spec, block_length=block))
    return CompiledModel(model, setup.graph, recipe, RegionCompiler(backend), buckets)


def config_of(family: str) -> Config:
    kv_heads = 4 if family == "llada" else 2
    return Config(LAYERS, 32, 4, kv_heads, 8, 48, VOCAB, rope_theta=500.0, eps=1e-5)


def random_weights(config: Config, biases: bool, seed: int = 0) -> dict[str, Tensor]:
    """fp32 weights under the names of a Llama's or (with biases) a Qwen2's checkpoint.

    Sharp queries and keys and a small mask embedding: mask rows differ by what they attend to only.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    d, ff = config.hidden, config.intermediate
    weights = {"model.embed_tokens.weight": normal(VOCAB, d, std=1.0)}
    weights["model.embed_tokens.weight"][MASK] *= 0.2
    for layer in range(config.layers):
        name = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}{norm}.weight"] = 1 + normal(d, std=0.1)
        for kind, heads, std in (("q", config.heads, 2.0), ("k", config.kv_heads, 2.0), ("v", config.kv_heads, 1.0)):
            width = heads * config.head_dim
            weights[f"{name}self_attn.{kind}_proj.weight"] = normal(width, d, std=std * d**-0.5)
            if biases:
                weights[f"{name}self_attn.{kind}_proj.bias"] = normal(width, std=0.3)
        weights[f"{name}self_attn.o_proj.weight"] = normal(d, config.heads * config.head_dim, std=2.0 * d**-0.5)
        weights[f"{name}mlp.gate_proj.weight"] = normal(ff, d, std=d**-0.5)
        weights[f"{name}mlp.up_proj.weight"] = normal(ff, d, std=d**-0.5)
        weights[f"{name}mlp.down_proj.weight"] = normal(d, ff, std=2.0 * ff**-0.5)
    weights["model.norm.weight"] = 1 + normal(d, std=0.1)
    weights["lm_head.weight"] = normal(VOCAB, d, std=5.0 * d**-0.5)
    return weights


@functools.cache
def setup_of(family: str) -> Setup:
    """A tiny model of a family; captured once, so leave it as it is."""
    config = config_of(family)
    weights = random_weights(config, biases=family == "dream")
    ids = {"mask_token_id": MASK, "eos_token_id": EOS, "pad_token_id": EOS, "rope_theta": config.rope_theta}
    shape = {"rms_norm_eps": config.eps, **ids}
    if family == "llada":
        shape |= {**LLADA, "d_model": config.hidden, "n_heads": config.heads, "n_layers": config.layers}
        shape |= {"mlp_hidden_size": config.intermediate}
        remote = stand_in("LLaDAModelLM", shape, llada_names(weights, config.layers))
    else:
        shape |= {**DREAM, "hidden_size": config.hidden, "num_hidden_layers": config.layers}
        shape |= {"num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads}
        shape |= {"intermediate_size": config.intermediate}
        remote = stand_in("DreamModel", shape, weights)
    model = dgraph.adopt(remote)
    return Setup(family, config, weights, model, dgraph.capture(model))


def prompts_for(block: int) -> list[list[int]]:
    """Ragged: a few tokens, more than a block, two blocks."""
    draw = torch.Generator().manual_seed(block)
    return [torch.randint(6, 90, (n,), generator=draw).tolist() for n in (3, block + 5, 2 * block)]

"""Published shapes with random weights, built straight on a device: models to measure speed without a download."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from dgraph.errors import UnknownName
from dgraph.families import Model
from dgraph.families.weights import WeightSource, read_all, weights_of
from dgraph.models import diffusion_gemma, dream, fast_dllm_v2, llada, llada2, llada_moe, nemotron, sdar, sdar_moe
from dgraph.models.checkpoint import make_hollow
from dgraph.models.moe import MoEFamily
from dgraph.models.remote_code import RemoteCodeFamily
from dgraph.ranks.sharding import Part

_MINISTRAL = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}

# Family, which builds the model and knows its facts, and the config's keys, of the published checkpoints.
SHAPES: dict[str, tuple[RemoteCodeFamily | MoEFamily, dict[str, Any]]] = {
    "sdar-8b": (
        sdar.family,
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "block_size": 32,
        },
    ),
    "sdar-30b-a3b": (
        sdar_moe.family,
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "block_size": 32,
        },
    ),
    "llada2-mini": (
        llada2.family,
        {
            "vocab_size": 157184,
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "moe_intermediate_size": 512,
            "num_hidden_layers": 20,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "max_position_embeddings": 32768,
        },
    ),
    "llada-8b": (
        llada.family,
        {
            "vocab_size": 126464,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "rope_theta": 5e5,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
    ),
    "llada-moe-7b-a1b": (
        llada_moe.family,
        {
            "vocab_size": 157184,
            "hidden_size": 2048,
            "dense_intermediate_size": 8192,
            "expert_intermediate_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "qk_layernorm": True,
            "max_position_embeddings": 8192,
            "rope_theta": 5e4,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
    ),
    "fast-dllm-v2-7b": (
        fast_dllm_v2.family,
        {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        },
    ),
    "fast-dllm-v2-1.5b": (
        fast_dllm_v2.family,
        {
            "vocab_size": 151936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron-3b": (
        nemotron.family,
        {**_MINISTRAL, "hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 26},
    ),
    "nemotron-8b": (nemotron.family, _MINISTRAL),
    "nemotron-14b": (
        nemotron.family,
        {**_MINISTRAL, "hidden_size": 5120, "intermediate_size": 16384, "num_hidden_layers": 40},
    ),
    "diffusion-gemma-26b-a4b": (
        diffusion_gemma.family,
        {
            "vocab_size": 262144,
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "moe_intermediate_size": 704,
            "num_hidden_layers": 30,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "num_global_key_value_heads": 2,
            "global_head_dim": 512,
            "sliding_window": 1024,
            "num_experts": 128,
            "top_k_experts": 8,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "final_logit_softcapping": 30.0,
            "use_bidirectional_attention": "vision",
            "tie_word_embeddings": True,
            "canvas_length": 256,
        },
    ),
    "dream-7b": (
        dream.family,
        {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        },
    ),
}


def random_model(
    name: str,
    device: str | torch.device,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    opened: bool = False,
    **changes: Any,
) -> Model:
    """A model of a published shape with random weights.

    Args:
        name: a key of `SHAPES`.
        device, dtype: where and as what the weights are made; nothing passes through the host.
        seed: seed of the weights.
        opened: make none yet: ranks that divide the model make their parts of it, see `dgraph.load`.
        changes: config keys to override, e.g. `num_hidden_layers=4`, or facts of the family, e.g. `block_length=`.
            A shape of LLaDA or Dream is that of a bidirectional model; to decode it in blocks whose keys and values
            are kept, as SDAR is, give `attention="block_causal", logit_shift=0`.

    Raises:
        UnknownName: no such shape.
        CheckpointError: `changes` that do not make a model.
    """
    if name not in SHAPES:
        raise UnknownName("shape", name, SHAPES)
    family, keys = SHAPES[name]
    facts = {k: v for k, v in family.facts.items() if v is not None}
    facts |= {k: changes.pop(k) for k in list(changes) if k in family.facts}
    model = family.build({**keys, **changes}, f"the shape {name}")
    make_hollow(model, dtype, torch.device(device))
    model.tie_weights()
    found = family.model(name, model, {**keys, **changes}, dtype, **facts)
    weights = Drawn(model, seed)
    if opened:
        return replace(found, weights=weights)
    read_all(weights_of(found.module, found.prefix), weights)
    return found


class Drawn(WeightSource):
    """Random weights, each drawn by itself: parts are those of one whole model, on any rank.

    Args:
        model: model whose weights are drawn.
        seed: seed of all of them.
    """

    def __init__(self, model: nn.Module, seed: int):
        super().__init__({})
        first: dict[int, str] = {}
        stored = model.state_dict(keep_vars=True)  # parameters, and the buffers that a checkpoint has
        self._names, self._seed = {name: first.setdefault(id(each), name) for name, each in stored.items()}, seed

    def __contains__(self, name: str) -> bool:
        return name in self._names

    @torch.no_grad()
    def take(self, name: str, like: Tensor, part: Part | None) -> Tensor:
        """See `WeightSource.take`: ones for a vector, else normal numbers from a seed of its own.

        A part is cut from its weight, which is in memory for that long.
        """
        whole = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        if whole.dim() < 2:
            whole.fill_(1.0)
        else:
            seed = crc32(f"{self._seed} {self._names[name]}".encode())
            whole.normal_(0.0, 0.02, generator=torch.Generator(whole.device).manual_seed(seed))
        return whole if part is None else part.take(whole)

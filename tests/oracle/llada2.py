"""LLaDA2 for one sequence, in fp32, row by row: experts chosen and summed in plain Python, nothing stacked.

Weights are a dict with the names of a LLaDA2 checkpoint: one projection for queries, keys and values, experts apart.
Rows, limits, cache and hook are those of `tests.oracle.qwen3`. The router and the mixture also serve Qwen3-MoE.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from tests.oracle.qwen3 import Cache, Hook, Weights, attention, gated, rms_norm, rope


@dataclass(frozen=True)
class Config:
    """The shape of a LLaDA2 model."""

    layers: int = 3
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 96
    expert: int = 24
    vocab: int = 97
    experts: int = 16
    topk: int = 3
    groups: int = 4
    top_groups: int = 2
    capacity: int = 0
    block: int = 8
    scale: float = 2.5
    dense: int = 1
    rotary: float = 0.5
    rope_theta: float = 600_000.0
    eps: float = 1e-6


def keys(config: Config, **changes: Any) -> dict[str, Any]:
    """What config.json of such a checkpoint says."""
    return {
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "moe_intermediate_size": config.expert,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": 512,
        "num_experts": config.experts,
        "num_experts_per_tok": config.topk,
        "num_shared_experts": 1,
        "first_k_dense_replace": config.dense,
        "n_group": config.groups,
        "topk_group": config.top_groups,
        **({"expert_capacity": config.capacity, "block_size": config.block} if config.capacity else {}),
        "routed_scaling_factor": config.scale,
        "rms_norm_eps": config.eps,
        "rope_theta": config.rope_theta,
        "partial_rotary_factor": config.rotary,
        "rope_scaling": None,
        "hidden_act": "silu",
        "score_function": "sigmoid",
        "norm_topk_prob": True,
        "use_qkv_bias": False,
        "use_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "mask_token_id": config.vocab - 1,
        "eos_token_id": 5,
        "pad_token_id": 0,
        **changes,
    }


def experts_of(path: str, experts: int, width: int, hidden: int, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Random matrices of the experts of a layer, apart."""
    found = {}
    for e in range(experts):
        found[f"{path}.{e}.gate_proj.weight"] = normal(width, hidden, std=hidden**-0.5)
        found[f"{path}.{e}.up_proj.weight"] = normal(width, hidden, std=hidden**-0.5)
        found[f"{path}.{e}.down_proj.weight"] = normal(hidden, width, std=width**-0.5)
    return found


def random_weights(config: Config, seed: int) -> dict[str, Tensor]:
    """fp32 weights whose decode is not trivial; see `tests.oracle.models.random_weights` for how."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    def norm(size: int, scale: float = 1.0) -> Tensor:
        return scale * (1.0 + normal(size, std=0.1))

    d, query, both = config.hidden, config.heads * config.head_dim, 2 * config.kv_heads * config.head_dim
    weights = {"model.word_embeddings.weight": normal(config.vocab, d, std=1.0)}
    weights["model.word_embeddings.weight"][config.vocab - 1] *= 0.2
    for layer in range(config.layers):
        name = f"model.layers.{layer}."
        weights |= {
            f"{name}input_layernorm.weight": norm(d),
            f"{name}attention.query_key_value.weight": normal(query + both, d, std=d**-0.5),
            f"{name}attention.query_layernorm.weight": norm(config.head_dim, 2.0),
            f"{name}attention.key_layernorm.weight": norm(config.head_dim, 2.0),
            f"{name}attention.dense.weight": normal(d, query, std=2.0 * query**-0.5),
            f"{name}post_attention_layernorm.weight": norm(d),
        }
        paths = {"mlp": config.intermediate} if layer < config.dense else {"mlp.shared_experts": config.expert}
        for path, width in paths.items():
            weights |= {
                f"{name}{path}.gate_proj.weight": normal(width, d, std=d**-0.5),
                f"{name}{path}.up_proj.weight": normal(width, d, std=d**-0.5),
                f"{name}{path}.down_proj.weight": normal(d, width, std=width**-0.5),
            }
        if layer >= config.dense:
            weights[f"{name}mlp.gate.weight"] = normal(config.experts, d, std=d**-0.5)
            weights[f"{name}mlp.gate.expert_bias"] = normal(config.experts, std=0.1)
            weights |= experts_of(f"{name}mlp.experts", config.experts, config.expert, d, normal)
    weights["model.norm.weight"] = norm(d)
    weights["lm_head.weight"] = normal(config.vocab, d, std=5.0 / math.sqrt(d))
    weights["lm_head.weight"][config.vocab - 1] = 0.0
    return weights


def best(values: Sequence[float], count: int) -> list[int]:
    """Indices of the largest, ties to the lower one."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def grouped_choice(ranked: Sequence[float], groups: int, top_groups: int, topk: int) -> list[int]:
    """The experts of a row: the topk highest within the groups whose two highest sum to the most."""
    size = len(ranked) // groups
    parts = [ranked[g * size : (g + 1) * size] for g in range(groups)]
    sums = [float(torch.tensor(sorted(part, reverse=True)[:2]).sum()) for part in parts]
    open_ = best(sums, top_groups)
    return best([r if i // size in open_ else -math.inf for i, r in enumerate(ranked)], topk)


def sigmoid_routing(logits: Tensor, bias: Tensor | None, config: Config) -> list[tuple[int, float]]:
    """(expert, weight) of a row, from its logits [experts]."""
    scores = logits.sigmoid()
    ranked = (scores if bias is None else scores + bias).tolist()
    choice = grouped_choice(ranked, config.groups, config.top_groups, config.topk)
    total = sum(float(scores[e]) for e in choice) if config.topk > 1 else 1.0
    return [(e, float(scores[e]) / total * config.scale) for e in choice]


def block_routing(logits: Tensor, bias: Tensor, blocks: Sequence[int], config: Config) -> list[list[tuple[int, float]]]:
    """(expert, weight) of each row, of which those of one block share the `capacity` experts that rank best in any."""
    scores = logits.sigmoid()
    ranked = scores + bias
    found = []
    for row, block in enumerate(blocks):
        mine = [i for i, other in enumerate(blocks) if other == block]
        shared = best(ranked[mine].amax(0).tolist(), config.capacity)
        choice = best([r if e in shared else -math.inf for e, r in enumerate(ranked[row].tolist())], config.topk)
        total = sum(float(scores[row, e]) for e in choice) if config.topk > 1 else 1.0
        found.append([(e, float(scores[row, e]) / total * config.scale) for e in choice])
    return found


def softmax_routing(logits: Tensor, topk: int, normalise: bool) -> list[tuple[int, float]]:
    """(expert, weight) of a row, as Qwen3-MoE routes it."""
    scores = logits.softmax(-1).tolist()
    choice = best(scores, topk)
    total = sum(scores[e] for e in choice) if normalise else 1.0
    return [(e, scores[e] / total) for e in choice]


def mixture(
    x: Tensor, weight: Callable[[str], Tensor], route: Callable[[Tensor], Sequence[tuple[int, float]]]
) -> Tensor:
    """Each row of x [n, hidden] through its experts, one after the other."""
    routed = [route(logits) for logits in linear(x, weight("gate"))]
    return through(x, weight, routed)


def through(x: Tensor, weight: Callable[[str], Tensor], routed: Sequence[Sequence[tuple[int, float]]]) -> Tensor:
    """Each row of x [n, hidden] through the experts that it is routed to."""
    out = torch.zeros_like(x)
    for row, shares in enumerate(routed):
        for expert, share in shares:
            one = gated(x[row : row + 1], lambda name, e=expert: weight(f"experts.{e}.{name}"))
            out[row] += share * one[0]
    return out


def forward(
    weights: Weights,
    config: Config,
    tokens: Sequence[int],
    positions: Sequence[int],
    limits: Sequence[int],
    cache: Cache,
    hook: Hook | None = None,
) -> Tensor:
    """Run n rows through the model, writing `cache`; as `tests.oracle.qwen3.forward`."""
    row_positions, limit, live = torch.tensor(positions), torch.tensor(limits), list(positions)
    sizes = [n * config.head_dim for n in (config.heads, config.kv_heads, config.kv_heads)]
    rotary = int(config.head_dim * config.rotary)
    h = weights["model.word_embeddings.weight"][torch.tensor(tokens)]

    def turned(z: Tensor, scale: Tensor) -> Tensor:
        z = rms_norm(z.view(len(live), -1, config.head_dim), scale, config.eps)
        return torch.cat((rope(z[..., :rotary], row_positions, config.rope_theta), z[..., rotary:]), dim=-1)

    for layer in range(config.layers):

        def weight(name: str, prefix: str = f"model.layers.{layer}.") -> Tensor:
            return weights[f"{prefix}{name}.weight"]

        x = rms_norm(h, weight("input_layernorm"), config.eps)
        q, k, v = linear(x, weight("attention.query_key_value")).split(sizes, dim=-1)
        q, k = turned(q, weight("attention.query_layernorm")), turned(k, weight("attention.key_layernorm"))
        cache.write(layer, live, k, v.view(len(live), -1, config.head_dim))

        chosen = hook(layer, q, k) if hook is not None else None
        if chosen is not None:
            index, limit = chosen
            h, q, row_positions = h[index], q[index], row_positions[index]
            live = row_positions.tolist()

        keys_, values = cache.read(layer, int(limit.max()))
        h = h + linear(attention(q, keys_, values, limit).reshape(len(live), -1), weight("attention.dense"))
        x = rms_norm(h, weight("post_attention_layernorm"), config.eps)

        def mlp(name: str, weight: Callable[..., Tensor] = weight) -> Tensor:
            return weight(f"mlp.{name}")

        if layer < config.dense:
            h = h + gated(x, mlp)
            continue
        bias = weights[f"model.layers.{layer}.mlp.gate.expert_bias"]
        if config.capacity:
            blocks = [position // config.block for position in live]
            routed = through(x, mlp, block_routing(linear(x, mlp("gate")), bias, blocks, config))
        else:
            routed = mixture(x, mlp, lambda logits, bias=bias: sigmoid_routing(logits, bias, config))
        h = h + routed + gated(x, lambda name, mlp=mlp: mlp(f"shared_experts.{name}"))
    return rms_norm(h, weights["model.norm.weight"], config.eps)

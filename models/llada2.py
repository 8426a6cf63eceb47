"""LLaDA2.0, 2.1 and 2.2: block diffusion with a mixture of experts (inclusionAI/LLaDA2.{0,1,2}-{mini,flash}).

Its own readable module, since transformers has none. The first layers are dense. In the others a row goes to the best
8 of 256 experts, within the best 4 of 8 groups. One more expert takes all rows ("LLaDA2.0: Scaling Up Diffusion
Language Models to 100B", section 2). Only the first half of each head's dimensions is rotated. Where the config has an
`expert_capacity` (2.2), the rows of a block of `block_size` positions share that number of experts instead of groups.
Each row goes to the best 8 of these. The block is the rows of it that a forward has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgraph.errors import CheckpointError, InputError
from dgraph.models.moe import MoE, MoEFamily, RMSNorm, Routing, identity_of
from dgraph.models.remote_code import require, section
from dgraph.ops.experts.route import check

FACTS: dict[str, Any] = {
    "mask_id": 156895,
    "eos_ids": (156892,),
    "pad_id": 156892,
    "block_length": 32,
    "attention": "block_causal",
    "logit_shift": 0,
}
CLASS = "LLaDA2MoeModelLM"


@dataclass(frozen=True)
class Config:
    """The keys of a LLaDA2 config.json that shape the forward."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int = 1
    first_k_dense_replace: int = 1
    n_group: int = 8
    topk_group: int = 4
    expert_capacity: int = 0
    block_size: int = 0
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-6
    rope_theta: float = 600_000.0
    partial_rotary_factor: float = 0.5
    use_qkv_bias: bool = False
    use_bias: bool = False
    tie_word_embeddings: bool = False
    mask_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    @classmethod
    def of(cls, keys: Mapping[str, Any], source: str) -> Config:
        """From the keys of a config.json, in which a null counts as absent, but for num_shared_experts: none.

        Raises:
            CheckpointError: a key is missing, of another type, or asks for a feature that this module lacks.
        """
        try:
            rope = section(keys, "rope_parameters")
        except CheckpointError as error:
            raise CheckpointError(f"{source}: {error}") from None
        given = {**rope, **{k: v for k, v in keys.items() if v is not None}}
        if "num_shared_experts" in keys and keys["num_shared_experts"] is None:
            given["num_shared_experts"] = 0
        heads = given.get("num_attention_heads")
        given.setdefault("num_key_value_heads", heads)
        if given["num_key_value_heads"] in (None, 0):
            given["num_key_value_heads"] = heads
        if isinstance(heads, int) and heads > 0 and isinstance(given.get("hidden_size"), int):
            given.setdefault("head_dim", given["hidden_size"] // heads)
        try:
            for key, allowed in _ONLY.items():
                require(keys, key, allowed, "dgraph's LLaDA2")
            for key in ("rope_type", "type"):
                require(rope, key, ("default", None), "dgraph's LLaDA2")
            config = cls(**{f.name: given[f.name] for f in fields(cls) if f.name in given})
            for f in fields(cls):
                value, kind = getattr(config, f.name), str(f.type)
                if kind in _KINDS and (
                    not isinstance(value, _KINDS[kind]) or isinstance(value, bool) != (kind == "bool")
                ):
                    raise CheckpointError(f"{f.name} is {value!r}, expected {kind}.")
                if kind in ("int", "float") and (value < 0 or (value == 0 and f.name not in _MAY_BE_0)):
                    raise CheckpointError(f"{f.name} is {value!r}, expected a number above 0.")
            routing = config.routing
            check(routing.experts, routing.score, routing.groups, routing.top_groups, routing.topk)
            if routing.capacity and not routing.topk <= routing.capacity <= routing.experts:
                raise CheckpointError(
                    f"expert_capacity is {routing.capacity}, expected {routing.topk} to {routing.experts} experts."
                )
            if routing.capacity and config.block_size < 1:
                raise CheckpointError(f"block_size is {config.block_size}, expected the positions of a routed block.")
        except TypeError as error:
            missing = str(error).partition("missing ")[2] or str(error)
            raise CheckpointError(f"{source} does not describe a LLaDA2 model: missing {missing}.") from error
        except (CheckpointError, InputError) as error:
            raise CheckpointError(f"{source} does not describe a LLaDA2 model: {error}") from None
        return config

    @property
    def rotary_dim(self) -> int:
        """Number of a head's dimensions that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def routing(self) -> Routing:
        """Routing of rows to experts."""
        return Routing(
            experts=self.num_experts,
            topk=self.num_experts_per_tok,
            score="sigmoid",
            groups=1 if self.expert_capacity else self.n_group,
            top_groups=1 if self.expert_capacity else self.topk_group,
            renormalise=self.num_experts_per_tok > 1,
            scale=self.routed_scaling_factor,
            biased=True,
            wide=True,
            capacity=self.expert_capacity,
        )


_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,)}
_MAY_BE_0 = ("num_shared_experts", "first_k_dense_replace", "expert_capacity", "block_size")
# Values that this module implements, where a config could ask for something else.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", None),
    "score_function": ("sigmoid", None),
    "norm_topk_prob": (True, None),
    "moe_router_enable_expert_bias": (True, None),
    "use_qk_norm": (True, None),
    "norm_head": (False, None),
    "rope_scaling": (None,),
    "use_sliding_window": (False, None),
}


class Rotary(nn.Module):
    """Cosines and sines of positions, each angle twice."""

    inv_freq: Tensor

    def __init__(self, config: Config):
        super().__init__()
        steps = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
        self.register_buffer("inv_freq", 1.0 / config.rope_theta**steps, persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """i64[b, t] -> cos and sin [b, t, 1, rotary_dim]."""
        angles = positions.unsqueeze(-1).float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(2)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [b, t, heads, head_dim] with its first dimensions rotated, as many as cos has, and the others as they are."""
    size = cos.shape[-1]
    if size == x.shape[-1]:
        return torch.ops.dgraph.rope(x, cos, sin)
    return torch.cat((torch.ops.dgraph.rope(x[..., :size], cos, sin), x[..., size:]), dim=-1)


class Attention(nn.Module):
    """Attention with one projection for queries, keys and values, and norms of each head's queries and keys."""

    def __init__(self, config: Config):
        super().__init__()
        self.heads, self.kv_heads, self.size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        width = (self.heads + 2 * self.kv_heads) * self.size
        self.query_key_value = nn.Linear(config.hidden_size, width, bias=config.use_qkv_bias)
        self.query_layernorm = RMSNorm(self.size, config.rms_norm_eps)
        self.key_layernorm = RMSNorm(self.size, config.rms_norm_eps)
        self.dense = nn.Linear(self.heads * self.size, config.hidden_size, bias=config.use_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        heads = self.query_key_value(x).view(b, t, -1, self.size)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        q, k = rotate(self.query_layernorm(q), cos, sin), rotate(self.key_layernorm(k), cos, sin)
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        y = torch.ops.dgraph.attention(q, k, v, self.size**-0.5)
        return self.dense(y.transpose(1, 2).reshape(b, t, -1))


class MLP(nn.Module):
    """A gated feed-forward."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def feed_forward(config: Config, layer: int) -> nn.Module:
    """Dense in the first layers, a mixture of experts in the others."""
    hidden, width = config.hidden_size, config.moe_intermediate_size
    if layer < config.first_k_dense_replace:
        return MLP(hidden, config.intermediate_size)
    shared = MLP(hidden, width * config.num_shared_experts) if config.num_shared_experts else None
    return MoE(hidden, width, config.routing, shared)


class Layer(nn.Module):
    """Attention and feed-forward, each after a norm and beside a residual."""

    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = feed_forward(config, layer)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, blocks: Tensor | None) -> Tensor:
        x = x + self.attention(self.input_layernorm(x), cos, sin)
        shared = (blocks,) if isinstance(self.mlp, MoE) else ()
        return x + self.mlp(self.post_attention_layernorm(x), *shared)


class Body(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: Config):
        super().__init__()
        self.routed = config.block_size if config.expert_capacity else 0
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = Rotary(config)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.word_embeddings(input_ids)
        cos, sin = self.rotary_emb(position_ids, x.dtype)
        blocks = torch.ops.dgraph.block_numbers(position_ids, None, self.routed) if self.routed else None
        for layer in self.layers:
            x = layer(x, cos, sin, blocks)
        return self.norm(x)


class LLaDA2(nn.Module):
    """The model; names as in its checkpoints, experts stacked."""

    _tied_weights_keys: ClassVar[Mapping[str, str]] = {"lm_head.weight": "model.word_embeddings.weight"}

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def identity(self) -> str:
        """All that the forward depends on besides tensors: the config and the layers (`dgraph.frontend.frozen`)."""
        return identity_of(repr(self.config))

    def tie_weights(self) -> None:
        """Let the head read the embedding, if the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.word_embeddings.weight

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """i64[b, t], i64[b, t] -> logits [b, t, vocab]; every row sees every row."""
        return self.lm_head(self.model(input_ids, position_ids))


def build(keys: Mapping[str, Any], source: str) -> LLaDA2:
    """A model on the meta device from the keys of a config.json; see `Config.of`."""
    config = Config.of(keys, source)
    with torch.device("meta"):
        return LLaDA2(config)


family = MoEFamily(
    name="llada2",
    summary="LLaDA2.0, 2.1 and 2.2: block diffusion with a mixture of experts",
    classes=(CLASS,),
    facts=FACTS,
    build=build,
    tiny={"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2},
)

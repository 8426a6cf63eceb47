"""DiffusionGemma: block diffusion without a mask token (google/diffusiongemma-26B-A4B-it), its text path.

Its own readable module: the class of transformers is two stacks, an encoder and a decoder, that share all weights but
one scalar per layer. Its cache and masks are no straight line. Here one stack runs in both modes, by row. A row
that is encoded (a prompt's, a finished canvas's) sees itself and what comes before it. A row that is denoised sees its
whole canvas and what comes before that; it also reads what the step before predicted of it, as the mean embedding of
that prediction (`soft`). The canvas holds tokens from the first step on: random ones.

Five of six layers see only the last `sliding_window` - 1 keys before a row, or before its canvas. They have heads and
rotation of their own. The other layers have no value projection: values are the keys before norm and rotation. Every
layer adds a dense unit and a mixture of experts, both from the same residual stream. Sizes and names are those of
config.json; the formulas were checked against the class of transformers (tests/models/test_diffusion_gemma.py). The
vision tower of a checkpoint is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgraph.errors import CheckpointError, InputError
from dgraph.families import Model
from dgraph.models.moe import MoEFamily, RMSNorm, RoutedExperts, identity_of
from dgraph.models.remote_code import require, require_size, section
from dgraph.models.tiny import EOS, build_tiny
from dgraph.ops.experts.route import check
from dgraph.types.shapes import InputSpec

CLASS = "DiffusionGemmaForBlockDiffusion"
FACTS: dict[str, Any] = {
    "mask_id": -1,
    "eos_ids": (1, 106, 50),
    "pad_id": 0,
    "image_id": 258880,
    "block_length": 256,
    "attention": "block_causal",
    "encoding": "causal",
    "noise": "uniform",
    "logit_shift": 0,
}
SLIDING, FULL = "sliding_attention", "full_attention"
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "sliding_window", "num_experts", "top_k_experts", "moe_intermediate_size"),
)
"""Keys that a config must have: the defaults of transformers are another model's."""


@dataclass(frozen=True)
class Kind:
    """Facts of the layers of one kind.

    window: positions that a row sees of the past, itself among them; 0 for all. theta, angles: base and number of the
    frequencies of the rotation; the others of head_dim / 2 are 0.
    """

    kv_heads: int
    head_dim: int
    window: int
    theta: float
    angles: int


@dataclass(frozen=True)
class Config:
    """Keys of a config.json that shape the forward."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    num_experts: int
    top_k_experts: int
    moe_intermediate_size: int
    rms_norm_eps: float
    final_logit_softcapping: float
    block_size: int
    layer_types: tuple[str, ...]
    kinds: Mapping[str, Kind]
    eos_token_id: int | tuple[int, ...] | None
    pad_token_id: int | None
    mask_token_id: int = -1
    tie_word_embeddings: bool = True

    @classmethod
    def of(cls, keys: Mapping[str, Any], source: str) -> Config:
        """From the keys of a config.json; the text model's may stand at its top.

        Raises:
            CheckpointError: a key is missing, of another type, or asks for a feature that this module lacks.
        """
        from transformers import DiffusionGemmaTextConfig

        try:
            given = section(keys, "text_config") or dict(keys)
            if missing := [name for name in SIZES if given.get(name) is None]:
                raise CheckpointError(f"missing {', '.join(missing)}.")
            for name in SIZES:
                require_size(given, name)
            for key, allowed in _ONLY.items():
                require(given, key, allowed, "dgraph's DiffusionGemma")
            require(keys, "tie_word_embeddings", (True, None), "dgraph's DiffusionGemma")
            known = {name: value for name, value in given.items() if name not in _ABOUT_THE_CLASS}
            text: Any = DiffusionGemmaTextConfig(**known)
            kinds = {name: _kind(text, name) for name in sorted(set(text.layer_types))}
            check(text.num_experts, "softmax", 1, 1, text.top_k_experts)
        except (CheckpointError, InputError) as error:
            raise CheckpointError(f"{source} does not describe a DiffusionGemma model: {error}") from None
        except Exception as error:  # whatever transformers raises
            reason = " ".join(str(error).split())
            raise CheckpointError(f"{source} does not describe a DiffusionGemma model: {reason}.") from error
        own = {**given, **{name: keys[name] for name in ("eos_token_id", "pad_token_id") if keys.get(name) is not None}}
        eos = own.get("eos_token_id")
        return cls(
            **{name: given[name] for name in SIZES if name != "sliding_window"},
            max_position_embeddings=text.max_position_embeddings,
            rms_norm_eps=text.rms_norm_eps,
            final_logit_softcapping=text.final_logit_softcapping,
            block_size=keys.get("canvas_length") or FACTS["block_length"],
            layer_types=tuple(text.layer_types),
            kinds=kinds,
            eos_token_id=tuple(eos) if isinstance(eos, list | tuple) else eos,
            pad_token_id=own.get("pad_token_id"),
        )

    def kind(self, layer: int) -> Kind:
        """Kind of a layer."""
        return self.kinds[self.layer_types[layer]]


# Values that this module implements, where a config could ask for something else.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh", None),
    "attention_bias": (False, None),
    "use_bidirectional_attention": ("vision", None),
}
_ABOUT_THE_CLASS = ("architectures", "model_type", "dtype", "torch_dtype", "canvas_length", "mask_token_id")
_ROTATIONS = {SLIDING: "default", FULL: "proportional"}


def _kind(text: Any, name: str) -> Kind:
    """Read the facts of the layers of one kind from a config."""
    if name not in _ROTATIONS:
        raise CheckpointError(f"layer_types has {name!r}, expected {' or '.join(map(repr, _ROTATIONS))}.")
    rope, own = text.rope_parameters[name], text.per_layer_config[text.layer_types.index(name)]
    require(rope, "rope_type", (_ROTATIONS[name],), "dgraph's DiffusionGemma")
    require(rope, "factor", (1.0, None), "dgraph's DiffusionGemma")
    share = rope.get("partial_rotary_factor", 1.0)
    if name == SLIDING and share != 1.0:
        raise CheckpointError(f"partial_rotary_factor is {share} of {name} layers, expected 1.")
    angles, window = int(share * own.head_dim // 2), text.sliding_window if name == SLIDING else 0
    return Kind(own.num_key_value_heads, own.head_dim, window, float(rope["rope_theta"]), angles)


class Rotary(nn.Module):
    """Cosines and sines of positions for each kind of layer, each angle twice."""

    def __init__(self, config: Config):
        super().__init__()
        for name, kind in config.kinds.items():
            steps = torch.arange(0, 2 * kind.angles, 2, dtype=torch.float32) / kind.head_dim
            still = torch.zeros(kind.head_dim // 2 - kind.angles)
            self.register_buffer(name, torch.cat((1.0 / kind.theta**steps, still)), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
        """i64[b, t] -> per kind cos and sin [b, t, 1, head_dim]."""
        found = {}
        for name, frequencies in self.named_buffers():
            angles = positions.unsqueeze(-1).float() * frequencies
            angles = torch.cat((angles, angles), dim=-1).unsqueeze(2)
            found[name] = angles.cos().to(dtype), angles.sin().to(dtype)
        return found


class Attention(nn.Module):
    """Attention with norms of each head's queries, keys and values, and scores that are not scaled."""

    def __init__(self, config: Config, kind: Kind):
        super().__init__()
        self.size, self.window, self.eps = kind.head_dim, kind.window, config.rms_norm_eps
        width, narrow = config.num_attention_heads * self.size, kind.kv_heads * self.size
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, narrow, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, narrow, bias=False) if kind.window else None
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = RMSNorm(self.size, self.eps), RMSNorm(self.size, self.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k = (project(x).view(b, t, -1, self.size) for project in (self.q_proj, self.k_proj))
        v = k if self.v_proj is None else self.v_proj(x).view(b, t, -1, self.size)
        q, k = (torch.ops.dgraph.rope(z, cos, sin) for z in (self.q_norm(q), self.k_norm(k)))
        v = torch.ops.dgraph.rms_norm(v, None, self.eps)
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        window = (self.window,) if self.window else ()
        y = torch.ops.dgraph.attention(q, k, v, 1.0, *window)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


class MLP(nn.Module):
    """A gated feed-forward."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Router(nn.Module):
    """Rows to experts and weights: a norm without a weight, a scale per channel, a softmax, a scale per expert."""

    def __init__(self, config: Config):
        super().__init__()
        self.proj = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.scale = nn.Parameter(torch.ones(config.hidden_size))
        self.per_expert_scale = nn.Parameter(torch.ones(config.num_experts))
        self.topk, self.eps, self.shrink = config.top_k_experts, config.rms_norm_eps, config.hidden_size**-0.5

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """[n, hidden] -> choice i64[n, topk], weight f32[n, topk]."""
        logits = self.proj(torch.ops.dgraph.rms_norm(rows, None, self.eps) * self.scale * self.shrink)
        return torch.ops.dgraph.route(logits, None, "softmax", 1, 1, self.topk, True, 1.0, None, self.per_expert_scale)


class Layer(nn.Module):
    """Attention, then a dense unit and experts side by side, each between norms and beside a residual."""

    layer_scalar: Tensor

    def __init__(self, config: Config, layer: int):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, config.kind(layer))
        self.mlp = MLP(hidden, config.intermediate_size)
        self.router = Router(config)
        self.experts = RoutedExperts(config.num_experts, hidden, config.moe_intermediate_size, "gelu_tanh")
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.pre_feedforward_layernorm_2 = RMSNorm(hidden, eps)
        self.post_feedforward_layernorm_1 = RMSNorm(hidden, eps)
        self.post_feedforward_layernorm_2 = RMSNorm(hidden, eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, encoded: Tensor, of_encoder: Tensor) -> Tensor:
        """encoded bool[b, t, 1]; of_encoder [1]: the scalar of rows that are encoded."""
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), cos, sin))
        dense = self.post_feedforward_layernorm_1(self.mlp(self.pre_feedforward_layernorm(x)))
        rows, given = (z.reshape(-1, z.shape[-1]) for z in (x, self.pre_feedforward_layernorm_2(x)))
        mixed = self.experts(given, *self.router(rows)).view(x.shape)
        mixed = self.post_feedforward_layernorm_2(mixed)
        x = x + self.post_feedforward_layernorm(dense + mixed)
        return x * torch.where(encoded, of_encoder, self.layer_scalar).to(x.dtype)


class SelfConditioning(MLP):
    """Self-conditioning: a step's prediction, as the next step reads it beside the canvas."""

    def __init__(self, config: Config):
        super().__init__(config.hidden_size, config.intermediate_size)
        self.pre_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, soft: Tensor) -> Tensor:
        return super().forward(self.pre_norm(soft))


class Decoder(nn.Module):
    """Embedding, layers and the last norm; names as in the checkpoints."""

    def __init__(self, config: Config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.self_conditioning = SelfConditioning(config)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = Rotary(config)
        self.kinds, self.grow, self.eps = config.layer_types, config.hidden_size**0.5, config.rms_norm_eps

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, encoded: Tensor, soft: Tensor, of_encoder: list[Tensor]
    ) -> Tensor:
        # Rounded to the dtype of the weights first.
        grow = float(torch.tensor(self.grow).to(self.embed_tokens.weight.dtype))
        x, mode = self.embed_tokens(input_ids) * grow, encoded.unsqueeze(-1)
        denoised = torch.ops.dgraph.rms_norm(x + self.self_conditioning(soft * grow), None, self.eps)
        x, rotations = torch.where(mode, x, denoised), self.rotary_emb(position_ids, x.dtype)
        for layer, kind, scalar in zip(self.layers, self.kinds, of_encoder, strict=True):
            x = layer(x, *rotations[kind], mode, scalar)
        return self.norm(x)


class EncoderLayer(nn.Module):
    """Scalar that a layer has of its own for encoded rows."""

    layer_scalar: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("layer_scalar", torch.ones(1))


class DiffusionGemma(nn.Module):
    """The text model; parameters are named as in its checkpoints.

    Attributes:
        inputs: inputs of `forward` after tokens and positions. encoded: which rows are encoded. soft: the mean
            embedding that the step before predicted for a row; zeros before the first step.
    """

    _keys_to_ignore_on_load_unexpected = (r"^lm_head\.weight$", r"^model\.encoder\.")

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        encoder: Any = nn.Module()
        encoder.language_model = nn.Module()
        encoder.language_model.layers = nn.ModuleList(EncoderLayer() for _ in range(config.num_hidden_layers))
        self.model: Any = nn.Module()
        self.model.encoder, self.model.decoder = encoder, Decoder(config)

    @property
    def inputs(self) -> tuple[InputSpec, ...]:
        dtype = self.model.decoder.embed_tokens.weight.dtype
        return (
            InputSpec("encoded", torch.bool, ("b", "t")),
            InputSpec("soft", dtype, ("b", "t", self.config.hidden_size)),
        )

    @property
    def identity(self) -> str:
        """All that the forward depends on besides tensors: the config and the layers (`dgraph.frontend.frozen`)."""
        return identity_of(repr(self.config))

    def tie_weights(self) -> None:
        """The head reads the embedding: there is nothing to tie."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, encoded: Tensor, soft: Tensor) -> Tensor:
        """i64[b, t], i64[b, t], bool[b, t], [b, t, hidden] -> f32 logits [b, t, vocab]; every row sees every row."""
        decoder, cap = self.model.decoder, self.config.final_logit_softcapping
        scalars = [layer.layer_scalar for layer in self.model.encoder.language_model.layers]
        x = decoder(input_ids, position_ids, encoded, soft, scalars)
        return torch.tanh(F.linear(x, decoder.embed_tokens.weight).float() / cap) * cap


def translate(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """The config without the mask token of its tokenizer: the model never reads one."""
    return {**config, "mask_token_id": FACTS["mask_id"]}


def build(keys: Mapping[str, Any], source: str) -> DiffusionGemma:
    """A model on the meta device from the keys of a config.json; see `Config.of`."""
    config = Config.of(keys, source)
    with torch.device("meta"):
        return DiffusionGemma(config)


TINY: dict[str, Any] = {
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "sliding_window": 6,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "tie_word_embeddings": True,
    "canvas_length": 8,
}


SHARDED = {
    f"*self_conditioning.{name}_proj.weight": kind
    for name, kind in (("gate", "column"), ("up", "column"), ("down", "row"))
}
"""Division among ranks of self-conditioning, the unit that is in no layer."""
ADDED = ("post_attention_layernorm", "post_feedforward_layernorm", "self_conditioning.down_proj")
"""Weights that scale what is added to the embeddings of tokens.

A tiny model has smaller ones. Its steps read earlier predictions, and would make more and more of their rounding.
"""


class Family(MoEFamily):
    """`MoEFamily`, whose tiny model has no mask token either."""

    def random(self, seed: int = 0) -> Model:
        """See `Family.random`."""
        built = build_tiny(self.build, self.tiny, seed)
        with torch.no_grad():
            for path, buffer in built.named_buffers():
                if path.endswith("layer_scalar"):
                    buffer.fill_(0.9 if "encoder" in path else 1.1)
            for path, parameter in built.named_parameters():
                if path.removesuffix(".weight").endswith(ADDED):
                    parameter.mul_(0.4)
        facts = {"eos_ids": (EOS,), "pad_id": EOS}
        return self.model(f"tiny random {self.name}", built, {}, torch.float32, **facts)


family = Family(
    name="diffusion_gemma",
    summary="DiffusionGemma: block diffusion without a mask token, with self-conditioning; a mixture of experts",
    classes=(CLASS,),
    facts=FACTS,
    build=build,
    translate=translate,
    tiny=TINY,
    hints=SHARDED,
)

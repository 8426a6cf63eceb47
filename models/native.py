"""Native transformers classes (Llama, Qwen2, Qwen3), adopted as they are.

The classes call `dgraph::attention` through transformers' AttentionInterface, so that a captured attention is one
node over queries and keys after RoPE with un-repeated KV heads. The caller's model is left as it was.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

import dgraph.ops  # noqa: F401  (registers dgraph::attention)
from dgraph.errors import CaptureError, CheckpointError, InputError, warn
from dgraph.families import ChatTokenizer, Model
from dgraph.families.adapters import LowRank
from dgraph.models.objects import architectures_of, source_of
from dgraph.models.rotation import check_rotation
from dgraph.spec import ModelSpec, given_as

NATIVE = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_NAME = "dgraph"


class Forward(nn.Module):
    """A causal-LM class as `forward(input_ids, position_ids) -> logits` with bidirectional attention by dgraph."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    @property
    def identity(self) -> str:
        """All that the forward depends on besides tensors: the class and its config (`dgraph.frontend.frozen`)."""
        described: Any = self.model.config
        config = described.to_dict()
        config.pop("_name_or_path", None)
        return f"{type(self.model).__name__} {json.dumps(config, sort_keys=True, default=str)}"

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        with _attention_by_dgraph(self.model), _in_eval_mode(self.model):
            result = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, return_dict=True)
        return result.logits


PREFIX = "model."
"""The attribute of `Forward` for the model, before every weight's name."""


@contextlib.contextmanager
def _attention_by_dgraph(model: Any) -> Iterator[None]:
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attention)  # transformers makes masks only for names with a mask function
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextlib.contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [b, heads, t, head_dim] in, [b, t, heads, head_dim] out."""
    if sliding_window is not None:
        raise CaptureError(
            f"layer {getattr(module, 'layer_idx', '?')} has a sliding window of {sliding_window} positions; dgraph's "
            f"attention sees all positions of a block and before it. Set use_sliding_window to false in the config."
        )
    out = torch.ops.dgraph.attention(query, key, value, scaling)
    return out.transpose(1, 2).contiguous(), None


def config_of(model: Any) -> dict[str, Any]:
    """The config of a model object, with the ids of its generation config; see `with_ids`."""
    generation = getattr(model, "generation_config", None)
    return with_ids(model.config.to_dict(), {} if generation is None else generation.to_dict())


def with_ids(
    config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """A config with the token ids of all that came with a model.

    The tokens that end a response are those of all three together: a chat's turn may end as only one of them knows.
    Other ids are those of the generation config, which `generate` goes by; else of the config, else of the tokenizer.

    Args:
        config, generation, tokenizer: ids by their names in a config ("eos_token_id", ...), and all other keys of
            the config.
    """
    said = (generation, config, tokenizer)
    ends = dict.fromkeys(id for one in said for id in _listed(one.get("eos_token_id")))
    found = {"eos_token_id": next(iter(ends)) if len(ends) == 1 else list(ends) or None}
    for name in ("pad_token_id", "mask_token_id"):
        found[name] = next((one[name] for one in said if one.get(name) is not None), None)
    return {**config, **{name: value for name, value in found.items() if value is not None}}


def _listed(ids: Any) -> list[Any]:
    return [] if ids is None else list(ids) if isinstance(ids, (list, tuple)) else [ids]


UNSAID: Mapping[str, Any] = {
    "mask_id": None,
    "eos_ids": (),
    "pad_id": 0,
    "block_length": 32,
    "attention": "block_causal",
    "logit_shift": 0,
}
"""Facts of a model about which neither its config nor its family says anything."""

_ASKED: Mapping[str, tuple[str, str, object]] = {
    "block_length": ("block length", "block_size", 4),
    "attention": ("attention", "attention", "bidirectional"),
}
"""Facts that may be None in those of a family: its name in a message, the key that may say it, and an example."""

_KINDS: Mapping[str, type] = {
    **dict.fromkeys(("mask_token_id", "pad_token_id", "image_token_id", "block_size", "block_length"), int),
    **dict.fromkeys(("attention", "encoding", "noise"), str),
    "logit_shift": int,
    "next_token": bool,
}
"""Keys of a config that are facts of a spec."""
_WORDS: Mapping[type, str] = {int: "a whole number", str: "a text", bool: "true or false"}


def native_spec(
    config: Any, family: str, dtype: torch.dtype, published: Mapping[str, Any] | None = None, **facts: Any
) -> ModelSpec:
    """The spec of a transformers config.

    Args:
        config: with the attributes of a native class, and of the model's own config where it has more.
        family: name for the spec.
        dtype: dtype of the weights.
        published: facts of the family's published checkpoints; they hold where the config is silent. None for one in
            which these differ.
        facts: fields of the spec that override both.

    Warns of ids and of a block length that are assumed.

    Raises:
        InputError: a fact that is said nowhere and cannot be assumed.
        CheckpointError: a key of the config that is of another type.
    """
    for key, kind in _KINDS.items():
        value = getattr(config, key, None)
        if value is not None and type(value) is not kind:
            raise CheckpointError(f"{family}: {key} in the config is {value!r}, expected {_WORDS[kind]}.")
    heads = config.num_attention_heads
    said: dict[str, Any] = {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "vocab": config.vocab_size,
        "mask_id": getattr(config, "mask_token_id", None),
        "eos_ids": _ends(_listed(getattr(config, "eos_token_id", None)), config.vocab_size),
        "pad_id": getattr(config, "pad_token_id", None),
        "image_id": getattr(config, "image_token_id", None),
        "block_length": getattr(config, "block_size", None) or getattr(config, "block_length", None),
        "max_positions": config.max_position_embeddings,
        **{
            name: getattr(config, name, None)
            for name in ("attention", "encoding", "next_token", "noise", "logit_shift")
        },
    }
    known = {name: value for name, value in said.items() if value is not None} | facts
    assumed = {name: value for name, value in {**UNSAID, **(published or {})}.items() if name not in known}
    if "eos_ids" in assumed:
        assumed["eos_ids"] = _ends(assumed["eos_ids"], config.vocab_size) or ()
    for name, (what, key, example) in _ASKED.items():
        if name in assumed and assumed[name] is None:
            raise InputError(
                f"{family}: the {what} is said neither by {key} in config.json nor by the checkpoint's name, and "
                f"published checkpoints differ in it. Give the one that the model was trained for, e.g. "
                f"{given_as(name, example)}."
            )
    values = {"family": family, "dtype": dtype, **assumed, **known}
    spec = ModelSpec(**values)
    # A bidirectional model was trained for no length of a block: there it is a setting of the decoding.
    guesses = ("mask_id", "eos_ids", *(("block_length",) if spec.attention == "block_causal" else ()))
    if guessed := [f"{name}={assumed[name]}" for name in guesses if assumed.get(name)]:
        warn(
            f"{family}: assuming {', '.join(guessed)} (not in config.json); override it, e.g. with "
            f"{given_as(guessed[0].partition('=')[0])}."
        )
    return spec


def _ends(ids: Sequence[Any], vocab: int) -> tuple[Any, ...] | None:
    """Ids that end a response, without those that no row can predict; None for no such id."""
    return tuple(id for id in ids if not isinstance(id, int) or 0 <= id < vocab) or None


_OF_DIFFUSION = ("mask_token_id", "block_size", "block_length", "attention", "encoding", "next_token", "noise")
"""Keys of the config of a model that was trained to fill masks, and facts that say so."""


def _warn_of_causal(name: str, config: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Warn of a model of which nothing says that it was trained by diffusion. A mask token that the caller names is no
    sign of it, since without one nothing is loaded.
    """
    if not any(config.get(key) is not None for key in _OF_DIFFUSION) and not set(_OF_DIFFUSION) & set(facts):
        warn(
            f"{name}: nothing says that it was trained by diffusion (its config has no mask_token_id and no "
            f"block_size), so it is most likely an autoregressive model. Filling masks with one gives nonsense: load a "
            f"checkpoint that was trained to, or say in config.json what this one was trained for."
        )


class NativeFamily:
    """Adopts native model objects; a folder of one is a causal model unless its config has a mask token."""

    name = "native"
    summary = "native transformers classes: " + ", ".join(NATIVE)
    architectures = NATIVE

    def adopt(self, model: Any, **facts: Any) -> Model | None:
        if type(model).__name__ not in NATIVE or not isinstance(model, nn.Module):
            return None
        config, dtype = config_of(model), next(model.parameters()).dtype
        check_rotation(config, f"this {type(model).__name__}'s config")
        spec = native_spec(SimpleNamespace(**config), type(model).__name__, dtype, **facts)
        _warn_of_causal(type(model).__name__, config, facts)
        return Model(type(model).__name__, Forward(model), spec, None, PREFIX)

    def read_tokenizer(self, given: object) -> ChatTokenizer | None:
        """See `Family`."""
        from dgraph.models.foreign_tokenizer import tokenizer_from

        return tokenizer_from(given)

    def read_products(self, folder: Path, weights: Mapping[str, Tensor]) -> dict[str, LowRank]:
        """See `Family`."""
        from dgraph.models.adapters import read_products

        return read_products(folder, weights)

    def random(self, seed: int = 0) -> Model:
        """See `Family.random`."""
        from dgraph.models.checkpoint import build_native
        from dgraph.models.tiny import FACTS, build_tiny

        model = build_tiny(lambda keys, source: build_native("LlamaForCausalLM", keys, source), {}, seed)
        return cast(Model, self.adopt(model, **FACTS))

    def open(self, folder: Path, dtype: torch.dtype | None, device: torch.device, **facts: Any) -> Model | None:
        """See `Family.open`."""
        from dgraph.models.checkpoint import WithOwnKeys, build_native, open_weights, read_folder

        architecture = next(iter(architectures_of(folder)), "")
        if architecture not in NATIVE:
            return None
        found = read_folder(folder)
        model = build_native(architecture, found.config, source_of(folder))
        weights, dtype = open_weights(model, folder, found.base, dtype, device)
        spec = native_spec(WithOwnKeys(model.config, found.config), self.name, dtype, **facts)
        _warn_of_causal(f"{folder}, a {architecture}", found.config, facts)
        return Model(folder.name, Forward(model.eval()), spec, found.tokenizer, PREFIX, weights=weights)


family = NativeFamily()

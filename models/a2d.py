"""Tiny-A2D: causal models of text that were trained to fill masks (dllm-hub/*-diffusion-{mdlm,bd3lm}-v0.1).

The parameters carry the names and shapes of Qwen3, Qwen2 or Llama, and logits of a row predict its own position. Two
objectives share one class, and no config key says which. Names do: "-mdlm" sees all positions (arXiv 2406.07524),
"-bd3lm" its own block of 32 and earlier ones (arXiv 2503.09573). The mask token is named by the tokenizer alone.

The published sampler of "-bd3lm" pads prompts on their left, so that the answer begins with a block of its own. Here
blocks begin at multiples of their length, as in training.
"""

from __future__ import annotations

from typing import Any

from dgraph.models.remote_code import RemoteCodeFamily, Variants, named, require

FACTS: dict[str, Any] = {
    "mask_id": None,
    "block_length": 32,
    "attention": None,
    "logit_shift": 0,
}
QWEN3: dict[str, Any] = {**FACTS, "mask_id": 151669, "eos_ids": (151645, 151643), "pad_id": 151643}
_ATTENTION = {"mdlm": "bidirectional", "bd3lm": "block_causal"}


def translate(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """The config with the attention that the checkpoint's name says, if the native class can represent it."""
    require(config, "use_sliding_window", (False, None), "dgraph's attention")
    found = named(config, folder, "(?<![a-z])(mdlm|bd3lm)(?![a-z])")
    if config.get("attention") is not None or found is None:
        return config
    return {**config, "attention": _ATTENTION[found.group(1).lower()]}


def _kind(base: str, facts: dict[str, Any]) -> RemoteCodeFamily:
    return RemoteCodeFamily(
        name="a2d",
        summary=f"Tiny-A2D over {base}",
        remote=f"A2D{base}LMHeadModel",
        native=f"{base}ForCausalLM",
        facts=facts,
        translate=translate,
        tiny={"attention": "block_causal"},
    )


family = Variants(
    name="a2d",
    summary="Tiny-A2D: masked or block diffusion over Qwen3, Qwen2 or Llama",
    kinds=(_kind("Qwen3", QWEN3), _kind("Qwen2", FACTS), _kind("Llama", FACTS)),
    alike="sdar",
)

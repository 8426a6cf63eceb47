"""iLLaDA: masked diffusion over Llama, trained from scratch (GSAI-ML/iLLaDA-8B-{Base,Instruct}, arXiv 2606.25331).

Unlike LLaDA's, its config and its parameters carry Llama's names. It has fewer KV heads than heads, and its head is the
embedding. Every row sees every row. No file names the mask token.
"""

from __future__ import annotations

from typing import Any

from dgraph.models.remote_code import RemoteCodeFamily, require

FACTS: dict[str, Any] = {
    "mask_id": 5,
    "block_length": 32,
    "attention": "bidirectional",
    "logit_shift": 0,
}
NATIVE = "LlamaForCausalLM"


def translate(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """The config as it is, if Llama can represent it: norms by the mean (`layer_norm_eps`) are refused."""
    require(config, "layer_norm_eps", (None,), NATIVE)
    return config


family = RemoteCodeFamily(
    name="illada",
    summary="iLLaDA: masked diffusion over Llama, with its names",
    remote="ILLaDAForCausalLM",
    native=NATIVE,
    facts=FACTS,
    translate=translate,
    alike="llada",
)

"""SDAR with a mixture of experts: block diffusion over Qwen3-MoE (JetLM/SDAR-30B-A3B-Chat-b{16,32,64}).

Attention, norms and the rest are transformers' Qwen3-MoE. Its feed-forward loops over the experts that were hit and
divides in place, neither of which is a straight line. So the layer of `dgraph.models.moe` replaces it, under the same
parameter names. A native Qwen3-MoE object is adopted the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dgraph.errors import CheckpointError, InputError
from dgraph.models.checkpoint import build_native
from dgraph.models.moe import MoE, MoEFamily, Routing, identity_of
from dgraph.models.native import PREFIX, Forward
from dgraph.models.remote_code import require
from dgraph.models.sdar import FACTS, translate
from dgraph.ops.experts.route import check

NATIVE = "Qwen3MoeForCausalLM"


def build(keys: Mapping[str, Any], source: str) -> Any:
    """A Qwen3-MoE on the meta device whose experts can be captured.

    Raises:
        CheckpointError: the config does not describe one.
    """
    model = build_native(NATIVE, keys, source)
    config = model.config
    routing = Routing(config.num_experts, config.num_experts_per_tok, "softmax", renormalise=config.norm_topk_prob)
    try:
        require(keys, "hidden_act", ("silu", None), NATIVE)
        check(routing.experts, routing.score, routing.groups, routing.top_groups, routing.topk)
    except (CheckpointError, InputError) as error:
        raise CheckpointError(f"{source}: {error}") from None
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            with torch.device("meta"):
                layer.mlp = MoE(config.hidden_size, config.moe_intermediate_size, routing)
    return model


class MoEForward(Forward):
    """`Forward`, of a model whose feed-forwards were replaced."""

    @property
    def identity(self) -> str:
        """All that the forward depends on besides tensors (`dgraph.frontend.frozen`)."""
        return identity_of(super().identity)


family = MoEFamily(
    name="sdar_moe",
    summary="SDAR with a mixture of experts: block diffusion over Qwen3-MoE",
    classes=("SDARMoeForCausalLM", NATIVE),
    facts=FACTS,
    build=build,
    translate=translate,
    wrap=MoEForward,
    prefix=PREFIX,
    tiny={"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
)

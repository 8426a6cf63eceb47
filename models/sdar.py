"""SDAR: block diffusion over Qwen3 (JetLM/SDAR-*-Chat-b{16,32,64}).

SDAR's parameters carry Qwen3's names and shapes, so a checkpoint or a remote-code model object is assigned to the
native Qwen3 class without a copy. Its block length is in no config key of the published checkpoints, only in their
name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from dgraph.errors import CheckpointError
from dgraph.families import Model
from dgraph.models.checkpoint import load_checkpoint, read_config, restore_buffers
from dgraph.models.native import PREFIX, Forward, native_spec

MASK_ID = 151669
"""Mask token of the published checkpoints, whose config does not name it."""


class SDARFamily:
    """Loads SDAR checkpoints and adopts remote-code SDAR model objects."""

    name = "sdar"
    summary = "SDAR: block diffusion over Qwen3"

    def adopt(self, model: Any, **facts: Any) -> Model | None:
        if type(model).__name__ != "SDARForCausalLM" or not isinstance(model, nn.Module):
            return None
        import transformers

        raw: dict[str, Any] = cast(Any, model.config).to_dict()
        known = {
            k: v for k, v in raw.items() if k not in ("architectures", "model_type", "auto_map", "torch_dtype", "dtype")
        }
        config = transformers.Qwen3Config(**known)
        with torch.device("meta"):
            native = transformers.Qwen3ForCausalLM(config)
        trained = [p for p in model.parameters() if p.requires_grad]
        try:
            missing, extra = native.load_state_dict(model.state_dict(keep_vars=True), assign=True, strict=False)
        except RuntimeError as error:  # sizes that differ
            reason = " ".join(str(error).split())
            raise CheckpointError(f"this SDAR model does not fit Qwen3: {reason}.") from error
        if missing or extra:
            raise CheckpointError(f"this SDAR model does not fit Qwen3: missing {missing[:3]}, unexpected {extra[:3]}.")
        model.requires_grad_(False)  # assigning switched it on for every parameter
        for parameter in trained:
            parameter.requires_grad_(True)
        restore_buffers(native, config, next(model.parameters()).device)
        own = raw.get("mask_token_id")
        facts = {"mask_id": MASK_ID if own is None else own, **facts}
        spec = native_spec(config, self.name, next(model.parameters()).dtype, **facts)
        return Model("sdar", Forward(native.eval()), spec, None, PREFIX)

    def load(self, folder: Path, dtype: torch.dtype | None, device: torch.device) -> Model | None:
        config = read_config(folder)
        if "SDARForCausalLM" not in (config.get("architectures") or []):
            return None
        if config.get("mask_token_id") is None and config.get("vocab_size", 0) > MASK_ID:
            config["mask_token_id"] = MASK_ID
        named = re.search(r"-b(\d+)$", folder.name)
        if config.get("block_size") is None and named:
            config["block_size"] = int(named.group(1))
        return load_checkpoint(folder, config, "Qwen3ForCausalLM", self.name, dtype, device)


family = SDARFamily()

"""Checkpoint folders in SDAR's own format: config.json, sharded bf16 safetensors with Qwen3's parameter names."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .data import BLOCK
from .model import TinyConfig, TinyModel
from .tokenizer import EOS_ID, MASK_ID, PAD_ID

INDEX = "model.safetensors.index.json"


def sdar_config(config: TinyConfig) -> dict[str, Any]:
    """The config.json of an SDAR model of this shape."""
    return {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        **asdict(config),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_length": BLOCK,
        "block_size": BLOCK,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mask_token_id": MASK_ID,
        "max_window_layers": config.num_hidden_layers,
        "pad_token_id": PAD_ID,
        "rope_scaling": None,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
    }


def write(model: TinyModel, folder: Path, shard_bytes: int = 12 * 2**20) -> None:
    """Write weights (bf16) and configs into `folder`; each file appears whole, the index last."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    sizes = [0]
    for name, value in model.state_dict().items():
        tensor = value.detach().to("cpu", torch.bfloat16).contiguous()
        if sizes[-1] + tensor.nbytes > shard_bytes and shards[-1]:
            shards.append({})
            sizes.append(0)
        shards[-1][name] = tensor
        sizes[-1] += tensor.nbytes
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / f"{name}.part", metadata={"format": "pt"})
        (folder / f"{name}.part").rename(folder / name)
    generation = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "do_sample": False}
    _write_json(folder / "config.json", sdar_config(model.config))
    _write_json(folder / "generation_config.json", generation)
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    _write_json(
        folder / INDEX,
        {"metadata": {"total_size": sum(sizes)}, "weight_map": dict(sorted(weight_map.items()))},
    )


def read(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> TinyModel:
    """The model of a folder made by `write`. Raises RuntimeError if a parameter is missing or unknown."""
    model = TinyModel(TinyConfig.read(folder))
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    state: dict[str, Tensor] = {}
    for name in sorted(set(weight_map.values())):
        state |= load_file(folder / name)
    model.load_state_dict(state)
    return model.to(device, dtype)


def _write_json(path: Path, value: Any) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    part.rename(path)

"""Checkpoint folders in a family's own format: config.json and sharded bf16 safetensors; packed ones where they shall
be small (see `dgraph.models.packed`).

    python -m training.checkpoint FOLDER --out PLAIN           bf16 as every reader of safetensors knows it
    python -m training.checkpoint FOLDER --out SMALL --pack

SDAR's parameters carry Qwen3's names, which are those of `TinyModel`; LLaDA's carry OLMo's.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dgraph.errors import DgraphError, InputError
from dgraph.models.checkpoint import read_tensors
from dgraph.models.files import INDEX
from dgraph.models.objects import read_config as read_object
from dgraph.models.packed import pack

from .data import BLOCK
from .model import TinyConfig, TinyModel
from .tokenizer import EOS_ID, MASK_ID, PAD_ID

SMALL_SHARD = 12 * 2**20
"""Bytes of a shard of an embedded model."""

LLADA_NAMES = {
    "model.embed_tokens": "model.transformer.wte",
    "model.layers": "model.transformer.blocks",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}
"""Parts of parameter names here and in a LLaDA checkpoint."""

LLADA_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "intermediate_size": "mlp_hidden_size",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "rms_norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "max_position_embeddings": "max_sequence_length",
}
"""Keys of the shape here and in a LLaDA config, whose head width is d_model / n_heads."""


def sdar_config(config: TinyConfig) -> dict[str, Any]:
    """The config.json of an SDAR model of this shape."""
    return {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        **{key: value for key, value in asdict(config).items() if key != "family"},
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


def llada_config(config: TinyConfig) -> dict[str, Any]:
    """The config.json of a LLaDA model of this shape."""
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        **{theirs: getattr(config, ours) for ours, theirs in LLADA_KEYS.items()},
        "activation_type": "silu",
        "alibi": False,
        "attention_dropout": 0.0,
        "attention_layer_norm": False,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "embedding_dropout": 0.0,
        "embedding_size": config.vocab_size,
        "eos_token_id": EOS_ID,
        "include_bias": False,
        "include_qkv_bias": False,
        "init_std": 0.02,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "mask_token_id": MASK_ID,
        "multi_query_attention": None,
        "pad_token_id": PAD_ID,
        "residual_dropout": 0.0,
        "rope": True,
        "rope_full_precision": True,
        "scale_logits": False,
        "torch_dtype": "bfloat16",
        "use_cache": False,
        "weight_tying": False,
    }


def read_config(folder: Path) -> TinyConfig:
    """The shape written in a folder's config.json. Raises ValueError for an architecture of another family."""
    values = json.loads((folder / "config.json").read_text())
    architecture = values["architectures"][0]
    if architecture == "SDARForCausalLM":
        return TinyConfig(**{key: values[key] for key in TinyConfig.__dataclass_fields__ if key != "family"})
    if architecture == "LLaDAModelLM":
        shape = {ours: values[theirs] for ours, theirs in LLADA_KEYS.items()}
        return TinyConfig(**shape, head_dim=values["d_model"] // values["n_heads"], family="llada")
    raise ValueError(f"{folder}/config.json is of {architecture}; expected SDARForCausalLM or LLaDAModelLM")


def stored_name(name: str, config: TinyConfig) -> str:
    """The name in a checkpoint of the parameter that is `name` in `TinyModel`."""
    if config.family == "llada":
        for ours, theirs in LLADA_NAMES.items():
            name = name.replace(ours, theirs)
    return name


def write(model: TinyModel, folder: Path, shard_bytes: int = SMALL_SHARD) -> None:
    """Write weights (bf16, packed) and configs into `folder`; each file appears whole, the index last."""
    tensors = {stored_name(name, model.config): value for name, value in model.state_dict().items()}
    config_of = llada_config if model.config.family == "llada" else sdar_config
    generation = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "do_sample": False}
    write_folder(folder, tensors, config_of(model.config), generation, shard_bytes, packed=True)


def write_folder(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: dict[str, Any],
    generation: dict[str, Any] | None = None,
    shard_bytes: int = 2**30,
    dtype: torch.dtype = torch.bfloat16,
    packed: bool = False,
) -> None:
    """Write a checkpoint: tensors in shards of up to `shard_bytes`, and configs. Each file appears whole, the index
    last.

    packed: as `dgraph.models.packed` does, which dgraph alone reads.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, dict[str, Tensor]]] = [{}]
    sizes = [0]
    for name, value in tensors.items():
        tensor = value.detach().to("cpu", dtype).contiguous()
        parts = pack(name, tensor) if packed else {name: tensor}
        size = sum(part.nbytes for part in parts.values())
        if sizes[-1] + size > shard_bytes and shards[-1]:
            shards.append({})
            sizes.append(0)
        shards[-1][name] = parts
        sizes[-1] += size
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        stored = {part: tensor for parts in shard.values() for part, tensor in parts.items()}
        save_file(stored, folder / f"{name}.part", metadata={"format": "pt"})
        (folder / f"{name}.part").rename(folder / name)
    write_json(folder / "config.json", config)
    if generation is not None:
        write_json(folder / "generation_config.json", generation)
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    write_json(
        folder / INDEX,
        {"metadata": {"total_size": sum(sizes)}, "weight_map": dict(sorted(weight_map.items()))},
    )


def read(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> TinyModel:
    """The model of a folder made by `write`. Raises RuntimeError if a parameter is missing or unknown."""
    model = TinyModel(read_config(folder))
    stored = read_tensors(folder)
    names = {stored_name(name, model.config): name for name in model.state_dict()}
    model.load_state_dict({names.get(name, name): value for name, value in stored.items()})
    return model.to(device, dtype)


def write_json(path: Path, value: Any) -> None:
    """Write a file that appears whole."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    part.rename(path)


def rewrite(folder: Path, out: Path, packed: bool) -> None:
    """Write a bf16 checkpoint again, packed or plain, with the files beside its weights.

    Raises:
        InputError: `out` is there, or the weights are not in bf16.
        CheckpointError: a damaged folder.
    """
    if out.exists():
        raise InputError(f"{out} is there already; give a folder that is not.")
    config, tensors = read_object(folder), read_tensors(folder)
    if other := {str(tensor.dtype) for tensor in tensors.values()} - {"torch.bfloat16"}:
        raise InputError(f"{folder} has weights of {', '.join(sorted(other))}, expected torch.bfloat16 alone.")
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors", INDEX, "__pycache__"))
    write_folder(out, tensors, config, shard_bytes=SMALL_SHARD, packed=packed)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a bf16 checkpoint again, packed or plain.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="a folder that is not there yet")
    parser.add_argument("--pack", action="store_true", help="in two thirds of the bytes, for dgraph alone")
    args = parser.parse_args(argv)
    try:
        rewrite(args.folder, args.out, args.pack)
    except DgraphError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()

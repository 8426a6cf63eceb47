"""GGUF files of llama.cpp, which are read as the checkpoint folders that they were made from.

Fields become the keys of config.json, and tensors get the names of the published checkpoint. Numbers of 16 and 32 bits
stay in the mapped file. Quantised ones (Q8_0, Q4_K, Q6_K and others that the package `gguf` knows) are dequantised one
tensor at a time when they are read. In memory a model takes what its dtype takes.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import CheckpointError, InputError
from dgraph.families.hub import GGUF
from dgraph.families.weights import Made, Stored, made

KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
"""Keys of a native config, and the fields that hold them after the architecture's name."""
REQUIRED = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "rms_norm_eps"),
    "intermediate_size",
)
IDS = {
    "bos_token_id": "bos_token_id",
    "pad_token_id": "padding_token_id",
    "mask_token_id": "mask_token_id",
}
"""Ids of a config, and the fields of the tokenizer that hold them."""
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Fields with ids that end a response."""
PARTS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
"""Names of parts in a file, and in the native classes; {} is an expert's number."""

_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
_BLOCK = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


def _native(config: dict[str, Any]) -> dict[str, Any]:
    return config


def _llada(config: dict[str, Any]) -> dict[str, Any]:
    from dgraph.models import llada

    return {
        **{own: config[native] for native, own in llada.KEYS.items()},
        **{name: config[name] for name in (*IDS, "eos_token_id") if name in config},
        **{"block_type": "llama", "activation_type": "silu", "layer_norm_type": "rms", "rope": True},
        "include_bias": False,
        "n_kv_heads": config["num_key_value_heads"],
        "vocab_size": config["vocab_size"],
        "weight_tying": config["tie_word_embeddings"],
    }


def _llada_name(name: str) -> str:
    from dgraph.models import llada

    return llada.stored(name)


def _llada_moe(config: dict[str, Any]) -> dict[str, Any]:
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    wide = config["intermediate_size"]
    return {**config, "expert_intermediate_size": width, "dense_intermediate_size": wide, "qk_layernorm": True}


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp, as a class that a family loads.

    Attributes:
        name: the class, as config.json names it.
        config: its config from the keys of the native class.
        stored: the name in its checkpoints of a native parameter.
        pairs: True if rows of queries and keys are stored in the order in which llama.cpp rotates neighbours.
    """

    name: str
    config: Callable[[dict[str, Any]], dict[str, Any]] = _native
    stored: Callable[[str], str] = str
    pairs: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", pairs=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM"),
    "dream": Architecture("DreamModel"),
    "llada": Architecture("LLaDAModelLM", _llada, _llada_name, pairs=True),
    "llada-moe": Architecture("LLaDAMoEModelLM", _llada_moe),
}


@dataclass(frozen=True, eq=False)
class File:
    """Contents of a GGUF file, or of several shards.

    Attributes:
        path: its path.
        fields: its fields that are no lists.
        tensors: those of all shards, as the package `gguf` gives them.
    """

    path: Path
    fields: Mapping[str, Any]
    tensors: Sequence[Any]

    @property
    def kind(self) -> str:
        """The name of its architecture."""
        return str(self.fields.get("general.architecture"))

    @property
    def architecture(self) -> Architecture:
        """The class that it holds.

        Raises:
            CheckpointError: none that is loaded.
        """
        found = ARCHITECTURES.get(self.kind)
        if found is None:
            raise CheckpointError(
                f"{self.path} has the architecture {self.kind!r}; dgraph reads GGUF files of "
                f"{', '.join(ARCHITECTURES)}. Load the folder with safetensors that it was made from."
            )
        return found


def shards_of(path: Path) -> list[Path]:
    """The files that belong together with one of them.

    Raises:
        CheckpointError: some are missing.
    """
    found = _SHARD.fullmatch(path.name)
    if found is None:
        return [path]
    shards = sorted(path.parent.glob(f"{found[1]}-?????-of-{found[2]}{GGUF}"))
    if len(shards) != int(found[2]):
        raise CheckpointError(f"{path.parent} has {len(shards)} of the {int(found[2])} shards of {found[1]}.")
    return shards


def open_file(path: Path) -> File:
    """Fields and tensors of a file and its other shards; what was read last is kept.

    Raises:
        InputError: the package `gguf` is not installed.
        CheckpointError: damaged, or no GGUF file.
    """
    if importlib.util.find_spec("gguf") is None:
        raise InputError(f"{path} needs the package gguf to be read; install with: pip install 'dgraph[gguf]'.")
    shards = shards_of(path)
    return _opened(tuple(shards), tuple(shard.stat().st_mtime_ns for shard in shards))


@lru_cache(maxsize=2)
def _opened(shards: tuple[Path, ...], changed: tuple[int, ...]) -> File:
    import gguf

    fields: dict[str, Any] = {}
    tensors: list[Any] = []
    for shard in shards:
        try:
            reader = gguf.GGUFReader(shard, "c")
            scalars = (f for f in reader.fields.values() if f.types and f.types[0] != gguf.GGUFValueType.ARRAY)
            fields = {f.name: f.contents() for f in scalars} | fields
            tensors += reader.tensors
        except (OSError, ValueError, LookupError, OverflowError, MemoryError) as error:
            raise CheckpointError(f"{shard} is damaged or not a GGUF file: {str(error).rstrip('.')}.") from error
    return File(shards[0], fields, tensors)


def config_of(path: Path) -> dict[str, Any]:
    """A GGUF file's fields as the config.json of the checkpoint that it was made from.

    Raises:
        CheckpointError: an architecture, or a rotation, that is not loaded; a field is missing.
    """
    file = open_file(path)
    return {**file.architecture.config(native_config(file)), "architectures": [file.architecture.name]}


def native_config(file: File) -> dict[str, Any]:
    """The fields of a file in the keys of a native config."""
    fields, kind, names = file.fields, file.kind, {tensor.name for tensor in file.tensors}
    if absent := sorted(f"{kind}.{KEYS[key]}" for key in REQUIRED if f"{kind}.{KEYS[key]}" not in fields):
        raise CheckpointError(f"{file.path} lacks {', '.join(absent)}; convert or fetch it again.")
    scaling = fields.get(f"{kind}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in names:
        by = f"{kind}.rope.scaling.type {scaling!r}" if scaling != "none" else "the tensor rope_freqs.weight"
        raise CheckpointError(f"{file.path} scales its rotation by {by}, which dgraph does not read from GGUF files.")
    config = {key: fields[f"{kind}.{field}"] for key, field in KEYS.items() if f"{kind}.{field}" in fields}
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("rope_theta", 10_000.0)
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    # The table of embeddings says how many rows there are; the field may count tokens.
    rows = next((int(t.shape[1]) for t in file.tensors if t.name == "token_embd.weight"), config.get("vocab_size"))
    ends = dict.fromkeys(fields[name] for end in ENDS if (name := f"tokenizer.ggml.{end}") in fields)
    ids = {key: fields[name] for key, field in IDS.items() if (name := f"tokenizer.ggml.{field}") in fields}
    said: dict[str, Any] = {"eos_token_id": list(ends) if len(ends) > 1 else next(iter(ends), None)}
    if "diffusion.shift_logits" in fields:
        said["logit_shift"] = int(fields["diffusion.shift_logits"])
    if fields.get(f"{kind}.attention.causal") is False:
        said["attention"] = "bidirectional"
    return {
        **config,
        **ids,
        **said,
        "vocab_size": rows,
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "norm_topk_prob": True,
    }


def tensors_of(path: Path) -> dict[str, Stored]:
    """A GGUF file's tensors by the names of the checkpoint that it was made from.

    Raises:
        CheckpointError: a tensor of a name that is not known.
    """
    file = open_file(path)
    config, of = native_config(file), file.architecture
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    found: dict[str, Stored] = {}
    for tensor in file.tensors:
        named = _BLOCK.fullmatch(tensor.name)
        if named is None or named[2] not in PARTS:
            raise CheckpointError(f"{path} has a tensor {tensor.name!r}, which no {of.name} has.")
        native = f"{PARTS[named[2]]}.{named[3]}"
        if named[1] is not None:
            native = f"model.layers.{named[1]}.{native}"
        if "{}" in native:
            found |= {of.stored(native.format(e)): _stored(part, tensor, path) for e, part in enumerate(tensor.data)}
            continue
        stored = _stored(tensor.data, tensor, path)
        if of.pairs and named[2] in heads:
            stored = _put_back(stored, heads[named[2]])
        found[of.stored(native)] = stored
    return found


def _stored(data: Any, tensor: Any, path: Path) -> Stored:
    """A tensor in the file, or made of its quantised numbers; data: of it, or of one item of it."""
    import gguf

    kind = tensor.tensor_type
    if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
        return torch.from_numpy(data)
    if kind == gguf.GGMLQuantizationType.BF16:
        return torch.from_numpy(data).view(torch.bfloat16)
    shape = tuple(int(n) for n in gguf.quant_shape_from_byte_shape(data.shape, kind))

    def make() -> Tensor:
        try:
            return torch.from_numpy(gguf.dequantize(data, kind))
        except NotImplementedError:
            raise CheckpointError(
                f"{path}: {tensor.name} is stored as {kind.name}, which the package gguf does not dequantise; take a "
                f"file of Q8_0, Q6_K or Q4_K."
            ) from None

    return Made(shape, torch.float32, make)


def _put_back(stored: Stored, heads: int) -> Made:
    """A weight of queries or keys with its rows in the order of transformers."""
    return Made(tuple(stored.shape), stored.dtype, lambda: in_halves(made(stored), heads))


def in_halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys in the order of transformers, [heads * d, ...].

    llama.cpp rotates neighbours, so its rows of a head are pairs (0, d/2), (1, d/2 + 1), ...; transformers rotates
    halves against each other.
    """
    pairs = weight.shape[0] // heads // 2
    return weight.view(heads, pairs, 2, -1).transpose(1, 2).reshape(weight.shape)


def own_dtype(stored: Mapping[str, Stored]) -> torch.dtype:
    """The dtype that a file's weights are in memory if nothing else is asked: that of the largest, or bfloat16 where it
    is quantised.
    """
    sizes = {name: torch.Size(tensor.shape).numel() for name, tensor in stored.items()}
    largest = stored[max(sizes, key=sizes.__getitem__)]
    return torch.bfloat16 if isinstance(largest, Made) and largest.dtype == torch.float32 else largest.dtype

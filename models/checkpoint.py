"""Reading a checkpoint folder: config.json, safetensors shards, tokenizer; strict about what is there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import CheckpointError
from dgraph.families import Model
from dgraph.models.native import PREFIX, Forward, native_spec


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder.

    Raises:
        CheckpointError: missing, not JSON, or not an object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds a {type(config).__name__}, expected an object with the model's settings.")
    return config


def load_checkpoint(
    folder: Path,
    config: dict[str, Any],
    architecture: str,
    family: str,
    dtype: torch.dtype | None,
    device: torch.device,
) -> Model:
    """A native transformers model filled from a folder's shards.

    Args:
        folder: with *.safetensors and, optionally, tokenizer.json.
        config: the parsed config.json.
        architecture: name of the native class in `transformers`.
        family: the family's name, for the spec.
        dtype: of the weights in memory; None for the checkpoint's own.
        device: where the weights go.

    Raises:
        CheckpointError: keys missing or unexpected, shapes that differ; the message names the first few.
    """
    import transformers

    tensors = read_tensors(folder)
    dtype = dtype or next(iter(tensors.values())).dtype
    known = {
        k: v for k, v in config.items() if k not in ("architectures", "model_type", "auto_map", "torch_dtype", "dtype")
    }
    try:
        native_config = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(**known)
        with torch.device("meta"):
            model = getattr(transformers, architecture)(native_config)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{folder}/config.json does not describe a {architecture}: {reason}.") from error
    _check_keys(folder, {k: tuple(v.shape) for k, v in model.state_dict().items()}, tensors, model)
    model.load_state_dict({k: v.to(device, dtype) for k, v in tensors.items()}, assign=True, strict=False)
    model.tie_weights()
    restore_buffers(model, native_config, device)
    spec = native_spec(_WithMask(native_config, config), family, dtype)
    return Model(folder.name, Forward(model.eval()), spec, read_tokenizer(folder), PREFIX)


class _WithMask:
    """A native config, and behind it the keys that only the checkpoint's own config knows."""

    def __init__(self, native: Any, raw: dict[str, Any]):
        self._native, self._raw = native, raw

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._native, name, None)
        return self._raw.get(name) if value is None else value


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors shards, by name.

    Raises:
        CheckpointError: no shard, a damaged shard, or a name in two shards.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise CheckpointError(f"{folder} has no *.safetensors file.")
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        try:
            loaded = load_file(shard)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{shard} is damaged or not a safetensors file: {error}.") from error
        if twice := sorted(set(loaded) & set(tensors)):
            raise CheckpointError(
                f"{shard} holds {twice[0]} and {len(twice) - 1} more that an earlier shard holds too."
            )
        tensors.update(loaded)
    return tensors


def _check_keys(folder: Path, expected: dict[str, tuple[int, ...]], got: dict[str, Tensor], model: Any) -> None:
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    missing = sorted(set(expected) - set(got) - tied)
    extra = sorted(set(got) - set(expected))
    wrong = [
        f"{k} is {tuple(got[k].shape)}, expected {s}" for k, s in expected.items() if k in got and got[k].shape != s
    ]
    floating = [f"{k} is {t.dtype}" for k, t in got.items() if not t.dtype.is_floating_point]
    for what, names in (
        ("missing", missing),
        ("unexpected", extra),
        ("wrong shape", wrong),
        ("not floating-point", floating),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise CheckpointError(
                f"checkpoint {folder}: {what}: {', '.join(names[:3])}{more}. Its config.json and its shards do not "
                f"belong together; fetch or export the checkpoint again."
            )


def restore_buffers(model: Any, config: Any, device: torch.device) -> None:
    """Compute what no checkpoint stores: a model built on the meta device has no rotary frequencies yet."""
    for module in list(model.modules()):
        names = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        if names:
            fresh = type(module)(config)
            for name in names:
                setattr(module, name, getattr(fresh, name).to(device))


class FileTokenizer:
    """tokenizer.json of a checkpoint, with the chat frame of its tokenizer_config.json."""

    def __init__(self, folder: Path):
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            path = folder / "tokenizer_config.json"
            settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except Exception as error:  # tokenizers raises nothing more special
            raise CheckpointError(f"the tokenizer of {folder} cannot be read: {error}.") from error
        self._template: str = settings.get("chat_template") or ""

    def encode(self, prompt: str) -> list[int]:
        """Ids of a prompt in its chat frame."""
        if not prompt:
            return []
        text = self._render(prompt) if self._template else prompt
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def _render(self, prompt: str) -> str:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        template = ImmutableSandboxedEnvironment().from_string(self._template)
        return template.render(messages=[{"role": "user", "content": prompt}], add_generation_prompt=True)


def read_tokenizer(folder: Path) -> FileTokenizer | None:
    """The tokenizer of a folder, or None if it has none."""
    return FileTokenizer(folder) if (folder / "tokenizer.json").is_file() else None

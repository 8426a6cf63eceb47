"""Reading a checkpoint folder: its configs, tokenizer and safetensors shards, into a native transformers class; strict
about what is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dgraph.errors import CheckpointError
from dgraph.families import Model
from dgraph.models.native import PREFIX, Forward, native_spec, with_ids
from dgraph.models.tokenizer import FileTokenizer, read_tokenizer
from dgraph.weights import WeightSource, hollow

INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"

# Keys of a config that name the class it was written for, and not the model.
_ABOUT_THE_CLASS = ("architectures", "model_type", "auto_map", "torch_dtype", "dtype")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder.

    Raises:
        CheckpointError: missing, not JSON, or not an object.
    """
    return _read_object(folder / "config.json", "the model's settings")


def read_folder(folder: Path) -> tuple[dict[str, Any], FileTokenizer | None]:
    """All that the files of a folder say of a model but its weights: its config, and its tokenizer if it has one.

    The config has the ids of generation_config.json, and the tokenizer's mask token where both name none.

    Raises:
        CheckpointError: a damaged file.
    """
    config, tokenizer = read_config(folder), read_tokenizer(folder)
    if (folder / GENERATION).is_file():
        config = with_ids(config, _read_object(folder / GENERATION, "the settings of a generation"))
    if config.get("mask_token_id") is None and tokenizer is not None and tokenizer.mask_id is not None:
        config = {**config, "mask_token_id": tokenizer.mask_id}
    return config, tokenizer


def load_checkpoint(
    folder: Path,
    config: dict[str, Any],
    architecture: str,
    family: str,
    dtype: torch.dtype | None,
    device: torch.device,
    tokenizer: FileTokenizer | None = None,
    stored: Callable[[str], str] = str,
    published: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
    opened: bool = False,
) -> Model:
    """A native transformers model filled from a folder's shards.

    Args:
        folder: with *.safetensors.
        config: what `read_folder` gave, in the native class's keys.
        architecture: name of the native class in `transformers`.
        family: the family's name, for the spec.
        dtype: of the weights in memory; None for the checkpoint's own.
        device: where the weights go.
        tokenizer: the folder's.
        stored: the name in the shards of a native parameter's name; the same by default.
        published, facts: see `native_spec`.
        opened: leave the weights in the shards; see `dgraph.families.Family`.

    Raises:
        CheckpointError: keys missing or unexpected, shapes that differ; the message names the first few, by the names
            of the shards.
    """
    model = build_native(architecture, config, f"{folder}/config.json")
    tensors = read_tensors(folder)
    dtype = dtype or next(iter(tensors.values())).dtype
    spec = native_spec(WithOwnKeys(model.config, config), family, dtype, published, **(facts or {}))
    belong = "Its config.json and its shards do not belong together; fetch or export the checkpoint again."
    names = match_names(model, tensors, stored, f"checkpoint {folder}", belong)
    weights = None
    if opened:
        state = {native: hollow(tensors[name].shape, dtype, device) for native, name in names.items()}
        weights = {native: [tensors[name]] for native, name in names.items()}
    else:  # each tensor is let go as soon as it is converted: the weights are in memory once
        state = {native: tensors.pop(name).to(device, dtype) for native, name in names.items()}
    model.load_state_dict(state, assign=True, strict=False)
    model.tie_weights()
    restore_buffers(model, model.config, device)
    source = None if weights is None else source_of(model, weights)
    return Model(folder.name, Forward(model.eval()), spec, tokenizer, PREFIX, weights=source)


def source_of(model: nn.Module, stored: dict[str, list[Tensor]]) -> WeightSource:
    """Where to read a model's weights, those that are tied to another one among them."""
    named = dict(model.named_parameters(remove_duplicate=False))
    names = {id(named[name]): name for name in stored if name in named}
    tied = {name: stored[names[id(p)]] for name, p in named.items() if name not in stored and id(p) in names}
    return WeightSource({**stored, **tied})


def build_native(architecture: str, config: Mapping[str, Any], source: str) -> Any:
    """A native class of `transformers` on the meta device.

    Args:
        architecture: its name.
        config: its config's keys, and any more.
        source: what the config was read from, for messages.

    Raises:
        CheckpointError: the config does not describe one.
    """
    import transformers

    known = {k: v for k, v in config.items() if k not in _ABOUT_THE_CLASS}
    try:
        native_config = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(**known)
        with torch.device("meta"):
            model = getattr(transformers, architecture)(native_config)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{source} does not describe a {architecture}: {reason}.") from error
    if slides := sum(getattr(module, "sliding_window", None) is not None for module in model.modules()):
        raise CheckpointError(
            f"{source} asks for a sliding window in {slides} layers (use_sliding_window); dgraph's attention sees all "
            f"positions. Set use_sliding_window to false if the model was trained without."
        )
    return model


def match_names(
    model: Any, tensors: Mapping[str, Tensor], stored: Callable[[str], str], what: str, advice: str
) -> dict[str, str]:
    """Which of the tensors each native parameter is: native name -> stored name.

    Args:
        model: the native model.
        tensors: what there is, by stored name.
        stored: the stored name of a native name.
        what, advice: how a message begins and ends.

    Raises:
        CheckpointError: a name is missing or unexpected, or a tensor is not of the shape or kind expected.
    """
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    return match_shapes(shapes, tied, tensors, stored, what, advice)


def match_shapes(
    shapes: Mapping[str, tuple[int, ...]],
    tied: Set[str],
    tensors: Mapping[str, Tensor],
    stored: Callable[[str], str],
    what: str,
    advice: str,
) -> dict[str, str]:
    """As `match_names`, for the shapes of the native parameters; those that are tied may be missing."""
    names = {name: stored(name) for name in shapes}
    found = {native: name for native, name in names.items() if name in tensors}
    problems = {
        "missing": sorted(names[n] for n in set(names) - set(found) - tied),
        "unexpected": sorted(set(tensors) - set(names.values())),
        "wrong shape": [
            f"{name} is {tuple(tensors[name].shape)}, expected {shapes[native]}"
            for native, name in found.items()
            if tensors[name].shape != shapes[native]
        ],
        "not floating-point": [f"{k} is {t.dtype}" for k, t in tensors.items() if not t.dtype.is_floating_point],
    }
    for kind, which in problems.items():
        if which:
            more = f" and {len(which) - 3} more" if len(which) > 3 else ""
            raise CheckpointError(f"{what}: {kind}: {', '.join(which[:3])}{more}. {advice}")
    return found


class WithOwnKeys:
    """A native config, and after it the keys that only the checkpoint's own config knows."""

    def __init__(self, native: Any, own: Mapping[str, Any]):
        self._native, self._own = native, own

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._native, name, None)
        return self._own.get(name) if value is None else value


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors shards, by name: of the shards that its index names, if it has one.

    Raises:
        CheckpointError: no shard, a missing or damaged shard, a damaged index, or a name in two shards.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for shard in _shards(folder):
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


def _shards(folder: Path) -> list[Path]:
    there = sorted(folder.glob("*.safetensors"))
    if not there and (pickled := sorted(folder.glob("*.bin"))):
        raise CheckpointError(
            f"{folder} has no *.safetensors file, only {pickled[0].name} and the like ({len(pickled)} in all): "
            f"reading these pickles can run code, so dgraph does not. Convert each with `from safetensors.torch import "
            f"save_file; save_file({{k: v.contiguous().clone() for k, v in torch.load('{pickled[0].name}', "
            f"weights_only=True).items()}}, '{pickled[0].stem}.safetensors')`."
        )
    if not there:
        raise CheckpointError(f"{folder} has no *.safetensors file.")
    if not (folder / INDEX).is_file():
        return there
    places = _read_object(folder / INDEX, "the shard of each tensor").get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{folder / INDEX} has no weight_map from names to shards; fetch it again.")
    named = sorted(set(places.values()))
    if missing := [name for name in named if folder / name not in there]:
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing[:3])}, {len(missing)} of the {len(named)} shards that {INDEX} names; "
            f"fetch the rest of the checkpoint."
        )
    return [folder / name for name in named]


def _read_object(path: Path, what: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected an object with {what}.")
    return value


def restore_buffers(model: Any, config: Any, device: torch.device) -> None:
    """Compute what no checkpoint stores: a model built on the meta device has no rotary frequencies yet."""
    for module in list(model.modules()):
        names = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        if names:
            fresh = type(module)(config)
            for name in names:
                setattr(module, name, getattr(fresh, name).to(device))

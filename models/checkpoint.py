"""Opening a checkpoint folder: its configs, tokenizer and safetensors shards; strict about what is there."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from dgraph.causal import Causal
from dgraph.errors import CheckpointError
from dgraph.models import difference
from dgraph.models.layouts import Quantised
from dgraph.models.native import with_ids
from dgraph.models.packed import unpack
from dgraph.models.quantised import find_quantised, settings_of, stack_parts, without_zero_biases
from dgraph.models.tokenizer import FileTokenizer, read_tokenizer
from dgraph.quantised import PARTS, Format
from dgraph.weights import Stored, WeightSource, hollow

INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"

# Keys of a config that say of which class it was written, and how its weights are stored, and not what the model is.
_ABOUT_THE_CLASS = ("architectures", "model_type", "auto_map", "torch_dtype", "dtype", "quantization_config")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder.

    Raises:
        CheckpointError: missing, not JSON, or not an object.
    """
    return read_object(folder / "config.json", "the model's settings")


@dataclass(frozen=True, eq=False)
class Described:
    """All that the files of a folder say of a model but its weights.

    Attributes:
        config: with the ids of generation_config.json and of the tokenizer; see `with_ids`.
        tokenizer: its own or, if it has none, that of its base.
        base: what its weights are a difference from (see `dgraph.models.difference`).
    """

    config: dict[str, Any]
    tokenizer: FileTokenizer | None
    base: Causal | None


def read_folder(folder: Path) -> Described:
    """What the files of a folder say of a model; the base of a difference is read whole.

    Raises:
        InputError: what the base needs is not installed.
        CheckpointError: a damaged file.
    """
    config, tokenizer, base = read_config(folder), read_tokenizer(folder), difference.base_of(folder)
    if tokenizer is None and base is not None:
        tokenizer = cast(FileTokenizer, base.tokenizer)
    path = folder / GENERATION
    generation = read_object(path, "the settings of a generation") if path.is_file() else {}
    config = with_ids(config, generation, {} if tokenizer is None else tokenizer.ids)
    return Described(config, tokenizer, base)


# The names in a checkpoint of what each tensor of a model consists of, given the model and the names that are there.
Layout = Callable[[nn.Module, Container[str]], Mapping[str, Sequence[str]]]


def as_named(model: nn.Module, there: Container[str]) -> dict[str, list[str]]:
    """The `Layout` of a checkpoint that has the model's own names."""
    return {name: [name] for name in model.state_dict()}


def open_weights(
    model: Any,
    folder: Path,
    base: Causal | None,
    dtype: torch.dtype | None,
    device: torch.device,
    layout: Layout = as_named,
) -> tuple[WeightSource, torch.dtype]:
    """Let a model on the meta device have hollow parameters, and find in a folder's shards what they stand for.

    Args:
        model: with an attribute `config` and a method `tie_weights`.
        folder: with *.safetensors.
        base: as `read_folder` gave it.
        dtype: of the weights in memory; None for the checkpoint's own.
        device: where they go.
        layout: where each tensor of the model is.

    Returns:
        Where to read the weights, those that are tied to another one among them; and their dtype, that of layers whose
        weights are stored quantised among them.

    Raises:
        CheckpointError: keys missing or unexpected, shapes that differ; the message names the first few, by the names
            of the shards. Weights that are quantised in a way that is not known, see `dgraph.models.quantised`.
    """
    tensors: Mapping[str, Tensor | Quantised] = read_tensors(folder, base)
    if settings := settings_of(read_config(folder)):

        def embeddings(there: Container[str]) -> set[str]:
            names, of = (f"{name}.weight" for name in _embeddings(model)), layout(model, there)
            return {block for name in names for block in of[name]}

        tensors = find_quantised(tensors, settings, f"checkpoint {folder}", embeddings)
        asked = {block for blocks in layout(model, tensors).values() for block in blocks}
        tensors = without_zero_biases(tensors, settings, asked, f"checkpoint {folder}")
    belong = "Its config.json and its shards do not belong together; fetch or export the checkpoint again."
    names = match(model, layout(model, tensors), tensors, f"checkpoint {folder}", belong)
    plain = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    dtype = dtype or next(tensor.dtype for name, tensor in plain.items() if name.endswith("weight"))
    make_hollow(model, dtype, device)
    model.tie_weights()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    stored: dict[str, list[Stored]] = {}
    formats: dict[str, Format] = {}
    plainly: dict[str, list[str]] = {}
    for name, blocks in names.items():
        quantised = stack_parts(name, [tensors[block] for block in blocks])
        if quantised is None:
            plainly[name] = blocks
            stored[name] = [plain[block] for block in blocks]
            continue
        formats[name] = quantised[0].format
        for part, each in zip(PARTS, zip(*(block.parts for block in quantised), strict=True), strict=False):
            stored[f"{name}{part}"] = list(each)
    by_parameter = {id(parameters[name]): name for name in names if name in parameters}
    for name in [name for name in parameters if name not in names]:
        same = by_parameter[id(parameters[name])]
        stored |= {f"{name}{part}": stored[f"{same}{part}"] for part in PARTS if f"{same}{part}" in stored}
        formats |= {name: formats[same]} if same in formats else {}
    return WeightSource(stored, formats, plainly), dtype


def _embeddings(model: nn.Module) -> list[str]:
    """The paths of modules that look up vectors of ids."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]


def make_hollow(model: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Give a model on the meta device hollow parameters, and buffers; what is tied has to be tied again.

    Buffers stay fp32: what biases a choice, and the frequencies of a rotation, need all of their bits. Those that
    checkpoints store are zero.
    """
    stored = model.state_dict()
    for owner, module in list(model.named_modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(hollow(parameter.shape, dtype, device)))
        for name, buffer in list(module.named_buffers(recurse=False)):
            if f"{owner}.{name}" in stored:
                setattr(module, name, torch.zeros(buffer.shape, device=device))
    restore_buffers(model, model.config, device)


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


def match(
    model: Any, layout: Mapping[str, Sequence[str]], tensors: Mapping[str, Tensor | Quantised], what: str, advice: str
) -> dict[str, list[str]]:
    """Which of the tensors each one of a model consists of: its name -> theirs, for those that are there.

    Args:
        model: with an attribute `config`; what it ties may be missing, and there may be more by the names that it
            says it ignores, as classes of transformers do (`_keys_to_ignore_on_load_unexpected`).
        layout: its names -> the names of what each consists of; of a stack [items, rows, columns] the blocks of each
            item one after the other, all with the same number of rows.
        tensors: what there is.
        what, advice: how a message begins and ends.

    Raises:
        CheckpointError: a name is missing or unexpected, or a tensor is not of the shape or kind expected.
    """
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    ignored = re.compile("|".join(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()) or "(?!)")
    found = {name: list(blocks) for name, blocks in layout.items() if all(block in tensors for block in blocks)}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, value in model.state_dict().items():
        blocks = layout[name]
        whole = (math.prod(value.shape[:-1]) // len(blocks), value.shape[-1]) if len(blocks) > 1 else value.shape
        shapes |= dict.fromkeys(blocks, tuple(whole))
    asked = {block for name, blocks in layout.items() if name in found or name not in tied for block in blocks}
    problems = {
        "missing": sorted(asked - set(tensors)),
        "unexpected": sorted(name for name in set(tensors) - set(shapes) if not ignored.fullmatch(name)),
        "wrong shape": [
            f"{name} is {tuple(tensors[name].shape)}, expected {shape}"
            for name, shape in shapes.items()
            if name in tensors and tensors[name].shape != shape
        ],
        "not floating-point": [
            f"{name} is {tensor.dtype}"
            for name, tensor in tensors.items()
            if isinstance(tensor, Tensor) and not tensor.dtype.is_floating_point
        ],
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


def read_tensors(folder: Path, base: Causal | None = None) -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors shards, by name: of the shards that its index names, if it has one; or of
    its base and the difference from it (see `dgraph.models.difference`). Packed ones (see `dgraph.models.packed`) are
    in memory, the others stay in their mapped file until they are read.

    Args:
        base: what `difference.base_of` gives of the folder.

    Raises:
        CheckpointError: no shard, a missing or damaged shard, a damaged index, or a name in two shards.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if base is not None:
        return difference.read(folder, base)
    tensors: dict[str, Tensor] = {}
    for shard in _shards(folder):
        try:
            loaded = unpack(load_file(shard))
        except (SafetensorError, OSError, ValueError) as error:
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
    places = read_object(folder / INDEX, "the shard of each tensor").get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{folder / INDEX} has no weight_map from names to shards; fetch it again.")
    named = sorted(set(places.values()))
    if missing := [name for name in named if folder / name not in there]:
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing[:3])}, {len(missing)} of the {len(named)} shards that {INDEX} names; "
            f"fetch the rest of the checkpoint."
        )
    return [folder / name for name in named]


def read_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object of a file.

    Raises:
        CheckpointError: missing, not JSON, or not an object with `what`.
    """
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

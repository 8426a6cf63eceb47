"""Opening a checkpoint folder: its configs, tokenizer and weights."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from dgraph.errors import CheckpointError
from dgraph.families.causal import Causal
from dgraph.families.hub import is_gguf
from dgraph.families.pipelines import tokenizer_folder
from dgraph.families.quantised import PARTS, Format
from dgraph.families.weights import Stored, WeightSource, hollow
from dgraph.models import difference
from dgraph.models.files import read_files, weight_files
from dgraph.models.gguf_file import own_dtype, tensors_of
from dgraph.models.layouts import Quantised
from dgraph.models.matching import Layout, as_named, match, with_own_prefix
from dgraph.models.native import with_ids
from dgraph.models.objects import GENERATION, read_config, read_object
from dgraph.models.quantised import find_quantised, settings_of, stack_parts, without_zero_biases
from dgraph.models.rotation import check_rotation, check_width
from dgraph.models.tokenizer import FileTokenizer, read_tokenizer

# Keys of a config that say of which class it was written, and how its weights are stored, and not what the model is.
_ABOUT_THE_CLASS = ("architectures", "model_type", "auto_map", "torch_dtype", "dtype", "quantization_config")

# Keys of a native config that count something of which there is one at least.
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings"),
)


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
    """Read what the files of a folder say of a model; the base of a difference is read whole.

    Raises:
        InputError: what the base needs is not installed.
        CheckpointError: a damaged file.
    """
    config, base = read_config(folder), difference.base_of(folder)
    tokenizer = read_tokenizer(tokenizer_folder(folder))
    if tokenizer is None and base is not None:
        tokenizer = cast(FileTokenizer, base.tokenizer)
    path = folder / GENERATION
    generation = read_object(path, "the settings of a generation") if path.is_file() else {}
    config = with_ids(config, generation, {} if tokenizer is None else tokenizer.ids)
    return Described(config, tokenizer, base)


def open_weights(
    model: Any,
    folder: Path,
    base: Causal | None,
    dtype: torch.dtype | None,
    device: torch.device,
    layout: Layout = as_named,
) -> tuple[WeightSource, torch.dtype]:
    """Give a model on the meta device hollow parameters, and find their weights in a folder's shards.

    Args:
        model: with an attribute `config` and a method `tie_weights`.
        folder: with *.safetensors; or a GGUF file.
        base: as `read_folder` gave it.
        dtype: dtype of the weights in memory; None for the checkpoint's own.
        device: device of the weights.
        layout: names in the checkpoint of each tensor of the model.

    Returns:
        The source of the weights, tied ones included; and their dtype, also that of layers whose weights are stored
        quantised.

    Raises:
        CheckpointError: keys missing or unexpected, shapes that differ; the message names the first few, by the names
            of the shards. Weights that are quantised in a way that is not known, see `dgraph.models.quantised`.
    """
    config = read_config(folder)
    files = [folder] if is_gguf(folder) else []
    read: Mapping[str, Stored] = tensors_of(folder) if files else {}
    if base is not None:
        read = difference.read(folder, base)
    elif not files:
        files = weight_files(folder, config.get("transformers_weights"))
        read = read_files(files)
    tensors: Mapping[str, Stored | Quantised] = with_own_prefix(read, model, layout)
    if settings := settings_of(config):

        def embeddings(there: Container[str]) -> set[str]:
            names, of = (f"{name}.weight" for name in _embeddings(model)), layout(model, there)
            return {block for name in names for block in of[name]}

        tensors = find_quantised(tensors, settings, f"checkpoint {folder}", embeddings)
        asked = {block for blocks in layout(model, tensors).values() for block in blocks}
        tensors = without_zero_biases(tensors, settings, asked, f"checkpoint {folder}")
    shards = files[0].name if len(files) == 1 else "its shards"
    belong = f"Its config.json and {shards} do not belong together; fetch or export the checkpoint again."
    belong = "Convert or fetch it again." if is_gguf(folder) else belong
    names = match(model, layout(model, tensors), tensors, f"checkpoint {folder}", belong)
    plain = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, Quantised)}
    dtype = dtype or (
        own_dtype(plain) if is_gguf(folder) else next(t.dtype for name, t in plain.items() if name.endswith("weight"))
    )
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
    """Give a model on the meta device hollow parameters, and buffers; tied weights have to be tied again.

    Buffers stay fp32: the bias of a choice and the frequencies of a rotation need all of their bits. Buffers that
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

    check_rotation(config, source)
    does_not = f"{source} does not describe a {architecture}"
    for name in _SIZES:
        if (size := config.get(name)) is not None and (type(size) is not int or size < 1):
            raise CheckpointError(f"{does_not}: {name} is {size!r}, expected a whole number, at least 1.")
    for name in ("rms_norm_eps", "rope_theta"):
        if (number := config.get(name)) is not None and (type(number) not in (int, float) or number <= 0):
            raise CheckpointError(f"{does_not}: {name} is {number!r}, expected a number above 0.")
    known = {k: v for k, v in config.items() if k not in _ABOUT_THE_CLASS}
    try:
        native_config = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(**known)
        with torch.device("meta"):
            model = getattr(transformers, architecture)(native_config)
    except Exception as error:
        reason = " ".join(str(error).split())
        if isinstance(error, KeyError):  # of a table of kinds, or of a key that a kind needs
            named = next((f"{key} is {value!r}" for key, value in known.items() if value == error.args[0]), "")
            reason = f"{named}, which it does not know" if named else f"{error.args[0]} is missing"
        raise CheckpointError(f"{does_not}: {reason}.") from error
    heads = native_config.num_attention_heads
    check_width(model, getattr(native_config, "head_dim", None) or native_config.hidden_size // heads, source)
    if slides := sum(getattr(module, "sliding_window", None) is not None for module in model.modules()):
        raise CheckpointError(
            f"{source} asks for a sliding window in {slides} layers (use_sliding_window); dgraph's attention sees all "
            f"positions. Set use_sliding_window to false if the model was trained without."
        )
    return model


class WithOwnKeys:
    """A native config, and after it the keys that only the checkpoint's own config knows."""

    def __init__(self, native: Any, own: Mapping[str, Any]):
        self._native, self._own = native, own

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._native, name, None)
        return self._own.get(name) if value is None else value


def read_tensors(folder: Path, base: Causal | None = None) -> dict[str, Tensor]:
    """Every tensor of a folder by name (see `dgraph.models.files`), or of its base and the difference from it (see
    `dgraph.models.difference`).

    Args:
        base: what `difference.base_of` gives of the folder.

    Raises:
        CheckpointError: no file of weights, a missing or damaged one, or a damaged index.
    """
    return read_files(weight_files(folder)) if base is None else difference.read(folder, base)


def restore_buffers(model: Any, config: Any, device: torch.device) -> None:
    """Compute buffers that no checkpoint stores: a model built on the meta device has no rotary frequencies yet."""
    for module in list(model.modules()):
        names = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        if names:
            fresh = type(module)(config)
            for name in names:
                setattr(module, name, getattr(fresh, name).to(device))

"""Reading a folder of a low-rank adapter in PEFT's format: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dgraph.errors import CheckpointError
from dgraph.families.adapters import Adapter, LowRank
from dgraph.families.hub import ADAPTER as CONFIG
from dgraph.models.files import read_files, weight_files
from dgraph.models.objects import read_object

_BEFORE, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_ALL_LINEAR = "all-linear"
_KNOWN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", None),
}
"""Keys of its config, and the values under which scale * up @ down is all that it adds. Other ways of `init` change the
model's own weights, too.
"""
_PATTERNS = (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
"""Keys of ranks and scales: of some modules by pattern, which drafts do not read, and of all others."""
_READ = ("use_rslora", "target_modules", *(key for keys in _PATTERNS for key in keys))
_NO_MATTER = (
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("exclude_modules", "lora_dropout", "layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size"),
    *("loftq_config", "eva_config", "ensure_weight_tying", "corda_config", "lora_ga_config", "megatron_config"),
)
"""Keys of training, of what its tensors show, and settings of ways of `init_lora_weights`."""


def read_adapter(folder: Path, weights: Mapping[str, tuple[str, Tensor]]) -> Adapter:
    """The adapter by which a model drafts.

    Args:
        folder: folder of the adapter.
        weights: weights that it may be for, by the names that the model's own code has for them. Each has its name in a
            graph, and a tensor of its shape, dtype and device.

    Raises:
        CheckpointError: as `read_products`; and for an adapter of several ranks or scales.
    """
    config = _config_of(folder)
    for key, _ in _PATTERNS:
        if config.get(key):
            raise CheckpointError(
                f"{folder / CONFIG}: {key} is {config[key]!r}, expected {{}}: drafts read a low-rank product of one "
                f"rank beside each weight, and nothing else."
            )
    found = read_products(folder, {name: like for name, (_, like) in weights.items()})
    return Adapter(folder.name, {weights[name][0]: product for name, product in found.items()})


def read_products(folder: Path, weights: Mapping[str, Tensor]) -> dict[str, LowRank]:
    """The low-rank products of a folder, in the dtype and on the device of the weights that they are for.

    Ranks and scales are those of the config (`r`, `lora_alpha`, `use_rslora`). Patterns of names may change them for
    some layers. See "LoRA" (Hu et al., arXiv 2106.09685) and "rsLoRA" (Kalajdzievski, arXiv 2312.03732).

    Args:
        folder: folder of the adapter.
        weights: weights that it may be for, by the names that the model's own code has for them. Each is a tensor
            [outputs, inputs] of its shape, dtype and device.

    Raises:
        CheckpointError: no such folder, a damaged file, or a kind of adapter that is more than a product; also tensors
            that do not fit the model or the config. The message names the key or the tensor.
    """
    config = _config_of(folder)
    size_of = _settings(config, folder)
    tensors, found = read_files(weight_files(folder, stem="adapter_model")), {}
    for name in sorted(tensors):
        if name.endswith(_UP) and name.replace(_UP, _DOWN) in tensors:
            continue
        module = name.removeprefix(_BEFORE).removesuffix(_DOWN)
        own = f"{module}.weight"
        if not name.endswith(_DOWN) or own not in weights:
            raise CheckpointError(
                f"{folder} has the tensor {name}, expected {_BEFORE}NAME{_DOWN} and {_BEFORE}NAME{_UP}, where NAME is "
                f"a linear layer of this model's layers, such as {next(iter(weights), 'none').removesuffix('.weight')}."
            )
        if not _targeted(module, config.get("target_modules"), folder / CONFIG):
            raise CheckpointError(
                f"{folder} has the tensor {name}, but target_modules in {CONFIG} is {config['target_modules']!r}, "
                f"which leaves {module} out; the two do not belong together."
            )
        like, (rank, scale) = weights[own], size_of(module)
        pair = []
        for ending, shape in ((_DOWN, (rank, like.shape[1])), (_UP, (like.shape[0], rank))):
            stored = tensors.get(name.replace(_DOWN, ending))
            got = "missing" if stored is None else f"{stored.dtype} {tuple(stored.shape)}"
            if stored is None or tuple(stored.shape) != shape or not stored.dtype.is_floating_point:
                raise CheckpointError(
                    f"{folder}: {name.replace(_DOWN, ending)} is {got}, expected floating-point numbers {shape} by r "
                    f"in {CONFIG} and the model's {own}. Load the adapter that was trained for this model."
                )
            pair.append(stored.to(like.device, like.dtype))
        found[own] = LowRank(pair[0], pair[1], scale)
    return found


def _config_of(folder: Path) -> dict[str, Any]:
    """Settings of an adapter, if it is one that adds a product and nothing else."""
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(
            f"{folder} is no folder of an adapter: it has no {CONFIG}. Give one with {CONFIG} and "
            f"adapter_model.safetensors."
        )
    config = read_object(path, "the settings of an adapter")
    for key in {**_KNOWN, **config}:
        value, allowed = config.get(key), _KNOWN.get(key, (False, None, [], {}))
        if key in _READ or key in _NO_MATTER or (key not in config and None in allowed):
            continue
        if not any(value == good and type(value) is type(good) for good in allowed):
            expected = next((good for good in allowed if type(value) is type(good)), allowed[0])
            raise CheckpointError(
                f"{path}: {key} is {value!r}, expected {expected!r}: drafts read a low-rank product beside each "
                f"weight, and other models have it added, and nothing else."
            )
    return config


def _settings(config: Mapping[str, Any], folder: Path) -> Callable[[str], tuple[int, float]]:
    """The function from a module's path to the rank and the scale that a config says of it."""
    path = folder / CONFIG

    def of(module: str) -> tuple[int, float]:
        rank, alpha = (_by_pattern(config, *keys, module, path) for keys in _PATTERNS)
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise CheckpointError(f"{path}: r is {rank!r}, expected a rank, at least 1.")
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
            raise CheckpointError(f"{path}: lora_alpha is {alpha!r}, expected a number.")
        return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

    return of


def _by_pattern(config: Mapping[str, Any], patterns: str, key: str, module: str, path: Path) -> Any:
    """The value of the first pattern that the end of a module's path matches, as PEFT has it; else that of the key."""
    said = config.get(patterns) or {}
    if not isinstance(said, Mapping):
        raise CheckpointError(f"{path}: {patterns} is {said!r}, expected an object of patterns.")
    try:
        return next((said[pattern] for pattern in said if re.match(rf"(.*\.)?({pattern})$", module)), config.get(key))
    except re.error as error:
        raise CheckpointError(f"{path}: {patterns} has a pattern that cannot be read: {error}.") from None


def _targeted(module: str, targets: Any, path: Path) -> bool:
    """Say if `target_modules` names a module: it is a pattern of whole paths or a list of their ends, or is silent."""
    if isinstance(targets, list):
        return any(module == target or module.endswith(f".{target}") for target in targets)
    try:
        return targets in (None, _ALL_LINEAR) or re.fullmatch(str(targets), module) is not None
    except re.error as error:
        raise CheckpointError(f"{path}: target_modules has a pattern that cannot be read: {error}.") from None

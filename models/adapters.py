"""Reading a folder of a low-rank adapter in PEFT's format: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dgraph.errors import CheckpointError
from dgraph.families.adapters import Adapter, LowRank
from dgraph.models.files import read_files, weight_files
from dgraph.models.objects import read_object

CONFIG = "adapter_config.json"
_BEFORE, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_KNOWN: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("peft_type", ("LORA",)),
    ("bias", ("none", None)),
    ("use_dora", (False, None)),
    ("lora_bias", (False, None)),
    ("fan_in_fan_out", (False, None)),
    ("modules_to_save", ([], None)),
    ("target_parameters", ([], None)),
    ("rank_pattern", ({}, None)),
    ("alpha_pattern", ({}, None)),
    ("layer_replication", ([], None)),
)
"""Keys of its config, and the values under which scale * up @ down is all that it adds."""


def read_adapter(folder: Path, weights: Mapping[str, tuple[str, Tensor]]) -> Adapter:
    """The adapter of a folder, in the dtype and on the device of the weights that it is for.

    Args:
        folder: folder of the adapter.
        weights: weights that it may be for, by the names that the model's own code has for them. Each has its name in a
            graph, and a tensor [outputs, inputs] of its shape, dtype and device.

    Raises:
        CheckpointError: no such folder, a damaged file, or a kind of adapter that is more than a product; also tensors
            that do not fit the model or the config. The message names the key or the tensor.
    """
    if not (folder / CONFIG).is_file():
        raise CheckpointError(
            f"{folder} is no folder of an adapter: it has no {CONFIG}. Give one with {CONFIG} and "
            f"adapter_model.safetensors."
        )
    config = read_object(folder / CONFIG, "the settings of an adapter")
    rank, scale = _settings(config, folder)
    tensors, found = read_files(weight_files(folder, stem="adapter_model")), {}
    for name in sorted(tensors):
        if name.endswith(_UP) and name.replace(_UP, _DOWN) in tensors:
            continue
        own = name.removeprefix(_BEFORE).removesuffix(_DOWN) + ".weight"
        if not name.endswith(_DOWN) or own not in weights:
            raise CheckpointError(
                f"{folder} has the tensor {name}, expected {_BEFORE}NAME{_DOWN} and {_BEFORE}NAME{_UP}, where NAME is "
                f"a linear layer of this model's layers, such as {next(iter(weights)).removesuffix('.weight')}."
            )
        graph_name, like = weights[own]
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
        found[graph_name] = LowRank(pair[0], pair[1], scale)
    return Adapter(folder.name, found)


def _settings(config: Mapping[str, Any], folder: Path) -> tuple[int, float]:
    """Rank and scale that a config says."""
    for key, allowed in _KNOWN:
        value = config.get(key)
        if not any(value == good and type(value) is type(good) for good in allowed):
            raise CheckpointError(
                f"{folder / CONFIG}: {key} is {value!r}, expected {allowed[0]!r}: drafts read a low-rank product "
                f"beside each weight, and nothing else."
            )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise CheckpointError(f"{folder / CONFIG}: r is {rank!r}, expected a rank, at least 1.")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise CheckpointError(f"{folder / CONFIG}: lora_alpha is {alpha!r}, expected a number.")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

"""Quantised checkpoints: find the layout of one, and read quantised weights in the place of its tensors.

Nothing is dequantised. A weight in our order of bytes stays where it lies. A weight in another order (AWQ and GPTQ,
whose kernels read columns) is brought into ours when it is read, one at a time. Scales of activations are not read:
activations are measured as they come.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import CheckpointError
from dgraph.families.weights import Stored
from dgraph.models import layouts
from dgraph.models.layouts import Layout, Module, Quantised
from dgraph.models.modelopt import modelopt

METHODS: Mapping[str, Callable[[Mapping[str, Any]], Layout]] = {
    "awq": layouts.awq,
    "compressed-tensors": layouts.compressed_tensors,
    "fp8": layouts.block_fp8,
    "gptq": layouts.gptq,
    "modelopt": modelopt,
    "torchao": layouts.torchao,
}
"""Layouts, by the `quant_method` that config.json names."""


def settings_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Quantisation settings of a config.json; None if its weights are not quantised."""
    return config.get("quantization_config") or config.get("compression_config")


def find_quantised(
    tensors: Mapping[str, Stored],
    settings: Mapping[str, Any],
    what: str,
    embeddings: Callable[[Container[str]], Container[str]] = lambda there: (),
) -> dict[str, Stored | Quantised]:
    """A checkpoint's tensors by name, of quantised layers one `Quantised` under the weight's name in place of all.

    Modules whose weight is stored as it is (those that the settings ignore, or do not convert) keep it.

    Args:
        tensors: as they are stored.
        settings: see `settings_of`.
        what: beginning of a message.
        embeddings: of the names of weights that are there, the names of tables that look up ids.

    Raises:
        CheckpointError: a method or layout that is not known; a tensor is missing, or not of the shape or dtype that
            the settings say. The message names it.
    """
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"{what}: quantization_config is {settings!r}, expected an object of keys.")
    method = str(settings.get("quant_method", "compressed-tensors"))
    if method not in METHODS:
        raise CheckpointError(
            f"{what} is quantised by {method!r}, which dgraph does not read; it reads {', '.join(METHODS)}. Load the "
            f"checkpoint that this one was made from."
        )
    try:
        layout = METHODS[method](settings)
        modules: dict[str, dict[str, Tensor]] = {}
        found: dict[str, Stored | Quantised] = {}
        for name, tensor in tensors.items():
            module, _, leaf = name.rpartition(".")
            if leaf in layout.leaves and isinstance(tensor, Tensor):
                modules.setdefault(module, {})[leaf] = tensor
            elif leaf not in layouts.UNREAD:
                found[name] = tensor
        embed = embeddings({*found, *(f"{module}.weight" for module in modules)})
        for module, parts in modules.items():
            weight = f"{module}.weight"
            _refuse_nan(module, parts)
            plain = set(parts) == {"weight"} and parts["weight"].is_floating_point() and parts["weight"].itemsize > 1
            found[weight] = parts["weight"] if plain else layout.make(Module(module, method, parts, weight in embed))
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, re.error) as error:
        raise CheckpointError(
            f"{what}: quantization_config is not as {method!r} writes it ({error}): {dict(settings)!r}."
        ) from error
    return found


def _refuse_nan(module: str, parts: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError for a tensor of float8 that holds NaN, which no writer means."""
    for leaf, tensor in parts.items():
        if tensor.dtype != torch.float8_e4m3fn:
            continue
        if count := int(torch.count_nonzero(tensor.view(torch.uint8) & 0x7F == 0x7F)):
            raise CheckpointError(
                f"{module}.{leaf} has NaN in {count} of its float8 numbers; fetch or export the checkpoint again."
            )


def without_zero_biases(
    tensors: Mapping[str, Stored | Quantised], settings: Mapping[str, Any], asked: Container[str], what: str
) -> dict[str, Stored | Quantised]:
    """Drop biases of zeros, which AutoGPTQ stores for each layer that it quantises, where the model's layer has none.

    Args:
        tensors: as `find_quantised` gives them.
        settings: see `settings_of`.
        asked: names of the tensors that the model reads.
        what: beginning of a message.

    Raises:
        CheckpointError: such a bias is not zero. The message names the first few.
    """
    if settings.get("quant_method") != "gptq":
        return dict(tensors)
    beside = {f"{name.removesuffix('weight')}bias" for name, of in tensors.items() if isinstance(of, Quantised)}
    biases = {name: of for name, of in tensors.items() if name in beside and name not in asked}
    if others := sorted(name for name, of in biases.items() if isinstance(of, Tensor) and of.any()):
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise CheckpointError(
            f"{what}: {', '.join(others[:3])}{more}: not zero, and the layers that config.json describes have no bias, "
            f"expected zeros or none. Let config.json say which layers have one (attention_bias, mlp_bias), if the "
            f"model's class does, or fetch the checkpoint again."
        )
    return {name: of for name, of in tensors.items() if name not in biases}


def stack_parts(name: str, blocks: Sequence[Stored | Quantised]) -> list[Quantised] | None:
    """Quantised weights that a tensor of a model is read from; None if it is not stored quantised.

    Blocks of a stack get scales by rows, unless their rows are whole blocks of scales, and zeros if some have them.

    Raises:
        CheckpointError: some blocks are quantised and some are not, or in another way.
    """
    quantised = [block for block in blocks if isinstance(block, Quantised)]
    if not quantised:
        return None
    high = quantised[0].block[0]
    if len(blocks) > 1 and any(block.shape[0] % high for block in quantised):
        quantised = [block.by_rows() for block in quantised]
    if any(block.format.zeros for block in quantised):
        quantised = [block.with_zeros() for block in quantised]
    if len(quantised) < len(blocks) or len({block.format for block in quantised}) > 1:
        raise CheckpointError(
            f"the parts that are stacked as {name} are stored in several ways, expected one; quantise all or none of "
            f"them, and alike."
        )
    return quantised

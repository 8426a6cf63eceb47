"""Match the tensors of a checkpoint or a model object with those of a model; strict about what is missing.

As in transformers, names may have the base model's prefix too many or too few. Either of two tied weights is read for
both, and two that are tied and differ are kept apart. Stored buffers that a model computes are passed over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import FrozenInstanceError, replace
from typing import Any

import torch
from torch import Tensor, nn

from dgraph.errors import CheckpointError, warn
from dgraph.families.weights import Stored
from dgraph.models.layouts import Quantised

# The names in a checkpoint of the tensors that make each tensor of a model, given the model and the names there.
Layout = Callable[[nn.Module, Container[str]], Mapping[str, Sequence[str]]]

_PREFIX = "model"
"""The attribute of classes of transformers for the base model; the names of its own checkpoint leave it out."""
_COMPUTED = (r"(^|\.)rotary_emb\.", r"(^|\.)position_ids$")
"""Buffers of older classes, which are computed from the config now; transformers passes over them."""


def as_named(model: nn.Module, there: Container[str]) -> dict[str, list[str]]:
    """The `Layout` of a checkpoint that has the model's own names."""
    return {name: [name] for name in model.state_dict()}


class _Everything(Container[str]):
    def __contains__(self, name: object) -> bool:
        return True


def with_own_prefix(tensors: Mapping[str, Stored], model: nn.Module, layout: Layout) -> dict[str, Stored]:
    """Tensors by the names that a model asks for, where theirs have the base model's prefix too many or too few.

    Args:
        tensors: as they are stored.
        model: model that asks for them.
        layout: names that it asks for.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '') or _PREFIX}."
    kinds: tuple[Container[str], ...] = (), _Everything()  # experts apart, and stacked
    asked = {name.rpartition(".")[0] for there in kinds for names in layout(model, there).values() for name in names}

    def own(name: str) -> str:
        owner = name.rpartition(".")[0]
        if owner in asked:
            return name
        found = name.removeprefix(prefix) if owner.removeprefix(prefix) in asked else f"{prefix}{name}"
        return found if found.rpartition(".")[0] in asked and found not in tensors else name

    return {own(name): tensor for name, tensor in tensors.items()}


def match(
    model: Any, layout: Mapping[str, Sequence[str]], tensors: Mapping[str, Stored | Quantised], what: str, advice: str
) -> dict[str, list[str]]:
    """Find which of the tensors each one of a model consists of: its name -> theirs, for those that are there.

    Weights that the config ties and that are both there, with other numbers, are no longer tied afterwards: the model's
    config says so, and a warning.

    Args:
        model: with an attribute `config`. One of two weights that it ties may be missing. More are ignored by the
            patterns of its `_keys_to_ignore_on_load_unexpected`, if it has them.
        layout: its names -> the names of what each consists of; of a stack [items, rows, columns] the blocks of each
            item one after the other, all with the same number of rows.
        tensors: tensors that there are.
        what, advice: beginning and end of a message.

    Raises:
        CheckpointError: a name is missing or unexpected, or a tensor is not of the shape or kind expected.
    """
    ignored = re.compile("|".join((*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), *_COMPUTED)))
    found = {name: list(blocks) for name, blocks in layout.items() if all(block in tensors for block in blocks)}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, value in model.state_dict().items():
        blocks = layout[name]
        whole = (math.prod(value.shape[:-1]) // len(blocks), value.shape[-1]) if len(blocks) > 1 else value.shape
        shapes |= dict.fromkeys(blocks, tuple(whole))
    spared = {other for pair in _tied(model) if pair[0] in found or pair[1] in found for other in pair}
    spared |= {target for target, _ in _tied(model)}
    asked = {block for name, blocks in layout.items() if name in found or name not in spared for block in blocks}
    problems = {
        "missing": sorted(asked - set(tensors)),
        "unexpected": sorted(name for name in set(tensors) - set(shapes) if not ignored.search(name)),
        "wrong shape": [
            f"{name} is {tuple(tensors[name].shape)}, expected {shape}"
            for name, shape in shapes.items()
            if name in tensors and tensors[name].shape != shape
        ],
        "not floating-point": [
            f"{name} is {tensor.dtype}"
            for name, tensor in tensors.items()
            if name in shapes and not isinstance(tensor, Quantised) and not tensor.dtype.is_floating_point
        ],
    }
    for kind, which in problems.items():
        if which:
            more = f" and {len(which) - 3} more" if len(which) > 3 else ""
            raise CheckpointError(f"{what}: {kind}: {', '.join(which[:3])}{more}. {advice}")
    for target, source in _tied(model):
        if target in found and source in found and not _same(tensors, found[target], found[source]):
            _untie(model)
            warn(
                f"{what}: tie_word_embeddings says that {target} is {source}, but both are there and differ; each is "
                f"read for itself. Set it to false in config.json."
            )
    return found


def _tied(model: Any) -> list[tuple[str, str]]:
    """The parameters that a model's config ties: (target, source), as transformers orders them."""
    if not getattr(model.config, "tie_word_embeddings", False):
        return []
    return list((getattr(model, "_tied_weights_keys", None) or {}).items())


def _untie(model: Any) -> None:
    """Let a model's config say that its head has weights of its own."""
    try:
        model.config.tie_word_embeddings = False
    except FrozenInstanceError:
        model.config = replace(model.config, tie_word_embeddings=False)


def _same(tensors: Mapping[str, Stored | Quantised], one: Sequence[str], other: Sequence[str]) -> bool:
    """Compare the numbers of two weights, quantised ones as they are stored."""
    for first, second in zip((tensors[name] for name in one), (tensors[name] for name in other), strict=True):
        if first is second or (isinstance(first, Quantised) and isinstance(second, Quantised)):
            continue  # two that are stored quantised and tied were made of one
        if not (isinstance(first, Tensor) and isinstance(second, Tensor)) or first.dtype != second.dtype:
            return False
        if first.data_ptr() != second.data_ptr() and not torch.equal(first, second):
            return False
    return True

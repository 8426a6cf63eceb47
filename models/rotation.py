"""Rotations of queries and keys (RoPE) that a captured graph computes: their frequencies do not depend on the length of
a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from dgraph.errors import CheckpointError

COMPUTED = ("default", "linear", "llama3", "yarn", "proportional")
"""Kinds of transformers, each with one table of frequencies."""
_BY_LENGTH = {
    "dynamic": "Leave the key out if no prompt and answer together are longer than max_position_embeddings: until "
    "there it changes nothing.",
    "longrope": "Load a checkpoint with one of the kinds above.",
}
"""Kinds whose frequencies change with the length of a sequence, and advice for each."""


def check_rotation(config: Mapping[str, Any], source: str) -> None:
    """Refuse a config whose rotation is not computed.

    Args:
        config: in the keys of a native class, old (`rope_scaling`) or new (`rope_parameters`).
        source: source of the config, for messages.

    Raises:
        CheckpointError: an unknown kind, one that depends on the length of a sequence, or no object; the message names
            the key.
    """
    for key, rope in _sections(config):
        if not isinstance(rope, Mapping):
            raise CheckpointError(f"{source}: {key} is {rope!r}, expected an object of keys.")
        name = next((name for name in ("rope_type", "type") if rope.get(name) is not None), "rope_type")
        kind = rope.get(name, "default")
        if kind is None or kind in COMPUTED:
            _check_numbers(rope, f"{source}: {key}")
            continue
        message = f"{source}: {key}.{name} is {kind!r}, expected one of {', '.join(COMPUTED)}"
        if not isinstance(kind, str) or kind not in _BY_LENGTH:
            raise CheckpointError(f"{message}: dgraph computes no other rotation.")
        raise CheckpointError(
            f"{message}: the frequencies of {kind} depend on the length of a sequence, and a captured graph has one "
            f"table for all. {_BY_LENGTH[kind]}"
        )


def _sections(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The sections of a config about its rotation, of all layers or of each kind of layers, by key."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        if isinstance(rope, Mapping) and rope and all(isinstance(inner, Mapping) for inner in rope.values()):
            yield from ((f"{key}.{kind}", inner) for kind, inner in rope.items())
        elif rope is not None:
            yield key, rope


def _check_numbers(rope: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError for a key of a computed kind that is no number."""
    for name, value in rope.items():
        if name not in ("rope_type", "type") and not isinstance(value, int | float | None):
            raise CheckpointError(f"{where}.{name} is {value!r}, expected a number.")


def check_width(model: nn.Module, head_dim: int, source: str) -> None:
    """Raise `CheckpointError` for a model of a native class that rotates a part of each head alone: the class does not.

    Args:
        model: on any device.
        head_dim: dimensions of a head.
        source: source of its config, for messages.
    """
    for name, buffer in model.named_buffers():
        if name.endswith("rotary_emb.inv_freq") and 2 * len(buffer) != head_dim:
            raise CheckpointError(
                f"{source}: partial_rotary_factor asks for a rotation of {2 * len(buffer)} of {head_dim} dimensions of "
                f"a head, expected all: {type(model).__name__} rotates whole heads."
            )

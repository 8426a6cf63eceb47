"""The JSON objects of a checkpoint folder."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dgraph.errors import CheckpointError, DgraphError
from dgraph.families.hub import is_gguf
from dgraph.models.gguf_file import config_of

GENERATION = "generation_config.json"


def read_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object of a file.

    Args:
        path: path of the file.
        what: that it is an object with, for messages.

    Raises:
        CheckpointError: missing, not JSON in UTF-8 without a byte order mark, nested too deeply, no object, or with a
            number that is not finite; the message names the file, and the key of the number.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}.") from error
    except RecursionError:
        raise CheckpointError(f"{path} is nested too deeply for JSON with {what}; fetch it again.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected an object with {what}.")
    _check_numbers(value, path)
    return value


def _check_numbers(value: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError for a number that is not finite, by the path of its key."""
    left: list[tuple[str, Any]] = [("", value)]
    while left:
        name, found = left.pop()
        if isinstance(found, float) and not math.isfinite(found):
            raise CheckpointError(f"{path}: {name} is {found}, expected a finite number; fetch the file again.")
        if isinstance(found, dict):
            left += [(f"{name}.{key}" if name else key, inner) for key, inner in found.items()]
        elif isinstance(found, list):
            left += [(f"{name}[{i}]", inner) for i, inner in enumerate(found)]


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder, or what stands for it in a GGUF file.

    Raises:
        CheckpointError: see `read_object`.
    """
    if is_gguf(folder):
        return config_of(folder)
    return read_object(folder / "config.json", "the model's settings")


def source_of(folder: Path) -> str:
    """The file that `read_config` reads, for messages."""
    return str(folder if is_gguf(folder) else folder / "config.json")


@contextlib.contextmanager
def describing(source: str, kind: str) -> Iterator[None]:
    """Raise `CheckpointError` where the reader of a config meets a value of a type or size that it does not expect.

    Args:
        source: source of the config, for the message.
        kind: kind of model that the config should describe, for the message.
    """
    try:
        yield
    except DgraphError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{source} does not describe a {kind}: {reason}.") from error


def architectures_of(folder: Path) -> tuple[str, ...]:
    """The classes that config.json names; none where it is silent.

    Raises:
        CheckpointError: it is no list of names, or see `read_object`.
    """
    named = read_config(folder).get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise CheckpointError(f"{source_of(folder)}: architectures is {named!r}, expected a list of names of classes.")
    return tuple(named)

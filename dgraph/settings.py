"""Settings as values: a frozen dataclass whose fields a function also takes as keywords; what texts mean as such."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

from dgraph.errors import InputError, UnknownName

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}

DTYPES = ("float32", "bfloat16", "float16")
"""Those that weights can have, by name."""


def settings_of(kind: type[T], given: T | None, keywords: Mapping[str, Any]) -> T:
    """The value that a caller means: the one given, or one of the keywords.

    Raises:
        UnknownName: a keyword that is no field; the message has the closest matches.
        InputError: keywords beside a value, or something else in its place.
    """
    if given is None:
        known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
        for name in keywords:
            if name not in known:
                raise UnknownName(f"setting of {kind.__name__}", name, known)
        return kind(**keywords)
    if not isinstance(given, kind):
        raise InputError(f"expected a {kind.__name__}, got {given!r}; give settings by keyword, or as that value.")
    if keywords:
        raise InputError(
            f"{', '.join(keywords)} cannot be set beside a {kind.__name__}; set it there, with dataclasses.replace."
        )
    return given


def named(text: str) -> tuple[str, list[str]]:
    """NAME[:KEY=VALUE,...] as the name and its KEY=VALUE texts."""
    name, colon, options = text.partition(":")
    return name, options.split(",") if colon else []


def typed(what: str, key: str, text: str, kind: Any) -> Any:
    """A text as a bool, a number, a string or a tuple of these, with commas between them.

    Args:
        what, key: what has that value, for messages.
        text: of the value.
        kind: bool, int, float, or tuple[one of them, ...]; anything else is the text itself.

    Raises:
        InputError: a text that is no such value.
    """
    if get_origin(kind) is tuple:
        return tuple(typed(what, key, part, get_args(kind)[0]) for part in filter(None, text.split(",")))
    if kind is bool:
        if text.lower() not in _TRUTH:
            raise InputError(f"{what} {key} is true or false, got {text!r}.")
        return _TRUTH[text.lower()]
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            expected = "a whole number" if kind is int else "a number (inf allowed)"
            raise InputError(f"{what} {key} is {expected}, got {text!r}.") from None
    return text


def torch_dtype(name: str | None) -> torch.dtype | None:
    """A dtype by name; None stays None.

    Raises:
        UnknownName: not a dtype that weights can have.
    """
    import torch

    if name is None:
        return None
    if name not in DTYPES:
        raise UnknownName("dtype", name, DTYPES)
    return getattr(torch, name)


def torch_device(name: str | None) -> torch.device | None:
    """A device by name; None stays None.

    Raises:
        InputError: not a device, or one that is not there.
    """
    import torch

    if name is None:
        return None
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0].rstrip(". ")
        raise InputError(f"device {name!r} cannot be used: {reason}. `dgraph doctor` lists what is there.") from None
    if device.type == "meta":
        raise InputError("device 'meta' cannot be used: it holds shapes and no numbers. Choose cpu or cuda.")
    return device

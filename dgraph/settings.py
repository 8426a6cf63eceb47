"""Settings as values: a frozen dataclass whose fields a function also takes as keywords; settings read from texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar, get_args, get_origin

from dgraph.errors import InputError, UnknownName
from dgraph.errors.foreign import HINTS
from dgraph.errors.former import has_former_field

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}

DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes that weights can have, by name."""
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Shorter names of these."""
AUTO: Final = "auto"
"""In place of a dtype: the one in which a checkpoint stores its weights."""
DtypeLike: TypeAlias = "torch.dtype | str | None"
"""A dtype, its name, "auto", or None for the default of the device."""


def settings_of(kind: type[T], given: T | None, keywords: Mapping[str, Any]) -> T:
    """The value that a caller means: the one given, or one of the keywords.

    Raises:
        UnknownName: a keyword that is no field; the message has the closest matches.
        InputError: keywords beside a value, or something else in its place.
    """
    if given is None:
        known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
        for name in keywords:
            if name not in known and not has_former_field(kind, name):
                raise UnknownName(f"setting of {kind.__name__}", name, known, HINTS.get(name, ""))
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
        what, key: the thing and its key that have the value, for messages.
        text: of the value.
        kind: bool, int, float, tuple[one of them, ...], or a dataclass, as "signal=importance+after=2"; anything else
            is the text itself.

    Raises:
        InputError: a text that is no such value.
        UnknownName: a field that the dataclass does not have.
    """
    if isinstance(kind, type) and is_dataclass(kind):
        types, values = {f.name: type(f.default) for f in fields(kind)}, {}
        for name, _, value in (part.partition("=") for part in text.split("+")):
            if name not in types:
                raise UnknownName(f"field of {key}", name, types)
            values[name] = typed(f"{what} {key},", name, value, types[name])
        return kind(**values)
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


def torch_dtype(given: DtypeLike) -> torch.dtype | Literal["auto"] | None:
    """A dtype by name, one as it is, or "auto": as a checkpoint has its weights. None stays None.

    Raises:
        UnknownName: not a dtype that weights can have.
        InputError: neither a name nor a dtype.
    """
    import torch

    if given is None or isinstance(given, torch.dtype):
        return given
    if not isinstance(given, str):
        raise InputError(f"dtype must be a torch.dtype or one of {', '.join((*DTYPES, AUTO))}, got {given!r}.")
    if given == AUTO:
        return AUTO
    name = given.removeprefix("torch.")
    name = SHORT_DTYPES.get(name, name)
    if name not in DTYPES:
        raise UnknownName("dtype", given, (*DTYPES, *SHORT_DTYPES, AUTO))
    return getattr(torch, name)


def dtype_name(dtype: object) -> str:
    """A dtype without "torch." before its name."""
    return str(dtype).removeprefix("torch.")


def torch_device(given: str | torch.device | None) -> torch.device | None:
    """A device by name, or one as it is; None stays None.

    Raises:
        InputError: not a device, or one that is not there.
    """
    import torch

    if given is None:
        return None
    try:
        device = torch.device(given)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = str(error).partition("\n")[0].rstrip(". ")
        raise InputError(
            f"device {str(given)!r} cannot be used: {reason}. `dgraph doctor` lists what is there."
        ) from None
    if device.type == "meta":
        raise InputError("device 'meta' cannot be used: it holds shapes and no numbers. Choose cpu or cuda.")
    return device

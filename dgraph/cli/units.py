"""Sizes and times as text for people."""

from __future__ import annotations

import re
import time

from dgraph.errors import InputError

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(|K|M|G)(?:i?B)?")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size_text(size: float) -> str:
    """A number of bytes as text in B, KiB, MiB or GiB."""
    for unit, length in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= length:
            return f"{size / length:.1f} {unit}"
    return f"{size:.0f} B"


def ago(moment: float) -> str:
    """Text for the time since a moment, which is given in seconds since 1970."""
    seconds = max(time.time() - moment, 0)
    for limit, unit, length in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds / 86400:.0f} days ago"


def date(moment: float) -> str:
    """Date and local time of a moment, which is given in seconds since 1970."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def read_size(option: str, text: str | None) -> int | None:
    """Bytes from `24G`, `512M` or a number; None for None.

    Raises:
        InputError: none of these.
    """
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None or not (size := int(float(match[1]) * _UNITS[match[2]])):
        raise InputError(f"{option} takes a number of bytes of at least 1, as 24G, 512M or 1000000, got {text!r}.")
    return size

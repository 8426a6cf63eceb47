"""Sizes and times as text for people."""

from __future__ import annotations

import time


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

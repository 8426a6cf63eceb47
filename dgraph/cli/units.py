"""Sizes and times as a person reads them."""

from __future__ import annotations

import time


def size_text(size: float) -> str:
    """Bytes as a person reads them."""
    for unit, length in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= length:
            return f"{size / length:.1f} {unit}"
    return f"{size:.0f} B"


def ago(moment: float) -> str:
    """How long a moment, in seconds since 1970, is past."""
    seconds = max(time.time() - moment, 0)
    for limit, unit, length in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds / 86400:.0f} days ago"


def date(moment: float) -> str:
    """A moment, in seconds since 1970, in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))

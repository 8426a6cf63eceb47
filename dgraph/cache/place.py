"""Place of the artifact cache: its folder, its size limit, and the check that the folder is safe to run code from."""

from __future__ import annotations

import os
import re
import stat
import sys
from pathlib import Path

from dgraph.errors import CacheError, InputError

FOLDER_VARIABLE, SIZE_VARIABLE = "DGRAPH_CACHE", "DGRAPH_CACHE_SIZE"
LIMIT = 4 << 30
"""Default limit on the bytes of a store; beyond it, the least recently used artifacts go."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def default_folder() -> Path:
    """Default folder: `DGRAPH_CACHE`, or `dgraph` in the platform's folder for caches.

    Raises:
        CacheError: there is no home folder.
    """
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given)
    if given := os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"):
        return Path(given) / "dgraph"
    try:
        home = Path.home()
    except RuntimeError:
        raise CacheError(f"there is no home folder for the artifact cache; set {FOLDER_VARIABLE}.") from None
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "dgraph"


def limit_of_environment() -> int:
    """Limit in bytes: `DGRAPH_CACHE_SIZE`, or 4 GiB."""
    given = os.environ.get(SIZE_VARIABLE)
    return parse_size(given, SIZE_VARIABLE) if given else LIMIT


def parse_size(text: str, name: str) -> int:
    """Parse a size: bytes from a number with or without K, M, G or T.

    Raises:
        InputError: not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise InputError(f"{name} is a size such as 500M or 4G, got {text!r}.")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def check_owner(root: Path) -> None:
    """Refuse a folder into which another user could have put artifacts, since artifacts are code.

    Raises:
        CacheError: it belongs to another user, or others may write to it.
    """
    if not hasattr(os, "geteuid"):
        return
    found = root.stat()
    if found.st_uid != os.geteuid():
        reason, advice = f"belongs to user {found.st_uid}, not to user {os.geteuid()}", "use another folder"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        reason, advice = f"can be written by others (mode {stat.S_IMODE(found.st_mode):04o})", "chmod 700 it"
    else:
        return
    raise CacheError(f"the artifact cache {root} {reason}, and artifacts are code; {advice}, or set {FOLDER_VARIABLE}.")

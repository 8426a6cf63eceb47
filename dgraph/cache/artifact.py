"""The format of one entry of the artifact cache: a folder with a key, files, and a manifest that covers every byte.

    key.txt     everything that the artifact depends on (`dgraph.cache.key`); its SHA-256 is the folder's name
    manifest    format; SHA-256, size and name of every other file; SHA-256 of the lines above
    *           the files of the artifact

A folder is complete or it is damaged; there is nothing in between that could run.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FORMAT = "dgraph artifact 1"
"""First line of a manifest, and part of every key: raise the number when an older artifact must not be read."""

KEY, MANIFEST = "key.txt", "manifest"
NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_LINE = re.compile(rf"([0-9a-f]{{64}}) ([0-9]+) ({NAME.pattern})")


class Damaged(Exception):
    """Error of an entry that must not be used; the message says why."""


@dataclass(frozen=True)
class Artifact:
    """An entry whose every byte was checked.

    Attributes:
        folder: the folder of its files.
        key: the text of its key.
        files: content by name, without key and manifest.
    """

    folder: Path
    key: str
    files: Mapping[str, bytes]


def write(folder: Path, key: str, files: Mapping[str, bytes]) -> None:
    """Write an entry into an empty folder and wait until the disk has it.

    Raises:
        OSError: the disk is full, or not writeable.
    """
    contents = {KEY: key.encode(), **files}
    for name in files:
        if not NAME.fullmatch(name) or name in (KEY, MANIFEST):
            raise ValueError(f"a file of an artifact cannot be called {name!r}.")
    for name, content in {**contents, MANIFEST: _manifest(contents)}.items():
        with (folder / name).open("xb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
    sync(folder)


def read(folder: Path, digest: str) -> Artifact:
    """Read an entry and check every byte. If another entry takes its place meanwhile, that one is read.

    Args:
        folder: of the entry.
        digest: SHA-256 of the key that it must have.

    Raises:
        FileNotFoundError: there is no such entry.
        Damaged: it differs from its manifest, or is not for this key.
    """
    while True:
        before = folder.stat().st_ino
        try:
            return _read(folder, digest)
        except Damaged:
            if folder.stat().st_ino == before:
                raise


def _read(folder: Path, digest: str) -> Artifact:
    listed = _listed(folder)
    try:
        present = {p.name for p in folder.iterdir()} - {MANIFEST}
        contents = {name: (folder / name).read_bytes() for name in listed if name in present}
    except OSError as error:
        folder.stat()  # it may have been removed meanwhile
        raise Damaged(f"cannot be read ({error.strerror})") from None
    if present != set(listed):
        folder.stat()
        raise Damaged(f"lacks or has too many files: {', '.join(sorted(present ^ set(listed)))}")
    for name, content in contents.items():
        if (hashlib.sha256(content).hexdigest(), len(content)) != listed[name]:
            raise Damaged(f"{name} is not what was written")
    key = contents.pop(KEY, b"")
    if hashlib.sha256(key).hexdigest() != digest:
        raise Damaged("it was made for another key")
    return Artifact(folder, key.decode(), contents)


def sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _manifest(contents: Mapping[str, bytes]) -> bytes:
    lines = [FORMAT, *(f"{hashlib.sha256(c).hexdigest()} {len(c)} {name}" for name, c in sorted(contents.items()))]
    body = "".join(f"{line}\n" for line in lines).encode()
    return body + f"{hashlib.sha256(body).hexdigest()}\n".encode()


def _listed(folder: Path) -> dict[str, tuple[str, int]]:
    """Digest and size of each file by name, from a manifest that is intact."""
    owner = folder.stat().st_uid
    if hasattr(os, "geteuid") and owner != os.geteuid():
        raise Damaged(f"it belongs to user {owner}")
    try:
        text = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        folder.stat()
        raise Damaged("has no manifest") from None
    except OSError as error:
        raise Damaged(f"cannot be read ({error.strerror})") from None
    *lines, last = text.decode(errors="replace").splitlines() or [""]
    body = "".join(f"{line}\n" for line in lines).encode()
    if text != body + f"{last}\n".encode() or hashlib.sha256(body).hexdigest() != last:
        raise Damaged("its manifest is damaged")
    if lines[:1] != [FORMAT]:
        raise Damaged(f"its format is {lines[0]!r}, expected {FORMAT!r}" if lines else "its manifest is empty")
    listed = {}
    for line in lines[1:]:
        match = _LINE.fullmatch(line)
        if match is None:
            raise Damaged(f"its manifest has the line {line!r}")
        listed[match[3]] = (match[1], int(match[2]))
    return listed

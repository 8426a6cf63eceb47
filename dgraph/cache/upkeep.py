"""Upkeep of a store: list its entries, check that they are intact, and carry them to another machine."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dgraph.cache import artifact
from dgraph.cache.artifact import Damaged
from dgraph.cache.key import Key
from dgraph.cache.store import Store, size_of
from dgraph.errors import CacheError, UnknownName

_DIGEST = re.compile("[0-9a-f]{64}")
_OP = re.compile(r"^%\d+ = (\w+)\.(\w+)[.\w]*\(", re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """One entry as it lies in the store, unchecked.

    Attributes:
        digest: of its key, and its name.
        folder: the folder of its files.
        key: its key; without inputs if it cannot be read.
        size: bytes.
        created, used: seconds since 1970.
        damaged: True if it was set aside.
    """

    digest: str
    folder: Path
    key: Key
    size: int
    created: float
    used: float
    damaged: bool

    @property
    def what(self) -> str:
        """Short description of the content: the kind, with the identity, the op or the counted ops of the region."""
        if identity := self.key.inputs.get("identity"):
            return f"{self.key.inputs.get('kind', 'unknown')}: {identity.split()[0]}"
        if op := self.key.inputs.get("op"):
            return f"{self.key.inputs.get('kind', 'unknown')}: {op}"
        ops = Counter(m[2] for m in _OP.finditer(self.key.inputs.get("region", "")))
        parts = (f"{name} x{n}" if n > 1 else name for name, n in ops.most_common())
        return f"{self.key.inputs.get('kind', 'unknown')}: {', '.join(parts)}"


def entries(store: Store) -> list[Entry]:
    """Every entry, the most recently used first; entries that were set aside come last."""
    found = []
    for folder in store.entries.iterdir():
        digest, _, damaged = folder.name.partition(".")
        if not _DIGEST.fullmatch(digest):
            continue
        try:
            text = (folder / artifact.KEY).read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        try:
            used, size = folder.stat().st_mtime, size_of(folder)
            created = max((p.stat().st_mtime for p in folder.iterdir()), default=used)
        except OSError:  # another process removed it
            continue
        found.append(Entry(digest, folder, Key.of_text(text), size, created, used, bool(damaged)))
    return sorted(found, key=lambda e: (e.damaged, -e.used))


def total(store: Store) -> int:
    """Bytes of everything in a store, less the files that other processes remove meanwhile."""
    size = 0
    for folder, _, names in os.walk(store.root):
        for name in names:
            with suppress(OSError):
                size += os.stat(os.path.join(folder, name)).st_size
    return size


def entry(store: Store, prefix: str) -> Entry:
    """The usable entry whose digest begins with `prefix`.

    Raises:
        UnknownName: no entry begins so.
        CacheError: several entries begin so.
    """
    known = [e for e in entries(store) if not e.damaged]
    found = [e for e in known if e.digest.startswith(prefix.lower())] if prefix else []
    if not found:
        raise UnknownName("artifact", prefix, [e.digest[:12] for e in known])
    if len(found) > 1:
        names = ", ".join(e.digest[: len(prefix) + 4] for e in found)
        raise CacheError(f"{len(found)} artifacts begin with {prefix!r}: {names}; give more of the name.")
    return found[0]


def check(store: Store, found: Entry) -> str:
    """Check every byte of an entry; "" if it is intact, else the reason, and then a damaged entry is set aside."""
    try:
        artifact.read(found.folder, found.digest)
    except FileNotFoundError:
        return "another process removed it"
    except Damaged as error:
        store.set_aside(found.digest)
        return str(error)
    return ""


def export(chosen: Sequence[Entry], file: Path) -> None:
    """Write entries into one zip file. Each carries its own checksums.

    Raises:
        CacheError: an entry is damaged, or the file exists or cannot be written.
    """
    try:
        with zipfile.ZipFile(file, "x") as out:
            for found in chosen:
                intact = artifact.read(found.folder, found.digest)
                for name in (artifact.KEY, artifact.MANIFEST, *intact.files):
                    out.write(found.folder / name, f"{found.digest}/{name}")
    except FileExistsError:
        raise CacheError(f"{file} exists; give another name.") from None
    except (OSError, Damaged) as error:
        with suppress(OSError):
            file.unlink()
        reason = error.strerror if isinstance(error, OSError) else f"artifact {found.digest[:12]} is damaged: {error}"
        raise CacheError(f"{file} cannot be written: {reason}.") from None


def import_(store: Store, file: Path, trust: bool = False) -> tuple[list[str], list[str]]:
    """Take in the entries of a file that `export` wrote.

    Args:
        store: the destination.
        file: the file.
        trust: must be True, since artifacts contain code that dgraph will run.

    Returns:
        Digests of the entries that were taken in, and of those that were there already.

    Raises:
        CacheError: without trust, or the file is not an export, or an entry in it is damaged; entries before that
            one stay.
    """
    if not trust:
        raise CacheError(
            f"{file} contains compiled code that dgraph will run. Pass trust=True if you trust its source."
        )
    taken, present = [], []
    try:
        with zipfile.ZipFile(file) as opened:
            for digest, members in _grouped(opened.infolist()):
                if (store.entries / digest).exists():
                    present.append(digest)
                    continue
                _take(store, opened, digest, members)
                taken.append(digest)
    except (zipfile.BadZipFile, zlib.error, Damaged, RuntimeError, EOFError) as error:  # RuntimeError: encrypted
        raise CacheError(f"{file} is not an intact export: {error}.") from None
    except OSError as error:
        raise CacheError(f"{file} cannot be imported: {error.strerror or error}.") from None
    store.trim()
    return taken, present


def _grouped(members: Iterable[zipfile.ZipInfo]) -> list[tuple[str, list[zipfile.ZipInfo]]]:
    groups: dict[str, list[zipfile.ZipInfo]] = {}
    for member in members:
        digest, _, name = member.filename.partition("/")
        if not _DIGEST.fullmatch(digest) or not artifact.NAME.fullmatch(name):
            raise Damaged(f"it holds {member.filename!r}")
        groups.setdefault(digest, []).append(member)
    return list(groups.items())


def _take(store: Store, opened: zipfile.ZipFile, digest: str, members: list[zipfile.ZipInfo]) -> None:
    with store.making(digest):
        folder = Path(tempfile.mkdtemp(prefix=f"{digest}.", dir=store.temporary))
        try:
            for member in members:
                (folder / Path(member.filename).name).write_bytes(opened.read(member))
            artifact.read(folder, digest)
            store.adopt(folder, digest)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

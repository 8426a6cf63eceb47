"""The store of compiled artifacts: found by key, written once, and run only if every byte is as it was written.

    entries/<sha256 of the key>/                      one artifact (`dgraph.cache.artifact`)
    entries/<sha256 of the key>.damaged-<time>/       one that was set aside
    temporary/<sha256 of the key>.<random>/           one that is being written
    locks/<sha256 of the key>.lock                    held by the one process that makes it

An entry appears by one rename, so readers need no lock. Nothing that happens to the store stops a program: it warns
in one line and compiles instead.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from dgraph.cache import artifact
from dgraph.cache.artifact import Artifact, Damaged
from dgraph.cache.key import Key
from dgraph.cache.place import check_owner, default_folder, limit_of_environment
from dgraph.errors import CacheError, InputError, warn

LOCK_SECONDS = 600.0
"""Seconds to wait for another process that makes the same artifact, before making it as well."""


class Store:
    """Artifacts in one folder.

    Args:
        root: the folder; made with mode 0700 if it does not exist.
        limit: bytes that it may take; None for `DGRAPH_CACHE_SIZE`, or 4 GiB.

    Attributes:
        used: digests of the artifacts that were found or put through this object, in order.

    Raises:
        CacheError: the folder cannot be used, or another user could have put code into it.
        InputError: DGRAPH_CACHE_SIZE is not a size.
    """

    def __init__(self, root: str | Path, limit: int | None = None):
        self.root = Path(root).expanduser().absolute()
        self.limit = limit_of_environment() if limit is None else limit
        self.used: dict[str, None] = {}
        self._warned: set[str] = set()
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_owner(self.root)
            for folder in (self.entries, self.temporary, self.locks):
                folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise CacheError(f"the artifact cache {self.root} cannot be used: {error.strerror}.") from None

    @property
    def entries(self) -> Path:
        """Folder of the artifacts."""
        return self.root / "entries"

    @property
    def temporary(self) -> Path:
        """Folder of the artifacts that are being written."""
        return self.root / "temporary"

    @property
    def locks(self) -> Path:
        """Folder of the lock files."""
        return self.root / "locks"

    def find(self, key: Key) -> Artifact | None:
        """Find the artifact of a key and check every byte; None without one. A damaged artifact is set aside.

        Its files may be removed by another process at any time, but files that are mapped into memory stay readable.
        """
        folder = self.entries / key.digest
        try:
            found = artifact.read(folder, key.digest)
        except FileNotFoundError:
            return None
        except Damaged as error:
            self.reject(key.digest, str(error))
            return None
        except OSError as error:
            self.warn(f"the artifact cache {self.root} cannot be read ({error.strerror}); going on without it.")
            return None
        with suppress(OSError):  # a store that cannot be written serves all the same
            os.utime(folder)
        self.used[key.digest] = None
        return found

    def __contains__(self, key: Key) -> bool:
        if not (self.entries / key.digest).is_dir():
            return False
        self.used[key.digest] = None
        return True

    def put(self, key: Key, files: Mapping[str, bytes], replace: bool = False) -> bool:
        """Write an artifact, then remove the least recently used ones beyond the limit. Call it inside `making`.

        Args:
            key, files: the artifact.
            replace: take the place of one that is there (readers find none for a moment); else that one stays.

        Returns:
            True if it is there now. On a full disk it is not, after a warning.
        """
        try:
            folder = Path(tempfile.mkdtemp(prefix=f"{key.digest}.", dir=self.temporary))
            try:
                artifact.write(folder, key.text, files)
                if replace and key in self:
                    self.remove(self.entries / key.digest)
                self.adopt(folder, key.digest)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError as error:
            self.warn(f"the artifact cache {self.root} cannot be written ({error.strerror}); going on without it.")
            return False
        self.used[key.digest] = None
        with suppress(OSError):
            self.trim(keep=key.digest)
        return True

    def adopt(self, folder: Path, digest: str) -> None:
        """Make a complete folder the entry of a digest, unless there is one already.

        Raises:
            OSError: it cannot be renamed.
        """
        target = self.entries / digest
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():
                raise
        artifact.sync(self.entries)

    @contextmanager
    def making(self, digest: str, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold the lock of a digest while its artifact is made, so that only one process makes it.

        Calls `waiting` if another process holds the lock. Goes on without the lock where the file system has no locks,
        or after `LOCK_SECONDS`. An artifact that is made twice is only a waste.
        """
        from filelock import FileLock, Timeout

        lock = FileLock(self.locks / f"{digest}.lock", mode=0o600)
        try:
            try:
                lock.acquire(blocking=False)
            except Timeout:
                waiting()
                lock.acquire(timeout=LOCK_SECONDS)
        except (Timeout, OSError, NotImplementedError):
            yield
            return
        try:
            yield
        finally:
            lock.release()

    def reject(self, digest: str, reason: str) -> None:
        """Set an entry aside, and warn."""
        self.set_aside(digest)
        self.warn(f"artifact {digest[:12]} of the cache {self.root} is set aside and rebuilt: {reason}.")

    def set_aside(self, digest: str) -> None:
        """Rename an entry so that it is no longer found; remove older ones of its digest that were set aside."""
        folder = self.entries / digest
        for older in self.entries.glob(f"{digest}.damaged-*"):
            shutil.rmtree(older, ignore_errors=True)
        with suppress(OSError):
            folder.rename(folder.with_name(f"{digest}.damaged-{time.time_ns()}"))

    def remove(self, folder: Path) -> bool:
        """Remove an entry: hide it by one rename, then delete file by file. Returns True if it is out of sight."""
        try:
            hidden = Path(tempfile.mkdtemp(prefix="removed.", dir=self.temporary))
            folder.rename(hidden / "entry")
        except OSError:
            return not folder.exists()
        shutil.rmtree(hidden, ignore_errors=True)
        return True

    def trim(self, limit: int | None = None, keep: str = "", damaged: bool = False) -> list[str]:
        """Remove the leftovers of killed processes, then the least recently used entries until the rest fits.

        Args:
            limit: bytes; None for that of the store.
            keep: digest of an entry that stays.
            damaged: remove all entries that were set aside; else they are the first to go.

        Returns:
            Names of the removed folders.
        """
        removed = [p for p in _children(self.temporary) if not self._is_being_made(p.stem)]
        for folder in removed:
            shutil.rmtree(folder, ignore_errors=True)
        for lock in _children(self.locks):
            if not (self.entries / lock.stem).exists() and not self._is_being_made(lock.stem):
                lock.unlink(missing_ok=True)
        found = []
        for folder in _children(self.entries):
            with suppress(OSError):  # another process removes as well
                usable = "." not in folder.name
                found.append((usable, folder.stat().st_mtime, size_of(folder), folder))
        total = sum(size for _, _, size, _ in found)
        for usable, _, size, folder in sorted(found):
            too_much = total > (self.limit if limit is None else limit)
            if folder.name != keep and (too_much or (damaged and not usable)) and self.remove(folder):
                removed.append(folder)
                total -= size
        return [folder.name for folder in removed]

    def _is_being_made(self, digest: str) -> bool:
        from filelock import FileLock, Timeout

        path = self.locks / f"{digest}.lock"
        if not path.exists():
            return False
        lock = FileLock(path, mode=0o600)
        try:
            lock.acquire(blocking=False)
        except (Timeout, OSError, NotImplementedError):
            return True
        lock.release()
        return False

    def warn(self, message: str) -> None:
        """Warn, once for each message."""
        if message not in self._warned:
            self._warned.add(message)
            warn(message)


def open_store(artifacts: bool | str | Path | Store = True) -> Store | None:
    """Open the store that an option asks for.

    Args:
        artifacts: True for the user's own, False for none, or a folder.

    Returns:
        None without one. The user's own is left out with a warning where it cannot be used.

    Raises:
        CacheError: the folder that was given cannot be used.
        InputError: neither of these.
    """
    if isinstance(artifacts, Store) or artifacts is False:
        return artifacts or None
    if isinstance(artifacts, (str, Path)):
        return Store(artifacts)
    if artifacts is not True:
        raise InputError(f"artifacts must be True, False or a folder, got {artifacts!r}.")
    try:
        return Store(default_folder())
    except CacheError as error:
        warn(f"{error} Going on without it.")
        return None


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(p.stat().st_size for p in folder.iterdir())


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []

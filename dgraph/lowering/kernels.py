"""Kernels of our ops as Triton compiled them, stored for later processes.

Triton compiles a kernel when a launch first meets its constants and types. That takes a second or more, and Triton
keeps the kernel in a cache of its own. A store holds one entry per module of kernels and kind of device
(`dgraph.cache.key.kernel_keys`), with every specialisation that was ever launched there. One more entry has the
libraries that launch them, and that launch the kernels of compiled regions which Inductor does not launch by itself.
Before the first launch all of them are put into Triton's cache, where it finds them by its own hash.
"""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path, PurePath

from dgraph.cache.key import LAUNCHERS, Key, kernel_keys
from dgraph.cache.sources import modules_beside
from dgraph.cache.store import Store
from dgraph.ops import OPS
from dgraph.private.inductor import launched_by_triton, settle_kernels
from dgraph.private.triton import cache_folder, compilations, launcher_libraries, load_helpers, loaded_kernels, put

FILE = "kernels.zip"

_MEMBER = re.compile(r"([0-9a-f]{64})/(\w[\w.+-]*)")

_OWN = re.compile(r"dgraph\.ops\.(\w+\.)?triton\.")
"""Beginning of the names of dgraph's own modules of kernels; what follows differs."""

Files = Mapping[str, bytes]
"""Files from which Triton loads a kernel or a library: content by name."""


class Kernels:
    """The compiled kernels of this process, for the programs of one model.

    Args:
        target: the device target of compiled kernels (`dgraph.private.triton.target_of`); None where there are no
            kernels.
        store: where they are stored; None for nowhere.
        tell: called with the name of each stage of the work, for display.

    Attributes:
        restored: Triton's hashes of the kernels and libraries that were put into its cache, in order.
    """

    def __init__(self, target: str | None, store: Store | None, tell: Callable[[str], None] | None = None):
        self.restored: list[str] = []
        self._target, self._store = target, store if target is not None else None
        self._tell = tell or (lambda what: None)
        self._folder = ""
        self._seen: set[str] = set()
        modules = kernel_modules() if target is not None else []
        self._modules = {bundle_of(module): module for module in modules}
        self._compilations: list[str] = compilations(tuple(modules)) if modules else []
        self._before = len(self._compilations)

    @property
    def compiled(self) -> list[str]:
        """Kernels ("module.function") that Triton compiled in this process since the object was made, in order."""
        return [bundle_of(name) for name in self._compilations[self._before :]]

    @cached_property
    def _keys(self) -> Mapping[str, Key]:
        assert self._target is not None
        return kernel_keys(self._target, self._modules)

    @contextmanager
    def remembered(self) -> Iterator[None]:
        """Context that takes kernels from the store and stores those launched inside it, even if it is left early."""
        self.restore()
        try:
            yield
        finally:
            self.save()

    def prepare(self) -> None:
        """Take the launcher libraries from the store, now.

        Inductor needs them for its own kernels, and would move the cache.
        """
        if self._store is not None:
            settle_kernels()
            if self._put(self._store, [self._keys[LAUNCHERS]]):
                load_helpers()

    def restore(self) -> None:
        """Put the kernels of the store into Triton's cache, unless they are there.

        Does nothing while the folder of that cache stays the same.
        """
        if self._store is not None and self._folder != cache_folder():
            self._folder = cache_folder()
            self._tell("loading kernels")
            self._put(self._store, self._keys.values())

    def _put(self, store: Store, keys: Iterable[Key]) -> int:
        """Put entries into Triton's cache; the number of kernels and libraries that are there now."""
        count = 0
        try:
            for key in keys:
                for name, files in self._read(store, key).items():
                    self._seen.add(name)
                    if put(name, files):
                        self.restored.append(name)
                    count += 1
        except OSError as error:
            store.warn(
                f"Triton's cache {cache_folder()} cannot be written ({error.strerror}), so kernels of the artifact "
                f"cache are not loaded; set TRITON_CACHE_DIR to a folder that can."
            )
            return 0
        return count

    def save(self) -> int:
        """Store the kernels that this process compiled or loaded and the store has not.

        Returns:
            The number of kernels and libraries that were new to this object.
        """
        if self._store is None:
            return 0
        try:
            new = self._new()
        except (AttributeError, ImportError, TypeError, ValueError) as error:
            self._store.warn(f"this Triton holds compiled kernels in a way that dgraph does not know: {error}.")
            self._store = None
            return 0
        bundles: dict[str, dict[str, Files]] = {}
        for bundle, name, read in new:
            try:
                bundles.setdefault(bundle, {})[name] = read()
            except (OSError, KeyError, ValueError) as error:
                root = self._store.root
                self._store.warn(f"a kernel of {bundle} cannot be stored in the artifact cache {root}: {error}.")
        for bundle, files in bundles.items():
            self._extend(self._store, self._keys[bundle], files)
        return len(new)

    def _new(self) -> list[tuple[str, str, Callable[[], Files]]]:
        """Entry, hash and content of each kernel and library that was not looked at before."""
        there = loaded_kernels(self._modules.values())
        loaded = {name: kernel for name, kernel in there.items() if name not in self._seen}
        self._seen |= loaded.keys()
        mine = {name: kernel for name, kernel in loaded.items() if kernel.target == self._target}
        libraries = launcher_libraries([*(kernel.binary for kernel in mine.values()), *launched_by_triton()])
        libraries = {name: path for name, path in libraries.items() if name not in self._seen}
        self._seen |= libraries.keys()
        return [
            *((bundle_of(kernel.module), name, kernel.files) for name, kernel in mine.items()),
            *((LAUNCHERS, name, partial(_library, path)) for name, path in libraries.items()),
        ]

    def _extend(self, store: Store, key: Key, found: Mapping[str, Files]) -> None:
        with store.making(key.digest, lambda: self._tell("waiting for kernels")):
            known = self._read(store, key)
            if not found.keys() <= known.keys():
                store.put(key, {FILE: packed({**known, **found})}, replace=True)

    def _read(self, store: Store, key: Key) -> dict[str, dict[str, bytes]]:
        stored = store.find(key)
        if stored is None:
            return {}
        try:
            return unpacked(stored.files[FILE])
        except (KeyError, ValueError) as error:
            store.reject(key.digest, f"it does not load ({error})")
            return {}


def kernel_modules() -> list[str]:
    """The modules that the ops in the table have their kernels from, and those beside them, sorted."""
    named = {op.kernel.partition(":")[0] for op in OPS.values() if op.kernel is not None}
    return sorted({module for name in named for module in modules_beside(name)})


def bundle_of(module: str) -> str:
    """Name under which the kernels of a module lie together: short for a module of dgraph."""
    return _OWN.sub("", module, count=1) if _OWN.match(module) else module


def _library(path: Path) -> Files:
    return {path.name: path.read_bytes()}


def packed(kernels: Mapping[str, Files]) -> bytes:
    """Pack kernels by hash into one file, the same for the same kernels."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, files in sorted(kernels.items()):
            for file, content in sorted(files.items()):
                archive.writestr(zipfile.ZipInfo(f"{name}/{file}"), content, zipfile.ZIP_DEFLATED)
    return out.getvalue()


def unpacked(content: bytes) -> dict[str, dict[str, bytes]]:
    """The inverse of `packed`.

    Raises:
        ValueError: it is no archive, or one with a file whose name is not that of a kernel's file.
    """
    found: dict[str, dict[str, bytes]] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for member in archive.namelist():
                match = _MEMBER.fullmatch(member)
                if match is None:
                    raise ValueError(f"it holds {member!r}")
                found.setdefault(match[1], {})[match[2]] = archive.read(member)
    except (zipfile.BadZipFile, zlib.error, RuntimeError) as error:  # RuntimeError: encrypted
        raise ValueError(str(error)) from None
    return found


def names_of(content: bytes) -> dict[str, list[int]]:
    """Code sizes in bytes of each specialisation, by kernel, from a packed file."""
    found: dict[str, list[int]] = {}
    for files in unpacked(content).values():
        for file, code in files.items():
            if not file.endswith(".json"):
                found.setdefault(PurePath(file).stem.partition(".")[0], []).append(len(code))
    return found

"""The only file that uses private parts of Triton: which kernels a process has, and how its cache keeps them.

Triton publishes neither. Each use says on which versions it was checked. Triton is imported late, as its kernels are.
"""

from __future__ import annotations

import base64
import binascii
import ctypes
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import torch

__all__ = [
    "LoadedKernel",
    "cache_folder",
    "compilations",
    "launcher_libraries",
    "load_helpers",
    "loaded_kernels",
    "put",
    "target_of",
]

BINARY, METADATA = ".cubin", ".json"
"""Ends of the names of the files that Triton loads a kernel from. It writes its stages (PTX and above) for readers."""


@dataclass(frozen=True)
class LoadedKernel:
    """A specialisation of a kernel that this process has.

    Attributes:
        module: name of the module that defines the kernel.
        target: target of its compilation, as `target_of` gives it.
        binary: Triton's object.
    """

    module: str
    target: str
    binary: Any

    def files(self) -> dict[str, bytes]:
        """Files that Triton loads the kernel from, by name. The code is that of this process, not the disk's.

        Checked on 3.6 and 3.7.

        Raises:
            OSError: its file of metadata is gone.
            ValueError: that file is of another kernel.
        """
        names = self.binary.metadata_group
        metadata = next(name for name in names if name.endswith(METADATA))
        text = Path(names[metadata]).read_bytes()
        if json.loads(text)["hash"] != self.binary.hash:
            raise ValueError(f"{names[metadata]} is not of kernel {self.binary.name}")
        return {metadata: text, metadata.removesuffix(METADATA) + BINARY: self.binary.asm[BINARY[1:]]}


def target_of(device: torch.device) -> str | None:
    """Triton's target for a device, as "cuda 90"; None where kernels are not stored, or Triton is missing."""
    if device.type != "cuda" or torch.version.cuda is None or find_spec("triton") is None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda {10 * major + minor}"


def loaded_kernels(modules: Iterable[str]) -> dict[str, LoadedKernel]:
    """The kernels of these modules that this process has compiled or loaded, by Triton's hash.

    The hash covers source, constants, options, target, environment and Triton itself. Checked on 3.6 and 3.7.
    """
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    found = {}
    for name in modules:
        module = sys.modules.get(name)
        if module is None:
            continue
        for function in list(vars(module).values()):
            if not isinstance(function, JITFunction) or function.module != name:
                continue
            for kernels, *_ in list(function.device_caches.values()):
                for kernel in list(kernels.values()):
                    if isinstance(kernel, CompiledKernel):
                        target = kernel.metadata.target  # type: ignore[attr-defined]
                        found[kernel.hash] = LoadedKernel(name, f"{target.backend} {target.arch}", kernel)
    return found


def launcher_libraries(binaries: Iterable[Any]) -> dict[str, Path]:
    """The libraries that Triton built with a C compiler to launch these kernels, by their keys in its cache.

    3.6 builds one per signature, 3.7 one for all; both one with helpers. Checked on 3.6 and 3.7.
    """
    launched = [binary._run.launch for binary in binaries if hasattr(binary._run, "launch")]
    if not launched:
        return {}
    from triton.runtime import driver

    found = {}
    for function in (driver.active.utils.load_binary, *launched):
        # A launcher of tensor descriptors is a closure around the function of the library.
        cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        for file in (_library_of(f) for f in (function, *cells) if isinstance(f, BuiltinFunctionType)):
            key = _key_of_folder(file.parent.name)
            if key:
                found[key] = file
    return found


class _Place(ctypes.Structure):
    """Dl_info of the C library."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("at", ctypes.c_void_p),
    )


_ADDRESS = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyCFunction_GetFunction", ctypes.pythonapi))


def _library_of(function: BuiltinFunctionType) -> Path:
    """File of the library that a function in C is from, by the address of its code.

    Its module does not tell: all libraries that launch are modules of one name. When one is loaded a second time,
    Python fills the module of that name anew, though it was another library's.
    """
    place = _Place()
    ctypes.CDLL(None).dladdr(ctypes.c_void_p(_ADDRESS(function)), ctypes.byref(place))
    return Path(os.fsdecode(place.file or b""))


def load_helpers() -> None:
    """Load the library of helpers from Triton's cache as it lies now; the process needs no other.

    The driver of the GPU does so when it is first asked for something. Checked on 3.6 and 3.7.
    """
    from triton.runtime import driver

    driver.active.get_current_device()


def _key_of_folder(name: str) -> str | None:
    """The key whose folder in Triton's cache has that name: base 32 of its bytes, without padding."""
    try:
        return base64.b32decode(name + "=" * (-len(name) % 8)).hex()
    except binascii.Error:
        return None


def cache_folder() -> str:
    """Folder in which Triton looks for compiled kernels now. Inductor moves it when it first makes a kernel of its own.

    Checked on 3.6 and 3.7.
    """
    from triton import knobs

    return knobs.cache.dir


def put(key: str, files: Mapping[str, bytes]) -> bool:
    """Put the files that a kernel or library is loaded from into Triton's cache, unless it is there.

    Each file appears by one rename, and that which names the others comes last. Checked on 3.6 and 3.7.

    Args:
        key: Triton's hash, in hexadecimal.
        files: content by name.

    Returns:
        True if it was missing.

    Raises:
        OSError: the folder cannot be written.
    """
    from triton.runtime.cache import get_cache_manager

    manager = get_cache_manager(key)
    metadata = next((name for name in files if name.endswith(METADATA)), None)
    try:
        present = set(manager.get_group(metadata) or ()) if metadata else {n for n in files if manager.get_file(n)}
    except ValueError:  # a damaged list of files stops Triton 3.6
        present = set()
    if present >= set(files):
        return False
    paths = {name: manager.put(content, name) for name, content in files.items()}
    if metadata is not None:
        manager.put_group(metadata, paths)
    return True


@lru_cache
def compilations(modules: tuple[str, ...]) -> list[str]:
    """Names, "module.function", of the kernels of some modules that Triton compiles in this process from the first
    call on: the list grows.

    Triton tells one listener, so one that was there before is told as well. Checked on 3.6 and 3.7.
    """
    from triton import knobs

    found: list[str] = []
    before = knobs.compilation.listener

    def listener(**event: Any) -> None:
        if before is not None:
            before(**event)
        function = getattr(event["src"], "fn", None)
        module = str(getattr(function, "module", ""))
        if not event["cache_hit"] and module in modules:
            found.append(f"{module}.{event['src'].name}")

    knobs.compilation.listener = listener  # type: ignore[assignment]
    return found

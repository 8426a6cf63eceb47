"""The files of a checkpoint folder that hold its weights, chosen as transformers chooses them, and the tensors in them.

model.safetensors goes before an index with its shards, and either before the pickles of torch. Names that transformers
does not look for by itself come last: shards without an index, a variant (model.fp16.safetensors), any single file. All
else in a folder is left alone: consolidated.safetensors, adapters, other variants, an optimizer's state, folders below.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import CheckpointError
from dgraph.models.objects import read_object
from dgraph.models.packed import unpack

MODEL = "model"
INDEX = "model.safetensors.index.json"

_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
_POINTER = b"version https://git-lfs"
"""The beginning of a file that stands for one that Git LFS has not fetched."""


def weight_files(folder: Path, named: object = None, stem: str = MODEL) -> list[Path]:
    """The files that hold a folder's weights.

    Args:
        folder: folder of a checkpoint.
        named: the file, or the index of the files, that config.json names (`transformers_weights`).
        stem: beginning of the names of files.

    Raises:
        CheckpointError: there are none, several that none of the names above chooses from, or some of a set are
            missing.
    """
    if not isinstance(named, str | None):
        raise CheckpointError(f"{folder}: transformers_weights in config.json is {named!r}, expected a file's name.")
    whole, index = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
    for name in filter(None, (named, whole, index, *_PICKLES)):
        if _here(folder, name):
            return _of_index(folder, name) if name.endswith(".json") else [folder / name]
        if name == named:
            raise CheckpointError(f"{folder} lacks {name}, which transformers_weights in config.json names.")
        _check_link(folder / name)
    found = list(_unnamed(folder, stem))
    if len(found) == 1:
        return found[0]
    if found:
        several = ", ".join(files[0].name for files in found[:4])
        raise CheckpointError(
            f"{folder} has no {whole} and no {index}, but several others: {several}. Give the one to load that name, "
            f"by a link or a copy."
        )
    there = sorted(p.name for p in folder.iterdir())
    beside = f"; it has {', '.join(there[:6])}{' and more' if len(there) > 6 else ''}" if there else ""
    raise CheckpointError(f"{folder} has no *.safetensors file, as {whole}{beside}. Fetch the weights.")


def _here(folder: Path, name: str) -> bool:
    """Say if a folder has a file of that name, not in one below or above it."""
    return Path(name).name == name and (folder / name).is_file()


def _check_link(path: Path) -> None:
    """Raise CheckpointError for a link to a file that is gone, as caches of a hub leave them."""
    if path.is_symlink():
        raise CheckpointError(f"{path} is a link to {path.readlink()}, which is gone; fetch the checkpoint again.")


def _of_index(folder: Path, index: str) -> list[Path]:
    """The shards of an index, in the order of their names."""
    places = read_object(folder / index, "the shard of each tensor").get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{folder / index} has no weight_map from names to shards; fetch it again.")
    names = sorted(set(places.values()))
    if missing := [name for name in names if not _here(folder, name)]:
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing[:3])}, {len(missing)} of the {len(names)} shards that {index} names; "
            f"fetch the rest of the checkpoint."
        )
    return [folder / name for name in names]


def _unnamed(folder: Path, stem: str) -> Iterator[list[Path]]:
    """Sets of files that transformers would not find: shards without an index, indices of variants, others."""
    indexed: set[str] = set()
    for index in sorted(folder.glob("*.safetensors.index.*.json")):
        files = _of_index(folder, index.name)
        indexed |= {file.name for file in files}
        yield files
    others = [p for p in sorted(folder.glob("*.safetensors")) if p.is_file() and p.name not in indexed]
    shards = {p: found for p in others if (found := _SHARD.fullmatch(p.name))}
    sets = sorted({(found[1], found[3]) for found in shards.values()})
    for before, count in [each for each in sets if each[0] == stem] or sets:
        files = [p for p, found in shards.items() if (found[1], found[3]) == (before, count)]
        if len(files) != int(count):
            raise CheckpointError(
                f"{folder} has {len(files)} of the {int(count)} shards {before}-*-of-{count}.safetensors, and no index "
                f"of them; fetch the rest of the checkpoint."
            )
        yield files
    if not shards:
        yield from ([p] for p in others)


def read_files(files: Sequence[Path]) -> dict[str, Tensor]:
    """Every tensor of some files, by name.

    Packed ones (see `dgraph.models.packed`) are in memory, the others stay in their mapped file until they are read.

    Raises:
        CheckpointError: a damaged file, one that holds more than tensors, or a name that two files give different
            tensors.
    """
    tensors: dict[str, Tensor] = {}
    for file in files:
        loaded = _safetensors(file) if file.suffix == ".safetensors" else _pickled(file)
        twice = sorted(set(loaded) & set(tensors))
        if other := [name for name in twice if not _same(loaded[name], tensors[name])]:
            raise CheckpointError(
                f"{file} holds {other[0]} and {len(other) - 1} more that an earlier shard holds too, with other "
                f"numbers; fetch the checkpoint again."
            )
        tensors.update(loaded)
    return tensors


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return unpack(load_file(file))
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{file} is damaged or not a safetensors file: {_reason(file, error)}") from error


def _pickled(file: Path) -> dict[str, Tensor]:
    """The tensors of a file of `torch.save`; nothing else in it is read, so no code of it is run."""
    try:
        loaded: Any = torch.load(file, "cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (OSError, EOFError, LookupError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{file} is damaged, or holds what is no tensor, whose code dgraph does not run: {_reason(file, error)} "
            f"If you trust it, save its tensors by safetensors.torch.save_file, as model.safetensors."
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(t, Tensor) and type(n) is str for n, t in loaded.items()):
        raise CheckpointError(
            f"{file} holds more than tensors by name. Save these by safetensors.torch.save_file, as model.safetensors."
        )
    return loaded


def _reason(file: Path, error: Exception) -> str:
    """The sentence that a reader's error says of a file."""
    with contextlib.suppress(OSError), file.open("rb") as opened:
        if opened.read(len(_POINTER)) == _POINTER:
            return "it is a pointer of Git LFS; run `git lfs pull` in its folder."
    return f"{str(error).strip().partition(chr(10))[0] or type(error).__name__}."

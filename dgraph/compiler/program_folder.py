"""A compiled program as a folder, which another machine of the same kind opens without capture and compile.

    program.json     recipe, settings, facts, where the weights are, the machine that it runs on, checksums
    artifacts.zip    captured graph, compiled regions, kernels and tilings, as `dgraph cache export` writes them
    model/           the checkpoint, if the weights were asked for

CUDA graphs hold addresses, so no file has them: the folder has the sizes for which they are recorded again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dgraph.cache import upkeep
from dgraph.cache.key import Key, differences, program_key
from dgraph.cache.store import Store
from dgraph.compiler.compilation import Compilation, WarmUp
from dgraph.errors import CacheError, InputError, UnknownName
from dgraph.families import DIFFERENCE, Model, folder_of
from dgraph.families.loading import files_of
from dgraph.frontend.frozen import capture_or_load
from dgraph.passes import PASSES
from dgraph.passes.base import pass_from_json
from dgraph.passes.quantize_weights import QuantizeWeights
from dgraph.recipes import Recipe
from dgraph.runtime.decoding import Decoding
from dgraph.spec import ModelSpec
from dgraph.types.card import counted
from dgraph.types.texts import parse_json, read_text

KIND, VERSION = "dgraph program", 1
PROGRAM, ARTIFACTS, MODEL = "program.json", "artifacts.zip", "model"
WHOLE_BYTES = 256 << 20
"""A larger file is known by its size, its first and its last MiB, since hashing a large model would delay a start."""
_MIB = 1 << 20


@dataclass(frozen=True)
class Origin:
    """Record of how a program was made, as far as the program does not say it.

    Attributes:
        compilation: the settings, with the buckets that they led to.
        weights: the pass that stores weights in a format; None for weights as they are.
        store: of its artifacts; None without one.
        tokenizer: True if a tokenizer was given in place of the model's own.
    """

    compilation: Compilation
    weights: QuantizeWeights | None
    store: Store | None
    tokenizer: bool = False


@dataclass(frozen=True)
class SavedProgram:
    """Record of a written program.

    Attributes:
        folder: the folder that was written.
        artifacts: number of artifacts in it.
        size: bytes of all its files.
        weights: True if it has the weights.
    """

    folder: Path
    artifacts: int
    size: int
    weights: bool

    def __str__(self) -> str:
        kind = "with" if self.weights else "without"
        return f"{self.folder}: {counted(self.artifacts, 'artifact')}, {kind} weights, {self.size:,} bytes"


@dataclass(frozen=True)
class Opened:
    """A folder that was read and checked.

    Attributes:
        folder: the folder.
        source: model to load: its folder here, or what it was loaded from.
        spec: of the model.
        device: of the program.
        recipe, decoding, compilation, weights, tokenizer: as they were when it was saved.
    """

    folder: Path
    source: str
    spec: ModelSpec
    device: torch.device
    recipe: Recipe
    decoding: Decoding
    compilation: Compilation
    weights: QuantizeWeights | None
    tokenizer: bool


def is_program(path: str | Path) -> bool:
    """True for the folder of a saved program."""
    return (Path(path) / PROGRAM).is_file()


def write_program(
    folder: str | Path,
    model: Model,
    device: torch.device,
    recipe: Recipe,
    decoding: Decoding,
    origin: Origin,
    weights: bool = False,
) -> SavedProgram:
    """Write a program; see `CompiledModel.save`.

    Args:
        folder: to write, which does not exist.
        model, device, recipe, decoding, origin: of the program.
        weights: put the checkpoint in.

    Raises:
        InputError: the folder exists or cannot be written, or the model cannot be loaded again.
        CacheError: artifacts of the program are in no store.
    """
    out = Path(folder)
    if out.exists():
        raise InputError(f"{out} exists already; give a folder that does not, or remove it.")
    if not model.source:
        raise InputError(
            f"{model.name} was given as an object, or had an adapter added, so nothing says where its weights are "
            f"loaded from; save a program of a checkpoint folder (save_pretrained writes one)."
        )
    if origin.store is None:
        raise InputError("the program has no artifacts to save; compile it with artifacts=True, or with a folder.")
    checkpoint = folder_of(model.source)
    if weights and (checkpoint / DIFFERENCE).is_file():
        raise InputError(f"{model.source} is stored as a difference from its base; save it without weights.")
    chosen = _artifacts(model, origin.store)
    try:
        with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=f".{out.name}.") as temporary:
            made = Path(temporary) / "program"
            made.mkdir()
            upkeep.export(chosen, made / ARTIFACTS)
            if weights:
                _copy(checkpoint, made / MODEL)
            said = {
                KIND: VERSION,
                "machine": dict(program_key(device, origin.compilation.backend == "inductor").inputs),
                "source": model.source,
                "files": _fingerprints(checkpoint),
                "artifacts": _fingerprint(made / ARTIFACTS),
                "spec": model.spec.to_json(),
                "device": str(device),
                "recipe": recipe.to_json(),
                "decoding": decoding.to_json(),
                "compilation": _compilation_data(origin.compilation),
                "weights": None if origin.weights is None else origin.weights.to_json(),
                "tokenizer": origin.tokenizer,
            }
            text = json.dumps({**said, "sha256": _digest(said)}, indent=2)
            (made / PROGRAM).write_text(text + "\n", encoding="utf-8")
            made.rename(out)
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error.strerror or error}.") from None
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    return SavedProgram(out, len(chosen), size, weights)


def _artifacts(model: Model, store: Store) -> list[upkeep.Entry]:
    """Artifacts of a program: those that its store gave or took, its captured graph among them."""
    # A second program of a model shares the graph in this process, and need not have asked the store for it.
    capture_or_load(model.module, model.spec, model.prefix, store)
    there = {entry.digest: entry for entry in upkeep.entries(store) if not entry.damaged}
    gone = [digest for digest in store.used if digest not in there]
    if gone:
        raise CacheError(
            f"{counted(len(gone), 'artifact')} of the program left the artifact cache {store.root} meanwhile, which "
            f"keeps {store.limit:,} bytes; raise DGRAPH_CACHE_SIZE, and compile it again."
        )
    chosen = [there[digest] for digest in store.used]
    if not any(entry.key.inputs.get("kind") == "graph" for entry in chosen):
        raise CacheError(f"the graph of {model.name} cannot be stored, so its program cannot be saved.")
    return chosen


def read_program(folder: str | Path, model: str | Path | None = None) -> Opened:
    """Read and check a program, of which nothing is run.

    Args:
        folder: that `write_program` wrote.
        model: where the checkpoint is on this machine; None for the folder's own, or where it was.

    Raises:
        InputError: no such folder.
        CacheError: it is damaged, or was made for another machine, dgraph or checkpoint.
        CheckpointError, UnknownName: the checkpoint is not there.
    """
    where = Path(folder)
    if not is_program(where):
        raise InputError(
            f"{where} is no saved program: it has no {PROGRAM}. `dgraph compile MODEL --to FOLDER` makes one."
        )
    said = _read(where / PROGRAM)
    try:
        device = torch.device(said["device"])
        _check_machine(where, Key(said["machine"]), device, said["compilation"]["backend"] == "inductor")
        _check_file(where / ARTIFACTS, said["artifacts"])
        inside = where / MODEL
        source = str(model) if model is not None else str(inside.absolute()) if inside.is_dir() else said["source"]
        checkpoint = folder_of(source)
        below = checkpoint.parent if checkpoint.is_file() else checkpoint
        for name, fingerprint in said["files"].items():
            _check_file(below / name, fingerprint)
        return Opened(
            where,
            source,
            ModelSpec.from_json(said["spec"]),
            device,
            Recipe.from_json(said["recipe"]),
            Decoding.from_json(said["decoding"]),
            _compilation_of(said["compilation"]),
            None if said["weights"] is None else _quantising_of(said["weights"]),
            said["tokenizer"],
        )
    except UnknownName:  # a KeyError, too
        raise
    except KeyError as error:
        raise CacheError(f"{where / PROGRAM} is damaged: it has no entry {error}.") from None


def _read(file: Path) -> dict[str, Any]:
    try:
        said = parse_json(read_text(file, str(file)))
    except InputError as error:
        raise CacheError(f"{file} is damaged: {error}") from None
    if not isinstance(said, dict) or said.get(KIND) != VERSION:
        found = said.get(KIND) if isinstance(said, dict) else None
        raise CacheError(f"{file} is of version {found!r}, and this dgraph opens version {VERSION}; compile it anew.")
    digest = said.pop("sha256", None)
    if digest != _digest(said):
        raise CacheError(f"{file} is damaged: its checksum is another; compile it anew.")
    return said


def _check_machine(folder: Path, machine: Key, device: torch.device, compiled: bool) -> None:
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CacheError(f"{folder} was made for {machine.inputs.get('device name', 'a GPU')}, and here is no GPU.")
    found = differences(machine, program_key(device, compiled))
    if found:
        lines = "; ".join(f"{d.name}: {d.before or 'none'}, here {d.after or 'none'}" for d in found)
        raise CacheError(f"{folder} was made for another machine or dgraph ({lines}); compile it here.")


def _check_file(file: Path, fingerprint: str) -> None:
    try:
        same = _fingerprint(file) == fingerprint
    except OSError as error:
        raise CacheError(f"{file}, which this program needs, cannot be read: {error.strerror}.") from None
    if not same:
        raise CacheError(f"{file} is not the file that the program was saved with: it is damaged, or another model's.")


def _digest(said: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _fingerprints(checkpoint: Path) -> dict[str, str]:
    """Fingerprints of the files of a checkpoint that models are read from, by name."""
    return {name: _fingerprint(file) for name, file in sorted(files_of(checkpoint).items())}


def _fingerprint(file: Path) -> str:
    """Size and SHA-256 of a file, of which a large one gives its ends alone."""
    size = file.stat().st_size
    with file.open("rb") as content:
        if size <= WHOLE_BYTES:
            digest = hashlib.file_digest(content, "sha256")
        else:
            digest = hashlib.sha256(content.read(_MIB))
            content.seek(-_MIB, 2)
            digest.update(content.read())
    return f"{size} {digest.hexdigest()}"


def _copy(checkpoint: Path, to: Path) -> None:
    for name, file in files_of(checkpoint).items():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, to / name)


def _compilation_data(compilation: Compilation) -> dict[str, Any]:
    first = compilation.warmup
    warmup = None
    if first is not None:
        warmup = {"batch": first.batch, "tokens": first.tokens, "decoding": first.decoding.to_json()}
    said = {name: getattr(compilation, name) for name in ("backend", "buckets", "graphs", "tune")}
    return {**said, "warmup": warmup}


def _compilation_of(said: Mapping[str, Any]) -> Compilation:
    first = said["warmup"]
    warmup = None
    if first is not None:
        warmup = WarmUp(**{**first, "decoding": Decoding.from_json(first["decoding"])})
    return Compilation(**{**said, "warmup": warmup})


def _quantising_of(said: Mapping[str, Any]) -> QuantizeWeights:
    found = pass_from_json(said, PASSES)
    assert isinstance(found, QuantizeWeights), "the only pass that is saved"
    return found

"""Loading of models: by a name, a folder or an object, with an adapter that they draft by or have added."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dgraph.errors import CaptureError, CheckpointError, InputError, UnknownName, warn
from dgraph.families.adapters import merged
from dgraph.families.architectures import unsupported
from dgraph.families.family import GROUP, Model, Tokenizer, embedded, families
from dgraph.families.hub import CONFIG, DESCRIBING, GGUF, folder_of_id, is_gguf, is_id, name_of_id, needed
from dgraph.families.pipelines import INDEX, PARTS, pipeline_of
from dgraph.families.room import check_room
from dgraph.families.weights import read_all, weights_of
from dgraph.plans.calibration import FILE, apply_calibration
from dgraph.settings import AUTO, DtypeLike, dtype_name, torch_device, torch_dtype
from dgraph.spec import FACTS

_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_LATER_SHARD = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


def resolve(
    model: Any,
    dtype: DtypeLike = None,
    device: str | torch.device | None = None,
    *,
    opened: bool = False,
    low_rank: str | Path | None = None,
    **facts: Any,
) -> Model:
    """Return the `Model` that a name, a folder or an object stands for.

    Args:
        model: the name of an embedded model, a checkpoint folder or an id of a checkpoint (see `dgraph.families.hub`).
            Or a model object of a known family, or a `Model`.
        dtype: of the loaded weights, as a torch.dtype or by name ("float32", "bfloat16", "float16"; "bf16" and the
            like). "auto" is the checkpoint's own. None is float32 on a CPU, and the checkpoint's own on a GPU. An
            object keeps its dtype, so another one is refused for it.
        device: where to load; None for "cpu". An object stays where it is, so another one is refused for it.
        opened: leave the weights of a name or folder where they are stored; see `Family.open`.
        low_rank: the folder of a low-rank adapter, in the checkpoint's folder or anywhere. A model that verifies its
            drafts (encoding="causal") drafts by it, as by the fact `adapter`. Any other has it added to its weights.
        facts: fields of the spec (`dgraph.spec.FACTS`) that hold instead of what the model says.

    Raises:
        UnknownName: a name that is neither an embedded model nor a folder, or a fact that no caller can give.
        InputError: a fact that is missing or out of range, or a device that is not there. A dtype or device that an
            object does not have. A `Model` whose weights were not read, unless `opened`.
        CheckpointError: a folder that no family loads, or that is damaged.
        CaptureError: an object that no family adopts.
    """
    for name in facts:
        if name not in FACTS:
            raise UnknownName("fact", name, FACTS)
    if isinstance(model, Model):
        if model.weights is not None and not model.weights.all_quantised and not opened:
            raise InputError(
                f"the weights of {model.name} were left where they are stored (opened=True). They are read where a "
                f"model is divided over ranks or its weights are quantised: give mesh or weights to dgraph.optimize, "
                f"or load it without."
            )
        found = replace(model, spec=replace(model.spec, **facts)) if facts else model
        found = _with_low_rank(found, low_rank)
        return _as_it_is(_adapted(found) if low_rank or "adapter" in facts else found, dtype, device)
    if isinstance(model, (str, Path)):
        return load(model, dtype, device, opened=opened, low_rank=low_rank, **facts)
    for family in families().values():
        adopted = family.adopt(model, **facts)
        if adopted is not None:
            return _as_it_is(_adapted(_with_low_rank(adopted, low_rank)), dtype, device)
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    raise CaptureError(
        f"no family adopts {kind}; known: {', '.join(families())}. Wrap a module with forward(input_ids, position_ids) "
        f"-> logits in dgraph.Model(name, module, spec), or register a family in the entry-point group {GROUP!r}."
    )


def load(
    name: str | Path,
    dtype: DtypeLike = None,
    device: str | torch.device | None = None,
    *,
    opened: bool = False,
    low_rank: str | Path | None = None,
    **facts: Any,
) -> Model:
    """Load an embedded model by name or a checkpoint folder by path; see `resolve`.

    Warns of a calibration in the folder that cannot be used, and goes on without.
    """
    chosen, target = torch_dtype(dtype), torch_device(device) or torch.device("cpu")
    folder = folder_of(name)
    if isinstance(chosen, torch.dtype) and not chosen.is_floating_point:
        raise CheckpointError(f"cannot load {name} as {chosen}; weights must be float32, bfloat16 or float16.")
    if chosen is None and target.type == "cpu":
        chosen = torch.float32
    pipeline = pipeline_of(folder)
    place = folder if pipeline is None else pipeline.model
    if pipeline is not None and pipeline.block_length is not None:
        facts = {"block_length": pipeline.block_length, **facts}
    for family in families().values():
        found = family.open(place, None if chosen == AUTO else chosen, target, **facts)
        if found is None:
            continue
        found = replace(found, stored_dtype=_stored_dtype(found), source=_source(name, folder))
        if pipeline is not None:
            found = replace(found, name=folder.name, spec=replace(found.spec, rule=pipeline.rule))
        found = _with_low_rank(found, low_rank, folder)
        if found.weights is not None and not opened:
            hollow = weights_of(found.module, found.prefix)
            check_room(found.name, hollow, found.weights, target)
            read_all(hollow, found.weights)
            found = replace(found, weights=found.weights.quantised())
        if isinstance(name, str) and is_id(name):
            found = replace(found, name=name_of_id(name))  # the folder's is that of a revision
        found = _adapted(found, folder)
        return found if "layer_importance" in facts else _calibrated(found, folder)
    raise CheckpointError(f"no family loads {folder}: {unsupported(place / CONFIG, families().values())}")


def _source(name: str | Path, folder: Path) -> str:
    """A name that means the same everywhere, or else the folder."""
    here = isinstance(name, Path) or not (is_id(name) or name in embedded())
    return str(folder) if here else str(name)


def tokenizer_of(given: Any) -> Tokenizer:
    """Return a tokenizer for a folder or an object.

    Args:
        given: a folder with tokenizer files, an object that a family reads (a tokenizer of transformers), or a
            `Tokenizer`.

    Raises:
        CheckpointError: a folder without a tokenizer, or a damaged one.
        InputError: an object of another kind.
    """
    source = Path(os.path.abspath(given)) if isinstance(given, (str, Path)) else given
    for family in families().values():
        read = getattr(family, "read_tokenizer", None)
        found = None if read is None else read(source)
        if found is not None:
            return found
    if isinstance(source, Path):
        raise CheckpointError(
            f"tokenizer={str(given)!r} is no folder with a tokenizer; give one with tokenizer.json, or the object."
        )
    methods = (getattr(given, name, None) for name in ("encode", "decode"))
    if isinstance(given, type) or not all(map(callable, methods)):
        raise InputError(
            f"tokenizer is a folder, a tokenizer of transformers, or an object with encode(text) -> ids and "
            f"decode(ids) -> text, got {given!r}."
        )
    return given


def _stored_dtype(model: Model) -> torch.dtype | None:
    """The dtype in which a checkpoint stores the weights that are not quantised, as its largest one has it."""
    found = () if model.weights is None else model.weights.stored()
    plain = [tensor for _, _, tensor in found if tensor.dim() > 1]
    return max(plain, key=torch.Tensor.numel).dtype if plain else None


def _as_it_is(model: Model, dtype: DtypeLike, device: str | torch.device | None) -> Model:
    """A model that was made elsewhere.

    Raises:
        InputError: another dtype or device was asked for than it has.
    """
    wanted, where = torch_dtype(dtype), torch_device(device)
    if wanted not in (None, AUTO, model.spec.dtype):
        name = dtype_name(wanted)
        raise InputError(
            f"{model.name} is an object with weights in {dtype_name(model.spec.dtype)}, got dtype={name!r}, which is "
            f"for names and folders; leave it out, or give the module after module.to(torch.{name})."
        )
    weight = next(model.module.parameters(), None)
    if where is not None and weight is not None and _place(where) != _place(weight.device):
        raise InputError(
            f"{model.name} is an object on {weight.device}, got device={str(where)!r}, which is for names and folders; "
            f"leave it out, or give the module after module.to({str(where)!r})."
        )
    return model


def _place(device: torch.device) -> tuple[str, int]:
    return device.type, device.index or 0


def folder_of(name: str | Path) -> Path:
    """The folder of an embedded model or a checkpoint, or its GGUF file, read no further than that it may be one.

    Raises:
        UnknownName, CheckpointError: no such model, or no such folder; an id of a checkpoint that is not in the cache,
            see `dgraph.families.hub`.
    """
    if isinstance(name, str) and is_id(name):
        return folder_of_id(name)
    folder = embedded()[str(name)].folder if str(name) in embedded() else Path(os.path.abspath(name))
    if is_gguf(folder):
        return folder
    if not folder.is_dir():
        if "/" in str(name) or folder.exists():
            raise CheckpointError(
                f"{name} is not a checkpoint folder. Give a folder with config.json, a GGUF file, or one of: "
                f"{', '.join(embedded())}."
            )
        raise UnknownName("model", str(name), embedded())
    if files := _gguf_alone(folder):
        if len(files) > 1:
            raise CheckpointError(
                f"{folder} has several GGUF files: {', '.join(p.name for p in files[:6])}. Give the path of one."
            )
        return files[0]
    if not any((folder / name).is_file() for name in (CONFIG, INDEX)):
        below = f" Give one of the revisions in {folder / 'snapshots'}." if (folder / "snapshots").is_dir() else ""
        raise CheckpointError(
            f"{folder} has no config.json; a checkpoint folder holds config.json, *.safetensors and a tokenizer.{below}"
        )
    return folder


def files_of(checkpoint: Path) -> dict[str, Path]:
    """The files that a model is loaded from, by their paths below the folder: of a `folder_of`, folder or GGUF file."""
    if checkpoint.is_file():
        beside = {file.name: file for pattern in DESCRIBING for file in sorted(checkpoint.parent.glob(pattern))}
        part = _SHARD.search(checkpoint.name)
        of_one = f"{checkpoint.name[: part.start()]}-*-of-{part[1]}{GGUF}" if part else checkpoint.name
        return beside | {file.name: file for file in sorted(checkpoint.parent.glob(of_one))}
    below = PARTS if (checkpoint / INDEX).is_file() else ()
    found: dict[str, Path] = {}
    for root in (checkpoint, *(checkpoint / name for name in below)):
        there = [file for file in root.rglob("*") if file.is_file()]
        names = needed(file.relative_to(root).as_posix() for file in there)
        chosen = [*(root / name for name in names), *root.glob("*.bin*")]
        found |= {file.relative_to(checkpoint).as_posix(): file for file in chosen}
    return found


def _gguf_alone(folder: Path) -> list[Path]:
    """The GGUF files of a folder without other weights; of shards the first."""
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
        return []
    return [p for p in sorted(folder.glob(f"*{GGUF}")) if not _LATER_SHARD.search(p.name)]


def _adapted(model: Model, folder: Path | None = None) -> Model:
    """The model with the adapter that its spec names, in that folder or anywhere.

    Raises:
        CheckpointError: no family of the model that reads adapters, or what that raises.
    """
    name = model.spec.adapter
    if not name:
        return replace(model, adapter=None)
    read = getattr(families().get(model.spec.family), "read_adapter", None)
    if read is None:
        raise CheckpointError(f"adapter={name!r}: the family {model.spec.family} reads no adapters; leave it out.")
    return replace(model, adapter=read(model, _inside(name, folder)))


def _inside(name: str | Path, folder: Path | None) -> Path:
    """The folder of an adapter, in the folder of a checkpoint or anywhere."""
    inside = None if folder is None else folder / name
    return inside if inside is not None and inside.is_dir() else Path(name)


def _with_low_rank(model: Model, name: str | Path | None, folder: Path | None = None) -> Model:
    """The model with a low-rank adapter: drafts are to read it (see `_adapted`), or it is added to the weights.

    Raises:
        CheckpointError: weights that are stored quantised, to which nothing can be added, or what reading it raises.
    """
    if not name:
        return model
    if model.spec.encoding == "causal":
        return replace(model, spec=replace(model.spec, adapter=str(name)))
    if model.weights is not None and model.weights.formats:
        raise CheckpointError(
            f"{model.name} stores {len(model.weights.formats)} weights quantised, to which adapter={str(name)!r} "
            f"cannot be added. Load the checkpoint that it was made from, and give weights= to quantise the sum."
        )
    known = families()
    read = next(filter(None, (getattr(family, "read_products", None) for family in known.values())))
    own = getattr(known.get(model.spec.family), "stored", str)
    place = _inside(name, folder)
    module, weights = merged(model.module, model.prefix, model.weights, own, lambda there: read(place, there))
    return replace(model, module=module, weights=weights, source="")  # from which the sum cannot be read again


def _calibrated(model: Model, folder: Path) -> Model:
    """The model with the importance of its layers, if that was measured."""
    path = folder / FILE
    if not path.is_file():
        return model
    try:
        return replace(model, spec=apply_calibration(path, model.spec))
    except CheckpointError as error:
        warn(f"{error} Until then no layer counts as more important than another.")
        return model

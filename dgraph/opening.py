"""Open a program that was saved: its artifacts go into the cache, where `optimize` finds all that it would make."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dgraph.api import load, optimize
from dgraph.cache.store import open_store
from dgraph.cache.upkeep import import_
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.compiler.program_folder import ARTIFACTS, read_program
from dgraph.errors import CacheError, InputError, warn
from dgraph.spec import FACTS
from dgraph.types.card import counted


def open(
    folder: str | Path,
    *,
    trust: bool = False,
    model: str | Path | None = None,
    tokenizer: Any = None,
    artifacts: bool | str | Path = True,
    progress: Callable[[str], None] | None = None,
) -> CompiledModel:
    """Open a program that `CompiledModel.save` wrote, without capture and compile.

        program = dgraph.open("program", trust=True)

    CUDA graphs are recorded again, ahead if the program was compiled with a warm-up.

    Args:
        folder: the folder.
        trust: must be True, since a program contains compiled code.
        model: where the checkpoint is on this machine; None: in the folder, or where it was.
        tokenizer: as for `optimize`; a program that was given one when it was made needs one.
        artifacts: store that takes in what the folder has: True for the user's artifact cache, or a folder.
        progress: called with what is being done, for display.

    Raises:
        InputError: no saved program, or a tokenizer is missing.
        CacheError: no trust, no store, a damaged folder, or one of another machine, dgraph or checkpoint; the message
            says what differs.
        CheckpointError, UnknownName: the checkpoint is not there.
    """
    tell = progress or (lambda what: None)
    tell("checking")
    found = read_program(folder, model)
    if found.tokenizer and tokenizer is None:
        raise InputError(f"{folder} was made with a tokenizer that is not the model's own; give tokenizer=.")
    store = open_store(artifacts)
    if store is None:
        raise CacheError(
            f"{folder} needs an artifact cache that takes in its compiled code; give artifacts=FOLDER, or leave "
            f"--no-cache out."
        )
    shipped = [*itertools.chain.from_iterable(import_(store, found.folder / ARTIFACTS, trust))]
    facts = {name: getattr(found.spec, name) for name in FACTS}
    loaded = load(found.source, found.spec.dtype, found.device, found.weights is not None, **facts)
    made = optimize(
        loaded,
        found.recipe,
        replace(found.compilation, artifacts=store.root),
        tokenizer=tokenizer,
        weights=found.weights,
        progress=progress,
    )
    made.decoding = found.decoding
    used = made.origin.store.used if made.origin is not None and made.origin.store is not None else {}
    if new := used.keys() - set(shipped):
        warn(f"{counted(len(new), 'artifact')} of {folder} had to be made here; save the program anew.")
    return made

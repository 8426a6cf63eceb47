"""Regions compiled by Inductor: now, before in this process, or by an earlier process that kept them in a store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import LoweringError
from dgraph.lowering.key import Key, region_key, sources_of
from dgraph.lowering.store import Store
from dgraph.torch_private import compile_region, inductor_settings, load_region, pack_region

RegionFunction = Callable[..., Sequence[Tensor]]
"""Takes the region's inputs in order, returns its outputs in order."""


@dataclass(frozen=True)
class Compiled:
    """A compiled region.

    Attributes:
        function: runs it.
        files: what a store needs to make it again; empty if it cannot be stored, or was not asked to be.
        new: whether Inductor compiled it just now.
        stored: whether it is in the store that was given.
    """

    function: RegionFunction
    files: Mapping[str, bytes]
    new: bool = False
    stored: bool = False


# A compiled region is a function of its key alone, so it serves every model in the process that has the same region.
_COMPILED: dict[str, Compiled] = {}
_LOCK = threading.Lock()


def compiled(
    text: str,
    module: torch.fx.GraphModule,
    device: torch.device,
    functions: Iterable[Callable[..., Any]] = (),
    store: Store | None = None,
    tell: Callable[[str], None] = lambda what: None,
) -> Compiled:
    """A region as a function, compiled only if nobody has done so before.

    Args:
        text: its identity; see `dgraph.lowering.regions.region_text`.
        module: the same as a module, with fake values on its placeholders.
        device: of its tensors.
        functions: references of ops that the module calls.
        store: where compiled regions are kept.
        tell: called with "compiling", "loading" or "waiting for".

    Raises:
        LoweringError: Inductor cannot compile it, or what it compiled accepts only the size it was shown.
    """
    settings, functions = inductor_settings(device), tuple(functions)
    key = region_key(text, device, settings, functions)
    with _LOCK:
        known = _COMPILED.get(key.digest)
        if known is not None and (store is None or known.files):
            stored = store is not None and key in store
            if store is not None and not stored:
                with store.making(key.digest):
                    stored = store.put(key, known.files)
            return Compiled(known.function, known.files, stored=stored)
        found = _load(key, module, store, tell)
        if found is None and store is not None:
            with store.making(key.digest, lambda: tell("waiting for")):
                found = _load(key, module, store, tell)  # another process may have made it while this one waited
                if found is None:
                    tell("compiling")
                    found = _compile_and_store(key, module, settings, functions, store)
        elif found is None:
            tell("compiling")
            found = _compile(module, settings)
        _COMPILED[key.digest] = found
        return found


def _load(key: Key, module: torch.fx.GraphModule, store: Store | None, tell: Callable[[str], None]) -> Compiled | None:
    """A region from the store, run once; None if it is not there or does not load."""
    found = store.find(key) if store is not None else None
    if store is None or found is None:
        return None
    tell("loading")
    try:
        function = load_region(found.files, found.folder)
        _run(function, module)
    except Exception as error:  # whatever torch or the loader makes of it
        store.reject(key.digest, f"it does not load ({_reason(error)})")
        return None
    return Compiled(function, found.files, stored=True)


def _compile_and_store(
    key: Key,
    module: torch.fx.GraphModule,
    settings: dict[str, Any],
    functions: Sequence[Callable[..., Any]],
    store: Store,
) -> Compiled:
    """A region compiled now and kept. Torch can store less than it can compile; then it is compiled as it is."""
    sources = "".join(sources_of(functions).values())
    allowed = {f"{f.__module__}.{f.__qualname__}": sources for f in functions}
    try:
        function = compile_region(module, _inputs(module), settings, allowed)
        files = pack_region(function)
        _run(function, module)
    except Exception as error:
        found = _compile(module, settings)
        store.warn(f"a compiled region cannot be kept in the artifact cache {store.root}: {_reason(error)}.")
        return found
    return Compiled(function, files, new=True, stored=store.put(key, files))


def _compile(module: torch.fx.GraphModule, settings: dict[str, Any]) -> Compiled:
    try:
        function = compile_region(module, _inputs(module), settings)
        _run(function, module)
    except Exception as error:
        raise LoweringError(
            f"Inductor cannot compile this region: {_reason(error)}\n{module.code.strip()}\n"
            f"Use backend='eager' to run it op by op."
        ) from error
    return Compiled(function, {}, new=True)


def _inputs(module: torch.fx.GraphModule) -> list[Tensor]:
    return [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]


def _run(function: RegionFunction, module: torch.fx.GraphModule) -> None:
    """Call a region on zeros of two row counts: Inductor may have specialised to one without a word."""
    with torch.no_grad():
        for rows in (3, 5):
            shapes = ([s if isinstance(s, int) else rows for s in v.shape] for v in _inputs(module))
            zeros = (
                torch.zeros(s, dtype=v.dtype, device=v.device) for s, v in zip(shapes, _inputs(module), strict=True)
            )
            function(*zeros)


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__

"""Compile regions by Inductor, or find them: compiled earlier in this process, or stored by an earlier one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dgraph.cache.key import Key, region_key, sources_of
from dgraph.cache.store import Store
from dgraph.errors import LoweringError
from dgraph.private.inductor import compile_region, inductor_settings, load_region, pack_region

RegionFunction = Callable[..., Sequence[Tensor]]
"""Function of a region: takes its inputs in order, returns its outputs in order."""


SECOND: Mapping[str, Mapping[str, Any]] = {"cuda": {"triton.persistent_reductions": False}}
"""Settings for a region that does not compile as it is, by type of device.

Triton 3.6 fails on some kernels that reduce one row per program and use the sum both as a result and in further
results. Its error is "operand does not dominate this use".
"""


@dataclass(frozen=True)
class Source:
    """A region as a compiler takes it.

    Attributes:
        text: its identity; see `dgraph.lowering.regions.region_text`.
        module: makes the module; called only to compile, since typing its values takes longer than loading it.
        inputs: fake values of its inputs.
        device: of its tensors.
        functions: references of ops that the module calls.
        settings: of Inductor, beside those that every region of the device has.
    """

    text: str
    module: Callable[[], torch.fx.GraphModule]
    inputs: Sequence[Tensor]
    device: torch.device
    functions: tuple[Callable[..., Any], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """All settings of Inductor for this region."""
        return {**inductor_settings(self.device), **self.settings}

    @property
    def key(self) -> Key:
        """Key of the region's artifact."""
        return region_key(self.text, self.device, self.options, self.functions)


@dataclass(frozen=True)
class Compiled:
    """A compiled region.

    Attributes:
        function: runs it.
        files: content by name from which a store makes it again; empty if it cannot be stored, or was not asked to be.
        new: True if Inductor compiled it just now.
        stored: True if it is in the store that was given.
        storable: False if a copy for a store was asked for and torch could keep none.
    """

    function: RegionFunction
    files: Mapping[str, bytes]
    new: bool = False
    stored: bool = False
    storable: bool = True


# A compiled region is a function of its key alone, so it serves every model in the process that has the same region.
_COMPILED: dict[str, Compiled] = {}
_LOCK = threading.Lock()


def compiled(source: Source, store: Store | None = None, tell: Callable[[str], None] = lambda what: None) -> Compiled:
    """Compile a region, unless this process or the store has it already.

    Args:
        source: the region.
        store: where compiled regions are stored.
        tell: called with "compiling", "loading" or "waiting for".

    Raises:
        LoweringError: Inductor cannot compile it, or the compiled code accepts only the size it was shown.
    """
    key = source.key
    with _LOCK:
        known = _COMPILED.get(key.digest)
        if known is not None and (store is None or known.files or not known.storable):
            stored = store is not None and key in store
            if store is not None and not stored and known.storable:
                with store.making(key.digest):
                    stored = store.put(key, known.files)
            return Compiled(known.function, known.files, stored=stored)
        found = _load(key, source, store, tell)
        if found is None and store is not None:
            with store.making(key.digest, lambda: tell("waiting for")):
                found = _load(key, source, store, tell)  # another process may have made it while this one waited
                if found is None:
                    tell("compiling")
                    found = _compile_and_store(key, source, store)
        elif found is None:
            tell("compiling")
            found = _compile(source)
        _COMPILED[key.digest] = found
        return found


def known(source: Source, store: Store | None = None) -> Compiled | None:
    """Find a region that was compiled before, in this process or for the store; else None."""
    key = source.key
    with _LOCK:
        found = _COMPILED.get(key.digest) or _load(key, source, store, lambda what: None)
        if found is None:
            return None
        _COMPILED[key.digest] = found
        return Compiled(found.function, found.files, stored=store is not None and key in store)


def _load(key: Key, source: Source, store: Store | None, tell: Callable[[str], None]) -> Compiled | None:
    """Load a region from the store and run it once; None if it is not there or does not load."""
    found = store.find(key) if store is not None else None
    if store is None or found is None:
        return None
    tell("loading")
    try:
        function = load_region(found.files, found.folder, source.options)
        _run(function, source.inputs)
    except Exception as error:  # torch and the loader fail in many ways
        store.reject(key.digest, f"it does not load ({_reason(error)})")
        return None
    return Compiled(function, found.files, stored=True)


def _compile_and_store(key: Key, source: Source, store: Store) -> Compiled:
    """Compile a region now and store it.

    Torch can store less than it can compile. A region that it cannot store is compiled without a copy.
    """
    try:
        function = _with_copy(source)
        files = pack_region(function)
        _run(function, source.inputs)
    except Exception as error:
        found = _compile(source)
        store.warn(f"a compiled region cannot be stored in the artifact cache {store.root}: {_reason(error)}.")
        return replace(found, storable=False)
    return Compiled(function, files, new=True, stored=store.put(key, files))


def _compile(source: Source) -> Compiled:
    """Compile a region now, without a copy for a store."""
    try:
        function = _made(source)
        _run(function, source.inputs)
    except Exception as error:
        raise LoweringError(
            f"Inductor cannot compile this region: {_reason(error)}\n{source.module().code.strip()}\n"
            f"Use backend='eager' to run it op by op."
        ) from error
    return Compiled(function, {}, new=True)


def _with_copy(source: Source) -> RegionFunction:
    """Compile a region now, so that torch keeps a copy."""
    hashes = "".join(sources_of(source.functions).values())
    allowed = {f"{f.__module__}.{f.__qualname__}": hashes for f in source.functions}
    return _made(source, allowed)


def _made(source: Source, allowed: Mapping[str, str] | None = None) -> RegionFunction:
    """Compile a region now, with `SECOND` settings if it does not compile without.

    Args:
        allowed: as for `compile_region`.
    """
    module, more = source.module(), SECOND.get(source.device.type)
    try:
        return compile_region(module, _placeholders(module), source.options, allowed)
    except Exception:
        if more is None:
            raise
    module = source.module()
    return compile_region(module, _placeholders(module), {**source.options, **more}, allowed)


def _placeholders(module: torch.fx.GraphModule) -> list[Tensor]:
    return [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]


def _run(function: RegionFunction, inputs: Sequence[Tensor]) -> None:
    """Call a region on zeros of two row counts: Inductor may have specialised to one without a word.

    On a GPU the first call times the layouts of a kernel, where it has several, and keeps the best for good. So that
    call has as many rows as pay for the choice. A size that is nowhere the first dimension is small, or a cache would
    be larger than the device. Such sizes are positions of a page, or pages of a sequence.
    """
    with torch.no_grad():
        for rows, few in ((2048 if any(v.device.type == "cuda" for v in inputs) else 3, 2), (5, 4)):
            sizes = {name: few for v in inputs for size in v.shape for name in _symbols(size)}
            sizes |= {name: rows for v in inputs for size in v.shape[:1] for name in _symbols(size)}
            shapes = ([s if isinstance(s, int) else int(s.node.expr.subs(sizes)) for s in v.shape] for v in inputs)
            function(*(torch.zeros(s, dtype=v.dtype, device=v.device) for s, v in zip(shapes, inputs, strict=True)))


def _symbols(size: int | torch.SymInt) -> set[Any]:
    return set() if isinstance(size, int) else size.node.expr.free_symbols


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__

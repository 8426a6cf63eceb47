"""Private parts of torch, which this file and inductor.py alone import.

Each use says why no public name serves, and the versions on which it was checked.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# The types of `torch.ops.aten.add.Tensor` and of its packet; they have no public names. Checked on 2.11 and 2.13.
from torch._ops import OpOverload
from torch._ops import OpOverloadPacket as OpPacket

# Base class of modes that see every op that torch's dispatcher runs; it has no public name. Checked on 2.11 and 2.13.
from torch.utils._python_dispatch import TorchDispatchMode

from dgraph.errors import LoweringError

__all__ = [
    "OpOverload",
    "OpPacket",
    "StorageWatch",
    "WriteWatch",
    "copy_all",
    "fake_mode",
    "held",
    "let_written_be_left_out",
    "new_symbol",
    "sizes_from_zero",
    "symmetric",
    "tracing",
    "typing",
]


def held(tensors: list[Tensor]) -> list[Tensor]:
    """Select the tensors that C++ holds, too: for an op that has not ended in its thread.

    Each tensor must be in this list only. C++ has one reference to the object of Python for all of its own, and gives
    it back after the last of those. Nothing public counts the references of C++. Checked on 2.11 and 2.13.
    """
    (alone,) = (sys.getrefcount(each) for each in [object()])
    counts = ((tensor._use_count(), sys.getrefcount(tensor)) for tensor in tensors)  # type: ignore[attr-defined]
    return [tensor for tensor, count in zip(tensors, [*counts], strict=True) if count > (1, alone)]


@contextlib.contextmanager
def sizes_from_zero() -> Iterator[None]:
    """Context in which torch.export takes no size to be at least two.

    Else a program with a size `b+1` has a guard that refuses one sequence, whatever its `Dim` says. Nothing public
    turns that off. Checked on 2.11 and 2.13.
    """
    from torch.fx.experimental import _config

    with _config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        yield


def let_written_be_left_out(custom: Any) -> None:
    """Let calls of a `torch.library.custom_op` leave out arguments that it writes, where they have a default.

    Before 2.13, torch counts the versions of written tensors, and takes every one of them from the positional
    arguments. The dispatcher drops arguments that equal their default: an IndexError, whether None is given or left
    out. Checked on 2.11; 2.13 does as this.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
        return
    overload, past = custom._opoverload, torch._C._after_ADInplaceOrView_keyset
    arguments = overload._schema.arguments
    written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]

    def count(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        for i in written:
            value = args[i] if i < len(args) else kwargs.get(arguments[i].name)
            if isinstance(value, Tensor):
                torch.autograd.graph.increment_version(value)
        return overload.redispatch(keyset & past, *args, **kwargs)

    custom._lib.impl(custom._name, count, "ADInplaceOrView", with_keyset=True, allow_override=True)


def fake_mode() -> Any:
    """A fake-tensor mode with an empty shape environment of its own.

    `torch.export` gives fake tensors with symbolic sizes for a traced model, but nothing public makes them for a graph
    that a pass has rewritten. Checked on 2.11 and 2.13.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False)


class StorageWatch(TorchDispatchMode):
    """Mode that counts the bytes of the memory that ops allocate: of real tensors on a CPU, and of fake ones.

    Bytes count from when a result is made until nothing holds it any more. Memory that code allocates past torch's
    dispatcher is not seen: compiled regions, and kernels of torch for themselves. `memory_stats` counts a GPU's memory
    alone. Storages are counted as torch's own memory tracker counts them, by weak references to their Python objects.
    Checked on 2.11 and 2.13.

    Args:
        grain: bytes; an allocation takes a multiple of it.
        seen: called with the live bytes whenever they have risen.

    Attributes:
        live: bytes that are allocated now.
        peak: most that were at a time.
        quiet: True lets ops pass uncounted.
    """

    def __init__(self, grain: int = 1, seen: Callable[[int], object] | None = None):
        super().__init__()
        self.grain, self._seen = grain, seen or (lambda live: None)
        self.live = self.peak = 0
        self.quiet = False
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an op and count the storages of its result that are in none of its arguments."""
        result = func(*args, **(kwargs or {}))
        if not self.quiet:
            given = {id(storage) for storage in _storages((args, kwargs))}
            self._count(storage for storage in _storages(result) if id(storage) not in given)
        return result

    def note(self, value: Any) -> None:
        """Count the memory of the tensors in a value, unless it is counted."""
        self._count(_storages(value))

    def rise(self, size: int) -> None:
        """Count `size` bytes that are allocated and freed again at once."""
        self.peak = max(self.peak, self.live + size)
        self._seen(self.live + size)

    def _count(self, storages: Iterable[torch.UntypedStorage]) -> None:
        for storage in storages:
            key = id(storage)
            if key not in self._sizes:
                self._sizes[key] = -(-storage.nbytes() // self.grain) * self.grain
                weakref.finalize(storage, self._forget, key)
                self.live += self._sizes[key]
        self.peak = max(self.peak, self.live)
        self._seen(self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


class WriteWatch(TorchDispatchMode):
    """Mode that calls `refuse` before an op writes to the memory of known tensors.

    It sees what torch's dispatcher does: writes under `no_grad`, through `.data`, views, storages, lists and `out=`.
    Writes past the dispatcher, as those of numpy, are not seen. The schema of an op says which arguments it writes.
    Nothing public shows an op before it runs. Storages are told apart as by `StorageWatch`. Checked on 2.11 and 2.13.

    Args:
        tensors: by name; not held.
        refuse: called with the name of a tensor and the op that would write it; raises to keep it from that.
    """

    def __init__(self, tensors: Mapping[str, Tensor], refuse: Callable[[str, str], object]):
        super().__init__()
        self._watched: dict[int, tuple[str, weakref.ref[torch.UntypedStorage]]] = {}
        self._refuse = refuse
        for name, tensor in tensors.items():
            self.add(name, tensor)

    def add(self, name: str, tensor: Tensor) -> None:
        """Watch the memory of one more tensor."""
        storage = tensor.untyped_storage()
        self._watched[id(storage)] = name, weakref.ref(storage)

    def name_of(self, storage: torch.UntypedStorage) -> str | None:
        """The tensor that has this memory; None if it is not watched."""
        name, watched = self._watched.get(id(storage), ("", None))
        return name if watched is not None and watched() is storage else None

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an op, unless it is refused."""
        if func._schema.is_mutable:
            named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs or {})
            written = (a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
            for storage in _storages([named.get(argument) for argument in written]):
                if (name := self.name_of(storage)) is not None:
                    self._refuse(name, str(func))
        return func(*args, **(kwargs or {}))


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    if isinstance(value, Tensor):
        yield value.untyped_storage()
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _storages(part)
    elif isinstance(value, dict):
        yield from _storages(tuple(value.values()))


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """targets[i].copy_(sources[i]) for all i, in one launch per dtype on a GPU.

    Public torch copies one tensor per launch. `_foreach_copy_` falls back to that by itself where it must. Checked on
    2.11 and 2.13.
    """
    pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        mine = pairs.setdefault(target.dtype, ([], []))
        mine[0].append(target)
        mine[1].append(source)
    for target_list, source_list in pairs.values():
        torch._foreach_copy_(target_list, source_list)


@contextlib.contextmanager
def typing(mode: Any) -> Iterator[None]:
    """Run ops on fake tensors of a mode, to learn the types of their results.

    The Python dispatcher decomposes composite ops; without it torch 2.11 runs their C++ kernels, which refuse symbolic
    sizes (linear) or fix them (matmul). `torch.export` does the same. A traceback that torch logs of an op that refuses
    its arguments is dropped: the caller says why in a line. Checked on 2.11 and 2.13.

    Raises:
        ValueError: an op holds only where a symbol has the value of its hint; the symbol stays one.
    """
    from torch._dispatch.python import enable_python_dispatcher

    def elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != threading.get_ident()

    sizes = mode.shape_env
    before = {name: dict(getattr(sizes, name)) for name in ("replacements", "var_to_range", "axioms")}
    guards = len(sizes.guards)
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(elsewhere)
    try:
        with torch.no_grad(), enable_python_dispatcher(), mode:
            yield
    finally:
        logger.removeFilter(elsewhere)
    fixed = {symbol: value for symbol, value in sizes.replacements.items() if symbol not in before["replacements"]}
    if fixed:
        # Left so, the symbol would be that number in every graph of the model.
        for name, value in before.items():
            setattr(sizes, name, value)
        del sizes.guards[guards:]
        sizes._replacements_version_counter = getattr(sizes, "_replacements_version_counter", 0) + 1
        sizes._update_version_counter()
        raise ValueError("it holds only where " + ", ".join(f"{k} is {v}" for k, v in fixed.items()))


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Trace functions over real tensors: the types of all values are kept in one fake-tensor mode.

    `make_fx` alone makes another mode, and a stack trace for it, at every value: more than half of its time. It takes
    the mode of the tracing context where there is one, for which nothing public stands. Checked on 2.11 and 2.13.
    """
    from torch._guards import TracingContext
    from torch._guards import tracing as within

    with torch.no_grad(), within(TracingContext(fake_mode())):
        yield


def new_symbol(mode: Any, name: str, hint: int) -> torch.SymInt:
    """A size that shape checks must treat as variable; `hint` (at least 2) only settles comparisons.

    `ConstantSource` names a symbol that comes from no traced frame. Checked on 2.11 and 2.13. The imports are late
    because they pull in Dynamo and, with it, triton.
    """
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])  # type: ignore[arg-type]
    example = mode.from_tensor(torch.empty(hint), symbolic_context=context, source=ConstantSource(name))
    size = example.shape[0]
    if not isinstance(size, torch.SymInt):
        raise LoweringError(f"torch specialised the symbolic size {name} to {size}.")
    return size


def symmetric(size: int, device: torch.device, group: Any) -> tuple[Tensor, bool]:
    """u8[size] on this GPU that the other ranks of a process group can read and write, and whether its switch can, too.

    group: a process group. All ranks must call it together, and keep the buffer. The ops on such buffers are
    `torch.ops.symm_mem`; nothing public allocates them. Checked on 2.11 and 2.13.
    """
    from torch.distributed._symmetric_memory import empty, rendezvous

    buffer = empty(size, dtype=torch.uint8, device=device)
    handle = rendezvous(buffer, group)
    return buffer, handle.multicast_ptr != 0


def product_of_int8(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply int8 [..., columns] @ int8 [rows, columns].T in int32, on a CPU, of any sizes.

    Torch's public products of int8 sum in int8. `torch._int_mm` gets products of one column wrong; these need no sum.
    Checked on 2.13.
    """
    if x.shape[-1] == 1:
        return x.int() * weight[:, 0].int()
    made: Tensor = torch._int_mm(x.reshape(-1, x.shape[-1]), weight.t())
    return made.view(*x.shape[:-1], len(weight))

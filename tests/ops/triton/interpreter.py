"""Calls of kernels in a process of their own, where Triton interprets them on CPU tensors.

Triton decides at its import whether it interprets. In a process of its own it does not matter who imported it
before in the test's process, or that tests on a GPU run next to these.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import dgraph.ops
from dgraph.ops.statistics import declare, declared


class _Stays:
    """What Triton restores after a launch: nothing."""

    def restore(self) -> None:
        """Leave everything as it is."""


def interpret_all() -> None:
    """Let Triton interpret kernels in this process, from before its import to the end of the process.

    Things that Triton does again at every call, or for nothing, take more than half of the time of small calls; they
    are left out (checked on Triton 3.7; one without these functions interprets as it likes). It replaces the functions
    of its language at every call of a function within a kernel, although they are replaced already. It builds a table
    of number types whenever it looks one up. It works out whether a sum of integers overflows, and drops the answer
    outside of its debug mode, which interpreted kernels cannot ask for. It describes the shape of every value anew.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    from triton.language import core
    from triton.runtime import interpreter

    replace, done, stays = getattr(interpreter, "_patch_lang", None), set(), _Stays()
    number_type = getattr(interpreter, "_get_np_dtype", None)
    if replace is None or number_type is None:
        return

    def once(fn: Any) -> _Stays:
        sees = tuple(any(value is module for value in fn.__globals__.values()) for module in (interpreter.tl, core))
        if sees not in done:
            replace(fn)
            done.add(sees)
        return stays

    interpreter._patch_lang = once
    remembered = functools.cache(number_type)
    interpreter._get_np_dtype = lambda t: number_type(t.scalar) if t.scalar.is_ptr() else remembered(t.scalar)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _describe_once(core)


def _describe_once(core: Any) -> None:
    """Let types and values of equal sizes share what Triton says of their sizes, which nothing changes."""
    of_type, of_value = core.block_type.__init__, core.tensor.__init__

    @functools.cache
    def type_facts(sizes: tuple[int, ...], element: Any) -> dict[str, Any]:
        of_type(made := core.block_type.__new__(core.block_type), element, list(sizes))
        return {name: fact for name, fact in vars(made).items() if name != "element_ty"}

    @functools.cache
    def value_facts(sizes: tuple[int, ...]) -> dict[str, Any]:
        of = core.block_type(core.int32, list(sizes)) if sizes else core.int32
        of_value(made := core.tensor.__new__(core.tensor), None, of)
        return {name: vars(made)[name] for name in ("shape", "numel")}

    def start_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        vars(self).update(type_facts(sizes, element_ty.name), element_ty=element_ty)

    def start_value(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        vars(self).update(value_facts(sizes), handle=handle, type=type, dtype=type.scalar)

    core.block_type.__init__, core.tensor.__init__ = start_type, start_value


def _pack(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _kernels(module: str) -> Any:
    """The module of that name in a folder `triton` beside the ops of a subject, or beside those of all subjects."""
    root = Path(dgraph.ops.__path__[0])
    (found,) = (path for path in root.rglob(f"{module}.py") if path.parent.name == "triton")
    return import_module(".".join(("dgraph.ops", *found.relative_to(root).with_suffix("").parts)))


def _run(module: str, function: str, data: bytes) -> bytes:
    args, options, statistics = _unpack(data)
    for each in statistics:
        declare(each)
    result = getattr(_kernels(module), function)(*args, **options)
    return _pack((result, args))


class Interpreter:
    """Calls functions of modules of kernels in the other process."""

    def __init__(self, pool: ProcessPoolExecutor):
        self._pool = pool

    def __call__(self, module: str, args: Sequence[Any], function: str = "kernel", **options: Any) -> tuple[Any, Any]:
        """The result, and the arguments as the call left them."""
        statistics = [declared(args[-1])] if module == "lm_head_measured" else []
        data = _pack((tuple(args), options, statistics))
        return _unpack(self._pool.submit(_run, module, function, data).result())


@contextmanager
def interpreter() -> Iterator[Interpreter]:
    """A process for the kernels, ended with the block."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=interpret_all) as pool:
        yield Interpreter(pool)

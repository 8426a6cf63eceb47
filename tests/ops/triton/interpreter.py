"""Calls of kernels in a process of their own, where Triton interprets them on CPU tensors.

Triton decides at its import whether it interprets. In a process of its own it does not matter who imported it
before in the test's process, or that tests on a GPU run next to these.
"""

from __future__ import annotations

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
from tests.ops.triton.quicker import quicken


def interpret_all() -> None:
    """Let Triton interpret kernels in this process, from before its import to the end of the process."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    quicken()


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

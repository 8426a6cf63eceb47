"""Kernels that start early: while the one in front of them still runs, and why no result depends on it.

Between two kernels of a stream a GPU is idle for some microseconds. From compute capability 9.0 on a kernel can be
launched with an attribute (programmatic dependent launch): its blocks are placed as soon as every block of the kernel
in front of it has said that it may (`gdc_launch_dependents`), or has ended. `gdc_wait` in it returns when that kernel
has ended and its writes are visible. So a kernel that starts early

    waits in every thread, before its first access to memory, and only then lets the next one start.

This is sound whatever the kernels read and write. Say that when kernel i ends, all kernels before it have ended. A
kernel i + 1 without the attribute starts behind the end of i. One with it touches no memory before its wait returns,
which is behind the end of i. Either way nothing before it runs any more when it first reads or writes, and when it ends
they all have ended: so the same holds for i + 1, and no two kernels of a stream touch memory at the same time. What
waits for a kernel from outside (events, copies, other streams, the host) waits for its end, and so for all before it.
Blocks that wait take no room that others need: the next kernel is placed when the last block of this one is.

A weaker rule would not do. A kernel without a wait may end before one two places in front of it has, and then the wait
of the next returns too early. Torch's Inductor waits behind loads of what the kernel in front does not write, by the
names of buffers: that says nothing of a buffer that is another's memory used again, and of a kernel in front that is
not its own. And a kernel of Inductor that loads nothing may not wait at all.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from functools import lru_cache

import torch

FIRST = (9, 0)
"""The compute capability from which on kernels can start early."""

WAIT = "tl.extra.cuda.gdc_wait()"
"""The line of a kernel's source behind which what was launched before it has ended."""
_PLAIN_CALLS = {f"tl.{name}" for name in ("arange", "full", "num_programs", "program_id", "zeros")}
"""What may stand in front of a wait: it touches no memory."""


VARIABLE = "TORCHINDUCTOR_ENABLE_PDL"
"""Torch's own variable for its kernels: "1" has those of regions start early as well, "0" none at all."""


@lru_cache
def starts_early(device: torch.device) -> bool:
    """Whether kernels of ours on a device start early."""
    if device.type != "cuda" or torch.version.hip is not None or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    return os.environ.get(VARIABLE) != "0" and torch.cuda.get_device_capability(device) >= FIRST


def regions_start_early(device: torch.device) -> bool:
    """Whether kernels that Inductor generates for a device start early: where somebody asks for it.

    A step of one sequence gains 8 % from it (benchmarks/RESULTS.md). But torch loads such kernels by way of Triton,
    which builds a library to launch each kind: every start of a process takes seconds longer.
    """
    return os.environ.get(VARIABLE) == "1" and starts_early(device)


def hasty_kernels(source: str) -> list[str]:
    """Kernels that start early and may touch memory before they wait.

    Args:
        source: Python that Inductor generated: calls of `async_compile.triton` with a kernel's name and its source.

    Returns:
        Their names; "?" for one that starts early and is none of those.

    Raises:
        SyntaxError: it is not Python.
    """
    tree = ast.parse(source)
    # A text in front, which nothing runs, has them all as well, as they were timed.
    tree.body = [s for s in tree.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    kernels = list(_kernels_of(tree))
    seen = sum(text.count("launch_pdl") for _, text in kernels)
    found = [name for name, text in kernels if _is_hasty(ast.parse(text), name)]
    return found + ["?"] * (ast.unparse(tree).count("launch_pdl") > seen)


def _kernels_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "async_compile.triton":
            name, text = (arg.value for arg in call.args[:2] if isinstance(arg, ast.Constant))
            yield str(name), str(text)


def _is_hasty(tree: ast.Module, name: str) -> bool:
    """Cooperative launches are left out: their blocks wait for each other, too."""
    return _says(tree, "launch_pdl") and (_says(tree, "launch_cooperative_grid") or not _waits(tree, name))


def _says(tree: ast.Module, option: str) -> bool:
    """Whether a dictionary sets an option, to anything but False."""
    dictionaries = (node for node in ast.walk(tree) if isinstance(node, ast.Dict))
    pairs = (pair for node in dictionaries for pair in zip(node.keys, node.values, strict=True))
    values = (value for key, value in pairs if isinstance(key, ast.Constant) and key.value == option)
    return any(ast.unparse(value) != "False" for value in values)


def _waits(tree: ast.Module, name: str) -> bool:
    """Whether a kernel runs to its wait in every thread, and touches no memory on the way."""
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and function.name == name:
            for statement in function.body:
                if ast.unparse(statement) == WAIT:
                    return True
                if not isinstance(statement, ast.Assign | ast.AnnAssign) or not _is_plain(statement):
                    return False
    return False


def _is_plain(statement: ast.Assign | ast.AnnAssign) -> bool:
    calls = (node for node in ast.walk(statement) if isinstance(node, ast.Call))
    return all(ast.unparse(call.func) in _PLAIN_CALLS for call in calls)

"""Kernels as Triton compiles them for a GPU that need not be there, by modules that print what they found."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

ACCESS = re.compile(r"\b(ld|st|atom|red)\.(?!param)|\bcp\.async")
"""A line of PTX that touches memory other than its arguments."""


def found_by(module: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """The JSON object that a module of this folder prints, in a process whose Triton does not interpret."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"tests.ops.triton.{module}", *arguments]
    done = subprocess.run(command, env={**kept, **environment}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def source_of(maker: Any, function: Any, constants: Mapping[str, Any], types: Mapping[str, str]) -> Any:
    """What Triton compiles: a kernel with those of the constants that it takes; arguments without a type are i32.

    maker: Triton's class of such sources.
    """
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    return maker(function, signature, {(names.index(n),): v for n, v in constants.items() if n in names})

"""dgraph: a compiler for diffusion language models.

opt = dgraph.optimize("tiny_sdar", recipe="focus")
print(opt.generate("Sort these words: river stone cloud maple").texts[0])

A public name is imported when it is first used, so that what needs no torch does not wait for it.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

from dgraph import moved
from dgraph.errors.former import tell_former

__version__ = "0.2.0"

API_VERSION = 1
"""Version of the promise to packages outside: what works under a number works in every release that has it."""

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_HOMES = {
    alias.asname or alias.name: (str(node.module), alias.name)
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""The module that each public name comes from, and its name there, which differs for a former name."""

__all__ = [name for name, (home, now) in _HOMES.items() if home != __name__ and now == name]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, now = _HOMES[name]
    if home == __name__:
        return import_module(f"{__name__}.{name}")
    value = getattr(import_module(home), now)
    if now == name:
        globals()[name] = value
    else:
        tell_former(f"dgraph.{name}", now)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


moved.install()

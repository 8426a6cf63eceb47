"""Sources of modules and of all that they import, by which a key tells that code has changed.

A name reads as the module does, "dgraph/ops/rows/rope.py", wherever the file lies. Imports are followed within the
module's own package and within dgraph, those inside of functions included, those for types alone not. The front door
of a package (`import dgraph`) is not followed: it leads everywhere. C++ that a module compiles lies beside it under its
name ("product.cpp" and "product_numbers.cpp" of "product.py") and is a source, too.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec, resolve_name
from pathlib import Path
from pkgutil import iter_modules

_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+)?import[ \t]+(\((?:#[^\n]*|[^)#])*\)|(?:\\\n|[^\n;])+)", re.MULTILINE
)
_FOR_TYPES = re.compile(r"^if TYPE_CHECKING:[^\n]*\n(?:[ \t]+[^\n]*\n|\n)+", re.MULTILINE)
_ASIDE = re.compile(r"#[^\n]*|\bas[ \t]+\w+")


def sources(modules: Iterable[str]) -> dict[str, str]:
    """SHA-256 by name, in order, of the sources of modules and of the modules that they import.

    A module without a source is left out.

    Args:
        modules: dotted names.
    """
    found: dict[str, Path] = {}
    seen: set[str] = set()
    todo = list(modules)
    while todo:
        module = todo.pop()
        path = None if module in seen else path_of(module)
        seen.add(module)
        if path is not None:
            name = f"{module.replace('.', '/')}{'/__init__' if path.stem == '__init__' else ''}"
            found[f"{name}{path.suffix}"] = path
            folder = name.removesuffix(path.stem)
            compiled = (path.with_suffix(".cpp"), *path.parent.glob(f"{path.stem}_*.cpp"))
            found |= {f"{folder}{one.name}": one for one in compiled if one.is_file()}
            todo += imported_by(module)
    return {name: hash_of(path) for name, path in sorted(found.items())}


@cache
def modules_beside(module: str) -> tuple[str, ...]:
    """Modules of a module's package, without the packages inside it; the module itself if it lies in no package."""
    package = module.rpartition(".")[0]
    path = path_of(package) if package else None
    if path is None:
        return (module,)
    return tuple(sorted(f"{package}.{found.name}" for found in iter_modules([str(path.parent)]) if not found.ispkg))


@cache
def imported_by(module: str) -> tuple[str, ...]:
    """Modules of its own package and of dgraph that a module imports, sorted, without itself."""
    path = path_of(module)
    if path is None:
        return ()
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    names: set[str] = set()
    for start, listed in _IMPORT.findall(_FOR_TYPES.sub("", path.read_text(encoding="utf-8"))):
        parts = re.findall(r"[.\w]+", _ASIDE.sub("", listed))
        if start:
            try:
                start = resolve_name(start, package)
            except ImportError:  # above the package, or a sentence that begins with "from"
                continue
            names |= {start, *(f"{start}.{part}" for part in parts)}
        else:
            names.update(parts)
    followed = (f"{module.partition('.')[0]}.", "dgraph.")
    return tuple(sorted(n for n in names - {module} if n.startswith(followed) and path_of(n) is not None))


@cache
def path_of(module: str) -> Path | None:
    """Source file of a module, found without importing it; None without a source file."""
    if module in sys.modules:
        spec = sys.modules[module].__spec__
        path = Path(spec.origin) if spec is not None and spec.origin is not None else None
        return path if path is not None and path.suffix == ".py" and path.is_file() else None
    package, _, name = module.rpartition(".")
    if not package:
        spec = find_spec(name)
        origin = spec.origin if spec is not None else None
        return Path(origin) if origin is not None and origin.endswith(".py") else None
    above = path_of(package)
    if above is None or above.name != "__init__.py":
        return None
    places = (above.parent / f"{name}.py", above.parent / name / "__init__.py")
    return next((path for path in places if path.is_file()), None)


def package_hash(package: str) -> str:
    """SHA-256 of every source of a package, in hexadecimal; of no source, without files."""
    path = path_of(package)
    files = sorted(file for file in path.parent.rglob("*") if file.suffix in (".py", ".cpp")) if path else []
    return hashlib.sha256("".join(map(hash_of, files)).encode()).hexdigest()


def hash_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()

"""`dgraph doctor`: checks of everything that dgraph needs."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import random
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dgraph.cli import options as given
from dgraph.cli.output import OUT, columns, print_json, status
from dgraph.text.columns import NARROWEST

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

OPTIONAL = {"triton": "kernels for a GPU; a CPU needs none"}
"""Packages of the extra `gpu`, without which dgraph runs on a CPU, and their uses."""

PROBE = """
#include <cmath>
#include <vector>
extern "C" int answer(int last) {
    std::vector<int> sums(last + 1, 0);
    for (int i = 1; i <= last; ++i) sums[i] = sums[i - 1] + i;
    return sums[last];
}
"""
"""A text for the C++ compiler."""
SECONDS = 60
"""Seconds that the compiler may take for it."""
COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class Check:
    """One line of the report: subject, "ok", "warn" or "fail", finding, and advice."""

    name: str
    status: str
    found: str
    advice: str = ""


def doctor(
    full: Annotated[bool, typer.Option("--full", help="Also compile a region by Inductor, half a minute.")] = False,
    json: given.Json = False,
) -> None:
    """Check versions, compiler, devices, embedded models and the cache. Exit code 1 if something fails.

    \b
    dgraph doctor
    dgraph doctor --full
    """
    checks: list[Check] = []
    with status("checking") as tell:
        for what, check in (CHECKS | (SLOW if full else {})).items():
            tell(f"checking {what}")
            checks += check()
    failed = any(c.status == "fail" for c in checks)
    if json:
        print_json({"ok": not failed, "checks": [asdict(c) for c in checks]})
    else:
        indent = max(len(c.name) for c in checks) + 8
        for c in checks:
            first, *others = [*_lines(c.found, indent), *_lines(c.advice, indent)]
            OUT.print(f"{c.status:<4}", style=COLOURS[c.status], end="")
            OUT.print(f"  {c.name:<{indent - 8}}  {first}")
            for line in others:
                OUT.print(f"{'':<{indent}}{line}")
    if failed:
        raise typer.Exit(1)


def _lines(text: str, indent: int) -> list[str]:
    """A text in lines that fit behind an indent; a path stays whole."""
    width = columns()
    if width is None or not text:
        return [text] if text else []
    return textwrap.wrap(text, max(NARROWEST, width - indent), break_long_words=False, break_on_hyphens=False)


def _packages() -> Iterator[Check]:
    """Check installed versions against the bounds that dgraph's own metadata declares."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    try:
        declared = importlib.metadata.requires("dgraph") or []
    except importlib.metadata.PackageNotFoundError:
        yield Check(
            "dgraph", "warn", "not installed", "Run pip install -e . in its folder, so that versions can be checked."
        )
        return
    version = platform.python_version()
    fits = SpecifierSet(importlib.metadata.metadata("dgraph")["Requires-Python"] or "").contains(
        version, prereleases=True
    )
    yield Check("python", "ok" if fits else "fail", version, "" if fits else "dgraph needs another version of Python.")
    for text in declared:
        required = Requirement(text)
        if required.marker is not None and not required.marker.evaluate({"extra": "gpu"}):
            continue
        optional = OPTIONAL.get(required.name)
        try:
            version = importlib.metadata.version(required.name)
        except importlib.metadata.PackageNotFoundError:
            found = "not installed" + (f" ({optional})" if optional else "")
            yield Check(
                required.name,
                "ok" if optional else "fail",
                found,
                "" if optional else f"pip install '{required.name}{required.specifier}'",
            )
            continue
        fits = required.specifier.contains(version, prereleases=True)
        advice = (
            ""
            if fits
            else f"dgraph is tested with {required.specifier}: pip install '{required.name}{required.specifier}'"
        )
        if fits and optional and (pinned := _pinned_by_torch(required.name)) is not None:
            fits = pinned.contains(version, prereleases=True)
            advice = "" if fits else f"this torch needs {required.name}{pinned}: pip install '{required.name}{pinned}'"
        yield Check(required.name, "ok" if fits else "warn", version, advice)


def _pinned_by_torch(name: str) -> SpecifierSet | None:
    """Versions of a package that the installed torch declares; None where it declares none (a build for CPUs)."""
    from packaging.requirements import Requirement

    try:
        declared = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((r.specifier for r in map(Requirement, declared) if r.name == name), None)


def _compiler() -> Iterator[Check]:
    """Check the compiler with a function of a few lines."""
    names = [n for n in (os.environ.get("CXX"), "g++", "clang++", "c++") if n]
    path = next((found for n in names if (found := shutil.which(n))), None)
    if path is None:
        yield Check("C++ compiler", "fail", "none found", "Install g++ (or set CXX), or run with --backend eager.")
        return
    try:
        _compile_something(path)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        yield Check("C++ compiler", "fail", f"{path} fails: {reason}", "Repair it, or run with --backend eager.")
    else:
        yield Check("C++ compiler", "ok", f"{path}, compiles and runs a function")


def _compile_something(path: str) -> None:
    """Compile a library with the headers that compiled regions need beside those of torch, and call it.

    path: of the compiler.

    Raises:
        RuntimeError: the compiler fails, with its first line, or the library gives a wrong result.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "answer.so"
        flags = ["-std=c++20", "-shared", "-fPIC", *([] if platform.system() == "Darwin" else ["-fopenmp"])]
        command = [path, *flags, "-x", "c++", "-", "-o", str(library)]
        done = subprocess.run(command, input=PROBE, text=True, capture_output=True, timeout=SECONDS)
        if done.returncode:
            raise RuntimeError(done.stderr or f"exit code {done.returncode}")
        if ctypes.CDLL(str(library)).answer(4) != 10:
            raise RuntimeError("a compiled function gave a wrong result")


def _region() -> Iterator[Check]:
    """Check Inductor with a small region, compiled in the same way as those of programs."""
    try:
        _compile_region()
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        yield Check("compiled region", "fail", f"Inductor fails: {reason}", "Run with --backend eager.")
    else:
        yield Check("compiled region", "ok", "Inductor compiles and runs one")


def _compile_region() -> None:
    import torch

    from dgraph.private.inductor import compile_region
    from dgraph.types.shapes import Symbols

    factor = random.uniform(1, 2)  # a text that no cache knows
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = Symbols().empty(("N", 4), torch.float64)
    y = graph.call_function(torch.ops.aten.mul.Tensor, (x, factor))
    y.meta["val"] = x.meta["val"]
    graph.output((y,))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    (product,) = compile_region(module, [x.meta["val"]], {})(torch.ones(5, 4, dtype=torch.float64))
    if not torch.equal(product, torch.full((5, 4), factor, dtype=torch.float64)):
        raise RuntimeError("a compiled region gave a wrong result")


def _devices() -> Iterator[Check]:
    import torch

    if not torch.cuda.is_available():
        yield Check("CUDA device", "ok", "none; programs run on the CPU")
        return
    for i in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(i)
        yield Check(
            f"CUDA device {i}", "ok", f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, {facts.major}.{facts.minor}"
        )


def _models() -> Iterator[Check]:
    from dgraph.families import DIFFERENCE, embedded

    for model in embedded().values():
        alone = not (model.folder / DIFFERENCE).is_file()
        needed = ("config.json", "tokenizer.json") if alone else ("config.json",)
        lacking = [name for name in needed if not (model.folder / name).is_file()]
        lacking += _damaged(model.folder)
        if lacking:
            yield Check(
                f"model {model.name}", "fail", f"{model.folder}: no usable {', '.join(lacking)}", "Reinstall dgraph."
            )
        else:
            yield Check(f"model {model.name}", "ok", str(model.folder))


def _damaged(folder: Path) -> list[str]:
    """Names of shards that cannot be opened, or "*.safetensors" if there are no shards."""
    from safetensors import SafetensorError, safe_open

    damaged, shards = [], sorted(folder.glob("*.safetensors"))
    for shard in shards:
        try:
            with safe_open(shard, framework="pt") as opened:
                opened.keys()
        except (SafetensorError, OSError):
            damaged.append(shard.name)
    return damaged if shards else ["*.safetensors"]


def _cache() -> Iterator[Check]:
    """Check that Inductor's cache folder is writeable, and has room."""
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir())
    present = next(p for p in (folder, *folder.parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=present):
            pass
    except OSError as error:
        advice = "Set TORCHINDUCTOR_CACHE_DIR to a folder that you can write to."
        yield Check("cache", "fail", f"{folder} is not writeable: {error.strerror}", advice)
    else:
        free = shutil.disk_usage(present).free / 2**30
        advice = "" if free >= 1 else "Compiled programs need some hundred MiB; free some space."
        yield Check("cache", "ok" if free >= 1 else "warn", f"{folder}, {free:.0f} GiB free", advice)


def _artifacts() -> Iterator[Check]:
    """Check that dgraph's artifact cache can be used.

    Without it programs run, but are compiled anew in every process.
    """
    from dgraph.cache.place import FOLDER_VARIABLE, check_owner, default_folder
    from dgraph.errors import CacheError

    try:
        folder = default_folder()
        if folder.is_dir():
            check_owner(folder)
        present = next(p for p in (folder, *folder.parents) if p.exists())
        with tempfile.TemporaryFile(dir=present):
            pass
    except OSError as error:
        found = f"the artifact cache {folder} cannot be used: {error.strerror}."
        yield Check("artifact cache", "warn", found, f"Set {FOLDER_VARIABLE} to a folder that you can write to.")
    except CacheError as error:
        yield Check("artifact cache", "warn", str(error), "Until then nothing is stored between processes.")
    else:
        yield Check("artifact cache", "ok", str(folder) if folder.exists() else f"{folder}, made on first use")


CHECKS: dict[str, Callable[[], Iterator[Check]]] = {
    "packages": _packages,
    "devices": _devices,
    "embedded models": _models,
    "the cache": _cache,
    "the artifact cache": _artifacts,
    "the C++ compiler": _compiler,
}
SLOW: dict[str, Callable[[], Iterator[Check]]] = {"Inductor": _region}
"""Checks that `--full` adds."""

"""Keys of the artifact cache: everything that an artifact depends on, as plain text, and its SHA-256.

The text is stored beside the artifact, so that `dgraph cache why` can show the differences between two of them. A
weight's value, a model's name, a recipe and a bucket list are not in it. A region takes weights as inputs and any row
count. So one artifact serves every model, phase and bucket in which the same region occurs. So do tilings of kernels,
by shape, and compiled kernels, by the inputs of Triton's own hash.

Keys that are made need torch, keys that are read do not: torch is imported where one is made.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import inspect
import platform
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from dgraph.cache.artifact import FORMAT
from dgraph.cache.sources import hash_of, modules_beside, package_hash, path_of, sources
from dgraph.private.processor import processor_features

if TYPE_CHECKING:
    import torch

MAKER = "dgraph.lowering.regions"
"""Module that turns a region's text into the module that Inductor compiles."""
CAPTURER = "dgraph.frontend.frozen"
"""Module that turns a model's module into a captured graph."""
TUNER = "dgraph.lowering.tuning"
"""Module that decides, besides the kernels, which tilings are timed and how."""
PROFILER = "dgraph.engine.memory.profile"
"""Module that decides what is measured of a program. It lowers nothing by itself: it imports the modules that do."""
LAUNCHERS = "launchers"
"""Name of the entry with the libraries that launch kernels."""
SETTINGS = "inductor settings"
"""Name of the input with Inductor's settings, one per line, some hundred."""
MANY_WORDS = 12
"""A value of more words than this on one line is a list, of which `why` shows only the differing words."""


@dataclass(frozen=True)
class Key:
    """Key of an artifact: inputs by name; a value may have several lines."""

    inputs: Mapping[str, str]

    @cached_property
    def text(self) -> str:
        """One `name: value` per input; the lines of a long value stand below its name, indented."""
        lines = []
        for name, value in self.inputs.items():
            if "\n" in value:
                lines += [f"{name}:", *(f"  {line}" for line in value.split("\n"))]
            else:
                lines.append(f"{name}: {value}")
        return "\n".join(lines) + "\n"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the text, in hexadecimal: the name of the artifact."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @classmethod
    def of_text(cls, text: str) -> Key:
        """Parse the text of a key; the inverse of `text`."""
        inputs: dict[str, list[str]] = {}
        name = ""
        for line in text.split("\n")[:-1]:
            if line.startswith("  "):
                inputs.setdefault(name, []).append(line[2:])
            else:
                name, _, value = line.partition(":")
                inputs[name] = [value[1:]] if value else []
        return cls({name: "\n".join(lines) for name, lines in inputs.items()})


@dataclass(frozen=True)
class Difference:
    """One input that two keys do not share: its name, both values (None: absent), and the lines that differ."""

    name: str
    before: str | None
    after: str | None

    @property
    def lines(self) -> list[str]:
        """Lines marked `- ` and `+ `: differing lines of a value with several, differing words of a long list."""
        before, after = self.before or "", self.after or ""
        if "\n" in before + after:
            found = list(difflib.unified_diff(before.split("\n"), after.split("\n"), lineterm="", n=0))[2:]
            return [f"{line[0]} {line[1:]}" for line in found if line[0] in "+-"]
        old, new = before.split(), after.split()
        if min(len(old), len(new)) > MANY_WORDS:
            sides = ((sign, sorted(set(a) - set(b))) for sign, a, b in (("-", old, new), ("+", new, old)))
            return [f"{sign} {' '.join(words)}" for sign, words in sides if words]
        return [f"{sign} {v}" for sign, v in (("-", self.before), ("+", self.after)) if v is not None]


def differences(before: Key, after: Key) -> list[Difference]:
    """Inputs that differ, in the order of the keys."""
    names = dict.fromkeys([*before.inputs, *after.inputs])
    pairs = ((name, before.inputs.get(name), after.inputs.get(name)) for name in names)
    return [Difference(name, a, b) for name, a, b in pairs if a != b]


def region_key(
    region: str, device: torch.device, settings: Mapping[str, Any], functions: Iterable[Callable[..., Any]]
) -> Key:
    """The key of a compiled region.

    Args:
        region: its text.
        device: of its tensors, with an index.
        settings: of Inductor, for this region.
        functions: references of the ops that were inlined into it.
    """
    from dgraph.private.inductor import inductor_config

    return Key(
        {
            "format": FORMAT,
            "kind": "region",
            **environment(device),
            **_named(sources_of(functions)),
            "region": region,
            SETTINGS: "\n".join(f"{k} = {v!r}" for k, v in sorted((inductor_config() | dict(settings)).items())),
        }
    )


def graph_key(facts: Mapping[str, str], device: torch.device, family: Path) -> Key:
    """The key of a captured graph.

    Args:
        facts: everything that the forward depends on, by name.
        device: of the weights; a graph may name it.
        family: source file of the module whose forward was captured.
    """
    import torch

    return Key(
        {
            "format": FORMAT,
            "kind": "graph",
            "torch": f"{torch.__version__} git {torch.version.git_version}",
            "transformers": _version("transformers"),
            "device": str(device),
            **facts,
            "source of the family": hash_of(family),
            **_named(sources([CAPTURER, *modules_beside("dgraph.ops.registry")])),
        }
    )


def tuning_key(op: str, device: torch.device, modules: Iterable[str]) -> Key:
    """The key of the tilings of an op's kernel on a kind of device, for all shapes together.

    Args:
        op: its name.
        device: any of that kind; its index is left out.
        modules: of the kernel and its tilings.
    """
    return Key(
        {
            "format": FORMAT,
            "kind": "tuning",
            "op": op,
            **environment(device),
            "device": device.type,
            **_named(sources([TUNER, *modules])),
        }
    )


def profile_key(facts: Mapping[str, str], device: torch.device, modules: Iterable[str]) -> Key:
    """The key of the measured memory and time of a program.

    Args:
        facts: the model, the recipe and the budgets, by name.
        device: where it ran.
        modules: of the kernels.
    """
    return Key(
        {
            "format": FORMAT,
            "kind": "profile",
            **facts,
            **environment(device),
            **_named(sources([PROFILER, *modules])),
        }
    )


def kernel_keys(target: str, modules: Mapping[str, str]) -> dict[str, Key]:
    """The keys of the compiled kernels of each module of kernels, by its name, and of the libraries that launch them.

    A kernel is found by Triton's hash, so these keys only group kernels into entries. A change of a source or of Triton
    begins new entries, and the old ones are the first to go.

    Args:
        target: the device target that they are compiled for, such as "cuda 90".
        modules: of kernels, by the name that they have in the key.
    """
    built = {"python": _python(), "machine": _machine()}
    inputs = {name: _named(sources([module])) for name, module in modules.items()} | {LAUNCHERS: built}
    common = {"triton": _version("triton"), "device": target}
    return {name: Key({"format": FORMAT, "kind": "kernels", "op": name, **common, **i}) for name, i in inputs.items()}


def environment(device: torch.device) -> dict[str, str]:
    """Dependencies of compiled code besides the region: torch, triton, Python, the device, numeric settings."""
    import torch

    found = {
        "torch": f"{torch.__version__} git {torch.version.git_version}",
        "triton": _version("triton"),
        "python": _python(),
        "machine": _machine(),
        "device": str(device),
        "matmul precision": _matmul_precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
    }
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return found | {
            "device name": f"{facts.name}, {facts.multi_processor_count} multiprocessors",
            "capability": f"{facts.major}.{facts.minor}",
            "cuda": str(torch.version.cuda),
        }
    # Inductor's C++ is built for exactly this processor, and for this number of threads.
    return found | {
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "processor features": processor_features(),
        "threads": str(torch.get_num_threads()),
    }


def program_key(device: torch.device, compiled: bool) -> Key:
    """The key of the machines on which all artifacts of a program are found: this one, and those that are alike.

    Args:
        device: of the program.
        compiled: False for a program that runs op by op, which any processor can.
    """
    import torch

    here = {"dgraph": f"{_version('dgraph')} sources {package_hash('dgraph')[:12]}"}
    here["transformers"] = _version("transformers")
    plain = {"torch": f"{torch.__version__} git {torch.version.git_version}", "device": str(device)}
    return Key(here | (environment(device) if compiled else plain))


def sources_of(functions: Iterable[Callable[..., Any]]) -> dict[str, str]:
    """SHA-256 by name of the sources of functions, of the code that compiles them, and of all that these import.

    A function from a file that is no module (a script) has the hash of that file; one from no file has that of its
    code.
    """
    found = sources([MAKER, *(function.__module__ for function in functions)])
    for function in functions:
        path, known = Path(inspect.getfile(function)), path_of(function.__module__)
        if known is None or known.resolve() != path.resolve():
            code = hashlib.sha256(_text_of(function.__code__).encode()).hexdigest()
            found[f"{path.name} {function.__qualname__}"] = hash_of(path) if path.is_file() else code
    return found


def _python() -> str:
    return str(sysconfig.get_config_var("SOABI") or platform.python_version())


def _machine() -> str:
    return f"{platform.system()} {platform.machine()}"


def _matmul_precision() -> str:
    import torch

    # torch.get_float32_matmul_precision() raises where a program has used the newer settings.
    backends: Any = torch.backends
    per_backend = (f"{name} {getattr(backends, name).matmul.fp32_precision}" for name in ("cuda", "mkldnn"))
    return f"{backends.fp32_precision}, {', '.join(per_backend)}"


def _named(found: Mapping[str, str]) -> dict[str, str]:
    return {f"source {name}": digest for name, digest in found.items()}


def _text_of(code: CodeType) -> str:
    """Text of the behaviour of a code object, without its file and lines."""
    constants = [_text_of(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


@lru_cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"

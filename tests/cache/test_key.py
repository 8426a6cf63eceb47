"""Keys: each thing that compiled code depends on changes them, nothing else does, and they say what differs."""

from __future__ import annotations

import importlib
import platform
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor

from dgraph.cache import key as keys
from dgraph.cache import sources
from dgraph.cache.key import Difference, Key, differences, region_key, sources_of
from dgraph.ops import OPS
from dgraph.private.inductor import inductor_config, inductor_settings
from dgraph.private.processor import processor_features

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TEXT = "device cpu\n%0 = input: f32[s0, 4]\n\n  %1 = odd: line\nreturn %0"
NORM = OPS["rms_norm"].reference


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    facts = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    return facts


def made(device: torch.device = CPU, text: str = TEXT, functions: Any = (NORM,), **settings: Any) -> Key:
    return region_key(text, device, settings, functions)


def changed(before: Key, after: Key) -> list[str]:
    assert (before.digest != after.digest) == bool(differences(before, after))
    return [d.name for d in differences(before, after)]


def test_a_key_comes_back_from_its_text() -> None:
    for key in (made(), Key({"a": "", "b": "x: y", "c": "\nx\n\n  y\n"})):
        assert dict(Key.of_text(key.text).inputs) == dict(key.inputs)
        assert Key.of_text(key.text).digest == key.digest
    assert len(made().digest) == 64
    assert dict(Key.of_text("  not a key\n").inputs) == {"": "not a key"}, "of a damaged entry"


def test_the_same_things_make_the_same_key() -> None:
    assert made().text == made().text
    assert made(GPU).text == made(GPU).text
    assert made(a=1, b=2).digest == made(b=2, a=1).digest


PATCHES: dict[str, tuple[Any, str, Any]] = {
    "format": (keys, "FORMAT", "dgraph artifact 0"),
    "torch": (torch, "__version__", "2.12.0"),
    "triton": (keys, "_version", lambda package: "1.0"),
    "python": (sysconfig, "get_config_var", lambda name: "cpython-399"),
    "machine": (keys.platform, "machine", lambda: "sparc"),
    "matmul precision": (keys, "_matmul_precision", lambda: "tf32"),
    "deterministic": (torch, "are_deterministic_algorithms_enabled", lambda: True),
}
CPU_PATCHES: dict[str, tuple[Any, str, Any]] = {
    "vectors": (torch.backends.cpu, "get_cpu_capability", lambda: "AVX"),
    "processor features": (keys, "processor_features", lambda: "sse"),
    "threads": (torch, "get_num_threads", lambda: 77),
}


@pytest.mark.parametrize("name", PATCHES | CPU_PATCHES)
@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_what_the_code_depends_on_is_in_the_key(
    monkeypatch: pytest.MonkeyPatch, name: str, device: torch.device
) -> None:
    before = made(device)
    monkeypatch.setattr(*(PATCHES | CPU_PATCHES)[name])
    on_gpu_too = name in PATCHES
    assert changed(before, made(device)) == ([name] if on_gpu_too or device == CPU else [])


def test_a_build_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    before = made()
    monkeypatch.setattr(torch.version, "git_version", "0123456")
    assert changed(before, made()) == ["torch"]


def test_a_device(a_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    before = made(GPU)
    assert changed(before, made(torch.device("cuda", 1))) == ["device"]
    a_gpu.name = "NVIDIA H100"
    assert changed(before, made(GPU)) == ["device name"]
    a_gpu.name, a_gpu.minor = "NVIDIA H200", 3
    assert changed(before, made(GPU)) == ["capability"]
    a_gpu.minor, a_gpu.multi_processor_count = 0, 66
    assert changed(before, made(GPU)) == ["device name"]
    a_gpu.multi_processor_count = 132
    monkeypatch.setattr(torch.version, "cuda", "14.0")
    assert changed(before, made(GPU)) == ["cuda"]


def test_a_region() -> None:
    (found,) = differences(made(), made(text=TEXT.replace("s0, 4", "s0, 8")))
    assert found.name == "region"
    assert found.lines == ["- %0 = input: f32[s0, 4]", "+ %0 = input: f32[s0, 8]"]


def test_settings_of_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = differences(made(), made(**{"triton.cudagraphs": True}))
    assert found.name == "inductor settings"
    assert found.lines == ["- triton.cudagraphs = False", "+ triton.cudagraphs = True"]
    with inductor.patch("max_autotune", not inductor.max_autotune):
        other = made()
    assert changed(made(), other) == ["inductor settings"]
    with inductor.patch({"cpp.cxx": (None, "clang++"), "compile_threads": 1}):
        assert changed(made(), made()) == []
    assert inductor_settings(CPU) == {}


def test_regions_never_start_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_ENABLE_PDL", "1")
    assert inductor_settings(torch.device("cuda", 0))["triton.enable_pdl"] is False


def test_settings_are_the_same_in_every_process() -> None:
    values = [v for value in inductor_config().values() for v in (value if isinstance(value, list) else [value])]
    assert not [v for v in values if "0x" in repr(v)]
    assert "cpp.cxx" not in inductor_config()


def test_sources_of_inlined_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set(sources_of([NORM]))
    assert found >= {
        "dgraph/lowering/inductor.py",
        "dgraph/lowering/regions.py",
        "dgraph/types/shapes.py",
        "dgraph/private/inductor.py",
        "dgraph/private/torch.py",
        "dgraph/ops/registry.py",  # rms_norm calls a function of it
        "dgraph/ops/rows/rms_norm.py",
    }
    assert not [name for name in found if name.startswith(("dgraph/passes", "dgraph/api")) or "/triton/" in name]
    assert changed(made(), made(functions=[NORM, OPS["rope"].reference])) == ["source dgraph/ops/rows/rope.py"]
    before, hashed = made(), sources.hash_of

    def edited(path: Path) -> str:
        return "0" * 64 if path.name == "rms_norm.py" else hashed(path)

    monkeypatch.setattr(sources, "hash_of", edited)
    assert changed(before, made()) == ["source dgraph/ops/rows/rms_norm.py"]


def test_every_inline_op_has_a_source() -> None:
    for op in OPS.values():
        if op.inline:
            module = op.reference.__module__
            assert module.endswith(f".{op.name}")
            assert f"{module.replace('.', '/')}.py" in sources_of([op.reference])


def test_imports_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "outsider"
    (package / "deep").mkdir(parents=True)
    files = {
        "__init__": "from outsider import everything",
        "a": "import torch, outsider.b as b  # and more\nfrom . import c\nfrom dgraph.ops import op_of\n"
        "from dgraph.ops.rows import (rope,\n  rms_norm as f)",
        "b": "def f():\n    from outsider.deep.d import g\n    from .. import above",
        "c": "if TYPE_CHECKING:\n    from outsider.e import E\n\nfrom outsider.none import x",
        "d": "import torch, \\\n  outsider.f\nfrom . import (  # (a)\n  g,\n)",
        "deep/__init__": "",
        "deep/d": "from outsider import d\nraise RuntimeError('it is not imported for this')",
        "e": "",
        "f": "",
        "g": "",
    }
    for name, text in files.items():
        (package / f"{name}.py").write_text(text)
    for name in ("b", "b_parts", "bother", "e", "other"):
        (package / f"{name}.cpp").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    found = sources.sources(["outsider.a"])
    mine = [name for name in found if name.startswith("outsider")]
    names = ("a.py", "b.cpp", "b.py", "b_parts.cpp", "c.py", "d.py", "deep/d.py", "f.py", "g.py")
    assert mine == [f"outsider/{name}" for name in names], "with C++ that lies beside a module"
    assert {"dgraph/ops/rows/rope.py", "dgraph/ops/rows/rms_norm.py", "dgraph/ops/registry.py"} <= found.keys()
    assert "dgraph/ops/__init__.py" in found
    assert not [name for name in found if name.startswith(("dgraph/api", "dgraph/__init__", "torch"))]
    assert sources.modules_beside("outsider.a") == tuple(f"outsider.{name}" for name in "abcdefg")
    assert sources.modules_beside("alone") == ("alone",)


@pytest.mark.parametrize("where", ["a package", "a script", "no file"])
def test_an_inline_op_from_outside_is_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    name = f"outside_{where.replace(' ', '_')}"
    keyed = []
    for text in ("def f(x):\n    return 2 * x\n", "def f(x):\n    return 3 * x\n"):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        if where == "a package":
            monkeypatch.syspath_prepend(tmp_path)
            importlib.invalidate_caches()
        scope: dict[str, Any] = {"__name__": name if where == "a package" else "__main__"}  # which is pytest's own file
        exec(compile(text, "<stdin>" if where == "no file" else str(path), "exec"), scope)
        keyed.append(made(functions=[NORM, scope["f"]]))
    (found,) = differences(*keyed)
    file = {"a package": f"{name}.py", "a script": f"{name}.py f", "no file": "<stdin> f"}[where]
    assert found.name == f"source {file}"


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ("1", "2", ["- 1", "+ 2"]),
        (None, "2", ["+ 2"]),
        ("1", None, ["- 1"]),
        ("a b c", "a b d", ["- a b c", "+ a b d"]),
        (" ".join("abcdefghijklmnop"), " ".join("abcdefghijklmnoz"), ["- p", "+ z"]),
        ("a\nb\nc", "a\nc", ["- b"]),
        ("a\n--- b", "a\n+++ b", ["- --- b", "+ +++ b"]),
    ],
)
def test_lines_of_a_difference(before: str | None, after: str | None, lines: list[str]) -> None:
    assert Difference("x", before, after).lines == lines


@pytest.mark.parametrize(
    ("text", "features"),
    [("vendor: x\nflags\t\t: sse fma avx\nflags : y\n", "avx fma sse"), ("Features : neon asimd\n", "asimd neon")],
)
def test_processor_features(monkeypatch: pytest.MonkeyPatch, text: str, features: str) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self, **_: text)
    assert processor_features.__wrapped__() == features


def test_processor_without_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    read: Callable[..., str] = lambda self, **_: (_ for _ in ()).throw(OSError())  # noqa: E731
    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(platform, "processor", lambda: "arm")
    assert processor_features.__wrapped__() == "arm"

"""Compiled kernels around a launch: Triton's libraries, what it compiled, and when a program restores and keeps."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dgraph.cache import upkeep
from dgraph.cache.store import Store
from dgraph.lowering import kernels
from dgraph.lowering.kernels import Kernels
from dgraph.private import triton as triton_private
from tests.compiled import compiled
from tests.lowering.one_kernel import HASH, TARGET, Binary, files_below

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("error::dgraph.errors.DgraphWarning")


def extension(folder: Path) -> Any:
    """A module in C, copied to where Triton would have built it."""
    import _json

    origin = Path(getattr(_json, "__file__", None) or pytest.skip("this Python has its modules in C built in"))
    folder.mkdir(parents=True)
    copied = shutil.copy(origin, folder / origin.name)
    spec = spec_from_file_location("_json", copied)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("wrapped", [False, True])
def test_libraries_that_launch_are_kept_and_loaded_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrapped: bool
) -> None:
    from triton.runtime import driver

    triton_cache = tmp_path / "triton"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(triton_cache))
    name = "VOV2XK5LVOV2XK5LVOV2XK5LVOV2XK5LVOV2XK5LVOV2XK5LVOVQ"  # base 32 of 32 bytes 0xab
    module = extension(tmp_path / "theirs" / name)
    launch = module.encode_basestring
    binary = Binary.at(tmp_path / "kernel")
    binary.hash = "cd" * 32
    (tmp_path / "kernel" / "_list_kept.json").write_text(json.dumps({"hash": binary.hash}))
    binary._run = SimpleNamespace(launch=(lambda *args: launch(*args)) if wrapped else launch)
    monkeypatch.setattr(kernels, "loaded_kernels", lambda package: binary.loaded())
    asked: list[str] = []
    utils = SimpleNamespace(load_binary=module.scanstring)
    active = SimpleNamespace(utils=utils, get_current_device=lambda: asked.append("device"))
    monkeypatch.setattr(type(driver), "active", active)
    store = Store(tmp_path / "cache")
    assert Kernels(TARGET, store).save() == 2
    assert sorted(e.what for e in upkeep.entries(store)) == ["kernels: keep_index", "kernels: launchers"]
    assert asked == []
    found = Kernels(TARGET, store)
    found.prepare()
    assert (found.restored, asked) == ([HASH], ["device"])
    assert list(files_below(triton_cache / name)) == [Path(module.__file__).name]
    Kernels("cuda 100", Store(tmp_path / "other")).prepare()
    assert asked == ["device"]


def test_a_library_that_is_loaded_again_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton loads it for every kernel of a signature, and Python then fills the module of that name anew."""
    from triton.runtime import driver

    compiler = shutil.which("cc") or pytest.skip("needs a C compiler")
    source = """
        #include <Python.h>
        static PyObject *launch(PyObject *self, PyObject *args) { Py_RETURN_NONE; }
        static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
        static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher", NULL, -1, methods};
        PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&module); }
    """
    (tmp_path / "launcher.c").write_text(source)
    built = tmp_path / "launcher.so"
    headers = f"-I{sysconfig.get_paths()['include']}"
    subprocess.run([compiler, "-shared", "-fPIC", headers, tmp_path / "launcher.c", "-o", built], check=True)
    names = [
        "VOV2XK5LVOV2XK5LVOV2XK5LVOV2XK5LVOV2XK5LVOV2XK5LVOVQ",
        "ZXG43TONZXG43TONZXG43TONZXG43TONZXG43TONZXG43TONZXGQ",
    ]
    launchers = []
    for name in (*names, names[0]):
        (tmp_path / name).mkdir(exist_ok=True)
        file = tmp_path / name / built.name
        if not file.exists():
            shutil.copy(built, file)
        spec = spec_from_file_location("launcher", file)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        launchers.append(module.launch)
    assert Path(launchers[1].__self__.__file__).parent.name == names[0], "not its own"
    monkeypatch.setattr(type(driver), "active", SimpleNamespace(utils=SimpleNamespace(load_binary=len)))
    binaries = [SimpleNamespace(_run=SimpleNamespace(launch=launch)) for launch in launchers]
    assert triton_private.launcher_libraries(binaries) == {
        digit * 32: tmp_path / name / built.name for digit, name in zip(("ab", "cd"), names, strict=True)
    }


def test_the_listener_counts_ours_and_tells_who_listened_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    heard: list[str] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **event: heard.append(event["src"].name))
    found = triton_private.compilations.__wrapped__(("dgraph.ops.triton.rows", "outside.kernels"))
    for module, hit in (("dgraph.ops.triton.rows", False), ("dgraph.ops.triton.rows", True), ("other", False)):
        source = SimpleNamespace(fn=SimpleNamespace(module=module), name="_k")
        knobs.compilation.listener(src=source, metadata={}, metadata_group={}, times=None, cache_hit=hit)
    assert (found, heard) == (["dgraph.ops.triton.rows._k"], ["_k"] * 3)


def test_a_cpu_keeps_no_kernels() -> None:
    assert triton_private.target_of(torch.device("cpu")) is None


def test_generate_and_warm_up_keep_what_they_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiled("tiny_sdar", "dense")
    assert made.kernels.compiled == []
    seen: list[str] = []

    @contextmanager
    def remembered() -> Iterator[None]:
        seen.append("before")
        yield
        seen.append("after")

    monkeypatch.setattr(made.kernels, "remembered", remembered)
    monkeypatch.setattr(
        made._session,
        "generate",
        lambda *_, **__: seen.append("run") or SimpleNamespace(token_ids=[], stats=None, kv=None),
    )
    monkeypatch.setattr(made._session, "warm_up", lambda *_: seen.append("warm"))
    made.generate(input_ids=[[5]])
    made.warm_up(1, 64)
    assert seen == ["before", "run", "after", "before", "warm", "after"]


ON_A_GPU = """
import json, sys, warnings, dgraph
warnings.simplefilter("error", dgraph.DgraphWarning)
sizes = {"warmup": dgraph.WarmUp(batch=2, tokens=64)}
made = dgraph.optimize("tiny_sdar", "focus", device="cuda", artifacts=sys.argv[1], **sizes)
out = made.generate(input_ids=[[5, 6, 7]], max_new_tokens=16)
print(json.dumps({"ids": out.token_ids, "compiled": made.kernels.compiled, "restored": len(made.kernels.restored)}))
"""


@pytest.mark.gpu
def test_on_a_gpu_a_second_process_compiles_nothing_and_needs_no_compiler(tmp_path: Path) -> None:
    def start(name: str, **environment: str) -> dict[str, Any]:
        kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        caches = {
            "TRITON_CACHE_DIR": str(tmp_path / name),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"{name} inductor"),
        }
        command = [sys.executable, "-c", ON_A_GPU, str(tmp_path / "cache")]
        done = subprocess.run(
            command, cwd=ROOT, env={**kept, **caches, **environment}, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    first = start("first")
    assert len(first["compiled"]) > 3
    second = start("second", CC="/bin/false")
    assert second["compiled"] == []
    assert second["restored"] > len(first["compiled"])
    assert second["ids"] == first["ids"]

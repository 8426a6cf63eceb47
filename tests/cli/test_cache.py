"""`dgraph cache` and `dgraph compile`."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from dgraph.cache.key import SETTINGS, Key
from dgraph.cache.store import Store
from dgraph.lowering import inductor
from dgraph.lowering.tuning import FILE
from dgraph.ops.tuning import Choice, LogitsShape
from tests.cache.stores import FILES, flip, folders
from tests.cli.conftest import Run

REGION = "device cpu\n%0 = input: f32[s0, 4]\n%1 = aten.mul.Tensor((%0, {}), {{}}): f32[s0, 4]\nreturn %1"


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The user's own, empty."""
    root = tmp_path_factory.mktemp("caches") / "cache"
    monkeypatch.setenv("DGRAPH_CACHE", str(root))
    return Store(root)


def key(factor: str = "2.0", **changes: str) -> Key:
    inputs = {"kind": "region", "torch": "2.11.0 git abc", "device": "cpu", "region": REGION.format(factor)}
    return Key({**inputs, SETTINGS: "max_autotune = False\nfreezing = False", **changes})


def filled(store: Store, *keys: Key) -> list[str]:
    for i, found in enumerate(keys):
        assert store.put(found, FILES)
        os.utime(store.entries / found.digest, (1e9 - i, 1e9 - i))
    return [found.digest for found in keys]


def printed(result: Any, code: int = 0) -> list[str]:
    assert (result.exit_code, result.stderr) == (code, ""), result.output
    return result.stdout.splitlines()


def one_object(result: Any, code: int = 0) -> dict[str, Any]:
    (line,) = printed(result, code)
    return json.loads(line)


def refused(result: Any, *parts: str) -> None:
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    message = " ".join(result.stderr.split())
    for part in parts:
        assert part in message, message


def test_ls(run: Run, store: Store) -> None:
    assert printed(run("cache", "ls")) == [f"{store.root} is empty"]
    gpu = key("3.0", device="cuda:0", **{"device name": "NVIDIA H200, 132 multiprocessors"})
    a, b = filled(store, key(), gpu)
    store.set_aside(b)
    title, first, second = printed(run("cache", "ls"))
    assert title.split() == ["artifact", "size", "used", "torch", "device", "what"]
    assert first.startswith(a[:12])
    assert first.split("  ")[-1] == "region: mul"
    assert "2.11.0" in first
    assert f"{b[:12]} damaged" in second
    assert "NVIDIA H200 " in second
    found = one_object(run("cache", "ls", "--json"))
    assert (found["path"], found["limit"]) == (str(store.root), 4 << 30)
    facts = [(e["artifact"], e["damaged"], e["used"]) for e in found["artifacts"]]
    assert facts == [(a, False, 1e9), (b, True, 1e9 - 1)]
    assert found["size"] == sum(e["size"] for e in found["artifacts"]) > len(FILES["kernel0.so"])


def test_another_folder(run: Run, store: Store, tmp_path: Path) -> None:
    filled(store, key())
    assert printed(run("cache", "ls", "--cache", tmp_path / "other")) == [f"{tmp_path / 'other'} is empty"]


def test_show(run: Run, store: Store) -> None:
    (a,) = filled(store, key())
    lines = printed(run("cache", "show", a[:6]))
    assert lines[0] == f"artifact  {a}"
    assert lines[1] == f"folder    {store.entries / a}"
    assert "kernel0.so (260 B)" in lines[4]
    assert "torch: 2.11.0 git abc" in lines
    assert "  %0 = input: f32[s0, 4]" in lines
    assert f"{SETTINGS}: 2, see --full" in lines
    assert "  freezing = False" in printed(run("cache", "show", a[:6], "--full"))
    found = one_object(run("cache", "show", a, "--json"))
    assert found["key"] == dict(key().inputs)
    assert found["files"]["kernel0.so"] == 260
    refused(run("cache", "show", "nothing"), "unknown artifact 'nothing'", f"Known: {a[:12]}")


def test_tilings_that_were_timed(run: Run, store: Store) -> None:
    pytest.importorskip("triton")
    from dgraph.ops.lm_head.triton.lm_head import Tiling

    shapes = [LogitsShape(rows, 700, "bfloat16") for rows in (8, 16)]
    choices = [
        Choice(shapes[0], Tiling(1024, 2), 2e-6, 3e-6, 5, (("block=4096 splits=1 warps=8", "out of shared memory"),)),
        Choice(shapes[1], Tiling(1024, 1), 4e-6, None, 1),
    ]
    tilings = {FILE: json.dumps({"op": "lm_head", "choices": [c.to_json() for c in choices]}).encode()}
    gpu = key(kind="tuning", op="lm_head", region="", device="cuda", **{"device name": "NVIDIA H200, 132 multi"})
    assert store.put(gpu, tilings)
    assert printed(run("cache", "ls"))[1].split("  ")[-1] == "tuning: lm_head"
    lines = printed(run("cache", "show", gpu.digest))
    assert "op: lm_head" in lines
    title, first, second, empty, failed = lines[lines.index("") + 1 :][-5:]
    assert title.split("  ")[0] == "shape"
    assert first.split()[3:] == ["2.0", "3.0", "1.50", "5", "block=1024", "splits=2", "warps=4"]
    assert second.startswith("rows=16 vocab=700 dtype=bfloat16")
    assert second.split()[3:7] == ["4.0", "-", "-", "1"]
    assert (empty, failed) == ("", "not timed: block=4096 splits=1 warps=8: out of shared memory")
    found = one_object(run("cache", "show", gpu.digest, "--json"))
    assert [c["tiling"]["splits"] for c in found["choices"]] == [2, 1]
    flip(store.entries / gpu.digest / FILE, 30)
    result = run("cache", "show", gpu.digest, "--json")
    assert result.exit_code == 2
    assert "choices.json is not what was written; run dgraph cache verify" in " ".join(result.stderr.split())


def test_compiled_kernels(run: Run, store: Store) -> None:
    from dgraph.cache.key import kernel_keys
    from dgraph.lowering.kernels import FILE, packed

    hopper = kernel_keys("cuda 90", {"lm_head": "dgraph.ops.lm_head.triton.lm_head"})["lm_head"]
    code = {"ab" * 32: {"_best.json": b"{}", "_best.cubin": bytes(3000)}, "cd" * 32: {"_best.cubin": bytes(1000)}}
    assert store.put(hopper, {FILE: packed(code)})
    listed = printed(run("cache", "ls"))[1]
    assert listed.split("  ")[-1] == "kernels: lm_head"
    assert " -      cuda 90 " in listed
    lines = printed(run("cache", "show", hopper.digest))
    assert lines[-2].split() == ["kernel", "specialisations", "code"]
    assert lines[-1].split() == ["_best", "2", "3.9", "KiB"]
    assert one_object(run("cache", "show", hopper.digest, "--json"))["kernels"] == {"_best": [3000, 1000]}
    assert store.put(hopper, {FILE: b"junk"}, replace=True)
    result = run("cache", "show", hopper.digest)
    assert result.exit_code == 2
    assert "is damaged: File is not a zip file" in " ".join(result.stderr.split())


def test_why(run: Run, store: Store) -> None:
    a, b = filled(store, key(), key("3.0", torch="2.13.0 git def"))
    assert printed(run("cache", "why", a[:8], b[:8])) == [
        "2 of 5 inputs differ",
        "",
        "@@ torch",
        "- 2.11.0 git abc",
        "+ 2.13.0 git def",
        "",
        "@@ region",
        "- %1 = aten.mul.Tensor((%0, 2.0), {}): f32[s0, 4]",
        "+ %1 = aten.mul.Tensor((%0, 3.0), {}): f32[s0, 4]",
    ]
    found = one_object(run("cache", "why", b, a, "--json"))
    assert (found["before"], found["after"]) == (b, a)
    assert found["differ"][0] == {"input": "torch", "lines": ["- 2.13.0 git def", "+ 2.11.0 git abc"]}
    assert printed(run("cache", "why", a, a)) == ["0 of 5 inputs differ"]
    (c,) = filled(store, key(**{SETTINGS: "\n".join(f"setting{i} = 0" for i in range(20))}))
    assert printed(run("cache", "why", a, c))[-2:] == ["+ setting9 = 0", "... 10 more lines, see --full"]
    assert printed(run("cache", "why", a, c, "--full"))[-1] == "+ setting19 = 0"


def test_verify(run: Run, store: Store) -> None:
    a, b = filled(store, key(), key("3.0"))
    assert printed(run("cache", "verify")) == ["2 of 2 artifacts are intact"]
    flip(store.entries / b / "region.pickle", 4)
    assert printed(run("cache", "verify", a)) == ["1 of 1 artifacts are intact"]
    reason = "region.pickle is not what was written"
    assert printed(run("cache", "verify"), 1) == [
        f"{b[:12]}  damaged, set aside: {reason}",
        "1 of 2 artifacts are intact",
    ]
    assert one_object(run("cache", "verify", "--json")) == {"ok": True, "checked": 1, "damaged": []}
    flip(store.entries / a / "region.pickle", 4)
    found = one_object(run("cache", "verify", "--json"), 1)
    assert found == {"ok": False, "checked": 1, "damaged": [{"artifact": a, "reason": reason}]}


def test_gc(run: Run, store: Store) -> None:
    a, b, c = filled(store, key(), key("3.0"), key("4.0"))
    store.set_aside(c)
    assert printed(run("cache", "gc"))[0].startswith("1 removed, ")
    assert set(folders(store)) == {a, b}
    found = one_object(run("cache", "gc", "--limit", "1.5K", "--json"))
    assert (found["removed"], folders(store)) == ([b], [a])
    assert found["freed"] > 460
    assert printed(run("cache", "gc", "--limit", "0")) == [f"1 removed, {found['freed']} B freed"]
    refused(run("cache", "gc", "--limit", "lots"), "--limit is a size such as 500M or 4G, got 'lots'")


def test_rm(run: Run, store: Store) -> None:
    a, b, c = filled(store, key(), key("3.0"), key("4.0"))
    assert printed(run("cache", "rm", a[:10]))[0].startswith("1 removed, ")
    assert set(folders(store)) == {b, c}
    refused(run("cache", "rm"), "give the artifacts to remove, or --all")
    refused(run("cache", "rm", b, "--all"), "give the artifacts to remove, or --all")
    refused(run("cache", "rm", b, "nothing"), "unknown artifact 'nothing'")
    assert set(folders(store)) == {b, c}
    assert set(one_object(run("cache", "rm", "--all", "--json"))["removed"]) == {b, c}
    assert folders(store) == []


def test_export_and_import(run: Run, store: Store, tmp_path: Path) -> None:
    a, b = filled(store, key(), key("3.0"))
    assert printed(run("cache", "export", "all.zip"))[0].startswith("2 artifacts, ")
    assert one_object(run("cache", "export", "one.zip", a, "--json"))["artifacts"] == [a]
    refused(run("cache", "export", "all.zip"), "all.zip exists; give another name")
    elsewhere = ("--cache", tmp_path / "other")
    refused(run("cache", "import", "all.zip", *elsewhere), "contains compiled code that dgraph will run", "Add --trust")
    assert not (tmp_path / "other").exists()
    found = one_object(run("cache", "import", "one.zip", "--trust", *elsewhere, "--json"))
    assert (found["imported"], found["present"]) == ([a], [])
    assert printed(run("cache", "import", "all.zip", "--trust", *elsewhere)) == [
        "1 artifacts imported, 1 already in the cache"
    ]
    assert set(folders(Store(tmp_path / "other"))) == {a, b}
    with zipfile.ZipFile("bad.zip", "w") as out:
        out.writestr("readme", "x")
    refused(run("cache", "import", "bad.zip", "--trust", *elsewhere), "bad.zip is not an intact export")


def test_path(run: Run, store: Store) -> None:
    assert printed(run("cache", "path")) == [str(store.root)]
    assert one_object(run("cache", "path", "--json")) == {"path": str(store.root), "exists": True}


def test_a_cache_of_others_is_refused(run: Run, store: Store) -> None:
    store.root.chmod(0o770)
    for command in (("ls",), ("verify",), ("gc",), ("rm", "--all")):
        refused(run("cache", *command), "can be written by others (mode 0770), and artifacts are code")
    refused(run("compile", "tiny_sdar"), "can be written by others")


def test_help_and_unknown_commands(run: Run) -> None:
    listed = run("cache").output
    for command in ("ls", "show", "why", "verify", "gc", "rm", "export", "import", "path"):
        assert f" {command} " in listed
    refused(run("cache", "list"), "No such command 'list'")


# -- compile -----------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of Inductor, a compiler that compiles nothing."""
    monkeypatch.setattr(inductor, "compile_region", lambda module, *_: module.forward)
    monkeypatch.setattr(inductor, "pack_region", lambda compiled: {"region.pickle": b"code"})
    monkeypatch.setattr(inductor, "load_region", lambda files, folder, settings: lambda *inputs: ())
    monkeypatch.setattr(inductor, "_COMPILED", {})


@pytest.mark.usefixtures("quick")
def test_compile_fills_the_cache(run: Run, folder: Path, store: Store) -> None:
    found = one_object(run("compile", folder, "-r", "dense", "--json"))
    count = found["compiled"]
    assert count == len(folders(store)) - 1 > 1, "the regions, and the captured graph"
    assert (found["present"], found["cache"], found["recipe"]["recipe"]) == (0, str(store.root), "dense")
    assert found["kernels"] == 0
    inductor._COMPILED.clear()
    (line,) = printed(run("compile", folder, "-r", "dense"))
    assert f" under dense: 0 regions compiled, {count} already in the cache (" in line


@pytest.mark.usefixtures("quick")
def test_compile_that_cannot_fill_it(run: Run, folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    result = run("compile", folder, "-r", "dense")
    assert (result.exit_code, result.stdout) == (2, "")
    warning, error = result.stderr.splitlines()
    assert warning.startswith("warning: the artifact cache")
    assert "No space left on device" in warning
    assert error.startswith("error: ")
    assert "regions could not be stored in" in error


def test_compile_refuses_bad_input(run: Run, store: Store) -> None:
    refused(run("compile", "tiny_sdar", "-r", "focsu"), "unknown recipe 'focsu'")
    refused(run("compile", "tiny_sdar", "-o", "alhpa=1"), "Did you mean 'alpha'?")
    refused(run("compile", "tiny_sdra"), "tiny_sdra")
    refused(run("compile", "tiny_sdar", "--device", "cudda"), "cudda")
    refused(run("compile", "tiny_sdar", "--tokens", 64), "give that too, or leave it out")

"""Compiled regions in a store: later processes compile nothing, and whatever is wrong with it, results are right."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dgraph.cache import upkeep
from dgraph.cache.store import Store
from dgraph.lowering import inductor
from dgraph.lowering.regions import RegionCompiler
from dgraph.lowering.traced import trace
from tests.cache.stores import flip, folders
from tests.lowering.one_region import inputs, region, run

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("error::dgraph.errors.DgraphWarning")


def process(store: Path, **environment: str) -> subprocess.Popen[str]:
    """A process that compiles or loads the region, for the CPU alone: beside a GPU, Triton would compile its driver."""
    environment = {"CUDA_VISIBLE_DEVICES": "", **environment}
    command = [sys.executable, "-m", "tests.lowering.one_region", str(store)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, **pipes)


def result_of(running: subprocess.Popen[str]) -> dict[str, Any]:
    out, told = running.communicate(timeout=300)
    assert running.returncode == 0, told
    assert "UserWarning" not in told, told
    assert "DgraphWarning" not in told, told
    return json.loads(out)


@pytest.fixture(scope="module")
def expected() -> list[list[float]]:
    compiler = RegionCompiler("eager")
    (y,) = compiler.function(*region())(*inputs())
    return y.tolist()


@pytest.fixture(scope="module")
def made_by_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A store, and what two processes say that found it empty at the same time."""
    store = tmp_path_factory.mktemp("stores") / "cache"
    running = [process(store), process(store)]
    return store, [result_of(p) for p in running]


@pytest.fixture
def store(made_by_two: tuple[Path, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A copy of that store, in a process that has compiled nothing yet."""
    monkeypatch.setattr(inductor, "_COMPILED", {})
    shutil.copytree(made_by_two[0], tmp_path / "cache")
    return Store(tmp_path / "cache")


def counts(result: dict[str, Any]) -> tuple[int, int, int]:
    return result["compiled"], result["loaded"], result["unstored"]


def test_two_processes_at_once(made_by_two: tuple[Path, list[dict[str, Any]]], expected: list[list[float]]) -> None:
    store, results = made_by_two
    assert sorted(map(counts, results)) == [(0, 1, 0), (1, 0, 0)]
    for result in results:
        torch.testing.assert_close(torch.tensor(result["y"]), torch.tensor(expected))
    assert results[0]["y"] == results[1]["y"]
    assert len(folders(Store(store))) == 1


def test_a_fresh_process_compiles_nothing_and_needs_no_compiler(
    made_by_two: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    store, (first, _) = made_by_two
    empty, home = tmp_path / "inductor", tmp_path / "home"
    nowhere = {"TORCHINDUCTOR_CACHE_DIR": str(empty), "TRITON_CACHE_DIR": str(empty), "HOME": str(home)}
    result = result_of(process(store, **nowhere, CXX="/bin/false", PATH=str(tmp_path / "nothing")))
    assert counts(result) == (0, 1, 0)
    assert result["told"] == ["loading region 1"]
    assert result["counters"] == {"graphs": 0, "fxgraph_cache_miss": 0, "fxgraph_cache_hit": 0}
    assert result["y"] == first["y"]
    assert not [p for p in empty.rglob("*") if p.is_file()]


def test_what_is_loaded_takes_any_row_count(store: Store) -> None:
    function = RegionCompiler(store=store).function(*region())
    graph, one = region()
    eager = RegionCompiler("eager").function(graph, one)
    weight = torch.randn(4)
    for rows in (1, 2, 33):
        x = torch.randn(rows, 4)
        (got,), (want,) = function(x, weight), eager(x, weight)
        torch.testing.assert_close(got, want)


def test_a_process_compiles_once_and_stores_in_every_cache(store: Store, tmp_path: Path) -> None:
    assert counts(run(store)) == (0, 1, 0)
    other = Store(tmp_path / "other")
    assert counts(run(other)) == (0, 1, 0)
    assert folders(other) == folders(store)
    assert counts(run(None)) == (0, 1, 0)


def test_another_region_is_another_entry(store: Store) -> None:
    assert counts(run(store, scale=3.0)) == (1, 0, 0)
    a, b = upkeep.entries(store)
    assert a.what == b.what == "region: mul, rms_norm, add"


@pytest.mark.parametrize("file", ["region.pickle", "kernel-*.so", "manifest", "key.txt"])
def test_a_flipped_byte_is_rebuilt(
    store: Store, file: str, expected: list[list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (entry,) = upkeep.entries(store)
    (path,) = entry.folder.glob(file)
    flip(path, 100)
    monkeypatch.setattr(inductor, "load_region", lambda *_: pytest.fail("ran what is damaged"))
    with pytest.warns(UserWarning, match="is set aside and rebuilt"):
        result = run(store)
    assert counts(result) == (1, 0, 0)
    torch.testing.assert_close(torch.tensor(result["y"]), torch.tensor(expected))
    monkeypatch.undo()
    inductor._COMPILED.clear()
    assert counts(run(store)) == (0, 1, 0)


def test_an_entry_that_does_not_load_is_rebuilt(store: Store) -> None:
    """Intact, but not what torch can read: its checksums are right."""
    (entry,) = upkeep.entries(store)
    store.remove(entry.folder)
    store.put(entry.key, {"region.pickle": b"no pickle"})
    with pytest.warns(UserWarning, match="set aside and rebuilt: it does not load"):
        assert counts(run(store)) == (1, 0, 0)
    assert [e.damaged for e in upkeep.entries(store)] == [False, True]


def test_an_old_torch_is_not_found(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "git_version", "0123456")
    assert counts(run(store)) == (1, 0, 0)
    old, new = sorted((e.key.inputs["torch"] for e in upkeep.entries(store)), key=lambda t: "0123456" in t)
    assert "0123456" not in old
    assert new.endswith("git 0123456")


def test_a_full_disk_costs_only_the_store(
    store: Store, expected: list[list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.trim(limit=0)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(UserWarning, match=r"cannot be written \(No space left on device\); going on without it"):
        result = run(store)
    assert counts(result) == (1, 0, 1)
    torch.testing.assert_close(torch.tensor(result["y"]), torch.tensor(expected))


def test_a_region_that_cannot_be_packed_runs(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(compiled: Any) -> Any:
        raise RuntimeError("torch generates other code")

    store.trim(limit=0)
    monkeypatch.setattr(inductor, "pack_region", changed)
    with pytest.warns(UserWarning, match="cannot be stored in the artifact cache .*: torch generates other code"):
        assert counts(run(store)) == (1, 0, 1)
    assert folders(store) == []


def test_a_region_that_cannot_be_packed_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(compiled: Any) -> Any:
        raise RuntimeError("torch generates other code")

    monkeypatch.setattr(inductor, "pack_region", changed)
    monkeypatch.setattr(inductor, "_COMPILED", {})
    source = trace(lambda x: [(0, x * 3 + 1)], [torch.ones(6)]).source
    with pytest.warns(UserWarning, match="cannot be stored"):
        assert inductor.compiled(source, Store(tmp_path)).new
    later = inductor.compiled(source, Store(tmp_path))
    assert (later.new, later.stored) == (False, False)

"""Compiled kernels in a store: later processes compile none, and whatever is wrong with it, they go on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dgraph.cache import key as keys
from dgraph.cache.store import Store
from dgraph.lowering import kernels
from dgraph.lowering.kernels import FILE, LAUNCHERS, Kernels, names_of, packed, unpacked
from dgraph.private.inductor import launched_by_triton, settle_kernels
from tests.cache.stores import flip, folders
from tests.lowering.one_kernel import HASH, KERNEL, TARGET, Binary, files_below

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
MODULES = {
    name: f"dgraph.ops.{subject}.triton.{name}"
    for subject, name in (("selection", "keep_index"), ("attention", "paged_attention"))
}
pytestmark = pytest.mark.filterwarnings("error::dgraph.errors.DgraphWarning")

Said = dict[str, Any]


def process(store: Path, cache: Path, *blocks: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.lowering.one_kernel", str(store), *map(str, blocks)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON")}
    environment["TRITON_CACHE_DIR"] = str(cache)
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)


def result_of(running: subprocess.Popen[str], warned: str = "") -> Said:
    out, told = running.communicate(timeout=300)
    assert running.returncode == 0, told
    assert "UserWarning" not in told, told
    assert told.count("DgraphWarning") == bool(warned), told
    assert warned in told
    return json.loads(out)


@pytest.fixture(scope="module")
def made_by_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Said]]:
    """A store, and what two processes say that compiled a kernel for two block sizes at the same time."""
    folder = tmp_path_factory.mktemp("stores")
    running = [process(folder / "cache", folder / f"triton {block}", block) for block in (256, 128)]
    return folder / "cache", [result_of(p) for p in running]


@pytest.fixture
def store(made_by_two: tuple[Path, list[Said]], tmp_path: Path) -> Store:
    """A copy of that store."""
    shutil.copytree(made_by_two[0], tmp_path / "cache")
    return Store(tmp_path / "cache")


@pytest.fixture
def triton_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of Triton, for this process."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path / "triton"


def only_file(store: Store) -> Path:
    (folder,) = (f for f in store.entries.iterdir() if "damaged" not in f.name)
    return folder / FILE


def test_two_processes_at_once_lose_nothing(made_by_two: tuple[Path, list[Said]]) -> None:
    path, said = made_by_two
    for found, other in zip(said, reversed(said), strict=True):
        # A busy machine may start the second only after the first has ended, whose kernel it then finds.
        assert found["restored"] in ([], other["hashes"])
        assert found["compiled"] == ["keep_index._list_kept"]
        assert found["again"] == 0
    kept = unpacked(only_file(Store(path)).read_bytes())
    assert sorted(kept) == sorted(found["hashes"][0] for found in said)
    assert {tuple(sorted(files)) for files in kept.values()} == {("_list_kept.cubin", "_list_kept.json")}


def test_a_fresh_process_compiles_nothing(made_by_two: tuple[Path, list[Said]], store: Store, tmp_path: Path) -> None:
    found = result_of(process(store.root, tmp_path / "triton", 256, 128))
    assert found["compiled"] == []
    assert sorted(found["restored"]) == sorted(found["hashes"])
    assert [[h] for h in found["hashes"]] == [said["hashes"] for said in made_by_two[1]]
    assert [[c] for c in found["code"]] == [said["code"] for said in made_by_two[1]]
    assert found["told"] == ["loading kernels"]
    assert set(found["files"]) == {"__grp___list_kept.json", "_list_kept.cubin", "_list_kept.json"}
    assert len(folders(store)) == 1
    more = result_of(process(store.root, tmp_path / "triton", 256, 512))
    assert more["restored"] == []
    assert more["compiled"] == ["keep_index._list_kept"]
    assert len(unpacked(only_file(store).read_bytes())) == 3


@pytest.mark.release
def test_two_processes_restore_at_once(store: Store, tmp_path: Path) -> None:
    running = [process(store.root, tmp_path / "triton", 256, 128) for _ in range(2)]
    assert [result_of(p)["compiled"] for p in running] == [[], []]


def test_a_flipped_byte(store: Store, tmp_path: Path) -> None:
    flip(only_file(store), 2000)
    found = result_of(
        process(store.root, tmp_path / "triton", 256), "is set aside and rebuilt: kernels.zip is not what"
    )
    assert (found["restored"], found["compiled"]) == ([], ["keep_index._list_kept"])
    assert list(unpacked(only_file(store).read_bytes())) == found["hashes"]


def test_restoring_writes_what_is_missing_and_nothing_else(store: Store, triton_cache: Path) -> None:
    first = Kernels(TARGET, store)
    first.restore()
    written = files_below(triton_cache)
    assert (len(first.restored), len(written)) == (2, 3)
    for group in triton_cache.rglob("__grp__*"):
        paths = json.loads(group.read_text())["child_paths"]
        assert all(Path(path).parent == group.parent and Path(path).exists() for path in paths.values())
    again = Kernels(TARGET, Store(store.root))
    again.restore()
    assert again.restored == []
    assert files_below(triton_cache) == written
    for path in triton_cache.rglob("*.cubin"):
        path.unlink()
    repaired = Kernels(TARGET, store)
    repaired.restore()
    assert sorted(repaired.restored) == sorted(first.restored)
    group.write_text("{")
    once_more = Kernels(TARGET, store)
    once_more.restore()
    assert len(once_more.restored) == 1


def test_a_moved_cache_is_filled_as_well(
    store: Store, triton_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    found = Kernels(TARGET, store, told.append)
    with found.remembered():
        pass
    with found.remembered():
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "moved"))
    assert not (tmp_path / "moved").exists()
    with found.remembered():
        assert len(list((tmp_path / "moved").rglob("*.cubin"))) == 2
    assert told == ["loading kernels"] * 2


def test_another_target_finds_nothing(store: Store, triton_cache: Path) -> None:
    found = Kernels("cuda 100", store)
    found.restore()
    assert (found.restored, found.save(), len(folders(store))) == ([], 0, 1)
    assert files_below(triton_cache) == {}


def test_nothing_to_keep(tmp_path: Path, triton_cache: Path) -> None:
    store = Store(tmp_path / "empty")
    with Kernels("cuda 10", store).remembered():
        pass
    assert folders(store) == []


def test_without_a_store_kernels_are_only_counted(triton_cache: Path) -> None:
    for found in (Kernels(TARGET, None), Kernels(None, None)):
        with found.remembered():
            found.prepare()
        assert (found.save(), found.compiled, found.restored) == (0, [], [])
    assert not triton_cache.exists()


def test_a_cache_of_triton_that_cannot_be_written(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "triton"))
    found = Kernels(TARGET, store)
    with pytest.warns(UserWarning, match=r"Triton's cache .*file/triton cannot be written \(Not a dir"):
        found.restore()
    Kernels(TARGET, store).restore()  # the same store warns once
    assert found.restored == []


@pytest.mark.parametrize(
    ("content", "reason"), [("no archive", "not a zip file"), ("../../evil", "it holds"), ("nothing", "kernels.zip")]
)
def test_an_entry_that_is_no_bundle(tmp_path: Path, triton_cache: Path, content: str, reason: str) -> None:
    store = Store(tmp_path / "cache")
    key = keys.kernel_keys(TARGET, MODULES)["keep_index"]
    files = {FILE: b"junk"}
    if content == "../../evil":
        with zipfile.ZipFile(tmp_path / "made.zip", "w") as archive:
            archive.writestr(content, b"code")
        files = {FILE: (tmp_path / "made.zip").read_bytes()}
    assert store.put(key, {} if content == "nothing" else files)
    with pytest.warns(UserWarning, match=f"it does not load .*{reason}"):
        Kernels(TARGET, store).restore()
    assert key not in store
    assert files_below(triton_cache) == {}


def test_a_triton_that_is_not_known(tmp_path: Path, triton_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(package: str) -> dict[str, Any]:
        raise AttributeError("'JITFunction' object has no attribute 'device_caches'")

    monkeypatch.setattr(kernels, "loaded_kernels", changed)
    found = Kernels(TARGET, Store(tmp_path / "cache"))
    with pytest.warns(UserWarning, match="in a way that dgraph does not know: 'JITFunction'"):
        assert found.save() == 0
    assert found.save() == 0


def test_what_is_kept_is_what_runs(tmp_path: Path, triton_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = Binary.at(tmp_path / "theirs")
    (tmp_path / "theirs" / "_list_kept.cubin").write_bytes(b"put there later")
    monkeypatch.setattr(kernels, "loaded_kernels", lambda package: binary.loaded())
    store = Store(tmp_path / "cache")
    assert Kernels(TARGET, store).save() == 1
    assert unpacked(only_file(store).read_bytes()) == {HASH: KERNEL}


@pytest.mark.parametrize("wrong", ["gone", "another's"])
def test_a_kernel_whose_metadata_is_wrong_is_left_out(
    tmp_path: Path, triton_cache: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    binary = Binary.at(tmp_path / "theirs", "cd" * 32)
    if wrong == "gone":
        shutil.rmtree(tmp_path / "theirs")
    monkeypatch.setattr(kernels, "loaded_kernels", lambda package: binary.loaded())
    found, store = Kernels(TARGET, Store(tmp_path / "cache")), Store(tmp_path / "cache")
    with pytest.warns(UserWarning, match="a kernel of keep_index cannot be stored"):
        found.save()
    assert folders(store) == []


def test_keys_say_what_lies_together(monkeypatch: pytest.MonkeyPatch) -> None:
    found = keys.kernel_keys(TARGET, MODULES)
    assert {"keep_index", "paged_attention", LAUNCHERS} <= found.keys()
    assert len({key.digest for key in found.values()}) == len(found)
    one = found["keep_index"]
    assert (one.inputs["kind"], one.inputs["device"]) == ("kernels", TARGET)
    assert "source dgraph/ops/selection/triton/keep_index.py" in one.inputs
    assert "python" in found[LAUNCHERS].inputs
    monkeypatch.setattr(keys, "_version", lambda package: "3.99")
    (changed,) = keys.differences(one, keys.kernel_keys(TARGET, MODULES)["keep_index"])
    assert changed.name == "triton"


def test_a_bundle_is_the_same_for_the_same_kernels() -> None:
    other = dict(reversed(KERNEL.items()))
    assert packed({HASH: KERNEL, "cd" * 32: KERNEL}) == packed({"cd" * 32: other, HASH: other})
    assert names_of(packed({HASH: KERNEL, "cd" * 32: KERNEL})) == {"_list_kept": [36, 36]}


def test_triton_keeps_kernels_where_inductor_would(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "undone")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    settle_kernels()
    cache_folder = pytest.importorskip("dgraph.private.triton").cache_folder
    pytest.importorskip("triton")
    assert cache_folder() == str(tmp_path / "triton" / "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "own"))
    settle_kernels()
    assert cache_folder() == str(tmp_path / "own")


def test_kernels_of_regions_that_triton_launches_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    codecache = pytest.importorskip("torch._inductor.codecache")
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    launched, other = (SimpleNamespace(_run=SimpleNamespace(launch=len)) for _ in range(2))
    asleep, of_torch = SimpleNamespace(_run=None), SimpleNamespace(run=len)
    tuners = []
    for of_region in ((asleep, launched, of_torch), (other,)):
        tuners.append(object.__new__(CachingAutotuner))
        tuners[-1].compile_results = [SimpleNamespace(kernel=k) for k in of_region]  # type: ignore[misc]
    generated = SimpleNamespace(kernel_0=tuners[0], call=len, kernel_1=tuners[1])
    monkeypatch.setattr(codecache.PyCodeCache, "modules", [SimpleNamespace(x=1), generated])
    assert launched_by_triton() == [launched, other]

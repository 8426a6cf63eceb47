"""Looking after a store: names, checks, export and import."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from dgraph.cache import upkeep
from dgraph.cache.store import Store
from dgraph.errors import CacheError, UnknownName
from tests.cache.stores import FILES, filled, flip, folders

pytestmark = pytest.mark.filterwarnings("error::UserWarning")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def test_entries_by_name(store: Store) -> None:
    a, b = filled(store, "a", "b")
    os.utime(store.entries / b.digest, (5, 5))
    first, second = upkeep.entries(store)
    assert (first.digest, second.digest, second.used) == (a.digest, b.digest, 5)
    assert first.key == a
    assert upkeep.entry(store, a.digest[:10]).digest == a.digest
    with pytest.raises(UnknownName, match="unknown artifact 'xyz'"):
        upkeep.entry(store, "xyz")
    with pytest.raises(UnknownName):
        upkeep.entry(store, "")


def test_a_name_that_fits_two(store: Store) -> None:
    filled(store, *(str(i) for i in range(17)))
    digests = [e.digest for e in upkeep.entries(store)]
    twice = next(c for c in "0123456789abcdef" if sum(d.startswith(c) for d in digests) > 1)
    with pytest.raises(CacheError, match=rf"artifacts begin with '{twice}': .*; give more of the name"):
        upkeep.entry(store, twice)


def test_check_sets_damaged_entries_aside(store: Store) -> None:
    a, b = filled(store, "a", "b")
    flip(store.entries / b.digest / "kernel0.so", 7)
    results = {e.digest: upkeep.check(store, e) for e in upkeep.entries(store)}
    assert results == {a.digest: "", b.digest: "kernel0.so is not what was written"}
    assert [e.damaged for e in upkeep.entries(store)] == [False, True]


def test_the_total_is_of_what_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    a, _ = filled(store, "a", "b")
    size = sum(e.size for e in upkeep.entries(store) if e.digest != a.digest)
    assert upkeep.total(store) == sum(e.size for e in upkeep.entries(store))
    scandir = os.scandir

    def removed_then(path: Any) -> Any:
        """As where another process removes an entry after it was listed."""
        if str(path).endswith(a.digest):
            shutil.rmtree(store.entries / a.digest, ignore_errors=True)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removed_then)
    assert upkeep.total(store) == size


def test_export_and_import(store: Store, tmp_path: Path) -> None:
    a, b = filled(store, "a", "b")
    file = tmp_path / "artifacts.zip"
    upkeep.export(upkeep.entries(store), file)
    with pytest.raises(CacheError, match="exists; give another name"):
        upkeep.export(upkeep.entries(store), file)
    other = Store(tmp_path / "other")
    with pytest.raises(CacheError, match=r"contains compiled code that dgraph will run\. Pass trust=True"):
        upkeep.import_(other, file)
    assert folders(other) == []
    taken, present = upkeep.import_(other, file, trust=True)
    assert (set(taken), present) == ({a.digest, b.digest}, [])
    assert upkeep.import_(other, file, trust=True)[0] == []
    found = other.find(a)
    assert found is not None
    assert dict(found.files) == FILES


def test_nothing_damaged_is_exported_or_imported(store: Store, tmp_path: Path) -> None:
    (a,) = filled(store, "a")
    file, other = tmp_path / "artifacts.zip", Store(tmp_path / "other")
    upkeep.export(upkeep.entries(store), file)
    content = file.read_bytes()
    flip(file, content.index(FILES["region.pickle"]) + 20)
    with pytest.raises(CacheError, match="is not an intact export"):
        upkeep.import_(other, file, trust=True)
    with zipfile.ZipFile(file, "w") as out:  # its own checksums are right, the manifest's are not
        for path in (store.entries / a.digest).iterdir():
            out.writestr(f"{a.digest}/{path.name}", path.read_bytes() + b"\n")
    with pytest.raises(CacheError, match="is not an intact export"):
        upkeep.import_(other, file, trust=True)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as out:  # packed again by somebody, then damaged
        out.write(store.entries / a.digest / "key.txt", f"{a.digest}/key.txt")
        begin = out.infolist()[0].header_offset + 30 + len(f"{a.digest}/key.txt")
    content = file.read_bytes()
    file.write_bytes(content[:begin] + b"\xff" * 8 + content[begin + 8 :])
    with pytest.raises(CacheError, match="is not an intact export"):
        upkeep.import_(other, file, trust=True)
    file.write_bytes(b"no zip")
    with pytest.raises(CacheError, match="is not an intact export"):
        upkeep.import_(other, file, trust=True)
    with pytest.raises(CacheError, match="cannot be imported: No such file"):
        upkeep.import_(other, tmp_path / "missing.zip", trust=True)
    assert folders(other) == []
    assert not list(other.temporary.iterdir())
    flip(store.entries / a.digest / "region.pickle", 3)
    with pytest.raises(CacheError, match="is damaged: region"):
        upkeep.export(upkeep.entries(store), tmp_path / "again.zip")
    assert not (tmp_path / "again.zip").exists()


@pytest.mark.parametrize("name", ["../../evil", "/etc/evil", f"{'0' * 64}/../../evil", f"{'0' * 64}/a/b", "readme"])
def test_an_import_stays_in_its_folder(store: Store, tmp_path: Path, name: str) -> None:
    file = tmp_path / "artifacts.zip"
    with zipfile.ZipFile(file, "w") as out:
        out.writestr(name, b"code")
    with pytest.raises(CacheError, match="is not an intact export: it holds"):
        upkeep.import_(store, file, trust=True)
    assert folders(store) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["artifacts.zip", "cache"]

"""Artifacts on a disk that loses bytes, fills up or cannot be written: never run, never fatal, one line."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dgraph.cache import artifact
from dgraph.cache.key import Key
from dgraph.cache.store import Store
from tests.cache.stores import FILES, filled, flip, folders, key

pytestmark = pytest.mark.filterwarnings("error::UserWarning")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def test_an_artifact_comes_back_as_it_was_written(store: Store) -> None:
    assert store.find(key()) is None
    (a,) = filled(store, "a")
    found = Store(store.root).find(a)
    assert found is not None
    assert (dict(found.files), found.key, found.folder) == (FILES, a.text, store.entries / a.digest)
    assert a in store
    assert key("b") not in store
    assert store.find(key("b")) is None
    assert not list(store.temporary.iterdir())


def test_writing_twice_keeps_the_first(store: Store) -> None:
    (a,) = filled(store, "a")
    assert store.put(a, {"region.pickle": b"other"})
    found = store.find(a)
    assert found is not None
    assert dict(found.files) == FILES
    assert folders(store) == [a.digest]


def test_an_artifact_that_grows_takes_the_place_of_the_old_one(store: Store) -> None:
    (a, b) = filled(store, "a", "b")
    assert store.put(a, {"region.pickle": b"other"}, replace=True)
    assert store.put(key("c"), FILES, replace=True)
    found = store.find(a)
    assert found is not None
    assert dict(found.files) == {"region.pickle": b"other"}
    assert folders(store) == sorted(k.digest for k in (a, b, key("c")))
    assert not list(store.temporary.iterdir())


def test_a_full_disk_leaves_the_old_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    (a,) = filled(store, "a")
    monkeypatch.setattr(os, "fsync", fails(errno.ENOSPC))
    with pytest.warns(UserWarning, match="cannot be written"):
        assert not store.put(a, {"region.pickle": b"other"}, replace=True)
    found = store.find(a)
    assert found is not None
    assert dict(found.files) == FILES


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
def test_nobody_else_can_read_or_write_it(store: Store) -> None:
    (a,) = filled(store, "a")
    for folder in (store.root, store.entries, store.temporary, store.locks, store.entries / a.digest):
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["../x", "a/b", "", "manifest", "key.txt", ".hidden"])
def test_a_file_has_a_plain_name(store: Store, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be called"):
        store.put(key(), {name: b""})
    assert folders(store) == []


@pytest.mark.parametrize("file", ["region.pickle", "kernel0.so", "key.txt", "manifest"])
@pytest.mark.parametrize("where", [0.0, 0.3, 0.7, 1.0])
def test_a_flipped_byte_is_found_wherever_it_is(store: Store, file: str, where: float) -> None:
    (a,) = filled(store, "a")
    path = store.entries / a.digest / file
    flip(path, round(where * (path.stat().st_size - 1)))
    with pytest.warns(UserWarning, match=f"artifact {a.digest[:12]} .* is set aside and rebuilt: ") as told:
        assert store.find(a) is None
    assert len(told) == 1
    assert "\n" not in str(told[0].message)
    (aside,) = folders(store)
    assert re.fullmatch(rf"{a.digest}\.damaged-\d+", aside)
    assert store.find(a) is None
    assert store.put(a, FILES)
    assert store.find(a) is not None


def lose(folder: Path) -> None:
    (folder / "kernel0.so").unlink()


def truncate(folder: Path) -> None:
    (folder / "region.pickle").write_bytes(b"code")


def add(folder: Path) -> None:
    (folder / "extra.so").write_bytes(b"code")


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def another_key(folder: Path) -> None:
    """An intact artifact, under the name of another: what an old torch made, say."""
    old = Key({**key().inputs, "torch": "1.9 git abc"})
    empty(folder)
    artifact.write(folder, old.text, FILES)


def another_format(folder: Path) -> None:
    empty(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(artifact, "FORMAT", "dgraph artifact 0")
        artifact.write(folder, key().text, FILES)


DAMAGES: dict[Callable[[Path], None], str] = {
    lose: "too many files: kernel0.so",
    truncate: "region.pickle is not what was written",
    add: "too many files: extra.so",
    empty: "has no manifest",
    another_key: "it was made for another key",
    another_format: "its format is 'dgraph artifact 0'",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_an_entry_is_complete_or_not_used(store: Store, damage: Callable[[Path], None]) -> None:
    (a,) = filled(store, "a")
    damage(store.entries / a.digest)
    with pytest.warns(UserWarning, match=DAMAGES[damage]):
        assert store.find(a) is None
    assert store.put(a, FILES)
    assert store.find(a) is not None


def test_an_entry_of_another_user_is_not_used(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    (a,) = filled(store, "a")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.warns(UserWarning, match="it belongs to user"):
        assert store.find(a) is None


def test_one_damaged_copy_is_kept_at_most(store: Store) -> None:
    for _ in range(3):
        (a,) = filled(store, "a")
        flip(store.entries / a.digest / "kernel0.so", 5)
        with pytest.warns(UserWarning, match="set aside"):
            Store(store.root).find(a)
        assert len(folders(store)) == 1


def test_an_entry_that_vanishes_while_it_is_read_is_not_damaged(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    (a,) = filled(store, "a")
    read_bytes = Path.read_bytes

    def removed_first(path: Path) -> bytes:
        if path.name == "kernel0.so":
            store.remove(path.parent)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", removed_first)
    assert store.find(a) is None
    assert folders(store) == []


def test_an_entry_that_is_replaced_while_it_is_read_is_not_damaged(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a,) = filled(store, "a")
    read_bytes, longer = Path.read_bytes, {**FILES, "kernel0.so": b"longer" * 100}
    replaced: list[bool] = []

    def replaced_first(path: Path) -> bytes:
        if path.name == "kernel0.so" and not replaced:
            replaced.append(Store(store.root).put(a, longer, replace=True))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", replaced_first)
    found = store.find(a)
    assert found is not None
    assert dict(found.files) == longer
    assert folders(store) == [a.digest]


def fails(code: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(("owner", "name"), [(os, "fsync"), (os, "mkdir"), (Path, "open"), (Path, "rename")])
def test_a_full_disk_is_one_line(store: Store, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails(errno.ENOSPC))
        with pytest.warns(UserWarning, match=r"cannot be written \(No space left on device\); going on") as told:
            results = [store.put(key("a"), FILES), store.put(key("b"), FILES)]
        assert results == [False, False]
        assert len(told) == 1
    assert folders(store) == []
    assert not list(store.temporary.iterdir())
    assert store.put(key("a"), FILES)


def test_a_store_that_can_only_be_read_serves(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    (a,) = filled(store, "a")
    monkeypatch.setattr(os, "utime", fails(errno.EROFS))
    monkeypatch.setattr(os, "open", fails(errno.EROFS))
    with store.making(a.digest):  # no lock to be had
        assert store.find(a) is not None


def test_a_store_that_cannot_be_read_is_left_out(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    (a,) = filled(store, "a")
    monkeypatch.setattr(artifact, "read", fails(errno.EACCES))
    with pytest.warns(UserWarning, match=r"cannot be read \(Permission denied\)"):
        assert store.find(a) is None

"""Where the cache lies, how large it may be, and which folders are refused."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dgraph.cache.place import default_folder, limit_of_environment, parse_size
from dgraph.cache.store import Store, open_store
from dgraph.errors import CacheError, InputError

pytestmark = pytest.mark.filterwarnings("error::UserWarning")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def test_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DGRAPH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "dgraph"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(sys, "platform", "linux")
    assert default_folder() == Path.home() / ".cache" / "dgraph"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_folder() == Path.home() / "Library" / "Caches" / "dgraph"
    monkeypatch.setenv("DGRAPH_CACHE", str(tmp_path / "mine"))
    assert default_folder() == tmp_path / "mine"
    opened = open_store()
    assert opened is not None
    assert opened.root == tmp_path / "mine"


def test_what_the_option_takes(tmp_path: Path, store: Store) -> None:
    opened = open_store(str(tmp_path / "other"))
    assert opened is not None
    assert opened.root == tmp_path / "other"
    assert open_store(False) is None
    assert open_store(store) is store
    with pytest.raises(InputError, match="artifacts must be True, False or a folder, got 3"):
        open_store(3)  # type: ignore[arg-type]


def unsafe_mode(root: Path, patch: pytest.MonkeyPatch) -> None:
    root.chmod(0o777)


def unsafe_owner(root: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "geteuid", lambda: 12345)


def no_folder(root: Path, patch: pytest.MonkeyPatch) -> None:
    root.rmdir()
    root.write_text("a file")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (unsafe_mode, r"can be written by others \(mode 0777\), and artifacts are code; chmod 700 it"),
        (unsafe_owner, r"belongs to user \d+, not to user 12345, and artifacts are code; use another folder"),
        (no_folder, "cannot be used: File exists"),
    ],
    ids=["mode", "owner", "no folder"],
)
def test_a_folder_that_cannot_be_trusted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    reason: str,
) -> None:
    root = tmp_path / "cache"
    root.mkdir(mode=0o700)
    spoil(root, monkeypatch)
    with pytest.raises(CacheError, match=reason):
        open_store(root)
    monkeypatch.setenv("DGRAPH_CACHE", str(root))
    with pytest.warns(UserWarning, match=f"{reason}.*Going on without it") as told:
        assert open_store() is None
    assert len(told) == 1


@pytest.mark.parametrize(("text", "size"), [("4G", 4 << 30), ("500M", 500 << 20), ("1.5 KiB", 1536), ("12", 12)])
def test_sizes(text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_size(text, "--limit") == size
    monkeypatch.setenv("DGRAPH_CACHE_SIZE", text)
    assert limit_of_environment() == size


@pytest.mark.parametrize("text", ["much", "-1", "4X", "4 G B"])
def test_no_sizes(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGRAPH_CACHE_SIZE", text)
    with pytest.raises(InputError, match="DGRAPH_CACHE_SIZE is a size such as 500M or 4G"):
        Store(tmp_path / "cache")

"""Ids of Hugging Face: the cache is read, and nothing is downloaded where that is forbidden. No network is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

import dgraph
from dgraph.errors import CheckpointError, InputError
from dgraph.families.hub import DOWNLOAD, is_id
from tests.models.test_dream import CONFIG, WEIGHTS
from tests.remote import write

REVISION = "0a1b2c3d4e5f60718293a4b5c6d7e8f901234567"


def snapshot(cache: Path, org: str, name: str) -> Path:
    """A repository as huggingface_hub keeps it: a revision, whose files are links to blobs."""
    repository = cache / f"models--{org}--{name}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    (repository / "snapshots").mkdir()
    folder = write(repository / "snapshots" / REVISION, CONFIG, WEIGHTS, 2)
    (repository / "blobs").mkdir()
    for i, file in enumerate(sorted(folder.iterdir())):
        file.rename(repository / "blobs" / f"{i}")
        file.symlink_to(Path("..") / ".." / "blobs" / f"{i}")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; a test that downloads fails."""
    original = huggingface_hub.snapshot_download

    def local_alone(name: str, **how: Any) -> str:
        assert how.get("local_files_only"), "downloads"
        return original(name, **how)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", local_alone)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv(DOWNLOAD, "0")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


@pytest.mark.parametrize("allowed", ["0", "1"])
def test_what_is_in_the_cache_is_loaded(allowed: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DOWNLOAD, allowed)
    snapshot(cache, "Dream-org", "Dream-v0-Instruct-7B")
    model = dgraph.load("Dream-org/Dream-v0-Instruct-7B")
    assert (model.name, model.spec.family) == ("Dream-v0-Instruct-7B", "dream")


def test_nothing_is_downloaded_where_that_is_forbidden(cache: Path) -> None:
    told = r"a/Dream is not a checkpoint folder.*nothing was downloaded\. Run `hf download a/Dream`.*DGRAPH_DOWNLOAD=1"
    with pytest.raises(CheckpointError, match=told):
        dgraph.load("a/Dream")


def test_offline_goes_before_leave(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DOWNLOAD, "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="nothing was downloaded"):
        dgraph.load("a/Dream")


def test_a_download_that_fails_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        huggingface_hub.HfApi, "list_repo_files", lambda self, name, **how: ["config.json", "a.safetensors"]
    )

    def fail(name: str, **how: Any) -> str:
        if how.get("local_files_only"):
            raise huggingface_hub.errors.LocalEntryNotFoundError("none")
        raise ConnectionError("no route\n to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv(DOWNLOAD, "1")
    with pytest.raises(CheckpointError, match="a/Dream could not be downloaded from Hugging Face: no route to host"):
        dgraph.load("a/Dream")
    monkeypatch.setenv(DOWNLOAD, "yes")
    with pytest.raises(InputError, match="DGRAPH_DOWNLOAD is 'yes', expected 1"):
        dgraph.load("a/Dream")


def test_folders_go_before_ids(cache: Path) -> None:
    folder = cache.parent / "a" / "Dream"
    folder.parent.mkdir()
    write(folder, CONFIG, WEIGHTS)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": 7}))
    snapshot(cache, "a", "Dream")
    assert dgraph.load("a/Dream").spec.eos_ids == (7,)


def test_a_repository_of_the_cache_says_where_its_revisions_are(cache: Path) -> None:
    repository = snapshot(cache, "a", "Dream").parent.parent
    with pytest.raises(CheckpointError, match=r"has no config\.json.* Give one of the revisions in .*snapshots\."):
        dgraph.load(repository)


@pytest.mark.parametrize("name", ["tiny_sdar", "a/b/c", "./a/b", "../b", "/a/b", "a/../b", "a b/c", "a/", "/a", "~/a"])
def test_what_is_no_id(name: str, cache: Path) -> None:
    assert not is_id(name)

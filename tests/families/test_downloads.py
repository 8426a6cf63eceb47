"""Checkpoints of the hub, fetched from a stand-in for it on 127.0.0.1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

import dgraph
from dgraph.errors import CheckpointError
from dgraph.families import embedded
from dgraph.families.hub import DOWNLOAD, folder_of_id, needed
from tests.hub_server import Hub, files_of, serving

NAME = "an-org/Tiny"
FILES = files_of(embedded()["tiny_sdar"].folder)
SHARD = "model-00001-of-00002.safetensors"
OTHERS = {"pytorch_model.bin": b"pickle", "modeling_tiny.py": b"raise SystemExit", "consolidated.safetensors": b"x"}


pytestmark = pytest.mark.filterwarnings("ignore:Tiny stores its weights")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the model tiny_sdar and files that are not wanted, and an empty cache."""
    shown = Hub()
    shown.publish(NAME, {**FILES, **OTHERS, "onnx/model.json": b"{}"})
    with serving(shown):
        monkeypatch.setattr(constants, "ENDPOINT", shown.url)
        template = shown.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv(DOWNLOAD, "1")
        monkeypatch.chdir(tmp_path)
        yield shown


def test_a_checkpoint_is_fetched_once_and_no_more_of_it_than_is_read(hub: Hub) -> None:
    model = dgraph.load(NAME)
    assert (model.name, model.spec.family) == ("Tiny", "sdar")
    assert model.tokenizer is not None
    names = {path.rpartition("/")[2] for path in hub.fetched()}
    assert {"config.json", "tokenizer.json", "generation_config.json", SHARD} <= names
    assert not names & {*OTHERS, "README.md", "held_out.jsonl", "model.json"}
    asked = len(hub.asked)
    assert dgraph.load(NAME).name == "Tiny"
    assert len(hub.asked) == asked  # the hub is not asked again


def test_revisions_are_apart(hub: Hub) -> None:
    config = json.loads(FILES["config.json"])
    hub.publish(NAME, {**FILES, "config.json": json.dumps({**config, "max_position_embeddings": 512}).encode()}, "v2")
    assert dgraph.load(f"{NAME}@v2").spec.max_positions == 512
    assert dgraph.load(NAME).spec.max_positions == 1024
    assert dgraph.load(f"{NAME}@{hub.commit(NAME, 'v2')}").spec.max_positions == 512
    assert dgraph.load(f"{NAME}@v2").name == "Tiny"
    with pytest.raises(CheckpointError, match=rf"{NAME}@v3 has no revision v3; see http.*/tree/main"):
        dgraph.load(f"{NAME}@v3")


def test_a_connection_that_is_cut_goes_on_where_it_was(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
    hub.cut = {SHARD: 1000}
    folder = folder_of_id(NAME)
    assert (folder / SHARD).read_bytes() == FILES[SHARD]
    assert [range for method, path, range in hub.asked if method == "GET" and path.endswith(SHARD) and range] == [
        "bytes=1000-"
    ]


def test_a_download_that_was_killed_is_finished_by_the_next_call(hub: Hub) -> None:
    folder = folder_of_id(NAME)
    blob = (folder / SHARD).resolve()
    (folder / SHARD).unlink()
    blob.rename(blob.with_name(f"{blob.name}.12345678.incomplete"))
    asked = len(hub.asked)
    assert (folder_of_id(NAME) / SHARD).read_bytes() == FILES[SHARD]
    fetched = {path.rpartition("/")[2] for method, path, _ in hub.asked[asked:] if "/resolve/" in path}
    assert fetched == {SHARD}
    asked = len(hub.asked)
    folder_of_id(NAME)  # what the killed one left behind means nothing any more
    assert len(hub.asked) == asked


def test_folders_go_before_the_hub(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / NAME
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    dgraph.load(NAME)
    assert not hub.asked


def test_what_cannot_be_fetched_says_what_to_do(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"an-org/Tinny is no folder here, and http.* shows no such repository"):
        dgraph.load("an-org/Tinny")
    hub.publish("an-org/Pickled", {"config.json": b"{}", "pytorch_model.bin": b""})
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors, only config\.json, pytorch_model\.bin"):
        dgraph.load("an-org/Pickled")
    hub.publish("an-org/Gguf", {"config.json": b"{}", "a-Q4_K_M.gguf": b""})
    with pytest.raises(CheckpointError, match=r"Run `hf download an-org/Gguf a-Q4_K_M\.gguf`, and give the path"):
        dgraph.load("an-org/Gguf")
    hub.gated.add(NAME)
    with pytest.raises(CheckpointError, match=rf"{NAME} is gated\. Accept its terms at http.*/{NAME}, and log in with"):
        dgraph.load(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"nothing was downloaded\. Run `hf download an-org/Tiny --revision v2`"):
        dgraph.load(f"{NAME}@v2")


def test_the_hub_that_is_away(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(
        CheckpointError, match=r"could not be downloaded.*Files that have arrived are kept.*HF_ENDPOINT names"
    ):
        dgraph.load(NAME)


def test_the_command_line_fetches(hub: Hub, tmp_path: Path) -> None:
    where = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), DOWNLOAD: "1", "HF_HUB_OFFLINE": "0"}
    command = [
        sys.executable,
        "-m",
        "dgraph",
        "generate",
        NAME,
        "--backend",
        "eager",
        "--max-new-tokens",
        "8",
        "--json",
    ]
    done = subprocess.run(
        [*command, "-p", "Sort these words: river stone"],
        env={**os.environ, **where},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "Tiny"
    assert (tmp_path / "home" / "hub" / "models--an-org--Tiny").is_dir()


def test_files_that_are_needed() -> None:
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    described = ["config.json", "model.safetensors.index.json", "tokenizer.json"]
    assert needed([*shards, *described, "model.fp16.safetensors", "a.bin", "b.py"]) == [*described, *shards]
    assert needed(["model.safetensors", "other.safetensors", "config.json"]) == ["config.json", "model.safetensors"]
    assert needed(["weights.safetensors"]) == ["weights.safetensors"]
    adapter = ["lora/adapter_config.json", "lora/adapter_model.safetensors"]
    assert needed([*adapter, "lora/README.md", "onnx/config.json"]) == adapter

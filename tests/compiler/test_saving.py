"""Checkpoints that are written with quantised weights: what is read from them is what `QuantizeWeights` makes."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dgraph
from dgraph.compiler.base_graph import quantising
from dgraph.compiler.saving import save_quantised
from dgraph.errors import CheckpointError, InputError, UnknownName
from dgraph.families.quantised import WHOLE
from dgraph.ir.graph import Graph
from dgraph.ir.stored_weights import formats_of
from dgraph.models.files import INDEX
from dgraph.passes import QuantizeWeights
from dgraph.passes.manager import run_passes
from tests.amounts import first_cases
from tests.models import test_sdar_moe as mixture
from tests.models.test_quantised import CONFIG, tokens_of, weights
from tests.remote import write

FORMATS = {
    "fp8": QuantizeWeights("fp8"),
    "fp8 by block": QuantizeWeights("fp8", (24, 16)),
    "int8 with zeros": QuantizeWeights("int8", zeros=True),
    "int8, LM head and embeddings": QuantizeWeights("int8", lm_head=True, embeddings=True),
    "int4 with zeros, all but some": QuantizeWeights("int4", (1, 16), zeros=True, lm_head=True, but=("*.k_proj.*",)),
    "int4 in few large blocks with zeros": QuantizeWeights("int4", (16, 16), True),
    "int8": QuantizeWeights("int8"),
    "int4": QuantizeWeights("int4", (1, 8)),
    "fp8 by tensor": QuantizeWeights("fp8", (WHOLE, WHOLE)),
    "int4 with zeros and embeddings": QuantizeWeights("int4", (1, 16), zeros=True, embeddings=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = write(tmp_path_factory.mktemp("folder") / "original", CONFIG, weights(), 2)
    (found / "notes.txt").write_text("kept")
    return found


captured = functools.cache(dgraph.capture)


def stored_in(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(saved: Path, original: Path, step: QuantizeWeights) -> Graph:
    """The graph of a checkpoint that was written, which is that of the original one after `QuantizeWeights`."""
    expected, found = captured(original).copy(), dgraph.capture(saved)
    run_passes(expected, [step])
    assert formats_of(expected).keys() == formats_of(found).keys()
    assert expected.tensors.keys() == found.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(*torch.broadcast_tensors(found.tensors[name], tensor)), name
    return found


@first_cases(6, "name", FORMATS)
def test_what_is_read_again_is_what_was_quantised(name: str, folder: Path, tmp_path: Path) -> None:
    saved = save_quantised(folder, tmp_path / "saved", FORMATS[name])
    graph = same(saved.folder, folder, FORMATS[name])
    assert saved.quantised == len(formats_of(graph)) > 20
    assert saved.after < saved.before / 2
    assert saved.before == sum(weight.nbytes for weight in weights().values())
    assert {file.name for file in tmp_path.iterdir()} == {"saved"}


@first_cases(1, "text", ["int4:block=1x8,embeddings=true,lm_head=true", "fp8:embeddings=true,lm_head=true"])
def test_an_embedding_that_is_the_head_is_stored_once(text: str, tmp_path: Path) -> None:
    config, step = {**CONFIG, "tie_word_embeddings": True}, quantising(text)
    assert step is not None
    tensors = {name: tensor for name, tensor in weights().items() if name != "lm_head.weight"}
    folder = write(tmp_path / "tied", config, tensors)
    saved = save_quantised(folder, tmp_path / "q", text)
    graph = same(saved.folder, folder, step)
    assert saved.quantised == len(formats_of(graph)) == 7 * config["num_hidden_layers"] + 1
    assert {name for name in stored_in(saved.folder) if "lm_head" in name} == set()
    assert tokens_of(saved.folder) == tokens_of(folder, weights=text)


def test_embeddings_are_a_group_of_their_own(folder: Path, tmp_path: Path) -> None:
    saved = save_quantised(folder, tmp_path / "q", "fp8:embeddings=true").folder
    settings = json.loads((saved / "config.json").read_text())["quantization_config"]
    linear, embedding = settings["config_groups"].values()
    assert (linear["targets"], embedding["targets"]) == (["Linear"], ["Embedding"])
    assert linear["weights"] == embedding["weights"]
    assert linear["input_activations"]["dynamic"]
    assert embedding["input_activations"] is None, "ids are no rows to round"
    assert settings["ignore"] == ["lm_head"]
    assert stored_in(saved)["model.embed_tokens.weight"].dtype == torch.float8_e4m3fn


def test_it_decodes_as_the_original_with_quantised_weights(folder: Path, tmp_path: Path) -> None:
    step = QuantizeWeights("int4", (1, 8))
    saved = save_quantised(folder, tmp_path / "q", step).folder
    assert tokens_of(saved) == tokens_of(folder, weights=step)


def test_experts_are_quantised_one_by_one(tmp_path: Path) -> None:
    folder, step = write(tmp_path / "m", mixture.KEYS, mixture.WEIGHTS), QuantizeWeights("int4", (1, 8))
    same(save_quantised(folder, tmp_path / "q", step).folder, folder, step)


def test_the_files(folder: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    saved = save_quantised(
        folder,
        tmp_path / "q",
        QuantizeWeights("int4", (1, 8)),
        shard_bytes=8000,
        progress=lambda *now: told.append(now),
    )
    assert told[-1] == (saved.before, saved.before)
    assert len(told) == len(weights())
    index = json.loads((saved.folder / INDEX).read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 3
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    stored = {name: file for file in shards for name in load_file(saved.folder / file)}
    assert stored == index["weight_map"]
    assert index["metadata"]["total_size"] == saved.after
    assert (saved.folder / "notes.txt").read_text() == "kept"
    config = json.loads((saved.folder / "config.json").read_text())
    assert config.pop("quantization_config")["ignore"] == ["model.embed_tokens", "lm_head"]
    assert config == CONFIG
    same(saved.folder, folder, QuantizeWeights("int4", (1, 8)))


class Stopped(Exception):
    pass


def test_an_interrupted_writing_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise Stopped

    with pytest.raises(Stopped):
        save_quantised(folder, tmp_path / "q", "int8", progress=stop)
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_cannot_be_written_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**options: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("dgraph.compiler.saving.os.access", lambda path, mode: path != tmp_path)
        with pytest.raises(InputError, match=r"q cannot be written: permission denied in"):
            save_quantised(folder, tmp_path / "q", "int8")
    monkeypatch.setattr("dgraph.compiler.saving.tempfile.TemporaryDirectory", refuse)
    with pytest.raises(CheckpointError, match=r"q cannot be written: .*Permission denied"):
        save_quantised(folder, tmp_path / "q", "int8")


@pytest.mark.parametrize(
    ("out", "how", "kind", "message"),
    [
        (".", "int8", InputError, "exists already; give a folder that does not"),
        ("a/b", "int8", InputError, "cannot be written: there is no folder .*a"),
        ("q", "int5", UnknownName, "unknown format of weights 'int5'"),
        ("q", "w8a8", InputError, "weights 'w8a8' cannot be written"),
        ("q", None, InputError, "weights None cannot be written"),
        ("q", QuantizeWeights("fp8", (WHOLE, 8)), InputError, "compressed-tensors has no word for blocks of -1 x 8"),
    ],
)
def test_what_cannot_be_written(
    out: str, how: Any, kind: type[Exception], message: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        save_quantised(folder, tmp_path / out, how)
    assert not [*tmp_path.iterdir()]


def test_a_quantised_checkpoint_is_not_written_again(folder: Path, tmp_path: Path) -> None:
    saved = save_quantised(folder, tmp_path / "q", "int8")
    with pytest.raises(InputError, match="the weights of q are quantised already"):
        save_quantised(saved.folder, tmp_path / "again", "int8")
    (saved.folder / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lacks model-00001-of-00001"):
        save_quantised(saved.folder, tmp_path / "again", "int8")

"""The dtype and the device of weights, by name: what loads, what is told, what is refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import dgraph
from dgraph.blueprint import Blueprint
from dgraph.cli.options import shape_dtype
from dgraph.errors import CheckpointError, DgraphWarning, InputError, UnknownName
from dgraph.settings import AUTO, torch_device, torch_dtype
from tests.cli.folders import weights, write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose weights are stored in bfloat16."""
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in weights().items()}
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "half", tensors)


@pytest.fixture(autouse=True)
def no_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", DgraphWarning)
        yield


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (None, None),
        ("auto", AUTO),
        ("float32", torch.float32),
        ("fp32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("bf16", torch.bfloat16),
        ("torch.bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        ("fp16", torch.float16),
        (torch.float16, torch.float16),
    ],
)
def test_names_of_dtypes(given: Any, dtype: Any) -> None:
    assert torch_dtype(given) == dtype


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("bf61", UnknownName, r"unknown dtype 'bf61'\. Did you mean 'bf16'.* Known: auto, bf16, bfloat16, float16"),
        ("int8", UnknownName, "unknown dtype 'int8'"),
        ("float64", UnknownName, "unknown dtype 'float64'"),
        (16, InputError, "dtype must be a torch.dtype or one of float32, bfloat16, float16, auto, got 16"),
        (torch.int8, CheckpointError, "cannot load .* as torch.int8"),
    ],
)
def test_what_is_no_dtype_of_weights(folder: Path, given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dgraph.load(folder, given)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [("auto", torch.bfloat16), ("bf16", torch.bfloat16), ("float32", torch.float32), (torch.float16, torch.float16)],
)
def test_a_folder_loads_in_the_dtype_that_is_named(folder: Path, given: Any, dtype: torch.dtype) -> None:
    found = dgraph.load(folder, given)
    assert found.spec.dtype == dtype
    assert {parameter.dtype for parameter in found.module.parameters()} == {dtype}
    assert found.stored_dtype == torch.bfloat16


def test_a_conversion_that_nobody_asked_for_is_told(folder: Path) -> None:
    with pytest.warns(DgraphWarning, match=r"half stores its weights as bfloat16; .* as float32\. Give dtype='auto'"):
        found = dgraph.load(folder)
    assert found.spec.dtype == torch.float32
    assert "float32 (the checkpoint has bfloat16; dtype='auto' keeps that)" in repr(found)
    assert "checkpoint" not in repr(dgraph.load(folder, "auto"))


def test_optimize_takes_the_same_words(folder: Path) -> None:
    made = dgraph.optimize(folder, "dense", dtype="auto", backend="eager", artifacts=False)
    assert made.captured.spec.dtype == torch.bfloat16
    assert len(made.generate(input_ids=[[5, 6]], max_new_tokens=2).token_ids[0]) == 2
    with pytest.warns(DgraphWarning, match="half stores its weights as bfloat16"):
        assert dgraph.optimize(folder, "dense", backend="eager", artifacts=False).spec.dtype == torch.float32


def test_a_blueprint_takes_the_same_words(folder: Path) -> None:
    assert Blueprint(model=str(folder), dtype="bf16").dtype == "bf16"
    with pytest.raises(UnknownName, match="unknown dtype 'int8'"):
        Blueprint(model=str(folder), dtype="int8")


def test_an_embedded_model_and_a_folder_in_float32_load_in_silence(tmp_path: Path) -> None:
    assert dgraph.load(write_checkpoint(tmp_path / "small")).spec.dtype == torch.float32
    assert dgraph.load("tiny_sdar").spec.dtype == torch.float32


def test_an_object_keeps_its_dtype_and_its_device(model: dgraph.Model) -> None:
    for same in ("auto", None, "float32"):
        assert dgraph.families.resolve(model, same, "cpu") is model
    with pytest.raises(InputError, match=r"an object with weights in float32, got dtype='bfloat16', .* module\.to\("):
        dgraph.optimize(model, dtype="bf16")


def test_random_weights_have_no_checkpoint() -> None:
    assert shape_dtype(None, torch.bfloat16) == torch.bfloat16
    assert shape_dtype("fp16", torch.bfloat16) == torch.float16
    with pytest.raises(InputError, match="--dtype auto is what a checkpoint has, and --shape has none"):
        shape_dtype("auto", torch.bfloat16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda")])
def test_a_device_that_is_not_there(folder: Path, device: Any) -> None:
    message = rf"device '{device}' cannot be used: .*\. `dgraph doctor` lists what is there\."
    for call in (torch_device, lambda given: dgraph.load(folder, device=given)):
        with pytest.raises(InputError, match=message):
            call(device)
    with pytest.raises(InputError, match=message):
        dgraph.optimize("tiny_sdar", device=device)


@pytest.mark.parametrize("device", ["meta", "gpu", 1.5, "cpu:x"])
def test_what_is_no_device(device: Any) -> None:
    with pytest.raises(InputError, match=rf"device '{device}' cannot be used"):
        torch_device(device)

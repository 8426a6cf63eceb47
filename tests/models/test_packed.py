"""Weights in two thirds of their bytes: every number comes back, damage is told, and the embedded models are small."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dgraph.errors import CheckpointError
from dgraph.families import embedded
from dgraph.models.checkpoint import read_tensors
from dgraph.models.files import INDEX
from dgraph.models.packed import EXPONENTS, REST, pack, unpack
from training import checkpoint

EMBEDDED_BYTES = 50 * 10**6
"""What models may take in the repository together."""


def test_every_number_of_bf16_comes_back() -> None:
    """NaNs with their bits, infinities, zeros of both signs and denormals; many more of one, so that packing pays."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    tensor = torch.cat((every, torch.ones(2**17, dtype=torch.bfloat16))).view(3, -1)
    parts = pack("a.weight", tensor)
    assert set(parts) == {f"a.weight{EXPONENTS}", f"a.weight{REST}"}
    assert sum(part.nbytes for part in parts.values()) < 0.8 * tensor.nbytes
    (found,) = unpack(parts).values()
    assert torch.equal(found.view(torch.int16), tensor.view(torch.int16))


def test_what_does_not_get_smaller_stays_as_it_is() -> None:
    few, single = torch.randn(4).bfloat16(), torch.randn(1000)
    evenly = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    for tensor in (few, single, evenly, torch.empty(0, dtype=torch.bfloat16)):
        assert pack("a", tensor)["a"] is tensor
    assert unpack({"a": few})["a"] is few


def test_a_checkpoint_is_packed_and_made_plain_again(tmp_path: Path) -> None:
    folder = embedded()["tiny_sdar"].folder
    checkpoint.main([str(folder), "--out", str(tmp_path / "plain")])
    plain = {k: v for shard in (tmp_path / "plain").glob("*.safetensors") for k, v in load_file(shard).items()}
    found = read_tensors(folder)
    assert plain.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in plain.items())
    checkpoint.main([str(tmp_path / "plain"), "--out", str(tmp_path / "packed"), "--pack"])
    for file in folder.iterdir():
        if file.suffix in (".safetensors", ".json") and file.name != INDEX:
            assert (tmp_path / "packed" / file.name).stat().st_size == pytest.approx(file.stat().st_size, rel=0.01)
    again = read_tensors(tmp_path / "packed")
    assert all(torch.equal(value, again[name]) for name, value in plain.items())
    with pytest.raises(SystemExit, match="packed is there already; give a folder that is not"):
        checkpoint.main([str(folder), "--out", str(tmp_path / "packed")])


def test_weights_of_another_dtype_are_not_rounded(tmp_path: Path) -> None:
    checkpoint.write_folder(tmp_path / "a", {"x": torch.ones(3)}, {}, dtype=torch.float32)
    with pytest.raises(SystemExit, match=r"has weights of torch\.float32, expected torch\.bfloat16 alone"):
        checkpoint.main([str(tmp_path / "a"), "--out", str(tmp_path / "b")])


DAMAGES: list[tuple[Callable[[dict[str, Tensor]], object], str]] = [
    (lambda parts: parts.pop(f"x{REST}"), "x/exponents is there without x/rest"),
    (lambda parts: parts.pop(f"x{EXPONENTS}"), "x/rest is there without x/exponents"),
    (lambda parts: parts.update({f"x{EXPONENTS}": torch.zeros(9, dtype=torch.uint8)}), "x/exponents is no code: Error"),
    (
        lambda parts: parts.update({f"x{REST}": parts[f"x{REST}"][1:].clone()}),
        "x has 4096 exponents for 4032 numbers",
    ),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_a_damaged_part_is_told(damage: Callable[[dict[str, Tensor]], object], said: str, tmp_path: Path) -> None:
    parts = pack("x", torch.randn(64, 64).bfloat16())
    damage(parts)
    save_file(parts, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"model\.safetensors is damaged or not a safetensors file: {said}"):
        read_tensors(tmp_path)


def test_the_embedded_models_take_no_more_than_they_may() -> None:
    files = [file for model in embedded().values() for file in model.folder.iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in files) < EMBEDDED_BYTES

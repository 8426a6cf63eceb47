"""NVFP4 and MXFP4: read as the numbers that a plain formula gives, and NaN among stored float8 named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dgraph
from dgraph.errors import CheckpointError
from dgraph.families import resolve
from tests.models.stored import CASES, Case, compressed
from tests.models.stored import Stored as Layer
from tests.models.test_quantised import LAYERS, folders, same_weights
from tests.remote import change_tensors

NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def codes_of(weight: Tensor, scales: Tensor, wide: int) -> tuple[Tensor, Tensor]:
    """The nearest numbers, packed, and the weight that they stand for by scales f32 [rows, groups]."""
    spread = scales.repeat_interleave(wide, 1)[:, : weight.shape[1]]
    nearest = ((weight / spread).abs().unsqueeze(-1) - NUMBERS).abs().argmin(-1)
    code = nearest + 8 * (weight < 0)
    sign = torch.where(weight < 0, -1.0, 1.0)
    return (code[:, ::2] | code[:, 1::2] << 4).to(torch.uint8), sign * NUMBERS[nearest] * spread


def most(weight: Tensor, wide: int) -> Tensor:
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % wide))
    return padded.unflatten(1, (-1, wide)).abs().amax(-1)


def nvfp4(weight: Tensor, scale: str, whole: str, divides: bool) -> Layer:
    scales = (most(weight, 16) / 6 * 64).to(torch.float8_e4m3fn)
    codes, made = codes_of(weight, scales.float() / 64, 16)
    name = "weight_packed" if divides else "weight"
    by = torch.tensor([64.0]) if divides else torch.tensor(1 / 64)
    return {name: codes, scale: scales, whole: by, "input_global_scale": torch.ones(1)}, made


def mxfp4(weight: Tensor) -> Layer:
    exponents = (most(weight, 32) / 6).log2().ceil()
    codes, made = codes_of(weight, 2.0**exponents, 32)
    return {"weight_packed": codes, "weight_scale": (exponents + 127).to(torch.uint8)}, made


def scheme(strategy: str, size: int) -> dict[str, Any]:
    return {"num_bits": 4, "type": "float", "strategy": strategy, "group_size": size, "symmetric": True}


LAYOUTS = {
    "compressed nvfp4": Case(
        compressed("nvfp4-pack-quantized", scheme("tensor_group", 16)),
        lambda weight: nvfp4(weight, "weight_scale", "weight_global_scale", divides=True),
    ),
    "compressed mxfp4": Case(compressed("mxfp4-pack-quantized", scheme("group", 32)), mxfp4),
    "modelopt nvfp4": Case(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        lambda weight: nvfp4(weight, "weight_scale", "weight_scale_2", divides=False),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_numbers_are_those_of_the_formula(name: str, tmp_path: Path) -> None:
    quantised, plain = (resolve(folder, opened=True) for folder in folders(tmp_path, LAYOUTS[name]))
    assert same_weights(quantised, plain) == 7 * LAYERS


def test_a_checkpoint_of_nvfp4_decodes_as_the_weights_that_it_stands_for(tmp_path: Path) -> None:
    made = [
        dgraph.optimize(str(folder), "dense", backend="eager")
        .generate(input_ids=[[5, 6, 7, 8]], max_new_tokens=8)
        .token_ids
        for folder in folders(tmp_path, LAYOUTS["modelopt nvfp4"])
    ]
    assert made[0] == made[1]


def test_scales_of_another_size_are_named(tmp_path: Path) -> None:
    folder, _ = folders(tmp_path, LAYOUTS["modelopt nvfp4"], shards=1)
    name = "model.layers.0.mlp.up_proj.weight_scale"
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name][:, :1].contiguous()}))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_scale is float8_e4m3fn .* expected float8_e4m3fn"):
        dgraph.load(folder)


def test_nan_among_stored_float8_is_refused_by_name(tmp_path: Path) -> None:
    folder, _ = folders(tmp_path, CASES["compressed fp8 by rows"], shards=1)
    name = "model.layers.1.mlp.up_proj.weight"
    change_tensors(folder, lambda tensors: tensors[name].view(torch.uint8)[0].fill_(0x7F))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has NaN in \d+ of its float8"):
        dgraph.load(folder)

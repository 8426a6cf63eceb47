"""Checkpoints of NVIDIA's Model Optimizer: weights in e4m3 with one scale, and in NVFP4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dgraph.errors import CheckpointError
from dgraph.families.quantised import WHOLE, blocks_of
from dgraph.models import e2m1
from dgraph.models.layouts import Layout, Module, Quantised, weight


def modelopt(settings: Mapping[str, Any]) -> Layout:
    """`quant_algo` "FP8" and "NVFP4"; activations are measured as they come."""
    algorithm = settings.get("quant_algo")
    if algorithm not in ("FP8", "NVFP4"):
        raise CheckpointError(f"quant_algo of modelopt is {algorithm!r}, expected 'FP8' or 'NVFP4'.")
    leaves = "weight", "weight_scale", "weight_scale_2"
    return Layout(leaves, _fp8 if algorithm == "FP8" else _nvfp4)


def _fp8(module: Module) -> Quantised:
    values = module.get("weight", (torch.float8_e4m3fn,))
    shape, block = (int(values.shape[0]), int(values.shape[1])), (WHOLE, WHOLE)
    return weight("fp8", shape, block, values, module.scales("weight_scale", shape, block))


def _nvfp4(module: Module) -> Quantised:
    codes = module.get("weight", (torch.uint8,))
    rows, columns = int(codes.shape[0]), 2 * int(codes.shape[1])
    scales = module.get("weight_scale", (torch.float8_e4m3fn,), blocks_of((rows, columns), (1, e2m1.NVFP4)))
    whole = module.get("weight_scale_2", (torch.float32,), ())
    return weight("int8", (rows, columns), (1, e2m1.NVFP4), e2m1.doubled(codes), e2m1.halved(scales, whole))

"""Weights as published layouts store them, written in plain PyTorch from what is published of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Stored = tuple[dict[str, Tensor], Tensor]
"""The tensors of a layer by the last part of their names, and its weight, f32[out, in]."""
GROUP = 8


@dataclass(frozen=True)
class Case:
    """A layout: what config.json says of it, and how a weight f32[out, in] is stored."""

    settings: Mapping[str, Any]
    store: Callable[[Tensor], Stored]


def words(numbers: Tensor, bits: int = 4) -> Tensor:
    """Unsigned numbers [rows, n] as int32 [rows, ceil(n * bits / 32)]: the first one in the lowest bits."""
    each = 32 // bits
    padded = torch.nn.functional.pad(numbers.long(), (0, -numbers.shape[1] % each)).unflatten(1, (-1, each))
    packed = (padded << (torch.arange(each) * bits)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def grouped(weight: Tensor, size: int) -> Tensor:
    """[out, in] -> [out, groups, size]."""
    return weight.unflatten(1, (-1, size))


def by_group(weight: Tensor, bits: int, size: int = GROUP) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned numbers [out, in], scales f16 [out, groups] and zeros [out, groups] in whole numbers."""
    groups, most = grouped(weight, size), 2**bits - 1
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / most).half()
    zeros = (-low / scales).round().clamp(0, most)
    numbers = (groups / scales.unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(0, most)
    return numbers.flatten(1), scales, zeros


def symmetric(weight: Tensor, bits: int, size: int = GROUP) -> tuple[Tensor, Tensor]:
    """Numbers around 0 [out, in] and scales f16 [out, groups]."""
    groups, most = grouped(weight, size), 2 ** (bits - 1) - 1
    scales = (groups.abs().amax(-1) / most).half()
    return (groups / scales.unsqueeze(-1)).round().clamp(-most - 1, most).flatten(1), scales


def weight_of(numbers: Tensor, scales: Tensor, zeros: Tensor | float = 0.0, size: int = GROUP) -> Tensor:
    """(number - zero) * scale, by groups along a row."""
    lowest = zeros.unsqueeze(-1) if isinstance(zeros, Tensor) else zeros
    return ((grouped(numbers.float(), size) - lowest) * scales.float().unsqueeze(-1)).flatten(1)


# -- compressed-tensors --------------------------------------------------------------------------------------------


def compressed(format: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}


def fp8_rows(weight: Tensor) -> Stored:
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    values = (weight / scale.float()).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale}, values.float() * scale.float()


def fp8_tensor(weight: Tensor) -> Stored:
    scale = (weight.abs().amax() / 448).reshape(1)
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale, "input_scale": torch.ones(1)}, values.float() * scale


def fp8_blocks(leaf: str, high: int = 24, wide: int = 16) -> Callable[[Tensor], Stored]:
    """Blocks of which the last ones may be cut off by the end of the weight."""

    def store(weight: Tensor) -> Stored:
        rows, columns = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
        blocks = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high))
        scale = blocks.abs().amax((1, 3)) / 448
        spread = scale.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:rows, :columns]
        values = (weight / spread).to(torch.float8_e4m3fn)
        return {"weight": values, leaf: scale}, values.float() * spread

    return store


def int8_rows(weight: Tensor) -> Stored:
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    values = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": values, "weight_scale": scale}, values.float() * scale.float()


def packed_int(bits: int) -> Callable[[Tensor], Stored]:
    def store(weight: Tensor) -> Stored:
        numbers, scales = symmetric(weight, bits)
        stored = words(numbers + 2 ** (bits - 1), bits)
        shape = torch.tensor(weight.shape)
        return {"weight_packed": stored, "weight_scale": scales, "weight_shape": shape}, weight_of(numbers, scales)

    return store


def packed_with_zeros(weight: Tensor) -> Stored:
    numbers, scales, zeros = by_group(weight, 4)
    found = {
        "weight_packed": words(numbers),
        "weight_scale": scales,
        "weight_zero_point": words(zeros.t()).t().contiguous(),  # packed along the rows
        "weight_shape": torch.tensor(weight.shape),
    }
    return found, weight_of(numbers, scales, zeros)


# -- awq, gptq, torchao --------------------------------------------------------------------------------------------


def awq(weight: Tensor) -> Stored:
    numbers, scales, zeros = by_group(weight, 4)

    def outputs(rows: Tensor) -> Tensor:  # the k-th number of a word is output (0, 2, 4, 6, 1, 3, 5, 7)[k]
        return words(rows.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1))

    found = {"qweight": outputs(numbers.t()), "qzeros": outputs(zeros.t()), "scales": scales.t().contiguous()}
    return found, weight_of(numbers, scales, zeros)


def gptq(bits: int, less: int, sym: bool, size: int = GROUP) -> Callable[[Tensor], Stored]:
    def store(weight: Tensor) -> Stored:
        numbers, scales, zeros = by_group(weight, bits, size)
        if sym:
            signed, scales = symmetric(weight, bits, size)
            numbers, zeros = signed + 2 ** (bits - 1), torch.full_like(zeros, 2 ** (bits - 1))
        columns = weight.shape[1]
        found = {
            "qweight": words(numbers, bits).t().contiguous(),
            "qzeros": words((zeros.t() - less) % 2**bits, bits),
            "scales": scales.t().contiguous(),
            "g_idx": (torch.arange(columns) // size).int(),
        }
        return found, weight_of(numbers, scales, zeros, size)

    return store


def torchao_rows(weight: Tensor) -> Stored:
    found, dequantised = int8_rows(weight)
    scale = found["weight_scale"].float()
    zeros = torch.zeros_like(scale, dtype=torch.int8)
    return {"_weight_qdata": found["weight"], "_weight_scale": scale, "_weight_zero_point": zeros}, dequantised


def torchao_tensor(weight: Tensor) -> Stored:
    found, dequantised = fp8_tensor(weight)
    return {"_weight_qdata": found["weight"], "_weight_scale": found["weight_scale"].reshape(1, 1)}, dequantised


def torchao_groups(weight: Tensor) -> Stored:
    numbers, scales, zeros = by_group(weight, 8)
    found = {
        "_weight_qdata": (numbers - 128).to(torch.int8),
        "_weight_scale": scales,
        "_weight_zero_point": (zeros - 128).to(torch.int8),
    }
    return found, weight_of(numbers, scales, zeros)


def torchao_int4(weight: Tensor) -> Stored:
    """number * scale + offset, of numbers -8..7; scales are powers of 2 and offsets quarters of them, so exact."""
    groups = grouped(weight, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = torch.exp2(((high - low) / 15).log2().ceil())
    offsets = ((low / scales + 8) * 4).round() / 4 * scales
    spread, middle = scales.unsqueeze(-1), offsets.unsqueeze(-1)
    numbers = ((groups - middle) / spread).round().clamp(-8, 7)
    pairs = numbers.flatten(1).to(torch.int8)
    found = {
        "_weight_qdata": (pairs[:, ::2] & 15) | (pairs[:, 1::2] << 4),
        "_weight_scale": scales.t().contiguous(),
        "_weight_zero_point": offsets.t().contiguous(),
    }
    return found, (numbers * spread + middle).flatten(1)


def torchao_by(name: str, packing: str, **more: Any) -> dict[str, Any]:
    """Settings of torchao as transformers writes them."""
    data = {"int4_packing_format": {"_type": "Int4PackingFormat", "_data": packing}, **more}
    return {**_TORCHAO, "quant_type": {"default": {"_type": name, "_version": 2, "_data": data}}}


def _int(bits: int, strategy: str, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric, "dynamic": False, **more}


def _float(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **more}


_GPTQ = {"quant_method": "gptq", "group_size": GROUP, "desc_act": False}
_TORCHAO = {"quant_method": "torchao", "modules_to_not_convert": ["lm_head"]}
_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}

CASES = {
    "compressed fp8 by rows": Case(compressed("float-quantized", _float("channel"), TOKEN), fp8_rows),
    "compressed fp8 by tensor": Case(compressed("naive-quantized", _float("tensor"), TOKEN), fp8_tensor),
    "compressed fp8 by block": Case(
        compressed("float-quantized", _float("block", block_structure=[24, 16])), fp8_blocks("weight_scale")
    ),
    "compressed int8": Case(compressed("int-quantized", _int(8, "channel"), {**TOKEN, "type": "int"}), int8_rows),
    "compressed int4": Case(compressed("pack-quantized", _int(4, "group", group_size=GROUP)), packed_int(4)),
    "compressed packed int8": Case(compressed("pack-quantized", _int(8, "group", group_size=GROUP)), packed_int(8)),
    "compressed int4 with zeros": Case(
        compressed("pack-quantized", _int(4, "group", symmetric=False, group_size=GROUP)), packed_with_zeros
    ),
    "fp8 by block": Case({**_BLOCKS, "weight_block_size": [24, 16]}, fp8_blocks("weight_scale_inv")),
    "awq": Case({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, awq),
    "gptq": Case({**_GPTQ, "bits": 4, "sym": False}, gptq(4, 1, False)),
    "gptq symmetric": Case({**_GPTQ, "bits": 4, "sym": True}, gptq(4, 1, True)),
    "gptq symmetric, zeros as they are": Case({**_GPTQ, "bits": 4, "sym": True}, gptq(4, 0, True)),
    "gptq v2": Case({**_GPTQ, "bits": 4, "sym": False, "checkpoint_format": "gptq_v2"}, gptq(4, 0, False)),
    "gptq of 8 bits": Case({**_GPTQ, "bits": 8, "sym": False}, gptq(8, 1, False)),
    "torchao int8": Case(_TORCHAO, torchao_rows),
    "torchao fp8 by tensor": Case(_TORCHAO, torchao_tensor),
    "torchao int8 by groups": Case(_TORCHAO, torchao_groups),
    "torchao int4": Case(torchao_by("Int4WeightOnlyConfig", "PLAIN", group_size=GROUP), torchao_int4),
}

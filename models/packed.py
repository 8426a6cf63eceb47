"""Weights in bf16 in two thirds of their bytes, bit for bit.

The exponents of a trained tensor, 8 bits each, have an entropy of fewer than 3, and a Huffman code takes little more.
In signs and mantissas there is nothing to save: they stay bytes (as in DFloat11, arXiv 2504.11651). In a shard a tensor
NAME is then two tensors. NAME/exponents is u8 of a zlib stream. NAME/rest is u8 of the tensor's shape: the sign above 7
bits of mantissa.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

EXPONENTS, REST = "/exponents", "/rest"


def pack(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Tensors that store a tensor on the CPU: its two parts, or itself if it is not bf16 or they are not smaller."""
    if tensor.dtype != torch.bfloat16:
        return {name: tensor}
    bits = tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
    # A longer window finds no repetitions in these, and takes a hundred times as long to look for them.
    coder = zlib.compressobj(9, zlib.DEFLATED, 15, 9, zlib.Z_HUFFMAN_ONLY)
    code = coder.compress((bits >> 7).astype(np.uint8).tobytes()) + coder.flush()
    if len(code) >= tensor.numel():
        return {name: tensor}
    rest = (bits >> 8 & 0x80 | bits & 0x7F).astype(np.uint8)
    exponents = torch.frombuffer(bytearray(code), dtype=torch.uint8)
    return {f"{name}{EXPONENTS}": exponents, f"{name}{REST}": torch.from_numpy(rest)}


def unpack(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a shard by name; those that are not packed are given back as they are.

    Raises:
        ValueError: a part is missing, or the two do not belong together.
    """
    found: dict[str, Tensor] = {}
    for part, tensor in tensors.items():
        name, slash, kind = part.rpartition("/")
        if f"{slash}{kind}" == EXPONENTS:
            found[name] = _joined(name, tensor, tensors.get(f"{name}{REST}"))
        elif f"{slash}{kind}" != REST:
            found[part] = tensor
        elif f"{name}{EXPONENTS}" not in tensors:
            raise ValueError(f"{part} is there without {name}{EXPONENTS}")
    return found


def _joined(name: str, code: Tensor, rest: Tensor | None) -> Tensor:
    if rest is None:
        raise ValueError(f"{name}{EXPONENTS} is there without {name}{REST}")
    try:
        exponents = np.frombuffer(zlib.decompress(code.numpy().tobytes()), np.uint8)
    except zlib.error as error:
        raise ValueError(f"{name}{EXPONENTS} is no code: {error}") from None
    if len(exponents) != rest.numel():
        raise ValueError(f"{name} has {len(exponents)} exponents for {rest.numel()} numbers")
    low = rest.numpy().astype(np.uint16)
    bits = (low & 0x80) << 8 | exponents.astype(np.uint16).reshape(low.shape) << 7 | low & 0x7F
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)

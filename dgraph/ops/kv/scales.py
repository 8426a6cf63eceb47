"""Keys and values in eight bits: a float8 vector and one scale for each position and KV head.

The scale of a vector is its largest magnitude divided by the largest number of the format. So nothing needs
calibration, and nothing depends on other rows. Ops that take such caches take their scales as last arguments: None for
caches in the dtype of the model.

Scales [pages, page, Hkv] of a paged cache lie by head. Within a page, the scales of all positions for one head come
before those for the next. Attention takes one head of many positions, and so reads scales that lie side by side. The
shape does not show this order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.registry import numeric

FLOAT8 = torch.float8_e4m3fn
KV_DTYPES = {"fp8": FLOAT8}
"""Formats other than the model's in which keys and values can be stored, by the name under which they are chosen."""
LARGEST = 448.0
"""The largest number of float8_e4m3fn."""
LEAST = 2.0**-100
"""The least scale, also that of a vector of zeros."""


def scaled(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Round vectors [..., D] to float8 [..., D] with scales f32[...].

    Computed in fp32, and rounded to the nearest, ties to even. Scales of a paged cache [pages, page, Hkv, D] lie by
    head.
    """
    wide = vectors.float()
    scale = (wide.abs().amax(-1) / LARGEST).clamp(min=LEAST)
    return (wide / scale[..., None]).to(FLOAT8), by_head(scale) if vectors.dim() == 4 else scale


def by_head(scale: Tensor) -> Tensor:
    """Lay out scales [pages, page, Hkv] by head, as those of a paged cache."""
    return scale.transpose(1, 2).contiguous().transpose(1, 2)


def unscaled(stored: Tensor, scale: Tensor | None, like: torch.dtype) -> Tensor:
    """Multiply stored vectors [..., D] by their scales [...], in fp32, or in `like` if that is wider.

    Without scales they are returned as they are.
    """
    return stored if scale is None else stored.to(numeric(like)) * scale[..., None]


def store(op: str, vectors: Tensor, at: tuple[Tensor, ...] | slice, cache: Tensor, scale: Tensor | None) -> None:
    """Write vectors to places of a cache, and their scales to the same places of `scale`, if the cache has scales.

    Raises:
        InputError: a float8 cache without scales; the message names `op`.
    """
    check_scale(op, cache, scale)
    if scale is None:
        cache[at] = vectors
    else:
        found, by = scaled(vectors)
        cache[at], scale[at] = found.to(cache.dtype), by.to(scale.dtype)


def check_scale(op: str, stored: Tensor, scale: Tensor | None) -> None:
    """Refuse float8 without scales, and scales of a paged cache that do not lie by head.

    Raises:
        InputError: naming `op`.
    """
    if stored.dtype == FLOAT8 and scale is None:
        raise InputError(
            f"dgraph::{op}: keys and values in {FLOAT8} have scales f32, one for each vector; got "
            f"{list(stored.shape)} without. Pass the scales that were written with them."
        )
    if scale is not None and stored.dim() == 4:
        fits = scale.shape == stored.shape[:-1]
        if not fits or not scale.transpose(1, 2).is_contiguous():
            raise InputError(
                f"dgraph::{op}: the scales of a paged cache {list(stored.shape)} must be {list(stored.shape[:-1])} and "
                f"lie by head, got {list(scale.shape)} with strides {scale.stride()}. Lay them out by "
                f"dgraph.ops.kv.scales.by_head, or declare the pool with InputSpec(by_head=True)."
            )

"""Block caches: rules for decoded rows of a block that are not forwarded again before the block is done."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

BlockCache = Literal["off", "dc", "dc+"]
BLOCK_CACHES: tuple[BlockCache, ...] = get_args(BlockCache)


def ready_columns(decoded: Tensor, rule: BlockCache) -> Tensor:
    """Columns whose keys and values are frozen within their block: bool[b, B] -> bool[b, B].

    decoded: before the commit of the step. "off": none. "dc": the decoded ones. "dc+": the decoded ones whose
    right neighbour is decoded too; the last column counts as having one (FOCUS, delayed cache).
    """
    if rule == "off":
        return torch.zeros_like(decoded)
    if rule == "dc":
        return decoded
    right = torch.cat([decoded[:, 1:], torch.ones_like(decoded[:, :1])], dim=1)
    return decoded & right

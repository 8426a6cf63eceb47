"""A plain module that is no transformers class: it calls `scaled_dot_product_attention` itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dgraph
from dgraph.ir.graph import Graph
from tests.tiny import VOCAB, tiny_spec


class Block(nn.Module):
    """A block of a plain module: SDPA over 4 heads, or over 4 query and 2 key heads."""

    def __init__(self, kv_heads: int, **options: Any):
        super().__init__()
        self.kv_heads, self.options = kv_heads, options
        self.qkv = nn.Linear(16, 16 + 2 * 4 * kv_heads)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).split([16, 4 * self.kv_heads, 4 * self.kv_heads], dim=-1)
        q, k, v = (z.view(b, t, -1, 4).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, **self.options)
        return x + self.out(y.transpose(1, 2).reshape(b, t, 16))


class Plain(nn.Module):
    """Embedding, a twist (any module that maps the stream and the positions to a stream), blocks, head."""

    def __init__(self, kv_heads: int = 4, blocks: int = 2, twist: nn.Module | None = None, **options: Any):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(VOCAB, 16)
        self.twist = twist
        self.blocks = nn.ModuleList(Block(kv_heads, **options) for _ in range(blocks))
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        if self.twist is not None:
            x = self.twist(x, position_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def capture_plain(module: nn.Module) -> Graph:
    spec = tiny_spec(dtype=torch.float32, layers=len(module.blocks))  # type: ignore[arg-type]
    return dgraph.capture(dgraph.Model("plain", module.eval(), spec))

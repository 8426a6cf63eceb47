"""dgraph::attention: the form in which a model's attention is captured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dgraph.ops.padded import check_heads, check_window
from dgraph.ops.registry import Sample, define

CONTRACT = """\
Bidirectional attention over a dense batch; every query sees every key.
q [b, Hq, T, D]; k, v [b, Hkv, S, D], post-RoPE, not repeated; query head h reads KV head h // (Hq / Hkv).
out [b, Hq, T, D], contiguous, in the dtype of q. Scores q.k * scale and sums in fp32 at least.
There is no mask and there are no padding rows: capture happens before rows are packed.
window: of the keys before a row's block, the last window - 1 are seen (0: all). A dense batch is one block, of which
every query sees every key; so here it says nothing, and is kept for the ops that attention becomes."""


def reference(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0) -> Tensor:
    check_heads("attention", q, k, 1)
    check_window("attention", None, window, dense=True)
    return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1]).contiguous()


def fake(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    for name, b, hq, hkv, t, d in (
        ("plain", 2, 4, 4, 9, 16),
        ("gqa", 1, 6, 2, 7, 8),
        ("one token, multi-query", 3, 3, 1, 1, 10),
    ):
        yield Sample(name, (draw(b, hq, t, d), draw(b, hkv, t, d), draw(b, hkv, t, d), d**-0.5))
    strided = [draw(2, 5, h, 8).transpose(1, 2) for h in (4, 2, 2)]
    yield Sample("strided, large scores", (strided[0] * 30, strided[1], strided[2], 1.0))
    yield Sample("a window", (draw(1, 2, 5, 8), draw(1, 1, 5, 8), draw(1, 1, 5, 8), 1.0, 2))


OP = define(
    "attention",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
)

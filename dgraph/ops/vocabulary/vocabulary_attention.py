"""dgraph::vocabulary_attention: decisions and soft embeddings from a tied LM head, with nothing of [rows, V] in memory.

softmax(cap(h E^T) / T) E is attention with the embedding E as keys and values. A step of DiffusionGemma takes four
statistics from its head, and one pass over E gives them all. They are the most likely token, a draw, the entropy, and
the mean embedding that its next step reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dgraph.ops.registry import Sample, define, numeric
from dgraph.ops.vocabulary import vocabulary_part
from dgraph.ops.vocabulary.vocabulary_combine import decided
from dgraph.ops.vocabulary.vocabulary_part import NUMBERS

CONTRACT = """\
h [N, d]; weight [V, d], V <= 2^24; temperature f32[N], >= 0; seed i64[N]; cu_rows i32 or i64 [b+1], of which only the
last entry is read, on the device: so many rows are live (a number above N counts as N). softcap: None, or c > 0.
z = h @ weight.T from products that are summed in fp32 and not rounded; then, in fp32: cap(z) = c * tanh(z / c), or z
without a softcap; x = cap(z) / T, where T is the temperature, or 1 where that is 0; the id `suppress` (-1: none) counts
as if its x were -inf. p = softmax(x)
-> best i64[N]: the id of the largest x (ties: lowest id); confidence f32[N]: p of it; token i64[N]: drawn from p by the
Gumbel-max rule, with the noise of dgraph::lm_head, a hash of (seed of the row, id) (temperature 0: best); entropy
f32[N] of p in nats; soft [N, d]: p @ weight, in the dtype of h. confidence and entropy are float64 for float64.
A draw depends on nothing but x and seed: not on batch, tiles or device. p is rounded to the dtype of h before its
product with weight; sums are in fp32.
Padding rows may hold anything, influence no other row, and give best and token -1, confidence -inf, entropy inf and a
soft of zeros. A row whose x are no numbers gives NaN for confidence, entropy and soft, and may give no id.
Deterministic. No tensor of [N, V] exists: x is computed for some ids at a time, with running maxima."""

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def reference(
    h: Tensor,
    weight: Tensor,
    temperature: Tensor,
    seed: Tensor,
    cu_rows: Tensor,
    softcap: float | None,
    suppress: int,
) -> Results:
    first = cu_rows.new_zeros(1, dtype=torch.int64)
    share = h, weight, temperature, seed, cu_rows, softcap, suppress, first, len(weight)
    context, numbers = vocabulary_part.reference(*share)
    *found, soft = decided(numbers, context, numbers[:, -1] != -1)
    best, confidence, token, entropy = found
    return best, confidence, token, entropy, soft.to(h.dtype)


def fake(h: Tensor, weight: Tensor, temperature: Tensor, seed: Tensor, *rest: Any) -> Results:
    confidence, entropy = (h.new_empty(seed.shape, dtype=numeric(h.dtype)) for _ in range(2))
    return torch.empty_like(seed), confidence, torch.empty_like(seed), entropy, h.new_empty(h.shape)


def workspace(device: torch.device, h: Tensor, weight: Tensor, *rest: Any) -> int:
    """Bytes of one chunk of ids, see `vocabulary_part.workspace`, and of the results that it leaves for this op."""
    more = numeric(h.dtype).itemsize * (h.numel() + NUMBERS * len(h))
    return vocabulary_part.workspace(device, h, weight) + more


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, args, padded in vocabulary_part.calls(generator):
        yield Sample(name, args, padded)


OP = define(
    "vocabulary_attention",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    count="cu_rows",
    padding=(-1, -torch.inf, -1, torch.inf, 0),
    kernel="dgraph.ops.vocabulary.triton.vocabulary_attention:kernel",
    workspace=workspace,
)

"""dgraph::lm_head_adjusted: dgraph::lm_head on logits that each sequence scales, shifts and cuts by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dgraph.ops.draws import pad_rows
from dgraph.ops.lm_head import lm_head
from dgraph.ops.registry import Sample, define, numeric

CONTRACT = """\
h, weight, bias, candidate, temperature, seed, max_num_logits, suppress, packed: as dgraph::lm_head takes them
-> what it gives for the adjusted logits of each row, which are computed chunk by chunk in fp32.
sequence i64[K]: the sequence of each row, 0 <= sequence < b for a candidate. scale f32[b, V], above 0: a positive logit
is divided by it, a negative one is multiplied. addend f32[b, V]: then added; -inf for an id that is never produced. At
least one id of a sequence has a finite one. least f32[b], in [0, 1]: ids whose p = softmax(z / T) (T = 1 for
temperature 0) is below `least` times the largest p are then left out; 0 leaves out none.
A scale of 1 with an addend of 0 and a least of 0 gives what dgraph::lm_head gives, to the bit.
Deterministic. Holds further fp32 copies of one chunk's logits, two on a GPU and five on a CPU."""


def adjusted(logits: Tensor, scale: Tensor, addend: Tensor) -> Tensor:
    """Logits [R, V], scaled and shifted by [R, V] of each row's sequence, in fp32 (float64 of float64)."""
    logits = logits.to(numeric(logits.dtype))
    return torch.where(logits > 0, logits / scale, logits * scale) + addend


def cut_below(logits: Tensor, least: Tensor, temperature: Tensor) -> Tensor:
    """Logits [R, V] with -inf at ids whose probability is below `least` f32[R] times the largest at the temperature.

    No number compares with NaN, so a row of NaN stays one. min-p sampling: Minh et al., arXiv 2407.01082.
    """
    heat = torch.where(temperature > 0, temperature, 1.0).to(logits.dtype)
    border = logits.amax(-1) + heat * least.to(logits.dtype).log()
    return logits.masked_fill(logits < border[:, None], -torch.inf)


def decided_by(
    logits: Tensor, of: Tensor, temperature: Tensor, suppress: int, scale: Tensor, addend: Tensor, least: Tensor
) -> Tensor:
    """Logits [R, V] by which rows of sequences `of` i64[R] are decided, from the tables of all sequences."""
    found = adjusted(logits, scale[of], addend[of])
    if suppress >= 0:  # its probability must not count as the largest
        found[:, suppress] = -torch.inf
    return cut_below(found, least[of], temperature)


def reference(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    candidate: Tensor,
    temperature: Tensor,
    seed: Tensor,
    max_num_logits: int,
    suppress: int,
    packed: bool,
    sequence: Tensor,
    scale: Tensor,
    addend: Tensor,
    least: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def adjust(rows: Tensor, logits: Tensor) -> Tensor:
        return decided_by(logits, sequence[rows], temperature[rows], suppress, scale, addend, least)

    return lm_head.decode_candidates(
        h, weight, bias, candidate, temperature, seed, max_num_logits, suppress, packed, adjust=adjust
    )


def workspace(
    device: torch.device, h: Tensor, weight: Tensor, bias: Tensor | None, candidate: Tensor, *rest: Any
) -> int:
    """Bytes of one chunk.

    On a GPU: those of dgraph::lm_head, and two fp32 copies of its logits. On a CPU: its logits, five such copies, and
    flags. The copies are both tables by row, the quotient, the product, and one of these two.
    """
    logits = min(len(candidate), rest[2]) * len(weight)
    if device.type != "cuda":
        return logits * (h.element_size() + 5 * numeric(h.dtype).itemsize + 1)
    given = lm_head.workspace(device, h, weight, bias, candidate, *rest)
    return given + 2 * logits * numeric(h.dtype).itemsize


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for sample in lm_head.samples(generator):
        k, vocab, sequences = len(sample.args[3]), len(sample.args[1]), 3
        sequence = torch.randint(0, sequences, (k,), generator=generator)
        scale = 1 + torch.rand(sequences, vocab, generator=generator)
        scale[0] = 1
        addend = torch.randn(sequences, vocab, generator=generator)
        addend[1, 1::2] = -torch.inf
        least = torch.tensor([0.0, 0.1, 0.6])
        packed = len(sample.args) > 8
        tables = scale, addend, least
        padded = (*sample.padded[:8], packed, pad_rows(sequence, 3), *tables) if sample.padded else None
        yield replace(sample, args=(*sample.args[:8], packed, sequence, *tables), padded=padded)


OP = define(
    "lm_head_adjusted",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=lm_head.fake,
    apart_by="candidate",
    own_rows=("h",),
    padding=(-1, -torch.inf, -torch.inf, torch.inf),
    kernel="dgraph.ops.lm_head.triton.lm_head_adjusted:kernel",
    stored=("weight",),
    rounded=("h",),
    workspace=workspace,
)

"""dgraph::lm_head_measured: dgraph::lm_head with further statistics of each row's distribution."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dgraph.ops.draws import pad_rows
from dgraph.ops.lm_head import lm_head
from dgraph.ops.registry import Sample, define, numeric
from dgraph.ops.statistics import CURRENT, ENTROPY, KL, MARGIN, declare, declared, kept_rows, measure_rows

CONTRACT = """\
h, weight, bias, candidate, temperature, seed, max_num_logits, suppress, packed: as dgraph::lm_head takes them
-> what it gives for them, and measured f32[K, S] (float64 for float64): the S statistics (see
dgraph.ops.statistics.declare), one column for each, computed from the logits of a chunk before these are freed.
slot i64[K]: the place of the row's position (see dgraph::row_slots), -1 for none; state f32[pages, page, 1 + W] holds
there what the statistics keep of a row until it is projected again (see dgraph.ops.statistics.kept_rows). No two
candidates have one place. Rows that are no candidates keep nothing. current i64[K]: the token that stands at the
position that the row predicts, -1 for none; the statistics see it as RowLogits.standing, and nothing else reads it.
measured is 0 for rows that are no candidates.
Deterministic. Each statistic holds fp32 copies of one chunk's logits meanwhile."""

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


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
    slot: Tensor,
    current: Tensor,
    state: Tensor,
    statistics: str,
) -> Results:
    chosen = declared(statistics)
    measured = temperature.new_zeros((*candidate.shape, len(chosen)), dtype=numeric(h.dtype))

    def measure(rows: Tensor, logits: Tensor, token: Tensor) -> None:
        live = torch.ones_like(rows, dtype=torch.bool)
        of_rows = temperature[rows], suppress, slot[rows], current[rows]
        measured[rows] = measure_rows(chosen, logits, token, *of_rows, state, live)

    found = lm_head.decode_candidates(
        h, weight, bias, candidate, temperature, seed, max_num_logits, suppress, packed, measure
    )
    return (*found, measured)


def fake(h: Tensor, weight: Tensor, bias: Tensor | None, candidate: Tensor, *rest: Any) -> Results:
    found, statistics = lm_head.fake(h, weight, bias, candidate, *rest), rest[-1]
    return (*found, h.new_empty((*candidate.shape, len(declared(statistics))), dtype=numeric(h.dtype)))


def workspace(
    device: torch.device, h: Tensor, weight: Tensor, bias: Tensor | None, candidate: Tensor, *rest: Any
) -> int:
    """Bytes of one chunk: on a GPU those of dgraph::lm_head, else its logits; and three fp32 copies for a statistic."""
    logits = min(len(candidate), rest[2]) * len(weight)
    head = lm_head.workspace(device, h, weight, bias, candidate, *rest)
    given = head if device.type == "cuda" else logits * h.element_size()
    return given + 3 * logits * numeric(h.dtype).itemsize


def samples(generator: torch.Generator) -> Iterator[Sample]:
    chosen = (MARGIN, KL(top=3), ENTROPY, CURRENT)
    text = declare(chosen)
    for sample in lm_head.samples(generator):
        if sample.padded is None or sample.name.endswith(", packed"):
            continue
        k, vocab = len(sample.args[0]), len(sample.args[1])
        slot = torch.randperm(k + 2, generator=generator)[:k]
        width = kept_rows(chosen, vocab).element[-1]
        state = torch.rand(k + 2, 1, width, generator=generator).neg() - 2  # log-probabilities
        state[:, :, 0] = 0.0
        state[slot[::2], :, 0] = 1.0
        state[:, :, 1:4] = torch.arange(3.0)  # ids
        current = torch.randint(-1, vocab, (k,), generator=generator)
        yield Sample(
            sample.name,
            (*sample.args, False, slot, current, state, text),
            (*sample.padded, False, pad_rows(slot, 3), pad_rows(current, 3), state.clone(), text),
        )


OP = define(
    "lm_head_measured",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    apart_by="candidate",
    mutates=("state",),
    reads=(),
    own_rows=("h",),
    padding=(-1, -torch.inf, -torch.inf, torch.inf, 0),
    kernel="dgraph.ops.lm_head.triton.lm_head_measured:kernel",
    stored=("weight",),
    rounded=("h",),
    workspace=workspace,
)

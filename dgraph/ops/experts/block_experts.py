"""dgraph::block_experts: the experts that the rows of a block may go to (LLaDA2.2)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.draws import pad_rows
from dgraph.ops.experts.route import highest
from dgraph.ops.registry import Sample, define, numeric

CONTRACT = """\
logits [..., E]; bias [E] or None; blocks i64[...], as dgraph::block_numbers gives them -> bool[..., E], `capacity` of
them for each row: the experts of its block.
Rows side by side with one number above 0 are a block: those that the call has, whichever the block had before rows were
evicted or left out. An expert's score is the largest sigmoid(logit) + bias that a row of the block gives it, in fp32;
the experts of a block are the capacity with the highest scores, ties to the lower id.
Rows with the number 0, padding rows among them, may hold anything, influence no other row, and get no expert.
Deterministic."""


def reference(logits: Tensor, bias: Tensor | None, blocks: Tensor, capacity: int) -> Tensor:
    check(logits, blocks, capacity)
    scores = logits.flatten(0, -2).to(numeric(logits.dtype)).sigmoid()
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    number = blocks.flatten()
    begins = torch.ones_like(number, dtype=torch.bool)
    begins[1:] = number[1:] != number[:-1]
    block = begins.cumsum(0) - 1
    best = torch.full_like(scores, -torch.inf).scatter_reduce(0, block[:, None].expand_as(scores), scores, "amax")
    mine = torch.zeros_like(best, dtype=torch.bool).scatter(1, highest(best, capacity)[1], True)
    return (mine[block] & (number > 0)[:, None]).view(logits.shape)


def check(logits: Tensor, blocks: Tensor, capacity: int) -> None:
    """Refuse arguments by which no block could choose.

    Raises:
        InputError: a capacity outside of 1 to the number of experts, or blocks that are not one number per row.
    """
    experts = logits.shape[-1]
    if not 1 <= capacity <= experts:
        raise InputError(f"dgraph::block_experts: capacity must be between 1 and {experts} experts, got {capacity}.")
    if blocks.shape != logits.shape[:-1]:
        raise InputError(
            f"dgraph::block_experts: blocks must have a number for each row of logits {list(logits.shape)}, got "
            f"{list(blocks.shape)}."
        )


def fake(logits: Tensor, bias: Tensor | None, blocks: Tensor, capacity: int) -> Tensor:
    check(logits, blocks, capacity)
    return logits.new_empty(logits.shape, dtype=torch.bool)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, numbers, experts, capacity, biased in (
        ("blocks of any length", (1, 1, 1, 2, 3, 3, 1), 12, 4, True),
        ("rows of no block", (5, 5, 0, 5, 0, 0), 9, 3, False),
        ("all experts", (7, 7), 5, 5, True),
        ("no rows", (), 6, 2, True),
    ):
        logits = torch.randn(len(numbers), experts, generator=generator)
        bias = torch.rand(experts, generator=generator) if biased else None
        blocks = torch.tensor(numbers, dtype=torch.int64)
        padded = torch.cat([blocks, blocks.new_zeros(3)])
        yield Sample(name, (logits, bias, blocks, capacity), (pad_rows(logits, 3), bias, padded, capacity))
    ties = torch.randint(0, 2, (6, 8), generator=generator).float()
    yield Sample("ties", (ties, None, torch.tensor([1, 1, 2, 2, 2, 3]), 3))
    dense = torch.randn(2, 5, 8, generator=generator)
    number = torch.tensor([[1, 1, 2, 2, 3], [4, 4, 5, 5, 6]])
    yield Sample("a dense batch", (dense, None, number, 4))


OP = define(
    "block_experts",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    apart_by="blocks",
    padding=(0,),
    kernel="dgraph.ops.experts.triton.block_experts:kernel",
)

"""dgraph::route: choose the experts of each row, and their weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.draws import pad_rows
from dgraph.ops.registry import Sample, define, numeric

CONTRACT = """\
logits [..., E]; bias, expert_scale [E] or None; allowed bool[..., E] or None -> choice i64[..., topk],
weight f32[..., topk] (float64 for float64).
score: "sigmoid" or "softmax" of logits over E, in fp32. Experts are ranked by score + bias (by score without
a bias), so that bias changes who is chosen and never a weight.
groups > 1: the E experts form that many groups of equal size, in order; a group's rank is the sum of its two
largest ranked scores, and only experts of the top_groups highest groups can be chosen.
With `allowed` only the experts that it flags for a row are chosen, as if all others ranked at -inf.
choice: the topk highest, best first; ties, also between groups, go to the lower id. weight: their scores,
divided by their sum if renormalise is set, times scale, times expert_scale of the expert.
Row by row: a padding row influences no other row, and whatever it holds, what it chooses are experts.
Deterministic; sums over slots run in their order."""

SCORES = ("sigmoid", "softmax")


def reference(
    logits: Tensor,
    bias: Tensor | None,
    score: str,
    groups: int,
    top_groups: int,
    topk: int,
    renormalise: bool,
    scale: float,
    allowed: Tensor | None = None,
    expert_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    check(logits.shape[-1], score, groups, top_groups, topk)
    wide = logits.to(numeric(logits.dtype))
    scores = wide.sigmoid() if score == "sigmoid" else wide.softmax(-1)
    ranked = scores if bias is None else scores + bias.to(scores.dtype)
    if allowed is not None:
        ranked = ranked.masked_fill(~allowed, -torch.inf)
    if groups > 1:
        grouped = ranked.unflatten(-1, (groups, -1))
        best = highest(grouped, 2)[0].sum(-1)
        # A group is open if fewer than top_groups groups go before it.
        open_ = highest(best, groups)[1].argsort(-1) < top_groups
        ranked = grouped.masked_fill(~open_.unsqueeze(-1), -torch.inf).flatten(-2)
    choice = highest(ranked, topk)[1].contiguous()
    weight = scores.gather(-1, choice)
    if renormalise:
        # Slot by slot: a reduction may sum in another order when there are other rows.
        weight = weight / (functools.reduce(torch.add, weight.unbind(-1)).unsqueeze(-1) + 1e-20)
    weight = weight * scale
    return choice, weight if expert_scale is None else weight * expert_scale.to(weight.dtype)[choice]


def highest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest along the last dimension, and their indices; unlike in `topk`, ties: the lower index."""
    ordered, index = values.sort(dim=-1, descending=True, stable=True)
    return ordered[..., :count], index[..., :count]


def check(experts: int, score: str, groups: int, top_groups: int, topk: int) -> None:
    """Refuse settings by which no row could be routed.

    Raises:
        InputError: an unknown score, groups that do not divide the experts, or too few experts to choose from.
    """
    if score not in SCORES:
        raise InputError(f"dgraph::route: score must be one of {', '.join(map(repr, SCORES))}, got {score!r}.")
    if groups < 1 or experts % groups or (groups > 1 and experts // groups < 2):
        raise InputError(f"dgraph::route: {experts} experts do not form {groups} equal groups of at least 2.")
    if not 1 <= top_groups <= groups:
        raise InputError(f"dgraph::route: top_groups must be between 1 and {groups}, got {top_groups}.")
    open_ = experts // groups * (top_groups if groups > 1 else 1)
    if not 1 <= topk <= open_:
        raise InputError(f"dgraph::route: topk must be between 1 and the {open_} experts to choose from, got {topk}.")


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, shape, biased, rest in (
        ("sigmoid, groups, bias", (7, 16), True, ("sigmoid", 4, 2, 3, True, 2.5)),
        ("softmax", (5, 8), False, ("softmax", 1, 1, 2, True, 1.0)),
        ("softmax, not renormalised", (5, 6), False, ("softmax", 1, 1, 4, False, 1.0)),
        ("a dense batch", (2, 3, 8), True, ("sigmoid", 2, 1, 4, True, 1.0)),
        ("one expert of one", (3, 1), False, ("softmax", 1, 1, 1, False, 1.0)),
        ("no rows", (0, 8), True, ("sigmoid", 4, 4, 2, True, 2.5)),
    ):
        logits = torch.randn(shape, generator=generator)
        bias = torch.rand(shape[-1], generator=generator) if biased else None
        padded = (pad_rows(logits, 2), bias, *rest) if len(shape) == 2 else None
        yield Sample(name, (logits, bias, *rest), padded)
    logits, bias = torch.randn(6, 8, generator=generator), torch.rand(8, generator=generator)
    allowed = torch.rand(6, 8, generator=generator).argsort(-1) < 4
    allowed[4] = False
    one = ("sigmoid", 1, 1, 3, True, 2.5)
    yield Sample(
        "some experts allowed", (logits, bias, *one, allowed), (pad_rows(logits, 2), bias, *one, pad_rows(allowed, 2))
    )
    two = ("softmax", 4, 2, 2, False, 1.0)
    yield Sample("some experts of groups allowed", (logits, None, *two, allowed))
    three = ("softmax", 1, 1, 4, True, 1.0)
    more = None, torch.rand(8, generator=generator)
    yield Sample("a scale per expert", (logits, None, *three, *more), (pad_rows(logits, 2), None, *three, *more))
    ties = torch.tensor([[0.0] * 8, [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 2.0, 2.0, 2.0, 2.0, 0.0, 0.0]])
    args = ("sigmoid", 4, 2, 3, True, 2.0)
    yield Sample("ties", (ties, None, *args), (pad_rows(ties, 1), None, *args))


OP = define(
    "route",
    reference,
    samples=samples,
    contract=CONTRACT,
    by_row=("logits", "allowed"),
    padding=(None, None),
    kernel="dgraph.ops.experts.triton.route:kernel",
)

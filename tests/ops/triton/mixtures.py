"""Random calls of the ops of a mixture of experts, and what experts compute, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.ops.triton.problems import Call


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mixture(n: int, k: int, count: int, d: int = 16, f: int = 8, seed: int = 0) -> tuple[Tensor, ...]:
    """Rows, choices, weights, gate_up and down; a tenth of the choices name no expert."""
    generator = torch.Generator().manual_seed(seed)
    choice = torch.rand((n, count), generator=generator).argsort(-1)[:, :k]
    choice = torch.where(torch.rand((n, k), generator=generator) < 0.1, -1, choice)
    weights = draw(count, 2 * f, d, seed=seed + 1) * d**-0.5, draw(count, d, f, seed=seed + 2) * f**-0.5
    return draw(n, d, seed=seed), choice, torch.rand((n, k), generator=generator), *weights


def literal(x: Tensor, choice: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Row by row, slot by slot, in float64."""
    x, weight, gate_up, down = (t.double() for t in (x, weight, gate_up, down))
    out, f = torch.zeros_like(x), down.shape[2]
    for row in range(len(x)):
        for slot, expert in enumerate(choice[row].tolist()):
            if 0 <= expert < len(down):
                gate, up = gate_up[expert, :f] @ x[row], gate_up[expert, f:] @ x[row]
                out[row] += weight[row, slot] * (down[expert] @ (gate * gate.sigmoid() * up))
    return out


def routing(
    n: int,
    experts: int,
    groups: int,
    top_groups: int,
    topk: int,
    *,
    score: str = "sigmoid",
    biased: bool = False,
    seed: int = 0,
) -> Call:
    """Logits in steps of 1/64, so that some are equal and none nearly so; they are columns of something wider."""
    logits = torch.cat([(draw(n, experts, seed=seed) * 64).round() / 64, torch.full((n, 3), torch.nan)], 1)
    bias = draw(experts, seed=seed + 1) * 0.2 if biased else None
    return logits[:, :experts], bias, score, groups, top_groups, topk, topk > 1, 2.5


def sharing(n: int, experts: int, capacity: int, *, block: int = 32, biased: bool = True, seed: int = 0) -> Call:
    """Logits as of `routing`; blocks of any length up to `block` rows, and rows of none."""
    logits, bias, *_ = routing(n, experts, 1, 1, 1, biased=biased, seed=seed)
    length = torch.randint(1, block + 1, (n,), generator=torch.Generator().manual_seed(seed))
    number = torch.arange(n).repeat_interleave(length)[:n]
    return logits, bias, torch.where(number % 5 == 3, 0, (number << 32) + 1), capacity


MIXING: list[tuple[str, list[Call]]] = [
    ("block_experts", [sharing(200, 256, 48, seed=seed) for seed in (0, 5)]),
    ("route", [(*routing(33, 64, 1, 1, 6, score="softmax", seed=seed), None, draw(64, seed=3)) for seed in (0, 5)]),
    ("route", [(*routing(33, 64, 1, 1, 6, biased=True, seed=seed), draw(33, 64, seed=7) > 0) for seed in (0, 5)]),
    ("route", [routing(40, 256, 8, 4, 8, biased=True, seed=seed) for seed in (0, 5)]),
    ("route", [routing(33, 100, 1, 1, 6, score="softmax", seed=seed) for seed in (0, 5)]),
    ("experts", [mixture(21, 4, 9, seed=seed) for seed in (0, 5)]),
]
"""Op, and two calls of the same shapes."""

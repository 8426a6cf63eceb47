"""Dream's rules as they are published (arXiv 2508.15487 and its code), in plain PyTorch: from logits of rows to tokens
and scores, and the positions that a step commits. One sequence, temperature 0.

The published code computes in the dtype of the logits, and leaves the choice among equal scores to torch.topk: on a GPU
that takes the lower positions, on a CPU its order is not defined. Here it is the lower ones.
"""

from __future__ import annotations

import torch
from torch import Tensor


def nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Logits [R, V] with the lowest number in the place of what lies outside of the nucleus.

    An id is outside if the ids before it, by descending logit, already have more than top_p together.
    """
    ordered, ids = logits.sort(dim=-1, descending=True)
    before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
    before[:, 0] = 0
    outside = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, ids, before > top_p)
    return logits.masked_fill(outside, _lowest(logits))


def largest(logits: Tensor, top_k: int) -> Tensor:
    """Logits [R, V] with the lowest number in the place of what is smaller than the k-th of its row."""
    return logits.masked_fill(logits < logits.topk(min(top_k, logits.shape[-1])).values[:, -1:], _lowest(logits))


def _lowest(logits: Tensor) -> float:
    return torch.finfo(logits.dtype).min


def sample(logits: Tensor, alg: str, top_p: float = 1.0, top_k: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens i64[R] and scores [R] of rows of logits [R, V]: top-p, then top-k, then the softmax of what is left."""
    if top_p < 1:
        logits = nucleus(logits, top_p)
    if top_k:
        logits = largest(logits, top_k)
    p = logits.softmax(-1)
    confidence, token = p.max(-1)
    if alg == "topk_margin":
        first, second = p.topk(2).values.unbind(-1)
        return token, first - second
    if alg == "entropy":
        return token, (p * (p + 1e-10).log()).sum(-1)
    return token, confidence


def count(masks: int, step: int, steps: int, eps: float = 1e-3) -> int:
    """How many of the masks a step commits: the share that the timesteps say, rounded down; all in the last one."""
    t = torch.linspace(1, eps, steps + 1, dtype=torch.float64)
    return int(masks * (1 - t[step + 1] / t[step])) if step < steps - 1 else masks


def chosen(score: Tensor, number: int) -> list[int]:
    """Positions of the highest scores, the lower of equals first."""
    return score.argsort(descending=True, stable=True)[:number].tolist()

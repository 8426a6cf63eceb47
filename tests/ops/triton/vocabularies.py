"""Random calls of the ops that read a whole vocabulary, larger than their samples."""

from __future__ import annotations

import torch

from tests.ops.triton.problems import Call


def embedding(
    rows: int,
    live: int,
    *,
    vocab: int = 700,
    d: int = 40,
    heat: float = 0.9,
    softcap: float | None = 5.0,
    suppress: int = -1,
    seed: int = 0,
) -> Call:
    """Greedy and drawn rows, of which `live` are live and the others NaN; all are columns of something wider."""
    generator = torch.Generator().manual_seed(seed)
    h = torch.full((rows, d + 3), torch.nan)
    h[:live, :d] = torch.randn(live, d, generator=generator)
    weight = torch.randn(vocab, d + 5, generator=generator)
    temperature = heat * (torch.rand(rows, generator=generator) < 0.6)
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    return h[:, :d], weight[:, :d] * 3 / d**0.5, temperature, seeds, torch.tensor([0, live]).int(), softcap, suppress


def embedding_part(rows: int, live: int, first: int, ids: int, **options: object) -> Call:
    """As `embedding`, the ids of one rank, of which the third is suppressed."""
    *call, _ = embedding(rows, live, **options)  # type: ignore[arg-type]
    return (*call, first + 3, torch.tensor([first]), ids)


EMBEDDING: list[tuple[str, list[Call]]] = [
    ("vocabulary_attention", [embedding(60, live, seed=live) for live in (9, 52)]),
    ("vocabulary_part", [embedding_part(60, live, 4000, 9000, seed=live) for live in (9, 52)]),
]
"""Op, and two calls of the same shapes."""

"""Random calls of the ops that choose which keys stay, larger than their samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dgraph.ops.attention.sparse import DENSE, REPACK, REUSE, SELECT
from dgraph.ops.kv import kv_pack, kv_votes
from tests.ops.triton.problems import Call


def voting(
    counts: Sequence[int],
    actions: Sequence[int] = (SELECT, DENSE, SELECT, REUSE),
    *,
    voters: tuple[int, int] = (0, 2**31 - 1),
    quarters: tuple[int, int] | None = None,
    heads: tuple[int, int] = (8, 2),
    d: int = 32,
    seed: int = 0,
) -> Call:
    """A call of kv_votes in which the window is the last third of each sequence, with padding rows."""
    windows = [(count - count // 3, count) for count in counts]
    generator = torch.Generator().manual_seed(seed)
    padded = kv_votes.sample("", counts, windows, actions, heads, d, *voters, generator, quarters).padded
    assert padded is not None
    return padded


def scoring(counts: Sequence[int], actions: Sequence[int] = (SELECT, DENSE, SELECT, REUSE), **options: Any) -> Call:
    """The same for kv_scores, each KV head by itself."""
    q, k, positions, _, cu_rows, cu_keys, _, window, action, scale, *_ = voting(counts, actions, **options)
    return q, k, positions, cu_rows, cu_keys, window, action, scale, False


def packing(
    counts: Sequence[int],
    actions: Sequence[int] = (SELECT, REPACK, SELECT, REUSE),
    *,
    ratio: float = 0.4,
    divided: str = "uniform",
    floor: float = 0.0,
    pool: int = 3,
    heads: int = 3,
    d: int = 16,
    seed: int = 0,
) -> Call:
    """A call of kv_pack in which the window is the middle third of each sequence, with padding rows."""
    windows = tuple((count // 3, 2 * count // 3) for count in counts)
    settings = (ratio, 0, divided, floor, pool, "max", 2)
    generator = torch.Generator().manual_seed(seed)
    return kv_pack.padded(kv_pack.draw(generator, tuple(actions), tuple(counts), windows, settings, heads, d))


SELECTING: list[tuple[str, list[Call]]] = [
    (
        "kv_votes",
        [
            voting(c, p, voters=v, seed=c[0])
            for c, p, v in (
                ((70, 0, 33, 9), (SELECT, DENSE, SELECT, SELECT), (0, 2**31 - 1)),
                ((9, 70, 0, 33), (DENSE, SELECT, SELECT, REPACK), (0, 2**31 - 1)),
            )
        ],
    ),
    (
        "kv_scores",
        [
            scoring(c, p, seed=c[0])
            for c, p in (
                ((70, 0, 33, 9), (SELECT, DENSE, SELECT, SELECT)),
                ((9, 70, 0, 33), (DENSE, SELECT, SELECT, REPACK)),
            )
        ],
    ),
    *(
        (
            "kv_pack",
            [
                packing(c, p, divided=divided, floor=0.1, seed=c[0])
                for c, p in (
                    ((70, 0, 33, 9), (SELECT, SELECT, REPACK, SELECT)),
                    ((9, 70, 0, 33), (REPACK, SELECT, SELECT, DENSE)),
                )
            ],
        )
        for divided in ("uniform", "mass", "adaptive")
    ),
]
"""Op, and two calls of the same shapes."""

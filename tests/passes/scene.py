"""One decoding step of a ragged batch after a prefilled cache, for the program and for the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dgraph.ir.graph import Graph
from dgraph.passes import CacheKV, CountRows, EvictTokens, FuseProjections
from dgraph.passes.base import Pass
from tests.oracle.models import random_weights, tiny_config
from tests.oracle.qwen3 import Cache, forward, project
from tests.oracle.scoring import Eviction, EvictRows
from tests.tiny import BLOCK, MASK, caches_of, draw, interpret, rewritten, rows_of

CONFIG = tiny_config()
WEIGHTS = random_weights(CONFIG, 0)

# Per sequence: tokens before the block, the block (`True` is a mask), how many of its rows an earlier step forwarded:
# a row that was decoded after a mask was kept then, and with it everything before it.
BLOCKS: list[tuple[int, list[bool], int]] = [
    (16, [True] * 8, 0),
    (8, [False, True, True, False, True, True, True, True], 5),
    (0, [False, False, True, True, True, True, True, True], 0),
    (24, [True, True, True, True, False, False, True, True], 6),
]


@dataclass
class Scene:
    """Inputs of the step (its caches hold what lies before the block), and the same for the oracle."""

    inputs: dict[str, Tensor]
    tokens: list[list[int]]
    starts: list[int]

    @property
    def counts(self) -> list[int]:
        return [len(t) for t in self.tokens]

    @property
    def lengths(self) -> list[int]:
        return [s + n for s, n in zip(self.starts, self.counts, strict=True)]

    def copy(self) -> Scene:
        """With caches of its own, for a program that writes them."""
        return Scene({name: value.clone() for name, value in self.inputs.items()}, self.tokens, self.starts)


def scene(cached: Graph, average: float = 1.0) -> Scene:
    """A step in which every sequence has its whole block to forward."""
    starts = [start for start, _, _ in BLOCKS]
    tokens = [tokens_of(s) for s in range(len(BLOCKS))]
    caches = caches_of(cached.spec, [s + BLOCK for s in starts])
    prompts = rows_of([prompt(s) for s in range(len(BLOCKS))])
    prompts["limit"] = ((prompts["positions"] // BLOCK + 1) * BLOCK).int()
    interpret(cached, {**prompts, **caches})
    interpret(cached, {**rows_of([[MASK] * seen for _, _, seen in BLOCKS], starts), **caches})
    inputs = {**rows_of(tokens, starts), **caches}
    inputs["reached"] = torch.tensor([start + seen - 1 for start, _, seen in BLOCKS], dtype=torch.int32)
    inputs["average"] = torch.full((len(BLOCKS),), average)
    return Scene(inputs, tokens, starts)


def padded(inputs: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    """A bucket that is larger than the step."""
    names = ("input_ids", "positions", "limit", "candidate", "temperature", "seed")
    zeros = {name: inputs[name].new_zeros(rows) for name in names if name in inputs}
    return {**inputs, **{name: torch.cat([inputs[name], more]) for name, more in zeros.items()}}


def prompt(s: int) -> list[int]:
    """What lies before the block of sequence s."""
    return draw(BLOCKS[s][0], 100 + s)


def tokens_of(s: int) -> list[int]:
    """The block of sequence s."""
    return [MASK if masked else token for masked, token in zip(BLOCKS[s][1], draw(BLOCK, 50 + s), strict=True)]


def oracle_step(s: int, eviction: Eviction | None, average: float = 1.0) -> tuple[Tensor, EvictRows | None, Cache]:
    """Logits of the rows that go on, what eviction did, and the caches of sequence s of the scene."""
    start, block, seen = BLOCKS[s]
    cache = Cache(CONFIG, start + BLOCK, WEIGHTS["model.norm.weight"])
    with torch.no_grad():
        if start:
            limits = [(p // BLOCK + 1) * BLOCK for p in range(start)]
            forward(WEIGHTS, CONFIG, prompt(s), range(start), limits, cache)
        if seen:
            forward(WEIGHTS, CONFIG, [MASK] * seen, range(start, start + seen), [start + seen] * seen, cache)
        positions = list(range(start, start + BLOCK))
        limits = [start + BLOCK] * BLOCK
        hook = None
        if eviction is not None:
            hook = EvictRows(eviction, 0, positions, block, limits, average, start + seen - 1)
        h = forward(WEIGHTS, CONFIG, tokens_of(s), positions, limits, cache, hook)
        return project(WEIGHTS, h), hook, cache


def check_kept_rows(packed: Graph, bound: Pass) -> None:
    """After an eviction whose count stays on the device, a pass changes no bit of a kept row, nor of a cache."""
    cached = rewritten(packed, FuseProjections(), CacheKV())
    counted = rewritten(cached, EvictTokens(), CountRows())
    step = scene(cached)
    mine, theirs = step.copy(), step.copy()
    got, want = interpret(rewritten(counted, bound), mine.inputs), interpret(counted, theirs.inputs)
    live = int((want["kept"] >= 0).sum())
    assert 0 < live < 32
    assert torch.equal(got["kept"], want["kept"])
    assert torch.equal(got["logits"][:live], want["logits"][:live]), "bit for bit"
    for name, value in theirs.inputs.items():
        assert torch.equal(mine.inputs[name].nan_to_num(), value.nan_to_num()), name

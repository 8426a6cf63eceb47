"""Results of decoding: tokens, keys and values, and progress."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dgraph.runtime.stats import GenerationStats


@dataclass(frozen=True)
class SequenceKV:
    """Keys and values of one sequence after its last step.

    Attributes:
        committed: positions before it are final; those of the last block (from `committed` on) are as its steps left
            them, since no later step would read a commit. 0 for a bidirectional model, which has no final ones.
        layers: per layer K and V [positions, Hkv, D], after RoPE.
        first: position that they begin with, above 0 if only some of the keys in front of it are kept.
    """

    committed: int
    layers: list[tuple[Tensor, Tensor]]
    first: int = 0


@dataclass(frozen=True)
class Generation:
    """Result of `generate`.

    Attributes:
        token_ids: per prompt the new tokens, without the stop token.
        stats: counts and times.
        kv: keys and values per prompt, if they were asked for.
    """

    token_ids: list[list[int]]
    stats: GenerationStats
    kv: list[SequenceKV] | None = None


@dataclass(frozen=True)
class Progress:
    """Progress of a generation: prompts finished, prompts in all, tokens decoded so far."""

    finished: int
    prompts: int
    decoded: int


@dataclass(frozen=True)
class Ended:
    """A request that has been served."""

    token_ids: list[int]
    steps: int
    decoded: int
    rows: int
    commit_rows: int
    kv: SequenceKV | None

"""Minutes of random load on an engine: every response is the one that its request gets alone, and memory stays flat.

    python -m benchmarks.soak --minutes 10 --threads 1 --markdown out.md

Two tiny models with trained weights take turns, a block-causal one whose pool is too small for what runs, so that
requests give way, and a bidirectional one. Requests come in bursts, with settings of their own; some are cancelled, some
have a sampler that raises. What is measured at the end of each round: the memory of the process, objects that the
garbage collector knows, bytes that Python has allocated, and pages that are not free.
"""

from __future__ import annotations

import argparse
import gc
import random
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

import dgraph
from dgraph.api import Optimized
from dgraph.engine.engine import Engine
from dgraph.engine.events import Event
from dgraph.models.tasks import TASKS
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.sampling import RowContext, Sampler

ROUND = 60.0
"""Seconds of a round."""


@dataclass(frozen=True)
class Reading:
    """What is measured at the end of a round.

    Attributes:
        seconds: since the beginning.
        resident: bytes of the process.
        allocated: bytes that Python's allocator has given out.
        objects: that the garbage collector knows.
        taken: pages that are not free; threads: that run.
        requests, tokens: of all rounds so far.
    """

    seconds: float
    resident: int
    allocated: int
    objects: int
    taken: int
    threads: int
    requests: int
    tokens: int


class Fails:
    """A logits processor that fails."""

    def __call__(self, logits: torch.Tensor, context: RowContext) -> torch.Tensor:
        raise ArithmeticError("this request is to fail")


FAILS = Sampler(processors=(Fails(),))


def decodings(seed: int) -> Iterator[Decoding]:
    """Settings of many kinds, the same for every run."""
    draw = random.Random(seed)
    rules: list[dict[str, Any]] = [
        *({"threshold": t} for t in (0.6, 0.9)),
        *({"steps": n} for n in (4, 16)),
        {"threshold": 0.7, "temperature": 0.8},
        {"policy": "sequential"},
        {"policy": "factor"},
        {"threshold": 0.8, "top_k": 5, "temperature": 1.0},
    ]
    while True:
        yield Decoding(
            max_new_tokens=draw.choice([4, 16, 32, 48]),
            seed=draw.randrange(3),
            ignore_eos=draw.random() < 0.3,
            stop=draw.choice([(), (), ("e",), ("ab", " c")]),
            **draw.choice(rules),
        )

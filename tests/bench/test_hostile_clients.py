"""`benchmarks/hostile_clients.py`: its streams, its attacks and its table, against a server in this process."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="needs a server: pip install 'dgraph[serve]'")

from benchmarks.attacks import ATTACKS, attack
from benchmarks.gap_clients import clients
from benchmarks.hostile_clients import Arm, resident, share_of
from tests.serve.live import Held

LIMITS = {"header_timeout": 0.2, "body_timeout": 10.0, "max_connections": 64}
"""Short for heads, which attacks hold back; a body of 20 kB may take long to send on a busy machine."""


@pytest.fixture(scope="module")
def held() -> Iterator[Held]:
    with Held(LIMITS, max_tokens=64) as server:
        yield server


def test_streams_note_their_gaps_and_probes_their_answers(held: Held) -> None:
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 8, "ignore_eos": True, "stream": True}
    told = {"url": held.live.url, "streams": 2, "seconds": 1.0, "body": {**body, "stream_mode": "draft"}}
    seen = asyncio.run(clients(told))
    assert seen.streams > 0
    assert seen.gaps
    assert all(gap >= 0 for gap in seen.gaps)
    assert seen.health
    assert (seen.failed, seen.cut) == (0, 0)


def test_attacks_are_refused(held: Held) -> None:
    names = [one.__name__ for one in ATTACKS if one.__name__ not in ("long_texts", "many_values")]
    found = attack(held.live.url, 0.5, names)
    assert set(found) == set(names)
    closed = {"closed", "ConnectionResetError", "BrokenPipeError"}  # who waits longest gives way
    assert set(found["fitting_texts"]) == {"400"}
    assert set(found["endless_headers"]) <= {"431", *closed}
    assert set(found["silent_sockets"]) <= {"408", "still open", *closed}
    assert resident(held.live.url) > 0


def test_a_row_of_the_table() -> None:
    arm = Arm(
        4, gaps=[0.3, 0.1, 0.2], health=[0.002, 0.001], failed=1, late=0.05, cut=0, told={"long_texts": {"400": 2}}
    )
    assert arm.row == [4, "long_texts", 0.3, 0.3, 0.2, 0.05, 2.0, 2.0, 1]
    assert math.isnan(share_of([], 0.5))

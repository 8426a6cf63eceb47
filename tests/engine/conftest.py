"""Fixtures of the tests of engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dgraph.engine.memory.pools import PoolSizes
from dgraph.runtime import BlockSession


@pytest.fixture(autouse=True)
def returned_pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give back the pools that a test allocated, since tests share programs and drive cores that are never closed."""
    allocate, sessions = PoolSizes.allocate, []

    def recorded(sizes: PoolSizes, session: BlockSession) -> None:
        sessions.append(session)
        allocate(sizes, session)

    monkeypatch.setattr(PoolSizes, "allocate", recorded)
    yield
    for session in sessions:
        session.give_back()

"""Servers that the tests of a module share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import httpx
import pytest

import dgraph
from tests.serve.live import WAIT, Live


@pytest.fixture(scope="session")
def sdar() -> dgraph.Optimized:
    """A trained block-causal model."""
    return dgraph.optimize("tiny_sdar", "focus", backend="eager")


@pytest.fixture(scope="session")
def llada() -> dgraph.Optimized:
    """A trained bidirectional model."""
    return dgraph.optimize("tiny_llada", "fast_dllm", backend="eager")


@pytest.fixture(scope="module")
def live(sdar: dgraph.Optimized, llada: dgraph.Optimized) -> Iterator[Live]:
    """A server over both; every page has come back when a module is over."""
    engines = {
        "tiny_sdar": sdar.engine(max_sequences=8, max_tokens=512),
        "tiny_llada": llada.engine(max_sequences=4, max_tokens=512),
    }
    with Live(engines) as server:
        yield server
        assert server.settled()
    gc.collect()


@pytest.fixture(scope="module")
def http(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=WAIT) as client:
        yield client

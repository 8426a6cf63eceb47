"""Servers that the tests of a module share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

import dgraph
from tests.compiled import compiled

if TYPE_CHECKING:
    import httpx

    from tests.serve.live import Live

NEEDS = ("fastapi", "httpx", "prometheus_client", "uvicorn")
"""Packages without which nothing here can be tested."""
if any(find_spec(name) is None for name in NEEDS):
    collect_ignore_glob = ["test_[!i]*.py"]


@pytest.fixture(scope="session")
def sdar() -> dgraph.CompiledModel:
    """A trained block-causal model, whose first steps evict, too, so that a few words take several steps."""
    return compiled("tiny_sdar", "focus", full_steps=0)


@pytest.fixture(scope="session")
def llada() -> dgraph.CompiledModel:
    """A trained bidirectional model."""
    return compiled("tiny_llada", "fast_dllm")


@pytest.fixture(scope="module")
def live(sdar: dgraph.CompiledModel, llada: dgraph.CompiledModel) -> Iterator[Live]:
    """A server over both; every page has come back when a module is over."""
    from tests.serve.live import Live

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
    import httpx

    from tests.serve.live import WAIT

    with httpx.Client(base_url=live.url, timeout=WAIT) as client:
        yield client

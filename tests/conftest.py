"""One captured tiny model, and the graphs after the common passes. Tests copy a graph before they rewrite it."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch

import dgraph
from dgraph.ir.graph import Graph
from tests.budget import Meter
from tests.oracle.models import random_weights, tiny_config, to_transformers
from tests.tiny import BLOCK, MASK, rewritten

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in whatever a shell starts in the background. Processes inherit it, and those that tests interrupt would go on.
    signal.signal(signal.SIGINT, signal.default_int_handler)


collect_ignore = ["released"]  # run by test_methods.py, as packages that are installed

os.environ["DGRAPH_DOWNLOAD"] = "0"  # no test asks the hub, unless it has one of its own
os.environ.pop("COLUMNS", None)  # which readline sets in whoever imports it, and workers inherit

# Compiled modules are kept, whatever the caller's environment says: each process that a test starts, and each
# collection, would compile them all again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_configure(config: pytest.Config) -> None:
    """Count the CPU seconds of the run."""
    config.pluginmanager.register(Meter(config), "cpu_seconds")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What imports and parameters make stays to the end. The garbage collector need not walk over it again and again,
    nor over what tests share as often as it would by itself: that takes a tenth of the run.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 20, 20)
        gc.enable()


_FULL = 2
"""The oldest generation of the garbage collector."""
_seen = 0
"""Collections of that generation when the heap was frozen last."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Freeze what a full collection has left, once the test is over in which it ran. A process comes to hold millions
    of objects, which tests share. Each full collection would walk over them all, for seconds.
    """
    global _seen
    result = yield
    if (now := gc.get_stats()[_FULL]["collections"]) > _seen:
        _seen = now
        gc.freeze()
    return result


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Collect once: pytest collects five times when it ends, and Python when it exits."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Workers get neighbouring tests, which share what they build, and take from each other when they are done."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what takes long by itself; skip what needs a GPU where there is none, and say so; leave out what only
    a release needs, unless `-m` speaks of it or a test is named on the command line.
    """
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if "release" in config.getoption("markexpr"):
        return
    named, kept, left_out = _named_tests(config), [], []
    for item in items:
        (kept if item.get_closest_marker("release") is None or named(item) else left_out).append(item)
    if left_out:
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)


def _named_tests(config: pytest.Config) -> Callable[[pytest.Item], bool]:
    """Whether the command line names a test: by its node id, or by that of its function without parameters."""
    start = config.invocation_params.dir
    split = [arg.partition("::") for arg in config.args]
    ids = {((start / path).resolve(), name) for path, _, name in split if name}

    def named(item: pytest.Item) -> bool:
        name = item.nodeid.partition("::")[2]
        return any((item.path, each) in ids for each in (name, name.partition("[")[0]))

    return named


@pytest.fixture(scope="session", autouse=True)
def own_artifact_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither read nor write the user's artifact cache; the workers of a run share one of its own."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DGRAPH_CACHE", str(folder / "artifacts"))
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model() -> dgraph.Model:
    """A Qwen3 of 4 layers with random weights whose decode is not trivial."""
    config = tiny_config()
    return dgraph.adopt(to_transformers(config, random_weights(config, 0)), mask_id=MASK, block_length=BLOCK)


@pytest.fixture(scope="session")
def captured(model: dgraph.Model) -> Graph:
    return dgraph.capture(model)


@pytest.fixture(scope="session")
def packed(captured: Graph) -> Graph:
    from dgraph.passes.pack_rows import PackRows

    return rewritten(captured, PackRows())


@pytest.fixture(scope="session")
def cached(packed: Graph) -> Graph:
    from dgraph.passes.cache_kv import CacheKV

    return rewritten(packed, CacheKV())


@pytest.fixture(scope="session")
def evicted(cached: Graph) -> Graph:
    from dgraph.passes.evict_tokens import EvictTokens

    return rewritten(cached, EvictTokens(alpha=1.5, after=1))

"""A store that several processes use, and that has a size."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dgraph.cache import upkeep
from dgraph.cache.store import Store
from tests.cache.stores import filled, folders, key

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.filterwarnings("error::UserWarning")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


WRITER = """
import os, sys, time
from dgraph.cache.store import Store
from tests.cache.stores import FILES, key

def stall(handle):
    print("writing", flush=True)
    time.sleep(60)

os.fsync = stall
store = Store(sys.argv[1])
with store.making(key().digest):
    store.put(key(), FILES)
"""


def test_a_killed_writer_leaves_only_what_gc_removes(store: Store) -> None:
    command = [sys.executable, "-c", WRITER, str(store.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        store.trim(0)
        assert len(list(store.temporary.iterdir())) == 1  # it is alive
        start = time.perf_counter()
        assert store.find(key()) is None
        assert time.perf_counter() - start < 1  # a reader does not wait
        writer.send_signal(signal.SIGKILL)
    assert folders(store) == []
    (remains,) = store.temporary.iterdir()
    assert store.trim() == [remains.name]
    assert not list(store.temporary.iterdir())
    filled(store, "a")
    assert store.find(key()) is not None


def test_a_second_maker_waits_and_says_so(store: Store) -> None:
    order: list[str] = []

    def second() -> None:
        with Store(store.root).making(key().digest, lambda: order.append("waiting")):
            order.append("second")

    with store.making(key().digest):
        thread = threading.Thread(target=second)
        thread.start()
        while not order:
            time.sleep(0.01)
        order.append("first")
    thread.join(timeout=10)
    assert order == ["waiting", "first", "second"]


def test_a_maker_that_waits_too_long_goes_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgraph.cache.store.LOCK_SECONDS", 0.05)
    with store.making(key().digest), Store(store.root).making(key().digest):
        filled(store, "a")


def test_the_least_recently_used_go_first(store: Store) -> None:
    keys = filled(store, *"abcd")
    size = upkeep.entries(store)[0].size
    for i, found in enumerate(keys):
        os.utime(store.entries / found.digest, (i, i))
    assert store.find(keys[0]) is not None  # used now
    store.limit = 3 * size + 10
    assert set(store.trim()) == {keys[1].digest}
    (e,) = filled(store, "e")
    assert set(folders(store)) == {k.digest for k in (keys[0], keys[3], e)}
    assert store.trim(limit=0)
    assert folders(store) == []


def test_what_was_just_written_stays(store: Store) -> None:
    store.limit = 1
    filled(store, "a")
    (b,) = filled(store, "b")
    assert folders(store) == [b.digest]


def test_damaged_entries_go_before_usable_ones(store: Store) -> None:
    a, b = filled(store, "a", "b")
    store.set_aside(b.digest)
    os.utime(store.entries / a.digest, (0, 0))
    store.limit = upkeep.entries(store)[0].size + 10
    assert [name.partition(".")[0] for name in store.trim()] == [b.digest]
    store.set_aside(a.digest)
    assert store.trim() == []
    assert [name.partition(".")[0] for name in store.trim(damaged=True)] == [a.digest]


def test_locks_of_removed_entries_go(store: Store) -> None:
    a, b = filled(store, "a", "b")
    for found in (a, b):
        (store.locks / f"{found.digest}.lock").touch()
    store.remove(store.entries / a.digest)
    with store.making(key("c").digest):
        store.trim()
        assert {p.stem for p in store.locks.iterdir()} == {b.digest, key("c").digest}

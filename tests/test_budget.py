"""The meter of CPU seconds, and the budget of the default run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.budget import COLLECTION, GROWTH, KEY, REST, Meter, calibrate, cpu_seconds, excess, recorded


@pytest.mark.release
def test_the_default_run_keeps_to_its_budget(request: pytest.FixtureRequest) -> None:
    figures = request.config.cache.get(KEY, None)  # type: ignore[union-attr]
    if figures is None:
        pytest.skip("needs the figures of a whole default run: python -m pytest -n auto")
    assert excess(figures, recorded()) == ""


def test_a_run_may_grow_by_a_quarter() -> None:
    record = {"effort": 1000.0, "seconds": 900.0}
    assert excess({"effort": 1000.0 * GROWTH, "seconds": 5000.0}, record) == "", "seconds differ between machines"
    assert excess({"effort": 400.0, "seconds": 10.0}, record) == ""
    found = excess({"effort": 1300.0, "seconds": 700.0}, record)
    assert found.startswith("the default tests take 1.30 times the recorded effort (1300 pieces of work, 700 CPU")
    assert recorded().keys() == record.keys()


def test_pieces_of_work_take_cpu_seconds() -> None:
    begin = cpu_seconds()
    piece = calibrate()
    assert 0 < piece <= cpu_seconds() - begin + 0.02, "which counts in ticks"


class Plugins(SimpleNamespace):
    def hasplugin(self, name: str) -> bool:
        return name in self.names


def meter(**config: Any) -> Meter:
    option = SimpleNamespace(collectonly=False)
    given: Any = SimpleNamespace(pluginmanager=Plugins(names=()), option=option, **config)
    return Meter(given)


def run_of(found: Meter, *files: str) -> None:
    """Go through the hooks of a session that runs one test of each file."""
    found.pytest_sessionstart()
    for hook in (found.pytest_collection(), *(found.pytest_runtest_protocol(item_of(file)) for file in files)):
        next(hook)
        sum(range(3_000_000))
        with pytest.raises(StopIteration):
            hook.send(None)
    session: Any = SimpleNamespace(exitstatus=0)
    found.pytest_sessionfinish(session)


def item_of(file: str) -> Any:
    return SimpleNamespace(nodeid=f"{file}::test[a::b]")


def test_workers_tell_what_their_files_take() -> None:
    workers = [meter(workeroutput={}) for _ in range(2)]
    run_of(workers[0], "tests/test_a.py", "tests/test_b.py", "tests/test_a.py")
    run_of(workers[1], "tests/test_a.py")
    whole = meter()
    for worker in workers:
        whole.pytest_testnodedown(worker.config)
    whole.pytest_testnodedown(SimpleNamespace())
    assert whole.files.keys() == {COLLECTION, REST, "tests/test_a.py", "tests/test_b.py"}
    for name, seconds in whole.files.items():
        assert seconds == pytest.approx(sum(worker.files[name] for worker in workers))
        assert seconds > 0
    assert len(whole.pieces) == 4
    assert whole.effort == pytest.approx(whole.seconds / (sum(whole.pieces) / 4))


def test_nothing_is_timed_where_nothing_runs() -> None:
    found = meter()
    found.config.option.collectonly = True
    found.pytest_sessionstart()
    assert (found.pieces, found.effort) == ([], 0.0)

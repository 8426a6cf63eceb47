"""CPU seconds of a run: the files that take most of them, the total, and an effort that machines share.

Seconds differ between machines, and between an idle machine and one that others use. So each process that runs tests
times a fixed piece of work where it begins and where it ends. The effort of a run is its CPU seconds divided by the
mean CPU seconds of that piece.

`budget.json` records the effort of the default run, and is changed in the commit that changes the effort. A whole
default run leaves its figures in pytest's cache. The release test in `test_budget.py` compares them with the record.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

RECORD = Path(__file__).with_suffix(".json")
KEY = "dgraph/default_run"
"""Key in pytest's cache of the figures of the last whole default run."""
GROWTH = 1.25
"""Ratio of the effort to the recorded one above which a release fails."""
COLLECTION, REST = "collection", "start, end, other processes"
_SHOWN = 15


def cpu_seconds() -> float:
    """CPU seconds of this process so far, and of the processes that it started and waited for."""
    return sum(os.times()[:4])


def calibrate() -> float:
    """CPU seconds of a fixed piece of work that is like the suite's: objects of Python, and small tensors."""
    begin, threads = time.process_time(), torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(60):
        table = {f"node{i}": (i, [i] * 4) for i in range(2000)}
        assert sum(len(value[1]) for _, value in sorted(table.items())) == 8000
        x = torch.full((16, 64), 0.5)
        for _ in range(40):
            x = torch.softmax(x @ x.T, dim=-1) @ x
    torch.set_num_threads(threads)
    return time.process_time() - begin


def excess(figures: Mapping[str, float], record: Mapping[str, float]) -> str:
    """The reason why a default run takes too much; "" if it keeps to the record."""
    ratio = figures["effort"] / record["effort"]
    if ratio <= GROWTH:
        return ""
    return (
        f"the default tests take {ratio:.2f} times the recorded effort ({figures['effort']:.0f} pieces of work, "
        f"{figures['seconds']:.0f} CPU seconds here; recorded: {record['effort']:.0f}). Make them cheaper, or record "
        f"the new effort in {RECORD.name} and say why."
    )


class Meter:
    """A plugin that counts CPU seconds by test file in each process, and reports them where workers end.

    Attributes:
        files: CPU seconds by test file, and of what belongs to none.
        pieces: CPU seconds of each calibration.
    """

    def __init__(self, config: pytest.Config):
        self.config = config
        self.files: Counter[str] = Counter()
        self.pieces: list[float] = []

    @property
    def seconds(self) -> float:
        """CPU seconds of the run, without calibrations."""
        return sum(self.files.values())

    @property
    def effort(self) -> float:
        """CPU seconds of the run in those of the piece of work; 0 before anything was timed."""
        return self.seconds * len(self.pieces) / sum(self.pieces) if sum(self.pieces) else 0.0

    def add(self, files: Mapping[str, float], pieces: Sequence[float]) -> None:
        """Take over the figures of another process."""
        self.files.update(files)
        self.pieces.extend(pieces)

    def _runs_tests(self) -> bool:
        return not self.config.pluginmanager.hasplugin("dsession")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Time the piece of work, in a process that runs tests."""
        if self._runs_tests() and not self.config.option.collectonly:
            self.pieces.append(calibrate())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        """Count what the collection takes."""
        begin = cpu_seconds()
        result = yield
        self.files[COLLECTION] += cpu_seconds() - begin
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Count what a test takes, with the fixtures that it is the first to need."""
        begin = cpu_seconds()
        result = yield
        self.files[item.nodeid.partition("::")[0]] += cpu_seconds() - begin
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send the figures to the process that reports, or keep those of a whole default run."""
        if not self._runs_tests():
            self.files[REST] += sum(os.times()[:2])  # the workers, its children, have told theirs
        elif self.pieces:
            self.files[REST] += cpu_seconds() - self.seconds - sum(self.pieces)
            self.pieces.append(calibrate())
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["cpu"] = dict(self.files), self.pieces
        elif self._is_default() and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self.config.cache.set(KEY, {"seconds": self.seconds, "effort": self.effort})  # type: ignore[union-attr]

    def _is_default(self) -> bool:
        """True for a run of all tests that no option selects."""
        option = self.config.option
        whole = self.config.args_source is pytest.Config.ArgsSource.TESTPATHS
        narrow = option.markexpr, option.keyword, option.collectonly, option.maxfail, option.deselect, option.ignore
        return whole and not any(narrow) and not option.lf and not torch.cuda.is_available()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add the figures of a worker that has ended; one that crashed has none."""
        self.add(*getattr(node, "workeroutput", {}).get("cpu", ({}, [])))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the files that take most, and the total."""
        if self.pieces and not self.config.option.verbose < 0:
            terminalreporter.section("CPU seconds")
            for name, seconds in self.files.most_common(_SHOWN):
                terminalreporter.write_line(f"{seconds:8.1f}  {name}")
            terminalreporter.write_line(f"{self.seconds:8.1f}  in all, {self.effort:.0f} pieces of work")


def recorded() -> dict[str, float]:
    """The effort of the default run as it was last recorded, and its CPU seconds there."""
    return json.loads(RECORD.read_text(encoding="utf-8"))

"""A run that may be cut: each arm's figures are printed and written when it is over, and time is kept.

    with Run(args, "Loads of an engine") as run:
        with run.stage("weights"):
            model = ...
        for count in args.clients:
            if not run.late(f"{count} clients"):
                rows.append(measured(model, count))
                run.arm("Concurrency", COLUMNS, rows)

Ctrl-C, SIGINT and SIGTERM end what is within; what was measured until then is written and printed, and the script goes
on behind it, to its usual end.
"""

from __future__ import annotations

import argparse
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks import BEGAN
from benchmarks.tables import Cell, Report, text_of

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def add_run(parser: argparse.ArgumentParser, seconds: float | None = None) -> None:
    """What a `Run` is asked for; seconds: by default."""
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="since the process began, after which nothing is begun"
    )
    parser.add_argument("--markdown", type=Path, help="written after every arm")
    parser.add_argument("--json", type=Path, help="written after every arm")


@dataclass
class Run:
    """What a script was asked for, and what it has.

    Attributes:
        given: the options, those of `add_run` among them.
        title: of the report.
        alone: whether the process was started for it, and its time runs since then.
        notes: what else is to be said: what failed, what was not begun, whether it was cut.
        failed: how often something did.
    """

    given: argparse.Namespace
    title: str
    alone: bool = False
    notes: list[str] = field(default_factory=list)
    failed: int = 0

    def __post_init__(self) -> None:
        self.report = Report(self.title)
        self.began = BEGAN if self.alone else time.perf_counter()
        if self.alone:
            self._spent("imports", self.seconds)

    def __enter__(self) -> Self:
        self._handlers: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            # SIGINT as well: a shell that starts a script in the background has it ignored.
            self._handlers = {each: signal.signal(each, signal.default_int_handler) for each in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        for each in self._handlers:
            signal.signal(each, signal.SIG_IGN)
        cut = isinstance(error, KeyboardInterrupt)
        if cut:
            self.note(f"cut after {self.seconds:.0f} s")
        self.write()
        self.report.show()
        for each, handler in self._handlers.items():
            signal.signal(each, handler or signal.SIG_DFL)
        return cut

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self.began

    def say(self, what: str) -> None:
        """Print a line at once."""
        print(f"[{self.seconds:6.1f} s] {what}", flush=True)

    def note(self, what: str) -> None:
        """Say it, in the files, too."""
        self.notes.append(what)
        self.say(what)

    def late(self, what: str) -> bool:
        """Whether the time is over; then it is noted what was left out."""
        limit = self.given.seconds
        over = limit is not None and self.seconds > limit
        if over:
            self.note(f"{what}: not begun after {limit:g} s")
        return over

    @contextmanager
    def told(self, what: str) -> Iterator[None]:
        """An error within ends what is done there, and not the run."""
        try:
            yield
        except Exception as error:  # whatever it is, the figures of the others are wanted
            traceback.print_exc()
            self.failed += 1
            self.note(f"{what}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        self.write()

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """A part of the start, whose seconds are said and written."""
        begin = time.perf_counter()
        yield
        self._spent(what, time.perf_counter() - begin)

    def _spent(self, what: str, seconds: float) -> None:
        self.say(f"{what}: {seconds:.1f} s")
        spent = self.report.data.setdefault("start_up", {})
        spent[what] = seconds
        self.table("Start, in seconds", list(spent), [list(spent.values())])
        self.write()

    def arm(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[Cell]],
        note: str = "",
        said: Sequence[Cell] | None = None,
    ) -> None:
        """An arm is over: print its row, and write the table as far as it goes.

        Args:
            title, columns, rows, note: of the table, which is instead of the one before with this title.
            said: the row; the last one if it is not given.
        """
        cells = rows[-1] if said is None else said
        self.say(f"{title}: " + ", ".join(f"{name} {text_of(c)}" for name, c in zip(columns, cells, strict=True)))
        self.table(title, columns, rows, note)
        self.write()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], note: str = "") -> None:
        """A table instead of the one before with this title; it is printed at the end."""
        self.report.table(title, columns, rows, note, show=False)
        *others, last = self.report.tables
        self.report.tables = [*(table for table in others if table[0] != title), last]

    def write(self) -> None:
        """Write what there is."""
        self.report.data["notes"] = self.notes
        if self.notes:
            self.table("Notes", ["what"], [[note] for note in self.notes])
        self.report.write(self.given.markdown, self.given.json)

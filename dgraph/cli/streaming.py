"""A response while it is decoded: settled text, and on a terminal the block that is being denoised, in place."""

from __future__ import annotations

import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dgraph.cli.output import OUT, print_text

if TYPE_CHECKING:
    from dgraph.engine.io.events import Draft, Event

MASK, EVICTED = "░", "▒"
"""Positions that are masked: one whose row the step computed whole, and one whose row it evicted."""
STYLES = {"mask": "dim", "evicted": "dim magenta", "new": "bold bright_green", "old": "none"}
"""Styles of a position of the current block: "new" was committed by the last step, "old" before it."""
LEGEND = f"{MASK} masked   {EVICTED} masked, its row evicted in this step   bright: committed by this step"
_SHOWN = str.maketrans({**dict.fromkeys((*range(32), 127), "\N{REPLACEMENT CHARACTER}"), 10: "↵", 9: " "})


def draft_text(draft: Draft, before: Draft | None, final: int, decode: Callable[[list[int]], str]) -> Text:
    """The current block as text, from its first position that is not final.

    Args:
        draft: the block, as a step left it.
        before: as the step before left it; None for the first step.
        final: tokens of the response that are final.
        decode: text of ids.
    """
    known = {} if before is None else {before.offset + i: token for i, token in enumerate(before.token_ids)}
    shown = Text()
    for place, (token, kept) in enumerate(zip(draft.token_ids, draft.kept, strict=True), draft.offset):
        if place < final:
            continue
        if token < 0:
            shown.append(MASK if kept else EVICTED, STYLES["mask" if kept else "evicted"])
        else:
            shown.append(decode([token]).translate(_SHOWN), STYLES["old" if known.get(place) == token else "new"])
    return shown


class PlainView:
    """Settled text as it comes, for pipes and files."""

    def show(self, event: Event) -> None:
        """Write what an event made final."""
        if event.text:
            sys.stdout.write(event.text)
            sys.stdout.flush()

    def end(self) -> None:
        """End the response's last line."""
        print_text("\n")


class LiveView:
    """Settled text, with the current block behind it that each step draws anew.

    Lines that are full move up and stay; the last one and the block are drawn by rich.

    Args:
        console: a terminal.
        live: what draws on it.
        decode: text of ids.
    """

    def __init__(self, console: Console, live: Live, decode: Callable[[list[int]], str]):
        self._console, self._live, self._decode = console, live, decode
        self._line, self._final = "", 0
        self._draft: Draft | None = None

    def show(self, event: Event) -> None:
        """Draw the response after an event."""
        self._line += event.text
        self._final += len(event.token_ids)
        self._settle()
        shown = Text(self._line)
        if event.draft is not None and event.finish_reason is None:
            shown.append_text(draft_text(event.draft, self._draft, self._final, self._decode))
            self._draft = event.draft
        self._live.update(shown, refresh=True)

    def end(self) -> None:
        """Leave the response's last line on the screen."""
        self._live.update(Text(self._line), refresh=True)

    def _settle(self) -> None:
        """Print the full lines for good, so that what is drawn anew stays shorter than the screen."""
        lines = Text(self._line).wrap(self._console, self._console.width)
        done = lines[:-1]
        for line in done:
            self._live.console.print(line)
        if done:
            self._line = lines[-1].plain


View = PlainView | LiveView


@contextmanager
def view_of(decode: Callable[[list[int]], str], console: Console = OUT) -> Iterator[View]:
    """The view of one response: drawn on a terminal, plain elsewhere."""
    if not console.is_terminal:
        view: View = PlainView()
        yield view
        view.end()
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        view = LiveView(console, live, decode)
        yield view
        view.end()


def followed(arrived: queue.SimpleQueue[Event], show: Callable[[Event], None]) -> list[Event]:
    """Show the events of one request as they arrive, and return them when it has ended.

    Args:
        arrived: its queue, which the engine's thread fills.
        show: called with each event, in this thread.

    Raises:
        DgraphError: the request's own error.
    """
    events = [arrived.get()]
    show(events[-1])
    while events[-1].finish_reason is None:
        events.append(arrived.get())
        show(events[-1])
    if events[-1].error is not None:
        raise events[-1].error
    return events


@contextmanager
def interrupted(action: Callable[[], object]) -> Iterator[None]:
    """Let Ctrl-C call a function instead of raising `KeyboardInterrupt`; the main thread alone can have that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

"""The offer of a bundle where a step raises an exception: a note with the command, or with the file."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from dgraph.bundles.file import Bundle
from dgraph.bundles.recorder import Recorder
from dgraph.errors import DgraphError

FOLDER = "DGRAPH_BUNDLE"
"""Variable with the folder to which `generate` writes a bundle when a step fails."""

_COMMAND: ContextVar[Callable[[int], str] | None] = ContextVar("command", default=None)


def folder() -> Path | None:
    """The folder that `DGRAPH_BUNDLE` names; None without one."""
    found = os.environ.get(FOLDER)
    return Path(found) if found else None


@contextmanager
def commanded(command: Callable[[int], str]) -> Iterator[None]:
    """Context in which notes show a command of its own.

    Args:
        command: gives it for the number of the step that failed.
    """
    token = _COMMAND.set(command)
    try:
        yield
    finally:
        _COMMAND.reset(token)


def offer(error: Exception, recorder: Recorder, make: Callable[[], Bundle]) -> None:
    """Add a note to an exception of a step: where its bundle was written, or how to get one.

    Args:
        error: the exception; one that was raised before any program ran gets no note.
        recorder: the watch over the programs.
        make: makes the bundle.
    """
    call, where = recorder.call, folder()
    if call is None:
        return
    if where is None:
        error.add_note(f"A bug report needs the bundle of this step ({call.phase}, {call.number}): {_way(call.number)}")
        return
    try:
        made = make()
        where.mkdir(parents=True, exist_ok=True)
        file = _free(
            where, f"{made.facts['model']['name']}-{made.facts['recipe']['recipe']}-{call.phase}-{call.number}"
        )
        made.write(file)
    except (DgraphError, OSError) as second:
        error.add_note(f"No bundle of this step was written to {where}: {second}")
    else:
        error.add_note(f"The bundle of this step is {file}. Run it again: dgraph replay {shlex.quote(str(file))}")


def _way(number: int) -> str:
    """The command that writes a bundle, or a sentence where there is no command."""
    command = _COMMAND.get()
    if command is not None:
        return command(number)
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None or "ipykernel" in sys.modules:
        return f"set os.environ[{FOLDER!r}] to a folder, and call generate again."
    return f"{FOLDER}=. {shlex.join(sys.orig_argv)}"


def _free(where: Path, name: str) -> Path:
    """A file of that name that is not there yet."""
    plain = re.sub(r"[^\w.+-]", "_", name)
    names = (where / f"{plain}{f'-{number}' if number else ''}.zip" for number in itertools.count())
    return next(file for file in names if not file.exists())

"""A command in a terminal of its own: what it prints, while lines and keys are typed as it asks for them."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import struct
import sys
import termios
from collections.abc import Mapping, Sequence
from select import select

SECONDS = 120
"""Seconds after which a silent command has failed."""


def typed(
    words: Sequence[str], lines: Sequence[tuple[str, str]], environment: Mapping[str, str], width: int = 80
) -> tuple[str, int]:
    """Run dgraph in a terminal; returns all that it printed, and its exit code.

    Args:
        words: of the command line, after "dgraph".
        lines: pairs of a text that is awaited, after the one before, and what is typed then.
        environment: beside that of this process.
        width: letters of a line.
    """
    child, terminal = pty.fork()
    if child == 0:
        made = {**os.environ, "TERM": "xterm-256color", **environment}
        for name in ("NO_COLOR", "COLUMNS"):
            made.pop(name, None)
        os.execve(sys.executable, [sys.executable, "-c", "from dgraph.cli import main; main()", *words], made)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    printed, seen, left = "", 0, list(lines)
    try:
        while select([terminal], [], [], SECONDS)[0]:
            piece = _read(terminal)
            if not piece:
                break
            printed += piece
            while left and (at := printed.find(left[0][0], seen)) >= 0:
                seen = at + len(left[0][0])
                os.write(terminal, left.pop(0)[1].encode())
        else:
            raise TimeoutError(f"nothing was printed for {SECONDS} s after {printed[-500:]!r}")
    finally:
        os.close(terminal)  # hangs up, which ends a command that still runs
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert not left, f"{left[0][0]!r} was not printed, but {printed[seen:]!r}"
    return printed, code


def _read(terminal: int) -> str:
    try:
        return os.read(terminal, 1 << 16).decode(errors="replace")
    except OSError as error:
        if error.errno != errno.EIO:  # the command has ended
            raise
        return ""

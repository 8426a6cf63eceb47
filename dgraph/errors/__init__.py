"""Every error that dgraph raises on purpose, and its warnings.

All derive from `DgraphError`; the command line prints its message alone and exits with code 2. A message names the
thing, what was expected, what was got and what to do.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable
from types import FrameType


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the closest of the known names; "" if no name is close."""
    close = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(map(repr, close))}?" if close else ""


class DgraphError(Exception):
    """Base of every deliberate error."""


class InputError(DgraphError, ValueError):
    """A prompt, an option or a generation setting that cannot be used.

    Attributes:
        field: of `dgraph.Decoding`, or "prompt" or "canvas", that is at fault; None where the message alone says it.
    """

    def __init__(self, message: str = "", *, field: str | None = None):
        self.field = field
        super().__init__(message)


class EngineBusy(DgraphError):
    """A queue that is full.

    Attributes:
        retry_after: seconds after which a place in it is likely, an estimate.
    """

    def __init__(self, message: str, retry_after: float):
        self.retry_after = retry_after
        super().__init__(message)


class CaptureError(DgraphError):
    """A model whose forward cannot be captured or canonicalised."""


class CheckpointError(DgraphError):
    """A checkpoint folder that is incomplete or does not fit its family."""


class VerifyError(DgraphError):
    """A graph that breaks a rule of the verifier; the message names pass, layer and node."""


class PassError(DgraphError):
    """A pass that applied nowhere, or that met a graph it cannot rewrite."""


class LoweringError(DgraphError):
    """A graph that cannot be cut into stages or compiled."""


class CacheError(DgraphError):
    """An artifact cache that cannot be used, or an artifact that must not be."""


class FormatError(DgraphError):
    """A file of a graph or a bundle that cannot be read: damaged, of another version, or with what is not there. Also a
    graph that has no form in a file.
    """


class PluginError(DgraphError):
    """An entry point of another package that cannot be loaded or used."""


class PoolFull(DgraphError):
    """A pool of KV pages that has not enough free ones; nothing was handed out."""


class RankLost(DgraphError):
    """A rank of a group has ended or failed, so that the others cannot go on."""


class RanksDiffer(DgraphError):
    """Ranks that must do the same do not; the message says what differs first, and on which of them."""


class UnknownName(DgraphError, KeyError):
    """A name that is not in a closed set; the message lists the closest ones, or says what the caller knows better.

    Args:
        kind: the field's word for the unknown thing.
        name: the given name.
        known: the names that there are.
        hint: a sentence in place of the closest names.
        field: as in `InputError`.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "", *, field: str | None = None):
        self.kind, self.name, self.known, self.hint, self.field = kind, name, sorted(known), hint, field
        super().__init__(self.message())

    def message(self) -> str:
        hint = self.hint or did_you_mean(self.name, self.known)
        known = f"Known: {', '.join(self.known) or 'none'}."
        return " ".join(filter(None, (f"unknown {self.kind} {self.name!r}.", hint, known)))

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return self.message()


class DgraphWarning(UserWarning):
    """Warning of a fault that dgraph works around; the message says how."""


def warn(message: str) -> None:
    """Warn at the line that called into dgraph: that is the reader's own, however deep the finding lies."""
    frame: FrameType | None = sys._getframe()
    packages = []
    while frame is not None:
        packages.append(frame.f_globals.get("__name__", "").partition(".")[0])
        frame = frame.f_back
    own = packages[0]
    level = len(packages) - packages[::-1].index(own)
    while level < len(packages) and packages[level] in ("contextlib", "torch"):  # wrappers of dgraph's function
        level += 1
    warnings.warn(message, DgraphWarning, stacklevel=level + 1)

"""One line of JSON for every request."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dgraph.serve.refusal import Refusal

LOGGER = logging.getLogger("dgraph.access")
"""Logger of the lines, at level INFO; the process that serves chooses the handlers."""
PROBES = ("/health", "/ready", "/ping")
"""Paths by which a supervisor asks for a server's health: they are always answered, and tell nothing else."""


@dataclass
class Record:
    """Record of one request.

    Attributes:
        request_id: the id that the client gave, or one that the server drew.
        method, path: the HTTP method and path.
        client: host and port.
        status: the answer's HTTP status; 499 if the client left before there was one.
        size: bytes of the request's body.
        began: start of the request, in seconds on the monotonic clock.
        facts: fields that the handler adds: the model, tokens, times, how choices ended, why it was refused.
    """

    request_id: str
    method: str
    path: str
    client: Any
    status: int = 499
    size: int = 0
    began: float = field(default_factory=time.monotonic)
    facts: dict[str, Any] = field(default_factory=dict)

    def refuse(self, refusal: Refusal) -> None:
        """Note that the request is answered with this refusal."""
        self.status = refusal.status
        self.facts |= {"error": refusal.message, "code": refusal.code}


def write(record: Record) -> None:
    """Write one line; requests for health, readiness and metrics that were answered with 200 are left out."""
    quiet = record.path in (*PROBES, "/metrics") and record.status == 200
    if quiet or not LOGGER.isEnabledFor(logging.INFO):
        return
    now = time.time()
    line: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z",
        "request_id": record.request_id,
        "client": record.client[0] if record.client else None,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "seconds": round(time.monotonic() - record.began, 6),
        **record.facts,
    }
    LOGGER.info(json.dumps(line, ensure_ascii=True))


@contextmanager
def to_stderr(wanted: bool) -> Iterator[None]:
    """Send the lines to stderr while the context is open, or drop them if `wanted` is False."""
    handler = logging.StreamHandler(sys.stderr) if wanted else logging.NullHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    before = LOGGER.level, LOGGER.propagate
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO if wanted else logging.WARNING)
    LOGGER.propagate = False
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(before[0])
        LOGGER.propagate = before[1]

"""Ranks as processes: a script that torchrun's variables tell which one it is, started several times."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
WAIT = 120.0
"""Seconds after which a process hangs."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Ranks:
    """Processes by rank."""

    def __init__(self, processes: list[subprocess.Popen[str]]):
        self.processes = processes

    def line(self, rank: int) -> str:
        """The next line that a rank prints."""
        out = self.processes[rank].stdout
        assert out is not None
        return out.readline().strip()

    def kill(self, rank: int) -> None:
        self.processes[rank].send_signal(signal.SIGKILL)

    def ends(self, rank: int, within: float = WAIT) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a rank, when it has ended."""
        out, err = self.processes[rank].communicate(timeout=within)
        return self.processes[rank].returncode, out, err


@contextmanager
def started(
    world: int,
    script: str,
    *,
    order: Sequence[int] | None = None,
    apart: float = 0.0,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Ranks]:
    """So many ranks that run a script, started in this order and so many seconds apart."""
    port = str(free_port())
    processes: dict[int, subprocess.Popen[str]] = {}
    try:
        for rank in order or range(world):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_PORT": port}
            own |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
            processes[rank] = subprocess.Popen(
                [sys.executable, "-c", script],
                env={**os.environ, **own, **(environment or {})},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            time.sleep(apart)
        yield Ranks([processes[rank] for rank in range(world)])
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()

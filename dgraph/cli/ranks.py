"""Ranks of a command: started by torchrun, or by the command itself (`--tp`), which is then the first of them.

The others run the same command line and print nothing but errors of their own. They end with the first one, which waits
for them after success, and ends them after an error. They also end when their standard input does, however the first
one ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from dgraph.cli import output
from dgraph.errors import DgraphError, InputError
from dgraph.ranks.rendezvous import rendezvous

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
FOLLOWS = "DGRAPH_FOLLOWS"
"""Variable that is set for ranks that another one has started; their standard input is a pipe from it."""
PATIENCE = 10.0
"""Seconds that a rank may take to end by itself."""
NOTICE = 2.0
"""Seconds to wait for the first rank's message about an error that all ranks have."""


@contextmanager
def ranks(tp: int, device: str | None) -> Iterator[DeviceMesh | None]:
    """The ranks of this command, started now if `--tp` asks for several and torchrun has not started them.

    Args:
        tp: number of ranks; 1 for those of torchrun, or this process alone.
        device: value of `--device`.

    Yields:
        The mesh to shard a model over; None for one process alone.

    Raises:
        InputError: more than there are GPUs, another number than torchrun has started, or a GPU by number.
    """
    if tp < 1:
        raise InputError(f"--tp is the number of ranks, at least 1, got {tp}.")
    started = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if tp > 1 and started not in (1, tp):
        raise InputError(f"--tp {tp} does not fit the {started} ranks that torchrun has started; leave it out.")
    world = max(started, tp)
    if world == 1:
        yield None
        return
    kind, colon, number = str(device or "cpu").partition(":")
    if colon:
        raise InputError(
            f"--device {device} is one GPU, and {world} ranks have one each. Say --device {kind}, and which with "
            f"CUDA_VISIBLE_DEVICES={number},..."
        )
    if started > 1:
        _follow()
        yield _joined(kind)
        return
    if kind == "cuda":
        _check_gpus(world)
    with _others(world, kind):
        yield _joined(kind)


def leads() -> bool:
    """True if this process is rank 0 or alone, and so prints and writes."""
    return os.environ.get("RANK", "0") == "0" or "WORLD_SIZE" not in os.environ


def agreed(value: T) -> T:
    """The first rank's `value`, on all ranks; the values of the others are not read."""
    group = _group()
    if group is None:
        return value
    if group.rank:
        heard: T = group.receive()
        return heard
    group.broadcast(value)
    return value


def is_mine(error: DgraphError) -> bool:
    """True if this rank is to print an error.

    An error that the first rank has as well is printed by the first rank alone; the others hear of it from the group.
    """
    group = _group()
    if group is None:
        return True
    if group.rank:
        lost = group.wait_lost(NOTICE)
        if lost is not None and str(error) in str(lost):
            return False
    group.fail(str(error))
    return True


def _group() -> Any:
    """The group that this command has joined; None without one."""
    if "dgraph.parallel" not in sys.modules:
        return None
    from dgraph.ranks.groups import group_of
    from dgraph.ranks.sharding import GROUP

    with suppress(InputError):
        return group_of(GROUP)
    return None


def _joined(kind: str) -> DeviceMesh:
    """Join the mesh of all ranks; ranks after the first are silent from now on."""
    import dgraph.parallel

    mesh = dgraph.parallel.init(kind)
    if not leads():
        output.hush()
    return mesh


def _check_gpus(world: int) -> None:
    import torch

    here = torch.cuda.device_count()
    if world > here and not (here and os.environ.get("DGRAPH_SHARE_GPU", "0") != "0"):
        raise InputError(f"--tp {world} needs as many GPUs, and this machine has {here}; ask for fewer.")


@contextmanager
def _others(world: int, kind: str) -> Iterator[None]:
    """Start ranks 1 and up as processes, with this one as rank 0. They have ended when the block has."""
    own = rendezvous(world)
    if kind == "cpu":  # else every rank would use every core
        own["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world)))
    os.environ.update({**own, "RANK": "0", "LOCAL_RANK": "0"})
    children: list[subprocess.Popen[bytes]] = []
    ending = threading.Event()
    try:
        with _ended_by_sigterm():
            for rank in range(1, world):
                numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), FOLLOWS: "1"}
                command = [sys.executable, "-m", "dgraph", *sys.argv[1:]]
                children.append(subprocess.Popen(command, env={**os.environ, **numbers}, stdin=subprocess.PIPE))
                watch = threading.Thread(target=_watch, args=(rank, children[-1], ending), daemon=True)
                watch.start()
            yield
            ending.set()
            _wait(children, PATIENCE)
    finally:
        ending.set()
        for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
            for child in children:
                if child.poll() is None:
                    end(child)
            _wait(children, NOTICE)
        for name in (*own, "RANK", "LOCAL_RANK"):
            os.environ.pop(name, None)


def _wait(children: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait until all processes have ended, at most for `seconds`."""
    until = time.monotonic() + seconds
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, until - time.monotonic()))


def _watch(rank: int, child: subprocess.Popen[bytes], ending: threading.Event) -> None:
    """End this process if a rank fails before it has joined; after that its connection reports the failure."""
    code = child.wait()
    if code and not ending.wait(NOTICE) and _group() is None:
        output.complain(f"rank {rank} ended with code {code} before it had joined the others.")
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Turn SIGTERM into `SystemExit` within the block, so that it ends the other ranks, too."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _follow() -> None:
    """End when the rank that started this one has ended, and ignore SIGINT, which is meant for that rank."""
    if FOLLOWS not in os.environ:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.read(0, 1):  # not by sys.stdin, as a thread that waits in it would hold its lock at exit
            pass
        time.sleep(NOTICE)  # its own connection may report the reason in this time
        os._exit(1)

    threading.Thread(target=watch, name="dgraph follows", daemon=True).start()

"""A group whose ranks are processes: collectives of torch.distributed, and a star of connections between hosts."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dgraph.errors import RankLost, RanksDiffer
from dgraph.parallel.choice import Kind, choose
from dgraph.parallel.star import Star
from dgraph.parallel.symmetric import DTYPES, Symmetric
from dgraph.private.torch import held

GRACE = 10.0
"""Seconds after the death of a rank in which the others may end by themselves: fail their requests, print, exit."""
NOTICE = 3.0
"""Seconds that a collective which failed waits to hear which rank has died."""


_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gather of torch.distributed; up to torch 2.12 it has the second name."""


class ProcessGroup:
    """One rank of a group of processes; see `dgraph.ranks.groups.Group`.

    When a rank dies, collectives that wait for it are aborted where their back end can do that. A kernel in symmetric
    memory cannot be aborted. If this process does not end by itself within `GRACE` seconds, it exits with 1.

    Args:
        process_group: of torch.distributed.
        star: between the hosts of the same ranks.
        device: of the tensors.
        symmetric: sums in symmetric memory; None where NCCL or gloo does all of them.
        forced: the kernel for sums that it can do; None to choose by size.
        capability: the lowest of all ranks' GPUs.
        checks: see `Group.checks`.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        star: Star,
        device: torch.device,
        *,
        symmetric: Symmetric | None = None,
        forced: Kind | None = None,
        capability: tuple[int, int] = (0, 0),
        checks: bool = False,
    ):
        self.rank, self.world, self.checks = star.rank, star.world, checks
        self.device, self.capability = device, capability
        self._threads, self._given = dist.get_backend(process_group) == "gloo", list[Tensor]()
        self.recordable = device.type != "cuda" or not self._threads
        self.process_group, self.symmetric = process_group, symmetric
        self._star, self._forced = star, forced
        self._calls = 0
        self._closed = threading.Event()
        star.when_lost(self._abort)

    # -- collectives ---------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Group.all_reduce`."""
        if not x.numel():
            return x.clone()
        with self._called("all_reduce", x):
            kind = self.kind(x)
            if kind != "nccl":
                assert self.symmetric is not None
                return self.symmetric.all_reduce(x, kind)
            total = x.clone(memory_format=torch.contiguous_format)
            given = total.detach()
            dist.all_reduce(given, group=self.process_group)
            self._give(given)
            return total

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Group.all_gather`."""
        every = x.new_empty((self.world, *x.shape))
        if x.numel():
            with self._called("all_gather", x):
                out, own = every.view(-1), x.contiguous().view(-1)
                _gather(out, own, group=self.process_group)
                self._give(out, own)
        return every

    def _give(self, *given: Tensor) -> None:
        """Keep the tensors of a collective while a thread of gloo holds them.

        The thread holds them for a moment after the collective is done, and needs the interpreter's lock to let go. If
        the interpreter has ended by then, that aborts the process; so `close` waits for it.
        """
        if self._threads:
            self._given = [*held(self._given), *given]

    def kind(self, x: Tensor) -> Kind:
        """The kernel that sums a tensor of this size and dtype; "nccl" for every sum by torch.distributed."""
        if self.symmetric is None or x.dtype not in DTYPES or self._forced == "nccl":
            return "nccl"
        kinds = self.symmetric.kinds if self._forced is None else (self._forced,)
        return choose(x.numel() * x.element_size(), self.world, self.capability, kinds, self.symmetric.size)

    @contextlib.contextmanager
    def _called(self, what: str, x: Tensor) -> Iterator[None]:
        """Context of a collective, in which the death of a rank is raised in place of the connection's error."""
        self._star.check()
        self._calls += 1
        if self.checks:
            self._compare(f"{what} of {str(x.dtype).removeprefix('torch.')} {list(x.shape)}")
        try:
            yield
        except RuntimeError as error:
            raise (self._star.wait_lost(NOTICE) or error) from error

    def _compare(self, call: str) -> None:
        every = self.exchange(call)
        if len(set(every)) > 1:
            said = "; ".join(f"rank {rank} calls {each}" for rank, each in enumerate(every))
            raise RanksDiffer(f"ranks part at collective {self._calls}: {said}.")

    # -- hosts ---------------------------------------------------------------------------------------------------------

    def broadcast(self, message: object) -> None:
        """See `Group.tell`."""
        self._star.broadcast(message)

    def receive(self) -> Any:
        """See `Group.hear`."""
        return self._star.receive()

    def exchange(self, value: object) -> list[Any]:
        """See `Group.exchange`."""
        return self._star.exchange(value)

    def wait_lost(self, seconds: float) -> RankLost | None:
        """The reason why a rank takes no part any more, if it is heard within `seconds`; else None."""
        return self._star.wait_lost(seconds)

    def check(self) -> None:
        """See `Group.check`."""
        self._star.check()

    def fail(self, reason: str) -> None:
        """See `Group.fail`."""
        self._star.fail(reason)

    def when_lost(self, listener: Callable[[RankLost], None]) -> None:
        """See `Group.when_lost`."""
        self._star.when_lost(listener)

    def forget(self, listener: Callable[[RankLost], None]) -> None:
        """See `Group.forget`."""
        self._star.forget(listener)

    def close(self) -> None:
        """Say goodbye to the other ranks; it is done at exit, too."""
        self._closed.set()
        self._star.forget(self._abort)
        self._star.close()
        end = time.monotonic() + NOTICE
        while held(self._given) and time.monotonic() < end:
            time.sleep(0.001)

    def _abort(self, lost: RankLost) -> None:
        """Abort collectives that wait for a lost rank; exit if this process does not end within `GRACE` seconds."""
        with contextlib.suppress(Exception):  # not every back end can
            self.process_group.abort()
        if not self._closed.wait(GRACE):
            print(f"error: {lost}", file=sys.stderr, flush=True)
            os._exit(1)

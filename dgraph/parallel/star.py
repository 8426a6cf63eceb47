"""Messages between the hosts of ranks: each has a connection to rank 0, which also tells them which rank has ended.

A connection that ends without a goodbye is a rank that has died. Rank 0 hears of it at once, since a process that dies
closes its connections, and passes it on. A machine that vanishes is found out within `SILENCE` seconds.
"""

from __future__ import annotations

import contextlib
import hmac
import pickle
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dgraph.errors import RankLost

SILENCE = 10
"""Seconds after which a machine that answers nothing counts as dead."""
CONNECT = 120.0
"""Seconds that ranks have to find each other; all have started by then, and loaded torch."""
LENGTH = struct.Struct("!Q")
TOKEN = 32


@dataclass(frozen=True)
class Address:
    """Address of rank 0, with the token that proves a connection is a rank's: messages are pickles, which run code."""

    host: str
    port: int
    token: bytes


class Star:
    """One rank's end of the connections. Made with `listen` on rank 0, and with `connect` on the others.

    Args:
        rank, world: the number of this rank, and the number of ranks.
        peers: connections by rank: those of all others on rank 0, that of rank 0 on the others.
    """

    def __init__(self, rank: int, world: int, peers: dict[int, socket.socket]):
        self.rank, self.world = rank, world
        self._peers = peers
        self._writing = {peer: threading.Lock() for peer in peers}
        self._changed = threading.Condition()
        self._heard: deque[Any] = deque()
        self._given: dict[int, deque[Any]] = {peer: deque() for peer in peers}
        self._left: set[int] = set()
        self._lost: str | None = None
        self._closed = False
        self._listeners: list[Callable[[RankLost], None]] = []
        for peer, connection in peers.items():
            _never_idle(connection)
            name = f"dgraph rank {peer}"
            threading.Thread(target=self._read, args=(peer, connection), name=name, daemon=True).start()

    # -- messages ------------------------------------------------------------------------------------------------------

    def broadcast(self, message: object) -> None:
        """Send a message from rank 0 to all others, without waiting for them."""
        self.check()
        self._send_all("tell", message)

    def receive(self) -> Any:
        """Wait for the next message of rank 0."""
        return self._take(self._heard, {0})

    def exchange(self, value: object) -> list[Any]:
        """Give a value and wait for the values of all ranks, listed by rank."""
        self.check()
        if self.rank:
            self._send(0, "give", value)
            return list(self._take(self._given[0], {0}))
        every = [value, *(self._take(self._given[peer], {peer}) for peer in range(1, self.world))]
        self._send_all("give", every)
        return every

    # -- ends ----------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `RankLost` if a rank has ended or failed."""
        if self._lost is not None:
            raise RankLost(self._lost)

    def wait_lost(self, seconds: float) -> RankLost | None:
        """The reason why a rank takes no part any more, if it is heard within `seconds`; else None."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None or self._left, seconds)
            if self._lost is None and self._left:
                gone = ", ".join(map(str, sorted(self._left)))
                return RankLost(f"rank {gone} of {self.world} has ended, while rank {self.rank} goes on.")
        return None if self._lost is None else RankLost(self._lost)

    def when_lost(self, listener: Callable[[RankLost], None]) -> None:
        """Call a listener, in a thread of its own, when a rank has ended; at once if one has."""
        with self._changed:
            self._listeners.append(listener)
            lost = self._lost
        if lost is not None:
            self._start(listener, lost)

    def forget(self, listener: Callable[[RankLost], None]) -> None:
        """Call a listener no more."""
        with self._changed:
            self._listeners = [each for each in self._listeners if each != listener]

    def fail(self, reason: str) -> None:
        """Tell all others that this rank goes no further."""
        with self._changed:
            if self._closed or self._lost is not None:
                return
            self._lost = f"rank {self.rank} of {self.world} failed: {reason}"
        self._send_all("lost", self._lost)

    def close(self) -> None:
        """Say goodbye, so that the end of the connections does not count as a death."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        self._send_all("bye", None)
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    # -- connections ---------------------------------------------------------------------------------------------------

    def _take(self, place: deque[Any], of: set[int]) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: place or self._lost is not None or self._left & of or self._closed)
            if place:
                return place.popleft()
            self.check()
            gone = ", ".join(map(str, sorted(self._left & of))) or str(self.rank)
            raise RankLost(f"rank {self.rank} waits for rank {gone} of {self.world}, which has left the group.")

    def _send_all(self, kind: str, value: object) -> None:
        data = pickle.dumps((kind, value), pickle.HIGHEST_PROTOCOL)
        for peer in self._peers:
            self._write(peer, data)

    def _send(self, peer: int, kind: str, value: object) -> None:
        self._write(peer, pickle.dumps((kind, value), pickle.HIGHEST_PROTOCOL))

    def _write(self, peer: int, data: bytes) -> None:
        # The thread that reads a broken connection notices it.
        with self._writing[peer], contextlib.suppress(OSError):
            self._peers[peer].sendall(LENGTH.pack(len(data)) + data)

    def _read(self, peer: int, connection: socket.socket) -> None:
        """Read the messages of one peer until its connection ends."""
        while True:
            try:
                (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
                kind, value = pickle.loads(_exactly(connection, length))
            except (OSError, EOFError):
                self._end(peer)
                return
            with self._changed:
                if kind == "tell":
                    self._heard.append(value)
                elif kind == "give":
                    self._given[peer].append(value)
                elif kind == "bye":
                    self._left.add(peer)
                self._changed.notify_all()
            if kind == "lost":
                self._lose(value)

    def _end(self, peer: int) -> None:
        if peer not in self._left and not self._closed:
            self._lose(
                f"rank {peer} of {self.world} has died: its connection to rank {self.rank} ended without a goodbye. "
                f"What it printed last says why."
            )

    def _lose(self, reason: str) -> None:
        with self._changed:
            if self._lost is not None or self._closed:
                return
            self._lost = reason
            listeners = list(self._listeners)
            self._changed.notify_all()
        if not self.rank:
            self._send_all("lost", reason)
        for listener in listeners:
            self._start(listener, reason)

    @staticmethod
    def _start(listener: Callable[[RankLost], None], reason: str) -> None:
        threading.Thread(target=listener, args=(RankLost(reason),), name="dgraph rank lost", daemon=True).start()


def listen(host: str, world: int, publish: Callable[[Address], None]) -> Star:
    """Listen on rank 0, and return its end when all ranks have come.

    Args:
        host: how the others reach this machine.
        world: ranks.
        publish: brings the address to the others.

    Raises:
        RankLost: some of them do not come.
    """
    infos = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    family, local = infos[0][0], infos[0][4][0]
    everywhere = "::" if family == socket.AF_INET6 else "0.0.0.0"
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((local if str(local) in ("127.0.0.1", "::1") else everywhere, 0))
        listener.listen(world)
        token = secrets.token_bytes(TOKEN)
        publish(Address(host, listener.getsockname()[1], token))
        peers: dict[int, socket.socket] = {}
        end = time.monotonic() + CONNECT
        while len(peers) < world - 1:
            listener.settimeout(max(0.01, end - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                missing = ", ".join(str(rank) for rank in range(1, world) if rank not in peers)
                raise RankLost(f"rank {missing} of {world} did not come within {CONNECT:.0f} s.") from None
            rank = _welcome(connection, token)
            if rank is None or rank in peers or not 0 < rank < world:
                connection.close()
            else:
                peers[rank] = connection
    return Star(0, world, peers)


def connect(address: Address, rank: int, world: int) -> Star:
    """Connect to rank 0, and return this rank's end.

    Raises:
        RankLost: rank 0 is not there.
    """
    try:
        connection = socket.create_connection((address.host, address.port), timeout=CONNECT)
        connection.sendall(address.token + LENGTH.pack(rank))
        connection.settimeout(None)
    except OSError as error:
        raise RankLost(f"rank {rank} cannot reach rank 0 at {address.host}:{address.port}: {error}.") from None
    return Star(rank, world, {0: connection})


def _welcome(connection: socket.socket, token: bytes) -> int | None:
    """The rank that has connected; None for a stranger."""
    try:
        connection.settimeout(5.0)
        shown, rank = _exactly(connection, TOKEN), LENGTH.unpack(_exactly(connection, LENGTH.size))[0]
        connection.settimeout(None)
    except (OSError, EOFError):
        return None
    return int(rank) if hmac.compare_digest(shown, token) else None


def _never_idle(connection: socket.socket) -> None:
    """Send without delay, and notice a peer that has vanished."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", SILENCE // 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", SILENCE // 2)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _exactly(connection: socket.socket, count: int) -> bytes:
    """Receive `count` bytes; raises `EOFError` if the connection ends before."""
    parts, missing = [], count
    while missing:
        part = connection.recv(min(missing, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)

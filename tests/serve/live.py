"""A server in this process: over trained models, or over a fake one whose steps can be held up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from dgraph.engine.engine import Engine
from dgraph.serve.host import Host, bind
from dgraph.serve.settings import ServerConfig
from tests.engine.driven import Letters
from tests.engine.test_engine import Served

WAIT = 20.0
"""Seconds after which a test gives up."""


class Live:
    """A server in a thread, on a free port.

    Attributes:
        url: where it answers.
        engines: what it serves.
        host: it.
    """

    def __init__(self, engines: Mapping[str, Engine], shutdown_timeout: float = WAIT, **settings: Any):
        self.engines = dict(engines)
        self.host = Host(bind("127.0.0.1", 0), ServerConfig(**settings), shutdown_timeout)
        self._ready = threading.Event()
        self._addresses: list[str] = []
        self._thread = threading.Thread(target=self._serve, args=(engines,))
        self._thread.start()
        assert self._ready.wait(WAIT)
        self.url = self._addresses[0]

    def _serve(self, engines: Mapping[str, Engine]) -> None:
        def ready(address: str) -> None:
            self._addresses.append(address)
            self._ready.set()

        self.host.serve_with(lambda tell: engines, lambda what: None, ready)

    @property
    def thread(self) -> str:
        """The name of the thread that has the event loop."""
        return self._thread.name

    def settled(self) -> bool:
        """Whether, soon, no request is left, and every page has come back."""
        return until(lambda: not self.host.lifetime.running and all(map(_idle, self.engines.values())))

    def signal(self) -> None:
        """What SIGTERM does."""
        self.host.handle_exit(15, None)

    def join(self) -> bool:
        """Wait for the end; whether it came."""
        self._thread.join(WAIT)
        return not self._thread.is_alive()

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *error: object) -> None:
        self.signal()
        if not self.join():
            self.signal()
            assert self.join()


def _idle(engine: Engine) -> bool:
    stats = engine.stats
    return (stats.running, stats.waiting, stats.free_pages) == (0, 0, stats.pages)


def until(holds: Callable[[], bool]) -> bool:
    """Whether something comes to hold."""
    end = time.monotonic() + WAIT
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def taken(engine: Engine) -> int:
    """Requests that an engine has, in slots or not."""
    stats = engine.stats
    return stats.running + stats.waiting


class Alphabet(Letters):
    """Texts of the letters a to p, whose ids are 0 to 15; other letters are read as some of them."""

    def __init__(self) -> None:
        self.threads: set[str] = set()  # in which texts were read

    def encode_text(self, text: str) -> list[int]:
        self.threads.add(threading.current_thread().name)
        return [(ord(letter) - ord("a")) % 16 for letter in text]

    def encode_chat(self, messages: Any) -> list[int]:
        return self.encode_text("".join(message["content"] for message in messages))


class Held(Served):
    """A fake engine whose steps can be held up, and a server over it."""

    def __init__(self, server: Mapping[str, Any] | None = None, **settings: Any):
        super().__init__(tokenizer=Alphabet(), **settings)
        self.live = Live({"fake": self.engine}, **(server or {}))

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *error: object) -> None:
        self.gate.open.set()
        self.live.__exit__(*error)

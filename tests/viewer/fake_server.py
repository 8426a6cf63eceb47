"""A server that says what it is told to: made runs as `dgraph serve` would send them, and every way to fail."""

from __future__ import annotations

import json
import mimetypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dgraph.viewer import FILES, Run

POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"


@dataclass
class FakeServer:
    """What it serves, and how it is to fail.

    Attributes:
        runs: by model id.
        key: what a request must bring; "" for nothing.
        busy, loading: how often it refuses a completion, and to name its models.
        refusal: a message to refuse a completion with.
        lost_after, broken_after: steps after which a stream ends without a word, or with an error.
        held_after: steps after which a stream waits for `go`.
        asked: the completions that it was asked for.
    """

    runs: dict[str, Run]
    key: str = ""
    busy: int = 0
    loading: int = 0
    refusal: str = ""
    lost_after: int = -1
    broken_after: int = -1
    held_after: int = -1
    go: threading.Event = field(default_factory=threading.Event)
    asked: list[dict[str, Any]] = field(default_factory=list)
    address: str = ""

    def chunks(self, run: Run) -> Iterator[dict[str, Any]]:
        """A run as a stream: tokens are final once nothing before them is a mask."""
        told = 0
        for step in run.steps:
            end = step.offset + next((i for i, t in enumerate(step.token_ids) if t < 0), len(step.token_ids))
            new, told = run.tokens[told:end], max(told, end)
            yield {
                "index": 0,
                "delta": {"content": "".join(token.text for token in new)},
                "finish_reason": None,
                "step_map": [token.step for token in new],
                "token_ids": [token.token for token in new],
                "tokens": [token.text for token in new],
                "confidence": [token.confidence for token in new],
                "draft": asdict(step),
            }


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer

    def log_message(self, *args: object) -> None:
        """Nothing."""

    def _answer(self, status: int, body: bytes, kind: str = "application/json", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Security-Policy", POLICY)
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, message: str, **headers: str) -> None:
        error = {"message": message, "type": "error", "param": None, "code": None}
        self._answer(status, json.dumps({"error": error}).encode(), **headers)

    def _known(self) -> bool:
        if self.fake.key and self.headers.get("Authorization") != f"Bearer {self.fake.key}":
            self._refuse(401, "the key is missing or wrong.")
            return False
        return True

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            if self.fake.loading:
                self.fake.loading -= 1
                self._refuse(503, "the server is loading its model.", Retry_After="1")
            elif self._known():
                listed = [
                    {"id": name, "recipe": run.recipe, "model": run.model, "block_length": run.block_length}
                    for name, run in self.fake.runs.items()
                ]
                self._answer(200, json.dumps({"object": "list", "data": listed}).encode())
            return
        file = FILES / (self.path.lstrip("/") or "index.html")
        if file.is_file():
            self._answer(200, file.read_bytes(), mimetypes.guess_type(file.name)[0] or "text/plain")
        else:
            self._refuse(404, "there is no such page.")

    def do_POST(self) -> None:
        fake, asked = self.fake, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake.asked.append(asked)
        if not self._known():
            return
        if fake.busy:
            fake.busy -= 1
            self._refuse(503, "2 requests wait, as many as may.", Retry_After="3")
            return
        if fake.refusal:
            self._refuse(400, fake.refusal)
            return
        run = fake.runs[asked["model"]]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b": keep-alive\n\n")
        for number, choice in enumerate(fake.chunks(run)):
            if number == fake.held_after:
                fake.go.wait(10)
            if number == fake.lost_after:
                return
            if number == fake.broken_after:
                self._send({"error": {"message": "the engine has died.", "type": "server_error", "code": 500}})
                self.wfile.write(b"data: [DONE]\n\n")
                return
            self._send({"choices": [choice], "usage": None})
        self._send({"choices": [], "usage": dict(run.usage)})
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode())


@contextmanager
def serving(fake: FakeServer) -> Iterator[FakeServer]:
    """Serve on a port of this machine while within."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": fake}))
    server.daemon_threads = True
    fake.address = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake.go.set()
        server.shutdown()
        server.server_close()
        thread.join()

"""A stand-in for the endpoints of Hugging Face that huggingface_hub asks, on 127.0.0.1: repositories, trees, files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class Hub:
    """Repositories that a server shows, and what was asked of it.

    Attributes:
        url: its address.
        revisions: per id, the files of each revision: bytes by path. A branch has the name of its commit.
        gated: ids that want a login.
        cut: paths that end after so many bytes, once each.
        asked: (method, path of the file or API, the Range header).
    """

    url: str = ""
    revisions: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    cut: dict[str, int] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)

    def publish(self, name: str, files: Mapping[str, bytes], revision: str = "main") -> None:
        """Show files as a revision of a repository."""
        self.revisions.setdefault(name, {})[revision] = dict(files)

    def fetched(self) -> set[str]:
        """Paths of files whose bytes were asked for."""
        return {path for method, path, _ in self.asked if method == "GET" and not path.startswith("api/")}

    def commit(self, name: str, revision: str) -> str:
        """The commit of a branch, or itself."""
        return revision if len(revision) == 40 else hashlib.sha1(f"{name}@{revision}".encode()).hexdigest()

    def files(self, name: str, revision: str) -> dict[str, bytes] | None:
        """The files of a branch or a commit; None where there is none."""
        shown = self.revisions[name]
        return next((files for branch, files in shown.items() if revision in (branch, self.commit(name, branch))), None)


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a folder, by their paths in it."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@contextlib.contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve it while the context lasts."""

    class Handler(_Handler):
        shown = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    shown: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        self.shown.asked.append((self.command, path, self.headers.get("Range", "")))
        parts = path.removeprefix("api/models/").split("/")
        name = "/".join(parts[:2])
        kind, revision, *rest = (
            [*parts[2:], "", ""][: max(2, len(parts) - 2)] if len(parts) > 2 else ["revision", "main"]
        )
        if name not in self.shown.revisions:
            return self._refuse(404, "RepoNotFound", "Repository not found")
        if name in self.shown.gated and kind == "resolve":
            return self._refuse(401, "GatedRepo", "Access to this model is restricted")
        files = self.shown.files(name, revision)
        if files is None:
            return self._refuse(404, "RevisionNotFound", "Invalid rev id")
        commit = self._commit(name, revision)
        if kind == "revision":
            siblings = [{"rfilename": file} for file in files]
            return self._json({"id": name, "modelId": name, "sha": commit, "siblings": siblings})
        if kind == "tree":
            return self._json(
                [
                    {"type": "file", "path": p, "size": len(b), "oid": hashlib.sha1(b).hexdigest()}
                    for p, b in files.items()
                ]
            )
        file = "/".join(rest)
        if file not in files:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        return self._file(file, files[file], commit)

    def _commit(self, name: str, revision: str) -> str:
        return self.shown.commit(name, revision)

    def _file(self, file: str, content: bytes, commit: str) -> None:
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        part = content[begin:]
        self.send_response(206 if begin else 200)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(part)))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if file in self.shown.cut:
            self.wfile.write(part[: self.shown.cut.pop(file)])
            self.close_connection = True
            return
        self.wfile.write(part)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

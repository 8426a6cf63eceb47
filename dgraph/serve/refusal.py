"""Refusals of requests, in the form of OpenAI's API."""

from __future__ import annotations

from typing import Any

from dgraph.engine.engine import EngineClosed
from dgraph.errors import EngineBusy

TYPES = {401: "authentication_error", 404: "not_found_error"}
"""By status; others are invalid requests, or the server's."""


class Refusal(Exception):
    """A request that is answered with an error.

    Args:
        status: of HTTP.
        message: for the client: no path, no traceback, nothing of a prompt.
        param: the field that is at fault.
        code: for programs.
        retry_after: seconds after which it is worth asking again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """As JSON."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Beside the content type."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {} if self.retry_after is None else {"Retry-After": str(max(1, round(self.retry_after)))}


def bad_field(param: str, message: str, code: str | None = None) -> Refusal:
    """A field of a request that cannot be served as it is."""
    return Refusal(400, message, param=param, code=code)


def unavailable(message: str, code: str, retry_after: float | None = None) -> Refusal:
    """A server that cannot take requests now."""
    return Refusal(503, message, code=code, retry_after=retry_after)


def shut_down() -> Refusal:
    """A request that had not ended when the time for that was over."""
    return unavailable("the server is shutting down, and ended this request.", "cancelled")


def not_now(error: EngineBusy | EngineClosed) -> Refusal:
    """An engine that takes no requests now, or never again."""
    if isinstance(error, EngineBusy):
        return unavailable(f"the server is busy: {error}", "busy", error.retry_after)
    return unavailable("the engine has stopped; this server takes no requests any more.", "closed")

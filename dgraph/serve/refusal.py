"""Refusals of requests, in the form of OpenAI's API."""

from __future__ import annotations

from typing import Any

from dgraph.engine.engine import EngineClosed
from dgraph.errors import EngineBusy

TYPES = {401: "authentication_error", 404: "not_found_error"}
"""Types of errors by status; any other is "invalid_request_error", or "server_error" from 500 on."""


class Refusal(Exception):
    """Error with which a request is answered.

    Args:
        status: the HTTP status.
        message: text for the client, without paths, tracebacks or any part of a prompt.
        param: the field that is at fault.
        code: identifier of the error for programs.
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
        """The error as a JSON object."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the answer, beside the content type."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {} if self.retry_after is None else {"Retry-After": str(max(1, round(self.retry_after)))}


def bad_field(param: str, message: str, code: str | None = None) -> Refusal:
    """Refusal of a request for one of its fields, with status 400."""
    return Refusal(400, message, param=param, code=code)


def unavailable(message: str, code: str, retry_after: float | None = None) -> Refusal:
    """Refusal of a server that cannot take requests now, with status 503."""
    return Refusal(503, message, code=code, retry_after=retry_after)


def shut_down() -> Refusal:
    """Refusal of a request that was still running when the time for draining was over."""
    return unavailable("the server is shutting down, and ended this request.", "cancelled")


def not_now(error: EngineBusy | EngineClosed) -> Refusal:
    """Refusal of a request since the engine is busy, or has stopped for good."""
    if isinstance(error, EngineBusy):
        return unavailable(f"the server is busy: {error}", "busy", error.retry_after)
    return unavailable("the engine has stopped; this server takes no requests any more.", "closed")

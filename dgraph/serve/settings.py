"""What a server allows, as one value."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dgraph.errors import InputError
from dgraph.runtime.decoding import Decoding

COUNTS = {
    "max_body_bytes": 1,
    "max_held_bytes": 1,
    "max_header_bytes": 1,
    "max_headers": 1,
    "max_connections": 1,
    "max_prompt_tokens": 1,
    "max_prompts": 1,
    "max_n": 1,
    "max_stops": 0,
    "default_max_tokens": 1,
}
"""The least value of each count."""
SECONDS = ("keep_alive", "header_timeout", "body_timeout", "idle_timeout", "send_timeout")
"""Times, each a positive number of seconds."""
HERE = ("localhost", "127.0.0.1", "[::1]")
"""Names of the machine itself, as a Host header has them."""
EVERYWHERE = ("", "0.0.0.0", "::")
"""Addresses that listen on every interface."""
HOST = re.compile(r"[^\s/:@\[\]]+|\[[^\s/\]]+\]")
"""A name or an address as a Host header has it, without a port."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Who may ask, for how much, and how long a server waits.

    Attributes:
        api_keys: of which clients send one as "Authorization: Bearer KEY" to everything under /v1; none: all may ask.
        decoding: how responses are decoded as far as a request does not say; None for the defaults of `Decoding`. Its
            length, stop texts, seed and samplers mean nothing here.
        max_body_bytes: of a request; max_held_bytes: of all requests together that are being read or answered,
            or one of the largest.
        max_header_bytes: of a request's line and headers; max_headers: how many headers it has at most.
        max_connections: at a time; fewer where the limit of open files asks for that.
        max_prompt_tokens: of one prompt; None for what the engine has room for.
        max_prompts: prompts of one request to /v1/completions.
        max_n: choices of one prompt.
        max_stops: texts in `stop`.
        default_max_tokens: of a chat that does not say; None for all that there is room for (block-causal models), or
            128 (the others, which forward the whole response in every step).
        allowed_origins: of pages of other servers whose scripts may ask, as "https://example.org"; "*" for all.
        keep_alive: seconds without a token after which a stream gets a comment.
        header_timeout: seconds within which the head of a request must have come, from when the connection was made
            or from its first byte; body_timeout: within which the body must have come.
        idle_timeout: seconds between two requests on a connection after which it is closed.
        send_timeout: seconds after which a connection is closed whose client reads nothing of what is sent.
        allowed_hosts: names that a request's Host header may have, without a port; none, or "*": any. A server
            without keys has its own names here (`listening_at`), so that no page of another site reaches it by a name
            that leads here (DNS rebinding).
        log_prompts: write prompts to the log, too.

    Raises:
        InputError: a value out of range.
    """

    api_keys: Sequence[str] = ()
    decoding: Decoding | None = None
    max_body_bytes: int = 8 << 20
    max_held_bytes: int = 64 << 20
    max_header_bytes: int = 64 << 10
    max_headers: int = 100
    max_connections: int = 2048
    max_prompt_tokens: int | None = None
    max_prompts: int = 64
    max_n: int = 16
    max_stops: int = 16
    default_max_tokens: int | None = None
    allowed_origins: Sequence[str] = ()
    keep_alive: float = 15.0
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    idle_timeout: float = 75.0
    send_timeout: float = 30.0
    allowed_hosts: Sequence[str] = ()
    log_prompts: bool = False

    def __post_init__(self) -> None:
        for name in ("api_keys", "allowed_origins", "allowed_hosts"):
            values = getattr(self, name)
            if isinstance(values, str) or not all(isinstance(value, str) and value.strip() for value in values):
                raise InputError(f"{name} is a list of texts, none of them empty; got something else.")
            object.__setattr__(self, name, tuple(values))
        for host in self.allowed_hosts:
            if not HOST.fullmatch(host.strip()):
                raise InputError(
                    f"allowed_hosts has names as example.org and addresses as [::1], without a scheme and a port; got "
                    f"{host!r}."
                )
        for name, least in COUNTS.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise InputError(f"{name} must be a whole number, at least {least}, got {value!r}.")
        for name in SECONDS:
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise InputError(f"{name} must be a positive number of seconds, got {value!r}.")

    def listening_at(self, host: str) -> ServeSettings:
        """The same for a server that listens at a host, by name or address: without keys it answers to that and to the
        names of the machine itself, beside `allowed_hosts`. One that listens on every interface has names that are not
        known here, so it answers to any as long as `allowed_hosts` says none.
        """
        if self.api_keys or (host in EVERYWHERE and not self.allowed_hosts):
            return self
        own = () if host in EVERYWHERE else (f"[{host}]" if ":" in host else host,)
        return replace(self, allowed_hosts=tuple(dict.fromkeys((*self.allowed_hosts, *HERE, *own))))

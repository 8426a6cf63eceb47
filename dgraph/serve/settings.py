"""The settings of a server, as one value."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dgraph.errors import InputError, UnknownName
from dgraph.errors.former import former_names
from dgraph.runtime.decoding import Decoding
from dgraph.serve.reading import REASONING, TOOLS

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
"""Names of the machine itself, as a Host header writes them."""
EVERYWHERE = ("", "0.0.0.0", "::")
"""Addresses that listen on every interface."""
HOST = re.compile(r"[^\s/:@\[\]]+|\[[^\s/\]]+\]")
"""A name or an address as a Host header has it, without a port."""

__getattr__ = former_names(__name__, {"ServeSettings": "ServerConfig"})


def takes_key(path: str) -> bool:
    """True of a path that only clients with a key are served, if the server has keys."""
    return path in ("/v1", "/tokenize", "/detokenize") or path.startswith("/v1/")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Access, size limits, time limits and decoding defaults of a server.

    Attributes:
        api_keys: clients send one of them as "Authorization: Bearer KEY" to everything under /v1, to /tokenize and to
            /detokenize; without any, all clients are answered.
        decoding: defaults of responses' decoding, for fields that a request leaves out; None for those of `Decoding`.
            Its length, stop texts, seed and samplers mean nothing here.
        max_body_bytes: most bytes of a request's body.
        max_held_bytes: most bytes of the bodies of all requests that are being read or answered; at least
            `max_body_bytes`.
        max_header_bytes: most bytes of a request's line and headers.
        max_headers: most headers of a request.
        max_connections: most connections at a time; fewer if the limit of open files asks for that.
        max_prompt_tokens: most tokens of one prompt; None for the engine's room.
        max_prompts: most prompts of one request to /v1/completions.
        max_n: most choices of one prompt.
        max_stops: most texts in `stop`.
        default_max_tokens: most tokens of a chat that does not say. None for all that there is room for (block-causal
            models), or 128 (the others, which forward the whole response in every step).
        tool_parser: form in which models call tools, a name of `reading.TOOLS`; None for that of their chat templates.
        reasoning_parser: form of their reasoning, a name of `reading.REASONING`, "none" to leave it in the text; None
            for that of the template.
        allowed_origins: origins of other servers' pages whose scripts may ask, as "https://example.org"; "*" for all.
        keep_alive: seconds without a token after which a stream gets a comment.
        header_timeout: seconds within which the head of a request must have come, from when the connection was made
            or from its first byte.
        body_timeout: seconds within which the body of a request must have come.
        idle_timeout: seconds between two requests on a connection after which it is closed.
        send_timeout: seconds after which a connection is closed if its client does not read.
        allowed_hosts: names that a request's Host header may have, without a port; any if empty, or for "*". A server
            without keys has its own names here (`listening_at`). So no page of another site reaches it by a name that
            resolves to its address (DNS rebinding).
        log_prompts: True to write prompts to the log, too.

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
    tool_parser: str | None = None
    reasoning_parser: str | None = None
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
        for name, forms in (("tool_parser", (*TOOLS,)), ("reasoning_parser", (*REASONING, "none"))):
            if (value := getattr(self, name)) is not None and value not in forms:
                raise UnknownName(name, value, forms)
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

    def listening_at(self, host: str) -> ServerConfig:
        """The settings of a server that listens at a host, a name or an address.

        Without keys it answers to the host and to the names of the machine itself, beside `allowed_hosts`. The names
        of a server that listens on every interface are not known here. So it answers to any as long as `allowed_hosts`
        is empty.
        """
        if self.api_keys or (host in EVERYWHERE and not self.allowed_hosts):
            return self
        own = () if host in EVERYWHERE else (f"[{host}]" if ":" in host else host,)
        return replace(self, allowed_hosts=tuple(dict.fromkeys((*self.allowed_hosts, *HERE, *own))))

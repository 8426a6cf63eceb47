"""What a server allows, as one value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dgraph.errors import InputError
from dgraph.runtime.decoding import Decoding

COUNTS = {
    "max_body_bytes": 1,
    "max_prompt_tokens": 1,
    "max_prompts": 1,
    "max_n": 1,
    "max_stops": 0,
    "default_max_tokens": 1,
}
"""The least value of each count."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Who may ask, for how much, and how long a server waits.

    Attributes:
        api_keys: of which clients send one as "Authorization: Bearer KEY" to everything under /v1; none: all may ask.
        decoding: how responses are decoded as far as a request does not say; None for the defaults of `Decoding`. Its
            length, stop texts, seed and samplers mean nothing here.
        max_body_bytes: of a request.
        max_prompt_tokens: of one prompt; None for what the engine has room for.
        max_prompts: prompts of one request to /v1/completions.
        max_n: choices of one prompt.
        max_stops: texts in `stop`.
        default_max_tokens: of a chat that does not say; None for all that there is room for (block-causal models), or
            128 (the others, which forward the whole response in every step).
        allowed_origins: of pages of other servers whose scripts may ask, as "https://example.org"; "*" for all.
        keep_alive: seconds without a token after which a stream gets a comment.
        body_timeout: seconds within which a request's body must have come.
        log_prompts: write prompts to the log, too.

    Raises:
        InputError: a value out of range.
    """

    api_keys: Sequence[str] = ()
    decoding: Decoding | None = None
    max_body_bytes: int = 4 << 20
    max_prompt_tokens: int | None = None
    max_prompts: int = 64
    max_n: int = 16
    max_stops: int = 16
    default_max_tokens: int | None = None
    allowed_origins: Sequence[str] = ()
    keep_alive: float = 15.0
    body_timeout: float = 30.0
    log_prompts: bool = False

    def __post_init__(self) -> None:
        for name in ("api_keys", "allowed_origins"):
            values = getattr(self, name)
            if isinstance(values, str) or not all(isinstance(value, str) and value.strip() for value in values):
                raise InputError(f"{name} is a list of texts, none of them empty; got something else.")
            object.__setattr__(self, name, tuple(values))
        for name, least in COUNTS.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise InputError(f"{name} must be a whole number, at least {least}, got {value!r}.")
        for name in ("keep_alive", "body_timeout"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise InputError(f"{name} must be a positive number of seconds, got {value!r}.")

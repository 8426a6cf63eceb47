"""An engine under the name that clients call it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from dgraph.engine.engine import Engine
from dgraph.engine.stats import EngineStats
from dgraph.engine.writer import BROKEN
from dgraph.errors import InputError


class ServedModel:
    """What a server knows of an engine.

    Attributes:
        id: its name for clients.
        engine: it; created: seconds since 1970 when it was there.
    """

    def __init__(self, id: str, engine: Engine):
        self.id, self.engine, self.created = id, engine, int(time.time())
        self._began = engine.stats
        self._pieces: dict[int, str] = {}

    @property
    def stats(self) -> EngineStats:
        """What the engine has done for clients, and how it stands: without what it did before, as its warm-up."""
        return self.engine.stats.since(self._began)

    @property
    def has_text(self) -> bool:
        """Whether it reads and writes texts."""
        return self.engine.tokenizer is not None

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text without a frame; raises `InputError` without a tokenizer."""
        return list(self._reader("encode_text")(text))

    def encode_part(self, text: str) -> list[int]:
        """Ids of a text that other ids come before; raises `InputError` without a tokenizer."""
        part = "encode_part" if hasattr(self.engine.tokenizer, "encode_part") else "encode_text"
        return list(self._reader(part)(text))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation; raises `InputError` without a tokenizer, or where its template has no form for it."""
        return list(self._reader("encode_chat")(messages))

    def _reader(self, name: str) -> Any:
        reader = getattr(self.engine.tokenizer, name, None)
        if reader is None:
            raise InputError(f"the model {self.id!r} came without a tokenizer that reads texts; send token ids.")
        return reader

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out; "" without a tokenizer."""
        return "" if self.engine.tokenizer is None else self.engine.tokenizer.decode(ids)

    def piece(self, token: int) -> str:
        """Text of one id by itself: with replacement characters where it is a part of one."""
        found = self._pieces.get(token)
        if found is None:
            found = self._pieces[token] = self.decode([token])
        return found

    def bytes_of(self, token: int) -> bytes | None:
        """What one id is of a text in UTF-8; None for a part of a character where the tokenizer has no `bytes_of`, or
        does not know.
        """
        piece, found = self.piece(token), getattr(self.engine.tokenizer, "bytes_of", None)
        if BROKEN not in piece:
            return piece.encode()
        raw: bytes | None = None if found is None else found(token)
        return raw

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Text of each id."""
        return [self.piece(token) for token in tokens]

    def describe(self) -> dict[str, Any]:
        """As GET /v1/models has it."""
        engine = self.engine
        return {
            "id": self.id,
            "object": "model",
            "created": self.created,
            "owned_by": "dgraph",
            "root": engine.model,
            "parent": None,
            "permission": [],
            "model": engine.model,
            "recipe": engine.recipe,
            "max_model_len": engine.max_tokens,
            "block_length": engine.block_length,
            "attention": engine.spec.attention,
        }

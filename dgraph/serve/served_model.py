"""An engine under the name that clients call it."""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dgraph.engine.engine import Engine
from dgraph.engine.stats import EngineStats
from dgraph.engine.writer import BROKEN
from dgraph.errors import InputError
from dgraph.serve.refusal import bad_field

TOKEN_BYTES = 256
"""Bytes of text that a token is taken to stand for, at most, by a tokenizer that does not know."""


class ServedModel:
    """What a server knows of an engine.

    Attributes:
        id: its name for clients.
        engine: it; created: seconds since 1970 when it was there.
    """

    def __init__(self, id: str, engine: Engine):
        self.id, self.engine, self.created = id, engine, int(time.time())
        if (prepare := getattr(engine.tokenizer, "prepare", None)) is not None:
            prepare()
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

    def encode_text(self, text: str, field: str = "prompt") -> list[int]:
        """Ids of a text without a frame.

        Args:
            field: of the request, for the refusal.

        Raises:
            InputError: there is no tokenizer.
            Refusal: the text is longer than there can be room for; found without encoding it.
        """
        read = self._reader("encode_text")
        self.check_fits(text, field)
        return list(read(text))

    def encode_part(self, text: str, field: str) -> list[int]:
        """Ids of a text that other ids come before; see `encode_text`."""
        read = self._reader("encode_part" if hasattr(self.engine.tokenizer, "encode_part") else "encode_text")
        self.check_fits(text, field)
        return list(read(text))

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], field: str = "messages", /, **options: Any
    ) -> list[int]:
        """Ids of a conversation; see `encode_text`. `InputError` also where its template has no form for it.

        options: as `dgraph.models.tokenizer.FileTokenizer.encode_chat` has them.
        """
        read = self._reader("encode_chat")
        self.check_fits(messages, field)
        return list(read(messages, **options))

    def reads_in_chats(self, option: str) -> bool:
        """True for an option of `encode_chat` that this model's tokenizer and its chat template read."""
        parameters = inspect.signature(self._reader("encode_chat")).parameters
        if option not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return False
        variables = getattr(self.engine.tokenizer, "template_variables", None)
        return option == "continue_final_message" or variables is None or option in variables

    def check_fits(self, given: object, field: str) -> None:
        """Raises `Refusal` for texts, in lists and objects as JSON has them, that cannot fit: too many bytes for the
        positions that the model has room for, however they are encoded, or more messages than these.
        """
        room = self.engine.max_tokens
        longest = getattr(self.engine.tokenizer, "longest_token_bytes", None) or TOKEN_BYTES
        size = size_of(given)
        if size > room * longest:
            said = f"{field} has {size} bytes of text, and the {room} positions that this model has room for"
            raise bad_field(field, f"{said} hold at most {room * longest}; shorten it.", "context_length_exceeded")
        if isinstance(given, Sequence) and not isinstance(given, str) and len(given) > room:
            said = f"{field} has {len(given)} entries, and this model has room for {room} positions"
            raise bad_field(field, f"{said}; shorten it.", "context_length_exceeded")

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


def size_of(given: object) -> int:
    """Bytes in UTF-8 of all texts of a value as JSON has it."""
    if isinstance(given, str):
        return len(given.encode(errors="surrogatepass"))
    if isinstance(given, Mapping):
        return sum(map(size_of, given.values()))
    return sum(map(size_of, given)) if isinstance(given, Sequence) else 0

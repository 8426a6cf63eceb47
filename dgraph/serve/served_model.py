"""An engine under the name that clients call it."""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dgraph.engine.engine import Engine
from dgraph.engine.io.detokenizer import BROKEN
from dgraph.engine.stats import EngineStats
from dgraph.errors import InputError
from dgraph.serve.reading import ReasoningForm, ToolForm
from dgraph.serve.refusal import bad_field

TOKEN_BYTES = 256
"""Most bytes of text that a token stands for, if the tokenizer does not give its own number."""


class ServedModel:
    """An engine, its name, and its tokenizer's functions for requests.

    Attributes:
        id: its name for clients.
        engine: the engine.
        created: when this object was made, in seconds since 1970.
    """

    def __init__(self, id: str, engine: Engine):
        self.id, self.engine, self.created = id, engine, int(time.time())
        if (prepare := getattr(engine.tokenizer, "prepare", None)) is not None:
            prepare()
        self._began = engine.stats
        self._pieces: dict[int, str] = {}

    @property
    def stats(self) -> EngineStats:
        """Statistics of the engine since it began to serve; work before that, such as its warm-up, is left out."""
        return self.engine.stats.since(self._began)

    def encode_text(self, text: str, field: str = "prompt") -> list[int]:
        """Ids of a text without a chat template.

        Args:
            text: the text.
            field: the request's field that has it, which a refusal names.

        Raises:
            InputError: there is no tokenizer that reads texts.
            Refusal: the text is longer than there can be room for; found without encoding it.
        """
        read = self._reader("encode_text")
        self.check_fits(text, field)
        return list(read(text))

    def encode_part(self, text: str, field: str) -> list[int]:
        """Ids of a text that follows other ids; see `encode_text`."""
        read = self._reader("encode_part" if hasattr(self.engine.tokenizer, "encode_part") else "encode_text")
        self.check_fits(text, field)
        return list(read(text))

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], field: str = "messages", /, **options: Any
    ) -> list[int]:
        """Ids of a conversation; see `encode_text`. Also raises `InputError` if the chat template rejects it.

        options: those of `dgraph.models.tokenizer.FileTokenizer.encode_chat`.
        """
        read = self._reader("encode_chat")
        self.check_fits(messages, field)
        return list(read(messages, **options))

    def reads_in_chats(self, option: str) -> bool:
        """True if this model's tokenizer and its chat template read an option of `encode_chat`."""
        parameters = inspect.signature(self._reader("encode_chat")).parameters
        if option not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return False
        variables = getattr(self.engine.tokenizer, "template_variables", None)
        return option == "continue_final_message" or variables is None or option in variables

    def reading_form(self, forms: Mapping[str, ToolForm] | Mapping[str, ReasoningForm]) -> str | None:
        """The first of these forms by name that this model's chat templates show; None for none."""
        asked = getattr(self.engine.tokenizer, "templates_have", None)
        if asked is None:
            return None
        return next((name for name, form in forms.items() if any(map(asked, form.shown or (form.begin,)))), None)

    def shown(self, marks: Sequence[str]) -> dict[int, str]:
        """Special tokens among these texts, which must be written out to be seen."""
        asked = getattr(self.engine.tokenizer, "special_id", None)
        found = {} if asked is None else {asked(mark): mark for mark in marks}
        return {token: mark for token, mark in found.items() if token is not None}

    def check_fits(self, given: object, field: str) -> None:
        """Raise `Refusal` for texts, in lists and objects of JSON, that cannot fit.

        They cannot fit with more bytes than the model's positions can hold in any encoding, or with more entries than
        positions.
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
        """Text of one id by itself; it has replacement characters if the id is a part of a character."""
        found = self._pieces.get(token)
        if found is None:
            found = self._pieces[token] = self.decode([token])
        return found

    def bytes_of(self, token: int) -> bytes | None:
        """UTF-8 bytes of one id.

        None for a part of a character, if the tokenizer has no `bytes_of` or that gives None.
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
        """The model's entry in GET /v1/models."""
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
    """Bytes in UTF-8 of all texts of a JSON value."""
    if isinstance(given, str):
        return len(given.encode(errors="surrogatepass"))
    if isinstance(given, Mapping):
        return sum(map(size_of, given.values()))
    return sum(map(size_of, given)) if isinstance(given, Sequence) else 0

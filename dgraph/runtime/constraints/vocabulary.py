"""A model's tokens as the package llguidance sees them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from dgraph.errors import InputError
from dgraph.runtime.constraints.grammar import Matcher, library
from dgraph.spec import ModelSpec


class Vocabulary:
    """Tokens of a model, of which texts of a grammar are made.

    Args:
        serialised: the tokenizer as the package tokenizers writes it.
        spec: the model.

    Raises:
        InputError: llguidance is not installed, or cannot read the tokenizer.
    """

    def __init__(self, serialised: str, spec: ModelSpec):
        self.spec = spec
        try:
            self.tokenizer = library().LLTokenizer(serialised, n_vocab=spec.vocab, eos_token=list(spec.eos_ids))
        except (ValueError, RuntimeError) as error:
            raise InputError(
                f"the tokenizer of {spec.family} cannot be used with constraints: {error}.", field="constraint"
            ) from None

    def matcher(self, grammar: str) -> Matcher:
        """A matcher at the begin of a response."""
        return Matcher(self.tokenizer, grammar)

    def bytes_of(self, tokens: Sequence[int]) -> bytes:
        """Text of tokens."""
        return bytes(self.tokenizer.decode_bytes(list(tokens)))

    def tokens_of(self, text: bytes) -> Iterator[list[int]]:
        """Ways to write a text in tokens, short ones first."""
        yield list(self.tokenizer.tokenize_bytes(text))
        if all(byte in self._bytes for byte in text):
            yield [self._bytes[byte] for byte in text]

    @cached_property
    def _bytes(self) -> dict[int, int]:
        """Token of each byte that has one."""
        found: dict[int, int] = {}
        for token in range(self.spec.vocab):
            text = self.bytes_of([token])
            if len(text) == 1 and not self.tokenizer.is_special_token(token):
                found.setdefault(text[0], token)
        return found


def vocabulary_of(tokenizer: Any, spec: ModelSpec) -> Vocabulary:
    """The vocabulary of a model with this tokenizer.

    Raises:
        InputError: no tokenizer, or one that does not say what its tokens are; or see `Vocabulary`.
    """
    serialised = getattr(tokenizer, "serialised", None)
    if serialised is None:
        raise InputError(
            f"constraints need the tokenizer of {spec.family}, from a tokenizer.json; give tokenizer=FOLDER.",
            field="constraint",
        )
    return Vocabulary(serialised(), spec)

"""Tokenizers that come from elsewhere: a folder, or an object of transformers."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dgraph.errors import InputError
from dgraph.families import ChatTokenizer, check_text
from dgraph.models.tokenizer import adopt_tokenizer, read_tokenizer

_OPEN, _CLOSE = "\U000f5e5e", "\U000f5e5f"
"""Around the number of a special token that is text: of a private plane, which no text has a reason to use."""


def tokenizer_from(given: object) -> ChatTokenizer | None:
    """The tokenizer that a folder or an object of transformers is; None for anything else.

    An object with a backend of the package tokenizers is read as its folder would be, so that both give the same ids.

    Args:
        given: a `Path`, or any object.

    Raises:
        CheckpointError: damaged files.
    """
    if isinstance(given, Path):
        return read_tokenizer(given) if given.is_dir() else None
    transformers = sys.modules.get("transformers")  # without it there is no object of it
    if transformers is None or not isinstance(given, transformers.PreTrainedTokenizerBase):
        return None
    tokenizer: Any = given
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return PythonTokenizer(tokenizer)
    return adopt_tokenizer(tokenizer)


class PythonTokenizer:
    """A tokenizer of transformers that is written in Python, by its own methods.

    Args:
        tokenizer: a `PreTrainedTokenizerBase`.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    @property
    def mask_id(self) -> int | None:
        """Id of the mask token, if it has one."""
        return self._tokenizer.mask_token_id

    def encode(self, prompt: str) -> list[int]:
        """Ids of a user's prompt in its chat frame; without a template, of the prompt as the tokenizer frames it."""
        if prompt and self._tokenizer.chat_template:
            return self.encode_chat([{"role": "user", "content": prompt}])
        check_text(prompt)
        return list(self._tokenizer.encode(prompt)) if prompt else []

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation, up to where the assistant's next turn begins.

        Special tokens within a message are text. Without a template a turn is a line "role: content".

        Raises:
            InputError: a conversation that the template refuses.
        """
        hidden = [{**message, "content": self._hide(message["content"])} for message in messages]
        if not self._tokenizer.chat_template:
            return self._encode("".join(f"{m['role']}: {m['content']}\n" for m in hidden) + "assistant:")
        try:
            text = self._tokenizer.apply_chat_template(hidden, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # what a template raises is its author's
            raise InputError(f"the model's chat template refuses these messages: {error}.") from None
        return self._encode(text)

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text as it is; special tokens within it are text."""
        check_text(text)
        return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _hide(self, text: str) -> str:
        """A text in which places that look like a special token are marked, for `_encode` to find."""
        check_text(text)
        for place, token in enumerate(self._special):
            text = text.replace(token, f"{_OPEN}{place}{_CLOSE}")
        return text

    def _encode(self, text: str) -> list[int]:
        """Ids of a text in which special tokens are such, and marked places are text."""
        ids: list[int] = []
        for piece in filter(None, re.split(f"({_OPEN}[0-9]+{_CLOSE})", text)):
            if piece[0] == _OPEN:
                ids += self.encode_text(self._special[int(piece[1:-1])])
            else:
                ids += self._tokenizer.encode(piece, add_special_tokens=False)
        return ids

    @property
    def _special(self) -> list[str]:
        """Special tokens as they are written, longer ones first."""
        return sorted(set(self._tokenizer.all_special_tokens), key=lambda token: (-len(token), token))

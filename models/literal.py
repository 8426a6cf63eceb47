"""Special tokens that somebody types: text, where a tokenizer would read the token."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

_OPEN, _CLOSE = "\U000f5e5e", "\U000f5e5f"
"""Characters around the number of a special token, of a private plane, which no text has a reason to use."""


class Literals:
    """Marks for special tokens that are text, and a tokenizer that reads texts with marks.

    A mark survives a chat template, so that text of the template can be told from its arguments.

    Args:
        tokenizer: tokenizer of the package tokenizers.
        special: special tokens as they are written, longer ones first.
    """

    def __init__(self, tokenizer: Any, special: Sequence[str]):
        self._tokenizer, self._special = tokenizer, list(special)
        self._marks = {token: f"{_OPEN}{place}{_CLOSE}" for place, token in enumerate(self._special)}
        self._tokens = re.compile("|".join(map(re.escape, self._special)) or "(?!)")
        self._both = re.compile(f"{_OPEN}[0-9]+{_CLOSE}|{self._tokens.pattern}")

    def mark(self, value: Any) -> Any:
        """A text, or the texts in lists and in objects and their keys, with marks in the places of special tokens."""
        if isinstance(value, str):
            if not any(token in value for token in self._special):
                return value
            return self._tokens.sub(lambda found: self._marks[found.group()], value)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        return [self.mark(item) for item in value] if isinstance(value, (list, tuple)) else value

    @staticmethod
    def has_mark(text: str) -> bool:
        """Tell whether a text may have marks."""
        return _OPEN in text

    def written(self, text: str) -> int:
        """Count the special tokens of a text, without marked ones."""
        return len(self._tokens.findall(text))

    def encode(self, text: str) -> list[int]:
        """Ids of a text in which marked tokens are text, and written ones are special tokens."""
        swapped = self._both.sub(self._swap, text)
        return list(self._reader.encode_batch_fast([swapped], add_special_tokens=False)[0].ids)

    def _swap(self, found: re.Match[str]) -> str:
        """The mark of a token, or the token of a mark."""
        text = found.group()
        if text[0] != _OPEN:
            return self._marks[text]
        number = int(text[1:-1])
        return self._special[number] if number < len(self._special) else text

    @cached_property
    def _reader(self) -> Any:
        """The tokenizer with marks for the names of its special tokens: nothing else in a text gives one."""
        from tokenizers import Tokenizer

        described, marks = json.loads(self._tokenizer.to_str()), self._marks
        for token in described["added_tokens"]:
            if token["content"] in marks:  # read before a normalizer could take the mark out
                token |= {"content": marks[token["content"]], "normalized": False}
        model = described["model"]
        vocabulary = model["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {marks.get(text, text): id for text, id in vocabulary.items()}
        else:
            model["vocab"] = [[marks.get(text, text), score] for text, score in vocabulary]
        if model.get("unk_token") in marks:
            model["unk_token"] = marks[model["unk_token"]]
        if "merges" in model:
            pairs = [merge if isinstance(merge, list) else merge.split(" ", 1) for merge in model["merges"]]
            model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & marks.keys()]
        return Tokenizer.from_str(json.dumps({**described, "post_processor": None}))

"""Grammars as the package llguidance matches them, over the bytes of a text and over the tokens of a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dgraph.errors import InputError

WHITESPACE = r"( |\n {0,16})?"
"""White space between the parts of JSON: a space, or a new line and its indent. Models repeat more without end."""

UNFORCED = '%llguidance {"no_forcing": true}\n'
"""Line of a grammar: no text is forced, since looking for such a text can go on without end."""


def library() -> Any:
    """The package llguidance.

    Raises:
        InputError: it is not installed.
    """
    try:
        import llguidance
    except ImportError as error:
        raise InputError(
            f"constraints need {error.name}, which is not installed: pip install 'dgraph[constrained]'.",
            field="constraint",
        ) from None
    return llguidance


def schema_grammar(schema: str) -> str:
    """Grammar of JSON that a schema describes; the schema as JSON."""
    if schema in ("true", "false"):
        schema = "{}" if schema == "true" else '{"enum": []}'
    found: str = library().LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})
    return found


def regex_grammar(expression: str) -> str:
    """Grammar of texts that a regular expression matches as a whole."""
    made = json.loads(library().LLMatcher.grammar_from_regex(expression))
    for part in made["grammars"]:
        part["lark_grammar"] += f"\n{UNFORCED}"
    return json.dumps(made)


def choice_grammar(choices: Sequence[str]) -> str:
    """Grammar of some texts."""
    return regex_grammar("|".join(f"({_literal(text)})" for text in choices))


def lark_grammar(grammar: str) -> str:
    """A grammar in the Lark format."""
    found: str = library().LLMatcher.grammar_from_lark(f"{grammar}\n{UNFORCED}")
    return found


def wrong_with(grammar: str) -> str:
    """Message of the library about a grammar that it cannot use; "" for one that it can."""
    failed, messages = library().LLMatcher.validate_grammar_with_warnings(grammar)
    return " ".join(str(messages[0]).split()) if failed else ""


def _literal(text: str) -> str:
    """A regular expression for one text."""
    return "".join(c if c.isalnum() and c.isascii() else f"\\x{{{ord(c):X}}}" for c in text)


class Matcher:
    """A place in the texts of a grammar, moved by tokens.

    An error of the library, such as a limit that is reached, makes it `dead`: it takes nothing from then on.

    Args:
        tokenizer: tokenizer of the library.
        grammar: the grammar.
    """

    def __init__(self, tokenizer: Any, grammar: str):
        self._matcher = library().LLMatcher(tokenizer, grammar, log_level=0)
        self._size = int(tokenizer.vocab_size)
        self._ends = list(tokenizer.eos_tokens)

    @property
    def dead(self) -> bool:
        """True after an error of the library."""
        return bool(self._matcher.is_error())

    @property
    def error(self) -> str:
        """Message of the error."""
        return str(self._matcher.get_error())

    @property
    def accepting(self) -> bool:
        """True if the text so far is a whole text of the grammar."""
        return bool(self._matcher.is_accepting()) and not self.dead

    def allowed(self) -> NDArray[np.bool_]:
        """bool[V]: tokens that may follow. Tokens that end a response are not among them."""
        none = np.zeros(self._size, dtype=np.bool_)
        if self.dead or self._matcher.is_stopped():
            return none
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self.dead:
            return none
        found = np.unpackbits(bits, bitorder="little")[: self._size].astype(np.bool_)
        found[self._ends] = False
        return found

    def take(self, tokens: Sequence[int]) -> int:
        """Move on by tokens, up to the first that cannot follow; return the number taken."""
        taken = 0
        for token in tokens:
            if token in self._ends or self.dead or not self._matcher.try_consume_tokens([token]):
                break
            taken += 1
        return taken

    def back(self, count: int) -> None:
        """Take back the last tokens."""
        if count and not self.dead:
            self._matcher.rollback(count)


@lru_cache(maxsize=1)
def byte_tokenizer() -> Any:
    """Tokenizer whose tokens are the 256 bytes."""
    return library().LLTokenizer("byte")

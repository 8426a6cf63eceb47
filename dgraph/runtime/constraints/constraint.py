"""Valid responses as one value: `Constraint`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dgraph.errors import InputError, UnknownName
from dgraph.runtime.constraints.completion import whole_text
from dgraph.runtime.constraints.grammar import (
    choice_grammar,
    lark_grammar,
    regex_grammar,
    schema_grammar,
    wrong_with,
)

MOST_BYTES = 256 * 1024
"""Bytes of a constraint as a text, at most."""
MOST_PLACES = 500
"""Parts of a schema among which the place of an error is looked for, at most."""
NESTED = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords of a schema that hold schemas by name."""
INNER = ("items", "additionalProperties", "anyOf", "oneOf", "allOf", "prefixItems", "not", "if", "then", "else")
"""Keywords of a schema that hold a schema, or a list of them."""


@dataclass(frozen=True)
class Constraint:
    """The texts that a response may be: by a JSON schema, a regular expression, a list of choices or a grammar.

    Make it with `json_schema`, `regex`, `choice` or `lark`. It is checked when it is made, by the package llguidance
    (extra `constrained`). A response under a constraint is such a text, or it ends at its length limit and can still
    be continued to one. Tokens are proposed along a complete filling of the response, so that rules commit them in any
    order. The idea is that of LAVE (arXiv 2602.00612) and DINGO (arXiv 2505.23061).

    Attributes:
        kind: one of "json_schema", "regex", "choice" and "lark".
        text: the expression or grammar; the schema or the list of choices as JSON.

    Raises:
        InputError: a text that is no such thing, is too large, or that nothing satisfies.
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownName("kind of constraint", str(self.kind), KINDS, field="constraint")
        if not isinstance(self.text, str):
            raise InputError(f"{self.kind} is a text, got {self.text!r}.", field="constraint")
        _check_size(self.kind, self.text)
        if self.kind == "lark" and "%llguidance" in self.text:
            raise InputError(
                "lark has a line %llguidance, whose options are set here; some of them keep the matcher from ending. "
                "Leave the line out.",
                field="constraint",
            )
        if message := wrong_with(self.grammar):
            place = _place(json.loads(self.text), message) if self.kind == "json_schema" else ""
            where = f" at {place}" if place else ""
            raise InputError(f"{self.kind} cannot be used{where}: {message}", field="constraint")
        if whole_text(self.grammar) is None:
            raise InputError(
                f"{self.kind} is satisfied by no text, or by none that was found in time; check what it demands.",
                field="constraint",
            )

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Constraint:
        """Constraint to JSON that a schema describes, given as a dict or as JSON text."""
        if isinstance(schema, str):
            _check_size("json_schema", schema)
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise InputError(f"json_schema is no JSON: {error}.", field="constraint") from None
        if not isinstance(schema, Mapping | bool):
            raise InputError(f"json_schema is an object, got {schema!r:.80}.", field="constraint")
        return cls("json_schema", _as_json("json_schema", schema))

    @classmethod
    def regex(cls, expression: str) -> Constraint:
        """Constraint to texts that a regular expression matches as a whole; without look-around and references."""
        return cls("regex", expression)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Constraint:
        """Constraint to one of several texts."""
        if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
            raise InputError(f"choice is a list of at least one text, got {choices!r:.80}.", field="constraint")
        for number, text in enumerate(choices):
            if not isinstance(text, str) or not text:
                raise InputError(f"choice {number} is a text that is not empty, got {text!r:.80}.", field="constraint")
        return cls("choice", _as_json("choice", list(choices)))

    @classmethod
    def lark(cls, grammar: str) -> Constraint:
        """Constraint to texts of a context-free grammar in the Lark format of llguidance; it begins at `start`."""
        return cls("lark", grammar)

    @property
    def grammar(self) -> str:
        """The constraint as llguidance reads it."""
        if self.kind == "json_schema":
            return schema_grammar(self.text)
        if self.kind == "choice":
            return choice_grammar(json.loads(self.text))
        return regex_grammar(self.text) if self.kind == "regex" else lark_grammar(self.text)

    def to_json(self) -> dict[str, Any]:
        """JSON form: {kind: the schema, the choices or the text}."""
        plain = self.kind in ("json_schema", "choice")
        return {self.kind: json.loads(self.text) if plain else self.text}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Constraint:
        """The constraint that `to_json` described; equal to the one that wrote it.

        Raises:
            UnknownName, InputError: a kind that does not exist, or several.
        """
        if len(value) != 1:
            raise InputError(f"a constraint has one of {', '.join(KINDS)}, got {sorted(value)}.", field="constraint")
        ((kind, said),) = value.items()
        if kind not in KINDS:
            raise UnknownName("kind of constraint", str(kind), KINDS, field="constraint")
        found: Constraint = getattr(cls, kind)(said)
        return found


KINDS = ("json_schema", "regex", "choice", "lark")
"""The kinds of constraints, and the functions that make them."""


def _check_size(kind: str, text: str) -> None:
    size = len(text.encode(errors="surrogatepass"))
    if size > MOST_BYTES:
        raise InputError(
            f"{kind} has {size:,} bytes, at most {MOST_BYTES:,} are taken; make it smaller.", field="constraint"
        )


def _as_json(kind: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{kind} has no form in JSON: {error}.", field="constraint") from None


def _place(schema: object, message: str) -> str:
    """JSON pointer to the innermost part of a schema that has the same fault; "" if it is the whole."""
    found = ""
    for number, (pointer, part) in enumerate(_parts(schema, "")):
        if number >= MOST_PLACES:
            break
        if pointer.startswith(found) and wrong_with(schema_grammar(_as_json("json_schema", part))) == message:
            found = pointer
    return found


def _parts(schema: object, pointer: str) -> Iterator[tuple[str, Any]]:
    """The schema and all schemas in it, each with its JSON pointer, outer ones first."""
    if not isinstance(schema, Mapping):
        return
    yield pointer, schema
    for key, value in schema.items():
        if key in NESTED and isinstance(value, Mapping):
            for name, part in value.items():
                yield from _parts(part, f"{pointer}/{key}/{name}")
        elif key in INNER:
            for number, part in enumerate(value if isinstance(value, list) else [value]):
                yield from _parts(part, f"{pointer}/{key}/{number}" if isinstance(value, list) else f"{pointer}/{key}")

"""Constraints of a request, by the names that OpenAI, vLLM and SGLang give them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict

from dgraph.errors import InputError
from dgraph.runtime.constraints.constraint import Constraint
from dgraph.serve.fields import Fields, Listed, Name, Text, one_of
from dgraph.serve.refusal import bad_field

ALIASED = ConfigDict(alias_generator=lambda name: name.rstrip("_"), validate_by_name=False)
"""Fields whose names pydantic has itself end in an underscore here."""
Schema = Annotated[dict[str, Any] | Text, one_of("a JSON schema, as an object or as a text")]


class NamedSchema(Fields):
    """A JSON schema with a name, which changes nothing; strict is always kept."""

    name: Name | None = None
    description: Text | None = None
    schema_: Annotated[dict[str, Any] | None, one_of("a JSON schema")] = None
    strict: bool | None = None

    model_config = ALIASED


class ResponseFormat(Fields):
    """The form of a response, as OpenAI has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Fields):
    """The form of a response, as vLLM has it."""

    json_: Schema | None = None
    regex: Text | None = None
    choice: Listed[Text] | None = None
    grammar: Text | None = None
    json_object: bool | None = None

    model_config = ALIASED


OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of any JSON object."""


class Constrained(Fields):
    """Fields that constrain a response; a request gives one of them."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Listed[Text] | None = None
    guided_grammar: Text | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    json_schema: Schema | None = None


def constraint_of(body: Constrained) -> Constraint | None:
    """The constraint of a request; None for none. Raises `Refusal` for several, and for one that cannot be used."""
    found = [(field, make, said) for field, make, said in _asked(body) if said]
    if not found:
        return None
    field, make, said = found[0]
    if len(found) > 1:
        raise bad_field(found[1][0], f"{found[1][0]} comes beside {field}; a response has one constraint.")
    try:
        return make(said)
    except InputError as error:
        raise bad_field(field, f"{field}: {error}") from None


def _asked(body: Constrained) -> Sequence[tuple[str, Callable[[Any], Constraint], Any]]:
    """Every field with the function that makes its constraint, and what it says."""
    form, outputs = body.response_format, body.structured_outputs or StructuredOutputs()
    named: Any = None
    if form is not None and form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise bad_field("response_format", "response_format json_schema has a schema; give json_schema.schema.")
        named = form.json_schema.schema_ or True  # {} is any JSON
    elif form is not None and form.type == "json_object":
        named = OBJECT
    out = "structured_outputs"
    return [
        ("response_format", Constraint.json_schema, named),
        (out, Constraint.json_schema, outputs.json_),
        (out, Constraint.regex, outputs.regex),
        (out, Constraint.choice, outputs.choice),
        (out, from_grammar, outputs.grammar),
        (out, Constraint.json_schema, OBJECT if outputs.json_object else None),
        ("guided_json", Constraint.json_schema, body.guided_json),
        ("guided_regex", Constraint.regex, body.guided_regex),
        ("guided_choice", Constraint.choice, body.guided_choice),
        ("guided_grammar", from_grammar, body.guided_grammar),
        ("regex", Constraint.regex, body.regex),
        ("ebnf", from_grammar, body.ebnf),
        ("json_schema", Constraint.json_schema, body.json_schema),
    ]


def from_grammar(text: str) -> Constraint:
    """Constraint to a grammar in the Lark format, or in GBNF, whose rules are written with "::="."""
    if "::=" not in text:
        return Constraint.lark(text)
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark
    except ImportError:
        raise InputError("a grammar needs llguidance: pip install 'dgraph[constrained]'.") from None
    try:
        lark = gbnf_to_lark(text)
    except Exception as error:
        raise InputError(f"the grammar cannot be read: {error}.") from None
    return Constraint.lark(re.sub(r"(?m)^%llguidance.*$", "", lark))  # its options, which `Constraint` sets


def call_of(functions: Mapping[str, Mapping[str, Any]], arguments: str, begin: str, end: str) -> Constraint:
    """Constraint to one call of one of these functions, each with the JSON schema of its arguments.

    arguments: key of the arguments; begin, end: marks around the call.
    """
    calls = [
        {
            "type": "object",
            # A resource of its own, so that pointers in the schema begin at its root.
            "properties": {"name": {"const": name}, arguments: {"type": "object", **schema, "$id": f"tool:{number}"}},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for number, (name, schema) in enumerate(functions.items())
    ]
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if not begin:
        return Constraint.json_schema(schema)
    return Constraint.lark(f"start: {json.dumps(begin)} call {json.dumps(end)}\ncall: %json {json.dumps(schema)}\n")

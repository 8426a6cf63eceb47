"""Constraints by the names of OpenAI, vLLM and SGLang: each becomes one `Constraint` of the decoding."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest

from dgraph.runtime.constraints.constraint import Constraint
from dgraph.serve.constraints import call_of, constraint_of
from dgraph.serve.protocol import ChatRequest
from dgraph.serve.refusal import Refusal

if find_spec("llguidance") is None:
    pytest.skip("needs llguidance", allow_module_level=True)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
BY_SCHEMA = Constraint.json_schema(SCHEMA)


def asked(**fields: Any) -> Constraint | None:
    return constraint_of(ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **fields}))


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Constraint.json_schema({"type": "object"})),
        ({"response_format": NAMED}, BY_SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, BY_SCHEMA),
        ({"structured_outputs": {"json_object": True}}, Constraint.json_schema({"type": "object"})),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Constraint.choice(["a", "b"])),
        ({"structured_outputs": {"regex": "a+"}}, Constraint.regex("a+")),
        ({"structured_outputs": {"grammar": 'start: "yes"'}}, Constraint.lark('start: "yes"')),
        ({"guided_json": json.dumps(SCHEMA)}, BY_SCHEMA),
        ({"guided_regex": "a+"}, Constraint.regex("a+")),
        ({"guided_choice": ["a", "b"]}, Constraint.choice(["a", "b"])),
        ({"guided_grammar": 'start: "yes"'}, Constraint.lark('start: "yes"')),
        ({"regex": "a+"}, Constraint.regex("a+")),
        ({"json_schema": json.dumps(SCHEMA)}, BY_SCHEMA),
        ({"regex": "", "guided_choice": []}, None),
    ],
)
def test_every_name_makes_its_constraint(fields: dict[str, Any], want: Constraint | None) -> None:
    assert asked(**fields) == want


def test_a_grammar_in_gbnf_becomes_one_in_lark() -> None:
    found = asked(ebnf='root ::= "yes" | "no"')
    assert found is not None
    assert (found.kind, "::=" in found.text) == ("lark", False)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"regex": "a", "guided_json": SCHEMA}, "regex", "one constraint"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "has a schema"),
        ({"guided_regex": "(a"}, "guided_regex", "cannot be used"),
        ({"guided_json": "{"}, "guided_json", "no JSON"),
        ({"guided_choice": [""]}, "guided_choice", "not empty"),
    ],
)
def test_one_that_cannot_be_used_names_its_field(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(Refusal, match=said) as caught:
        asked(**fields)
    assert caught.value.param == param


def test_a_forced_call_is_a_grammar_of_its_form() -> None:
    marked = call_of({"weather": SCHEMA}, "arguments", "<tool_call>", "</tool_call>")
    assert (marked.kind, '"const": "weather"' in marked.text) == ("lark", True)
    bare = call_of({"weather": SCHEMA, "time": {}}, "parameters", "", "")
    assert bare.kind == "json_schema"
    assert [one["properties"]["name"]["const"] for one in json.loads(bare.text)["anyOf"]] == ["weather", "time"]

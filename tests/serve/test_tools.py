"""Calls of tools and reasoning: read from texts however they are cut, and answered as OpenAI does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dgraph
from dgraph.engine.io.detokenizer import Shown
from dgraph.errors import UnknownName
from dgraph.models.tokenizer import read_tokenizer
from dgraph.serve.reading import REASONING, TOOLS, Call, Parts, Reader, Reading
from dgraph.serve.settings import ServerConfig
from tests.serve.asking import WORDS, chunks_of, refused
from tests.serve.live import WAIT, Live

BERN = Call("weather", {"city": "Bern"})
BOTH = [BERN, Call("time", {})]
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
NAMES = frozenset({"weather", "time"})

CASES: list[tuple[str, str, tuple[str, str, list[Call]]]] = [
    ("hermes", "no call <tool", ("no call <tool", "", [])),
    ("hermes", f"Let me see. {HERMES}", ("Let me see. ", "", [BERN])),
    ("hermes", f'{HERMES}\n<tool_call>{{"name": "time", "arguments": {{}}}}</tool_call>\n', ("", "", BOTH)),
    ("hermes", f"<think>which city?\nBern</think>a{HERMES}", ("a", "which city?\nBern", [BERN])),
    ("hermes", f"<think>{HERMES}", ("", HERMES, [])),
    ("hermes", f"{HERMES}\n\na b", ("a b", "", [BERN])),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}', ("", "", [BERN])),
    ("hermes", "<tool_call>no JSON</tool_call> and", ("<tool_call>no JSON</tool_call> and", "", [])),
    ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', None),  # type: ignore[list-item]
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call>"}}</tool_call>',
        ("", "", [Call("weather", {"city": "</tool_call>"})]),
    ),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "Bern"}}', ("", "", [BERN])),
    ("llama3_json", ' <|python_tag|>{"name": "weather", "parameters": {"city": "Bern"}}', (" ", "", [BERN])),
    (
        "llama3_json",
        '{"name": "weather", "parameters": {"city": "Bern"}}; {"name": "time", "parameters": {}}',
        ("", "", BOTH),
    ),
    ("llama3_json", '{"a": 1} is JSON', ('{"a": 1} is JSON', "", [])),
    ("gemma", '<|tool_call>call:weather{city:<|"|>Bern<|"|>}<tool_call|>', ("", "", [BERN])),
    (
        "gemma",
        '<|channel>thought\nBern<channel|>x<|tool_call>call:time{at:[1,2.5],o:{a:true,b:<|"|>{,<|"|>}}<tool_call|>',
        ("x", "\nBern", [Call("time", {"at": [1, 2.5], "o": {"a": True, "b": "{,"}})]),
    ),
]


@given(cuts=st.lists(st.integers(0, 120), max_size=12))
@pytest.mark.parametrize(("form", "text", "want"), CASES)
def test_a_text_is_read_alike_however_it_is_cut(
    form: str, text: str, want: tuple[str, str, list[Call]] | None, cuts: list[int]
) -> None:
    content, reasoning, calls = (text, "", []) if want is None else want  # a call of an unknown tool stays text
    reader = Reader(Reading(TOOLS[form], NAMES, True, REASONING["gemma" if form == "gemma" else "think"]))
    at = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    got = Parts()
    for begin, end in pairwise(at):
        parts = reader.feed(text[begin:end], end == len(text))
        got.content, got.reasoning = got.content + parts.content, got.reasoning + parts.reasoning
        got.calls += parts.calls
    assert (got.content, got.reasoning, got.calls) == (content, reasoning, calls)


def test_one_call_alone_and_a_prompt_that_ends_within_reasoning() -> None:
    once = Reader(Reading(TOOLS["hermes"], NAMES, False))
    assert once.feed(HERMES * 3, True).calls == [BERN]
    begun = Reader(Reading(None, reasoning=REASONING["think"], begun=True))
    assert begun.feed("so</think>yes", True) == Parts("yes", "so", [])


def test_marks_that_are_special_tokens_are_written_out() -> None:
    class Words:
        def decode(self, ids: Any) -> str:
            return "".join(chr(96 + token) for token in ids if token < 50)

    shown = Shown(Words(), [(99, "<tool_call>")])
    assert shown.decode([1, 2, 99, 98, 3]) == "ab<tool_call>c"
    assert shown.unsettled([1, 99]) == 0


def test_forms_are_known_by_name() -> None:
    assert ServerConfig(tool_parser="gemma", reasoning_parser="none").tool_parser == "gemma"
    with pytest.raises(UnknownName, match="hermes"):
        ServerConfig(tool_parser="herms")


TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }} <tool_call> {% endfor %}{% endif %}"
    "{% for turn in messages %}{{ turn.content or '' }}"
    "{% for call in turn.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments.city }}{% endfor %}"
    "{% if turn.role == 'tool' %} gave {{ turn.tool_call_id }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<think>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ASK = {"role": "user", "content": WORDS}


@pytest.fixture(scope="module")
def http(sdar: dgraph.CompiledModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a model whose template shows tools; responses are given by canvases."""
    folder = tmp_path_factory.mktemp("tools")
    engine: Any = sdar.engine(max_sequences=4, max_tokens=512)
    engine.tokenizer.save(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    engine.tokenizer = read_tokenizer(folder)
    with Live({"tools": engine}) as server, httpx.Client(base_url=server.url, timeout=WAIT) as client:
        yield client


def ask(http: httpx.Client, said: str, **fields: Any) -> httpx.Response:
    """A chat whose response is given, and one more token."""
    body = {"messages": [ASK], "tools": [TOOL], "canvas": [said, 1], "add_generation_prompt": False, **fields}
    return http.post("/v1/chat/completions", json=body)


def test_a_chat_answers_calls(http: httpx.Client) -> None:
    (choice,) = ask(http, f"<think>where</think>{HERMES}").json()["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["role"]) == ("where", "assistant")
    (call,) = message["tool_calls"]
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "weather", "arguments": '{"city":"Bern"}'}}
    (choice,) = ask(http, HERMES, tool_choice="none").json()["choices"]
    assert choice["message"]["content"].startswith(HERMES)
    assert "tool_calls" not in choice["message"]
    whole = ask(http, "<think>where</think>", separate_reasoning=False).json()["choices"][0]["message"]
    assert whole["content"].startswith("<think>where</think>")


def test_a_stream_brings_calls_as_openai_does(http: httpx.Client) -> None:
    chunks = chunks_of(ask(http, f"a{HERMES}{HERMES}", stream=True).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 1]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"city": "Bern"}] * 2
    assert "".join(delta.get("content", "") for delta in deltas).startswith("a")
    assert "tool_call" not in "".join(delta.get("content", "") for delta in deltas)
    once = chunks_of(ask(http, HERMES * 2, stream=True, parallel_tool_calls=False).text)
    assert sum(len(chunk["choices"][0]["delta"].get("tool_calls", ())) for chunk in once) == 1


def test_a_stop_after_a_call_is_its_reason(http: httpx.Client) -> None:
    body = {"canvas": [f"{HERMES} end", 1], "stop": " end"}
    assert ask(http, "", **body).json()["choices"][0]["finish_reason"] == "tool_calls"


def test_earlier_calls_and_results_reach_the_template(http: httpx.Client) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    turns = [ASK, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "sun"}]
    assert ask(http, "a", messages=turns).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools"),
        ({"functions": [{"name": "a"}]}, "functions"),
    ],
)
def test_what_cannot_be_served_is_named(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    assert refused(ask(http, "a", **fields))["param"] == param

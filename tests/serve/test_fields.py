"""Fields that change the answer: honoured, or refused by name, and never passed over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

import dgraph
from dgraph.models.tokenizer import FileTokenizer, read_tokenizer
from dgraph.serve.neutral import ASKED
from dgraph.serve.protocol import ChatRequest, CompletionRequest
from dgraph.serve.refusal import Refusal
from dgraph.serve.served_model import ServedModel
from dgraph.serve.settings import ServerConfig
from dgraph.serve.translate import parsed_chat
from tests.serve.asking import SORTED, WORDS, chat, complete, refused
from tests.serve.live import WAIT, Live

TEMPLATE = (
    "{% for document in documents or [] %}{{ document.text }}\n{% endfor %}"
    "{% for turn in messages %}"
    "{% if turn.role == 'assistant' %}<|assistant|>{{ turn.content }}"
    "{% for call in turn.tool_calls or [] %}{{ call.function.name }} {{ call.function.arguments.city }}{% endfor %}"
    "<|eos|>"
    "{% else %}<|user|>{% if turn.name %}{{ turn.name }}: {% endif %}{{ turn.content }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}no thinking now {% endif %}"
)
TEMPLATE_FIELD = "chat_template_kwargs"
ASK = {"role": "user", "content": WORDS}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}


@pytest.fixture(scope="module")
def live(sdar: dgraph.CompiledModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server over the trained model, whose chat template reads all that chats can have."""
    folder = tmp_path_factory.mktemp("templated")
    engine: Any = sdar.engine(max_sequences=4, max_tokens=512)
    engine.tokenizer.save(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    engine.tokenizer = read_tokenizer(folder)
    with Live({"templated": engine}) as server:
        yield server
        assert server.settled()


@pytest.fixture(scope="module")
def http(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=WAIT) as client:
        yield client


@pytest.fixture(scope="module")
def model(live: Live) -> ServedModel:
    return live.host.lifetime.model(None)


@pytest.fixture(scope="module")
def tokenizer(model: ServedModel) -> FileTokenizer:
    found = model.engine.tokenizer
    assert isinstance(found, FileTokenizer)
    return found


def prompt(model: ServedModel, messages: Any = (ASK,), **fields: Any) -> list[int]:
    """Ids of a chat's prompt."""
    body = ChatRequest.model_validate({"messages": list(messages), **fields})
    return parsed_chat(body, model, ServerConfig()).prompts[0]


def fault(model: ServedModel, messages: Any = (ASK,), **fields: Any) -> tuple[str | None, str]:
    """The field that a chat is refused for, and the message."""
    with pytest.raises(Refusal) as caught:
        prompt(model, messages, **fields)
    return caught.value.param, caught.value.message


# -- fields that are not served ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "needed"), [(ChatRequest, {"messages": [ASK]}), (CompletionRequest, {"prompt": WORDS})]
)
def test_every_known_field_is_taken_at_its_neutral_values_alone(kind: Any, needed: dict[str, Any]) -> None:
    known = {name: neutral for name, neutral in kind.neutral.items() if name not in kind.model_fields}
    assert len(known) > 150
    for name, neutral in known.items():
        for value in (None, *neutral.values, *(["anything"] if neutral.any else [])):
            kind.model_validate({**needed, name: value})
        if neutral.any:
            continue
        with pytest.raises(ValidationError) as caught:
            kind.model_validate({**needed, name: ["anything"]})
        (error,) = caught.value.errors()
        assert error["ctx"]["field"] == name
        assert error["msg"].startswith(f"{name} is not supported; ")


CHANGING: dict[str, Any] = {
    "guided_decoding": {"json": {}},
    "stop_regex": ["m.p"],
    "chat_template": "X",
    "logits_processors": ["x"],
    "lora_path": "x",
    "prompt_embeds": "x",
    "n_probs": 5,
    "thinking_token_budget": 3,
    "reasoning_effort": "high",
    "custom_params": {},
    "return_logprob": True,
    "logprob_start_len": 0,
    "vllm_xargs": {"a": 1},
    "mirostat": 2,
    "dry_multiplier": 0.8,
    "xtc_probability": 0.5,
    "use_beam_search": True,
    "priority": 3,
    "cache_salt": "salt",
    "store": True,
}


@pytest.mark.parametrize("field", CHANGING)
def test_fields_that_change_the_answer_elsewhere(http: httpx.Client, field: str) -> None:
    for answer in (chat(http, **{field: CHANGING[field]}), complete(http, **{field: CHANGING[field]})):
        error = refused(answer)
        assert error["param"] == field
        assert error["message"].startswith(f"{field} is not supported; ")


def test_a_field_of_another_server_names_the_one_that_is_served(http: httpx.Client) -> None:
    message = refused(complete(http, max_new_tokens=5))["message"]
    assert message == "max_new_tokens is not supported; use max_tokens, or omit it."


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"logit_bias_": {}},
            "logit_bias_",
            "logit_bias_ is no field that this server knows. Did you mean 'logit_bias'",
        ),
        ({"temprature": 1}, "temprature", "temprature is no field that this server knows. Did you mean 'temperature'"),
        ({"zzzz": 1}, "zzzz", "zzzz is no field that this server knows. Leave it out."),
        ({"prompt": "a"}, "prompt", "prompt is no field"),
        ({"z" * 99: 1}, "z" * 64, "z" * 64 + " is no field"),
        ({"\ud800": 1}, None, "a name has no half of a character"),
        ({"": 1}, "", " is no field"),
        ({"stream_options": {"include_usages": True}}, "stream_options", "stream_options.include_usages is no field"),
        ({"messages": [{**ASK, "prefix": True}]}, "messages", "messages.0.prefix is not supported; use"),
        ({"messages": [{**ASK, "contents": "a"}]}, "messages", "messages.0.contents is no field"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "bold": True}]}]},
            "messages",
            "messages.0.content: bold is no field",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "args": {}}}]}]},
            "messages",
            "messages.0.tool_calls.0.function.args is no field",
        ),
    ],
)
def test_an_unknown_field_is_refused_with_the_closest_one(
    http: httpx.Client, fields: dict[str, Any], param: str | None, message: str
) -> None:
    content = json.dumps({"messages": [ASK], **fields})
    answer = http.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
    error = refused(answer)
    assert (error["param"], error["message"][: len(message)]) == (param, message)


def test_decisions_know_their_fields(http: httpx.Client) -> None:
    question = {"type": "predicate", "instructions": "Is it a fruit?"}
    body: dict[str, Any] = {"input": "an apple", "questions": [question]}
    assert http.post("/v1/decisions", json={**body, "prompt_cache_key": "a", "store": False}).status_code == 200
    for fields, param, path in (
        ({"temperature": 0.5}, "temperature", "temperature"),
        ({"input": [{**ASK, "names": "a"}]}, "input", "input: names"),
        ({"questions": [{**question, "weight": 2}]}, "questions", "questions.0.predicate.weight"),
    ):
        error = refused(http.post("/v1/decisions", json={**body, **fields}))
        assert (error["param"], error["message"].startswith(f"{path} is no field")) == (param, True), error


def test_fields_that_common_clients_send_are_taken(http: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    asked = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "tools": [tool],
        "tool_choice": "none",
        "functions": [tool["function"]],
        "function_call": "none",
        "logit_bias": {},
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "best_of": 1,
        "prompt_cache_key": "key",
        "safety_identifier": "id",
        "cache_prompt": True,
        "chat_template_kwargs": {},
        "stream_options": {"include_usage": True, "include_obfuscation": False},
    }
    said = {"role": "assistant", "content": "Hello", "refusal": None, "annotations": [], "tool_calls": []}
    part = {"type": "text", "text": WORDS, "cache_control": {"type": "ephemeral"}}
    messages = [ASK, said, {"role": "user", "content": [part], "name": None}]
    answer = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4, **asked})
    assert answer.status_code == 200, answer.text
    assert chat(http, tools=[tool], tool_choice="none").json()["choices"][0]["message"]["content"] == SORTED
    for choice in ({}, {"tool_choice": "auto"}):
        error = refused(chat(http, tools=[tool], **choice))
        assert (error["param"], 'send tool_choice: "none"' in error["message"]) == ("tools", True)
    assert refused(chat(http, functions=[tool["function"]]))["param"] == "functions"
    assert refused(chat(http, tool_choice="required"))["param"] == "tool_choice"


# -- the prompt of a chat ----------------------------------------------------------------------------------------------


def test_how_a_prompt_is_framed(model: ServedModel, tokenizer: FileTokenizer) -> None:
    assert prompt(model) == prompt(model, add_generation_prompt=True, continue_final_message=False)
    assert prompt(model, add_generation_prompt=False) == prompt(model)[:-1]
    for thinks in (True, False):
        kwargs = {"enable_thinking": thinks}
        assert prompt(model, chat_template_kwargs=kwargs) == tokenizer.encode_chat([ASK], **kwargs)
    assert prompt(model, chat_template_kwargs={"enable_thinking": False}) != prompt(model)
    documents = [{"title": "a", "text": "A stone is grey."}]
    assert prompt(model, documents=documents) == tokenizer.encode_chat([ASK], documents=documents) != prompt(model)


def test_a_message_that_goes_on(http: httpx.Client, model: ServedModel) -> None:
    begun = [ASK, {"role": "assistant", "content": "Sorted: cloud"}]
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompt(model, begun, **goes_on) == prompt(model) + model.encode_part("Sorted: cloud", "prompt")
    answer = http.post("/v1/chat/completions", json={"messages": begun, "max_tokens": 40, **goes_on}).json()
    assert "Sorted: cloud" + answer["choices"][0]["message"]["content"] == SORTED
    for given in ({}, {"add_generation_prompt": True}):
        param, message = fault(model, begun, continue_final_message=True, **given)
        assert (param, "add_generation_prompt" in message) == ("continue_final_message", True)


def test_earlier_calls_of_tools_reach_the_template(http: httpx.Client, model: ServedModel) -> None:
    result = {"role": "tool", "tool_call_id": "1", "name": "weather", "content": "sunny"}
    turns = [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}, result, ASK]
    text = f"<|user|>{WORDS}<|assistant|>weather Bern<|eos|><|user|>weather: sunny<|user|>{WORDS}<|assistant|>"
    assert prompt(model, turns) == model.engine.tokenizer._tokenizer.encode(text, add_special_tokens=False).ids  # type: ignore[union-attr]
    given = {**CALL, "function": {"name": "weather", "arguments": {"city": "Bern"}}}
    assert prompt(model, [ASK, {"role": "assistant", "tool_calls": [given]}, result, ASK]) == prompt(model, turns)
    assert http.post("/v1/chat/completions", json={"messages": turns, "max_tokens": 4}).status_code == 200
    wrong = {**CALL, "function": {"name": "weather", "arguments": "[1]"}}
    answer = http.post("/v1/chat/completions", json={"messages": [ASK, {"role": "assistant", "tool_calls": [wrong]}]})
    error = refused(answer)
    assert error["message"].startswith("messages.1.tool_calls.0.function.arguments: arguments of a call are an object")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"chat_template_kwargs": {"enable_thinkin": False}},
            TEMPLATE_FIELD,
            f"{TEMPLATE_FIELD}.enable_think",
        ),
        (
            {"chat_template_kwargs": {"messages": []}},
            TEMPLATE_FIELD,
            f"{TEMPLATE_FIELD}.messages is a field of",
        ),
        ({"chat_template_kwargs": {"self": 1}}, TEMPLATE_FIELD, f"{TEMPLATE_FIELD}.self is a field of"),
        ({"chat_template_kwargs": {"\ud800": 1}}, TEMPLATE_FIELD, f"{TEMPLATE_FIELD}.\\ud800 is not read"),
    ],
)
def test_what_a_template_does_not_read_is_refused(
    model: ServedModel, fields: dict[str, Any], param: str, message: str
) -> None:
    found = fault(model, **fields)
    assert (found[0], found[1][: len(message)]) == (param, message)


def test_a_tokenizer_that_reads_roles_and_contents_alone(model: ServedModel) -> None:
    class Plain:
        def encode_text(self, text: str) -> list[int]:
            return model.encode_text(text, "prompt")

        decode = staticmethod(model.decode)

        def encode_chat(self, messages: Any) -> list[int]:
            return self.encode_text("".join(turn["content"] for turn in messages))

    engine: Any = type(
        "Engine",
        (),
        {"tokenizer": Plain(), "stats": model.engine.stats, "spec": model.engine.spec, "max_tokens": 512},
    )()
    plain = ServedModel("plain", engine)
    assert prompt(plain) == model.encode_text(WORDS, "prompt")
    for fields in (
        {"add_generation_prompt": False},
        {"documents": [{"text": "a"}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ):
        assert fault(plain, **fields)[0] == next(iter(fields))
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    assert fault(plain, [ASK, {"role": "assistant", "content": "a"}], **goes_on)[0] == "continue_final_message"
    called = [ASK, {"role": "assistant", "content": "a", "tool_calls": [CALL]}]
    assert fault(plain, called) == (
        "messages",
        "messages.1.tool_calls is not shown by the model's chat template; leave it out.",
    )


def test_likely_tokens_beside_the_chosen_one(http: httpx.Client) -> None:
    for asked, count in (({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 1}, 1)):
        marks = chat(http, max_tokens=8, logprobs=True, **asked).json()["choices"][0]["logprobs"]["content"]
        assert [len(mark["top_logprobs"]) for mark in marks] == [count] * len(marks)
    for asked_for in (0, 1):
        marks = complete(http, max_tokens=8, logprobs=asked_for, ignore_eos=True).json()["choices"][0]["logprobs"]
        assert len(marks["token_logprobs"]) > 0
        assert (marks["top_logprobs"] is None) == (asked_for == 0)


def test_the_table_is_in_order_and_names_fields_that_exist() -> None:
    served = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert {neutral.instead for neutral in ASKED.values()} - {""} <= served

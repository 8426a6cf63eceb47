"""What is refused, and what a client is told: the field, and nothing of its prompt or of the machine."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from dgraph.serve.guard import any_equal
from tests.serve.asking import chat, complete, refused
from tests.serve.live import WAIT, Held

LIMITS: dict[str, Any] = {
    "max_n": 3,
    "max_stops": 2,
    "max_prompts": 2,
    "max_body_bytes": 4000,
    "max_prompt_tokens": 12,
    "body_timeout": 0.2,
}


@pytest.fixture(scope="module")
def held() -> Iterator[Held]:
    with Held(LIMITS, max_tokens=64) as server:
        yield server
        assert server.live.settled()


@pytest.fixture(scope="module")
def http(held: Held) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=held.live.url, timeout=WAIT) as client:
        yield client


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", "many"),
        ("max_tokens", True),
        ("max_tokens", 10**30),
        ("max_tokens", 63),
        ("n", 4),
        ("stop", ["a", "b", "c"]),
        ("stop", [""]),
        ("stop", 7),
        ("stop", "a" * 1001),
        ("policy", "p" * 101),
        ("seed", 2**63),
        ("temperature", -1),
        ("top_p", 0),
        ("top_k", -2),
        ("stream", "yes"),
        ("threshold", 1.5),
        ("steps", 0),
        ("policy", "no such policy"),
        ("block_length", 32),
        ("stream_mode", "loud"),
        ("return_step_map", 1),
        ("echo", {}),
        ("logprobs", 5),
        ("model", ["fake"]),
        ("prompt", ""),
        ("prompt", []),
        ("prompt", ["a", "b", "c"]),
        ("prompt", "a" * 13),
        ("prompt", [-1]),
        ("prompt", [3, "a"]),
        ("prompt", {"text": "a"}),
        ("min_tokens", 5),
        ("canvas", []),
        ("canvas", "abc"),
        ("canvas", ["abcd"]),
        ("canvas", ["ab", 3]),
        ("canvas", [0]),
        ("canvas", [2**30]),
        ("presence_penalty", 2.5),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"9999999": 1}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("bad_words", ["a longer text"]),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "xml"}),
        ("guided_regex", "(a"),
        ("guided_choice", [""]),
        ("structured_outputs", {"json": {"type": 1}}),
        ("ebnf", 'root ::= "a'),
        ("best_of", 2),
        ("suffix", "b"),
        ("stop_token_ids", [9999999]),
        ("include_stop_str_in_output", 1),
    ],
)
def test_a_field_that_cannot_be_served_is_named(http: httpx.Client, field: str, value: Any) -> None:
    error = refused(http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4, field: value}))
    assert error["param"] == field, error
    assert error["type"] == "invalid_request_error"


PROMPT = "expected a text, a list of texts, a list of ids (whole numbers from 0), or a list of such lists"
STOP = "expected a text of 1 to 1000 characters, or a list of such texts"
SEGMENT = "expected a text that is fixed, or a number of free positions, at least 1"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("stop", "", f"stop: {STOP}, got a text of length 0."),
        ("stop", 7, f"stop: {STOP}, got 7."),
        ("stop", ["a", ""], f"stop: {STOP}, got a list of length 2."),
        ("prompt", None, f"prompt: {PROMPT}, got null."),
        ("prompt", [3, "secret"], f"prompt: {PROMPT}, got a list of length 2."),
        ("prompt", {"text": "secret"}, f"prompt: {PROMPT}, got an object."),
        ("canvas", ["ab", 2.5], f"canvas.1: {SEGMENT}, got 2.5."),
        ("canvas", [True], f"canvas.0: {SEGMENT}, got true."),
        ("max_tokens", 0, "max_tokens: Input should be greater than or equal to 1, got 0."),
        ("max_tokens", 10**30, "max_tokens: Input should be less than or equal to 2147483647, got a number too large."),
        ("stream", "secret", "stream: Input should be a valid boolean, got a text of length 6."),
        ("temperature", [], "temperature: Input should be a valid number, got a list of length 0."),
    ],
)
def test_what_was_expected_and_what_came_is_said(http: httpx.Client, field: str, value: Any, message: str) -> None:
    error = refused(http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4, field: value}))
    assert (error["message"], error["param"]) == (message, field)


def test_a_message_that_has_no_form_is_told_the_forms(http: httpx.Client) -> None:
    forms = "messages.0.content: expected a text, or a list of parts with a type and a text"
    for content, got in ((5, "5"), ([{"text": "secret"}], "a list of length 1"), ({}, "an object")):
        answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
        assert refused(answer)["message"] == f"{forms}, got {got}."


def test_of_several_prompts_the_wrong_one_is_named(http: httpx.Client) -> None:
    error = refused(complete(http, [[1], [2, 99]], max_tokens=4, n=2))
    assert error["message"].startswith("prompt 1: token 1 is 99, outside the vocabulary")
    assert error["param"] == "prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 5}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"threshold": 0.5, "steps": 4}, "threshold"),
        ({"policy": "confidence_threshold", "steps": 4}, "steps"),
        ({"policy": "autoregressive"}, "policy"),
    ],
)
def test_a_chat_that_cannot_be_served(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "abc"}], **fields}
    assert refused(http.post("/v1/chat/completions", json=body))["param"] == param


def test_likely_tokens_beyond_the_chosen_one_are_refused_by_name(http: httpx.Client) -> None:
    error = refused(chat(http, logprobs=True, top_logprobs=5))
    assert error["message"] == "only the chosen token's is known: top_logprobs is 0 or 1, got 5."


@pytest.mark.parametrize("kind", ["image_url", "input_image", "input_audio"])
def test_a_part_of_a_message_that_is_no_text_is_named(http: httpx.Client, kind: str) -> None:
    parts = [{"type": "text", "text": "abc"}, {"type": kind, kind: {"url": "data:image/png;base64,AAAA"}}]
    error = refused(http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]}))
    assert error["message"] == f"a part of a message is a text here, got one of type '{kind}'; leave it out."


def test_known_fields_that_ask_for_nothing_are_passed_over(http: httpx.Client) -> None:
    neutral = {"presence_penalty": 0, "repetition_penalty": 1.0, "tools": [], "best_of": 1, "logit_bias": None}
    others = {"user": "me", "metadata": {"a": 1}, "response_format": {"type": "text"}}
    nothing = {"stop": None, "seed": None, "n": None, "stream": None, "stream_options": None, "top_k": -1}
    assert complete(http, "abc", max_tokens=4, **neutral, **others, **nothing).status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"prompt": "abc"', b"[]", b"null", b'"abc"', b"\xff\xfe{}", b"[" * 3000, b"1" * 3990, b"NaN"],
    ids=["empty", "brace", "cut", "list", "null", "text", "bytes", "deep", "digits", "nan"],
)
def test_a_body_that_is_no_object(http: httpx.Client, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    assert refused(http.post("/v1/completions", content=body, headers=headers))["code"] == "json_invalid"


def test_numbers_that_json_does_not_have(http: httpx.Client) -> None:
    for text, got in (("NaN", "nan"), ("Infinity", "a number too large"), ("1e999", "a number too large")):
        body = f'{{"prompt": "abc", "temperature": {text}}}'
        answer = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert refused(answer)["message"] == f"temperature: Input should be a finite number, got {got}."


def test_half_a_character_is_refused(http: httpx.Client) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "\ud800"}]})
    answer = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert refused(answer)["param"] == "messages"


def test_prompts_are_read_beside_the_event_loop(http: httpx.Client, held: Held) -> None:
    """A long one takes its time, and streams go on meanwhile."""
    tokenizer: Any = held.engine.tokenizer
    assert complete(http, "abc", max_tokens=4).status_code == 200
    assert tokenizer.threads
    assert held.live.thread not in tokenizer.threads, "which has the event loop"


def test_a_form_is_told_to_be_json(http: httpx.Client) -> None:
    error = refused(http.post("/v1/completions", data={"prompt": "abc"}))
    assert "application/json" in error["message"]


def test_a_body_that_is_too_large(http: httpx.Client, held: Held) -> None:
    assert refused(complete(http, "a" * 4000), 413)["code"] == "too_large"

    def endless() -> Iterator[bytes]:
        for _ in range(1000):
            yield b"a" * 1000

    # The server may hang up before all was sent.
    with httpx.Client(base_url=held.live.url, timeout=WAIT) as client, contextlib.suppress(httpx.TransportError):
        assert client.post("/v1/completions", content=endless()).status_code == 413


def refused_before_its_end(url: str, version: str, *more: str) -> bytes:
    """What a client is told that sends all of a large body, on a connection that is closed then, before it reads."""
    host, port = url.removeprefix("http://").split(":")
    body = b"a" * (8 << 20)
    head = [f"POST /v1/completions HTTP/{version}", "host: localhost", f"content-length: {len(body)}", *more]
    with socket.create_connection((host, int(port)), timeout=WAIT) as line:
        line.sendall("\r\n".join([*head, "", ""]).encode() + body)
        return b"".join(iter(lambda: line.recv(1 << 16), b""))


@pytest.mark.parametrize(("version", "more"), [("1.1", ["connection: close"]), ("1.0", [])])
def test_who_is_refused_reads_why_though_the_connection_closes(held: Held, version: str, more: list[str]) -> None:
    answer = refused_before_its_end(held.live.url, version, *more)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b'"code":"too_large"' in answer
    with Held({"api_keys": ("first",)}) as server:
        assert b'"code":"invalid_api_key"' in refused_before_its_end(server.live.url, version, *more)


def test_a_client_that_waits_for_a_word_need_not_send_its_body(held: Held) -> None:
    host, port = held.live.url.removeprefix("http://").split(":")
    waits = "expect: 100-continue\r\nconnection: close"
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9000\r\n{waits}"
    with socket.create_connection((host, int(port)), timeout=WAIT) as line:
        line.sendall(f"{head}\r\n\r\n".encode())
        assert line.recv(4096).startswith(b"HTTP/1.1 413")


def test_a_body_that_does_not_come(http: httpx.Client, held: Held) -> None:
    host, port = held.live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT) as line:
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        assert line.recv(4096).startswith(b"HTTP/1.1 408")
    with socket.create_connection((host, int(port)), timeout=WAIT) as line:
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
    assert http.get("/health").status_code == 200, "who hangs up in the middle harms nobody"


def test_paths_methods_and_models_that_are_not_there(http: httpx.Client) -> None:
    assert refused(http.get("/v1/embeddings"), 404)["type"] == "not_found_error"
    assert refused(http.get("/v1/completions"), 405)
    assert refused(complete(http, "abc", model="gpt"), 404)["param"] == "model"
    assert refused(http.get("/../../etc/passwd"), 404)


def test_request_ids(http: httpx.Client) -> None:
    assert http.get("/version", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = {
        http.get("/version", headers={"x-request-id": bad}).headers["x-request-id"] for bad in ("", "a b", "x" * 200)
    }
    assert len(made) == 3
    assert all(len(one) == 32 for one in made)


def test_keys() -> None:
    with Held({"api_keys": ("first", "second")}) as server, httpx.Client(base_url=server.live.url) as http:
        for key in (
            {},
            {"authorization": "Bearer third"},
            {"authorization": "first"},
            {"authorization": "Basic first"},
        ):
            answer = http.get("/v1/models", headers=key)
            assert refused(answer, 401)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        for name in ("first", "second"):
            assert http.get("/v1/models", headers={"authorization": f"bearer {name}"}).status_code == 200
        assert refused(http.post("/v1/completions", content=b"{"), 401)
        assert [http.get(path).status_code for path in ("/health", "/ready", "/metrics", "/version", "/")] == [200] * 5


def test_digests_are_compared_one_and_all() -> None:
    assert any_equal(b"b", [b"a", b"b", b"c"])
    assert not any_equal(b"", [b"a"])
    assert not any_equal(b"", [])


def test_pages_of_other_hosts() -> None:
    origin = {"origin": "https://example.org"}
    with Held() as server, httpx.Client(base_url=server.live.url) as http:
        assert "access-control-allow-origin" not in http.get("/v1/models", headers=origin).headers
    asked = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    with Held({"allowed_origins": ["https://example.org"], "api_keys": ["k"]}) as server:
        answer = httpx.options(f"{server.live.url}/v1/completions", headers=asked)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin["origin"])
        answer = httpx.get(f"{server.live.url}/v1/models", headers=origin)
        assert refused(answer, 401)
        assert answer.headers["access-control-allow-origin"] == origin["origin"], "so that the page reads why"


def test_chats_of_a_model_that_reads_no_texts() -> None:
    with Held() as server, httpx.Client(base_url=server.live.url) as http:
        server.engine.tokenizer = None
        assert refused(chat(http, "abc"))["param"] == "messages"
        assert complete(http, [1, 2], max_tokens=4).status_code == 200

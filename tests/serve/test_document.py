"""The OpenAPI document beside what the server answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from dgraph.serve.neutral import ASKED
from tests.serve.asking import WORDS, chunks_of
from tests.serve.live import WAIT, Held

jsonschema = pytest.importorskip("jsonschema", reason="answers are held against their schemas: pip install jsonschema")
CHAT = {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 40}
TEXT = {"prompt": [WORDS, "b a"], "max_tokens": 8, "ignore_eos": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
SHOWN = {"return_step_map": True, "stream_mode": "draft"}
QUESTIONS = [
    {"type": "predicate", "instructions": "Is it a fruit?", "name": "fruit"},
    {"type": "choice", "instructions": "Which?", "choices": [{"value": "river"}, {"value": True}]},
    {"type": "score", "instructions": "How long?", "levels": [{"label": "short"}, {"label": "long"}]},
]
USUAL: list[tuple[str, str, int, Any]] = [
    ("GET", "/health", 200, None),
    ("GET", "/ready", 200, None),
    ("GET", "/version", 200, None),
    ("GET", "/metrics", 200, None),
    ("GET", "/v1/models", 200, None),
    ("GET", "/v1/models/tiny_llada", 200, None),
    ("GET", "/v1/models/gpt", 404, None),
    ("POST", "/v1/chat/completions", 200, CHAT),
    ("POST", "/v1/chat/completions", 200, {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 1, **SHOWN}),
    ("POST", "/v1/chat/completions", 200, {**CHAT, "stream": True}),
    ("POST", "/v1/chat/completions", 200, {**CHAT, "stream": True, "logprobs": True, **SHOWN}),
    ("POST", "/v1/chat/completions", 400, {**CHAT, "top_a": 0.5}),
    ("POST", "/v1/chat/completions", 404, {**CHAT, "model": "gpt"}),
    ("POST", "/v1/completions", 200, {**TEXT, "echo": True}),
    ("POST", "/v1/completions", 200, {**TEXT, "logprobs": 0}),
    (
        "POST",
        "/v1/completions",
        200,
        {**TEXT, "logprobs": 1, **USAGE},
    ),
    ("POST", "/v1/completions", 200, {**TEXT, "stream": True, **SHOWN}),
    ("POST", "/v1/completions", 400, {}),
    ("POST", "/v1/completions", 413, {"prompt": "a" * (9 << 20)}),
    ("POST", "/v1/decisions", 200, {"input": "an apple", "questions": QUESTIONS}),
    ("POST", "/v1/decisions", 400, {"input": "an apple", "questions": []}),
]


class Document:
    """An OpenAPI document that answers are held against."""

    def __init__(self, http: httpx.Client):
        self.whole = http.get("/openapi.json").json()

    def check(self, answer: httpx.Response) -> None:
        """Fails for an answer that the document does not have."""
        path = answer.request.url.path
        template = "/v1/models/{name}" if path.startswith("/v1/models/") else path
        responses = self.whole["paths"][template][answer.request.method.lower()]["responses"]
        assert str(answer.status_code) in responses, (path, answer.status_code)
        content = responses[str(answer.status_code)].get("content")
        if content is None:
            assert answer.content == b""
            return
        kind = answer.headers["content-type"].partition(";")[0]
        if kind == "text/event-stream":
            data = content[kind]["itemSchema"]["properties"]["data"]
            for chunk in chunks_of(answer.text):
                self._validate(chunk, data["contentSchema"])
        elif kind == "application/json":
            self._validate(answer.json(), content[kind]["schema"])
        else:
            assert content[kind]["schema"] == {"type": "string"}

    def _validate(self, value: Any, schema: dict[str, Any]) -> None:
        jsonschema.validate(value, {**schema, "components": self.whole["components"]})


@pytest.fixture(scope="module")
def document(http: httpx.Client) -> Document:
    return Document(http)


@pytest.mark.parametrize(("method", "path", "status", "body"), USUAL)
def test_answers_are_as_the_document_has_them(
    http: httpx.Client, document: Document, method: str, path: str, status: int, body: Any
) -> None:
    answer = http.request(method, path, json=body)
    assert answer.status_code == status, answer.text
    document.check(answer)


@pytest.fixture
def keyed() -> Iterator[Held]:
    with Held({"api_keys": ("key",), "body_timeout": 0.2, "allowed_hosts": ["127.0.0.1"]}) as server:
        yield server


def test_keys_hosts_and_times_are_in_the_document(keyed: Held) -> None:
    with httpx.Client(base_url=keyed.live.url, timeout=WAIT) as http:
        document = Document(http)
        assert document.whole["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
        for path, operations in document.whole["paths"].items():
            for operation in operations.values():
                assert ("security" in operation) == (path.startswith("/v1/") or path in ("/tokenize", "/detokenize"))
        for method, path, status, headers in (
            ("POST", "/v1/chat/completions", 401, {}),
            ("GET", "/v1/models", 401, {}),
            ("GET", "/version", 403, {"host": "example.org"}),
            ("POST", "/v1/decisions", 403, {"host": "example.org"}),
        ):
            answer = http.request(method, path, headers=headers, json={} if method == "POST" else None)
            assert answer.status_code == status
            document.check(answer)
        keyed.live.host.lifetime.draining = True
        for path in ("/ready", "/v1/models"):
            answer = http.get(path, headers={"authorization": "Bearer key"})
            assert answer.status_code == 503
            document.check(answer)


def test_requests_say_what_they_take(document: Document) -> None:
    schemas = document.whole["components"]["schemas"]
    chat = schemas["ChatRequest"]
    assert chat["additionalProperties"] is False
    assert chat["properties"].keys() >= ASKED.keys()
    assert chat["properties"]["top_a"]["enum"] == [None, 0]
    assert "enum" not in chat["properties"]["user"]
    for name in ("StreamOptions", "Message", "Part", "DecisionRequest"):
        assert schemas[name]["additionalProperties"] is False
    assert "422" not in str(document.whole["paths"])
    assert "HTTPValidationError" not in schemas
    assert "securitySchemes" not in document.whole["components"]

"""Texts that are too long for a model are refused unread, and reading others delays no stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from dgraph.serve.guard import SIGNS
from dgraph.serve.served_model import TOKEN_BYTES, size_of
from dgraph.serve.turns import LARGE, Turns
from tests.serve.asking import chat, complete, refused
from tests.serve.live import WAIT, Alphabet, Held

ROOM = 64


class Known(Alphabet):
    """A tokenizer that knows how long its tokens are."""

    longest_token_bytes = 4

    def __init__(self) -> None:
        super().__init__()
        self.read = 0  # letters

    def encode_text(self, text: str) -> list[int]:
        self.read += len(text)
        return super().encode_text(text)


@pytest.fixture(scope="module")
def held() -> Iterator[Held]:
    with Held(max_tokens=ROOM) as server:
        server.engine.tokenizer = Known()
        yield server
        assert server.live.settled()


@pytest.fixture(scope="module")
def http(held: Held) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=held.live.url, timeout=WAIT) as client:
        yield client


LONG = "a" * (4 * ROOM + 1)
HALVES = ["a" * 4 * (ROOM // 2), 1, "a" * 4 * (ROOM // 2) + "a"]


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("completions", "prompt", {"prompt": LONG}),
        ("completions", "prompt", {"prompt": ["abc", LONG]}),
        ("completions", "canvas", {"prompt": "abc", "canvas": [LONG, 4]}),
        ("completions", "canvas", {"prompt": "abc", "canvas": HALVES}),
        ("completions", "canvas", {"prompt": "abc", "canvas": [""] * 65 + [4]}),
        ("chat/completions", "messages", {"messages": [{"role": "user", "content": LONG}]}),
        ("chat/completions", "messages", {"messages": [{"role": "user", "content": "abcd"}] * 60}),
        ("chat/completions", "messages", {"messages": [{"role": "user", "content": ""}] * 65}),
        (
            "chat/completions",
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}] * 99}]},
        ),
        ("decisions", "input", {"input": LONG, "questions": [{"type": "predicate", "instructions": "?"}]}),
        (
            "decisions",
            "questions",
            {
                "input": "abc",
                "questions": [{"type": "choice", "instructions": "?", "choices": [{"value": "a"}, {"value": LONG}]}],
            },
        ),
    ],
)
def test_a_text_that_cannot_fit_is_refused_unread(
    http: httpx.Client, held: Held, path: str, field: str, body: dict[str, Any]
) -> None:
    tokenizer: Any = held.engine.tokenizer
    before = tokenizer.read
    error = refused(http.post(f"/v1/{path}", json=body))
    assert (error["param"], error["code"]) == (field, "context_length_exceeded"), error
    assert "64 positions" in error["message"]
    assert tokenizer.read - before < 4 * ROOM


def test_the_message_says_how_long_it_is_and_what_fits(http: httpx.Client) -> None:
    error = refused(complete(http, LONG))
    assert error["message"] == (
        "prompt has 257 bytes of text, and the 64 positions that this model has room for hold at most 256; shorten it."
    )


def test_without_a_known_bound_a_token_has_some_bytes(http: httpx.Client, held: Held) -> None:
    known, held.engine.tokenizer = held.engine.tokenizer, Alphabet()
    try:
        assert refused(complete(http, "a" * (ROOM * TOKEN_BYTES + 1)))["code"] == "context_length_exceeded"
        assert "tokens" in refused(complete(http, "a" * (ROOM * TOKEN_BYTES)))["message"], "it is read"
    finally:
        held.engine.tokenizer = known


def test_the_positions_of_a_canvas_are_counted_as_it_is_read(http: httpx.Client) -> None:
    for canvas in (["a" * 60, 4, "a"], [4, "a" * 61], [65]):
        assert refused(complete(http, "abc", canvas=canvas))["message"] == "a canvas has at most 64 positions here."


def test_one_input_is_not_read_for_hundreds_of_questions() -> None:
    with Held({"max_body_bytes": 20_000}, max_tokens=64) as server, httpx.Client(base_url=server.live.url) as http:
        question = {"type": "predicate", "instructions": "?"}
        answer = http.post("/v1/decisions", json={"input": "a" * 1000, "questions": [question] * 30})
        assert refused(answer)["param"] == "questions"
        assert "ask fewer questions at a time" in answer.text


@pytest.mark.parametrize("sign", SIGNS)
def test_a_body_of_very_many_values_is_refused_unparsed(http: httpx.Client, sign: str) -> None:
    body = json.dumps({"prompt": sign * (SIGNS[sign] + 1)}).encode()
    answer = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    error = refused(answer, 413)
    assert (error["code"], str(SIGNS[sign]) in error["message"]) == ("too_large", True)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [-1] * 100_000},
        {"prompt": "abc", "stop": [""] * 100_000},
        {"prompt": "abc", "canvas": [0] * 100_000},
        {"prompt": [[-1]] * 30_000},
    ],
    ids=["ids", "stops", "segments", "lists"],
)
def test_of_many_faults_the_first_is_told(http: httpx.Client, body: dict[str, Any]) -> None:
    """All of them took half a minute, in which nothing else was served."""
    assert len(refused(http.post("/v1/completions", json=body))["message"]) < 200


def test_sizes_of_nested_texts() -> None:
    assert size_of({"a": ["\u00e9", {"b": "abc"}, 7, None, True], "c": "\ud800"}) == 2 + 3 + 3


def test_large_requests_are_read_one_by_one_and_hold_no_small_one_up() -> None:
    async def read() -> None:
        turns = Turns()
        async with turns.of(LARGE):
            second = asyncio.ensure_future(turns.of(LARGE).__aenter__())
            async with turns.of(LARGE - 1):
                assert not second.done()
        await second

    asyncio.run(read())


def test_long_chats_are_read_beside_the_event_loop(http: httpx.Client, held: Held) -> None:
    tokenizer: Any = held.engine.tokenizer
    assert chat(http, "abc" * 8, max_tokens=4).status_code == 200
    assert held.live.thread not in tokenizer.threads

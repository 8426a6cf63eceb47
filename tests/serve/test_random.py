"""Random requests, random clients: no answer with 500, no hang, and at the end every page is back.

`DGRAPH_RANDOM_REQUESTS` and `DGRAPH_RANDOM_CLIENTS` ask for more than the few that a run of all tests has time for.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dgraph
from dgraph.serve.neutral import ASKED
from tests.serve.asking import WORDS, chunks_of
from tests.serve.live import WAIT, Held, Live
from tests.serve.schemas import JSON, Schemas

REQUESTS = int(os.environ.get("DGRAPH_RANDOM_REQUESTS", "150"))
CLIENTS = int(os.environ.get("DGRAPH_RANDOM_CLIENTS", "40"))
PATHS = ("/v1/completions", "/v1/chat/completions")
SEEN: Counter[int] = Counter()
DECISIONS: dict[str, st.SearchStrategy[Any]] = {}


@pytest.fixture(scope="module")
def held() -> Iterator[Held]:
    with Held({"max_body_bytes": 100_000}, max_tokens=64, max_sequences=4, queue=64) as server:
        yield server
        assert server.live.settled()
        assert server.engine.stats.finished.keys() <= {"stop", "length", "cancelled"}


@pytest.fixture(scope="module")
def schemas(held: Held) -> Schemas:
    return Schemas(httpx.get(f"{held.live.url}/openapi.json").json())


@pytest.fixture(scope="module")
def http(held: Held) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=held.live.url, timeout=WAIT) as client:
        yield client


@settings(max_examples=REQUESTS, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_requests_as_the_schema_has_them_and_nearly(http: httpx.Client, schemas: Schemas, data: Any) -> None:
    path = data.draw(st.sampled_from(PATHS))
    body = data.draw(schemas.body(path))
    if isinstance(body, dict):
        if data.draw(st.integers(0, 9)) == 0:
            body[data.draw(st.sampled_from(sorted(ASKED)))] = data.draw(JSON)
        for name, known in (("model", "fake"), ("policy", "sequential")):
            if name in body and data.draw(st.integers(0, 4)):
                body[name] = known
    content = json.dumps(body).encode()
    if data.draw(st.integers(0, 30)) == 0:
        content = content[: data.draw(st.integers(0, len(content)))]
    answer = http.post(path, content=content, headers={"content-type": "application/json"})
    SEEN[answer.status_code] += 1
    assert answer.status_code in (200, 400, 404), (answer.status_code, content, answer.text)
    if answer.headers["content-type"].startswith("text/event-stream"):
        assert chunks_of(answer.text)
    else:
        found = answer.json()
        assert ("error" in found) == (answer.status_code != 200)


def test_many_of_them_were_served() -> None:
    assert SEEN[200] > sum(SEEN.values()) // 20, SEEN
    print(SEEN)


@settings(max_examples=max(10, REQUESTS // 5), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_decisions_as_the_schema_has_them_and_nearly(live: Live, data: Any) -> None:
    url, path = f"{live.url}/v1/decisions", "/v1/decisions"
    if path not in DECISIONS:
        DECISIONS[path] = Schemas(httpx.get(f"{live.url}/openapi.json").json()).body(path)
    body = data.draw(DECISIONS[path])
    if isinstance(body, dict):
        body.pop("model", None)
    answer = httpx.post(url, content=json.dumps(body).encode(), headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400), (answer.status_code, body, answer.text)
    assert ("error" in answer.json()) == (answer.status_code == 400)


def test_clients_that_hang_up_at_random_moments(held: Held) -> None:
    draw = random.Random(0)

    async def leave(client: httpx.AsyncClient, patience: float, **asks: Any) -> None:
        body = {"prompt": "abc", "max_tokens": 40, "ignore_eos": True, **asks}
        try:
            async with asyncio.timeout(patience):
                await client.post("/v1/completions", json=body)
        except TimeoutError:
            pass

    async def run() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=held.live.url, timeout=WAIT, limits=limits) as client:
            asks = [{"stream": draw.random() < 0.7, "n": draw.choice([1, 1, 2])} for _ in range(CLIENTS)]
            await asyncio.gather(*(leave(client, draw.uniform(0, 0.02 * CLIENTS), **one) for one in asks))

    asyncio.run(run())
    assert held.live.settled()
    assert held.engine.stats.finished.get("cancelled", 0) > 0


@pytest.mark.release
def test_a_hundred_streams_at_once_say_what_generate_says() -> None:
    sdar = dgraph.optimize("tiny_sdar", "focus", backend="eager")  # that of the module's server is in use
    draw = random.Random(1)
    words = ["river", "stone", "apple", "dog", "cat", "zoo", "ant", "bee", "sun", "moon"]
    prompts = [WORDS] + ["Sort these words: " + " ".join(draw.sample(words, draw.randint(1, 5))) for _ in range(9)]
    expected = sdar.generate(prompts, max_new_tokens=48).texts
    assert expected is not None
    told: dict[int, str] = {}

    async def ask(client: httpx.AsyncClient, place: int) -> None:
        messages = [{"role": "user", "content": prompts[place % len(prompts)]}]
        body = {"messages": messages, "max_tokens": 48, "stream": True}
        answer = await client.post("/v1/chat/completions", json=body)
        pieces = (chunk["choices"][0]["delta"].get("content", "") for chunk in chunks_of(answer.text))
        told[place] = "".join(pieces)

    async def run(url: str) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            await asyncio.gather(*(ask(client, place) for place in range(100)))

    with Live({"tiny_sdar": sdar.engine(max_sequences=16, max_tokens=256)}) as live:
        asyncio.run(run(live.url))
        assert live.settled()
    assert [told[place] for place in range(100)] == [expected[place % len(prompts)] for place in range(100)]

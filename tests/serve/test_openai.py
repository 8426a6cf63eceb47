"""The `openai` package as a client: what it reads, and what it raises."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.serve.asking import SORTED, WORDS
from tests.serve.live import WAIT, Live

openai = pytest.importorskip("openai", reason="the contract with the openai package needs it: pip install openai")
CHAT = {"model": "tiny_sdar", "messages": [{"role": "user", "content": WORDS}], "max_tokens": 64}


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", timeout=WAIT, max_retries=0) as found:
        yield found


def test_chats(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(**CHAT, logprobs=True, seed=1, n=2, stop=["never"])
    assert [choice.message.content for choice in found.choices] == [SORTED] * 2
    assert [choice.finish_reason for choice in found.choices] == ["stop"] * 2
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    assert found.usage.prompt_tokens_details.cached_tokens == 0
    assert "".join(one.token for one in found.choices[0].logprobs.content) == SORTED


def test_chats_as_streams(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == SORTED
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage.completion_tokens > 0
    with client.chat.completions.stream(**CHAT) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == SORTED


def test_fields_of_ours_go_in_the_extra_body(client: openai.OpenAI) -> None:
    body = {"threshold": 0.6, "return_step_map": True, "stream_mode": "draft"}
    found = list(client.chat.completions.create(**CHAT, stream=True, extra_body=body))
    steps = [step for chunk in found for step in chunk.choices[0].model_extra.get("step_map", [])]
    assert steps == sorted(steps)
    assert any("draft" in chunk.choices[0].model_extra for chunk in found)


def test_completions(client: openai.OpenAI) -> None:
    found = client.completions.create(model="tiny_sdar", prompt=[WORDS, "b a"], max_tokens=8, echo=True)
    assert [choice.text.startswith(text) for choice, text in zip(found.choices, (WORDS, "b a"), strict=True)] == [
        True
    ] * 2
    found = client.completions.create(model="tiny_llada", prompt=[5, 6, 7], max_tokens=8, logprobs=1, stream=True)
    chunks = list(found)
    assert sum(len(chunk.choices[0].logprobs.tokens) for chunk in chunks if chunk.choices[0].logprobs) <= 8
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_models_and_errors(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny_sdar", "tiny_llada"]
    assert client.models.retrieve("tiny_llada").id == "tiny_llada"
    with pytest.raises(openai.NotFoundError) as gone:
        client.chat.completions.create(**{**CHAT, "model": "gpt"})
    assert (gone.value.code, gone.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="frequency_penalty") as bad:
        client.chat.completions.create(**CHAT, frequency_penalty=3.0)
    assert bad.value.param == "frequency_penalty"


def test_many_clients_at_once(live: Live) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", timeout=WAIT) as client:

            async def one(stream: bool) -> str:
                found = await client.chat.completions.create(**CHAT, stream=stream)
                if not stream:
                    return str(found.choices[0].message.content)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in found])

            assert await asyncio.gather(*(one(place % 2 == 0) for place in range(12))) == [SORTED] * 12

    asyncio.run(run())


def test_fields_of_other_servers_and_system_messages(client: openai.OpenAI) -> None:
    for field, value in (("logit_bias_", {}), ("guided_regex", "(a"), ("top_a", 0.5)):
        with pytest.raises(openai.BadRequestError, match=field) as bad:
            client.chat.completions.create(**CHAT, extra_body={field: value})
        assert bad.value.param == field
    system = {"role": "system", "content": "You are a helpful assistant."}
    found = client.chat.completions.create(**{**CHAT, "messages": [system, *CHAT["messages"]]})
    assert found.choices[0].message.content == SORTED
    turns = [*CHAT["messages"], found.choices[0].message, *CHAT["messages"]]
    assert client.chat.completions.create(**{**CHAT, "messages": turns}).choices[0].message.role == "assistant"

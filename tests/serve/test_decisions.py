"""/v1/decisions: every kind of question, what the engine says of it, and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.serve.asking import refused
from tests.serve.live import WAIT, Held, Live

PREDICATE = {"type": "predicate", "name": "fruit", "instructions": "An apple is a fruit."}
CHOICE = {
    "type": "choice",
    "name": "first",
    "instructions": [{"type": "input_text", "text": "Which word comes first?"}],
    "choices": [{"value": "river"}, {"value": "cloud", "description": "in the sky"}, {"value": True}],
}
SCORE = {"type": "score", "instructions": "How long is it?", "levels": [{"label": "short"}, {"label": "long"}]}


def ask(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/decisions", json={"input": "river cloud", "questions": [PREDICATE, CHOICE, SCORE], **fields})


@pytest.mark.parametrize("model", ["tiny_sdar", "tiny_llada"])
def test_every_kind_of_question(http: httpx.Client, model: str) -> None:
    found = ask(http, model=model).json()
    assert found["model"] == model
    predicate, choice, score = found["answers"]
    assert (predicate["type"], predicate["name"], set(predicate)) == (
        "predicate",
        "fruit",
        {"type", "name", "probability"},
    )
    assert 0 < predicate["probability"] < 1
    each = [one["probability"] for one in choice["probabilities"]]
    assert sum(each) == pytest.approx(1)
    assert [one["value"] for one in choice["probabilities"]] == ["river", "cloud", True]
    assert (choice["choice"], choice["confidence"]) == (["river", "cloud", True][each.index(max(each))], max(each))
    levels = score["probabilities"]
    assert [(one["value"], one["label"]) for one in levels] == [(0, "short"), (1, "long")]
    assert (score["score"], score["name"]) == (pytest.approx(levels[1]["probability"]), None)
    usage = found["usage"]
    assert (usage["output_tokens"], usage["total_tokens"]) == (0, usage["input_tokens"])


def test_an_answer_is_what_the_engine_decides(http: httpx.Client, live: Live) -> None:
    engine: Any = live.engines["tiny_llada"]
    text = "river cloud\n\nAn apple is a fruit.\nIs this true? Answer yes or no."
    labels = [engine.tokenizer.encode_text(label) for label in ("yes", "no")]
    expected = engine.decide(text, labels, after=engine.spec.eos_ids[:1]).result()
    (answer,) = ask(http, model="tiny_llada", questions=[PREDICATE]).json()["answers"]
    assert answer["probability"] == pytest.approx(expected[0])
    turns = [("user", "river cloud"), ("assistant", "I see"), ("user", [{"type": "input_text", "text": "so"}])]
    given = [{"role": role, "content": content} for role, content in turns]
    assert ask(http, model="tiny_llada", input=given, questions=[PREDICATE]).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]}, "input"),
        ({"input": "a" * 4000}, "questions"),
        ({"questions": []}, "questions"),
        ({"questions": [PREDICATE] * 201}, "questions"),
        ({"questions": [{"type": "essay", "instructions": "a"}]}, "questions"),
        ({"questions": [{**CHOICE, "choices": [{"value": "one"}]}]}, "questions"),
        ({"questions": [{**CHOICE, "choices": [{"value": "one"}, {"value": "one"}]}]}, "questions"),
        ({"questions": [{**CHOICE, "choices": [{"value": "true"}, {"value": True}]}]}, "questions"),
        ({"questions": [{**SCORE, "levels": [{"label": ""}, {"label": "a"}]}]}, "questions"),
        ({"model": "gpt"}, "model"),
    ],
)
def test_what_cannot_be_asked(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    assert refused(ask(http, **fields), 404 if param == "model" else 400)["param"] == param


@pytest.mark.parametrize(
    ("kind", "got"), [("secret" * 100, "a text of length 600"), (["secret"], "a list of length 1")]
)
def test_what_was_sent_is_not_sent_back(http: httpx.Client, kind: Any, got: str) -> None:
    error = refused(ask(http, questions=[{"type": kind, "instructions": "a"}]))
    expected = "questions.0: type: expected one of 'predicate', 'choice', 'score'"
    assert (error["message"], error["param"]) == (f"{expected}, got {got}.", "questions")


def test_a_prompt_that_is_longer_than_the_server_allows() -> None:
    with Held(server={"max_prompt_tokens": 5}) as held, httpx.Client(base_url=held.live.url, timeout=WAIT) as http:
        error = refused(ask(http, questions=[PREDICATE]))
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")


def test_the_openai_package_reads_the_answers(live: Live) -> None:
    openai = pytest.importorskip("openai", reason="the contract with the openai package needs it: pip install openai")
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        if not hasattr(client, "decisions"):
            pytest.skip("this version of the openai package has no decisions")
        found = client.decisions.create(model="tiny_sdar", input="river cloud", questions=[PREDICATE, CHOICE, SCORE])
    assert [answer.type for answer in found.answers] == ["predicate", "choice", "score"]
    assert 0 < found.answers[0].probability < 1
    assert found.answers[1].choice in ("river", "cloud", True)


def test_decisions_beside_streams_disturb_neither(live: Live) -> None:
    async def run() -> None:
        async with httpx.AsyncClient(base_url=live.url, timeout=30) as client:
            chat = {"messages": [{"role": "user", "content": "Sort these words: b a"}], "max_tokens": 32}
            questions = {"input": "river cloud", "questions": [PREDICATE]}
            alone = [(await client.post("/v1/chat/completions", json=chat)).json()["choices"]]
            alone += [(await client.post("/v1/decisions", json=questions)).json()["answers"]]
            asked = [("/v1/chat/completions", chat, "choices"), ("/v1/decisions", questions, "answers")] * 4
            together = await asyncio.gather(*(client.post(path, json=body) for path, body, _ in asked))
            assert [answer.json()[asked[at][2]] for at, answer in enumerate(together)] == alone * 4

    asyncio.run(run())


def test_a_client_that_leaves_before_its_answers(live: Live) -> None:
    body = {"input": "river cloud", "questions": [PREDICATE] * 100}
    with httpx.Client(base_url=live.url, timeout=0.05) as client, pytest.raises(httpx.TimeoutException):
        client.post("/v1/decisions", json=body)
    assert live.settled()
    with httpx.Client(base_url=live.url, timeout=WAIT) as client:
        assert ask(client, questions=[PREDICATE]).status_code == 200, "nobody waits for what nobody reads"

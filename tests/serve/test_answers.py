"""What both endpoints answer, as a whole and as a stream."""

from __future__ import annotations

import math
import re
from typing import Any

import httpx
import pytest

import dgraph
from dgraph.serve.protocol import CompletionRequest
from dgraph.serve.served_model import ServedModel
from dgraph.serve.settings import ServerConfig
from dgraph.serve.translate import parsed_completion
from tests.serve.asking import SORTED, WORDS, chat, chunks_of, complete, refused
from tests.serve.live import Live


def test_a_chat_is_what_generate_says(http: httpx.Client) -> None:
    found = chat(http, max_tokens=64).json()
    assert found["object"] == "chat.completion"
    assert found["id"].startswith("chatcmpl-")
    assert found["model"] == "tiny_sdar"
    (choice,) = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": SORTED, "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    usage = found["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert usage["steps"] > 0


def test_a_chat_of_several_turns(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "Sort these words: "}, {"type": "text", "text": "b a"}]
    turns = [("user", "hello"), ("assistant", None), ("user", parts)]
    messages = [{"role": role, "content": content} for role, content in turns]
    answer = http.post("/v1/chat/completions", json={"messages": messages, "max_completion_tokens": 5, "max_tokens": 9})
    assert answer.json()["usage"]["completion_tokens"] <= 5, "max_completion_tokens is what counts"
    system = [{"role": "system", "content": "be short"}, *messages]
    more = http.post("/v1/chat/completions", json={"messages": system, "max_tokens": 5}).json()["usage"]
    assert more["prompt_tokens"] > answer.json()["usage"]["prompt_tokens"], "a system message reaches the model"
    other = [{"role": "robot", "content": "be short"}, *messages]
    error = refused(http.post("/v1/chat/completions", json={"messages": other}))
    assert (error["param"], "roles are system, user and assistant" in error["message"]) == ("messages", True)


def test_a_stream_is_the_same_in_pieces(http: httpx.Client) -> None:
    options = {"include_usage": True}
    chunks = chunks_of(chat(http, max_tokens=64, stream=True, stream_options=options, return_step_map=True).text)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    *parts, last = chunks
    assert last["choices"] == []
    whole = chat(http, max_tokens=64, return_step_map=True).json()
    assert last["usage"] == {**whole["usage"], "prompt_tokens_details": last["usage"]["prompt_tokens_details"]}
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    choices = [chunk["choices"][0] for chunk in parts]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == SORTED
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in parts)
    (choice,) = whole["choices"]
    for name in ("step_map", "token_ids", "tokens", "confidence"):
        assert [value for part in choices for value in part.get(name, [])] == choice[name]
    assert "".join(choice["tokens"]) == SORTED
    assert choice["step_map"] == sorted(choice["step_map"])
    assert max(choice["step_map"]) == whole["usage"]["steps"]
    assert len(choices) > 2, "text comes with the steps that committed it"


def test_plain_clients_see_nothing_of_ours(http: httpx.Client) -> None:
    for chunk in chunks_of(chat(http, max_tokens=64, stream=True).text):
        assert set(chunk) == {"id", "object", "created", "model", "choices"}
        assert set(chunk["choices"][0]) == {"index", "delta", "logprobs", "finish_reason"}
    assert set(chat(http).json()["choices"][0]) == {"index", "message", "logprobs", "finish_reason"}


def test_usage_in_every_chunk(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(complete(http, max_tokens=40, ignore_eos=True, stream=True, stream_options=options).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[-1], chunks[-1]["choices"]) == (40, [])


def test_a_completion_continues_texts_and_ids_without_a_frame(http: httpx.Client, live: Live) -> None:
    engine: Any = live.engines["tiny_sdar"]
    ids = engine.tokenizer.encode_text(WORDS)
    expected = [response.text for response in engine.generate([ids], max_new_tokens=24, ignore_eos=True)]
    for prompt in (WORDS, ids):
        found = complete(http, prompt, max_tokens=24, ignore_eos=True).json()
        assert found["object"] == "text_completion"
        assert found["choices"] == [{"index": 0, "text": expected[0], "logprobs": None, "finish_reason": "length"}]
    assert complete(http).json()["usage"]["completion_tokens"] <= 16, "as OpenAI has it"
    echoed = complete(http, ids, max_tokens=24, ignore_eos=True, echo=True).json()
    assert echoed["choices"][0]["text"] == WORDS + expected[0]


def test_several_prompts_and_choices(http: httpx.Client) -> None:
    prompts = ["Sort these words: b a", "Sort these words: zoo ant"]
    settings = {"max_tokens": 12, "temperature": 4.0, "seed": 7, "n": 2, "ignore_eos": True}
    found = complete(http, prompts, echo=True, **settings).json()
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in found["choices"]]
    assert [text.startswith(prompts[place // 2]) for place, text in enumerate(texts)] == [True] * 4
    assert texts[0] != texts[1], "draws differ among choices"
    assert complete(http, prompts, echo=True, **settings).json()["choices"] == found["choices"]
    streamed = [""] * 4
    for chunk in chunks_of(complete(http, prompts, echo=True, stream=True, **settings).text):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == texts
    assert found["usage"]["prompt_tokens"] < 40, "a prompt counts once"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_texts_end_a_response_before_them(http: httpx.Client, stream: bool) -> None:
    answer = chat(http, max_tokens=64, stop=["####", "never"], stream=stream)
    if not stream:
        (choice,) = answer.json()["choices"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    else:
        choices = [chunk["choices"][0] for chunk in chunks_of(answer.text)]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        reason = choices[-1]["finish_reason"]
    assert (text, reason) == (SORTED.partition("####")[0], "stop")


def test_logprobs_are_those_of_commits(http: httpx.Client) -> None:
    found = chat(http, max_tokens=64, logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]
    assert "".join(one["token"] for one in found["content"]) == SORTED
    assert bytes(found["content"][0]["bytes"]).decode() == found["content"][0]["token"]
    whole = complete(http, max_tokens=24, ignore_eos=True, logprobs=1, return_step_map=True).json()["choices"][0]
    logs = whole["logprobs"]
    assert logs["tokens"] == whole["tokens"]
    assert logs["text_offset"][1] == len(whole["tokens"][0])
    assert [math.exp(log) for log in logs["token_logprobs"]] == pytest.approx(whole["confidence"])
    assert all(0 <= sure <= 1 for sure in whole["confidence"])
    assert logs["top_logprobs"][0] == {logs["tokens"][0]: logs["token_logprobs"][0]}
    offsets = []
    for chunk in chunks_of(complete(http, max_tokens=24, ignore_eos=True, logprobs=1, stream=True).text):
        offsets += chunk["choices"][0]["logprobs"]["text_offset"]
    assert offsets == logs["text_offset"]


SPLIT = "日本🎉é"
"""A text whose characters lie over several tokens each."""


def test_logprobs_of_parts_of_characters(http: httpx.Client) -> None:
    found = chat(http, canvas=[SPLIT, 3], logprobs=True).json()["choices"][0]
    marks = found["logprobs"]["content"]
    assert len(marks) > len(SPLIT) + 3, "each of them is a token here"
    assert b"".join(bytes(one["bytes"]) for one in marks).decode() == found["message"]["content"]
    whole = complete(http, canvas=[SPLIT, 3], ignore_eos=True, logprobs=1, return_step_map=True).json()["choices"][0]
    offsets = whole["logprobs"]["text_offset"]
    sizes = [len(character.encode()) for character in SPLIT]
    begin = [place for place, size in enumerate(sizes) for _ in range(size)]
    assert offsets[: len(begin) + 1] == [*begin, len(SPLIT)], "a part of a character begins where it does"
    assert offsets[-1] == len(whole["text"]) - len(whole["tokens"][-1])
    streamed = []
    for chunk in chunks_of(complete(http, canvas=[SPLIT, 3], ignore_eos=True, logprobs=1, stream=True).text):
        streamed += chunk["choices"][0]["logprobs"]["text_offset"]
    assert streamed == offsets


def test_a_tokenizer_that_knows_no_bytes(live: Live) -> None:
    model = live.host.lifetime.model("tiny_sdar")
    word, *_ = model.encode_text("Sorted")
    part, *_ = model.encode_text("日")
    assert (model.bytes_of(word), model.bytes_of(part)) == (b"Sorted", b"\xe6")
    tokenizer: Any = model.engine.tokenizer

    class Plain:
        decode = tokenizer.decode

    engine: Any = type("Engine", (), {"tokenizer": Plain(), "stats": model.engine.stats})()
    plain = ServedModel("plain", engine)
    assert (plain.bytes_of(word), plain.bytes_of(part)) == (b"Sorted", None)


def test_a_tokenizer_is_made_ready_before_there_are_clients(live: Live) -> None:
    class Slow:
        ready = 0

        def prepare(self) -> None:
            self.ready += 1

    stats = live.host.lifetime.model("tiny_sdar").engine.stats
    engine: Any = type("Engine", (), {"tokenizer": Slow(), "stats": stats})()
    ServedModel("slow", engine)
    assert engine.tokenizer.ready == 1


def test_a_bidirectional_model_and_settings_of_its_own(http: httpx.Client, live: Live) -> None:
    engine = live.engines["tiny_llada"]
    for settings in ({"threshold": 0.6}, {"steps": 8}, {"policy": "llada2.0"}, {"top_p": 0.9, "top_k": 50}):
        (expected,) = engine.generate(WORDS, max_new_tokens=32, **settings)
        found = chat(http, model="tiny_llada", max_tokens=32, block_length=engine.block_length, **settings).json()
        assert found["choices"][0]["message"]["content"] == expected.text


def test_a_response_with_fixed_positions(http: httpx.Client, live: Live) -> None:
    engine: Any = live.engines["tiny_llada"]
    fixed = engine.tokenizer.encode_text("Sorted:")
    canvas = [*fixed, *[None] * 12, *engine.tokenizer.encode_text(" ####")]
    (expected,) = engine.generate(WORDS, canvas=canvas, max_new_tokens=len(canvas))
    asked = {"model": "tiny_llada", "canvas": ["Sorted:", 12, " ####"], "return_step_map": True}
    (choice,) = chat(http, **asked).json()["choices"]
    assert choice["message"]["content"] == expected.text
    assert choice["token_ids"][: len(fixed)] == fixed
    assert choice["step_map"] == expected.step_map
    assert "max_tokens is 5" in refused(chat(http, max_tokens=5, **asked))["message"]


def test_a_response_of_at_least_so_many_tokens(http: httpx.Client) -> None:
    short, long = (complete(http, max_tokens=24, min_tokens=least).json()["usage"] for least in (0, 20))
    assert short["completion_tokens"] < 20 <= long["completion_tokens"]


def test_what_a_server_decodes_by_unless_a_request_says_otherwise(live: Live) -> None:
    usual = ServerConfig(decoding=dgraph.Decoding(steps=4, top_k=5, temperature=0.0))
    model = live.host.lifetime.models["tiny_sdar"]

    def decoding(**fields: Any) -> dgraph.Decoding:
        return parsed_completion(CompletionRequest(prompt="a", **fields), model, usual).decodings[0]

    assert (decoding().steps, decoding().top_k, decoding().threshold) == (4, 5, None)
    assert (decoding(threshold=0.5).steps, decoding(threshold=0.5).top_k) == (None, 5)
    assert (decoding(policy="sequential").steps, decoding(top_k=0).top_k, decoding().temperature) == (None, 0, 0)


def test_special_tokens_in_a_prompt_are_text(http: httpx.Client) -> None:
    assert chat(http, "<|mask|> and <|eos|>", max_tokens=4).status_code == 200
    assert complete(http, "<|mask|>", max_tokens=4, echo=True).json()["choices"][0]["text"].startswith("<|mask|>")
    error = refused(complete(http, [5, 2], max_tokens=4))
    assert "the mask token" in error["message"]


def test_what_is_served(http: httpx.Client) -> None:
    found = http.get("/v1/models").json()
    assert found["object"] == "list"
    first = found["data"][0]
    assert (first["id"], first["object"], first["owned_by"]) == ("tiny_sdar", "model", "dgraph")
    assert (first["recipe"], first["model"], first["block_length"]) == ("focus", "tiny_sdar", 32)
    assert (first["max_model_len"], first["attention"]) == (512, "block_causal")
    assert http.get("/v1/models/tiny_llada").json() == found["data"][1]
    assert refused(http.get("/v1/models/gpt"), 404)["code"] == "model_not_found"
    assert http.get("/version").json() == {"version": dgraph.__version__}
    assert [http.get(path).status_code for path in ("/health", "/ready", "/ping")] == [200] * 3
    assert [http.head(path).status_code for path in ("/health", "/ready")] == [200] * 2, "as some balancers ask"


def test_the_page_and_its_parts(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    parts = re.findall(r'(?:src|href)="([\w.]+)"', page.text)
    assert {"app.js", "viewer.css"} <= set(parts)
    for path in ("", *parts):
        answer = http.get(f"/{path}")
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"].startswith("default-src 'self'; ")
    assert http.get("/app.js").headers["content-type"].startswith("text/javascript")


def test_a_stream_shows_drafts_to_who_asks_and_text_as_ever(http: httpx.Client) -> None:
    asked = {"stream_mode": "draft", "return_step_map": True, "stream": True, "max_tokens": 40}
    choices = [chunk["choices"][0] for chunk in chunks_of(chat(http, **asked).text) if chunk["choices"]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == SORTED
    drafts = [choice["draft"] for choice in choices if "draft" in choice]
    assert [draft["step"] for draft in drafts] == list(range(1, len(drafts) + 1))
    final = {}
    for draft in drafts:
        assert {len(draft[name]) for name in ("token_ids", "tokens", "confidence", "kept")} == {len(draft["kept"])}
        for place, token in enumerate(draft["token_ids"]):
            assert (draft["tokens"][place] is None) == (token < 0)
            final[draft["offset"] + place] = token
    ids = [token for choice in choices for token in choice.get("token_ids", ())]
    assert [final[place] for place in range(len(ids))] == ids
    assert any(not all(draft["kept"]) for draft in drafts), "FOCUS evicts rows"

"""Ids of texts and texts of ids, and the decoding rules by name."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from dgraph.runtime.policies import POLICIES, PRESETS, policy_of
from tests.serve.asking import WORDS, chat, refused
from tests.serve.live import Live


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_ids_of_a_text_and_back(http: httpx.Client, live: Live) -> None:
    tokenizer = live.host.lifetime.model(None).engine.tokenizer
    found = post(http, "/tokenize", prompt=WORDS, return_token_strs=True)
    assert found["tokens"] == tokenizer.encode_text(WORDS)  # type: ignore[union-attr]
    assert (found["count"], "".join(found["token_strs"])) == (len(found["tokens"]), WORDS)
    assert found["max_model_len"] == http.get("/v1/models").json()["data"][0]["max_model_len"]
    assert post(http, "/detokenize", tokens=found["tokens"]) == {"prompt": WORDS}
    assert post(http, "/tokenize", prompt=WORDS)["token_strs"] is None


def test_ids_of_a_conversation_are_those_of_a_chat(http: httpx.Client) -> None:
    found = post(http, "/tokenize", messages=[{"role": "user", "content": WORDS}])
    assert found["count"] == chat(http, max_tokens=1).json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        ("/tokenize", {"prompt": "a", "texts": []}, "texts"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 10_000}, "tokens"),
    ],
)
def test_what_cannot_be_served_is_named(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    assert refused(http.post(path, json=body))["param"] == param


def test_rules_are_those_that_a_request_may_name(http: httpx.Client) -> None:
    found = {each["id"]: each for each in http.get("/v1/policies").json()["data"]}
    assert found.keys() == {*POLICIES, *PRESETS}
    assert policy_of(found["llada2.1"]["preset_of"], **found["llada2.1"]["options"]) == policy_of("llada2.1")


def test_settings_of_sampling_are_served_by_request(http: httpx.Client) -> None:
    def said(**fields: Any) -> Any:
        return chat(http, max_tokens=16, return_step_map=True, **fields).json()["choices"][0]

    ids = said()["token_ids"]
    assert ids[2] not in said(logit_bias={str(ids[2]): -100})["token_ids"]
    assert set(said(allowed_token_ids=ids[:4])["token_ids"]) <= set(ids[:4])
    cut = said(stop_token_ids=[ids[3]])
    assert (cut["token_ids"], cut["finish_reason"]) == (ids[:3], "stop")
    assert said(stop_token_ids=[ids[3]], include_stop_str_in_output=True)["token_ids"] == ids[:4]
    assert said(repetition_penalty=5.0)["token_ids"] != ids
    assert said(min_p=0.5, presence_penalty=0, frequency_penalty=0.0, bad_words=[])["token_ids"] == ids

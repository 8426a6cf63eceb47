"""Conversations as prompts, and a tokenizer beside a model object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import dgraph
from dgraph.errors import InputError
from dgraph.ir.graph import Graph
from tests.tiny import MASK


class Letters:
    """A letter is an id; a conversation is its contents, each after the first letter of its role."""

    def encode(self, prompt: str) -> list[int]:
        return [ord(letter) % MASK for letter in prompt]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode("".join(message["role"][0] + message["content"] for message in messages))

    def decode(self, ids: Sequence[int]) -> str:
        return "x" * len(ids)


def turn(content: Any, role: Any = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.fixture(scope="module")
def chat(model: dgraph.Model, captured: Graph) -> dgraph.CompiledModel:
    """A model object that got a tokenizer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dgraph.compiler.base_graph.capture_or_load", lambda *_: (captured.copy(), True))
        return dgraph.optimize(model, "dense", tokenizer=Letters(), backend="eager")


def test_a_conversation_is_one_prompt(chat: dgraph.CompiledModel) -> None:
    messages = [turn("be brief", "system"), turn("why")]
    result = chat.generate(messages, max_new_tokens=4)
    assert result.token_ids == chat.generate("sbe briefuwhy", max_new_tokens=4).token_ids
    assert result.texts == ["x" * len(result.token_ids[0])]
    assert chat.generate(tuple(messages), max_new_tokens=4).token_ids == result.token_ids


def test_several_conversations_are_a_batch(chat: dgraph.CompiledModel) -> None:
    result = chat.generate([[turn("one")], [turn("two"), turn("three", "assistant"), turn("four")]], max_new_tokens=4)
    alone = [chat.generate(text, max_new_tokens=4).token_ids[0] for text in ("uone", "utwoathreeufour")]
    assert result.token_ids == alone


def test_a_canvas_goes_with_a_conversation_as_with_a_text(chat: dgraph.CompiledModel) -> None:
    assert chat.generate([turn("why")], canvas=[7, 8], max_new_tokens=4).token_ids[0][:2] == [7, 8]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["a", [turn("b")]], "texts or conversations, not both: prompt 0 is a text, prompt 1 a conversation"),
        ([[turn("b")], "a"], "not both: prompt 0 is a conversation, prompt 1 a text"),
        ([turn("a"), "b"], r"prompt 0, message 1 is 'b', expected a dict as \{\"role\""),
        ([{"role": "user"}], r"prompt 0, message 0 has no 'content', got \{'role': 'user'\}"),
        ([[turn("a")], [{"content": "a"}]], "prompt 1, message 0 has no 'role'"),
        ([turn(None)], "prompt 0, message 0: 'content' is None, expected a text"),
        ([turn([{"type": "text", "text": "a"}])], r"'content' is \[\{'type': 'text'"),
        ([turn("a", 3)], "'role' is 3, expected a text"),
        ([turn("a", "")], "has an empty role"),
        ([turn("a\ud800")], "half of a character"),
        (turn("a"), "prompts must be texts, got .*, and a conversation as a list of messages"),
        ([[]], r"prompts must be texts, got \[\]"),
        ([3], "prompts must be texts, got 3; pass ids as input_ids"),
        (3, "prompts are a text or a list of prompts, got 3"),
    ],
)
def test_what_is_no_conversation(chat: dgraph.CompiledModel, prompts: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        chat.generate(prompts)


def test_a_tokenizer_that_reads_no_conversations(chat: dgraph.CompiledModel) -> None:
    class Plain:
        encode, decode = Letters.encode, Letters.decode

    other = dgraph.CompiledModel.__new__(dgraph.CompiledModel)
    model = dgraph.Model("plain", chat.model.module, chat.spec, Plain(), chat.model.prefix)  # type: ignore[arg-type]
    other.__dict__.update(chat.__dict__, model=model)
    with pytest.raises(InputError, match="the tokenizer of plain reads no conversations: it has no method encode_chat"):
        other.generate([turn("a")])


def test_a_model_without_a_tokenizer_says_how_it_gets_one(chat: dgraph.CompiledModel) -> None:
    other = dgraph.CompiledModel.__new__(dgraph.CompiledModel)
    model = dgraph.Model("bare", chat.model.module, chat.spec, None, chat.model.prefix)
    other.__dict__.update(chat.__dict__, model=model)
    with pytest.raises(InputError, match=r"bare came without a tokenizer; pass input_ids .* tokenizer=, a folder or"):
        other.generate([turn("a")])


def test_an_adopted_model_takes_a_tokenizer(model: dgraph.Model) -> None:
    own = Letters()
    assert dgraph.adopt(model, tokenizer=own).tokenizer is own
    assert dgraph.adopt(model).tokenizer is None

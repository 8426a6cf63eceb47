"""Folders of tokenizers: ids are those that transformers gives, but for special tokens that somebody types."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from dgraph.models.tokenizer import FileTokenizer, read_tokenizer
from tests.models.folders import BOS, CORPUS, EOS, KINDS, POSTS, TEXTS, UNK, folder, made

SAID = [
    {"role": "system", "content": "Be  brief."},
    {"role": "user", "content": " Don't stop: isn't it?\n"},
    {"role": "assistant", "content": "naïve 日本"},
    {"role": "user", "content": "the quick"},
]


def both(path: Path) -> tuple[FileTokenizer, Any]:
    """A folder's tokenizer here and in transformers."""
    from transformers import AutoTokenizer

    ours = read_tokenizer(path)
    assert ours is not None
    return ours, AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)


def chat(theirs: Any, messages: Sequence[Any], **more: Any) -> list[int]:
    """Ids of a conversation in transformers."""
    more = {"add_generation_prompt": not more.get("continue_final_message"), **more}
    found: list[int] = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **more)
    return found


def begun(theirs: Any, text: str) -> list[int]:
    """Ids of a text in transformers, without what it adds at the end."""
    whole, bare = theirs(text).input_ids, theirs(text, add_special_tokens=False).input_ids
    at = next(n for n in range(len(whole)) if whole[n : n + len(bare)] == bare)
    return list(whole[: at + len(bare)])


@pytest.mark.parametrize("post", POSTS)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_transformers(tmp_path: Path, kind: str, post: str) -> None:
    ours, theirs = both(folder(tmp_path / "m", made(kind), post=post))
    for text in TEXTS:
        bare = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode_text(text) == begun(theirs, text)
        assert ours.encode_part(text) == bare
        assert ours.decode(bare) == theirs.decode(bare, skip_special_tokens=True)
        assert ours.encode(text) == chat(theirs, [{"role": "user", "content": text}])
    assert ours.encode_chat(SAID) == chat(theirs, SAID)
    assert ours.encode_text("the")[: len(ours.encode_text("the")) - len(ours.encode_part("the"))] == (
        [] if post == "none" else [theirs.bos_token_id]
    )


def cut(described: dict[str, Any]) -> None:
    described["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    described["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": UNK,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_neither_cut_nor_filled_up(tmp_path: Path, kind: str) -> None:
    plain = read_tokenizer(folder(tmp_path / "m", made(kind)))
    stored = read_tokenizer(folder(tmp_path / "n", made(kind), edit=cut, model_max_length=4))
    assert plain is not None
    assert stored is not None
    typed = f"{CORPUS[0]} {EOS}"
    for text in (*TEXTS, "a " * 200, typed):
        assert stored.encode_text(text) == plain.encode_text(text)
        assert stored.encode(text) == plain.encode(text)
    assert stored.encode_texts(TEXTS) == plain.encode_texts(TEXTS)


def added(content: str, **flags: bool) -> dict[str, Any]:
    usual = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {"content": content, **usual, **flags}


def only_in_settings(first: int) -> dict[str, Any]:
    """Tokens of added_tokens_decoder that tokenizer.json lacks."""
    tokens = [
        added("<|left|>", lstrip=True),
        added("<|right|>", rstrip=True),
        added("word", single_word=True, special=False, normalized=True),
        added("<think>", special=False),
        added("Quick", special=False, normalized=True),
        added("<|both|>", lstrip=True, rstrip=True, special=False),
    ]
    return {str(first + n): token for n, token in enumerate(tokens)}


WRITTEN = (
    "a  <|left|> b <|right|>  c",
    "word words sword word.",
    "<think>so</think> Quick quick QUICK",
    "x <|both|> y<|more|>z <|later|>",
)


@pytest.mark.parametrize(
    "where",
    [
        "added_tokens_decoder",
        "additional_special_tokens",
        "extra_special_tokens",
        "special_tokens_map.json",
        "named token",
        "tokenizer.json",
        "added_tokens.json",
        "nothing",
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_added_tokens_are_those_of_transformers(tmp_path: Path, kind: str, where: str) -> None:
    found, settings, files = made(kind), {}, {}
    size = found.get_vocab_size()
    special = {"bos_token": BOS, "eos_token": added(EOS), "additional_special_tokens": ["<|later|>"]}
    if where == "added_tokens_decoder":
        settings = {"added_tokens_decoder": only_in_settings(size)}
    elif where in ("additional_special_tokens", "extra_special_tokens"):
        settings = {where: ["<|more|>", "<|left|>"]}
    elif where == "special_tokens_map.json":
        files = {where: json.dumps(special)}
    elif where == "named token":
        settings = {"pad_token": "<|more|>", "mask_token": {"__type": "AddedToken", **added("<|later|>")}}
    elif where == "tokenizer.json":
        found.add_tokens([AddedToken(**token) for token in only_in_settings(size).values()])
    elif where == "added_tokens.json":
        files = {where: json.dumps({"<|more|>": size})}
    ours, theirs = both(folder(tmp_path / "m", found, files=files, **settings))
    template = "{% for m in messages %}" + "{{ m.content }}" + " ".join(WRITTEN) + "{% endfor %}"
    assert ours.encode_chat(SAID, template=template) == chat(theirs, SAID, chat_template=template)
    for text in WRITTEN:
        bare = theirs(text, add_special_tokens=False).input_ids
        if not any(token in text for token in ours.special):
            assert ours.encode_part(text) == bare
        assert ours.decode(bare) == theirs.decode(bare, skip_special_tokens=True)
    assert ours.mask_id == theirs.mask_token_id
    assert ours.ids["eos_token_id"] == theirs.eos_token_id


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{"add_bos_token": True}, {"add_eos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("name", [None, "PreTrainedTokenizerFast", "NoSuchTokenizer"])
def test_what_a_text_begins_with(tmp_path: Path, kind: str, settings: dict[str, bool], name: str | None) -> None:
    for post in ("none", "template"):
        ours, theirs = both(folder(tmp_path / post, made(kind), post=post, tokenizer_class=name, **settings))
        assert ours.encode_text("the fox") == begun(theirs, "the fox")


@pytest.mark.parametrize(
    ("kind", "name", "model_type"),
    [
        ("byte level", "Qwen2TokenizerFast", "qwen3"),
        ("byte level", "Qwen2Tokenizer", "sdar"),
        ("byte level", "LlamaTokenizerFast", "llama"),
        ("byte level", "GPT2TokenizerFast", "dream"),
        ("byte fallback", "LlamaTokenizerFast", "llama"),
        ("byte fallback", "LlamaTokenizer", ""),
        ("unigram", "T5TokenizerFast", "llada"),
        ("word piece", "BertTokenizerFast", "bert"),
        ("byte level", None, "qwen3"),
    ],
)
def test_classes_of_tokenizers(tmp_path: Path, kind: str, name: str | None, model_type: str) -> None:
    config = {"model_type": model_type} if model_type else {"hidden_size": 4}
    path = folder(tmp_path / "m", made(kind), post="template", config=config, tokenizer_class=name)
    ours, theirs = both(path)
    for text in TEXTS:
        assert ours.encode_text(text) == begun(theirs, text)
        bare = theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(bare) == theirs.decode(bare, skip_special_tokens=True)
    assert ours.encode_chat(SAID) == chat(theirs, SAID)

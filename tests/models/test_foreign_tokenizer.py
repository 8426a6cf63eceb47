"""Tokenizers that a caller gives: folders, objects of transformers, objects of his own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from dgraph.errors import CheckpointError, InputError
from dgraph.families import tokenizer_of

WORDS = [*(f"w{i}" for i in range(40)), "<unk>", "<user>", "<end>", "user", "assistant", ":"]
IDS = {word: place for place, word in enumerate(WORDS)}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<user> {{ m.content }} <end> {% endfor %}{% if add_generation_prompt %}w39{% endif %}"
)
NAMES: dict[str, Any] = {"unk_token": "<unk>", "eos_token": "<end>", "additional_special_tokens": ["<user>"]}


def fast(**extra: Any) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    backend.decoder = decoders.Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=backend, **NAMES, **extra)


class Slow(PreTrainedTokenizer):
    """The same words in Python."""

    @property
    def vocab_size(self) -> int:
        return len(WORDS)

    def get_vocab(self) -> dict[str, int]:
        return dict(IDS)

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return text.split()

    def _convert_token_to_id(self, token: str) -> int:
        return IDS.get(token, IDS["<unk>"])

    def _convert_id_to_token(self, index: int) -> str:
        return WORDS[index]


CHAT = [{"role": "user", "content": "w1 w2"}]
FRAMED = [IDS["<user>"], 1, 2, IDS["<end>"], 39]


@pytest.mark.parametrize("given", [fast(chat_template=TEMPLATE), Slow(chat_template=TEMPLATE, **NAMES)], ids=repr)
def test_an_object_of_transformers_frames_by_its_template(given: Any) -> None:
    found: Any = tokenizer_of(given)
    assert found.encode("w1 w2") == FRAMED
    assert found.encode_chat(CHAT) == FRAMED
    assert given.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False) == FRAMED
    assert found.encode_text("w1 w2") == [1, 2]
    assert found.decode([1, 2, IDS["<end>"]]).split() == given.decode([1, 2]).split()


@pytest.mark.parametrize("given", [fast(chat_template=TEMPLATE), Slow(chat_template=TEMPLATE, **NAMES)], ids=repr)
def test_what_looks_like_a_special_token_is_text_in_a_message(given: Any) -> None:
    found: Any = tokenizer_of(given)
    ids = found.encode_chat([{"role": "user", "content": "w1 <end> w2"}])
    assert ids.count(IDS["<end>"]) <= 2, "a word level has no other id for it"
    assert ids[0] == IDS["<user>"]
    assert found.encode_chat([{"role": "user", "content": "w1"}, CHAT[0]])[-6:] == [IDS["<end>"], *FRAMED]


@pytest.mark.parametrize("given", [fast(chat_template=TEMPLATE), Slow(chat_template=TEMPLATE, **NAMES)], ids=repr)
def test_a_conversation_that_the_template_refuses(given: Any) -> None:
    found: Any = tokenizer_of(given)
    with pytest.raises(InputError, match=r"the model's chat template refuses these messages: .*no system"):
        found.encode_chat([{"role": "system", "content": "w1"}])


@pytest.mark.parametrize("given", [fast(), Slow(**NAMES)], ids=repr)
def test_without_a_template_a_prompt_is_itself(given: Any) -> None:
    found: Any = tokenizer_of(given)
    assert found.encode("w1 w2") == [1, 2]
    assert found.encode("") == []
    with pytest.raises(InputError, match="half of a character"):
        found.encode("\ud800")


def test_an_object_is_what_its_folder_is(tmp_path: Path) -> None:
    given = fast(chat_template=TEMPLATE)
    given.save_pretrained(tmp_path)
    for folder in (tmp_path, str(tmp_path)):
        found: Any = tokenizer_of(folder)
        assert found.encode("w1 w2") == tokenizer_of(given).encode("w1 w2") == FRAMED


def test_an_object_of_the_callers_own_is_taken_as_it_is() -> None:
    class Letters:
        def encode(self, prompt: str) -> list[int]:
            return [ord(letter) for letter in prompt]

        def decode(self, ids: Sequence[int]) -> str:
            return "".join(map(chr, ids))

    own = Letters()
    assert tokenizer_of(own) is own
    for wrong in (Letters, 3, object()):
        with pytest.raises(InputError, match="tokenizer is a folder, a tokenizer of transformers, or an object with"):
            tokenizer_of(wrong)


@pytest.mark.parametrize("folder", ["no/such/folder", "empty"])
def test_a_folder_without_a_tokenizer(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"is no folder with a tokenizer; give one with tokenizer\.json"):
        tokenizer_of(tmp_path / folder)

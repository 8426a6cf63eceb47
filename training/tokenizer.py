"""The byte-level BPE tokenizer of the tiny models: about two thousand entries, digits split one by one."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from dgraph.models.tasks import TASKS, make

PAD, EOS, MASK, USER, ASSISTANT = "<|pad|>", "<|eos|>", "<|mask|>", "<|user|>", "<|assistant|>"
SPECIAL = (PAD, EOS, MASK, USER, ASSISTANT)
"""Special tokens; their ids are their places in this tuple."""
PAD_ID, EOS_ID, MASK_ID, USER_ID, ASSISTANT_ID = range(len(SPECIAL))

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] in ['user', 'system', 'developer'] %}<|user|>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|eos|>"
    "{% else %}{{ raise_exception('roles are system, user and assistant, got ' + message['role']) }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train(passages: Iterable[str], vocab_size: int = 2048, characters: int = 8_000_000, seed: int = 0) -> Tokenizer:
    """Train on task examples and open text, about half of the characters each.

    `passages` is read until `characters` characters of it are used.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = list(_until(passages, characters))
    rng = random.Random(seed)
    names = list(TASKS)
    examples = (make(rng.choice(names), rng) for _ in iter(int, 1))
    tasks = _until((f"{example.prompt}\n{example.answer}" for example in examples), sum(map(len, text)))
    tokenizer.train_from_iterator([*text, *tasks], trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json, as AutoTokenizer reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {
        "eos_token": EOS,
        "pad_token": PAD,
        "mask_token": MASK,
        "additional_special_tokens": [USER, ASSISTANT],
    }
    config = {
        **special,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(index): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for index, token in enumerate(SPECIAL)
        },
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=1) + "\n")


def load(folder: Path) -> Tokenizer:
    """The tokenizer of a folder made by `save`."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Ids of one user turn followed by the start of the assistant's, as the chat template renders it."""
    return [USER_ID, *tokenizer.encode(prompt, add_special_tokens=False).ids, ASSISTANT_ID]


def _until(texts: Iterable[str], characters: int) -> Iterable[str]:
    total = 0
    for text in texts:
        if total >= characters:
            return
        total += len(text)
        yield text

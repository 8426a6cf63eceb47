"""Folders of tokenizers of all kinds, made on the spot, as publishers have them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer

BOS, EOS, UNK, TURN, END = "<s>", "</s>", "<unk>", "<|turn|>", "<|end|>"
SPECIAL = [BOS, EOS, UNK, TURN, END]
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "don't stop: 12 + 30 = 42, isn't it? It's n't 's I'm we've they're ! . ,",
    "Grüße, world!\n\n  two lines\tand a tab",
    "user system assistant tool: {'type': \"text\"} [1, 2]",
] * 4
TEXTS = [
    "the quick brown fox",
    " leading and trailing ",
    "Don't stop: isn't it ? Yes , it is . ",
    "naïve 日本 🎉 ﷽\n\n\ttab  and   spaces",
    "x",
]
CHAT = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def _byte_level() -> Tokenizer:
    made = Tokenizer(BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(CORPUS, BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    return made


def _byte_fallback() -> Tokenizer:
    """As Llama 2 has it: spaces are letters, bytes stand for what the vocabulary lacks, one space is stripped."""
    trained = Tokenizer(BPE(unk_token=UNK))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = BpeTrainer(vocab_size=300, special_tokens=[UNK, BOS, EOS], show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    vocabulary = dict(model["vocab"])
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    merges = [tuple(pair) for pair in model["merges"]]
    made = Tokenizer(BPE(vocabulary, merges, unk_token=UNK, byte_fallback=True, fuse_unk=True))
    made.normalizer = trained.normalizer
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def _unigram() -> Tokenizer:
    made = Tokenizer(Unigram())
    made.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = UnigramTrainer(vocab_size=120, special_tokens=[UNK, BOS, EOS], unk_token=UNK, show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    return made


def _metaspace_first() -> Tokenizer:
    made = Tokenizer(BPE(unk_token=UNK))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    made.train_from_iterator(CORPUS, BpeTrainer(vocab_size=200, special_tokens=[UNK], show_progress=False))
    return made


def _word_piece() -> Tokenizer:
    made = Tokenizer(WordPiece(unk_token=UNK))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(CORPUS, WordPieceTrainer(vocab_size=200, special_tokens=[UNK], show_progress=False))
    return made


def _ctc() -> Tokenizer:
    letters = [UNK, "<pad>", "|", *sorted(set("".join(CORPUS)) - {"|", " "})]
    made = Tokenizer(WordLevel({letter: id for id, letter in enumerate(letters)}, unk_token=UNK))
    made.normalizer = normalizers.Replace(" ", "|")
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.CTC(pad_token="<pad>", word_delimiter_token="|")
    return made


KINDS: Mapping[str, Callable[[], Tokenizer]] = {
    "byte level": _byte_level,
    "byte fallback": _byte_fallback,
    "unigram": _unigram,
    "metaspace first": _metaspace_first,
    "word piece": _word_piece,
    "ctc": _ctc,
}


@cache
def _described(kind: str) -> str:
    return KINDS[kind]().to_str()


def made(kind: str, special: bool = True) -> Tokenizer:
    """A fresh tokenizer of a kind, with its special tokens."""
    found = Tokenizer.from_str(_described(kind))
    if special:
        found.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    return found


def _template(found: Tokenizer) -> Any:
    ids = [(text, found.token_to_id(text)) for text in (BOS, EOS)]
    return processors.TemplateProcessing(f"{BOS} $A {EOS}", f"{BOS} $A {EOS} $B {EOS}", ids)


POSTS: Mapping[str, Callable[[Tokenizer], Any]] = {
    "none": lambda found: None,
    "template": _template,
    "roberta": lambda found: processors.RobertaProcessing(
        (EOS, found.token_to_id(EOS)), (BOS, found.token_to_id(BOS)), add_prefix_space=False
    ),
    "bert": lambda found: processors.BertProcessing((EOS, found.token_to_id(EOS)), (BOS, found.token_to_id(BOS))),
}


def folder(
    path: Path,
    tokenizer: Tokenizer,
    *,
    post: str = "none",
    template: Any = CHAT,
    files: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    edit: Callable[[dict[str, Any]], None] | None = None,
    **settings: Any,
) -> Path:
    """A folder of a tokenizer.

    Args:
        path: where; it is made.
        tokenizer: written as tokenizer.json.
        post: one of `POSTS`.
        template: of tokenizer_config.json; None for none.
        files: more files, by their paths within.
        config: config.json.
        edit: changes the object of tokenizer.json.
        settings: more of tokenizer_config.json; None leaves out what is there.
    """
    path.mkdir(parents=True)
    if (processor := POSTS[post](tokenizer)) is not None:
        tokenizer.post_processor = processor
    described = json.loads(tokenizer.to_str())
    if edit is not None:
        edit(described)
    (path / "tokenizer.json").write_text(json.dumps(described))
    usual = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": UNK,
        "chat_template": template,
        **settings,
    }
    said = {name: value for name, value in usual.items() if value is not None}
    (path / "tokenizer_config.json").write_text(json.dumps(said))
    (path / "config.json").write_text(json.dumps(dict(config or {"model_type": "sdar"})))
    for name, text in (files or {}).items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
    return path

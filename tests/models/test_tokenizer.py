"""Tokenizers of checkpoint folders: which files they come from, and the chat frame."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from dgraph.errors import CheckpointError, InputError
from dgraph.families import embedded
from dgraph.models.tokenizer import FileTokenizer, read_tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
TEXTS = ["the quick brown fox", "don't stop: 12 + 30 = 42", "Grüße, world!\n\n  two lines"]


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """A byte-level vocabulary and its merges, as tokenizer.json has them."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS * 3, BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    return json.loads(tokenizer.to_str())["model"]


def settings(size: int, **more: Any) -> dict[str, Any]:
    """tokenizer_config.json as Dream has it: special tokens after the vocabulary, a class of its own."""
    added = {str(size + i): {"content": text, "special": True} for i, text in enumerate(SPECIAL)}
    for token in added.values():
        token |= {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {
        "added_tokens_decoder": added,
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "bos_token": "<|endoftext|>",
        "eos_token": {"__type": "AddedToken", "content": "<|endoftext|>", "lstrip": False},
        "mask_token": "<|mask|>",
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "DreamTokenizer",
        **more,
    }


def byte_level(folder: Path, trained: dict[str, Any], **more: Any) -> Path:
    """A folder with vocab.json and merges.txt alone."""
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(trained["vocab"]))
    merges = ["#version: 0.2", *(" ".join(pair) for pair in trained["merges"])]
    (folder / "merges.txt").write_text("\n".join(merges) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings(len(trained["vocab"]), **more)))
    return folder


def test_half_of_a_character_is_refused(tmp_path: Path, trained: dict[str, Any]) -> None:
    tokenizer = read_tokenizer(byte_level(tmp_path / "m", trained))
    for read in (
        lambda: tokenizer.encode("a\ud800"),
        lambda: tokenizer.encode_prompts(["fox", "a\ud800"]),
        lambda: tokenizer.encode_chat([{"role": "user", "content": "\udcffa"}]),
        lambda: tokenizer.encode_text("\udcff"),
    ):
        with pytest.raises(InputError, match=r"no half of a character \(a lone surrogate\), got '\\ud(800|cff)'"):
            read()


def test_a_vocabulary_and_its_merges(tmp_path: Path, trained: dict[str, Any]) -> None:
    tokenizer = read_tokenizer(byte_level(tmp_path / "m", trained))
    assert tokenizer is not None
    size = len(trained["vocab"])
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert max(ids) < size
        assert len(ids) < len(text.encode())
    assert tokenizer.encode("<|im_start|>the<|mask|>")[::2] == [size + 1, size + 3]
    assert tokenizer.decode([size, *tokenizer.encode("fox"), size + 3]) == "fox"
    assert len(tokenizer.encode("12")) == 2, "a digit is a token of its own"


def test_the_same_tokenizer_as_one_file(tmp_path: Path, trained: dict[str, Any]) -> None:
    """Words apart as in `tokenizer.json`, which is preferred where both are there."""
    apart = read_tokenizer(byte_level(tmp_path / "m", trained))
    words = r"'\p{L}+| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
    whole = Tokenizer(BPE(trained["vocab"], [tuple(pair) for pair in trained["merges"]]))
    whole.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(words), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    whole.decoder = decoders.ByteLevel()
    folder = byte_level(tmp_path / "n", trained)
    whole.save(str(folder / "tokenizer.json"))
    one = read_tokenizer(folder)
    assert apart is not None
    assert one is not None
    assert one.encode(TEXTS[0]) == apart.encode(TEXTS[0])
    assert one.encode("a<|mask|>") == apart.encode("a<|mask|>"), "that only tokenizer_config.json knows"


FRAME = "{% for m in messages %}\n    {{ bos_token }}[{{ m.role }}]{{ m.content }}{{ eos_token }}\n{% endfor %}"
NAMED = [{"name": "tools", "template": "no"}, {"name": "default", "template": FRAME}]


@pytest.mark.parametrize("where", ["settings", "named", "file"])
def test_the_chat_frame_and_its_special_tokens(tmp_path: Path, trained: dict[str, Any], where: str) -> None:
    folder = byte_level(tmp_path / "m", trained, chat_template={"settings": FRAME, "named": NAMED}.get(where, "no"))
    if where == "file":
        (folder / "chat_template.jinja").write_text(FRAME)
    tokenizer = read_tokenizer(folder)
    assert tokenizer is not None
    plain = read_tokenizer(byte_level(tmp_path / "n", trained))
    assert plain is not None
    framed = "    <|endoftext|>[user]fox<|endoftext|>\n"  # the lines of the loop itself leave nothing
    assert tokenizer.encode("fox") == plain.encode(framed)
    assert tokenizer.encode("") == []


def test_what_a_server_builds_before_it_has_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = read_tokenizer(embedded()["tiny_sdar"].folder)
    assert tokenizer is not None
    tokenizer.prepare()
    monkeypatch.setattr("dgraph.models.literal.json", None)
    monkeypatch.setattr("dgraph.models.tokenizer.longest_token", None)
    assert tokenizer.encode_text("<|user|>")
    assert tokenizer.longest_token_bytes


@pytest.mark.parametrize("name", ["tiny_sdar", "tiny_llada"])
def test_special_tokens_that_somebody_types_are_text(name: str) -> None:
    tokenizer = read_tokenizer(embedded()[name].folder)
    assert tokenizer is not None
    mask, typed = "<|mask|>", "a<|mask|> b<|eos|><|user|>c"
    for ids in (tokenizer.encode_text(typed), tokenizer.encode(typed)[1:-1]):
        assert min(ids) > 4, "the special tokens are ids 0 to 4"
        assert tokenizer.decode(ids) == typed
    assert tokenizer.encode_text("river stone") == tokenizer.encode("river stone")[1:-1]
    turns = [("user", "b a"), ("assistant", mask), ("user", "c")]
    said = [{"role": role, "content": content} for role, content in turns]
    ids = tokenizer.encode_chat(said)
    assert [i for i in ids if i <= 4] == [3, 4, 1, 3, 4], "only what the template writes"
    assert tokenizer.encode_chat(said[:1]) == tokenizer.encode("b a")
    assert tokenizer.decode(tokenizer.encode_text("\U000f5e5e2\U000f5e5f \U000f5e5ex")) != "", "marks are only ours"


@pytest.mark.parametrize("name", ["tiny_sdar", "no template"])
def test_many_are_encoded_as_one_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = read_tokenizer(embedded()["tiny_sdar"].folder)
    assert tokenizer is not None
    monkeypatch.setattr("dgraph.models.tokenizer._AT_ONCE", 3)
    if name == "no template":
        tokenizer = FileTokenizer(tokenizer._tokenizer)
    texts = ["Sort: b a", "", "what <|eos|> is", tokenizer.special[0], "naïve 日本", " a  b\n", "x" * 300]
    assert tokenizer.encode_prompts(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_texts(texts) == [tokenizer.encode_text(text) for text in texts]
    assert tokenizer.encode_texts([]) == []


def test_the_bytes_of_ids_make_the_text(tmp_path: Path, trained: dict[str, Any]) -> None:
    tokenizer = read_tokenizer(byte_level(tmp_path / "m", trained))
    assert tokenizer is not None
    for text in ("日本🎉é naïve ﷽ \ufffd", "a\x00b\n\t ~¡¬\xad®ÿĀ", "<0xE2>"):
        pieces = [tokenizer.bytes_of(token) for token in tokenizer.encode_text(text)]
        assert b"".join(piece for piece in pieces if piece is not None) == text.encode()
    (mask,) = tokenizer.encode("<|mask|>")[-1:]
    assert tokenizer.bytes_of(mask) == b""


def test_bytes_of_a_vocabulary_that_falls_back_to_them() -> None:
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE

    vocabulary = {"<unk>": 0, "é": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    made = Tokenizer(BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = FileTokenizer(made)
    ids = tokenizer.encode_text("é日")
    assert [tokenizer.bytes_of(token) for token in ids] == ["é".encode(), b"\xe6", b"\x97", b"\xa5"]


def test_conversations_that_a_template_refuses() -> None:
    tokenizer = read_tokenizer(embedded()["tiny_sdar"].folder)
    assert tokenizer is not None
    with pytest.raises(InputError, match=r"refuses these messages: roles are system, user and assistant, got tool"):
        tokenizer.encode_chat([{"role": "tool", "content": "sunny"}])
    system, user = ({"role": role, "content": "be short"} for role in ("system", "user"))
    assert tokenizer.encode_chat([system, user]) == tokenizer.encode_chat([user, user])


def test_a_template_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    compiled: list[str] = []
    compile_it = ImmutableSandboxedEnvironment.from_string

    def counted(self: ImmutableSandboxedEnvironment, source: str) -> object:
        compiled.append(source)
        return compile_it(self, source)

    monkeypatch.setattr(ImmutableSandboxedEnvironment, "from_string", counted)
    own = "{{ messages[0].content }} of this test"  # of which no other test can have compiled it
    plain = read_tokenizer(embedded()["tiny_sdar"].folder)
    assert plain is not None
    for _ in range(2):
        made = FileTokenizer(plain._tokenizer, own)
        assert [made.decode(made.encode(text)) for text in ("a", "b")] == ["a of this test", "b of this test"]
    assert compiled == [own]


def test_a_conversation_without_a_template(tmp_path: Path, trained: dict[str, Any]) -> None:
    plain = read_tokenizer(byte_level(tmp_path / "m", trained))
    assert plain is not None
    said = [{"role": "user", "content": "the quick"}, {"role": "assistant", "content": "fox<|mask|>"}]
    ids = plain.encode_chat(said)
    assert plain.decode(ids) == "user: the quick\nassistant: fox<|mask|>\nassistant:"
    assert plain.mask_id not in ids


@pytest.mark.parametrize("name", [None, "PreTrainedTokenizerFast", "DreamTokenizer", "Qwen2TokenizerFast"])
def test_a_vocabulary_and_its_merges_under_any_class(tmp_path: Path, trained: dict[str, Any], name: str | None) -> None:
    whole = read_tokenizer(byte_level(tmp_path / "m", trained))
    path = byte_level(tmp_path / "n", trained) / "tokenizer_config.json"
    said = {**settings(len(trained["vocab"])), "tokenizer_class": name}
    path.write_text(json.dumps({key: value for key, value in said.items() if value and key != "auto_map"}))
    found = read_tokenizer(tmp_path / "n")
    path.unlink()
    bare = read_tokenizer(tmp_path / "n")
    assert whole is not None
    assert found is not None
    assert bare is not None
    for text in TEXTS:
        assert found.encode_text(text) == whole.encode_text(text) == bare.encode_text(text)


def test_a_vocabulary_of_words(tmp_path: Path) -> None:
    words = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "a", "b", "##c"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    assert read_tokenizer(tmp_path) is None, "nothing says how it is read"
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    found = read_tokenizer(tmp_path)
    assert found is not None
    assert found.encode_text("a bc") == [1, 5, 6, 7]
    assert found.mask_id == 4


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    assert read_tokenizer(tmp_path) is None


@pytest.mark.parametrize("name", ["vocab.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer(tmp_path: Path, trained: dict[str, Any], name: str) -> None:
    folder = byte_level(tmp_path / "damaged", trained)
    (folder / name).write_text("{")
    with pytest.raises(CheckpointError, match=r"the tokenizer of .*damaged cannot be read"):
        read_tokenizer(folder)


def test_names_that_a_template_reads() -> None:
    template = (
        "{% for turn in messages %}{% generation %}{{ turn.content }}{% endgeneration %}{% break %}{% endfor %}"
        "{% macro shown(value) %}{{ value }}{{ today }}{% endmacro %}{{ shown(documents) }}"
        "{% if enable_thinking is defined and enable_thinking is false %}no{% endif %}"
    )
    read = FileTokenizer(Tokenizer(BPE()), template).template_variables
    assert read == {"messages", "today", "documents", "enable_thinking"}
    assert FileTokenizer(Tokenizer(BPE())).template_variables == {"add_generation_prompt"}

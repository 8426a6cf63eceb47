"""The tokenizer of a checkpoint, with the model's chat frame."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from dgraph.errors import CheckpointError, InputError
from dgraph.families import check_text


class FileTokenizer:
    """A tokenizer that came in a file, with its chat template.

    Args:
        tokenizer: of the package tokenizers.
        template: the chat template; "" for none.
        names: special tokens by the names that a template writes them by ("eos_token", ...).
    """

    def __init__(self, tokenizer: Any, template: str = "", names: Mapping[str, str] = MappingProxyType({})):
        self._tokenizer, self._template, self._names = tokenizer, template, names

    @property
    def mask_id(self) -> int | None:
        """Id of the mask token, if the settings name one that is in the vocabulary."""
        name = self._names.get("mask_token")
        return None if name is None else self._tokenizer.token_to_id(name)

    def encode(self, prompt: str) -> list[int]:
        """Ids of a user's prompt in its chat frame; without a template, of the prompt alone, special tokens and all."""
        return self.encode_prompts([prompt])[0]

    def encode_prompts(self, prompts: Sequence[str]) -> list[list[int]]:
        """`encode` of each, on all processors."""
        return self._encode_all([self._framed(prompt) for prompt in prompts])

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation, up to where the assistant's next turn begins.

        What looks like a special token in a message is text. Without a template a turn is a line "role: content".

        Args:
            messages: each with "role" and "content".

        Raises:
            InputError: a conversation that the template refuses.
        """
        return self._encode_all([self._conversation(messages)])[0]

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text as it is, without a frame. What looks like a special token is text."""
        return self.encode_texts([text])[0]

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_text` of each, on all processors."""
        return self._encode_all([self._hide(text) for text in texts])

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def bytes_of(self, token: int) -> bytes | None:
        """What an id is of a text in UTF-8, which may be a part of a character; b"" of a special token, None where
        neither its text nor its name in the vocabulary says.
        """
        text = self.decode([token])
        if _BROKEN not in text:
            return text.encode()
        name = self._tokenizer.id_to_token(token)
        if re.fullmatch("<0x[0-9A-F]{2}>", name):  # as vocabularies write bytes that are not in them
            return bytes.fromhex(name[3:5])
        raw = bytes(_BYTES[letter] for letter in name) if _BYTES.keys() >= set(name) else b""
        return raw if raw.decode(errors="replace") == text else None

    def with_mask(self, mask: str) -> FileTokenizer:
        """The same, with the mask token that is written so; one that the vocabulary lacks gets the next free id."""
        from tokenizers import AddedToken, Tokenizer

        made = Tokenizer.from_str(self._tokenizer.to_str())
        made.add_special_tokens([AddedToken(mask, normalized=False, special=True)])
        return FileTokenizer(made, self._template, {**self._names, "mask_token": mask})

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which `read_tokenizer` and transformers read."""
        folder.mkdir(parents=True, exist_ok=True)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **self._names}
        settings |= {"chat_template": self._template} if self._template else {}
        for name, text in (
            ("tokenizer.json", self._tokenizer.to_str(pretty=True)),
            ("tokenizer_config.json", json.dumps(settings, indent=1) + "\n"),
        ):
            part = folder / f"{name}.part"
            part.write_text(text, encoding="utf-8")
            part.replace(folder / name)

    def _framed(self, prompt: str) -> str:
        return self._conversation([{"role": "user", "content": prompt}]) if prompt and self._template else prompt

    def _conversation(self, messages: Sequence[Mapping[str, str]]) -> str:
        """A conversation as one text, for `_encode_all`."""
        hidden = [{**message, "content": self._hide(message["content"])} for message in messages]
        return self._render(hidden) if self._template else _lines(hidden)

    def _hide(self, text: str) -> str:
        """A text in which places that look like a special token are marked, for `_encode_all` to find."""
        for place, token in enumerate(self.special):
            if token in text:
                text = text.replace(token, f"{_OPEN}{place}{_CLOSE}")
        return text

    def _encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts in which special tokens are such, and marked places are text."""
        for text in texts:
            check_text(text)
        if len(texts) == 1:  # what several would take another 0.1 ms for
            return [self._encode(texts[0])]
        found: list[list[int]] = []
        for first in range(0, len(texts), _AT_ONCE):
            part = texts[first : first + _AT_ONCE]
            read = self._tokenizer.encode_batch_fast(part, add_special_tokens=False)
            found += [self._encode(text) if _OPEN in text else of.ids for text, of in zip(part, read, strict=True)]
        return found

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in re.split(f"({_OPEN}[0-9]+{_CLOSE})", text) if _OPEN in text else [text]:
            marked = piece[:1] == _OPEN and piece[-1:] == _CLOSE and int(piece[1:-1]) < len(self.special)
            reader = self._literal if marked else self._tokenizer
            ids += reader.encode(self.special[int(piece[1:-1])] if marked else piece, add_special_tokens=False).ids
        return ids

    @cached_property
    def special(self) -> list[str]:
        """Special tokens as they are written, longer ones first."""
        found = self._tokenizer.get_added_tokens_decoder().values()
        named = set(self._names.values())
        return sorted({t.content for t in found if t.special or t.content in named}, key=lambda t: (-len(t), t))

    @cached_property
    def _literal(self) -> Any:
        """A tokenizer without special tokens, for texts that look like one."""
        from tokenizers import Tokenizer

        described = json.loads(self._tokenizer.to_str())
        for token in described["added_tokens"]:
            token["special"] = token["special"] or token["content"] in self.special
        found = Tokenizer.from_str(json.dumps(described))
        found.encode_special_tokens = True
        return found

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        from jinja2 import TemplateError

        template = _compiled(self._template)
        try:
            return template.render(messages=messages, add_generation_prompt=True, **self._names)
        except TemplateError as error:
            raise InputError(f"the model's chat template refuses these messages: {error}.") from None


@lru_cache(maxsize=8)
def _compiled(text: str) -> Any:
    """A chat template as a function. To make one takes several times as long as to encode a prompt."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # Templates are written for these two settings: a line that holds only a tag leaves nothing.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(text)


_BROKEN = "\N{REPLACEMENT CHARACTER}"


def _byte_letters() -> dict[str, int]:
    """The bytes that letters stand for in byte-level vocabularies, as GPT-2 has them: printable ones stand for
    themselves, and the others, in order, have the letters from 256 on.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(plain))
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_letters()
_AT_ONCE = 2000
"""Texts that are encoded together; more take memory."""
_OPEN, _CLOSE = "\U000f5e5e", "\U000f5e5f"
"""Around the number of a special token that is text; of a private plane, which no text has a reason to use."""


def _lines(messages: Sequence[Mapping[str, str]]) -> str:
    return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant:"


def _refuse(reason: str) -> NoReturn:
    """What templates call for a conversation that they have no form for."""
    raise InputError(f"the model's chat template refuses these messages: {reason}.")


def read_tokenizer(folder: Path) -> FileTokenizer | None:
    """The tokenizer of a folder, or None if it has none.

    Raises:
        CheckpointError: its files are damaged.
    """
    if not (folder / "tokenizer.json").is_file() and not _is_byte_level(folder):
        return None
    try:
        settings = _settings(folder)
        tokenizer, template = _read(folder), _template(folder, settings)
    except Exception as error:  # tokenizers raises nothing more special
        raise CheckpointError(f"the tokenizer of {folder} cannot be read: {error}.") from error
    texts = {name: _content(value) for name, value in settings.items() if name.endswith("_token")}
    return FileTokenizer(tokenizer, template, {name: text for name, text in texts.items() if text is not None})


def _is_byte_level(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("vocab.json", "merges.txt"))


def _read(folder: Path) -> Any:
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    # Dream and other models over Qwen2 come as a vocabulary and its merges alone.
    import transformers

    return transformers.Qwen2Tokenizer.from_pretrained(str(folder), local_files_only=True).backend_tokenizer


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _template(folder: Path, settings: dict[str, Any]) -> str:
    """The chat template: a file of its own, or in the settings as a text or as named texts; "" for none."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = settings.get("chat_template") or ""
    if isinstance(found, str):
        return found
    return {named["name"]: named["template"] for named in found}.get("default", "")


def _content(token: Any) -> str | None:
    """The text of a special token, which is written as a text or as an object with its content."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None

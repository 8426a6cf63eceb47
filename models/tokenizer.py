"""The tokenizer of a checkpoint, with the model's chat frame."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dgraph.errors import CheckpointError, InputError
from dgraph.families import check_text
from dgraph.families.hub import is_gguf
from dgraph.models.chat import DEFAULT, ChatTemplates, Message, text_of
from dgraph.models.gguf_file import open_file
from dgraph.models.literal import Literals
from dgraph.models.token_bounds import BYTE_NAMES, longest_token


class FileTokenizer:
    """A tokenizer that came in a file, with its chat template.

    Args:
        tokenizer: tokenizer of the package tokenizers.
        template: the chat template, or several by name; "" for none.
        names: special tokens by the names that a template writes them by ("eos_token", ...).
        tidy: makes text of what the tokenizer decodes; None: it is text.

    Raises:
        CheckpointError: a template that is no text, cannot be compiled, or renders no conversation at all.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | Mapping[str, str] = "",
        names: Mapping[str, str] = MappingProxyType({}),
        tidy: Callable[[str], str] | None = None,
    ):
        if not isinstance(template, (str, Mapping)):
            raise CheckpointError(f"chat_template is {template!r}, expected a text, or texts by name.")
        templates = {DEFAULT: template} if isinstance(template, str) and template else dict(template or {})
        self._tokenizer, self._names, self._tidy = tokenizer, names, tidy
        self._chat = ChatTemplates(templates, names)

    @property
    def mask_id(self) -> int | None:
        """Id of the mask token, if the settings name one that is in the vocabulary."""
        return self.ids["mask_token_id"]

    @property
    def ids(self) -> dict[str, int | None]:
        """Ids that a model's facts may come from, by their names in a config; None for what has no token."""
        named = ((name, self._names.get(name, "")) for name in ("eos_token", "mask_token"))
        return {f"{name}_id": self._tokenizer.token_to_id(text) if text else None for name, text in named}

    @property
    def has_template(self) -> bool:
        """True if the checkpoint has a chat template; else conversations are lines of roles and contents."""
        return bool(self._chat)

    @property
    def template_variables(self) -> frozenset[str]:
        """Names that the chat templates read of what `encode_chat` is given; others say nothing."""
        return self._chat.variables if self._chat else frozenset({"add_generation_prompt"})

    @cached_property
    def longest_token_bytes(self) -> int | None:
        """The most bytes of a text in UTF-8 that one id stands for; None where there is no bound."""
        return longest_token(self._tokenizer)

    def prepare(self) -> None:
        """Build what is known of all tokens, and what reads texts with special ones. That holds up all threads where
        the vocabulary is large, so a server does it before it has clients.
        """
        _ = self.longest_token_bytes
        self.encode_text("".join(self.special[:1]))

    def encode(self, prompt: str) -> list[int]:
        """Ids of a user's prompt in its chat frame; without a template, of the prompt alone, special tokens and all.

        A prompt without a frame begins as in `encode_text`; a template writes its own beginning.
        """
        return self.encode_prompts([prompt])[0]

    def encode_prompts(self, prompts: Sequence[str]) -> list[list[int]]:
        """`encode` of each, on all processors."""
        if self._chat:
            return self._encode_marked([self._framed(prompt) if prompt else "" for prompt in prompts])
        return self._begun(self._encode_plain(prompts))

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        template: str | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Ids of a conversation, as `apply_chat_template` of transformers gives them.

        A special token in an argument is text, not the token. Without a template a turn is a line "role: content".

        Args:
            messages: each with "role" and "content", a text or a list of text parts, and all else that the template
                reads ("tool_calls", "reasoning_content", ...).
            add_generation_prompt: end where the assistant's next turn begins.
            continue_final_message: end within the last message, which the response goes on with.
            tools, documents: for the template; tools are objects as OpenAI has them.
            template: another template, or the name of one that the checkpoint has.
            template_kwargs: more that the template reads.

        Raises:
            InputError: a conversation that the template refuses or fails on; options where there is no template.
        """
        if not messages:
            raise InputError("a conversation has at least one message, got none.")
        given = {"tools": tools, "documents": documents, **template_kwargs}
        if not self._chat and template is None:
            if options := [name for name, value in given.items() if value is not None]:
                raise InputError(f"the model has no chat template that reads {', '.join(options)}; leave them out.")
            return self._begun(
                self._encode_marked([self._lines(messages, add_generation_prompt, continue_final_message)])
            )[0]
        text = self._chat.render(
            [self._marked(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=self._literals.mark(tools),
            documents=self._literals.mark(documents),
            template=template,
            values=self._literals.mark(template_kwargs),
        )
        return self._encode_marked([text])[0]

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text as it is, without a frame, after those that every text begins with (BOS).

        A special token in the text is text. Ids that the tokenizer adds at the end (EOS) are left out: the text is to
        be continued.
        """
        return self.encode_texts([text])[0]

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_text` of each, on all processors."""
        return self._begun(self.encode_parts(texts))

    def encode_part(self, text: str) -> list[int]:
        """`encode_text` of a part of a text that follows other ids: without ids that every text begins with (BOS)."""
        return self.encode_parts([text])[0]

    def encode_parts(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_part` of each, on all processors."""
        return self._encode_marked([self._literals.mark(text) for text in texts])

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text if self._tidy is None else self._tidy(text)

    def special_id(self, text: str) -> int | None:
        """Id of a special token, which `decode` leaves out; None for any other text."""
        found: int | None = self._tokenizer.token_to_id(text) if text in self.special else None
        return found

    def templates_have(self, text: str) -> bool:
        """True if a chat template has a text."""
        return any(text in template for template in self._chat.templates.values())

    def unsettled(self, ids: Sequence[int]) -> int:
        """Characters at the end of the text of ids that later ids may change, at most."""
        found = 0 if self._tidy is None else TIDIED
        if self._byte_ids:  # bytes make characters together, or none of them does
            skipped = takewhile((self._byte_ids | self._special_ids).__contains__, reversed(ids))
            found = max(found, sum(id in self._byte_ids for id in skipped))
        return found

    def bytes_of(self, token: int) -> bytes | None:
        """Bytes of an id in a text in UTF-8, which may be a part of a character.

        b"" for a special token; None where neither the id's text nor its name in the vocabulary says.
        """
        text = self.decode([token])
        if _BROKEN not in text:
            return text.encode()
        name = self._tokenizer.id_to_token(token)
        if re.fullmatch("<0x[0-9A-F]{2}>", name):  # as vocabularies write bytes that are not in them
            return bytes.fromhex(name[3:5])
        raw = bytes(_BYTES[letter] for letter in name) if _BYTES.keys() >= set(name) else b""
        return raw if raw.decode(errors="replace") == text else None

    def serialised(self) -> str:
        """The tokenizer as the package tokenizers writes it."""
        text: str = self._tokenizer.to_str()
        return text

    def with_mask(self, mask: str) -> FileTokenizer:
        """The same, with the mask token that is written so; one that the vocabulary lacks gets the next free id."""
        from tokenizers import AddedToken, Tokenizer

        made = Tokenizer.from_str(self._tokenizer.to_str())
        made.add_special_tokens([AddedToken(mask, normalized=False, special=True)])
        return FileTokenizer(made, self._chat.templates, {**self._names, "mask_token": mask}, self._tidy)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which `read_tokenizer` and transformers read."""
        folder.mkdir(parents=True, exist_ok=True)
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self._names}
        settings["clean_up_tokenization_spaces"] = self._tidy is not None
        if named := [{"name": name, "template": text} for name, text in self._chat.templates.items()]:
            settings["chat_template"] = self._chat.templates.get(DEFAULT) if len(named) == 1 else named
        for name, text in (
            ("tokenizer.json", self._tokenizer.to_str(pretty=True)),
            ("tokenizer_config.json", json.dumps(settings, indent=1) + "\n"),
        ):
            part = folder / f"{name}.part"
            part.write_text(text, encoding="utf-8")
            part.replace(folder / name)

    def _marked(self, message: Message) -> dict[str, Any]:
        """A message in which special tokens are marked, also where parts of its content make one together."""
        found: dict[str, Any] = self._literals.mark(message)
        if isinstance(parts := message.get("content"), (list, tuple)):
            whole = self._literals.mark(text_of(parts))
            if whole != text_of(found["content"]):
                found["content"] = [{"type": "text", "text": whole}]
        return found

    def _framed(self, prompt: str) -> str:
        """A user's prompt as a conversation in one text, for `_encode_marked`."""
        said = [{"role": "user", "content": self._literals.mark(prompt)}]
        return self._chat.render(said)

    def _lines(self, messages: Sequence[Message], add_generation_prompt: bool, continue_final_message: bool) -> str:
        """A conversation as lines, for `_encode_marked`."""
        lines = [f"{m.get('role')}: {text_of(m.get('content'))}" for m in messages]
        begun = ["assistant:"] if add_generation_prompt and not continue_final_message else []
        end = "" if begun or continue_final_message else "\n"
        return str(self._literals.mark("\n".join([*lines, *begun]) + end))

    def _begun(self, texts: Sequence[list[int]]) -> list[list[int]]:
        """Ids of texts after those that a text begins with; an empty one stays empty."""
        return [[*self._begin, *ids] if ids else ids for ids in texts] if self._begin else list(texts)

    def _encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts in which special tokens are such. Other threads run meanwhile."""
        for text in texts:
            check_text(text)
        found: list[list[int]] = []
        for first in range(0, len(texts), _AT_ONCE):
            part = list(texts[first : first + _AT_ONCE])
            found += [one.ids for one in self._tokenizer.encode_batch_fast(part, add_special_tokens=False)]
        return found

    def _encode_marked(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts in which special tokens are such, and marked ones are text.

        Text from which the tokenizer makes a special token in another way, as by a normalizer, is text as well.
        """
        found = self._encode_plain(["" if self._literals.has_mark(text) else text for text in texts])
        for place, (text, ids) in enumerate(zip(texts, found, strict=True)):
            if self._literals.has_mark(text) or self._leaks(text, ids):
                check_text(text)
                found[place] = self._literals.encode(text)
        return found

    def _leaks(self, text: str, ids: list[int]) -> bool:
        """Tell whether ids have more special tokens than are written in their text."""
        special = self._special_ids - {self._unknown_id}
        return not special.isdisjoint(ids) and sum(map(special.__contains__, ids)) > self._literals.written(text)

    @cached_property
    def special(self) -> list[str]:
        """Special tokens as they are written, longer ones first."""
        found = self._tokenizer.get_added_tokens_decoder().values()
        named = set(self._names.values())
        return sorted({t.content for t in found if t.special or t.content in named}, key=lambda t: (-len(t), t))

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.token_to_id(token) for token in self.special)

    @cached_property
    def _unknown_id(self) -> int | None:
        """Id of all that the vocabulary lacks."""
        name = getattr(self._tokenizer.model, "unk_token", None) or self._names.get("unk_token")
        return None if name is None else self._tokenizer.token_to_id(name)

    @cached_property
    def _byte_ids(self) -> frozenset[int]:
        """Ids that stand for a byte, where a decoder joins such ids."""
        if "ByteFallback" not in repr(self._tokenizer.decoder):
            return frozenset()
        ids = map(self._tokenizer.token_to_id, BYTE_NAMES)
        return frozenset(id for id in ids if id is not None)

    @cached_property
    def _literals(self) -> Literals:
        return Literals(self._tokenizer, self.special)

    @cached_property
    def _begin(self) -> list[int]:
        """Ids that the tokenizer puts before every text."""
        for probe in ("a", "1", "."):
            bare = self._tokenizer.encode(probe, add_special_tokens=False).ids
            whole = self._tokenizer.encode(probe, add_special_tokens=True).ids
            for place in range(len(whole) - len(bare) + 1 if bare else 0):
                if whole[place : place + len(bare)] == bare:
                    return list(whole[:place])
        return []


_BROKEN = "\N{REPLACEMENT CHARACTER}"


def _byte_letters() -> dict[str, int]:
    """The bytes that letters stand for in byte-level vocabularies, as GPT-2 has them.

    Printable bytes stand for themselves; the others, in order, have the letters from 256 on.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(plain))
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_letters()
TIDIED = 6
"""Characters that tidying up changes at most: " n ' t" is "n't"."""
_AT_ONCE = 2000
"""Texts that are encoded together; more take memory."""


def read_tokenizer(folder: Path) -> FileTokenizer | None:
    """The tokenizer of a folder or GGUF file as transformers reads it, or None if it has none. Code there is not run.

    Raises:
        CheckpointError: its files are damaged, or its chat template cannot be compiled.
    """
    if is_gguf(folder):
        return _of_gguf(folder)
    there = [names for names in _FILES if all((folder / name).is_file() for name in names)]
    try:
        load = _loader(folder, there[0]) if there else None
        if load is None:
            return None
        return _wrapped(loaded := load(), _backend(loaded), _template_beside(folder))
    except Exception as error:  # tokenizers raises nothing more special
        reason = " ".join(str(error).split())
        raise CheckpointError(f"the tokenizer of {folder} cannot be read: {reason}") from error


def _of_gguf(file: Path) -> FileTokenizer | None:
    """The tokenizer beside a GGUF file, which is the original, or what transformers makes of the file's own."""
    from transformers import PreTrainedTokenizerFast

    if (file.parent / _WHOLE[0]).is_file():
        return read_tokenizer(file.parent)
    if "tokenizer.ggml.model" not in open_file(file).fields:
        return None
    try:
        loaded: Any = PreTrainedTokenizerFast.from_pretrained(
            str(file.parent), gguf_file=file.name, local_files_only=True
        )
        return _wrapped(loaded, _backend(loaded))
    except Exception as error:  # tokenizers raises nothing more special
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"the tokenizer within {file} cannot be read: {reason}. Put tokenizer.json and tokenizer_config.json of "
            f"the model that it was made from beside it."
        ) from error


_WHOLE, _BYTE_LEVEL = ("tokenizer.json",), ("vocab.json", "merges.txt")
_FILES = (_WHOLE, _BYTE_LEVEL, ("vocab.txt",), ("tokenizer.model",))
"""Files that make a tokenizer, any of these sets; the first that is there counts."""


def adopt_tokenizer(tokenizer: Any) -> FileTokenizer:
    """A tokenizer of transformers, which is left as it is.

    Args:
        tokenizer: a `PreTrainedTokenizerBase` with a fast form.

    Raises:
        CheckpointError: it has no fast form, or a chat template that cannot be compiled.
    """
    from tokenizers import Tokenizer

    backend = _backend(tokenizer)
    copied = Tokenizer.from_str(backend.to_str())
    copied.encode_special_tokens = backend.encode_special_tokens
    return _wrapped(tokenizer, copied)


def _backend(tokenizer: Any) -> Any:
    """The fast form of a tokenizer of transformers."""
    from tokenizers import Tokenizer

    found = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(found, Tokenizer):
        raise CheckpointError(f"{type(tokenizer).__name__} has no fast form; save it as tokenizer.json.")
    return found


def _wrapped(tokenizer: Any, backend: Any, template: str = "") -> FileTokenizer:
    """A tokenizer of transformers over its fast form, which never cuts texts, or fills them up, whatever its file says.

    template: chat template, where the tokenizer has none.
    """
    backend.no_truncation()
    backend.no_padding()
    # As transformers does: spaces before punctuation are a matter of vocabularies of words.
    tidies = tokenizer.clean_up_tokenization_spaces and type(backend.model).__name__ != "BPE"
    tidy = tokenizer.clean_up_tokenization if tidies else None
    return FileTokenizer(backend, tokenizer.chat_template or template, tokenizer.special_tokens_map, tidy)


def _loader(folder: Path, files: tuple[str, ...]) -> Callable[[], Any] | None:
    """A function that loads the tokenizer of transformers; None where nothing says how the files are to be read."""
    import transformers

    said, config = _object(folder / "tokenizer_config.json"), _config(folder)
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(folder), "local_files_only": True}
    name = said.get("tokenizer_class") or config.tokenizer_class or ""
    whole = files == _WHOLE
    named = hasattr(transformers, name) and (whole or not name.startswith("PreTrained"))
    known = named or config.model_type in transformers.CONFIG_MAPPING
    if known or (whole and not said.get("auto_map")):
        return partial(transformers.AutoTokenizer.from_pretrained, config=config, trust_remote_code=False, **place)
    # A class of the folder's own is code, which is not run. These classes read the same files (Dream's, for one).
    kinds = {_WHOLE: transformers.PreTrainedTokenizerFast, _BYTE_LEVEL: transformers.Qwen2Tokenizer}
    return partial(kinds[files].from_pretrained, **place) if files in kinds else None


def _config(folder: Path) -> Any:
    """The facts of config.json about the tokenizer; the others may be of a model that transformers does not know."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    said = _object(folder / "config.json")
    kind = said.get("model_type") or ""
    config: Any = CONFIG_MAPPING[kind]() if kind in CONFIG_MAPPING else PreTrainedConfig()
    config.model_type, config.name_or_path = kind, str(folder)
    config.tokenizer_class = said.get("tokenizer_class")
    return config


def _template_beside(folder: Path) -> str:
    """The chat template of a file that only processors of transformers read; "" without."""
    return _object(folder / "chat_template.json").get("chat_template") or ""


def _object(path: Path) -> dict[str, Any]:
    """The JSON object of a file; an empty one where there is no file."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, expected an object.")
    return found

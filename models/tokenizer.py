"""The tokenizer of a checkpoint folder, with the model's chat frame."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dgraph.errors import CheckpointError


class FileTokenizer:
    """tokenizer.json of a checkpoint (or vocab.json and merges.txt), with its chat template."""

    def __init__(self, folder: Path):
        try:
            self._tokenizer = _read(folder)
            settings = _settings(folder)
            self._template = _template(folder, settings)
        except Exception as error:  # tokenizers raises nothing more special
            raise CheckpointError(f"the tokenizer of {folder} cannot be read: {error}.") from error
        # A template writes the special tokens by these names.
        self._names = {n: _content(v) for n, v in settings.items() if n.endswith("_token") and _content(v) is not None}

    @property
    def mask_id(self) -> int | None:
        """Id of the mask token, if the settings name one that is in the vocabulary."""
        name = self._names.get("mask_token")
        return None if name is None else self._tokenizer.token_to_id(name)

    def encode(self, prompt: str) -> list[int]:
        """Ids of a prompt in its chat frame."""
        if not prompt:
            return []
        text = self._render(prompt) if self._template else prompt
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def _render(self, prompt: str) -> str:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        # Templates are written for these two settings: a line that holds only a tag leaves nothing.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        messages = [{"role": "user", "content": prompt}]
        return environment.from_string(self._template).render(
            messages=messages, add_generation_prompt=True, **self._names
        )


def read_tokenizer(folder: Path) -> FileTokenizer | None:
    """The tokenizer of a folder, or None if it has none.

    Raises:
        CheckpointError: its files are damaged.
    """
    whole = (folder / "tokenizer.json").is_file()
    return FileTokenizer(folder) if whole or _is_byte_level(folder) else None


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

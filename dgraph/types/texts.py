"""Texts that come from outside: files, lines of JSON, arguments."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from dgraph.errors import InputError


@functools.lru_cache(maxsize=1024)
def package_path(path: str) -> str:
    """The path of a source from its outermost package on: transformers/models/qwen3/modeling_qwen3.py. It says nothing
    of the machine; a source in no package has its name alone.
    """
    file = Path(path)
    outermost = next((folder for folder in file.parents if not (folder / "__init__.py").is_file()), file.parent)
    return file.relative_to(outermost).as_posix()


def check_text(text: str) -> None:
    """Raises `InputError` for a text with half of a character, which Python and JSON can have and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise InputError(f"a text has no half of a character (a lone surrogate), got {half!r}.") from None


def read_text(path: str | Path, what: str) -> str:
    """The text of a file in UTF-8, with or without a byte order mark.

    Args:
        path: of the file.
        what: the beginning of a message, as "--data questions.jsonl".

    Raises:
        InputError: the file cannot be read, or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{what} cannot be read: {getattr(error, 'strerror', None) or error}.") from None


def parse_json(line: str) -> Any:
    """Parse a line of JSON.

    Raises:
        InputError: it is not JSON, is nested too deeply, or has half of a character in a text or a name.
    """
    try:
        said = json.loads(line)
        if not line.isascii() or "\\u" in line:  # no other line can have half of one
            check_text(json.dumps(said, ensure_ascii=False))
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON ({error})") from None
    return said

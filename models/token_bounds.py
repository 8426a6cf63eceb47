"""The most text that one token can stand for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

_COMPOSED = 3
"""The most that NFC shortens a text in UTF-8: U+212A, of three bytes, becomes one."""
BYTE_NAMES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
"""Names in vocabularies for the bytes of characters that are not in them."""


def longest_token(tokenizer: Any) -> int | None:
    """The most bytes of a text in UTF-8 that one token stands for, so that a text of more has more tokens.

    None: there is no bound, since the tokenizer leaves parts of texts out, or takes long ones for one unknown token.

    Args:
        tokenizer: tokenizer of the package tokenizers.
    """
    described = json.loads(tokenizer.to_str())
    model, splits = described["model"], list(_steps(described["pre_tokenizer"], "pretokenizers"))
    normalizers = list(_steps(described["normalizer"], "normalizers"))
    shorter = 1
    for step in normalizers:
        if step["type"] == "NFC":
            shorter *= _COMPOSED
        elif not _lengthens(step):
            return None
    by_byte = any(step["type"] == "ByteLevel" for step in (*splits, *normalizers))
    if model["type"] != "BPE" or not all(map(_keeps, splits)) or not _knows_all(model, by_byte):
        return None
    added = described["added_tokens"]
    if any(token["lstrip"] or token["rstrip"] for token in added):  # takes any number of spaces
        return None
    sizes = [len(token) if by_byte else len(token.encode()) for token in model["vocab"]]
    return max(*sizes, *(len(token["content"].encode()) for token in added), 1) * shorter


def _steps(described: Mapping[str, Any] | None, inner: str) -> Iterable[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer, or those that one consists of."""
    if described is None:
        return
    if described["type"] != "Sequence":
        yield described
        return
    for one in described[inner]:
        yield from _steps(one, inner)


def _lengthens(step: Mapping[str, Any]) -> bool:
    """Tell whether a normalizer never makes a text shorter."""
    if step["type"] == "Replace":
        text = step["pattern"].get("String")
        return text is not None and len(step["content"].encode()) >= len(text.encode())
    return step["type"] in ("Prepend", "ByteLevel")


def _keeps(step: Mapping[str, Any]) -> bool:
    """Tell whether a pre-tokenizer leaves nothing out."""
    kept = step["type"] in ("ByteLevel", "Digits", "Metaspace", "Split", "Punctuation", "UnicodeScripts")
    return kept and str(step.get("behavior")).lower() != "removed"


def _knows_all(model: Mapping[str, Any], by_byte: bool) -> bool:
    """Tell whether every character gets tokens of its own, whatever it is."""
    vocabulary = model["vocab"].keys()
    if by_byte:
        from tokenizers.pre_tokenizers import ByteLevel

        return vocabulary >= set(ByteLevel.alphabet())
    if model.get("byte_fallback") and vocabulary >= BYTE_NAMES:
        return True
    return model.get("unk_token") is not None and not model.get("fuse_unk")

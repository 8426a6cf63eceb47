"""The most text that one id stands for: no text of more bytes has fewer ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from dgraph.models.tokenizer import FileTokenizer, read_tokenizer
from tests.models.folders import KINDS, TEXTS, folder, made

BOUNDED = {kind: FileTokenizer(made(kind)) for kind in ("byte level", "byte fallback", "metaspace first")}


def test_tokenizers_that_have_a_bound(tmp_path: Path) -> None:
    bounds = {}
    for kind in KINDS:
        found = read_tokenizer(folder(tmp_path / kind, made(kind)))
        assert found is not None
        bounds[kind] = found.longest_token_bytes
    assert {kind for kind, bound in bounds.items() if bound is None} == {"unigram", "word piece", "ctc"}
    longest = max(len(token) for token in made("byte level").get_vocab(with_added_tokens=False))
    assert bounds["byte level"] == 3 * longest, "NFC makes a third of a text at most"


@pytest.mark.parametrize("kind", BOUNDED)
@settings(max_examples=80, deadline=None)
@given(text=st.one_of(st.text(max_size=200), st.text("\u212aa \u0301가각ᄀ", max_size=200), st.sampled_from(TEXTS)))
def test_no_text_of_more_bytes_has_fewer_ids(kind: str, text: str) -> None:
    tokenizer = BOUNDED[kind]
    assert tokenizer.longest_token_bytes is not None
    assert len(text.encode()) <= tokenizer.longest_token_bytes * len(tokenizer.encode_part(text))


@pytest.mark.parametrize("reason", ["normalizer", "pre-tokenizer", "added token", "bytes", "unknown"])
def test_what_has_no_bound(reason: str) -> None:
    found: Any = made("byte fallback" if reason == "unknown" else "byte level")
    if reason == "normalizer":
        found.normalizer = normalizers.Strip()
    elif reason == "pre-tokenizer":
        found.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), found.pre_tokenizer])
    elif reason == "added token":
        found.add_tokens([AddedToken("<|left|>", lstrip=True)])
    else:
        described = json.loads(found.to_str())
        if reason == "bytes":
            described["model"]["vocab"]["nothing"] = described["model"]["vocab"].pop("Ā")
        else:
            described["model"]["byte_fallback"] = False
        found = type(found).from_str(json.dumps(described))
    assert FileTokenizer(found).longest_token_bytes is None

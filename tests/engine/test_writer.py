"""Text in pieces is the text of the whole, for every kind of tokenizer, and stop texts are found across pieces."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgraph.engine.io.detokenizer import Writer
from dgraph.models.tokenizer import FileTokenizer, read_tokenizer
from dgraph.runtime.sampling.stops import trim
from tests.models.folders import KINDS, folder, made


@cache
def tokenizer_of(kind: str, tidies: bool) -> FileTokenizer:
    with TemporaryDirectory() as path:
        found = read_tokenizer(folder(Path(path) / "m", made(kind), clean_up_tokenization_spaces=tidies))
    assert found is not None
    return found


@st.composite
def chunks(draw: st.DrawFn, tokenizer: FileTokenizer) -> list[list[int]]:
    """Ids in pieces: any ids, those that spell, bytes of characters, special tokens."""
    size = tokenizer._tokenizer.get_vocab_size()
    special = sorted(tokenizer._special_ids)
    spelt = ["don ' t", "do n't , I 'm . it 's ?", "日本🎉 é", "  the  quick", "aaabb a", " ' ", "x"]
    written = [tokenizer.encode_part(text) for text in spelt]
    bytes_of = [
        [id for byte in text.encode() if (id := tokenizer._tokenizer.token_to_id(f"<0x{byte:02X}>")) is not None]
        for text in ("日", "é", "a")
    ]
    pieces = st.one_of(
        st.lists(st.integers(0, size - 1), max_size=6),
        st.sampled_from(written),
        st.lists(st.sampled_from(special), max_size=3),
        st.sampled_from(bytes_of),
        st.lists(st.sampled_from([id for ids in (*bytes_of, *written) for id in ids] or [0]), max_size=6),
    )
    ids = [id for piece in draw(st.lists(pieces, max_size=12)) for id in piece]
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=len(ids))))
    return [ids[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@pytest.mark.parametrize("tidies", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_pieces_are_the_whole(kind: str, tidies: bool, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind, tidies)
    pieces = data.draw(chunks(tokenizer))
    whole = [id for piece in pieces for id in piece]
    text = tokenizer.decode(whole)
    places = st.integers(0, max(0, len(text) - 1))
    found = [text[at : at + size] for at, size in data.draw(st.lists(st.tuples(places, st.integers(1, 5)), max_size=2))]
    stops = [stop for stop in [*found, *data.draw(st.lists(st.sampled_from(["t", " ' ", "zz"]), max_size=1))] if stop]
    for chosen in ([], stops):
        least = data.draw(st.integers(0, 4)) if chosen else 0
        writer = Writer(tokenizer, chosen, least)
        said, final, read = "", 0, []
        for piece in pieces:
            said += writer.write(piece)
            read += piece
            assert final <= writer.final <= len(read)
            final = writer.final
            if writer.stopped:
                break
        said += writer.end()
        expected = trim(tokenizer, read, chosen, least)
        assert said == expected.text, "what is given out is never taken back"
        assert writer.stopped == (expected.stop is not None)
        assert writer.token_ids == expected.token_ids
        if not chosen:
            assert said == text

"""How long a request may be: an engine says what it can really have, and the longest one comes to its end."""

from __future__ import annotations

from typing import Any

import pytest

import dgraph
from dgraph.engine.build import PROMPT_ROWS
from dgraph.errors import InputError
from dgraph.families import families, resolve
from dgraph.runtime.decoding import Decoding
from tests.amounts import first_cases
from tests.engine.driven import Asked, Turns
from tests.runtime.fake import make_session


@pytest.mark.parametrize(
    ("block", "positions", "settings", "room"),
    [
        (8, 64, {}, 64),
        (8, 63, {}, 56),
        (8, 100, {}, 96),
        (32, 100, {}, 96),
        (32, 100, {"max_tokens": 100}, 96),
        (32, 100, {"max_tokens": 40}, 64),
        (8, 100, {"block_length": 24}, 96),
        (8, 100, {"block_length": 40}, 80),
        (8, 512, {"max_tokens": 64, "kv_bytes": 5 * 8 * 64}, 40),
    ],
)
def test_blocks_that_begin_at_multiples_of_their_length(
    block: int, positions: int, settings: dict[str, Any], room: int
) -> None:
    session = make_session(block, spec={"max_positions": positions}, page_size=8)
    asked = Asked((1, 2, 3), Decoding(max_new_tokens=room - 3, ignore_eos=True))
    turns = Turns(session, [asked], max_sequences=1, **settings)
    assert turns.core.max_tokens == room
    (told,) = turns.run()
    assert len(told.token_ids) == room - 3


@pytest.mark.parametrize(("positions", "rows"), [(8, 16), (64, 64)])
def test_a_step_whose_prompts_are_forwarded_whole_has_the_rows_of_the_longest(
    positions: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROMPT_ROWS, "cpu", 16)
    model = resolve(families()["llada"].random(), max_positions=positions, block_length=4)
    with dgraph.optimize(model, "dense", backend="eager").engine() as engine:
        assert engine._core.shape.most_rows == rows


def test_a_block_longer_than_the_model() -> None:
    with pytest.raises(
        InputError, match=r"block_length=32 leaves no room .* in the 20 positions of fake; give a shorter"
    ):
        Turns(make_session(32, spec={"max_positions": 20}), [])


@first_cases(1, "family", ["nemotron", "llada"])
def test_the_longest_request_of_a_model(family: str) -> None:
    """Prompt and response together take what the engine says, not one position more."""
    model = resolve(families()[family].random(), max_positions=45, block_length=10)
    made = dgraph.optimize(model, "dense", backend="eager")
    with made.engine(max_sequences=1, block_length=10) as engine:
        room = engine.max_tokens
        assert room == (40 if model.spec.aligned else 45)
        (response,) = engine.generate([[5] * 7], max_new_tokens=room - 7, ignore_eos=True, threshold=0.01)
        assert len(response.token_ids) == room - 7
        with pytest.raises(InputError, match="ask for"):
            engine.generate([[5] * 7], max_new_tokens=room - 6, ignore_eos=True)

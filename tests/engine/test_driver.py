"""Random schedules on a model without weights: every request gets what it gets alone, whoever comes and goes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgraph.engine.policies import LookAhead
from dgraph.runtime import BlockSession
from dgraph.runtime.decoding import Decoding
from tests.engine.driven import Asked, Turns, alone
from tests.runtime.fake import MASK, make_session

BLOCK = 4
LONGEST = 5 * BLOCK
PAGE_BYTES = BLOCK * 2 * (1 * 2 + 3 * 2) * 4
"""Two caches of two layers in fp32, see `FakeProgram`."""
_RANDOM = random.Random(5)
STEMS = [[_RANDOM.randrange(MASK) for _ in range(3 * BLOCK)] for _ in range(2)]
PROMPTS = [
    (*stem[:begin], *(_RANDOM.randrange(MASK) for _ in range(own)))
    for stem in STEMS
    for begin, own in ((0, 1), (3, 0), (4, 0), (4, 3), (8, 1), (8, 5), (12, 0), (12, 3))
]

RULES: list[dict[str, Any]] = [
    *({"threshold": t} for t in (0.3, 0.8, 1.0)),
    *({"steps": n} for n in (1, 2, 3, 9)),
    {"policy": "sequential"},
    {"policy": "dynamic_threshold"},
    {"policy": "factor"},
    {"policy": "relative_threshold"},
    {"policy": "hierarchical"},
]
HEAT: dict[str, list[dict[str, Any]]] = {
    "step": [{}],
    "evict": [{}],
    "sample": [{}, {"temperature": 0.7}],
    "logits": [{}, {"temperature": 1.0}, {"temperature": 0.5, "top_p": 0.9}, {"top_k": 4, "temperature": 1.0}],
}
STOPS = [(), (), ("a",), ("ab", "\n"), ("€", "c ")]
KINDS = {"step": {}, "evict": {"block_cache": "dc+"}, "sample": {}, "logits": {}}
POLICIES = ["look_ahead", "fcfs", "prefill_first", "static", LookAhead(delay=9, patience=1)]


@st.composite
def decodings(draw: st.DrawFn, kind: str) -> Decoding:
    return Decoding(
        max_new_tokens=draw(st.sampled_from([1, 3, 4, 7, 12])),
        ignore_eos=draw(st.booleans()),
        seed=draw(st.integers(0, 1)),
        stop=draw(st.sampled_from(STOPS)),
        **draw(st.sampled_from(RULES)),
        **draw(st.sampled_from(HEAT[kind])),
    )


@st.composite
def schedules(draw: st.DrawFn, kind: str) -> list[Asked]:
    one = st.builds(
        Asked,
        ids=st.sampled_from(PROMPTS),
        decoding=decodings(kind),
        index=st.integers(0, 1),
        turn=st.integers(0, 12),
        priority=st.integers(-1, 1),
        cancel=st.none() | st.none() | st.integers(0, 12),
        draft=st.booleans(),
    )
    return draw(st.lists(one, min_size=1, max_size=7))


def engines() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "max_sequences": st.integers(1, 4),
            "max_tokens": st.just(LONGEST + 12),
            "max_batched_rows": st.sampled_from([2 * BLOCK, 3 * BLOCK, 5 * BLOCK, 100]),
            "kv_bytes": st.sampled_from([8, 10, 14, 100]).map(lambda pages: pages * PAGE_BYTES),
            "policy": st.sampled_from(POLICIES),
            "pages": st.sampled_from(["block", "life"]),
            "prefix_cache": st.booleans(),
        }
    )


def made(kind: str, **changes: Any) -> BlockSession:
    return make_session(BLOCK, kind, **{**KINDS[kind], **changes})


def served(kind: str, asked: list[Asked], engine: dict[str, Any], **changes: Any) -> Turns:
    """Serve a schedule and compare each request with what it gets alone."""
    turns = Turns(made(kind, **changes), asked, **engine)
    turns.run()
    for told, one in zip(turns.told, asked, strict=True):
        wanted = alone((kind, *changes.items()), made(kind, **changes), one)
        if told.finish == "cancelled":
            ids, steps, text, _ = wanted
            assert told.token_ids == ids[: len(told.token_ids)]
            assert told.step_map == steps[: len(told.token_ids)]
            assert text.startswith(told.text)
        else:
            assert told.whole == wanted
    return turns


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_request_gets_what_it_gets_alone(kind: str, data: st.DataObject) -> None:
    served(kind, data.draw(schedules(kind)), data.draw(engines()))

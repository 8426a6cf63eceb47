"""Requests with several open blocks beside others: each gets what it gets alone, whatever happens to the others."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

from dgraph.errors import InputError
from dgraph.runtime.decoding import Decoding
from tests.amounts import drawn
from tests.compiled import compiled
from tests.engine.alone import check_as_alone
from tests.engine.driven import Asked, Turns, alone, filled
from tests.engine.test_driver import BLOCK, HEAT, LONGEST, MASK, PAGE_BYTES, PROMPTS, SCHEDULERS, STOPS, made

OPEN = 3
RULES: list[dict[str, Any]] = [
    *({"threshold": t} for t in (0.3, 0.8, 1.0)),
    {"policy": "dynamic_threshold"},
    {"policy": "relative_threshold"},
    {"steps": 2},
]


@st.composite
def decodings(draw: st.DrawFn, kind: str) -> Decoding:
    new, rule = draw(st.sampled_from([1, 4, 7, 12])), draw(st.sampled_from(RULES))
    return Decoding(
        max_new_tokens=new,
        min_tokens=min(new, draw(st.sampled_from([0, 0, 2, 6]))),
        ignore_eos=draw(st.booleans()),
        stop=draw(st.sampled_from(STOPS)),
        open_blocks=1 if "steps" in rule else draw(st.integers(1, OPEN)),
        open_at=draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        sure_at=draw(st.sampled_from([0.0, 0.5, 0.9])),
        **rule,
        **draw(st.sampled_from(HEAT[kind])),
    )


@st.composite
def schedules(draw: st.DrawFn, kind: str) -> list[Asked]:
    one = st.builds(
        Asked,
        ids=st.sampled_from(PROMPTS),
        decoding=decodings(kind),
        turn=st.integers(0, 12),
        cancel=st.none() | st.none() | st.integers(0, 12),
        draft=st.booleans(),
    )
    return [filled(draw, each, BLOCK, MASK) for each in draw(st.lists(one, min_size=1, max_size=7))]


def engines() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "max_sequences": st.integers(1, 4),
            "max_tokens": st.just(LONGEST + 12),
            "max_batched_rows": st.sampled_from([2 * OPEN * BLOCK, 40, 100]),
            "max_mixed_rows": st.sampled_from([None, 0, BLOCK, 4 * BLOCK]),
            "kv_bytes": st.sampled_from([8, 10, 14, 100]).map(lambda pages: pages * PAGE_BYTES),
            "scheduler": st.sampled_from(SCHEDULERS),
            "pages": st.sampled_from(["block", "life"]),
            "prefix_cache": st.booleans(),
            "open_blocks": st.just(OPEN),
        }
    )


def served(kind: str, asked: list[Asked], **engine: Any) -> Turns:
    turns = Turns(made(kind), asked, **engine)
    for told, one in zip(turns.run(), asked, strict=True):
        wanted = alone(("open", kind), made(kind), one, open_blocks=OPEN)
        if told.finish == "cancelled":
            assert told.token_ids == wanted.token_ids[: len(told.token_ids)]
        else:
            told.check_as(wanted)
    return turns


@pytest.mark.parametrize("kind", ["step", "sample", "logits"])
@drawn(6, 60, data=st.data())
def test_every_request_gets_what_it_gets_alone(kind: str, data: st.DataObject) -> None:
    served(kind, data.draw(schedules(kind)), **data.draw(engines()))


def test_who_gives_way_with_several_blocks_open_says_the_same_later() -> None:
    """It begins anew: of blocks that were open together some tokens were decided before their predecessors."""
    decoding = Decoding(max_new_tokens=18, threshold=0.8, ignore_eos=True, open_blocks=OPEN)
    asked = [Asked(PROMPTS[n], decoding, index=n) for n in range(4)]
    limits = {"max_sequences": 4, "max_tokens": 32, "kv_bytes": 10 * PAGE_BYTES, "scheduler": "fcfs"}
    turns = served("step", asked, open_blocks=OPEN, **limits)
    assert turns.core.totals.preempted > 0


def test_an_engine_of_a_model_gives_each_its_tokens_and_refuses_more_blocks_than_it_has() -> None:
    run = compiled("tiny_sdar", "dense")
    prompts = [[20, 30, 40, 50, 60], [*range(20, 40)]]
    decodings = [Decoding(max_new_tokens=24, threshold=0.7, open_blocks=n) for n in (4, 1)]
    check_as_alone(run, prompts, decodings, max_sequences=2, max_tokens=256, open_blocks=4)
    told = "opens up to 1 blocks of a request, got open_blocks=4"
    with run.engine(max_sequences=1, max_tokens=256) as engine, pytest.raises(InputError, match=told):
        engine.generate(prompts[:1], decodings[:1])
    with pytest.raises(InputError, match="max_batched_rows=16 is less than 8 blocks"):
        run.engine(max_sequences=1, max_batched_rows=16, max_tokens=256, open_blocks=4)

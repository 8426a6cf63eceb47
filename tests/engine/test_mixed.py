"""Prompts that steps encode, in one forward with the blocks of others: which do, what that costs, and what holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from dgraph.engine.build import PROMPT_ROWS, EngineConfig
from dgraph.engine.scheduling.jobs import MIXED_ROWS
from dgraph.errors import InputError
from dgraph.runtime import BlockSession
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.kv.store import KVStore
from dgraph.runtime.requests import Request, prefilled_positions
from dgraph.runtime.sampling.sampler import Sampler
from dgraph.testing import models
from dgraph.types.shapes import InputSpec
from tests.amounts import drawn
from tests.engine.alone import check_as_alone
from tests.engine.driven import Asked, Turns, alone
from tests.runtime.fake import FakeProgram, fake_spec, make_session

BLOCK = 4
LONG = Decoding(max_new_tokens=12, steps=4, ignore_eos=True)
SHORT = Decoding(max_new_tokens=4, steps=2, ignore_eos=True)
THREE = tuple(range(1, 13))
"""A prompt of three blocks."""


def engine(asked: list[Asked], session: BlockSession | None = None, **changes: Any) -> Turns:
    """An engine that is about to serve them."""
    return Turns(session or make_session(BLOCK), asked, **{"max_sequences": 4, "max_tokens": 64, **changes})


def check_alone(turns: Turns) -> None:
    """Serve all requests; each gets what it gets alone, with a forward of its own for its prompt."""
    for told, asked in zip(turns.run(), turns.asked, strict=True):
        wanted = alone("mixed", make_session(BLOCK), asked, max_mixed_rows=0)
        if asked.cancel is None:
            told.check_as(wanted)
        else:
            assert told.token_ids == wanted.token_ids[: len(told.token_ids)]


def calls(turns: Turns, name: str) -> list[int]:
    """Rows of every forward of a program."""
    return [len(call["input_ids"]) for call in turns.core.session.programs[name].calls]  # type: ignore[attr-defined]


def test_a_prompt_rides_in_the_step_of_the_others() -> None:
    """It is encoded with the first step of its response, so it ends as soon as it would without a prompt."""
    asked = [Asked((1,), LONG), Asked(THREE, SHORT, turn=3)]
    turns = engine(asked)
    check_alone(turns)
    assert calls(turns, "prefill") == []
    # The first request commits a block in the fourth step; the second one takes two.
    assert calls(turns, "step")[:6] == [4, 4, 4, 8 + 16, 4 + 4, 4]
    assert turns.core.totals.mixed_rows == 12
    without = engine([asked[0], Asked((1,), SHORT, turn=3)])
    check_alone(without)
    assert len(calls(turns, "step")) == len(calls(without, "step"))
    apart = engine(asked, max_mixed_rows=0)
    check_alone(apart)
    assert calls(apart, "prefill") == [12]
    assert sum(calls(apart, "step")) + 12 == sum(calls(turns, "step"))


def test_what_is_counted_of_a_request_does_not_depend_on_how_its_prompt_went() -> None:
    """Rows of its response, and rows of prompts; what is told of a first step counts as a step."""
    asked = [Asked((*range(n, n + 9),), LONG, turn=n) for n in range(4)]
    found = []
    for mixed in (0, None):
        turns = engine(asked, max_mixed_rows=mixed)
        check_alone(turns)
        counters = turns.core.scheduler.counters
        assert turns.core.totals.mixed_rows == (0 if mixed == 0 else 4 * 8)
        found.append(([one.events[-1].usage.rows for one in turns.told], counters.refresh_rows))
    assert found[0] == found[1]
    assert found[1][1] == 4 * 8
    assert counters.committed == 4 * LONG.max_new_tokens
    assert counters.rows == 4 * 8 + sum(found[1][0])


@pytest.mark.parametrize(("mixed", "alone_rows"), [(24, []), (23, [24]), (0, [24]), (None, [])])
def test_prompts_that_are_too_many_rows_together_have_a_forward_of_their_own(
    mixed: int | None, alone_rows: list[int]
) -> None:
    asked = [Asked(THREE, LONG), Asked(tuple(reversed(THREE)), LONG)]
    turns = engine(asked, max_mixed_rows=mixed)
    check_alone(turns)
    assert calls(turns, "prefill") == alone_rows


@pytest.mark.parametrize(("rows", "forwards"), [(None, [2 * BLOCK] * 3), (200, [6 * BLOCK])])
def test_no_forward_of_prompts_holds_up_the_steps_of_others_for_long(
    rows: int | None, forwards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a caller says how many rows a step has."""
    monkeypatch.setitem(PROMPT_ROWS, "cpu", 2 * BLOCK)
    turns = engine([Asked(THREE, LONG), Asked(tuple(reversed(THREE)), LONG)], max_mixed_rows=0, max_batched_rows=rows)
    check_alone(turns)
    assert calls(turns, "prefill") == forwards


def test_a_prompt_for_which_steps_have_no_room_has_a_forward_of_its_own() -> None:
    asked = [Asked((1,), LONG), Asked((2,), LONG), Asked(THREE, LONG, turn=2)]
    turns = engine(asked, max_batched_rows=5 * BLOCK)
    check_alone(turns)
    assert calls(turns, "prefill") == [12]


TWO = THREE[:8]
WAITS: dict[str, Any] = {"max_batched_rows": 5 * BLOCK, "max_sequences": 5, "scheduler": "fcfs"}
"""An engine in which a prompt of two blocks that comes in turn 3 waits: the two before it then commit a block each."""


def waiting(*others: Asked, **asked: Any) -> list[Asked]:
    """Requests of which the third one waits for rows in its first turn."""
    return [Asked((1,), LONG), Asked((2,), LONG), Asked(TWO, LONG, turn=3, **asked), *others]


def test_a_prompt_that_waits_for_rows_is_encoded_once() -> None:
    turns = engine(waiting(), **WAITS)
    check_alone(turns)
    assert calls(turns, "step")[:6] == [8, 8, 8, 16, 8 + 12, 12]
    assert (calls(turns, "prefill"), turns.core.totals.mixed_rows) == ([], 8)


def test_nobody_finds_a_prompt_before_it_is_encoded() -> None:
    """One who comes while it waits has a prompt of its own, and one who comes then shares it."""
    turns = engine(waiting(*(Asked(TWO, LONG, turn=turn) for turn in (4, 8))), **WAITS)
    check_alone(turns)
    assert [told.events[-1].usage.cached_tokens for told in turns.told] == [0, 0, 0, 0, 8]


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_request_is_cancelled_while_its_prompt_rides(after: int) -> None:
    """While it waits, while its step runs, and after it: pages come back, and the others do not notice."""
    follows = Asked(TWO[::-1], LONG, turn=3 + after)
    for changes in ({}, WAITS, {**WAITS, "max_sequences": 3}):
        check_alone(engine(waiting(follows, cancel=after), **changes))


def test_first_steps_share_the_room_for_prompts_until_they_are_launched() -> None:
    session = make_session(BLOCK)
    shape = replace(session.shape(3, 24, BLOCK, fixed=False), most_rows=100, mixed=12)
    batch = session.batch([LONG], shape)
    batch.admit([0, 1, 2], [Request(prompt, LONG) for prompt in (TWO, TWO[::-1], (1,))])
    assert batch.prefilling == [0, 1]
    assert batch.mix([0])
    assert not batch.mix([1])
    assert batch.prefilling == [1]
    batch.order([2, 0])
    assert batch.turn().rows.tolist() == [12, 0, 4]
    assert batch.mix([1])
    assert not batch.prefilling
    batch.order([1, 2, 0])
    assert batch.turn().rows.tolist() == [4, 12, 4]
    batch.clear()
    assert session.kv.free_pages == session.kv.pages


@pytest.mark.parametrize("kind", ["step", "evict", "sample", "logits"])
@drawn(8, 30, data=st.data())
def test_any_room_for_prompts_gives_the_same_tokens(kind: str, data: st.DataObject) -> None:
    """Rows that wait are neither lost nor written twice, whatever the budgets, and pages may be smaller than blocks."""
    one = st.builds(
        Asked,
        ids=st.lists(st.integers(0, 20), min_size=1, max_size=22).map(tuple),
        decoding=st.builds(Decoding, max_new_tokens=st.integers(1, 9), threshold=st.sampled_from([0.3, 0.9])),
        turn=st.integers(0, 9),
        cancel=st.none() | st.none() | st.integers(0, 6),
    )
    asked = data.draw(st.lists(one, min_size=1, max_size=7))
    page = data.draw(st.sampled_from([2, 4, 8]))
    turns = Turns(
        make_session(BLOCK, kind, page_size=page),
        asked,
        max_sequences=data.draw(st.integers(1, 5)),
        max_tokens=32,
        max_batched_rows=data.draw(st.sampled_from([8, 12, 13, 24, 200])),
        max_mixed_rows=data.draw(st.sampled_from([0, 3, 4, 9, 16, 200])),
        prefix_cache=data.draw(st.booleans()),
    )
    for told, each in zip(turns.run(), asked, strict=True):
        wanted = alone(("mixed", kind), make_session(BLOCK, kind), each, max_mixed_rows=0)
        if told.finish == "cancelled":
            assert told.token_ids == wanted.token_ids[: len(told.token_ids)]
        else:
            told.check_as(wanted)


def test_under_guidance_the_twin_rides_too() -> None:
    decoding = Decoding(max_new_tokens=6, threshold=0.6, sampler=Sampler(cfg_scale=1.5))
    asked = [Asked(THREE, decoding), Asked(THREE[3:], decoding, index=1, turn=2)]
    turns = engine(asked, make_session(BLOCK, "logits"))
    for told, each in zip(turns.run(), asked, strict=True):
        told.check_as(alone("guided", make_session(BLOCK, "logits"), each, max_mixed_rows=0))
    assert calls(turns, "prefill") == []


# -- which sessions do so ----------------------------------------------------------------------------------------------

RIDES = [
    *(("sdar", "dense"), ("sdar", "focus"), ("sdar", "dyllm"), ("llada2", "dense"), ("sdar_moe", "focus")),
    *(("fast_dllm_v2", "dense"), ("fast_dllm_v2", "focus"), ("nemotron", "dense"), ("nemotron", "focus")),  # two modes
]
APART: list[tuple[str, str, dict[str, Any]]] = [
    ("sdar", "dllm_serve", {}),  # keys of the prompt are packed
    ("sdar", "maskkv", {"pairs": 6}),
    ("fast_dllm_v2", "dllm_serve", {}),
]


def requests(tiny: Any, count: int = 4) -> tuple[list[list[int]], list[Decoding]]:
    block = tiny.model.spec.block_length
    ids = [[4 + (7 * n + at) % 40 for at in range(2 * block + 3 * n)] for n in range(count)]
    return ids, [Decoding(max_new_tokens=block + 3, threshold=0.3, ignore_eos=True)] * count


@pytest.mark.parametrize(("family", "recipe"), RIDES)
def test_models_whose_steps_encode_prompts(family: str, recipe: str) -> None:
    (tiny,) = models(None, family)
    run = tiny.optimized(recipe)
    assert run._session.mixes
    ids, decodings = requests(tiny)
    with run.engine(max_sequences=3) as engine:
        alike = [one.token_ids for one in engine.generate(ids, decodings)]
        spec = tiny.model.spec
        prompts = (
            prefilled_positions(Request(p, d), spec.block_length, spec) for p, d in zip(ids, decodings, strict=True)
        )
        assert engine.stats.mixed_rows == sum(prompts)
        assert "prefill" not in engine.stats.rows
    check_as_alone(run, ids, decodings, max_sequences=3, max_mixed_rows=0)
    assert alike == [run.generate(input_ids=[p], decoding=d).token_ids[0] for p, d in zip(ids, decodings, strict=True)]


@pytest.mark.parametrize(
    ("family", "policy"),
    [("nemotron", "autoregressive"), ("nemotron", "self_speculation"), ("fast_dllm_v2", "fast_dllm_v2")],
)
def test_of_two_modes_prompts_ride_under_their_own_rules(family: str, policy: str) -> None:
    """Rows of prompts are encoded, whatever the steps of others do beside them: each gets what it gets alone."""
    (tiny,) = models(None, family)
    run, block = tiny.optimized("dense"), tiny.model.spec.block_length
    ids, _ = requests(tiny, 5)
    decodings = [Decoding(max_new_tokens=2 * block + n, policy=policy, ignore_eos=True) for n in range(len(ids))]
    check_as_alone(run, ids, decodings, max_sequences=2)
    with run.engine(max_sequences=2) as engine:
        engine.generate(ids, decodings)
        assert engine.stats.mixed_rows > 0
        assert "prefill" not in engine.stats.rows


@pytest.mark.parametrize(("family", "recipe", "options"), APART)
def test_models_whose_prompts_have_a_forward_of_their_own(family: str, recipe: str, options: dict[str, Any]) -> None:
    (tiny,) = models(None, family)
    run = tiny.optimized(recipe, **options)
    assert not run._session.mixes
    ids, decodings = requests(tiny)
    with run.engine(max_sequences=3, max_mixed_rows=64) as engine:
        engine.generate(ids, decodings)
        assert (engine.stats.mixed_rows, engine.stats.rows["prefill"] > 0) == (0, True)
    check_as_alone(run, ids, decodings, max_sequences=3, max_mixed_rows=64)


@pytest.mark.parametrize(
    "kept",
    [
        InputSpec("sums", torch.float32, ("pages", "page"), reset="response"),
        InputSpec("seen", torch.float32, ("pages_6", "page")),
    ],
    ids=["a response", "a window"],
)
def test_what_lasts_or_is_let_go_keeps_prompts_apart(kept: InputSpec) -> None:
    """What a step keeps of a response, and a ring of pages, know no rows of a prompt among those of a step."""
    programs = {"prefill": FakeProgram("prefill"), "step": FakeProgram("step")}
    programs["step"].inputs |= {kept.name: kept}
    session = BlockSession(fake_spec(BLOCK), programs)
    assert not session.mixes
    turns = engine([Asked(THREE, SHORT)], session)
    check_alone(turns)
    assert calls(turns, "prefill") == [12]


def session_of_a_ring() -> BlockSession:
    """A session whose steps keep something that each row reads at its own position alone."""
    kept = InputSpec("seen", torch.float32, ("pages_1", "page"))
    programs = {"prefill": FakeProgram("prefill"), "step": FakeProgram("step")}
    programs["step"].inputs |= {kept.name: kept}
    return BlockSession(fake_spec(BLOCK), programs)


RIDING = [
    *(Asked((1,), LONG), Asked(THREE, LONG, turn=2), Asked(THREE[:9], SHORT, turn=2)),
    Asked(tuple(reversed(THREE)), SHORT, turn=6),
]


def test_rows_of_a_prompt_have_places_of_their_own_in_a_ring() -> None:
    """A sequence gets more of them for the step that encodes its prompt, and gives them back after it."""
    session = session_of_a_ring()
    assert session.mixes
    turns = engine(RIDING, session)
    (ring,) = session.kv.rings.values()
    assert ring.pages == 4 * 2 + ring.pages_for(turns.core.shape.mixed)
    check_alone(turns)
    assert calls(turns, "prefill") == []
    columns = set[int]()
    for call in session.programs["step"].calls:  # type: ignore[attr-defined]
        cu_rows, rows = call["cu_rows"], torch.arange(len(call["positions"]))
        sequence = torch.searchsorted(cu_rows[1:].contiguous(), rows.int(), right=True)
        page = call["page_table_1"][sequence, call["positions"] // BLOCK]
        places = set(zip(page.tolist(), (call["positions"] % BLOCK).tolist(), strict=True))
        assert len(places) == len(rows)
        columns |= {len(set(row.tolist())) for row in call["page_table_1"][: len(cu_rows) - 1]}
    assert max(columns) == 5  # three blocks of the prompt, and two
    assert ring.free_pages == ring.pages


def test_a_prompt_for_which_a_ring_has_no_places_has_a_forward_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of_a_ring()
    turns = engine(RIDING, session)
    (ring,) = session.kv.rings.values()
    widen = KVStore.widen

    def without_room(kv: KVStore, rows: Mapping[int, int]) -> bool:
        held, ring._free = ring._free, []
        found = widen(kv, rows)
        ring._free += held
        return found

    monkeypatch.setattr(KVStore, "widen", without_room)
    check_alone(turns)
    assert sorted(calls(turns, "prefill")) == [12, 20]
    assert ring.free_pages == ring.pages


def test_prompts_are_shared_though_contexts_are_in_a_ring() -> None:
    (tiny,) = models(None, "sdar")
    run = tiny.optimized("dyllm")
    ids = [[4 + (7 * at) % 40 for at in range(4 * tiny.model.spec.block_length + more)] for more in (1, 3)]
    decoding = Decoding(max_new_tokens=9, threshold=0.3, ignore_eos=True)
    with run.engine(max_sequences=1) as engine:
        found = [one.token_ids for one in engine.generate(ids, decoding)]
        assert engine.stats.prefix_found == 4 * tiny.model.spec.block_length
    assert found == [run.generate(input_ids=[each], decoding=decoding).token_ids[0] for each in ids]


def test_a_bidirectional_model_forwards_a_prompt_with_its_response() -> None:
    """Its first step is part of the forward that all share, whatever the setting."""
    (tiny,) = models(None, "llada")
    run = tiny.optimized("fast_dllm")
    assert not run._session.mixes
    ids, decodings = requests(tiny)
    with run.engine(max_sequences=4) as engine:
        engine.generate(ids, decodings)
        assert (engine.stats.mixed_rows, list(engine.stats.rows)) == (0, ["step"])
    check_as_alone(run, ids, decodings, max_sequences=4)


@pytest.mark.parametrize("wrong", [-1, 2.5, True, "many"])
def test_wrong_values(wrong: Any) -> None:
    with pytest.raises(InputError, match=r"max_mixed_rows must be a whole number, at least 0 \(every prompt .*\), got"):
        EngineConfig(max_mixed_rows=wrong)


def test_there_is_no_more_room_for_prompts_than_steps_leave() -> None:
    rooms = {rows: engine([], max_batched_rows=rows).core.shape.mixed for rows in (8, 12, 100, 5000)}
    assert rooms == {8: 0, 12: 4, 100: 92, 5000: MIXED_ROWS}
    assert engine([], max_mixed_rows=7).core.shape.mixed == 7

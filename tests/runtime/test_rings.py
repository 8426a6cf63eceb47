"""Keys behind a window give their place to later ones: what a ring of pages holds, and whole generations over it."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dgraph
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.engine.memory.pools import PoolSizes
from dgraph.engine.memory.profile import profile
from dgraph.errors import DgraphError, InputError, PoolFull
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.kv.store import KVStore, Ring, ring_size
from dgraph.runtime.policies import Renoise
from dgraph.runtime.state.packed_rows import prefill_chunk
from dgraph.types.shapes import InputSpec
from tests.amounts import every_value
from tests.engine.driven import Asked, Turns, alone

BLOCK, RULE = 8, Renoise(1.0, confidence=0.2, steps=4)
CACHES = (
    InputSpec("k_cache_0", torch.float32, ("pages_6", "page", 2)),
    InputSpec("k_cache_1", torch.float32, ("pages", "page", 3)),
    InputSpec("k_cache_2", torch.float32, ("pages_6", "page", 2)),
)


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, 60, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@functools.cache
def optimized(window: int = 6, rings: bool = True) -> CompiledModel:
    """The tiny model of the family with another window, op by op."""
    from dgraph.models.diffusion_gemma import family

    made = replace(family, tiny={**family.tiny, "sliding_window": window}).random()
    made = replace(made, spec=replace(made.spec, eos_ids=()))
    return dgraph.optimize(made, "dense", backend="eager", rings=rings)


# -- the pages -----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_row_finds_a_position_overwritten_that_it_sees(data: st.DataObject) -> None:
    """A prompt in parts, then canvases that are written again and again, over any window and page."""
    window, page = data.draw(st.integers(1, 30)), data.draw(st.sampled_from([1, 3, 4, 8]))
    block, part = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 40))
    prompt, canvases = data.draw(st.integers(0, 90)), data.draw(st.integers(1, 6))
    whole = prompt + canvases * block
    kv = KVStore([InputSpec("k", torch.float32, (f"pages_{window}", "page"))], page_size=page)
    (handle,) = kv.allocate([whole], rings=[kv.ring_pages(whole, max(block, min(part, prompt)))])
    written: dict[tuple[int, int], int] = {}

    def forward(begin: int, end: int) -> None:
        """All rows are written before any is read, and the first of them sees back the farthest."""
        table = kv.page_tables([handle], -(-whole // page))[f"page_table_{window}"][0].tolist()
        written.update({(table[p // page], p % page): p for p in range(begin, end)})
        for p in range(max(0, begin - window + 1), end):
            assert written[table[p // page], p % page] == p

    begun = 0
    while begun < prompt:
        ((first, begun),) = prefill_chunk([(begun, prompt)], 1, 1 << 20, part)
        forward(first, begun)
    kv.settle(handle, prompt, block)
    assert len(kv.rings[window].owned(handle)) <= ring_size(window, block, page)
    for canvas in range(canvases):
        for _ in range(2):
            forward(prompt + canvas * block, prompt + (canvas + 1) * block)
    kv.free(handle)
    assert kv.rings[window].free_pages == kv.rings[window].pages


def test_a_window_has_pages_and_a_table_of_its_own() -> None:
    kv = KVStore(CACHES, page_size=4)
    assert (list(kv.rings), isinstance(kv.rings[6], Ring), kv.rings[6].rings) == ([6], True, {})
    assert {spec.name for spec in kv.declared} == {"k_cache_0", "k_cache_1", "k_cache_2"}
    assert kv.ring_pages(100, 8) == (4,) == (ring_size(6, 8, 4),)
    assert kv.ring_pages(5, 8) == (2,)
    first, second = kv.allocate([20, 7], rings=[(4,), (2,)])
    assert (kv.pages, kv.rings[6].pages) == (7, 6)
    assert {name: len(cache) for name, cache in kv.tensors().items()} == {
        "k_cache_0": 6,
        "k_cache_1": 7,
        "k_cache_2": 6,
    }
    tables = kv.page_tables([first, second], columns=6)
    assert tables["page_table"].tolist() == [[0, 1, 2, 3, 4, -1], [5, 6, -1, -1, -1, -1]]
    assert tables["page_table_6"].tolist() == [[0, 1, 2, 3, 0, 1], [4, 5, 4, 5, 4, 5]]
    assert kv.bytes == 4 * 4 * (7 * 3 + 6 * 4) == kv.pool_bytes(7, (6,))
    assert kv.part(8) == 8
    assert kv.part(4) == 12
    kv.clear(first)
    kv.free(first)
    assert (kv.free_pages, kv.rings[6].free_pages) == (5, 4)
    with pytest.raises(DgraphError, match="'k_cache_0' keeps a window of its positions alone"):
        kv.gather("k_cache_0", second)
    assert kv.gather("k_cache_1", second).shape == (8, 3)


def test_without_windows_there_is_one_group() -> None:
    kv = KVStore(CACHES[1:2], page_size=4)
    (one,) = kv.allocate([9])
    assert (kv.rings, kv.part(8), kv.ring_pages(9, 9)) == ({}, None, ())
    assert kv.page_tables([one]).keys() == {"page_table"}


def test_a_ring_that_is_full_takes_nothing_of_the_others() -> None:
    kv = KVStore(CACHES, page_size=4)
    kv.rings[6].limit = 3
    with pytest.raises(PoolFull, match="4 pages of 4 positions are needed, 0 of 3 are free"):
        kv.allocate([20], rings=[(4,)])
    assert kv.free_pages == kv.pages
    kv.allocate([20], rings=[(3,)])


def test_a_cache_of_a_window_is_not_reset_with_a_response() -> None:
    with pytest.raises(InputError, match="resets with 'never' or 'block', got 'response'"):
        InputSpec("seen_cache", torch.float32, ("pages_6", "page"), reset="response")


# -- generations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [24, *(pytest.param(n, marks=pytest.mark.release) for n in (1, 6))])
def test_tokens_equal_those_with_every_key(window: int) -> None:
    """Prompts of many windows, prefilled in parts, in one batch; the pages of a ring are few, and come back."""
    prompts = [ids(count, count) for count in (3, 90, 41, 64)]
    asked = {"policy": RULE, "max_new_tokens": 37, "seed": 3}
    wanted = optimized(window, rings=False).generate(input_ids=prompts, **asked)
    made = optimized(window)
    found = made.generate(input_ids=prompts, **asked)
    assert found.token_ids == wanted.token_ids
    assert len({tuple(tokens) for tokens in found.token_ids}) == len(prompts)
    kv = made._session.kv
    ring = kv.rings[window]
    assert all(each.free_pages == each.pages for each in (kv, *kv.rings.values()))
    part = kv.part(BLOCK)
    assert part is not None
    assert ring.pages <= len(prompts) * ring_size(window, part, kv.page_size)
    assert kv.pages >= sum(-(-(len(prompt) + 37) // kv.page_size) for prompt in prompts)


def test_a_ring_does_not_grow_with_the_sequence() -> None:
    """Its peak is ceil((part + window - 1) / page) pages in a prefill, and no more for four times the length."""
    made = optimized(24)
    kv = made._session.kv
    peaks = []
    for count in (60, 240):
        kv.unlimited()
        made.generate(input_ids=[ids(count, 1)], policy=RULE, max_new_tokens=9, seed=1)
        peaks.append(kv.rings[24].pages)
    assert peaks == [-(-(48 + 23) // kv.page_size)] * 2
    kv.unlimited()


def asked(count: int, new: int, turn: int, **more: Any) -> Asked:
    return Asked(tuple(ids(count, count)), Decoding(policy=RULE, max_new_tokens=new, seed=1), turn=turn, **more)


@every_value(("window", [6, 24]), ("pages", ["block", "life"]))
def test_requests_of_an_engine_get_what_they_get_alone(
    window: int, pages: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few pages: the youngest gives way and comes back; another one is cancelled."""
    made, every = optimized(window), optimized(window, rings=False)
    kv = made._session.kv
    schedule = [
        asked(60, 30, 0),
        asked(5, 60, 0),
        asked(90, 20, 1, cancel=9),
        asked(17, 44, 2),
        asked(70, 25, 5),
        asked(33, 12, 5, draft=True),
    ]
    own = 3 * ring_size(1, BLOCK, kv.page_size)
    rings = tuple({1: own, window: 2 * ring_size(window, kv.part(BLOCK) or 0, kv.page_size)}[each] for each in kv.rings)
    few = PoolSizes(18 if pages == "block" else 26, rings)
    monkeypatch.setattr("dgraph.engine.build.pool_sizes", lambda *given: few)
    turns = Turns(made._session, schedule, prepare=made._prepare, max_sequences=3, max_tokens=160, pages=pages)
    turns.run()
    assert turns.most_running > 1
    assert (turns.core.totals.preempted > 0) == (pages == "block")
    monkeypatch.undo()
    for told, one in zip(turns.told, schedule, strict=True):
        wanted = alone(("rings", window), every._session, one, prepare=every._prepare, max_tokens=160)
        if told.finish == "cancelled":
            assert told.token_ids == wanted.token_ids[: len(told.token_ids)]
        else:
            told.check_as(wanted)


@pytest.mark.parametrize("room", [1, 2])
def test_admission_counts_the_pages_of_every_ring(room: int) -> None:
    """Of two requests one waits until a ring has room for its prompt, though other pages are free."""
    made = optimized(24)
    kv = made._session.kv
    first, later = (ring_size(24, rows, kv.page_size) for rows in (48, BLOCK))
    schedule = [asked(90, 41, 0), asked(90, 41, 0)]
    turns = Turns(made._session, schedule, prepare=made._prepare, max_sequences=room, max_tokens=160)
    core = turns.core
    pages = {24: first + (room - 1) * later, 1: room * ring_size(1, BLOCK, kv.page_size)}
    assert core.scheduler.budgets.rings == core.free_rings == tuple(pages[window] for window in kv.rings)
    turns.run()
    assert turns.most_running == room
    assert core.scheduler.counters.requeued == 0


def test_a_pool_that_holds_no_ring_is_refused() -> None:
    with pytest.raises(InputError, match=r"does not hold one page of 8 positions, .*, beside [0-9]+ for layers with"):
        Turns(optimized(24)._session, [], max_sequences=1, kv_bytes=1000)


# -- what it excludes ----------------------------------------------------------------------------------------------


def test_a_sequence_gets_more_places_for_a_first_call_and_gives_them_back() -> None:
    kv = KVStore([InputSpec("seen", torch.float32, ("pages_1", "page"))], page_size=4)
    first, second = kv.allocate([40, 40], rings=[kv.ring_pages(40, 8)] * 2)
    ring = kv.rings[1]
    ring.limit = 7
    assert kv.widen({first: 20})
    table = kv.page_tables([first, second], 10)["page_table_1"].tolist()
    assert [len(set(row)) for row in table] == [5, 2]
    assert table[0] == table[0][:5] * 2
    assert not kv.widen({first: 20, second: 12})
    assert kv.page_tables([first, second], 10)["page_table_1"].tolist() == table
    kv.settle(first, 12, 8)
    (after,) = kv.page_tables([first], 10)["page_table_1"].tolist()
    assert (after[3:5], len(set(after))) == (table[0][3:5], 2)  # the positions from 12 on stay where they are
    assert kv.widen({second: 12})
    for sequence in (first, second):
        kv.free(sequence)
    assert ring.free_pages == ring.pages == 7


def test_what_needs_every_key_is_refused_by_name() -> None:
    made = optimized(6)
    with pytest.raises(InputError, match="layers with a window of 6 positions let those behind it go"):
        made.generate(input_ids=[[1]], policy=RULE, max_new_tokens=8, keep_kv=True)
    with pytest.raises(InputError, match="window of 6 positions let keys behind it go, so prompts cannot share theirs"):
        Turns(made._session, [], prefix_cache=True)
    assert Turns(made._session, []).core.prefix is None
    made._session.give_back()


def test_the_profile_counts_them() -> None:
    few, every = (profile(optimized(6, rings=rings), rows=64).kv_cost for rings in (True, False))
    layers = 2 * 2 * optimized().spec.kv_heads * optimized().spec.head_dim * 4  # keys and values of two layers, fp32
    own = (1, optimized().spec.hidden * 4, 1)
    assert few.rings == (own, (6, layers, ring_size(6, BLOCK, 8)))
    assert few.position + layers == every.position
    assert every.rings == (own,)
    for length in (4, 16, 200):
        pages = -(-(length + BLOCK) // 8)
        behind = (pages - min(pages, 2)) * 8 * layers
        assert every.sequence(length, 4) - few.sequence(length, 4) == behind
    assert type(few).from_json(few.to_json()) == few

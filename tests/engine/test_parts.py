"""The parts of an engine alone: text that grows, prompts that are found again, transcripts, reports, pages, rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dgraph.engine.io.detokenizer import BROKEN, Writer
from dgraph.engine.memory.prefix_cache import PrefixCache
from dgraph.engine.scheduling.jobs import grant
from dgraph.errors import PoolFull
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.kv.store import NO_PAGE, KVStore
from dgraph.runtime.loop.step_report import Report
from dgraph.runtime.loop.transcript import Transcripts
from dgraph.runtime.policies import PolicyMix
from dgraph.runtime.requests import Request, Stops
from dgraph.runtime.sampling.stops import trim
from dgraph.runtime.state.base import OUT
from dgraph.runtime.state.report import REPORT
from tests.engine.driven import PIECES, Letters
from tests.runtime.fake import caches, make_session

EURO = [21, 22, 23]
"""The three bytes of one character."""

# -- text -------------------------------------------------------------------------------------------------------------

TOKENS = st.integers(0, len(PIECES) - 1)
STOPS = st.lists(st.sampled_from(["a", "ab", "bab", "é", "€a", " c", "\n", BROKEN, "z€"]), max_size=3)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.lists(TOKENS, min_size=1, max_size=4), max_size=8), STOPS, st.sampled_from([0, 0, 1, 2, 5]))
@example([[21], [22], [23, 0]], ["€a"], 0)
@example([[0], [1], [0]], ["ab", "bab"], 0)
@example([[0], [1], [0, 1]], ["ab"], 1)
def test_text_and_tokens_of_events_are_those_of_the_response(
    pieces: list[list[int]], stops: list[str], least: int
) -> None:
    writer, text, final = Writer(Letters(), stops, least), "", 0
    ids = [token for piece in pieces for token in piece]
    whole = trim(Letters(), ids, stops, least)
    assert len(whole.token_ids) >= min(least, len(ids))
    said: list[int] = []
    for piece in pieces:
        said += piece
        text += writer.write(piece)
        assert final <= writer.final <= len(said), "nothing is taken back"
        final = writer.final
        assert whole.token_ids[:final] == said[:final]
        assert whole.text.startswith(text)
        found = trim(Letters(), said, [stop for stop in stops if BROKEN not in stop], least).stop
        assert writer.stopped or found is None, "it ends as soon as the stop text is there"
        if writer.stopped:
            break
    text += writer.end()
    assert text == whole.text
    assert writer.token_ids == whole.token_ids
    assert writer.final == len(whole.token_ids)
    assert writer.stopped == (whole.stop is not None)


def test_half_a_character_and_what_may_be_a_stop_text_are_held_back() -> None:
    writer = Writer(Letters(), ["€b"])
    assert [writer.write([id]) for id in (0, *EURO, 0)] == ["a", "", "", "", "€a"]
    assert writer.final == 5
    assert [writer.write([id]) for id in EURO] == ["", "", ""]
    assert writer.final == 5, "the tokens of what is held back are, too"
    assert writer.write([1, 2]) == ""
    assert (writer.stopped, writer.token_ids, writer.end()) == (True, [0, *EURO, 0], "")
    assert writer.write([3]) == ""


def test_without_stop_texts_every_token_is_final_at_once() -> None:
    writer = Writer(Letters(), [])
    assert (writer.write([21]), writer.final) == ("", 1)
    assert writer.end() == BROKEN
    silent = Writer(None, ["a"])
    assert (silent.write([0, 1]), silent.final, silent.end()) == ("", 2, "")


class Spaced:
    """A tokenizer that joins words by spaces: a word alone has none before it."""

    def decode(self, ids: Sequence[int], /) -> str:
        return " ".join(chr(ord("a") + id) for id in ids)


def test_pieces_of_a_text_join_where_neighbours_matter() -> None:
    writer = Writer(Spaced(), ["c d"])
    assert "".join(writer.write([id]) for id in (0, 1, 2)) + writer.end() == "a b c"
    writer = Writer(Spaced(), ["c d"])
    assert "".join(writer.write([id]) for id in (0, 1, 2, 3)) == "a b "
    assert writer.stopped


# -- prompts that are found again -------------------------------------------------------------------------------------


def store(pages: int, page: int = 4) -> KVStore:
    found = KVStore(caches((1, 2)), page_size=page)
    found.limit = pages
    found.reserve(pages)
    return found


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.sampled_from([(2, 4), (4, 4), (8, 4), (6, 4)]), st.integers(0, 10_000))
def test_what_is_shared_was_written_for_the_same_tokens(sizes: tuple[int, int], seed: int) -> None:
    """Every block has keys of its own; a page may begin or end within one."""
    page, block = sizes
    draw = random.Random(seed)
    kv = store(30, page)
    prefix = PrefixCache(kv, block)
    kv.reclaim = prefix.reclaim
    written: dict[int, list[tuple[int, ...]]] = {}  # of each page, the tokens up to the end of each position's block
    live: list[int] = []
    for _ in range(25):
        if live and draw.random() < 0.4:
            kv.free(live.pop(draw.randrange(len(live))))
        ids = [draw.randrange(2) for _ in range(draw.randint(1, 24))]
        shared = prefix.look_up(ids)
        assert len(shared) * page % block == 0
        assert len(shared) * page <= len(ids)
        keys = [tuple(ids[: (at // block + 1) * block]) for at in range(len(ids))]
        for number, one in enumerate(shared):
            assert written[one] == keys[number * page : (number + 1) * page]
        kept = [one for part in prefix._used for one in part.pages]
        assert prefix.spare == sum(kv.owners(one) == 1 for one in kept)
        free = kv.free_pages + prefix.spare
        assert all(kv.owners(one) >= 1 for one in shared)
        try:
            (handle,) = kv.allocate([len(ids)], shared=[shared])
        except PoolFull:
            assert kv.pages_for(len(ids)) > free, "what nobody else uses was dropped"
            continue
        live.append(handle)
        for number, one in enumerate(kv.owned(handle)):
            if number >= len(shared):
                assert kv.owners(one) == 1
                written[one] = keys[number * page : (number + 1) * page]
        prefix.add(ids, kv.owned(handle))
    prefix.forget(ids)
    assert len(prefix.look_up(ids)) == 0
    for handle in live:
        kv.free(handle)
    assert prefix.spare == len(prefix) == kv.pages - kv.free_pages
    prefix.clear()
    assert (len(prefix), kv.free_pages) == (0, kv.pages)


def test_the_least_recently_used_goes_first_and_the_end_of_a_prompt_before_its_beginning() -> None:
    kv = store(6)
    prefix = PrefixCache(kv, 4)
    kv.reclaim = prefix.reclaim
    for ids in ([1] * 8, [2] * 8):
        (handle,) = kv.allocate([8])
        prefix.add(ids, kv.owned(handle))
        kv.free(handle)
    assert (kv.free_pages, prefix.spare) == (2, 4)
    assert len(prefix.look_up([1] * 8)) == 2
    (handle,) = kv.allocate([12])
    assert (len(prefix.look_up([1] * 8)), len(prefix.look_up([2] * 8))) == (2, 1)
    assert (prefix.asked, prefix.found) == (24, 20)


# -- transcripts and reports ------------------------------------------------------------------------------------------


def report(**numbers: Any) -> Report:
    shown = torch.tensor(numbers.pop("shown")) if "shown" in numbers else torch.full((2, 4), -1)
    sure = torch.tensor(numbers.pop("confidence", [[0.5] * 4] * 2)).view(torch.int32)
    columns = [torch.tensor(numbers.get(name, [0, 0])) for name in REPORT]
    return Report(torch.cat([torch.stack(columns, 1), shown, sure, torch.ones_like(shown)], 1).numpy())


def test_a_transcript_knows_when_each_token_came() -> None:
    script = Transcripts(2, 12, 4)
    script.begin([0, 1], [Request([1], Decoding())] * 2)
    sure = [[0.0, 0.25, 0.0, 0.1], [1.0] * 4]
    first = report(counter=[1, 1], shown_start=[0, 4], shown=[[-1, 5, -1, 6], [7, 7, 7, 7]], confidence=sure)
    script.write(first, [0, 1])
    assert script.confidence(0, 1, 4) == [0.25, 0.0, pytest.approx(0.1)]
    script.write(report(counter=[2, 2], shown_start=[0, 8], shown=[[4, 5, -1, 6], [8, -1, -1, -1]]), [0])
    assert script.tokens(0, 0, 4) == [4, 5, -1, 6]
    assert script.steps(0, 0, 2) == [2, 1]
    assert script.tokens(1, 4, 12) == [7, 7, 7, 7, -1, -1, -1, -1], "only of the slots that were named"
    script.write(report(counter=[3, 0], shown_start=[0, 0], shown=[[4, 9, 3, 6], [0] * 4]), [0])
    assert script.steps(0, 0, 4) == [2, 3, 3, 1], "a token that was replaced is of the step that replaced it"
    assert script.response(0, 0, 4, Stops({3: 0})) == [4, 9]
    script.begin([0], [Request([1], Decoding())])
    assert script.tokens(0, 0, 12) == [-1] * 12


def test_a_report_has_names() -> None:
    first = Report(torch.arange(2 * (len(REPORT) + 3 * 4)).view(2, -1).numpy())
    assert first.rows.tolist() == [0, len(REPORT) + 12]
    assert first.shown.shape == first.confidence.shape == first.kept.shape == (2, 4)
    with pytest.raises(AttributeError, match="colour"):
        _ = first.colour


# -- pages ------------------------------------------------------------------------------------------------------------


def test_a_pool_that_may_not_grow() -> None:
    kv = store(4)
    first, second = kv.allocate([8, 4])
    assert kv.extend(second, 8)
    assert not kv.extend(second, 7), "it has them"
    before = kv.owned(second)
    with pytest.raises(PoolFull, match="1 pages of 4 positions are needed, 0 of 4 are free"):
        kv.extend(second, 12)
    with pytest.raises(PoolFull):
        kv.allocate([1], shared=[[]])
    with pytest.raises(PoolFull):
        kv.allocate([12], shared=[kv.owned(first)])
    assert [kv.owners(page) for page in kv.owned(first)] == [1, 1], "nothing has changed"
    assert kv.owned(second) == before
    kv.free(first)
    kv.unlimited()
    assert kv.extend(second, 24)
    assert kv.pages == 6
    kv.free(second)
    kv.reserve(3)
    assert (kv.pages, kv.free_pages) == (3, 3), "whoever asks for less gets less, where nobody owns any"


def test_a_shared_page_is_free_when_all_have_dropped_it() -> None:
    kv = store(5)
    (first,) = kv.allocate([8])
    (second,) = kv.allocate([12], shared=[kv.owned(first)])
    assert kv.owned(second)[:2] == kv.owned(first)
    kv.tensors()["k_cache_0"].fill_(float("nan"))
    kv.clear(second)
    held = kv.tensors()["k_cache_0"].isnan().flatten(1).any(dim=1)
    assert not held[kv.owned(second)[2]]
    assert held[list(kv.owned(first))].all(), "what another one owns is left alone"
    kv.free(first)
    assert kv.free_pages == 2
    kv.release(second, 8)
    assert kv.owned(second)[:2] == (NO_PAGE, NO_PAGE)
    kv.free(second)
    assert kv.free_pages == 5


# -- rows, and rules that join ----------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_the_device_gives_out_rows_as_the_scheduler_expects(data: st.DataObject) -> None:
    slots, block = 5, 4
    most = data.draw(st.integers(1, slots * 2 * block))
    session = make_session(block)
    config, _ = session.batch_config([Decoding()], block)
    shape = replace(session.shape(slots, 16, block, False), most_rows=most)
    batch = session.batch([Decoding()], shape)
    state = batch.transition.state
    state.pending = torch.tensor(
        data.draw(st.lists(st.lists(st.booleans(), min_size=8, max_size=8), min_size=slots, max_size=slots))
    )
    state.active = torch.tensor(data.draw(st.lists(st.booleans(), min_size=slots, max_size=slots)))
    order = data.draw(st.permutations(range(slots)))[: data.draw(st.integers(0, slots))]
    state.place = torch.full((slots,), OUT)
    state.place[order] = torch.arange(len(order))
    state.grant()
    needs = [int(state.wanted()[slot].sum()) for slot in order]
    given = grant(needs, [0] * len(order), most)
    got = state.live().sum(dim=1)
    assert got[order].tolist() == given
    assert int(got.sum()) == sum(given)
    assert config.policy == PolicyMix.of([Decoding().rule])


def test_a_rule_that_joins_loses_no_step() -> None:
    """The step that runs when the rule changes is finished, and what it committed is in the next report."""
    prompts, decoding = [[1, 2, 3, 4, 5], [6]], Decoding(max_new_tokens=11, threshold=1.0, ignore_eos=True)
    late = Decoding(max_new_tokens=6, steps=2, ignore_eos=True)
    wanted = [
        make_session(4).generate([prompts[0]], decoding).token_ids[0],
        make_session(4).generate([prompts[1]], late).token_ids[0],
    ]
    for turns in range(1, 6):
        session = make_session(4)
        batch = session.batch([decoding], session.shape(2, 24, 4, False))
        script = Transcripts(2, 24, 4)
        batch.admit([0], [Request(prompts[0], decoding)])
        script.begin([0], [Request([1], Decoding())])
        batch.prefill(100)
        for _ in range(turns):
            script.write(batch.turn(), [0])
        batch.decode_as(*session.batch_config([decoding, late], 4))
        batch.admit([1], [Request(prompts[1], late)])
        script.begin([1], [Request([1], Decoding())])
        active = True
        while active:
            found = batch.turn()
            script.write(found, [0, 1])
            active = bool(found.active.any())
        assert script.tokens(0, 5, 16) == wanted[0]
        assert script.tokens(1, 1, 7) == wanted[1]
        assert sorted(script.steps(0, 5, 16)) == list(range(1, 12)), "one token a step, none of them lost"
        batch.clear()
        assert session.kv.free_pages == session.kv.pages

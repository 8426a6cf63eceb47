"""Memory of an engine: what all caches take is what was asked for at most, and as many requests run as it holds."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from dgraph.engine.build import EngineConfig
from dgraph.engine.core import EngineCore
from dgraph.engine.memory.pools import MIXED_SHARE, Holding, PoolSizes
from dgraph.engine.memory.profile import kv_cost_of
from dgraph.errors import InputError
from dgraph.recipes import RECIPES
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.requests import Request, positions, step_rows
from dgraph.testing import models
from tests.engine.driven import Asked, Turns, driver_of

NEW = Decoding(max_new_tokens=16, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "max_sequences": 8,
    "max_tokens": 96,
    "usual_prompt": 40,
    "decoding": NEW,
    "max_mixed_rows": 0,
}


def cases() -> list[Any]:
    """Every recipe of a bidirectional and of a block-causal model, and some of others; combinations in a release."""
    found: list[Any] = [("dream", "dllm_serve"), ("nemotron", "dyllm"), ("fast_dllm_v2", "maskkv"), ("llada2", "dense")]
    for family in ("llada", "sdar"):
        (tiny,) = models(None, family)
        for name in RECIPES:
            try:
                tiny.recipe(name)
            except InputError:  # not for models of this kind
                continue
            often = "+" not in name or name == "dllm_serve+dyllm"
            found.append((family, name) if often else pytest.param(family, name, marks=pytest.mark.release))
    return found


def made(family: str, recipe: str) -> Any:
    (tiny,) = models(None, family)
    return tiny.optimized(recipe)


def drawn(random: Random, spec: Any) -> Request:
    """A request of any length."""
    new = random.choice((4, 16, 24, 40))
    return Request([spec.mask_id] * random.randint(1, 96 - new), Decoding(max_new_tokens=new, ignore_eos=True))


def admitted(core: EngineCore, random: Random, kv_bytes: int) -> int:
    """Requests come until the scheduler would let one wait, some leave, and others come; their most at a time."""
    session, most = core.session, 0
    batch = session.batch([NEW], core.shape, by_block=core.by_block)
    for _ in range(60):
        slots, request = batch.free, drawn(random, session.spec)
        held = Holding.of(request, session, core.shape.block, core.by_block)
        pages, rings, entries = core.free
        beside = zip((held.first, *held.rings, *held.entries), (pages, *rings, *entries), strict=True)
        if slots and all(needed <= free for needed, free in beside):
            batch.admit(slots[:1], [request])
        elif batch.running:
            batch.retire(random.sample(sorted(batch.running), 1))
        most = max(most, len(batch.running))
        assert session.cache_bytes <= kv_bytes
    batch.clear()
    return most


@pytest.mark.parametrize(("family", "recipe"), cases())
def test_what_is_allocated_is_what_was_asked_for_at_most(family: str, recipe: str) -> None:
    """Whatever requests come, nothing grows. The cost of a request is what it holds."""
    run = made(family, recipe)
    session = run._session
    whole = driver_of(session, **SETTINGS)
    everything, block = session.cache_bytes, whole.shape.block
    for share in (1.0, 0.6, 0.3):
        kv_bytes = int(share * everything)
        core = driver_of(session, kv_bytes=kv_bytes, **SETTINGS)
        before = session.cache_bytes
        assert 0.9 * kv_bytes - run._session.kv.position_bytes * run.page_size <= before <= kv_bytes
        assert admitted(core, Random(1), kv_bytes) >= min(8, int(8 * share))
    cost, random = kv_cost_of(run), Random(2)
    for _ in range(9):
        request = drawn(random, run.spec)
        held = Holding.of(request, session, block)
        rings = session.kv.ring_pages(positions(request, block, run.spec), step_rows(block, run.spec))
        mine = PoolSizes(held.kept, rings, held.entries).bytes(session, 1)
        assert cost.sequence(request.end, request.decoding.max_new_tokens) == mine
    session.give_back()
    assert session.packed is None or session.packed.free is None


@pytest.mark.parametrize("recipe", ["dllm_serve", "maskkv"])
def test_pages_alone_are_not_all_that_a_packed_request_takes(recipe: str) -> None:
    """As many usual requests run at a time as the memory holds by the cost of one, and not twice as many."""
    run = made("llada", recipe)
    each, session = kv_cost_of(run).sequence(56, 16), run._session
    asked = [Asked(tuple(range(n, n + 40)), NEW) for n in range(8)]
    turns = Turns(session, asked, prepare=run._prepare, kv_bytes=4 * each + 3000, **SETTINGS)
    turns.run()
    assert turns.most_running == 4
    assert turns.core.scheduler.counters.requeued == 0


def test_a_request_whose_packed_keys_have_no_room_is_refused() -> None:
    run = made("llada", "maskkv")
    each = kv_cost_of(run).sequence(56, 16)
    turns = Turns(run._session, [Asked(tuple(range(80)), NEW)], prepare=run._prepare, kv_bytes=each + 3000, **SETTINGS)
    with pytest.raises(
        InputError, match=r"request 0 needs \d+ packed entries of a layer \(80 tokens of prompt, 16 new"
    ):
        turns.run()
    with pytest.raises(InputError, match="usual_prompt=96 leaves no response in the 96 positions of a request"):
        driver_of(run._session, max_tokens=96, usual_prompt=96)
    with pytest.raises(InputError, match="usual_prompt must be a whole number, at least 1"):
        EngineConfig(usual_prompt=0)
    run._session.give_back()


def test_memory_that_holds_no_usual_request_serves_shorter_ones() -> None:
    run = made("llada", "maskkv")
    kv_bytes = kv_cost_of(run).sequence(56, 16) * 2 // 3
    asked = Asked((5, 6, 7), Decoding(max_new_tokens=4, ignore_eos=True))
    turns = Turns(run._session, [asked], prepare=run._prepare, kv_bytes=kv_bytes, **SETTINGS)
    assert run._session.cache_bytes <= kv_bytes
    (told,) = turns.run()
    assert len(told.token_ids) == 4


def test_rings_hold_a_step_of_each_sequence() -> None:
    """So a gated model runs as many requests as another, and they give way for want of pages alone."""
    dense, session = (made("sdar", name)._session for name in ("dense", "dyllm"))
    page, ring = dense.kv.pool_bytes(1), session.kv.pool_bytes(0, (1,))
    own = 2 * session.spec.block_length // session.kv.page_size
    decoding = Decoding(max_new_tokens=40, threshold=0.6, ignore_eos=True)
    asked = [Asked(tuple(range(n, n + 9)), decoding) for n in range(8)]
    settings = {**SETTINGS, "usual_prompt": 9, "pages": "block"}
    found = []
    for each, beside in ((dense, 0), (session, 8 * own * ring)):
        turns = Turns(each, asked, kv_bytes=33 * page + beside, **settings)
        assert turns.core.scheduler.budgets.pages == 33
        assert turns.core.scheduler.budgets.rings == ((8 * own,) if beside else ())
        turns.run()
        found.append((turns.most_running, turns.core.totals.preempted > 0))
    assert found == [(8, True)] * 2


@pytest.mark.parametrize("share", [1, 64])
def test_prompts_that_ride_take_few_pages_of_rings(share: int) -> None:
    """They ride where pages are free, and hold up no request: without, a prompt has a forward of its own."""
    run = made("sdar", "dyllm")
    session, settings = run._session, {**SETTINGS, "max_mixed_rows": 512}
    driver_of(session, **SETTINGS)
    kv_bytes = session.cache_bytes * share
    core = driver_of(session, kv_bytes=kv_bytes, **settings)
    budgets, page = core.scheduler.budgets, session.kv.pool_bytes(1, (0,))
    more, ring = budgets.rings[0] - 8 * 2, session.kv.pool_bytes(0, (1,))
    assert more == min(64, kv_bytes // MIXED_SHARE // ring)
    assert budgets.pages == 8 * 12 - (-(-more * ring // page) if share == 1 else 0)
    assert session.cache_bytes <= kv_bytes
    session.give_back()

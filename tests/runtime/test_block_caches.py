"""Caches that begin anew with each block: what the declaration promises, and soft embeddings, which lie in one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from dgraph.engine.memory.pools import PoolSizes
from dgraph.engine.memory.profile import profile
from dgraph.lowering.program import ProgramResult
from dgraph.plans.regions import Block
from dgraph.plans.rows import RowPlan
from dgraph.runtime import BlockSession, FixedSteps
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.kv.store import KVStore, ring_size
from dgraph.runtime.policies import Renoise
from dgraph.types.shapes import InputSpec
from tests.engine.driven import Asked, Turns, no_preparation
from tests.models.gemma import CANVAS, HIDDEN, WINDOW, draw, generated, optimized, published
from tests.models.test_renoise import settings_of
from tests.runtime.fake import FakeProgram, fake_spec, offered

TABLE = InputSpec("page_table_1", torch.int32, ("b", "P_1"))
OWN = InputSpec("own_cache", torch.float32, ("pages_1", "page", 2), reset="block", initial=0.5)
RULE, SHARP, MIXING = Renoise(1.0, confidence=0.2, steps=5), 6.0, 0.6


class Remembering(FakeProgram):
    """Adds one to what the cache holds of the position of each row."""

    def __init__(self) -> None:
        super().__init__("step")
        self.inputs |= {spec.name: spec for spec in (TABLE, OWN, offered("block_step"), offered("block_start"))}
        self.said: list[tuple[int, float]] = []

    def __call__(self, inputs: Mapping[str, Tensor], rows: int) -> ProgramResult:
        cache, cu_rows = inputs["own_cache"], inputs["cu_rows"].clamp(max=rows)
        place = inputs["positions"][:rows], inputs["page_table_1"], cu_rows
        held = torch.ops.dgraph.feature_read(cache, *place)
        sequence = torch.repeat_interleave(torch.arange(len(cu_rows) - 1), cu_rows.diff())
        first = inputs["block_start"][sequence]
        inside = (place[0] >= first) & (place[0] < first + 4)
        self.said += zip(inputs["block_step"][sequence][inside].tolist(), held[inside].tolist(), strict=True)
        torch.ops.dgraph.feature_write(held + 1, cache, *place)
        return super().__call__(inputs, rows)


@pytest.mark.parametrize("attention", ["block_causal", "bidirectional"])
@pytest.mark.parametrize("served", [False, True])
def test_it_holds_its_initial_value_before_the_first_step_of_each_block(attention: str, served: bool) -> None:
    """Of whichever sequence, in an engine too, which launches steps of bidirectional models ahead of their reports."""
    step, causal = Remembering(), attention == "block_causal"
    spec = fake_spec(4, attention=attention, eos_ids=())
    programs = {"step": step} | ({"prefill": FakeProgram("prefill")} if causal else {})
    session = BlockSession(spec, programs, plan=None if causal else RowPlan(Block()), page_size=4)
    prompts = [[1] * 3, [2] * 9, [4] * 6]
    if served:
        chosen = Decoding(policy=FixedSteps(2), max_new_tokens=24)
        asked = [Asked(tuple(ids), chosen, turn=turn) for turn, ids in enumerate(prompts)]
        Turns(session, asked, max_sequences=2, max_tokens=40, prepare=no_preparation).run()
    else:
        session.generate(prompts, max_new_tokens=24, policy=FixedSteps(2), max_batch=2)
    assert {number for number, _ in step.said} >= {0, 1}
    assert all(held == [0.5 + number] * 2 for number, held in step.said)


def test_rings_that_prompts_are_not_written_to_have_room_for_a_step() -> None:
    """And those that they are, for a part of a prompt."""
    keys = InputSpec("k_cache_0", torch.float32, ("pages_6", "page", 2))
    kv = KVStore([keys, OWN], page_size=4, prefilled=["k_cache_0"])
    assert (kv.windows, kv.part(8), kv.renews) == ((6,), 8, True)
    assert kv.ring_pages(100, 8, 40) == (ring_size(6, 40, 4), 2)
    assert [ring_size(1, rows, 4) for rows in (1, 4, 5, 8)] == [1, 1, 2, 2]
    assert [ring_size(window, 256, 256) for window in (1, 1024)] == [1, 5], "DiffusionGemma as it is published"
    assert KVStore([OWN], page_size=4, prefilled=[]).part(8) is None
    assert KVStore([OWN], page_size=4).windows == (1,)


def test_beginning_a_block_touches_nothing_of_others() -> None:
    keys = InputSpec("k_cache_0", torch.float32, ("pages_1", "page", 2))
    kv = KVStore([keys, OWN], page_size=4)
    first, second = kv.allocate([8, 8], rings=[(2,), (2,)])
    for cache in kv.tensors().values():
        cache.fill_(7)
    kv.renew([second])
    held = {name: [cache[list(kv.rings[1].owned(s))] for s in (first, second)] for name, cache in kv.tensors().items()}
    assert all(cache.eq(7).all() for cache in (*held["k_cache_0"], held["own_cache"][0]))
    assert held["own_cache"][1].eq(0.5).all()


# -- soft embeddings -------------------------------------------------------------------------------------------------


def wanted(prompt: list[int], canvases: int, seed: int) -> list[int]:
    """What transformers generates."""
    given: dict[str, Any] = {"eos_token_id": None, **settings_of(RULE)}
    return generated(prompt, canvases * CANVAS, seed, published(SHARP, MIXING), **given)[0]


def test_a_canvas_reads_no_soft_embedding_of_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four canvases in the memory of one; and if a canvas did, the tokens would be others."""
    made, prompt = optimized(SHARP, MIXING), draw(11, 1)
    asked = {"input_ids": [prompt], "policy": RULE, "max_new_tokens": 4 * CANVAS, "seed": 5}
    tokens = wanted(prompt, 4, 5)
    assert made.generate(**asked).token_ids == [tokens]
    monkeypatch.setattr(KVStore, "renew", lambda store, sequences: None)
    (other,) = made.generate(**asked).token_ids
    assert other[:CANVAS] == tokens[:CANVAS]
    assert other[CANVAS:] != tokens[CANVAS:]


@pytest.mark.parametrize("length", [5, 150])
def test_a_sequence_has_one_canvas_of_them(length: int) -> None:
    made = optimized(SHARP, MIXING)
    kv, page = made._session.kv, made.page_size
    kv.unlimited()
    prompts = [draw(length, 1), draw(length + 3, 2)]
    made.generate(input_ids=prompts, policy=RULE, max_new_tokens=3 * CANVAS, seed=1)
    cache = kv.tensors()["soft_cache"]
    assert CANVAS % page == 0, "so that its pages are no longer than a canvas"
    assert cache.nbytes == len(prompts) * CANVAS * HIDDEN * 4
    cost, pages = profile(made, rows=64).kv_cost, -(-(length + 4 * CANVAS) // page)
    layers = 2 * 2 * 16 * 4  # keys and values of two layers, whose heads are one of 16 or two of 8, in fp32
    held = ring_size(WINDOW, CANVAS, page)
    assert (cost.position, cost.rings) == (layers, ((1, HIDDEN * 4, CANVAS // page), (WINDOW, layers, held)))
    kept = page * layers * (pages + min(pages, held))
    assert cost.sequence(length + 3 * CANVAS, CANVAS) == kept + CANVAS * HIDDEN * 4
    kv.unlimited()


@pytest.mark.parametrize("pages", ["block", "life"])
def test_requests_of_an_engine_with_few_pages_get_what_transformers_generates(
    pages: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The youngest gives way, and goes on at the canvas that it was in."""
    made = optimized(SHARP, MIXING)
    lengths = ((30, 4), (5, 5), (41, 3), (17, 4), (26, 5))
    schedule = [
        Asked(tuple(draw(length, length)), Decoding(policy=RULE, max_new_tokens=count * CANVAS, seed=1), turn=turn)
        for turn, (length, count) in enumerate(lengths)
    ]
    kv = made._session.kv
    longest = ring_size(WINDOW, kv.part(CANVAS) or 0, kv.page_size)
    few = {WINDOW: 3 * longest, 1: 3 * ring_size(1, CANVAS, kv.page_size)}
    rings = tuple(few[window] for window in kv.rings)
    sizes = PoolSizes(14 if pages == "block" else 20, rings)
    monkeypatch.setattr("dgraph.engine.build.pool_sizes", lambda *given: sizes)
    turns = Turns(made._session, schedule, prepare=made._prepare, max_sequences=3, max_tokens=120, pages=pages)
    turns.run()
    assert turns.most_running > 1
    assert (turns.core.totals.preempted > 0) == (pages == "block")
    for told, one, (_, count) in zip(turns.told, schedule, lengths, strict=True):
        assert told.token_ids == wanted(list(one.ids), count, 1)


def test_prompts_share_their_pages_where_all_keys_are_kept() -> None:
    """Soft embeddings are no reason not to: nothing of a prompt is in them."""
    made = optimized(SHARP, MIXING, rings=False)
    prompt, decoding = tuple(draw(40, 3)), Decoding(policy=RULE, max_new_tokens=2 * CANVAS, seed=1)
    schedule = [Asked(prompt, decoding, turn=0), Asked((*prompt, 7), decoding, turn=12)]
    turns = Turns(made._session, schedule, prepare=made._prepare, max_sequences=1, max_tokens=80, prefix_cache=True)
    prefix = turns.core.prefix
    assert prefix is not None
    for told, one in zip(turns.run(), schedule, strict=True):
        assert told.token_ids == wanted(list(one.ids), 2, 1)
    assert prefix.found == 40

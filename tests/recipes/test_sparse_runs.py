"""Recipes that keep few keys as they are run: batches, captured steps, samplers, and the memory that they take."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from dgraph.compiler.compiled_model import CompiledModel
from dgraph.errors import InputError
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram, run_in_order
from dgraph.lowering.regions import RegionCompiler
from dgraph.runtime.graphs.pool import GraphPool
from dgraph.runtime.kv.packed import PackedKV
from dgraph.runtime.loop.session import BlockSession
from dgraph.runtime.policies import policy_of
from dgraph.runtime.results import Generation
from dgraph.runtime.sampling.sampler import Sampler
from tests.kv import kv_pairs
from tests.recipes import block_dyllm
from tests.recipes.bidirectional import LAYERS, Setup, prompts_for, setup_of
from tests.recipes.block_causal import optimized
from tests.runtime.recorder import Recorder

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "maskkv": ("maskkv", {"pairs": 5}),
    "maskkv, often": ("maskkv", {"pairs": 5, "prompt_interval": 3, "response_interval": 2}),
    "dllm_serve": ("dllm_serve", {"ratio": 0.3}),
    "sparse_dllm": ("sparse_dllm", {"pairs": 7, "every": 3, "block_cache": "dc"}),
    "maskkv+focus": ("maskkv+focus", {"ratio": 0.4}),
    "dllm_serve+focus": ("dllm_serve+focus", {"delay": 0}),
    "maskkv+fast_dllm": ("maskkv+fast_dllm", {"pairs": 4, "cache": "prefix"}),
}
RUNS = [
    *(("llada", case) for case in ("maskkv, often", "dllm_serve+focus", "maskkv+fast_dllm")),
    *(("dream", case) for case in ("sparse_dllm", "maskkv+focus")),
    *(("sdar", case) for case in ("maskkv", "dllm_serve")),
    ("sdar_moe", "sparse_dllm"),
    *(pytest.param(*run, marks=pytest.mark.release) for run in (("dream", "maskkv, often"), ("sdar", "maskkv+focus"))),
]
SETTINGS: dict[str, Any] = {"max_new_tokens": 21, "threshold": 0.7}


@functools.cache
def run_of(family: str, case: str) -> CompiledModel:
    name, options = CASES[case]
    if family in block_dyllm.FAMILIES:
        return optimized(block_dyllm.setup_of(family), name, **options)
    return bidirectional(family).optimized(name, 16, **options)


@functools.cache
def bidirectional(family: str) -> Setup:
    return setup_of(family)


def prompts() -> list[list[int]]:
    """Ragged: one token, fewer than a block or a budget, more, and two blocks."""
    return [[17], *prompts_for(16)]


@pytest.mark.parametrize(("family", "case"), RUNS)
def test_a_batch_gives_what_each_prompt_gives_alone(family: str, case: str) -> None:
    run = run_of(family, case)
    together = run.generate(input_ids=prompts(), **SETTINGS)
    alone = [run.generate(input_ids=[prompt], **SETTINGS) for prompt in prompts()]
    assert together.token_ids == [r.token_ids[0] for r in alone]
    assert together.stats.sequence_steps == [r.stats.sequence_steps[0] for r in alone]
    assert together.stats.sequence_rows == [r.stats.sequence_rows[0] for r in alone]
    by_two = run.generate(input_ids=prompts(), max_batch=2, **SETTINGS)
    assert by_two.token_ids == together.token_ids
    assert by_two.stats.sequence_rows == together.stats.sequence_rows
    assert run._session.kv.free_pages == run._session.kv.pages


@pytest.mark.parametrize(("family", "case"), RUNS)
def test_a_captured_step_gives_what_a_plain_one_gives(family: str, case: str) -> None:
    """Batches of two shapes: packed caches move, and pages that are given back have other owners later."""
    run = run_of(family, case)

    def session(pool: GraphPool | None) -> BlockSession:
        programs = {}
        for phase, found in run.phases.items():
            runner = run_in_order if pool is None else pool.runner
            buckets = Buckets.of("hybrid")
            programs[phase] = LoweredProgram(found.graph, RegionCompiler("eager"), buckets, runner, name=phase)
        return BlockSession(
            run.spec, programs, block_cache=run.recipe.block_cache, recommit=run.recipe.recommit,  # type: ignore[arg-type]
            plan=run.recipe.plan, kv=run.recipe.kv, pool=pool, page_size=16,
        )  # fmt: skip

    def generate(of: BlockSession, batch: list[list[int]]) -> Generation:
        return of.generate(batch, max_new_tokens=21, policy=policy_of(steps=8), keep_kv=True)

    pool = GraphPool(recorder=Recorder)
    captured, plain = session(pool), session(None)
    for batch in (prompts(), [[9, 8, 7], list(range(20, 75))], prompts()):
        got, want = generate(captured, batch), generate(plain, batch)
        assert got.token_ids == want.token_ids
        assert got.stats.sequence_steps == want.stats.sequence_steps
        assert got.stats.sequence_rows == want.stats.sequence_rows
        for mine, theirs in kv_pairs(got, want):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    names = {name for name, _ in pool.recorded}
    assert "transition" in names
    assert len(names) > 1, "steps were captured"
    assert not pool.refused
    assert captured.kv.free_pages == captured.kv.pages


# -- samplers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "case"), [("dream", "maskkv, often"), ("sdar", "dllm_serve"), ("sdar", "maskkv")])
def test_samplers_that_need_logits(family: str, case: str) -> None:
    run = run_of(family, case)
    greedy = run.generate(input_ids=prompts(), **SETTINGS)
    settings = {**SETTINGS, "temperature": 1.0, "seed": 3}
    found = run.generate(input_ids=prompts(), top_p=0.9, **settings)
    assert set(run._session.variants["logits"]) == {"step", "select"}
    assert found.token_ids != greedy.token_ids
    assert found.token_ids == run.generate(input_ids=prompts(), top_p=0.9, **settings).token_ids
    taken = run.generate(input_ids=prompts(), sampler=Sampler(processors=(lambda logits, context: logits,)), **SETTINGS)
    assert taken.token_ids == greedy.token_ids


def test_guidance_has_no_packed_keys() -> None:
    for family, case in (("dream", "maskkv, often"), ("sdar", "dllm_serve")):
        run = run_of(family, case)
        with pytest.raises(InputError, match=r"cfg_scale=1.5 runs every step once more .* has no packed keys; use a"):
            run.generate(input_ids=prompts(), sampler=Sampler(cfg_scale=1.5), **SETTINGS)
        assert run._session.kv.free_pages == run._session.kv.pages


# -- memory -------------------------------------------------------------------------------------------------------

LONG = [list(range(6, 90)) * 2 + list(range(6, 38)), list(range(6, 90))]
"""200 and 84 tokens."""


def packed_bytes(run: CompiledModel, entries: int, sequences: int) -> int:
    """Of keys and values, positions and counts, all of 4 bytes, in every layer."""
    spec = run.spec
    return spec.layers * 4 * (entries * (2 * spec.head_dim + 1) + sequences * spec.kv_heads)


def first_of(run: CompiledModel, **settings: Any) -> list[int]:
    result = run.generate(input_ids=LONG, keep_kv=True, **{**SETTINGS, **settings})
    assert result.kv is not None
    for kv, prompt in zip(result.kv, LONG, strict=True):
        end = kv.committed if kv.committed else len(prompt) + SETTINGS["max_new_tokens"]
        assert len(kv.layers[0][0]) >= end - kv.first
        assert all(t[: end - kv.first].abs().sum(dim=(1, 2)).all() for pair in kv.layers for t in pair)
    return [kv.first for kv in result.kv]


@pytest.mark.parametrize("family", ["llada", "sdar"])
def test_pages_come_back_where_there_is_no_memory_for_what_is_packed(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(family, "maskkv")
    wanted = run.generate(input_ids=prompts(), **SETTINGS).token_ids
    kv = run._session.kv

    def grow(packed: PackedKV, *_: object) -> None:
        raise torch.OutOfMemoryError("it was the last straw")

    with monkeypatch.context() as patch:
        patch.setattr(PackedKV, "_grow", grow)
        with pytest.raises(torch.OutOfMemoryError, match="the last straw"):
            run.generate(input_ids=prompts(), **SETTINGS)
    assert kv.free_pages == kv.pages > 0
    assert run.generate(input_ids=prompts(), **SETTINGS).token_ids == wanted


@pytest.mark.parametrize(("family", "case"), [("llada", "maskkv, often"), ("dream", "maskkv, often")])
def test_a_prompt_has_no_pages(family: str, case: str) -> None:
    run = bidirectional(family).optimized("maskkv", 16, fresh=True, pairs=5)
    shift = run.spec.logit_shift
    dense = bidirectional(family).optimized("dense", 16, fresh=True)
    dense.generate(input_ids=LONG, **SETTINGS)
    assert run._session.packed is not None
    assert (run._session.kv.bytes, run._session.packed.bytes) == (0, 0)
    assert first_of(run) == [200 - shift, 84 - shift]
    # 221 positions end on the 14th page of 16, 105 on the 7th; the responses begin on the 13th and on the 6th.
    assert dense._session.kv.pages == 14 + 7
    assert run._session.kv.pages == 2 + 2
    assert run._session.packed.bytes == packed_bytes(run, 2 * 5 * run.spec.kv_heads, 2)
    k_and_v = LAYERS * 2 * 16 * run.spec.kv_heads * run.spec.head_dim * 4
    a_and_f = (LAYERS - 1) * 2 * 16 * run.spec.hidden * 4
    assert run._session.kv.bytes == 4 * (k_and_v + a_and_f)
    run.generate(input_ids=prompts(), **SETTINGS)
    grown = 2 * 5 * 3 // 2  # by half, which is more than the 1 + 3 + 5 + 5 pairs that a head needs
    entries = max(1 + 3 + 5 + 5, grown) * run.spec.kv_heads
    assert run._session.packed.bytes == packed_bytes(run, entries, 4)


def watched(run: CompiledModel) -> list[int]:
    """Free pages before each step, and at the end."""
    seen: list[int] = []
    run.generate(input_ids=LONG, progress=lambda progress: seen.append(run._session.kv.free_pages), **SETTINGS)
    return [*seen, run._session.kv.free_pages]


@pytest.mark.parametrize("case", ["maskkv", "maskkv+focus"])
def test_pages_of_a_prompt_are_free_again_after_the_first_step(case: str) -> None:
    run = optimized(block_dyllm.setup_of("sdar"), CASES[case][0], fresh=True, **CASES[case][1])
    free = watched(run)
    # Whole blocks of the prompts are 12 and 5; the sequences have 14 and 7 pages.
    both = [pages for pages in free if pages < 12 + 7]  # until one of them has ended
    assert len(both) > 3
    assert set(both) == {12 + 5}
    assert free[-1] == run._session.kv.pages == 14 + 7
    assert first_of(run) == [192, 80]
    assert watched(run) == free, "and taken again"
    assert run._session.kv.pages == 21


def test_pages_that_later_blocks_choose_from_stay() -> None:
    run = optimized(block_dyllm.setup_of("sdar"), "dllm_serve", fresh=True)
    free = watched(run)
    both = [pages for pages in free if pages < 7]  # until one of them has ended
    assert len(both) > 3
    assert set(both) == {0}
    assert first_of(run) == [0, 0]
    assert run._session.packed is not None
    entries = (int(0.5 * 221) + int(0.5 * 105)) * run.spec.kv_heads
    assert run._session.packed.bytes == run.spec.layers * 4 * (entries + 2 * run.spec.kv_heads), "positions and counts"


def test_tokens_may_be_taken_back() -> None:
    """What is replaced is in the window, whose keys are written anew."""
    runs = [
        bidirectional("llada").optimized("dllm_serve", 16, ratio=1.0, delay=0),
        bidirectional("llada").optimized("fast_dllm", 16),
    ]
    policy = policy_of("hierarchical_remask", remask_threshold=0.7)
    got, want = (run.generate(input_ids=prompts(), max_new_tokens=21, policy=policy) for run in runs)
    assert got.token_ids == want.token_ids
    assert got.stats.sequence_steps == want.stats.sequence_steps

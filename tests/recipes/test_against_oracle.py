"""The compiled programs against the plain-PyTorch oracle: same rows, same tokens, same caches, step by step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.amounts import every_value, first_cases
from tests.kv import kv_pairs
from tests.recipes.ablations import focus_options
from tests.recipes.block_causal import Setup, check, optimized, prompts_for, setup_for


@pytest.fixture(scope="module")
def setups() -> dict[int, Setup]:
    return {block: setup_for(block) for block in (16, 32, 64)}


FOCUS_CASES = {
    "defaults": {},
    "no recommit": {"recommit": False},
    "block cache dc": {"block_cache": "dc", "recommit": False},
    "importance of layer 0": {"signal": "importance", "after": 0},
    "after layer 2": {"after": 2},
    "bottom": {"select": "bottom", "keep": 2},
    "random": {"select": "random", "keep": 8},
    "as published": {"full_steps": 0},
    "two full steps": {"full_steps": 2, "alpha": 1.0},
    "block cache off": {"block_cache": "off"},
    "alpha 1.2": {"alpha": 1.2},
    "importance": {"signal": "importance", "alpha": 1.8},
    "keep 4": {"keep": 4},
    "as published, keep 4": {"full_steps": 0, "keep": 4},
    "as in the public code": {"full_steps": 0, "average_over": "block"},
    "average over the sequence": {"average_over": "sequence", "alpha": 1.2},
    "among the block": {"among": "block"},
    "among the block, no full step": {"among": "block", "full_steps": 0, "alpha": 1.0},
}


@every_value(("block", [16, 32, 64]), ("case", ["defaults", "as published", "among the block"]))
def test_focus_in_blocks_of(setups: dict[int, Setup], block: int, case: str) -> None:
    setup, options = setups[block], FOCUS_CASES[case]
    check(setup, block, optimized(setup, "focus", **focus_options(options)), {"threshold": 0.6}, options)


@first_cases(13, "case", FOCUS_CASES)
def test_focus_options(setups: dict[int, Setup], case: str) -> None:
    options = FOCUS_CASES[case]
    check(setups[32], 32, optimized(setups[32], "focus", **focus_options(options)), {"threshold": 0.7}, options)


@pytest.mark.parametrize("steps", [8, 32])
def test_focus_with_fixed_steps(setups: dict[int, Setup], steps: int) -> None:
    check(setups[32], 32, optimized(setups[32], "focus"), {"steps": steps}, {})


@pytest.mark.parametrize("block_cache", ["off", "dc", "dc+"])
@pytest.mark.parametrize("recommit", [True, False])
def test_dense(setups: dict[int, Setup], block_cache: str, recommit: bool) -> None:
    options = {"block_cache": block_cache, "recommit": recommit}
    check(setups[16], 16, optimized(setups[16], "dense", **options), {"threshold": 0.7}, {"evict": False, **options})


@pytest.mark.parametrize("buckets", [None, "hybrid", [48, 200]])
def test_focus_compiled_by_inductor(setups: dict[int, Setup], buckets: Any) -> None:
    check(setups[32], 32, optimized(setups[32], "focus", "inductor", buckets), {"threshold": 0.7}, {})


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_lossless_limit_is_the_dense_program_bit_for_bit(setups: dict[int, Setup], backend: str) -> None:
    """alpha = inf, block_cache = "off": the same tokens and the same bits in every cache."""
    setup, prompts = setups[32], prompts_for(32)
    dense = optimized(setup, "dense", backend)
    limit = optimized(setup, "focus", backend, alpha=math.inf, block_cache="off")
    settings = {"input_ids": prompts, "max_new_tokens": 80, "threshold": 0.6, "keep_kv": True}
    want, got = dense.generate(**settings), limit.generate(**settings)
    assert got.token_ids == want.token_ids
    assert got.stats.rows["suffix"] == got.stats.rows["prefix"] == want.stats.rows["step"]
    assert all(torch.equal(*pair) for pair in kv_pairs(got, want))


@pytest.mark.parametrize("recipe", ["dense", "focus"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_batch_gives_what_each_prompt_gives_alone(setups: dict[int, Setup], recipe: str, temperature: float) -> None:
    setup, prompts = setups[32], prompts_for(32)
    run = optimized(setup, recipe)
    settings: dict[str, Any] = {"max_new_tokens": 64, "threshold": 0.6, "temperature": temperature, "seed": 7}
    together = run.generate(input_ids=prompts, **settings).token_ids
    in_turn = run.generate(input_ids=prompts, max_batch=1, **settings).token_ids
    assert together == in_turn
    if temperature == 0:  # draws depend on the prompt's index, so alone only the greedy run can be the same
        assert together == [run.generate(input_ids=[p], **settings).token_ids[0] for p in prompts]
    else:
        assert together == run.generate(input_ids=prompts, **settings).token_ids
        assert together != run.generate(input_ids=prompts, **{**settings, "seed": 8}).token_ids


def test_focus_sends_fewer_rows_through_the_deeper_layers(setups: dict[int, Setup]) -> None:
    setup, prompts = setups[32], prompts_for(32)
    settings: dict[str, Any] = {"input_ids": prompts, "max_new_tokens": 64, "threshold": 0.6}
    dense = optimized(setup, "dense").generate(**settings).stats
    focus = optimized(setup, "focus").generate(**settings).stats
    assert focus.rows_per_token < focus.rows["prefix"] / focus.decoded < dense.rows_per_token
    assert focus.rows_per_token == focus.rows["suffix"] / focus.decoded


COUNTED_CASES = {
    "defaults": {},
    "no recommit, block cache dc": {"recommit": False, "block_cache": "dc"},
    "after layer 2": {"after": 2},
    "keep 4": {"keep": 4},
    "random": {"select": "random", "keep": 8},
    "as published": {"full_steps": 0},
}


@every_value(("case", COUNTED_CASES), ("buckets", [None, [48, 200]]))
def test_focus_with_rows_counted_on_the_device(setups: dict[int, Setup], case: str, buckets: Any) -> None:
    options = COUNTED_CASES[case]
    run = optimized(setups[32], "focus", buckets=buckets, count="device", **options)
    assert run.programs["step"].stage_names == ("step",)
    check(setups[32], 32, run, {"threshold": 0.7}, options)


@pytest.mark.parametrize("buckets", [None, "hybrid"])
def test_focus_with_rows_counted_on_the_device_compiled(setups: dict[int, Setup], buckets: Any) -> None:
    check(setups[32], 32, optimized(setups[32], "focus", "inductor", buckets, count="device"), {"threshold": 0.7}, {})


def test_who_counts_the_rows_changes_no_bit(setups: dict[int, Setup]) -> None:
    """On a CPU both forms run each linear layer over exactly the kept rows."""
    prompts, records = prompts_for(32), {"host": [], "device": []}
    settings = {"input_ids": prompts, "max_new_tokens": 80, "threshold": 0.6, "keep_kv": True}
    found = {
        count: optimized(setups[32], "focus", count=count).generate(**settings, observer=seen.append)
        for count, seen in records.items()
    }
    assert found["device"].token_ids == found["host"].token_ids
    for mine, theirs in zip(records["device"], records["host"], strict=True):
        assert torch.equal(mine.kept, theirs.kept)
        assert torch.equal(mine.confidence, theirs.confidence)
    assert all(torch.equal(*pair) for pair in kv_pairs(found["device"], found["host"]))
    kept = sum(int(record.kept.sum()) for record in records["device"])
    assert kept == found["host"].stats.rows["suffix"] < found["host"].stats.rows["prefix"]
    assert found["device"].stats.rows["step"] == found["host"].stats.rows["prefix"]

"""FOCUS on models that encode what they have denoised, row by row, against the plain-PyTorch oracle; rows predict their
own position or the next one.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import dgraph
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.errors import InputError
from dgraph.passes import EvictTokens
from dgraph.recipes import Ablation
from dgraph.runtime.decoding import Decoding
from dgraph.testing import models
from tests.amounts import every_value
from tests.engine.alone import check_as_alone
from tests.golden_files import check_golden
from tests.kv import kv_pairs
from tests.models.two_modes import CONFIGS, prompts_of
from tests.models.two_modes import setup_of as two_modes
from tests.oracle.focus_two_modes import Trace, generate
from tests.oracle.scoring import Eviction
from tests.recipes.block_causal import EOS, Setup, new_tokens, optimized, prompts_for, setup_for

FORMS = {
    "shift": {"logit_shift": 1},
    "shift, causal": {"logit_shift": 1, "encoding": "causal"},
    "causal": {"encoding": "causal"},
}
"""What a model says of itself; each denoises a block, then encodes it with the next token."""
BLOCK = 16
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "alpha 1": {"alpha": 1.0},
    "alpha 3": {"alpha": 3.0},
    "block cache off": {"block_cache": "off"},
    "block cache dc": {"block_cache": "dc"},
    "importance of layer 0": {"signal": "importance", "after": 0},
    "after layer 2": {"after": 2},
    "keep 3": {"keep": 3},
    "average over the block": {"average_over": "block"},
    "among the block": {"among": "block"},
    "bottom": {"select": "bottom", "keep": 2},
}


@functools.cache
def setup_of(form: str, block: int = BLOCK, stops: bool = False) -> Setup:
    """One Qwen3 in each form; stops: it knows a stop token."""
    setup = setup_for(block)
    spec = replace(setup.model.spec, eos_ids=(EOS,) if stops else (), next_token=True, **FORMS[form])
    graph = setup.graph.copy()
    graph.spec = spec
    return replace(setup, model=replace(setup.model, spec=spec), graph=graph)


@functools.cache
def trace_of(setup: Setup, prompt: tuple[int, ...], block: int, threshold: float, **options: Any) -> Trace:
    """What the oracle does with one prompt; shared by tests that run the same in other ways."""
    spec, block_cache = setup.model.spec, options.pop("block_cache", "dc+")
    return generate(
        setup.weights,
        setup.config,
        prompt,
        max_new_tokens=new_tokens(block),
        block=block,
        mask_id=spec.mask_id,
        eos_ids=spec.eos_ids,
        threshold=threshold,
        shift=spec.logit_shift,
        causal=spec.encoding == "causal",
        eviction=Eviction(**{"average_over": "sequence"} | options),
        block_cache=block_cache,
    )


def check(
    setup: Setup, run: CompiledModel, options: dict[str, Any], block: int = BLOCK, threshold: float = 0.6
) -> list[tuple[int, int]]:
    """Every step of a generation, and its keys and values, are the oracle's; how many rows each of a prompt's steps
    forwarded, and kept.
    """
    texts, records, found = prompts_for(block), [], []
    settings = {"max_new_tokens": new_tokens(block), "threshold": threshold}
    result = run.generate(input_ids=texts, keep_kv=True, observer=records.append, **settings)
    for index, prompt in enumerate(texts):
        trace = trace_of(setup, tuple(prompt), block, threshold, **options)
        assert result.token_ids[index] == trace.tokens
        mine = [record for record in records if (record.sequence == index).any()]
        assert len(mine) == len(trace.steps)
        for record, step in zip(mine, trace.steps, strict=True):
            rows = record.sequence == index
            at, done = record.positions[rows], record.committed[rows]
            assert at.tolist() == step.positions
            assert at[record.kept[rows]].tolist() == step.kept
            pairs = zip(at[done].tolist(), record.token[rows][done].tolist(), strict=True)
            assert list(pairs) == step.committed
            if step.score:
                assert at[record.candidate[rows]].tolist() == step.masked
                score = (record.score[rows] * record.candidate[rows]).tolist()
                assert score == pytest.approx(step.score, rel=1e-3, abs=1e-3)
            found.append((len(step.positions), len(step.kept)))
        assert result.kv is not None
        assert result.kv[index].committed == trace.final
        for layer, caches in enumerate(result.kv[index].layers):
            for got, want in zip(caches, trace.cache.read(layer, trace.final), strict=True):
                torch.testing.assert_close(got[: trace.final], want, rtol=1e-4, atol=1e-4)
    return found


def evicts(found: list[tuple[int, int]]) -> bool:
    """Whether there are steps that do, and such that do not."""
    return len(found) > 12 and len({rows == kept for rows, kept in found}) == 2


@every_value(("form", FORMS), ("case", CASES))
def test_every_step_is_the_oracles(form: str, case: str) -> None:
    setup = setup_of(form)
    assert evicts(check(setup, optimized(setup, "focus", **CASES[case]), CASES[case]))


@every_value(("form", FORMS), ("block", [8, 32]), ("threshold", [0.4, 0.9]))
def test_other_blocks_and_thresholds(form: str, block: int, threshold: float) -> None:
    setup = setup_of(form, block)
    assert evicts(check(setup, optimized(setup, "focus"), {}, block, threshold))


def test_a_stop_token_ends_a_sequence() -> None:
    setup = setup_of("shift", stops=True)
    ended = check(setup, optimized(setup, "focus", ablation=Ablation(after=2)), {"after": 2})
    assert len(ended) < len(
        check(setup_of("shift"), optimized(setup_of("shift"), "focus", ablation=Ablation(after=2)), {"after": 2})
    )


@pytest.mark.parametrize("form", FORMS)
def test_rows_counted_on_the_device(form: str) -> None:
    setup = setup_of(form)
    run = optimized(setup, "focus", buckets=[48, 200], count="device")
    assert run.programs["step"].stage_names == ("step",)
    assert evicts(check(setup, run, {}))


@pytest.mark.release
def test_compiled_by_inductor() -> None:
    setup = setup_of("shift")
    assert evicts(check(setup, optimized(setup, "focus", "inductor", "hybrid"), {}))


@pytest.mark.parametrize("form", FORMS)
def test_lossless_limit_is_the_dense_program_bit_for_bit(form: str) -> None:
    """alpha = inf, block_cache = "off": the same tokens in the same steps, and the same bits in every cache."""
    setup = setup_of(form)
    settings = {"input_ids": prompts_for(BLOCK), "max_new_tokens": 40, "threshold": 0.6, "keep_kv": True}
    dense = optimized(setup, "dense").generate(**settings)
    limit = optimized(setup, "focus", alpha=math.inf, block_cache="off").generate(**settings)
    assert limit.token_ids == dense.token_ids
    assert limit.stats.sequence_steps == dense.stats.sequence_steps
    assert limit.stats.rows["suffix"] == limit.stats.rows["prefix"] == dense.stats.rows["step"]
    assert all(torch.equal(*pair) for pair in kv_pairs(limit, dense))
    focus = optimized(setup, "focus").generate(**settings)
    assert focus.stats.rows["suffix"] < focus.stats.rows["prefix"]


@pytest.mark.parametrize("family", CONFIGS)
def test_lossless_limit_of_the_published_families(family: str) -> None:
    """Also where rows of the second predict the next position, which those of its checkpoints do not."""
    setup = two_modes(family)
    spec = replace(setup.model.spec, logit_shift=1)
    graph = setup.graph.copy()
    graph.spec = spec
    shifted = replace(setup, model=replace(setup.model, spec=spec), graph=graph)
    settings: dict[str, Any] = {"input_ids": prompts_of(setup, (3, 13, 16)), "max_new_tokens": 19, "threshold": 0.1}
    dense = shifted.optimized("dense").generate(**settings)
    limit = shifted.optimized("focus", alpha=math.inf, block_cache="off").generate(**settings)
    assert limit.token_ids == dense.token_ids
    assert limit.stats.sequence_steps == dense.stats.sequence_steps


def test_a_batch_gives_what_each_request_gives_alone() -> None:
    """An engine serves more requests than it has slots, over few pages."""
    setup = setup_of("shift")
    run, texts = optimized(setup, "focus"), [*prompts_for(BLOCK), [7, 8, 9], [11] * 20]
    rules: list[dict[str, Any]] = [{"threshold": 0.6}, {"threshold": 0.3}, {"policy": "fixed_steps", "steps": 5}]
    decodings = [Decoding(max_new_tokens=40, **rules[i % 3]) for i in range(len(texts))]
    check_as_alone(run, texts, decodings, pages=14, max_sequences=3, max_tokens=96)


def test_fixed_tokens_after_masks_are_seen_with_their_keys() -> None:
    """A block that begins with such tokens evicts nothing in its first step: their rows see all before them."""
    run = optimized(setup_of("shift"), "focus", alpha=1.0)
    canvas = [None, 9, None, None, 11, None, None, None, 12, *[None] * 11, 13, 14]
    found = run.generate(input_ids=prompts_for(BLOCK), max_new_tokens=24, canvas=[canvas] * 3, threshold=0.6)
    for ids in found.token_ids:
        assert len(ids) == 24
        assert all(token in (None, ids[at]) for at, token in enumerate(canvas))


def test_where_the_pass_fires_and_what_it_reads() -> None:
    """Once, as on every model; the flags of masks go with those of candidates."""
    shifted, plain = (optimized(setup_of(form), "focus").graph("step") for form in ("shift", "causal"))
    for graph in (shifted, plain):
        assert [n.meta["layer"] for n in graph.find("select_tokens")] == [1]
        assert [n.meta["layer"] for n in graph.find("importance")] == [0, 1]
    assert set(shifted.inputs) - set(plain.inputs) == {"masked"}
    (select,) = shifted.find("select_tokens")
    assert select.args[1] is shifted.input("candidate")
    assert select.args[-1] is shifted.input("masked")


def test_dump_of_a_step_whose_rows_predict_the_next_position() -> None:
    check_golden("qwen3_shifted_focus_step.txt", dgraph.dump(optimized(setup_of("shift"), "focus").graph("step")))


def test_the_recipe_of_every_shifted_model_evicts() -> None:
    for tiny in models():
        if tiny.model.spec.logit_shift:
            passes = tiny.recipe("focus").phases
            assert any(isinstance(each, EvictTokens) for phase in passes for each in phase.passes)


def test_no_step_of_a_block_is_a_full_one() -> None:
    """It would begin with the step that encodes the block before."""
    spec = setup_of("shift").model.spec
    assert dgraph.recipe("focus", spec) == dgraph.recipe("focus", spec, full_steps=0)
    with pytest.raises(InputError, match=r"full_steps=1 counts the steps of a block, but .* works in two modes"):
        dgraph.recipe("focus", spec, full_steps=1)

"""Several open blocks of a sequence, against a decode without caches that recomputes everything."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dgraph
from dgraph.errors import InputError
from dgraph.runtime import ConfidenceThreshold, StepRecord
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.policies import Candidates, DynamicThreshold, RelativeThreshold
from dgraph.runtime.sampling.sampler import Credit, Sampler
from dgraph.testing import models
from tests.amounts import first_cases
from tests.compiled import compiled
from tests.models import test_llada2 as llada2
from tests.oracle import llada2 as plain_llada2
from tests.oracle import open_blocks as oracle
from tests.oracle import qwen3
from tests.recipes.block_causal import new_tokens, optimized, prompts_for, setup_for

MORE = ({"blocks": 2}, {"blocks": 4}, {"blocks": 4, "open_at": 0.0}, {"blocks": 3, "open_at": 1.0, "sure_at": 0.3})
"""Settings of open blocks in the words of the oracle."""


def settings(words: dict[str, Any]) -> dict[str, Any]:
    return {("open_blocks" if name == "blocks" else name): value for name, value in words.items()}


def whole(forward: Any, weights: qwen3.Weights, config: Any, block: int) -> oracle.Logits:
    """Logits of a canvas in one call, nothing kept."""

    @torch.no_grad()
    def logits(tokens: Sequence[int]) -> Tensor:
        n = len(tokens)
        cache = qwen3.Cache(config, n, weights["model.norm.weight"])
        limits = [(at // block + 1) * block for at in range(n)]
        return qwen3.project(weights, forward(weights, config, tokens, range(n), limits, cache))

    return logits


@functools.cache
def sdar(block: int) -> tuple[dgraph.CompiledModel, oracle.Logits]:
    setup = setup_for(block)
    return optimized(setup, "dense"), whole(qwen3.forward, setup.weights, setup.config, block)


@functools.cache
def other(block: int) -> tuple[dgraph.CompiledModel, oracle.Logits]:
    model = dgraph.adopt(llada2.remote(), block_length=block)
    return compiled(model, "dense"), whole(plain_llada2.forward, llada2.WEIGHTS, llada2.SIZES, block)


def traces(
    made: dgraph.CompiledModel, logits: oracle.Logits, ids: Sequence[list[int]], **words: Any
) -> list[oracle.Trace]:
    spec = made.spec
    same = {"block": spec.block_length, "mask": spec.mask_id, "stops": spec.eos_ids}
    return [oracle.generate(logits, prompt, **same, **words) for prompt in ids]


def check(made: dgraph.CompiledModel, logits: oracle.Logits, threshold: float, words: dict[str, Any]) -> None:
    """Every step commits what the oracle's does; a batch is each prompt alone."""
    block = made.spec.block_length
    ids, new = prompts_for(block), 2 * new_tokens(block)
    expected = traces(made, logits, ids, new=new, threshold=threshold, **words)
    records: list[StepRecord] = []
    options = {"max_new_tokens": new, "threshold": threshold, **settings(words)}
    result = made.generate(input_ids=ids, observer=records.append, **options)
    assert result.token_ids == [trace.tokens for trace in expected]
    for index, trace in enumerate(expected):
        found = []
        for record in records:
            mine = record.sequence == index
            if mine.any():
                at = mine & record.committed
                found.append(dict(zip(record.positions[at].tolist(), record.token[at].tolist(), strict=True)))
                candidates = record.positions[mine & (record.column >= 0)] // block
                assert candidates.unique().tolist() == trace.opened[len(found) - 1]
                limits = (record.positions[mine] // block + 1) * block
                assert record.limit[mine].tolist() == limits.tolist(), "a row sees up to the end of its block"
        assert found == trace.committed
    assert result.stats.sequence_steps == [len(trace.committed) for trace in expected]
    alone = [made.generate(input_ids=[prompt], **options).token_ids[0] for prompt in ids]
    assert alone == result.token_ids


@first_cases(3, "block, threshold, words", [(b, t, w) for b, t in ((8, 0.3), (16, 0.05), (4, 0.9)) for w in MORE])
def test_every_step_is_the_oracles(block: int, threshold: float, words: dict[str, Any]) -> None:
    check(*sdar(block), threshold, words)


@first_cases(1, "words", MORE)
def test_so_it_is_of_a_mixture_of_experts(words: dict[str, Any]) -> None:
    check(*other(8), 0.3, words)


def test_one_open_block_is_the_decode_without_the_setting() -> None:
    made, logits = sdar(8)
    ids = prompts_for(8)
    usual = made.generate(input_ids=ids, max_new_tokens=30, threshold=0.3)
    found = made.generate(input_ids=ids, max_new_tokens=30, threshold=0.3, open_blocks=1, open_at=0.0, sure_at=0.0)
    assert found.token_ids == usual.token_ids
    assert found.stats.rows == usual.stats.rows
    assert found.token_ids == [t.tokens for t in traces(made, logits, ids, new=30, threshold=0.3, blocks=1)]


def test_keys_that_are_kept_are_those_of_the_final_tokens() -> None:
    """A block that was done with others open beside it has written its keys once more, as a whole sequence has them."""
    made, setup = sdar(8)[0], setup_for(8)
    ids = prompts_for(8)
    result = made.generate(
        input_ids=ids, max_new_tokens=37, threshold=0.3, open_blocks=4, keep_kv=True, ignore_eos=True
    )
    assert result.kv is not None
    for prompt, tokens, kept in zip(ids, result.token_ids, result.kv, strict=True):
        final = [*prompt, *tokens][: kept.committed]
        assert kept.committed > len(prompt) + 16
        cache = qwen3.Cache(setup.config, len(final), setup.weights["model.norm.weight"])
        limits = [(at // 8 + 1) * 8 for at in range(len(final))]
        qwen3.forward(setup.weights, setup.config, final, range(len(final)), limits, cache)
        for layer, (k, v) in enumerate(kept.layers):
            torch.testing.assert_close(k[: len(final)], cache.k[layer], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(v[: len(final)], cache.v[layer], rtol=1e-4, atol=1e-4)


def test_fixed_tokens_and_stop_tokens_count_where_they_are() -> None:
    """Blocks of fixed tokens are open like others; the first stop token without a mask before it ends the decode."""
    made, logits = sdar(8)
    prompt, new = prompts_for(8)[0], 40
    free = oracle.generate(logits, prompt, new=new, block=8, mask=made.spec.mask_id, threshold=0.3, blocks=4)
    for canvas in ([None] * 5 + [20] * 16, [21] * 11, [None, 22] * 12):
        (trace,) = traces(made, logits, [prompt], new=new, threshold=0.3, blocks=4, fixed=canvas)
        words = {"max_new_tokens": new, "threshold": 0.3, "open_blocks": 4}
        assert made.generate(input_ids=[prompt], canvas=[canvas], **words).token_ids == [trace.tokens]
    setup = setup_for(8)
    model = replace(setup.model, spec=replace(setup.model.spec, eos_ids=(free.tokens[19],)))
    ending = optimized(replace(setup, model=model), "dense")
    (trace,) = traces(ending, logits, [prompt], new=new, threshold=0.3, blocks=4)
    found = ending.generate(input_ids=[prompt], max_new_tokens=new, threshold=0.3, open_blocks=4)
    assert found.token_ids == [trace.tokens]
    assert len(trace.tokens) < new


@pytest.mark.parametrize(
    ("rule", "first"),
    [
        (ConfidenceThreshold(0.6), [False, True, False]),
        (ConfidenceThreshold(0.6, inclusive=True), [False, True, False]),
        (DynamicThreshold(0.6), [False, True, False]),
        (DynamicThreshold(0.6, fallback="leftmost"), [True, False, False]),
        (RelativeThreshold(0.6), [False, True, False]),
    ],
)
def test_a_rule_that_need_not_commit_commits_what_it_is_sure_of(rule: Any, first: list[bool]) -> None:
    """Row 0 must commit one, row 1 need not, and row 2 is sure of one token."""
    confidence = torch.tensor([[0.2, 0.5, 0.1], [0.2, 0.5, 0.1], [0.2, 0.7, 0.5]])
    one = torch.zeros(3, dtype=torch.int64)
    masked = torch.ones_like(confidence, dtype=torch.bool)
    given = {"step": one, "decoded": one, "start": one, "prompt": one}
    candidates = Candidates(one[:, None].expand(3, 3), confidence, masked, one[:, None].expand(3, 3), **given)
    must = torch.tensor([True, False, False])
    chosen = rule.choose(replace(candidates, must=must))
    assert chosen.tolist() == [first, [False, False, False], [False, True, False]]
    assert rule.choose(candidates)[1].tolist() == first


def test_settings_are_checked_and_survive_json() -> None:
    chosen = Decoding(open_blocks=4, open_at=0.25, sure_at=0.8)
    assert Decoding.from_json(chosen.to_json()) == chosen
    for words in ({"open_blocks": 0}, {"open_at": 1.5}, {"sure_at": -0.1}, {"open_at": True}):
        with pytest.raises(InputError, match=next(iter(words))):
            Decoding(**words)


@pytest.mark.parametrize(
    ("name", "recipe", "words", "told"),
    [
        ("sdar", "dense", {"steps": 4}, "FixedSteps commits something in every block"),
        ("sdar", "dense", {"policy": DynamicThreshold(0.9, steps=4)}, "DynamicThreshold commits something"),
        ("sdar", "focus", {}, "this recipe evicts rows by the statistics of one block"),
        ("sdar", "dyllm", {}, "use 'dense', or open_blocks=1"),
        ("sdar", "sparse_dllm", {}, "packs the keys around one block"),
        ("llada", "dense", {}, "rows see the whole canvas"),
        ("fast_dllm_v2", "dense", {}, "a finished block is encoded in a forward of its own"),
        ("sdar", "dense", {"sampler": Sampler(credit=Credit())}, "credit of the sampler reads the columns"),
    ],
)
def test_what_takes_one_block_refuses_several(name: str, recipe: str, words: dict[str, Any], told: str) -> None:
    (tiny,) = models(None, name)
    with pytest.raises(InputError, match=re.escape(told)):
        tiny.optimized(recipe).generate(input_ids=[[5, 6, 7]], max_new_tokens=20, open_blocks=2, **words)


@first_cases(2, "name, kind", [("sdar", "int8"), ("native", None), ("sdar", "fp8"), ("sdar_moe", "int4")])
def test_other_families_and_stored_weights_decode_with_several_blocks_open(name: str, kind: str | None) -> None:
    (tiny,) = models(None, name)
    made = dgraph.optimize(tiny.model, "dense", backend="eager", weights=kind)
    ids = [[5, 6, 7], [*range(8, 30)]]
    words = {"max_new_tokens": 30, "threshold": 0.3, "open_blocks": 4}
    together = made.generate(input_ids=ids, **words)
    assert together.token_ids == [made.generate(input_ids=[one], **words).token_ids[0] for one in ids]
    assert together.stats.steps < made.generate(input_ids=ids, **{**words, "open_blocks": 1}).stats.steps

"""Several open blocks of a sequence, against a decode without caches that recomputes everything."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import dgraph
from dgraph.errors import InputError
from dgraph.runtime import ConfidenceThreshold, StepRecord
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.policies import Candidates, DynamicThreshold, RelativeThreshold
from dgraph.testing import models
from tests.amounts import first_cases
from tests.compiled import compiled
from tests.models import test_llada2 as llada2
from tests.oracle import llada2 as plain_llada2
from tests.oracle import open_blocks as oracle
from tests.oracle import qwen3
from tests.recipes.block_causal import EOS, new_tokens, optimized, prompts_for, setup_for

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


def traces(made: dgraph.CompiledModel, logits: oracle.Logits, ids: Sequence[list[int]], **words: Any) -> list[oracle.Trace]:
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

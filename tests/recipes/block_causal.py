"""A tiny Qwen3 as a block-causal model, and its decoding against the oracle's, as tests of recipes share them."""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import dgraph
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.regions import RegionCompiler
from dgraph.plans.view import View
from dgraph.recipes import RECIPES, Recipe, build
from dgraph.runtime.sampling.random_numbers import row_seeds, sequence_keys, uniform
from dgraph.runtime.stats import StepRecord
from tests.oracle import focus as oracle
from tests.oracle.models import mask_id, random_weights, tiny_config, to_transformers
from tests.oracle.scoring import Noise

LAYERS, EOS = 3, 5


@dataclass(frozen=True, eq=False)
class Setup:
    config: Any
    weights: dict[str, torch.Tensor]
    model: dgraph.Model
    graph: dgraph.Graph


@functools.cache
def setup_for(block: int) -> Setup:
    """The same model for blocks of any length; what is captured of it does not say of which."""
    setup = _captured()
    return replace(setup, model=replace(setup.model, spec=replace(setup.model.spec, block_length=block)))


@functools.cache
def _captured() -> Setup:
    config = tiny_config(layers=LAYERS)
    weights = random_weights(config, seed=3)
    model = dgraph.adopt(to_transformers(config, weights), mask_id=mask_id(config), eos_ids=(EOS,), block_length=16)
    return Setup(config, weights, model, dgraph.capture(model))


def optimized(
    setup: Setup, recipe: str, backend: str = "eager", buckets: Any = None, fresh: bool = False, **options: Any
) -> CompiledModel:
    """The recipe for that model; equal ones share it, and the memory that they have taken, unless it is to be fresh."""
    make = _optimized.__wrapped__ if fresh else _optimized
    return make(setup, build(RECIPES, recipe, setup.model.spec, options), backend, Buckets.of(buckets))


@functools.lru_cache(maxsize=64)
def _optimized(setup: Setup, recipe: Recipe, backend: str, buckets: Buckets) -> CompiledModel:
    return CompiledModel(setup.model, setup.graph, recipe, RegionCompiler(backend), buckets)


def prompts_for(block: int) -> list[list[int]]:
    """Ragged: shorter than a block, several blocks and a remainder, exactly two blocks."""
    draw = torch.Generator().manual_seed(block)
    lengths = (block // 2 + 1, 2 * block + 3, 2 * block)
    return [torch.randint(6, 90, (n,), generator=draw).tolist() for n in lengths]


def new_tokens(block: int) -> int:
    """After a prompt of any length two blocks, one of them in part, or more."""
    return block + block // 2 + 3


def steps_of(records: list[StepRecord], prompt: int) -> list[dict[str, Any]]:
    """What the compiled program did with one prompt, in the oracle's terms."""
    found = []
    for record in records:
        mine = record.sequence == prompt
        if not mine.any():
            continue
        at = record.prompts.tolist().index(prompt)
        positions = record.positions[mine]
        found.append(
            {
                "positions": positions.tolist(),
                "masked": positions[record.candidate[mine]].tolist(),
                "kept": positions[record.kept[mine]].tolist(),
                "committed": list(
                    zip(
                        positions[record.committed[mine]].tolist(),
                        record.token[mine & record.committed].tolist(),
                        strict=True,
                    )
                ),
                "average": {"block": float(record.average[at]), "sequence": float(record.sequence_average[at])},
                "reached": int(record.states_after["reached"][at]) if record.states else None,
                "score": None if record.score is None else record.score[mine] * record.candidate[mine],
            }
        )
    return found


@functools.cache
def noise_of(prompt: int) -> Noise:
    """What a prompt's rows are drawn by at seed 0."""
    key = sequence_keys(0, torch.tensor([prompt]))

    def noise(step: int, positions: list[int]) -> torch.Tensor:
        where, when = torch.as_tensor(positions), torch.full((len(positions),), step)
        return uniform(row_seeds(key.expand(2, len(positions)), where, when))

    return noise


@functools.lru_cache(maxsize=512)
def trace_of(setup: Setup, prompt: tuple[int, ...], block: int, new: int, **words: Any) -> oracle.Trace:
    """What the oracle does with one prompt; shared by tests that run the same in other ways."""
    return oracle.generate(
        setup.weights,
        setup.config,
        prompt,
        max_new_tokens=new,
        block_length=block,
        mask_id=setup.model.spec.mask_id,
        eos_ids=(EOS,),
        **words,
    )


def check(
    setup: Setup,
    block: int,
    run: CompiledModel,
    policy: dict[str, Any],
    expected: dict[str, Any],
    near: float = 1e-4,
) -> None:
    """Every step of a generation, and its caches to within `near`, are the oracle's."""
    prompts, records = prompts_for(block), []
    new = new_tokens(block)
    over = expected.get("average_over") or ("block" if expected.get("full_steps", 1) else "sequence")
    result = run.generate(input_ids=prompts, max_new_tokens=new, keep_kv=True, observer=records.append, **policy)
    compared = 0
    for i, prompt in enumerate(prompts):
        noise = {"noise": noise_of(i)} if expected.get("select") == "random" else {}
        trace = trace_of(setup, tuple(prompt), block, new, **policy, **expected, **noise)
        assert result.token_ids[i] == trace.tokens
        mine = steps_of(records, i)
        assert len(mine) == len(trace.steps)
        plan, counts = run.recipe.plan, Counter[int]()
        for got, want in zip(mine, trace.steps, strict=True):
            # What a full step computes is kept of every row, so it may evict nothing.
            at = View(step=torch.tensor([compared]), block_step=torch.tensor([counts[want.start]]))
            average = math.inf if plan is not None and bool(plan.schedule.full(at)) else want.average
            counts[want.start] += 1
            assert got["positions"] == want.positions
            assert got["masked"] == want.masked
            assert got["kept"] == want.kept
            assert got["committed"] == want.committed
            assert got["average"][over] == pytest.approx(average, rel=1e-6)
            if expected.get("evict", True):
                assert got["reached"] == want.reached
                torch.testing.assert_close(
                    got["score"], torch.tensor(want.score, dtype=got["score"].dtype), rtol=1e-3, atol=1e-3
                )
            compared += 1
        assert result.kv is not None
        assert result.kv[i].committed == trace.committed_end
        for layer in range(LAYERS):
            for got_kv, want_kv in zip(result.kv[i].layers[layer], trace.kv(layer), strict=True):
                torch.testing.assert_close(got_kv[: trace.committed_end], want_kv, rtol=near, atol=near)
    assert compared > 3 * len(prompts), "the decode was too short to compare anything"

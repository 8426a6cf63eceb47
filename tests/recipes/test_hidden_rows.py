"""Rows that a region hides: nobody sees them, on programs whose keys lie in slots."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dgraph.compiler.compiled_model import CompiledModel
from dgraph.errors import InputError
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.regions import RegionCompiler
from dgraph.passes import SlotKV
from dgraph.plans.regions import Region, Response
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Counted
from dgraph.recipes import RECIPES, build
from dgraph.runtime import StepRecord
from tests.oracle.canvas import forward
from tests.plans.outside import Stride
from tests.recipes.bidirectional import FAMILIES, prompts_for, setup_of

BLOCK, NEW = 8, 21
pytestmark = pytest.mark.filterwarnings("ignore:block_length=8, but:dgraph.errors.DgraphWarning")


def optimized(family: str, name: str, plan: RowPlan, **options: Any) -> CompiledModel:
    setup = setup_of(family)
    model = replace(setup.model, spec=replace(setup.model.spec, block_length=BLOCK, eos_ids=()))
    recipe = replace(build(RECIPES, name, model.spec, options).inserting(SlotKV(), after="CacheKV"), plan=plan)
    return CompiledModel(model, setup.graph, recipe, RegionCompiler("eager"), Buckets())


@dataclass
class Memory:
    """Keys and values by position, of which `seen` exist."""

    seen: list[int]
    held: dict[tuple[int, int], tuple[Tensor, Tensor]]

    def write(self, layer: int, positions: list[int], k: Tensor, v: Tensor) -> None:
        for position, *both in zip(positions, k, v, strict=True):
            self.held[layer, position] = both[0], both[1]

    def read(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        assert end == len(self.seen)
        keys, values = zip(*(self.held[layer, p] for p in self.seen), strict=True)
        return torch.stack(keys), torch.stack(values)


@functools.cache
def recorded(family: str, name: str) -> list[StepRecord]:
    """Every step of three prompts, under a region that hides two of three rows after the block."""
    records: list[StepRecord] = []
    opt = optimized(family, name, RowPlan(Stride(3), Counted()))
    ids = prompts_for(BLOCK)
    opt.generate(input_ids=ids, max_new_tokens=NEW, threshold=0.7, observer=records.append)
    return records


@pytest.mark.parametrize("family", FAMILIES)
def test_only_what_exists_is_seen(family: str) -> None:
    """Each step says what a forward of the rows that exist says, prompts as their block's first step left them."""
    setup, prompts = setup_of(family), prompts_for(BLOCK)
    held: list[dict[tuple[int, int], tuple[Tensor, Tensor]]] = [{} for _ in prompts]
    starts = [len(p) for p in prompts]
    hidden, skipped, compared = set(), set(), 0
    for record in recorded(family, "dense"):
        for index, prompt in enumerate(prompts):
            own = record.sequence == index
            if not bool(own.any()):
                continue
            live, end = record.positions[own].tolist(), len(prompt) + NEW
            masked = [p + setup.shift for p in record.positions[own & record.candidate].tolist()]
            while min(masked) >= starts[index] + BLOCK:  # on to the next block
                starts[index] += BLOCK
            stop = starts[index] + BLOCK
            seen = [p for p in range(end) if p < stop or (p - stop) % 3 == 0]
            hidden.add(end - len(seen))
            skipped.add(len(seen) - len(live))
            assert set(live) == {p for p in seen if len(live) == len(seen) or p >= len(prompt) - setup.shift}
            assert set(record.limit[own].tolist()) == {len(seen)}
            memory: Any = Memory(seen, held[index])
            tokens = record.input_ids[own].tolist()
            logits = forward(setup.weights, setup.config, tokens, live, len(seen), memory)
            at = record.candidate[own]
            logits[:, setup.model.spec.mask_id] = -torch.inf
            want = logits.softmax(dim=1).max(dim=1)
            torch.testing.assert_close(record.confidence[own][at], want.values[at], atol=2e-5, rtol=2e-5)
            assert torch.equal(record.token[own][at], want.indices[at])
            compared += int(at.sum())
    assert len(hidden) > 2
    assert max(skipped) >= 8
    assert compared > 3 * NEW


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["dense", "focus", "dyllm", "dllm_cache"])
def test_where_nothing_is_hidden_nothing_changes(family: str, name: str) -> None:
    options: dict[str, Any] = {"input_ids": prompts_for(BLOCK), "max_new_tokens": NEW, "threshold": 0.7}
    plan = RowPlan(Response(), Counted(every=3))
    found = optimized(family, name, replace(plan, region=Stride(1))).generate(**options)
    setup = setup_of(family)
    model = replace(setup.model, spec=replace(setup.model.spec, block_length=BLOCK, eos_ids=()))
    recipe = replace(build(RECIPES, name, model.spec, {}), plan=plan)
    want = CompiledModel(model, setup.graph, recipe, RegionCompiler("eager"), Buckets()).generate(**options)
    assert found.token_ids == want.token_ids
    assert found.stats.kept_rows == want.stats.kept_rows


def test_a_batch_says_what_its_prompts_say_alone() -> None:
    opt, prompts = optimized("dream", "dllm_cache", RowPlan(Stride(3), Counted())), prompts_for(BLOCK)
    options: dict[str, Any] = {"max_new_tokens": NEW, "threshold": 0.7}
    together = opt.generate(input_ids=prompts, **options).token_ids
    assert together == [opt.generate(input_ids=[p], **options).token_ids[0] for p in prompts]


def test_what_does_not_go_with_hidden_rows() -> None:
    setup, plan = setup_of("llada"), RowPlan(Stride(3), Counted())
    recipe = replace(build(RECIPES, "dense", setup.model.spec, {}), plan=plan)
    with pytest.raises(InputError, match=r"hides rows, but program 'step' writes keys .* Put the pass SlotKV after"):
        CompiledModel(setup.model, setup.graph, recipe, RegionCompiler("eager"), Buckets())
    with pytest.raises(InputError, match=r"keep_kv returns keys by position, but .* hides rows"):
        optimized("llada", "dense", plan).generate(input_ids=[[7, 8]], max_new_tokens=8, keep_kv=True)
    with pytest.raises(InputError, match="hides rows, so keys change their places in the cache, but KVPlan"):
        optimized("llada", "maskkv", plan)


def test_a_block_that_a_region_hides_is_decoded_all_the_same() -> None:
    @dataclass(frozen=True)
    class Prompt(Region):
        hides = True

        def rows(self, view: Any) -> Tensor:
            return view.inside

        def seen(self, view: Any) -> Tensor:
            return view.positions < view.prompt_end[:, None]

    found = optimized("dream", "dense", RowPlan(Prompt())).generate(input_ids=[[7, 8, 9]], max_new_tokens=12)
    assert len(found.token_ids[0]) == 12

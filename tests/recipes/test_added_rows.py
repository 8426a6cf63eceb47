"""Rows that a plan adds: they see what is said, and no other row sees them (the shadow block of WINO, 2507.18578)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from dgraph.compiler.compiled_model import CompiledModel
from dgraph.errors import InputError, LoweringError
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.regions import RegionCompiler
from dgraph.ops.statistics import KL, Statistic
from dgraph.passes import AddRows, SlotKV
from dgraph.plans.regions import Block, Decoded, Region, Response
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Counted
from dgraph.recipes import RECIPES, Recipe, build
from dgraph.runtime import StepRecord
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.policies import Candidates, ConfidenceThreshold, DecodeRule, Traits
from dgraph.runtime.policies.base import best, rank
from tests.oracle.canvas import forward
from tests.plans.outside import Stride
from tests.recipes.bidirectional import FAMILIES, prompts_for, setup_of

BLOCK, NEW = 8, 21
DECODED = Decoded()
pytestmark = pytest.mark.filterwarnings("ignore:block_length=8, but:dgraph.errors.DgraphWarning")


@dataclass(frozen=True)
class Verify(DecodeRule):
    """Commit half of the masks, and take back what the added rows think least of."""

    below: float = 0.5

    name: ClassVar[str] = "verify_in_tests"
    needs: ClassVar[frozenset[str | Statistic]] = frozenset({"added", "current", "editable"})
    traits: ClassVar[Traits] = Traits(edits=True, remasks=True)

    def choose(self, candidates: Candidates) -> Tensor:
        few = rank(candidates.offered) < (candidates.masked.sum(dim=1, keepdim=True) + 1) // 2
        return (few | best(candidates.offered)) & candidates.committable

    def remask(self, candidates: Candidates, chosen: Tensor) -> Tensor:
        likely = candidates.added["current"]
        doubted = candidates.need("editable", self) & (candidates.added["token"] >= 0) & (likely < self.below)
        return doubted & (rank(torch.where(doubted, -likely, -torch.inf)) < chosen.sum(dim=1)[:, None] - 1)

    def settled(self, candidates: Candidates, chosen: Tensor) -> Tensor:
        return ~((candidates.masked & ~chosen) | self.remask(candidates, chosen)).any(dim=1)


@dataclass(frozen=True)
class VerifyMore(Verify):
    """It also asks for a statistic that is kept by position from step to step."""

    needs: ClassVar[frozenset[str | Statistic]] = Verify.needs | {KL(3)}
    name: ClassVar[str] = "verify_more_in_tests"


def recipe_of(family: str, on: str, added: Region | None, region: Region | None = None) -> Recipe:
    found = build(RECIPES, on, setup_of(family).model.spec, {}).inserting(AddRows(), after="CacheKV")
    assert found.plan is not None
    return replace(found, plan=replace(found.plan, added=added, region=region or found.plan.region))


def made(family: str, recipe: Recipe, **changes: Any) -> CompiledModel:
    setup = setup_of(family)
    model = replace(setup.model, spec=replace(setup.model.spec, block_length=BLOCK, eos_ids=()))
    return CompiledModel(model, setup.graph, recipe, RegionCompiler("eager"), Buckets(), **changes)


def optimized(family: str, on: str = "dense", added: Region | None = DECODED) -> CompiledModel:
    return made(family, recipe_of(family, on, added))


@dataclass
class Canvas:
    """Keys and values by position as a program's caches hold them, and one more row that sees some of them."""

    held: dict[tuple[int, int], tuple[Tensor, Tensor]]
    gap: range | None = None

    def write(self, layer: int, positions: list[int], k: Tensor, v: Tensor) -> None:
        if self.gap is not None:
            self.own = k, v
            return
        for position, *both in zip(positions, k, v, strict=True):
            self.held[layer, position] = both[0], both[1]

    def read(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        seen = [p for p in range(end) if self.gap is None or p not in self.gap]
        keys, values = (torch.stack(x) for x in zip(*(self.held[layer, p] for p in seen), strict=True))
        if self.gap is None:
            return keys, values
        return torch.cat([keys, self.own[0]]), torch.cat([values, self.own[1]])


@pytest.mark.parametrize("on", ["dense", "fast_dllm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_says_what_it_says_alone(family: str, on: str) -> None:
    """The rows of a sequence over all of its keys, and each added row over all but one or two and its own."""
    setup, prompts, records = setup_of(family), prompts_for(BLOCK), list[StepRecord]()
    optimized(family, on).generate(input_ids=prompts, max_new_tokens=NEW, policy=Verify(0.2), observer=records.append)
    held: list[dict[tuple[int, int], tuple[Tensor, Tensor]]] = [{} for _ in prompts]
    compared = 0
    for record in records:
        assert record.added is not None
        for index, prompt in enumerate(prompts):
            own, end = record.sequence == index, len(prompt) + NEW
            if not bool(own.any()):
                continue
            order = record.positions[own & ~record.added].tolist()
            assert order == sorted(order)
            assert record.added[own].tolist() == sorted(record.added[own].tolist()), "after the others"
            assert not bool(record.committed[record.added].any())
            for rows in (own & ~record.added, *(torch.arange(len(own)) == i for i in (own & record.added).nonzero())):
                live, tokens = record.positions[rows].tolist(), record.input_ids[rows].tolist()
                extra = bool(record.added[rows][0])
                if extra and not setup.shift:
                    assert tokens == [setup.model.spec.mask_id]
                gap = range(live[0], live[0] + 1 + setup.shift) if extra else None
                memory: Any = Canvas(held[index], gap)
                logits = forward(setup.weights, setup.config, tokens, live, end, memory)
                at = record.candidate[rows]
                logits[:, setup.model.spec.mask_id] = -torch.inf
                want = logits.softmax(dim=1).max(dim=1)
                torch.testing.assert_close(record.confidence[rows][at], want.values[at], atol=2e-5, rtol=2e-5)
                assert torch.equal(record.token[rows][at], want.indices[at])
                compared += extra
    assert compared > 3 * NEW


@pytest.mark.parametrize("on", ["dense", "fast_dllm", "dkv_cache"])
@pytest.mark.parametrize("added", [Decoded(), Block()])
def test_they_change_nothing_for_others(on: str, added: Region) -> None:
    """Tokens, keys and values of a rule that does not look at them; their rows are counted."""
    options: dict[str, Any] = {"input_ids": prompts_for(BLOCK), "max_new_tokens": NEW, "threshold": 0.7}
    for family in FAMILIES:
        want = made(family, build(RECIPES, on, setup_of(family).model.spec, {})).generate(**options, keep_kv=True)
        found = optimized(family, on, added).generate(**options, keep_kv=True)
        assert found.token_ids == want.token_ids
        assert found.stats.steps == want.stats.steps
        assert sum(found.stats.step_rows) > sum(want.stats.step_rows)
        assert found.stats.rows_per_token > want.stats.rows_per_token
        assert found.stats.commit_rows == want.stats.commit_rows
        for one, other in zip(found.kv or (), want.kv or (), strict=True):
            for mine, theirs in zip(one.layers, other.layers, strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_they_stand_among_rows_that_a_region_hides() -> None:
    """Where nothing is hidden, slots are positions; where something is, a prompt of a batch gets what it gets alone."""
    plan = RowPlan(Response(), Counted(every=3), added=Decoded())
    for family in FAMILIES:
        base = recipe_of(family, "dense", None)
        slots, options = base.inserting(SlotKV(), after="CacheKV"), {"max_new_tokens": NEW, "policy": Verify()}
        ids = prompts_for(BLOCK)
        want = made(family, replace(base, plan=plan)).generate(input_ids=ids, **options)
        all_seen = made(family, replace(slots, plan=replace(plan, region=Stride(1))))
        assert all_seen.generate(input_ids=ids, **options).token_ids == want.token_ids
        some = made(family, replace(slots, plan=replace(plan, region=Stride(3))))
        together = some.generate(input_ids=ids, **options).token_ids
        assert together != want.token_ids
        assert together == [some.generate(input_ids=[p], **options).token_ids[0] for p in ids]


def test_a_batch_and_an_engine_say_what_prompts_say_alone() -> None:
    ids = prompts_for(BLOCK)
    rules = [Verify(), ConfidenceThreshold(0.7), *[VerifyMore()] * (len(ids) - 2)]
    for on in ("dense", "fast_dllm"):
        opt = optimized("dream", on)
        alone = [opt.generate(input_ids=[p], max_new_tokens=NEW, policy=Verify()).token_ids[0] for p in ids]
        assert opt.generate(input_ids=ids, max_new_tokens=NEW, policy=Verify()).token_ids == alone
        assert opt.generate(input_ids=ids, max_new_tokens=NEW, policy=VerifyMore()).token_ids == alone

    with opt.engine(max_sequences=3, max_tokens=64, block_length=BLOCK) as engine:
        found = engine.generate(input_ids=ids, decoding=[Decoding(max_new_tokens=NEW, policy=rule) for rule in rules])
    for one, want, rule in zip(found, alone, rules, strict=True):
        assert rule == ConfidenceThreshold(0.7) or one.token_ids == want


def test_samplers_that_read_logits_see_them_too() -> None:
    """The same tokens from whole logits as from the chunked head, with statistics that are kept by position."""
    opt, options = optimized("llada"), {"input_ids": prompts_for(BLOCK), "max_new_tokens": NEW}
    want = opt.generate(**options, policy=VerifyMore())
    assert opt.generate(**options, policy=VerifyMore(), top_p=0.999999).token_ids == want.token_ids


def test_given_positions_need_no_row() -> None:
    records: list[StepRecord] = []
    opt = optimized("llada", added=Block())
    canvas = [None, 9, None, None, 11, *[None] * 7]
    opt.generate(input_ids=[[7, 8, 9]], canvas=[canvas], max_new_tokens=12, threshold=0.9, observer=records.append)
    positions = {int(p) for r in records if r.added is not None for p in r.positions[r.added]}
    assert positions == {3, 5, 6, *range(8, 15)}


def test_a_plan_is_a_value() -> None:
    plan = RowPlan(added=Decoded())
    assert RowPlan.from_json(plan.to_json()) == plan
    assert "added" not in RowPlan().to_json()
    assert "added" not in repr(RowPlan())
    assert repr(plan).endswith("first='policy', added=Decoded())")
    assert not RowPlan(Block(), Counted(), added=Decoded()).fits_blocks


def test_what_cannot_be() -> None:
    with pytest.raises(InputError, match=r"added must be a .*Region that hides no row .*, got Stride\(stride=2\)"):
        RowPlan(added=Stride())
    plain = build(RECIPES, "dense", setup_of("llada").model.spec, {})
    with pytest.raises(InputError, match=r"the row plan adds rows, but program 'step' .* Put the pass AddRows"):
        made("llada", replace(plain, plan=RowPlan(added=Decoded())))
    with pytest.raises(LoweringError, match="reads inputs that the decode loop does not have: added, gap"):
        optimized("llada", added=None)
    with pytest.raises(InputError, match=r"Verify: needs added, got none; it takes a row plan that adds rows"):
        made("llada", plain).generate(input_ids=[[7, 8]], max_new_tokens=8, policy=Verify())

"""What a rule may know besides its candidates' tokens: the token that stands, and the model that it decodes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import pytest
import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.statistics import Statistic
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.policies import Candidates, DecodeRule, PolicyMix, Traits
from dgraph.runtime.policies.base import best
from dgraph.spec import ModelSpec
from dgraph.testing import TinyModel, models, prompts, ranks

NEW = 12


@dataclass(frozen=True)
class Doubting(DecodeRule):
    """Commit the two surest masks; mask the decoded token with the smallest probability again, if that is below `least`
    and two were committed.
    """

    least: float = 0.5

    traits: ClassVar[Traits] = Traits(edits=True, remasks=True)

    @property
    def needs(self) -> frozenset[str | Statistic]:
        return frozenset({"current", "editable"})

    def choose(self, candidates: Candidates) -> Tensor:
        first = best(candidates.offered) & candidates.committable
        offered = candidates.offered.masked_fill(first, -torch.inf)
        return first | (best(offered) & candidates.committable & ~first)

    def remask(self, candidates: Candidates, chosen: Tensor) -> Tensor:
        doubted = torch.where(candidates.need("editable", self), candidates.need("current", self), torch.inf)
        return best(-doubted) & (doubted < self.least) & (chosen.sum(dim=1) == 2)[:, None]


@dataclass(eq=False)
class Watched:
    """The rule, and for each step the block's tokens, where current is measured, and its values."""

    rule: Doubting
    seen: list[tuple[Tensor, Tensor, Tensor]]

    def __post_init__(self) -> None:
        self.needs, self.traits, self.remask = self.rule.needs, self.rule.traits, self.rule.remask
        self.settled = self.rule.settled

    def choose(self, candidates: Candidates) -> Tensor:
        values = candidates.current, candidates.need("editable", self), candidates.need("current", self)
        self.seen.append(tuple(each.clone() for each in values))  # type: ignore[arg-type]
        return self.rule.choose(candidates)


def run(tiny: TinyModel, recipe: Any, policy: Any, ids: list[list[int]] | None = None) -> list[list[int]]:
    return tiny.optimized(recipe).generate(input_ids=ids or prompts(tiny), max_new_tokens=NEW, policy=policy).token_ids


@pytest.mark.parametrize("tiny", models(None, "llada", "dream"), ids=str)
def test_the_probability_of_what_stands_is_that_of_the_models_own_logits(tiny: TinyModel) -> None:
    """In the first block of one prompt, of chunks and of whole logits; 0 where a mask stands."""
    spec = tiny.model.spec
    prompt, several = list(range(6, 6 + 2 * spec.block_length)), []
    for recipe in (tiny.recipe("dense"), tiny.recipe("dense").keeping_logits()):
        watched = Watched(Doubting(), [])
        tokens = run(tiny, recipe, watched, [prompt])
        several.append((tokens, watched.seen))
    assert several[0][0] == several[1][0]
    masks = [spec.mask_id] * NEW
    positions = torch.arange(len(prompt) + len(masks))
    most = 0
    for (block, editable, value), (_, _, other) in zip(several[0][1], several[1][1], strict=True):
        torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-6)
        most = max(most, int(editable.sum()))
        if most and not editable.any():
            break  # the next block
        canvas = torch.tensor([*prompt, *masks])
        size = min(block.shape[1], len(masks))
        canvas[len(prompt) : len(prompt) + size] = block[0, :size]
        logits = tiny.model.module(canvas[None], positions[None])[0]
        logits[:, spec.mask_id] = -torch.inf
        about = logits.softmax(-1)[torch.arange(size) + len(prompt) - spec.logit_shift]
        want = torch.where(editable[0, :size], about.gather(1, block[0, :size, None])[:, 0], 0.0)
        torch.testing.assert_close(value[0, :size], want, rtol=1e-3, atol=1e-5)
    assert most > 2


@pytest.mark.parametrize("name", ["sdar", "dream"])
def test_a_rule_that_doubts_decodes_alike_alone_in_an_engine_and_on_ranks(name: str) -> None:
    (tiny,) = models(None, name)
    rule, ids = Doubting(0.9), prompts(tiny)
    want = run(tiny, "dense", rule)
    assert want != run(tiny, "dense", Doubting(0.0)), "some token is masked again"
    assert [run(tiny, "dense", rule, [prompt])[0] for prompt in ids] == want
    with tiny.optimized("dense").engine(max_sequences=2) as engine:
        assert [one.token_ids for one in engine.generate(ids, max_new_tokens=NEW, policy=rule)] == want
    decoded: dict[str, Any] = {"input_ids": ids, "max_new_tokens": NEW, "policy": rule}
    found = ranks(2, lambda rank: tiny.on_rank(rank, 2, "dense").generate(**decoded).token_ids)
    assert found == [want] * 2


@dataclass(frozen=True)
class UpToEnd(DecodeRule):
    """Commit the block at once, with its stop tokens last; it knows the model."""

    end_ids: tuple[int, ...] | None = None
    block: int | None = None
    mask_id: int | None = None

    name: ClassVar[str] = "up_to_end"
    traits: ClassVar[Traits] = Traits(may_wait=True)

    def bind(self, spec: ModelSpec) -> Self:
        ends = spec.eos_ids if self.end_ids is None else self.end_ids
        return replace(self, end_ids=ends, block=spec.block_length, mask_id=spec.mask_id)

    def choose(self, candidates: Candidates) -> Tensor:
        assert self.block == candidates.token.shape[1]
        assert self.mask_id is not None
        assert bool(((candidates.current == self.mask_id) == candidates.masked).all())
        end = torch.zeros_like(candidates.masked)
        for token in self.end_ids or ():
            end = end | (candidates.token == token)
        others = candidates.committable & ~end
        return torch.where(others.any(dim=1, keepdim=True), others, candidates.committable)


def test_a_rule_knows_the_model_and_the_block_that_it_decodes() -> None:
    (tiny,) = models(None, "llada")
    spec, rule = tiny.model.spec, UpToEnd()
    chosen = Decoding(policy=rule, block_length=4).for_model(spec)
    assert chosen.rule == UpToEnd(spec.eos_ids, 4, spec.mask_id)
    assert chosen.for_model(spec) is chosen, "bound once is bound"
    assert Decoding(policy=rule).for_model(spec, 16).rule.block == 16  # type: ignore[attr-defined]
    mixed = Decoding(policy=PolicyMix((rule, Doubting()))).for_model(spec).rule
    assert isinstance(mixed, PolicyMix)
    assert mixed.kinds == (UpToEnd(spec.eos_ids, spec.block_length, spec.mask_id), Doubting())
    plain = Decoding(threshold=0.5)
    assert plain.for_model(spec) is plain, "a rule that needs to know nothing"
    made, ids = tiny.optimized("dense"), prompts(tiny)
    options: dict[str, Any] = {"max_new_tokens": NEW, "policy": rule}
    want = made.generate(input_ids=ids, block_length=6, **options).token_ids
    with made.engine(max_sequences=2, block_length=6) as engine:
        assert [one.token_ids for one in engine.generate(ids, **options)] == want


def test_a_binding_that_returns_something_else_is_refused() -> None:
    @dataclass(frozen=True)
    class Lost(UpToEnd):
        def bind(self, spec: ModelSpec) -> Any:
            return None

    (tiny,) = models(None, "llada")
    with pytest.raises(InputError, match=r"Lost\.bind\(spec\) returns a Lost, got None; return self, or"):
        tiny.optimized("dense").generate(input_ids=[[5, 6]], policy=Lost())

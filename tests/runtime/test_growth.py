"""Responses that grow: at their end and within a block, on every kind of model, in `generate` and in the engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.policies import Candidates, Carried, ConfidenceThreshold, DecodeRule, Traits
from dgraph.runtime.policies.base import best
from dgraph.runtime.state.growth import Growth, shifted
from dgraph.testing import TinyModel, models, prompts
from tests.amounts import first_cases

NEW = 24


@dataclass(frozen=True)
class Growing(DecodeRule):
    """Commit the surest mask; where its id is 0 or 1 modulo 5, the response grows by `by`."""

    first: int = 6
    by: int = 3

    name: ClassVar[str] = "growing"
    traits: ClassVar[Traits] = Traits(extends=True)

    @property
    def first_length(self) -> int:
        return self.first

    def choose(self, candidates: Candidates) -> Tensor:
        return best(candidates.offered) & candidates.committable

    def _grows(self, candidates: Candidates, chosen: Tensor) -> Tensor:
        return (chosen & (candidates.token % 5 < 2)).any(dim=1)

    def extend(self, candidates: Candidates, chosen: Tensor) -> Tensor:
        assert candidates.room is not None
        return self.by * self._grows(candidates, chosen)


@dataclass(frozen=True)
class Inserting(Growing):
    """The same, but the masks follow the second column of the block where there is no stop token, and one is added at
    the end. It carries the step in which each position was committed.
    """

    traits: ClassVar[Traits] = Traits(extends=True, inserts=True)

    @property
    def carries(self) -> tuple[Carried, ...]:
        return (Carried("when", torch.int64, fill=-1),)

    def extend(self, candidates: Candidates, chosen: Tensor) -> Tensor:
        more = torch.zeros(len(chosen), chosen.shape[1] + 1, dtype=torch.int64, device=chosen.device)
        more[:, 1] = self.by * self._grows(candidates, chosen)
        more[:, -1] = 1
        return more

    def carry(self, candidates: Candidates, chosen: Tensor) -> Mapping[str, Tensor]:
        when = candidates.carried["when"]
        assert not bool(((when >= 0) & candidates.masked).any()), "what is carried moves with its position"
        return {"when": torch.where(chosen, candidates.step[:, None], when)}


@dataclass(frozen=True)
class Patient(Growing):
    """The same, but the response grows in its first six steps."""

    @property
    def carries(self) -> tuple[Carried, ...]:
        return (Carried("steps", torch.int64, per="sequence", lasts="sequence"),)

    def extend(self, candidates: Candidates, chosen: Tensor) -> Tensor:
        return self.by * (candidates.carried["steps"] < 6)

    def carry(self, candidates: Candidates, chosen: Tensor) -> Mapping[str, Tensor]:
        return {"steps": candidates.carried["steps"] + 1}


def plain(tiny: TinyModel, prompt: list[int], rule: Growing, block: int, inserts: bool = False) -> list[int]:
    """The rule for one prompt of a bidirectional model, in lists."""
    spec = tiny.model.spec
    canvas, bound = [spec.mask_id] * rule.first, NEW
    start = 0
    while True:
        while start < len(canvas) and spec.mask_id not in canvas[start : start + block]:
            start += block
        if start >= len(canvas):
            break
        tokens = torch.tensor([*prompt, *canvas])
        logits = tiny.model.module(tokens[None], torch.arange(len(tokens))[None])[0]
        logits[:, spec.mask_id] = -math.inf
        p = logits.softmax(-1)[len(prompt) - spec.logit_shift :]
        columns = [c for c in range(start, min(start + block, len(canvas))) if canvas[c] == spec.mask_id]
        at = max(columns, key=lambda c: float(p[c].max()))
        canvas[at] = int(p[at].argmax())
        more = rule.by if canvas[at] % 5 < 2 else 0
        if inserts:
            room = bound - len(canvas)
            if more <= room:
                canvas[start + 2 : start + 2] = [spec.mask_id] * more
            more = 1
        canvas += [spec.mask_id] * min(more, bound - len(canvas))
        ended = canvas[start : start + block]
        first = next((t for t in ended if t in spec.eos_ids or t == spec.mask_id), None)
        if first is not None and first != spec.mask_id:
            break
    stop = next((i for i, t in enumerate(canvas) if t in spec.eos_ids), len(canvas))
    return canvas[:stop]


def run(tiny: TinyModel, recipe: Any, rule: Any, ids: list[list[int]] | None = None, **more: Any) -> Any:
    return tiny.optimized(recipe).generate(input_ids=ids or prompts(tiny), max_new_tokens=NEW, policy=rule, **more)


@pytest.mark.parametrize("tiny", models(None, "llada", "dream"), ids=str)
@pytest.mark.parametrize("rule", [Growing(), Growing(3, 1), Inserting(6, 2), Inserting(5, 7)], ids=str)
@torch.no_grad()
def test_a_response_grows_as_in_plain_lists(tiny: TinyModel, rule: Growing) -> None:
    block = tiny.model.spec.block_length
    want = [plain(tiny, prompt, rule, block, isinstance(rule, Inserting)) for prompt in prompts(tiny)]
    found = run(tiny, "dense", rule)
    assert found.token_ids == want
    assert any(len(tokens) > rule.first for tokens in want)


FAMILIES = ["llada", "sdar", "fast_dllm_v2", "dream", "llada2", "nemotron"]


@first_cases(3, "name", FAMILIES)
def test_a_batch_and_an_engine_give_what_a_prompt_gets_alone(name: str) -> None:
    (tiny,) = models(None, name)
    rules = [Growing(5, 2), *([Inserting(5, 2)] if tiny.model.spec.attention == "bidirectional" else [])]
    made, ids = tiny.optimized("dense"), prompts(tiny)
    want = {rule: [run(tiny, "dense", rule, [prompt]).token_ids[0] for prompt in ids] for rule in rules}
    for rule in rules:
        assert run(tiny, "dense", rule).token_ids == want[rule]
        assert run(tiny, "dense", rule, max_batch=1).token_ids == want[rule]
    others = made.generate(input_ids=ids, max_new_tokens=NEW, threshold=0.5).token_ids
    with made.engine(max_sequences=2) as engine:
        asked = [(ids, rule, want[rule]) for rule in rules] + [(ids, ConfidenceThreshold(0.5), others)]
        every = [prompt for several, _, _ in asked for prompt in several]
        decodings = [Decoding(max_new_tokens=NEW, policy=rule) for several, rule, _ in asked for _ in several]
        found = engine.generate(input_ids=every, decoding=decodings)
        assert [one.token_ids for one in found] == [tokens for _, _, each in asked for tokens in each]
        assert engine.stats.free_pages == engine.stats.pages


@first_cases(2, "recipe", ["fast_dllm", "maskkv", "dkv_cache", "dllm_cache", "focus", "dyllm", "sparse_dllm"])
def test_under_every_kind_of_recipe_rows_that_are_new_have_keys(recipe: str) -> None:
    """A step that follows a growth forwards every row; where all steps do, the tokens are those of dense."""
    (tiny,) = models(None, "llada")
    for rule in (Growing(5, 2), Inserting(5, 2)):
        found = run(tiny, recipe, rule)
        assert found.token_ids == [run(tiny, recipe, rule, [prompt]).token_ids[0] for prompt in prompts(tiny)]
        assert max(map(len, found.token_ids)) > rule.first


@first_cases(3, "recipe", ["fast_dllm", "focus", "dyllm", "dllm_cache", "maskkv", "sparse_dllm"])
def test_while_a_response_grows_every_step_is_one_of_dense(recipe: str) -> None:
    """It grows with every token, so steps forward all rows and evict, skip and reuse nothing."""
    (tiny,) = models(None, "llada")
    first = NEW - tiny.model.spec.block_length

    @dataclass(frozen=True)
    class Always(Growing):
        def _grows(self, candidates: Candidates, chosen: Tensor) -> Tensor:
            return chosen.any(dim=1)

    options: dict[str, Any] = {"ignore_eos": True}
    want, found = (run(tiny, each, Always(first, 1), **options).token_ids for each in ("dense", recipe))
    grows = NEW - first
    assert [ids[:grows] for ids in found] == [ids[:grows] for ids in want]


def test_a_growth_is_what_there_is_room_for() -> None:
    more = torch.tensor([[0, 2, 1], [3, 0, 0], [1, 0, 9], [1, 0, 0], [-4, 0, 2]])
    found = Growth.of(more, 2, torch.tensor([5, 2, 4, 8, 8]), torch.tensor([False, False, False, True, False]))
    assert found.inserted is not None
    assert found.inserted.tolist() == [[0, 2], [0, 0], [1, 0], [0, 0], [0, 0]]
    assert found.total.tolist() == [3, 0, 4, 0, 2]
    assert Growth.of(torch.tensor([3, 9]), 2, torch.tensor([4, 4]), torch.zeros(2).bool()).total.tolist() == [3, 4]
    values, added = torch.arange(5)[None], torch.tensor([[0, 2, 0, 0, 0]])
    assert shifted(values, added, -1).tolist() == [[0, 1, -1, -1, 2]]
    with pytest.raises(InputError, match=r"extend returns a tensor i64\[b\], or i64\[b, B \+ 1\].*b = 2, B = 4.*\[3\]"):
        Growth.of(torch.zeros(3).long(), 4, torch.zeros(2).long(), torch.zeros(2).bool())


def test_lengths_that_a_request_asks_for_hold() -> None:
    """Fixed tokens and min_tokens are within the first length, and a stop token ends what has grown."""
    (tiny,) = models(None, "llada")
    made, rule = tiny.optimized("dense"), Growing(2, 0)
    ids = prompts(tiny)[:1]
    options: dict[str, Any] = {"input_ids": ids, "max_new_tokens": NEW, "policy": rule, "ignore_eos": True}
    assert len(made.generate(**options).token_ids[0]) == 2
    assert len(made.generate(**options, min_tokens=7).token_ids[0]) == 7
    found = made.generate(**options, canvas=[[None, 5, 6, None, 7]]).token_ids[0]
    assert (len(found), found[1], found[2], found[4]) == (6, 5, 6, 7)
    fixed = made.generate(**{**options, "policy": Inserting(2, 2)}, canvas=[[None, 5, 6, None, 7]]).token_ids[0]
    assert (fixed[1], fixed[2], fixed[4]) == (5, 6, 7), "nothing is inserted before fixed tokens"


def test_what_a_model_cannot_do_is_refused() -> None:
    (tiny,) = models(None, "sdar")
    with pytest.raises(
        InputError, match="Inserting inserts masks, which takes a bidirectional model; the rows of sdar"
    ):
        run(tiny, "dense", Inserting())

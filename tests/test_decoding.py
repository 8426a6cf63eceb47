"""Rules, samplers and stop texts as a caller of `generate` meets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dgraph
from dgraph.errors import InputError, UnknownName
from dgraph.runtime import ConfidenceThreshold, StepRecord
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.policies import PRESETS, JointThreshold, policy_sampler, traits_of
from dgraph.runtime.sampling.sampler import RowContext, Sampler
from dgraph.testing import models, prompts
from tests.compiled import compiled

PROMPTS = ["Sort these words: river stone cloud maple", "river is 123. stone is 456. cloud is 789. What is stone?"]
OPTIONS: dict[str, Any] = {"max_new_tokens": 40}


@pytest.fixture(scope="module")
def dense() -> dgraph.CompiledModel:
    return compiled("tiny_sdar", "dense")


@pytest.fixture(scope="module")
def focus() -> dgraph.CompiledModel:
    return compiled("tiny_sdar", "focus", full_steps=0)


@pytest.mark.parametrize("name", sorted(name for name in PRESETS if not traits_of(PRESETS[name]).renoises))
def test_every_published_rule_decodes_to_the_end(name: str) -> None:
    (tiny,) = models(None, "sdar")
    options = {**OPTIONS, "ignore_eos": True, **({"steps": 8} if hasattr(PRESETS[name], "steps") else {})}
    made, ids = tiny.optimized("dense"), prompts(tiny)[:2]
    result = made.generate(input_ids=ids, policy=name, **options)
    assert [len(found) for found in result.token_ids] == [40, 40]
    assert result.stats.decoded >= sum(map(len, result.token_ids))
    alone = [made.generate(input_ids=[prompt], policy=name, **options).token_ids[0] for prompt in ids]
    if not (PRESETS[name].needs & {"noise", "order"} or policy_sampler(PRESETS[name]).temperature):
        # Draws and drawn orders belong to the index of a prompt.
        assert alone == result.token_ids


@pytest.mark.parametrize("name", ["llada", "dream_entropy", "dream_topk_margin", "sdar_dynamic", "dinfer_factor"])
def test_rules_go_with_evicted_rows(focus: dgraph.CompiledModel, name: str) -> None:
    steps = {"steps": 8} if hasattr(PRESETS[name], "steps") else {}
    result = focus.generate(PROMPTS, policy=name, **steps, **OPTIONS)
    assert all(result.token_ids)
    assert result.stats.kept_rows < result.stats.rows["prefix"]


def test_a_rule_that_edits_replaces_tokens_and_ends(dense: dgraph.CompiledModel, focus: dgraph.CompiledModel) -> None:
    records: list[StepRecord] = []
    # So low a threshold writes much that is wrong at first.
    rule = JointThreshold(threshold=0.05)
    result = dense.generate(PROMPTS, policy=rule, observer=records.append, **OPTIONS)
    seen: dict[tuple[int, int], set[int]] = {}
    for record in records:
        at = zip(record.sequence[record.committed].tolist(), record.committed_positions.tolist(), strict=True)
        for place, token in zip(at, record.committed_tokens.tolist(), strict=True):
            seen.setdefault(place, set()).add(token)
    assert any(len(tokens) > 1 for tokens in seen.values()), "nothing was edited"
    assert result.texts == dense.generate(PROMPTS, policy=rule, **OPTIONS).texts
    never = JointThreshold(threshold=0.9, edit_threshold=1.0, max_post_edit_steps=0)
    plain = ConfidenceThreshold(0.9)
    assert (
        dense.generate(PROMPTS, policy=never, **OPTIONS).texts == dense.generate(PROMPTS, policy=plain, **OPTIONS).texts
    )
    with pytest.raises(InputError, match=r"use a recipe that evicts none|use block_cache='off'"):
        focus.generate(PROMPTS, policy=rule, **OPTIONS)


def test_a_last_block_that_is_cut_short_is_edited_as_a_whole(dense: dgraph.CompiledModel) -> None:
    """Columns after the last new token are decoded with the block, so what they become must not depend on the cut."""
    prompt, rule = [*range(40, 49)], JointThreshold(threshold=0.05)
    new = 2 * dense.spec.block_length - len(prompt)
    whole, short = (dense.generate(input_ids=[prompt], max_new_tokens=n, policy=rule) for n in (new, new - 11))
    assert len(whole.token_ids[0]) == new
    assert short.token_ids[0] == whole.token_ids[0][: new - 11]
    assert short.stats.steps == whole.stats.steps


def test_a_sampler_that_needs_logits_gets_them(dense: dgraph.CompiledModel) -> None:
    expected = dense.generate(PROMPTS, **OPTIONS)
    same = dense.generate(PROMPTS, sampler=Sampler(top_k=dense.spec.vocab - 1), **OPTIONS)
    assert same.token_ids == expected.token_ids
    banned = expected.token_ids[0][0]
    without = dense.generate(PROMPTS, sampler=Sampler(suppress=(banned,)), **OPTIONS)
    assert banned not in without.token_ids[0]
    drawn = [dense.generate(PROMPTS, temperature=4.0, top_p=0.9, top_k=20, seed=s, **OPTIONS) for s in (1, 1, 2)]
    assert drawn[0].token_ids == drawn[1].token_ids != drawn[2].token_ids


def test_dreams_own_sampler_looks_at_fifty_tokens(dense: dgraph.CompiledModel) -> None:
    """No prediction changes by it, but the entropy does, by which the rule chooses."""
    seen: dict[str, list[StepRecord]] = {"dream": [], "all": []}
    for name, said in (("dream", {}), ("all", {"top_k": 0})):
        dense.generate(PROMPTS, policy="dream_entropy", steps=8, observer=seen[name].append, **said, **OPTIONS)
    first, whole = seen["dream"][0], seen["all"][0]
    assert torch.equal(first.token, whole.token)
    assert (first.confidence >= whole.confidence).all()
    assert (first.confidence > whole.confidence).any()


def test_a_preset_of_dream_brings_its_sampler() -> None:
    assert {n for n, rule in PRESETS.items() if rule.sampler is not None} == {n for n in PRESETS if "dream" in n}
    assert Decoding(policy="dream_origin").sampling == Sampler(top_k=50)
    assert Decoding(policy="dream_readme").sampling == Sampler(temperature=0.2, top_p=0.95, top_k=50)
    assert Decoding(policy="dream_entropy", temperature=0.3).sampling == Sampler(temperature=0.3, top_k=50)
    assert not Decoding(policy="dream_entropy", top_k=0).sampling.needs_logits
    assert Decoding(policy="dream_entropy", sampler=Sampler()).sampling == Sampler()
    with pytest.raises(InputError, match=r"sampler must be a dgraph\.Sampler, got 'dream'"):
        Decoding(sampler="dream")  # type: ignore[arg-type]


def test_a_callers_processor_sees_where_its_rows_are(dense: dgraph.CompiledModel) -> None:
    seen: list[RowContext] = []
    wanted = 17

    def processor(logits: Tensor, context: RowContext) -> Tensor:
        seen.append(context)
        return torch.where(context.position[:, None] % 2 == 0, torch.eye(logits.shape[1])[wanted] * 99, logits)

    ids = [list(range(10, 20)), list(range(30, 41))]
    found = dense.generate(input_ids=ids, sampler=Sampler(processors=(processor,)), max_new_tokens=12)
    for prompt, answer in zip(ids, found.token_ids, strict=True):
        assert all(t == wanted for i, t in enumerate(answer, len(prompt)) if i % 2 == 0)
    assert all((c.tokens.shape[0], c.block) == (2, dense.spec.block_length) for c in seen)


@pytest.mark.filterwarnings("ignore:block_length=8, but:dgraph.errors.DgraphWarning")
def test_guidance_compares_with_the_canvas_without_its_prompt() -> None:
    model = dgraph.load("tiny_llada")
    run = dgraph.optimize(model, "dense", backend="eager")
    seen: list[tuple[Tensor, RowContext]] = []

    def look(logits: Tensor, context: RowContext) -> Tensor:
        seen.append((logits, context))
        return logits

    ids = [list(range(40, 60)), list(range(30, 41))]
    new, scale = 12, 1.5
    run.generate(
        input_ids=ids, max_new_tokens=new, block_length=8, steps=4, sampler=Sampler(cfg_scale=scale, processors=(look,))
    )
    logits, context = seen[0]
    for sequence, prompt in enumerate(ids):
        mine = context.sequence == sequence
        masks = [model.spec.mask_id]
        canvas = torch.tensor([[*prompt, *masks * new], masks * (len(prompt) + new)])
        both = model.module(canvas, torch.arange(canvas.shape[1]).expand(2, -1)).detach()
        given, without = both[:, context.position[mine]]
        torch.testing.assert_close(context.unconditional[mine], without, rtol=1e-4, atol=1e-4)  # type: ignore[index]
        torch.testing.assert_close(logits[mine], without + (scale + 1) * (given - without), rtol=1e-3, atol=1e-3)


def test_guidance_goes_with_a_block_causal_model_and_not_with_eviction(
    dense: dgraph.CompiledModel, focus: dgraph.CompiledModel
) -> None:
    guided = Sampler(cfg_scale=2.0)
    first = dense.generate(PROMPTS, sampler=guided, **OPTIONS)
    alone = [dense.generate(prompt, sampler=guided, **OPTIONS).token_ids[0] for prompt in PROMPTS]
    assert first.token_ids == alone
    assert dense._session.kv.pages == dense._session.kv.free_pages
    with pytest.raises(InputError, match="evicts rows, in the two not the same"):
        focus.generate(PROMPTS, sampler=guided, **OPTIONS)


def test_stop_texts_end_a_response(dense: dgraph.CompiledModel) -> None:
    whole = dense.generate(PROMPTS, **OPTIONS)
    assert whole.texts is not None
    cut = dense.generate(PROMPTS, stop=["####"], **OPTIONS)
    assert cut.texts == [text.partition("####")[0] for text in whole.texts]
    assert cut.texts != whole.texts
    assert all(len(a) < len(b) for a, b in zip(cut.token_ids, whole.token_ids, strict=True))
    going_on = dense.generate(PROMPTS, **OPTIONS | {"ignore_eos": True})
    stopped = dense.generate(PROMPTS, stop=["####"], **OPTIONS | {"ignore_eos": True})
    assert stopped.texts == cut.texts
    for few, many in zip(stopped.stats.sequence_steps, going_on.stats.sequence_steps, strict=True):
        assert few < many, "steps after it do not count"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"policy": "dreem"}, UnknownName, "unknown decode policy 'dreem'"),
        ({"policy": "dream_entropy", "threshold": 0.5}, UnknownName, "option of decode policy 'dream_entropy'"),
        ({"policy": ConfidenceThreshold(0.5), "steps": 3}, InputError, "steps cannot be set beside a policy object"),
        ({"sampler": Sampler(), "top_k": 3}, InputError, "either a sampler or temperature"),
        ({"top_p": 0.0}, InputError, "top_p is a probability"),
        ({"stop": "####"}, InputError, "stop strings are a list"),
    ],
)
def test_what_cannot_be(
    dense: dgraph.CompiledModel, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        dense.generate(PROMPTS, **options, **OPTIONS)


def test_a_model_without_a_tokenizer_has_no_stop_texts(dense: dgraph.CompiledModel, monkeypatch: Any) -> None:
    plain: Callable[..., dgraph.Model] = dgraph.Model
    model = dense.model
    monkeypatch.setattr(dense, "model", plain(model.name, model.module, model.spec, None, model.prefix))
    with pytest.raises(InputError, match="came without a tokenizer, so texts in stop mean nothing"):
        dense.generate(input_ids=[[5, 6]], stop=["x"], **OPTIONS)

"""Whole generations of DiffusionGemma: canvases, stopping steps and tokens are those of transformers."""

from __future__ import annotations

from typing import Any

import pytest

import dgraph
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.errors import InputError, LoweringError
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.regions import RegionCompiler
from dgraph.passes import CacheKV, ChunkLMHead, EncodeRows, PackRows, SparseKV
from dgraph.recipes import RECIPES, build
from dgraph.runtime.policies import Renoise
from dgraph.runtime.sampling.sampler import Sampler
from dgraph.runtime.stats import StepRecord
from dgraph.testing import check_backends_agree, check_batch_equals_alone, check_fires, check_skips, models
from dgraph.testing.models import TinyModel
from tests.models.gemma import CANVAS, adopted, draw, generated, optimized, published


def settings_of(rule: Renoise) -> dict[str, Any]:
    """The rule in transformers' words."""
    return {
        "bound": rule.bound,
        "t_min": rule.t_min,
        "t_max": rule.t_max,
        "max_denoising_steps": rule.steps,
        "stability_threshold": rule.stability,
        "confidence_threshold": rule.confidence,
    }


@pytest.mark.parametrize(
    ("sharp", "mixing", "rule", "early"),
    [
        (4.0, 0.3, Renoise(0.1, confidence=0.005, steps=12), True),
        (6.0, 0.6, Renoise(1.0, confidence=0.2, steps=12), True),
        (4.0, 0.6, Renoise(0.1, confidence=0.005, steps=7), False),
        (6.0, 0.6, Renoise(2.0, 0.2, 1.5, stability=2, confidence=0.3, steps=9), True),
        pytest.param(8.0, 0.3, Renoise(0.5, stability=0, confidence=0.05, steps=12), True, marks=pytest.mark.release),
        pytest.param(4.0, 0.3, Renoise(), True, marks=pytest.mark.release),
    ],
)
def test_generations_equal_those_of_transformers(sharp: float, mixing: float, rule: Renoise, early: bool) -> None:
    """Step for step: every canvas that is forwarded, how many there are, and what is emitted."""
    records: list[StepRecord] = []
    prompt, made = draw(11, 1), optimized(sharp, mixing)
    found = made.generate(input_ids=[prompt], policy=rule, max_new_tokens=3 * CANVAS, seed=5, observer=records.append)
    tokens, drawn = generated(prompt, 3 * CANVAS, 5, published(sharp, mixing), eos_token_id=None, **settings_of(rule))
    assert [r.input_ids.tolist() for r in records if r.candidate.any()] == drawn.canvases
    assert found.token_ids == [tokens]
    assert (min(drawn.steps) < rule.steps) == early
    assert found.stats.steps == sum(drawn.steps) + 2  # two canvases are encoded for the ones after them
    assert found.stats.commit_rows == 2 * CANVAS


def test_a_batch_gives_what_each_prompt_gives_alone() -> None:
    """Prompts of other lengths, and other settings, in one step: rows of both modes at once."""
    made, rule = optimized(6.0, 0.6), Renoise(1.0, confidence=0.2, steps=9)
    prompts = [draw(3, 1), draw(13, 2), draw(16, 3)]
    together = made.generate(input_ids=prompts, policy=rule, max_new_tokens=20, seed=2)
    with made.engine(max_sequences=2) as engine:
        served = engine.generate(prompts, policy=rule, max_new_tokens=20, seed=2)
    for index, prompt in enumerate(prompts):
        before = [[1]] * index  # a draw depends on a prompt's index in its call
        alone = made.generate(input_ids=[*before, prompt], policy=rule, max_new_tokens=20, seed=2)
        assert together.token_ids[index] == alone.token_ids[index]
        assert len(together.token_ids[index]) == 20
    assert [each.token_ids for each in served] == together.token_ids
    assert len({tuple(tokens) for tokens in together.token_ids}) == 3


def test_seeds_give_other_generations_and_each_its_own() -> None:
    made, rule = optimized(6.0, 0.6), Renoise(1.0, confidence=0.2, steps=4)

    def of(seed: int) -> list[int]:
        return made.generate(input_ids=[draw(5, 1)], policy=rule, max_new_tokens=8, seed=seed).token_ids[0]

    assert of(1) == of(1)
    assert of(1) != of(2)


def test_a_stop_token_cuts_a_response_when_its_canvas_is_done() -> None:
    rule, given = Renoise(1.0, confidence=0.2, steps=9), {"max_new_tokens": 24, "seed": 5}
    whole = optimized(6.0, 0.6).generate(input_ids=[draw(11, 1)], policy=rule, **given)
    tokens = whole.token_ids[0]
    stop = tokens[6]
    found = optimized(6.0, 0.6, stops=(stop,)).generate(input_ids=[draw(11, 1)], policy=rule, **given)
    assert found.token_ids[0] == tokens[: tokens.index(stop)]
    assert found.stats.steps < whole.stats.steps, "later canvases are not begun"


def test_the_published_rule_is_the_default() -> None:
    made, prompt = optimized(6.0, 0.6), draw(5, 1)
    published = made.generate(input_ids=[prompt], policy="diffusion_gemma", max_new_tokens=8, seed=3)
    assert made.generate(input_ids=[prompt], max_new_tokens=8, seed=3).token_ids == published.token_ids
    with made.engine(max_sequences=1) as engine:
        (served,) = engine.generate([prompt], max_new_tokens=8, seed=3)
    assert served.token_ids == published.token_ids[0]


def test_every_key_that_later_rows_see_is_causal() -> None:
    """After a generation the cache holds what encoding all of it at once gives."""
    made, prompt = optimized(4.0, 0.3, rings=False), draw(11, 1)
    rule = Renoise(steps=2)
    found = made.generate(input_ids=[prompt], policy=rule, max_new_tokens=3 * CANVAS, seed=1, keep_kv=True)
    assert found.kv is not None
    (kept,) = found.kv
    assert kept.committed == len(prompt) + 2 * CANVAS
    whole = made.generate(
        input_ids=[[*prompt, *found.token_ids[0][: 2 * CANVAS]]], policy=rule, max_new_tokens=1, seed=1, keep_kv=True
    )
    assert whole.kv is not None
    for mine, other in zip(kept.layers, whole.kv[0].layers, strict=True):
        for a, b in zip(mine, other, strict=True):
            assert (a - b).abs().max() < 1e-4


# -- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": 0.9}, r"ConfidenceThreshold does not decode diffusion_gemma, .* use policy='renoise'"),
        ({"policy": "llada2.2"}, r"JointThresholdInDel does not decode diffusion_gemma, .* use policy='renoise'"),
        ({"policy": "renoise", "temperature": 0.5}, "Renoise draws at temperatures of its own"),
        ({"policy": "renoise", "canvas": [[4]]}, "canvas 0: diffusion_gemma decodes a canvas as a whole"),
    ],
)
def test_settings_of_other_models(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        optimized(4.0, 0.3).generate(input_ids=[[1, 2]], max_new_tokens=4, **settings)


def test_labels_of_a_model_without_a_mask_token() -> None:
    """It has no linear LM head either, of which nobody should hear first."""
    with optimized(4.0, 0.3).engine(max_sequences=1) as engine:
        with pytest.raises(InputError, match="a decision between labels forwards mask tokens, but diffusion_gemma has"):
            engine.decide([3, 4], [[5], [6]]).result(timeout=60)
        assert engine.generate([[3, 4]], max_new_tokens=4)[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize("settings", [{"top_k": 5}, {"sampler": Sampler(cfg_scale=1.0)}])
def test_samplers_that_read_logits(settings: dict[str, Any]) -> None:
    with pytest.raises((InputError, LoweringError), match="logits"):
        optimized(4.0, 0.3).generate(input_ids=[[1, 2]], max_new_tokens=4, policy="renoise", **settings)


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("focus", "no row is decoded before its whole canvas is"),
        ("dyllm", "ChunkLMHead cannot be used with diffusion_gemma: the next step reads the mean embedding"),
        ("maskkv", "diffusion_gemma"),
        ("dllm_serve", "diffusion_gemma"),
        ("fast_dllm", "diffusion_gemma"),
    ],
)
def test_recipes_that_do_not_apply_say_why(recipe: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        build(RECIPES, recipe, adopted(published()).spec, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recommit": False}, "a canvas that is done is forwarded again, causally"),
        ({"block_cache": "dc"}, "no row of a canvas is decoded before all are"),
    ],
)
def test_options_that_do_not_apply_say_why(options: dict[str, Any], message: str) -> None:
    made = optimized(4.0, 0.3)

    def with_options() -> CompiledModel:
        recipe = build(RECIPES, "dense", made.spec, options)
        return CompiledModel(made.model, made.captured, recipe, RegionCompiler("eager"), Buckets.of("exact"))

    with pytest.raises(InputError, match=message):
        with_options()


# -- the suite of checks -----------------------------------------------------------------------------------------

RULE = Renoise(1.0, confidence=0.2, steps=6)


@pytest.fixture(scope="module")
def tiny() -> TinyModel:
    (found,) = models(None, "diffusion_gemma")
    return found


def test_a_batch_of_the_familys_tiny_model(tiny: TinyModel) -> None:
    check_batch_equals_alone(tiny, "dense", {}, policy=RULE)


def test_where_the_passes_of_its_step_fire(tiny: TinyModel) -> None:
    every = list(range(tiny.model.spec.layers))
    for step, layers in (("PackRows", every), ("CacheKV", every), ("SelfCondition", [None])):
        check_fires(tiny, "dense", {}, step, layers)
    cached = (PackRows(), CacheKV())
    check_skips(tiny, cached, ChunkLMHead(), "the logits come from mul, not from a linear LM head")
    check_skips(tiny, cached, SparseKV(), "rows see a window of 6 positions")
    check_skips(tiny, (*cached, EncodeRows()), EncodeRows(), "no row of this model says whether it is encoded")


def test_it_is_left_out_where_methods_need_masks() -> None:
    assert "diffusion_gemma" not in {one.family for one in models()}


@pytest.mark.release
def test_inductor_gives_its_tokens(tiny: TinyModel) -> None:
    check_backends_agree(tiny, "dense", {}, policy=RULE)


def test_an_object_of_transformers_is_optimised_as_it_is() -> None:
    made = dgraph.optimize(published(6.0, 0.6), "dense", backend="eager", facts={"eos_ids": ()})
    found = made.generate(input_ids=[draw(11, 1)], policy=RULE, max_new_tokens=CANVAS, seed=5)
    wanted = optimized(6.0, 0.6).generate(input_ids=[draw(11, 1)], policy=RULE, max_new_tokens=CANVAS, seed=5)
    assert found.token_ids == wanted.token_ids

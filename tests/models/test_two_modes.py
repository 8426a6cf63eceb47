"""Families that work in two modes decode as a plain implementation of their loops does."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import dgraph
from dgraph.errors import InputError
from dgraph.models.nemotron import TINY_ROPE
from dgraph.models.tiny import KEYS
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.policies import SubBlocks
from dgraph.runtime.sampling.sampler import Sampler
from dgraph.testing import check_backends_agree, models
from tests.engine.alone import check_as_alone
from tests.models.two_modes import YARN, Setup, compare, prompts_of, setup_of
from tests.oracle.two_modes import (
    Choose,
    Config,
    Model,
    autoregressive,
    diffuse,
    self_speculation,
    shapes,
    sub_blocks,
    threshold,
    top,
)
from tests.remote import random_weights, stand_in

LENGTHS = (3, 13, 16)
NEW = 27
RULES: dict[str, tuple[dict[str, Any], Choose]] = {
    "threshold": ({"threshold": 0.7}, threshold(0.7)),
    "sub-blocks": ({"policy": SubBlocks(0.7, 3)}, sub_blocks(0.7, 3)),
    "top": ({"policy": "fixed_steps", "steps": 2}, top(2)),
}


@pytest.mark.parametrize(
    ("rule", "block", "stops"), [("threshold", 8, True), ("sub-blocks", 8, False), ("top", 4, False)]
)
@pytest.mark.parametrize("family", ["fast_dllm_v2", "nemotron"])
def test_diffusion(family: str, rule: str, block: int, stops: bool) -> None:
    (policy, choose), setup, records = RULES[rule], setup_of(family, block, stops=stops), []
    prompts = prompts_of(setup, LENGTHS)
    traces = [diffuse(setup.plain, prompt, NEW, choose) for prompt in prompts]
    made = setup.optimized("dense")
    result = made.generate(input_ids=prompts, max_new_tokens=NEW, observer=records.append, keep_kv=True, **policy)
    compare(result, records, traces)


@pytest.mark.parametrize(("family", "size"), [("fast_dllm_v2", 3), ("nemotron", 4)])
def test_sub_blocks_over_keys_that_are_cached_within_a_block(family: str, size: int) -> None:
    """Which rows a step forwards shows in its records; that the keys are old ones in what it commits."""
    setup, records = setup_of(family), []
    prompts = prompts_of(setup, LENGTHS)
    traces = [diffuse(setup.plain, prompt, NEW, sub_blocks(0.7, size), size) for prompt in prompts]
    made = setup.optimized("dense")
    policy = SubBlocks(0.7, size, cached=True)
    result = made.generate(input_ids=prompts, max_new_tokens=NEW, observer=records.append, keep_kv=True, policy=policy)
    compare(result, records, traces)
    rows = {int((r.sequence == s).sum()) for r in records for s in r.sequence.unique()}
    assert {8, size} <= rows
    fresh = made.generate(input_ids=prompts, max_new_tokens=NEW, policy=SubBlocks(0.7, size))
    assert fresh.token_ids != result.token_ids, "keys of masks that are tokens by now"
    assert result.stats.rows["step"] < fresh.stats.rows["step"]


def test_a_sub_block_of_the_whole_block_caches_what_its_first_position_saw() -> None:
    """Alone it is the lossless limit: every row of the block is forwarded in every step."""
    setup = setup_of("fast_dllm_v2")
    prompts, run = prompts_of(setup, LENGTHS), setup.optimized("dense")
    wanted, made = (
        run.generate(input_ids=prompts, max_new_tokens=NEW, policy=SubBlocks(0.7, 8, cached=cached))
        for cached in (False, True)
    )
    assert made.token_ids == wanted.token_ids
    assert made.stats.rows == wanted.stats.rows


def test_cached_sub_blocks_share_a_batch_with_other_rules() -> None:
    setup = setup_of("fast_dllm_v2")
    run, prompts = setup.optimized("dense"), prompts_of(setup, (3, 13, 16, 5))
    rules: list[dict[str, Any]] = [
        {"policy": SubBlocks(0.7, 3, cached=True)},
        {"threshold": 0.6},
        {"policy": SubBlocks(0.5, 4, cached=True)},
        {"policy": SubBlocks(0.7, 3)},
    ]
    decodings = [Decoding(max_new_tokens=NEW, **rule) for rule in rules]
    check_as_alone(run, prompts, decodings, max_sequences=4, max_tokens=64)


def test_where_keys_cannot_be_cached_within_a_block_is_refused() -> None:
    cached = SubBlocks(0.7, 3, cached=True)
    setup = setup_of("nemotron")
    for recipe, options, what in (
        ("dense", {"block_cache": "dc"}, r"\(block_cache='dc'\)"),
        ("focus", {"block_cache": "off"}, r"\(evicts rows\)"),
        ("dyllm", {}, r"\(has RowPlan.*\)"),
    ):
        with pytest.raises(InputError, match=rf"SubBlocks forwards sub-blocks of 3 positions .* {what}\. Use 'dense'"):
            setup.optimized(recipe, **options).generate(input_ids=[[1]], max_new_tokens=2, policy=cached)
    with pytest.raises(InputError, match=r"such as fast_dllm_v2; sdar does not\. Leave cached=True out"):
        models(None, "sdar")[0].optimized("dense").generate(input_ids=[[1]], max_new_tokens=2, policy=cached)
    with pytest.raises(InputError, match="cached is true or false, got 1"):
        SubBlocks(cached=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("stops", [False, True], ids=["long", "stops"])
@pytest.mark.parametrize("policy", ["autoregressive", "self_speculation"])
def test_what_causal_rows_predict(policy: str, stops: bool) -> None:
    setup, records = setup_of("nemotron", stops=stops), []
    prompts = prompts_of(setup, LENGTHS)
    loop = autoregressive if policy == "autoregressive" else self_speculation
    traces = [loop(setup.plain, prompt, NEW) for prompt in prompts]
    run = setup.optimized("dense")
    result = run.generate(input_ids=prompts, max_new_tokens=NEW, policy=policy, observer=records.append, keep_kv=True)
    compare(result, records, traces)


@functools.cache
def few_words() -> Setup:
    """A model of so few words that drafts are often right."""
    words, mask = 7, 6
    sizes = Config(layers=2, vocab=words, yarn=YARN, body="encoder", head="diffusion_head")
    weights = random_weights(shapes(sizes), seed=3)
    weights["diffusion_head.weight"] *= 3
    weights["encoder.embed_tokens.weight"] *= 0.3
    keys = {"vocab_size": words, "num_hidden_layers": sizes.layers, "mask_token_id": mask, "block_size": 8}
    keys |= {"pad_token_id": 0, "eos_token_id": 0}
    remote = stand_in("NemotronLabsDiffusionModel", {**KEYS, **keys, "rope_parameters": TINY_ROPE}, weights)
    model = dgraph.adopt(remote, eos_ids=())
    return Setup(model, dgraph.capture(model), Model(weights, sizes, 8, mask, -1, True, 0))


def test_drafts_are_kept_up_to_the_first_that_is_wrong() -> None:
    setup, records = few_words(), []
    prompts = [[i % 6 for i in range(first, first + n)] for first, n in ((0, 3), (2, 8), (5, 13), (1, 21))]
    traces = [self_speculation(setup.plain, prompt, NEW) for prompt in prompts]
    lengths = {len(step) for trace in traces for step in trace.steps}
    assert {0, 1, 2, 3, 8} <= lengths, "a draft that is right from its beginning to its end, and such that are not"
    run = setup.optimized("dense")
    settings = {"max_new_tokens": NEW, "policy": "self_speculation"}
    result = run.generate(input_ids=prompts, observer=records.append, keep_kv=True, **settings)
    compare(result, records, traces)
    assert sum(result.stats.sequence_steps) < 0.8 * NEW * len(prompts)


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.release)])
def test_self_speculation_gives_the_tokens_of_autoregression(count: int) -> None:
    setup, draw = few_words(), torch.Generator().manual_seed(7)
    lengths = torch.randint(1, 24, (count,), generator=draw).tolist()
    prompts = [torch.randint(0, 6, (n,), generator=draw).tolist() for n in lengths]
    run = setup.optimized("dense")
    mine, plain = (
        run.generate(input_ids=prompts, max_new_tokens=NEW, policy=policy, max_batch=100)
        for policy in ("self_speculation", "autoregressive")
    )
    assert mine.token_ids == plain.token_ids
    assert plain.stats.sequence_steps == [NEW] * count
    assert sum(mine.stats.sequence_steps) < 0.9 * sum(plain.stats.sequence_steps)


CAUSAL: list[dict[str, Any]] = [{"policy": "autoregressive"}, {"policy": "self_speculation"}, {"threshold": 0.6}]


@pytest.mark.parametrize(
    ("recipe", "options"), [("focus", {"alpha": 1.2}), ("dyllm", {"tau": 0.9}), ("dense", {"block_cache": "dc"})]
)
def test_approximate_drafts_change_no_token(recipe: str, options: dict[str, Any]) -> None:
    setup = few_words()
    prompts = [[0, 1, 2], [3, 4, 5, 0, 1, 2, 3, 4], [5] * 13]
    wanted = setup.optimized("dense").generate(input_ids=prompts, max_new_tokens=NEW, policy="autoregressive")
    run = setup.optimized(recipe, **options)
    for policy in CAUSAL[:2]:
        assert run.generate(input_ids=prompts, max_new_tokens=NEW, **policy).token_ids == wanted.token_ids


@pytest.mark.parametrize("settings", CAUSAL, ids=str)
def test_tokens_that_are_fixed_stay(settings: dict[str, Any]) -> None:
    """Those of self-speculation are those of autoregression, where what is fixed is the prompt of what follows."""
    run, prompts = few_words().optimized("dense"), [[0, 1, 2], [3, 4, 5, 0, 1]]
    canvas = [None, 4, None, None, 2, 3, None, *[None] * 5, 1, 1]
    result = run.generate(input_ids=prompts, max_new_tokens=18, canvas=[canvas, [2, 2, *canvas]], **settings)
    for prompt, ids, given in zip(prompts, result.token_ids, ([*canvas], [2, 2, *canvas]), strict=True):
        assert len(ids) == 18
        for at, token in enumerate(given):
            assert token in (None, ids[at])
            if token is None and "policy" in settings:
                assert ids[at] == few_words().plain.next([*prompt, *ids[:at]])


def test_a_row_sees_what_its_mode_says() -> None:
    """One step, one program: rows that are encoded see themselves and before, others all of their block."""
    setup, records = few_words(), []
    run = setup.optimized("dense")
    assert "blocks of 8, denoised, then encoded (a row sees what comes before it) with the next token" in dgraph.dump(
        run.graph("step")
    )
    run.generate(input_ids=[[0, 1, 2], [3] * 13], max_new_tokens=NEW, observer=records.append, threshold=0.6)
    both = 0
    for record in records:
        modes = set()
        for sequence in record.sequence.unique():
            mine = record.sequence == sequence
            positions, limit = record.positions[mine], record.limit[mine]
            causal = bool((limit == positions + 1).all())
            assert causal or (limit == positions.max() + 1).all()
            modes.add(causal)
        both += len(modes) == 2
    assert both > 1


def test_one_step_holds_both_modes_and_every_policy() -> None:
    """An engine serves them together, over few pages, each as if it were alone."""
    setup = few_words()
    run = setup.optimized("dense")
    sizes = ((0, 3), (0, 17), (3, 9), (0, 20), (2, 5), (0, 24))
    prompts = [[i % 6 for i in range(first, first + n)] for first, n in sizes]
    decodings = [Decoding(max_new_tokens=NEW, **CAUSAL[i % 3]) for i in range(len(prompts))]
    check_as_alone(run, prompts, decodings, pages=14, max_sequences=4, max_tokens=64)


def test_prompts_share_every_whole_page() -> None:
    """Also one that ends within a block of the longer prompt's grid, since causal rows know no blocks."""
    run = few_words().optimized("dense")
    with run.engine(max_sequences=1, max_tokens=64) as engine:
        first, second = ([0, 1, 2, 3, 4] * 4, [*([0, 1, 2, 3, 4] * 4)[:17], 5])
        settings = Decoding(max_new_tokens=4, policy="autoregressive")
        found = [engine.generate([prompt], settings)[0] for prompt in (first, second)]
    assert [one.usage.cached_tokens for one in found] == [0, 16]
    for one, prompt in zip(found, (first, second), strict=True):
        assert one.token_ids == autoregressive(few_words().plain, prompt, 4).tokens


@pytest.mark.parametrize("settings", [*CAUSAL, {"policy": SubBlocks(0.6, 3)}], ids=str)
def test_samplers_that_need_logits_decode_alike(settings: dict[str, Any]) -> None:
    run, prompts = few_words().optimized("dense"), [[0, 1, 2], [3, 4, 5, 0, 1, 2, 3, 4]]
    wanted = run.generate(input_ids=prompts, max_new_tokens=NEW, **settings)
    made = run.generate(input_ids=prompts, max_new_tokens=NEW, sampler=Sampler(suppress=(6,)), **settings)
    assert made.token_ids == wanted.token_ids


@pytest.mark.parametrize(
    ("family", "recipe", "options", "message"),
    [
        ("nemotron", "maskkv", {"selector": "snapkv"}, "nemotron is block_causal: its selecting step forwards no"),
        ("fast_dllm_v2", "dllm_serve", {"first": "position"}, "but fast_dllm_v2 is block_causal; leave it out"),
        ("nemotron", "dense", {"recommit": False}, "predicts the next token, and recommit=False leaves it out"),
        ("nemotron", "fast_dllm", {}, "approximates the keys of a bidirectional model; those of nemotron are exact"),
    ],
)
def test_recipes_that_do_not_apply_say_why(family: str, recipe: str, options: dict[str, Any], message: str) -> None:
    (tiny,) = models(None, family)
    with pytest.raises(InputError, match=message):
        tiny.recipe(recipe, **options)


def test_what_does_not_go_with_a_model_is_refused() -> None:
    tiny, spec = models(None, "fast_dllm_v2")[0], models(None, "nemotron")[0].model.spec
    with pytest.raises(InputError, match=r"Autoregressive commits what causal rows predict, but fast_dllm_v2 encodes"):
        tiny.optimized("dense").generate(input_ids=[[1]], max_new_tokens=2, policy="autoregressive")
    for change, message in (
        ({"encoding": "both"}, r"encoding must be one of \('block', 'causal'\), got 'both'"),
        ({"next_token": False}, "encoding='causal' predicts the token after a block .* give next_token=True"),
        ({"attention": "bidirectional"}, "next_token says what the keys of a finished block come with, but its att"),
    ):
        with pytest.raises(InputError, match=message):
            replace(spec, **change)


@pytest.mark.release
@pytest.mark.parametrize("policy", ["threshold", "self_speculation"])
@pytest.mark.parametrize("family", ["fast_dllm_v2", "nemotron"])
def test_backends_agree(family: str, policy: str) -> None:
    if (family, policy) != ("fast_dllm_v2", "self_speculation"):
        settings: dict[str, Any] = {"threshold": 0.7} if policy == "threshold" else {"policy": policy}
        check_backends_agree(models(None, family)[0], "dense", {}, **settings)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", CAUSAL, ids=str)
def test_graphs_on_a_gpu_give_what_the_cpu_gives(settings: dict[str, Any]) -> None:
    prompts = [[0, 1, 2], [3, 4, 5, 0, 1, 2, 3, 4], [5, 1] * 9]
    wanted = few_words().optimized("dense").generate(input_ids=prompts, max_new_tokens=NEW, **settings).token_ids
    model = few_words.__wrapped__().model  # another module, which may move
    model.module.to("cuda")
    made = dgraph.optimize(model, "dense")
    for _ in range(2):  # the second time from what was captured
        assert made.generate(input_ids=prompts, max_new_tokens=NEW, **settings).token_ids == wanted

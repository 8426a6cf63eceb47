"""MaskKV, dLLM-Serve and Sparse-dLLM on models that encode what they have denoised with the next token, against plain
PyTorch: rows, tokens, and what is kept; rows predict their own position or the next one.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from dgraph.compiler.compiled_model import CompiledModel
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.policies import SubBlocks
from dgraph.runtime.stats import StepRecord
from tests.amounts import every_value
from tests.engine.alone import check_as_alone
from tests.models.two_modes import CONFIGS, prompts_of
from tests.models.two_modes import setup_of as two_modes
from tests.oracle.focus_two_modes import Trace, generate
from tests.oracle.scoring import Eviction
from tests.oracle.sparse import Method
from tests.oracle.sparse_blocks import SparseTwoModes
from tests.recipes.block_causal import LAYERS, Setup, new_tokens, optimized
from tests.recipes.test_focus_two_modes import BLOCK, FORMS, setup_of
from tests.recipes.test_sparse_against_oracle import kept
from tests.recipes.test_sparse_on_blocks import CASES

ALL = 999
CACHED = SubBlocks(0.4, 4, cached=True)


def prompts() -> list[list[int]]:
    """Shorter than a block, several blocks and a remainder, exactly two blocks, one token."""
    draw = torch.Generator().manual_seed(BLOCK)
    return [torch.randint(6, 90, (n,), generator=draw).tolist() for n in (9, 2 * BLOCK + 3, 2 * BLOCK, 1)]


@functools.cache
def trace_of(
    setup: Setup, prompt: tuple[int, ...], method: Method, threshold: float = 0.6
) -> tuple[Trace, SparseTwoModes]:
    spec = setup.model.spec
    causal = spec.encoding == "causal"
    passes = SparseTwoModes(method, len(prompt), BLOCK, causal)
    trace = generate(
        setup.weights, setup.config, prompt, max_new_tokens=new_tokens(BLOCK), block=BLOCK, mask_id=spec.mask_id,
        eos_ids=spec.eos_ids, threshold=threshold, shift=spec.logit_shift, causal=causal, eviction=Eviction(),
        block_cache="off", forward=passes,
    )  # fmt: skip
    return trace, passes


def check(setup: Setup, run: CompiledModel, method: Method) -> None:
    """Every step of a ragged batch, what its heads keep at the end, and the keys and values in the cache."""
    records: list[StepRecord] = []
    settings = {"max_new_tokens": new_tokens(BLOCK), "threshold": 0.6, "keep_kv": True}
    result = run.generate(input_ids=prompts(), observer=records.append, **settings)
    assert result.kv is not None
    reused = 0
    for i, prompt in enumerate(prompts()):
        trace, forward = trace_of(setup, tuple(prompt), method)
        assert result.token_ids[i] == trace.tokens
        mine = [record for record in records if (record.sequence == i).any()]
        assert len(mine) == len(trace.steps)
        for record, step in zip(mine, trace.steps, strict=True):
            rows = record.sequence == i
            at, done = record.positions[rows], record.committed[rows]
            assert at.tolist() == step.positions
            assert list(zip(at[done].tolist(), record.token[rows][done].tolist(), strict=True)) == step.committed
        first = forward.first if method.window == "response" else 0
        assert (result.kv[i].first, result.kv[i].committed) == (first, trace.final)
        for layer in range(LAYERS):
            heads = kept(run, i, layer, result.kv[i])
            assert len(heads) == len(forward.kept[layer])
            for got, head in zip(heads, forward.kept[layer], strict=True):
                for one, other in zip(got, (head.k, head.v), strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
            for one, other in zip(result.kv[i].layers[layer], trace.cache.read(layer, trace.final), strict=True):
                torch.testing.assert_close(one[: trace.final - first], other[first:], rtol=1e-4, atol=1e-4)
        reused += sum(p.phase == "reuse" for p in forward.passes)
    assert reused > len(prompts())


@every_value(("form", FORMS), ("case", CASES))
def test_every_step_and_what_is_kept(form: str, case: str) -> None:
    name, options, method = CASES[case]
    check(setup_of(form), optimized(setup_of(form), name, **options), method)


@pytest.mark.parametrize("case", ["maskkv", "dllm_serve, pairs, every 3"])
def test_padded_rows(case: str) -> None:
    name, options, method = CASES[case]
    check(setup_of("shift"), optimized(setup_of("shift"), name, buckets=[40, 100, 400], **options), method)


@pytest.mark.release
@pytest.mark.parametrize("case", ["maskkv", "sparse_dllm"])
def test_compiled_by_inductor(case: str) -> None:
    name, options, method = CASES[case]
    check(setup_of("shift"), optimized(setup_of("shift"), name, "inductor", "hybrid", **options), method)


def test_what_a_forward_reads_by_its_mode() -> None:
    """Around a block, all that is encoded sees every key; under MaskKV, what is encoded after the choice does not."""
    for form in FORMS:
        for case, wanted in (("sparse_dllm", {"dense"}), ("maskkv", {"dense", "reuse"})):
            trace, forward = trace_of(setup_of(form), tuple(prompts()[2]), CASES[case][2])
            phases = [p.phase for p in forward.passes[-len(trace.steps) :]]
            # A step that encodes predicts with its last row alone.
            encoded = [p for p, step in zip(phases, trace.steps, strict=True) if step.masked == step.positions[-1:]]
            assert len(encoded) == 2
            assert set(encoded) == wanted
            assert phases[:2] == ["dense", "select" if case == "maskkv" else "dense"]


LIMITS: dict[str, tuple[tuple[str, dict[str, Any]], tuple[str, dict[str, Any]]]] = {
    "maskkv": (("maskkv", {"pairs": ALL}), ("dense", {})),
    "dllm_serve": (("dllm_serve", {"ratio": 1.0}), ("dense", {})),
    "sparse_dllm": (
        ("sparse_dllm", {"pairs": ALL, "every": 2, "block_cache": "dc+"}),
        ("dense", {"block_cache": "dc+"}),
    ),
    "maskkv+focus": (("maskkv+focus", {"pairs": ALL}), ("focus", {})),
    "dllm_serve+focus": (("dllm_serve+focus", {"ratio": 1.0, "delay": 0}), ("focus", {})),
}
"""A recipe that keeps everything, and the one that it is then."""


@every_value(("form", FORMS), ("limit", LIMITS), ("rule", [{"threshold": 0.6}, {"policy": CACHED}]))
def test_lossless_limits(form: str, limit: str, rule: dict[str, Any]) -> None:
    """The same tokens in the same steps, and the same bits in every cache; where each row of what is encoded sees other
    keys, these are padded to another length, and bits differ by rounding.
    """
    near = 0.0 if form == "shift" else 1e-4
    if "policy" in rule and ("focus" in limit or limit == "sparse_dllm"):
        rule = {"threshold": 0.4}  # a cache of sub-blocks goes with no other of rows
    settings = {"input_ids": prompts(), "max_new_tokens": 40, "keep_kv": True, **rule}
    got, want = (optimized(setup_of(form), name, **more).generate(**settings) for name, more in LIMITS[limit])
    assert got.token_ids == want.token_ids
    assert got.stats.sequence_steps == want.stats.sequence_steps
    assert got.stats.sequence_rows == want.stats.sequence_rows
    assert got.kv is not None
    assert want.kv is not None
    for mine, theirs in zip(got.kv, want.kv, strict=True):
        assert mine.committed == theirs.committed
        for one, other in zip(mine.layers, theirs.layers, strict=True):
            for a, b in zip(one, other, strict=True):
                b = b[mine.first : mine.committed]
                torch.testing.assert_close(a[: mine.committed - mine.first], b, rtol=near, atol=near)


@pytest.mark.parametrize("form", FORMS)
def test_few_keys_are_something_else(form: str) -> None:
    """Else the limits above would say nothing."""
    settings: dict[str, Any] = {"input_ids": prompts(), "max_new_tokens": 40, "threshold": 0.6}
    dense = optimized(setup_of(form), "dense").generate(**settings)
    for name, options in (("maskkv", {"pairs": 1}), ("dllm_serve", {"ratio": 0.05}), ("sparse_dllm", {"ratio": 0.05})):
        assert optimized(setup_of(form), name, **options).generate(**settings).token_ids != dense.token_ids


@every_value(("family", CONFIGS), ("policy", ["threshold", "autoregressive", "self_speculation"]))
def test_lossless_limits_of_the_published_families(family: str, policy: str) -> None:
    if family == "fast_dllm_v2" and policy != "threshold":
        policy = "fast_dllm_v2"
    rule = {"threshold": 0.1} if policy == "threshold" else {"policy": policy}
    setup = two_modes(family)
    settings: dict[str, Any] = {"input_ids": prompts_of(setup, (3, 13, 16)), "max_new_tokens": 19, **rule}
    dense = setup.optimized("dense").generate(**settings)
    for name, options in (("maskkv", {"pairs": ALL}), ("dllm_serve", {"ratio": 1.0}), ("sparse_dllm", {"ratio": 1.0})):
        limit = setup.optimized(name, **options).generate(**settings)
        assert limit.token_ids == dense.token_ids
        assert limit.stats.sequence_steps == dense.stats.sequence_steps


def test_what_only_encodes_chooses_nothing() -> None:
    """Autoregression reads every key, and gives no page back before it ends."""
    setup = two_modes("nemotron")
    settings: dict[str, Any] = {"input_ids": prompts_of(setup, (13, 16)), "max_new_tokens": 19}
    dense = setup.optimized("dense").generate(policy="autoregressive", **settings)
    few = setup.optimized("maskkv", pairs=1)
    assert few.generate(policy="autoregressive", **settings).token_ids == dense.token_ids
    assert few._session.kv.free_pages == few._session.kv.pages
    speculated = few.generate(policy="self_speculation", **settings)
    assert speculated.token_ids != dense.token_ids


@every_value(("recipe", ["maskkv", "dllm_serve", "sparse_dllm", "maskkv+focus"]), ("form", FORMS))
def test_a_batch_gives_what_each_request_gives_alone(recipe: str, form: str) -> None:
    """An engine serves more requests than it has slots, over few pages."""
    options: dict[str, Any] = {"pairs": 4} if "maskkv" in recipe else {"ratio": 0.3}
    run, texts = optimized(setup_of(form), recipe, **options), [*prompts(), [7, 8, 9], [11] * 20]
    rules: list[dict[str, Any]] = [{"threshold": 0.6}, {"threshold": 0.3}, {"policy": "fixed_steps", "steps": 5}]
    decodings = [Decoding(max_new_tokens=40, **rules[i % 3]) for i in range(len(texts))]
    check_as_alone(run, texts, decodings, pages=14, max_sequences=3, max_tokens=96)


@pytest.mark.parametrize("form", FORMS)
def test_pages_of_a_prompt_are_free_again_once_its_keys_are_chosen(form: str) -> None:
    """Not before: a forward that encodes the prompt's end reads every key, and predicts the first token."""
    run = optimized(setup_of(form), "maskkv", fresh=True, pairs=4)
    free: list[int] = []
    settings: dict[str, Any] = {"max_new_tokens": 30, "threshold": 0.6}
    # Four pages hold the prompt's whole blocks alone; a remainder begins a block, unless rows are encoded causally.
    for rest, encodes in (([], 1), ([7], int("causal" in form))):
        free.clear()
        texts = [[*prompts()[2] * 2, *rest]]
        run.generate(input_ids=texts, progress=lambda _: free.append(run._session.kv.free_pages), **settings)
        assert len(free) > 4
        assert free[:encodes] == [0] * encodes
        assert set(free[encodes:-1]) == {4}
        assert run._session.kv.free_pages == run._session.kv.pages


def test_fixed_tokens_after_the_prompt() -> None:
    """The first step encodes what is known of the response, and the window begins where the prompt ends."""
    canvas = [*range(6, 6 + BLOCK), None, 9, None, *[None] * 5, 12, *[None] * 11, 13, 14]
    for form in FORMS:
        run, dense = (optimized(setup_of(form), *one) for one in (("maskkv",), ("dense",)))
        every = optimized(setup_of(form), "maskkv", pairs=ALL)
        settings: dict[str, Any] = {"max_new_tokens": 40, "canvas": [canvas] * 4, "threshold": 0.6}
        settings["input_ids"] = prompts()
        assert every.generate(**settings).token_ids == dense.generate(**settings).token_ids
        for ids in run.generate(**settings).token_ids:
            assert all(token in (None, ids[at]) for at, token in enumerate(canvas[: len(ids)]))


def test_where_the_pass_fires_and_what_it_reads() -> None:
    """On every layer, with the same inputs as on a block-causal model that does not predict the next token."""
    spec = setup_of("shift").model.spec
    model = replace(setup_of("shift").model, spec=replace(spec, next_token=False, logit_shift=0))
    plain = replace(setup_of("shift"), model=model)
    for phase, packs in (("select", LAYERS), ("step", 0)):
        graph = optimized(setup_of("shift"), "sparse_dllm").graph(phase)
        assert [n.meta["layer"] for n in graph.find("sparse_attention")] == list(range(LAYERS))
        assert len(graph.find("kv_pack")) == packs
        assert set(graph.inputs) == set(optimized(plain, "sparse_dllm").graph(phase).inputs)

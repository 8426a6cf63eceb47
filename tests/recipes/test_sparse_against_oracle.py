"""MaskKV, dLLM-Serve and Sparse-dLLM against plain PyTorch: rows, tokens, and what every head keeps, step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dgraph.compiler.compiled_model import CompiledModel
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.regions import RegionCompiler
from dgraph.ops.kv.scales import unscaled
from dgraph.recipes import RECIPES, build
from dgraph.runtime.results import SequenceKV
from dgraph.runtime.stats import StepRecord
from tests.amounts import every_value
from tests.oracle import sparse
from tests.oracle.sparse import Method
from tests.recipes.bidirectional import FAMILIES, LAYERS, Setup, prompts_for, setup_of
from tests.recipes.test_canvas_against_oracle import RULES, new_tokens, steps_of

MASKKV = {"prompt_interval": 50, "response_interval": 5, "rho": 0.25}
SHORT = {"prompt_interval": 4, "response_interval": 3, "rho": 0.4}
SNAPKV = {"pool": 7, "recent": 32}

# Recipe, its options, and the same in the oracle's words.
CASES: dict[str, tuple[str, dict[str, Any], Method]] = {
    "dllm_serve": ("dllm_serve", {}, Method("block", "block", 0.5, pool=3)),
    "dllm_serve, delayed": ("dllm_serve", {"delay": 1}, Method("block", "block", 0.5, pool=3, delay=1)),
    "dllm_serve, no delay, no pooling": (
        "dllm_serve",
        {"delay": 0, "pool": 1, "ratio": 0.3},
        Method("block", "block", 0.3),
    ),
    "dllm_serve, pairs, every 4": (
        "dllm_serve",
        {"pairs": 5, "every": 4, "delay": 1},
        Method("block", "block", pairs=(5,), pool=3, delay=1, interval=4),
    ),
    "dllm_serve, first position": (
        "dllm_serve",
        {"first": "position", "delay": 1},
        Method("block", "block", 0.5, pool=3, delay=1, first=True),
    ),
    "dllm_serve, policy first": (
        "dllm_serve",
        {"first": "policy", "delay": 1},
        Method("block", "block", 0.5, pool=3, delay=1),
    ),
    "sparse_dllm": ("sparse_dllm", {}, Method("block", "shared", 0.5, pool=3, delay=1)),
    "sparse_dllm, few": ("sparse_dllm", {"ratio": 0.1, "pool": 5}, Method("block", "shared", 0.1, pool=5, delay=1)),
    "maskkv": (
        "maskkv",
        {"pairs": 6},
        Method("response", "mask_voting", pairs=(6,), heads="mass", floor=0.1, **MASKKV),
    ),
    "maskkv, all kinds of steps": (
        "maskkv",
        {"pairs": 7, **SHORT},
        Method("response", "mask_voting", pairs=(7,), heads="mass", floor=0.1, **SHORT),
    ),
    "maskkv, uniform heads": (
        "maskkv",
        {"ratio": 0.4, "heads": "uniform", **SHORT},
        Method("response", "mask_voting", 0.4, floor=0.1, **SHORT),
    ),
    "snapkv": (
        "maskkv",
        {"selector": "snapkv", "pairs": 9, **SHORT},
        Method("response", "snapkv", pairs=(9,), **SNAPKV, **SHORT),
    ),
    "adakv": (
        "maskkv",
        {"selector": "adakv", "pairs": 9, **SHORT},
        Method("response", "snapkv", pairs=(9,), heads="adaptive", floor=0.2, **SNAPKV, **SHORT),
    ),
    "h2o": (
        "maskkv",
        {"selector": "h2o", "pairs": 7, **SHORT},
        Method("response", "all_voting", pairs=(7,), recent=3, **SHORT),
    ),
    "pyramid layers": (
        "maskkv",
        {"layers": "pyramid", "pairs": 6, **SHORT},
        Method("response", "mask_voting", pairs=(11, 6, 0), heads="mass", floor=0.1, **SHORT),
    ),
    **{
        selector: (
            "maskkv",
            {"selector": selector, "pairs": 6, **SHORT},
            Method("response", selector, pairs=(6,), **SHORT),
        )
        for selector in ("all_voting", "prompt_voting")
    },
    **{
        selector: (
            "maskkv",
            {"selector": selector, "pairs": 6, "head_floor": 0.2, **SHORT},
            Method("response", selector, pairs=(6,), heads="mass", floor=0.2, **SHORT),
        )
        for selector in ("front_voting", "middle_voting", "back_voting")
    },
}


def case_of(name: str, family: str) -> tuple[str, dict[str, Any], Method]:
    """A case on a family: as published, Dream's blocks open with their first position where a step sees all before
    keys are chosen.
    """
    recipe, options, method = CASES[name]
    published = family == "dream" and method.window == "block" and method.delay > 0 and "first" not in options
    return recipe, options, replace(method, first=True) if published else method


@pytest.fixture(scope="module")
def setups() -> dict[str, Setup]:
    return {family: setup_of(family) for family in FAMILIES}


def kept(run: CompiledModel, sequence: int, layer: int, held: SequenceKV) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values [n, D] that each head of a sequence keeps: packed, or in its pages."""
    found = run._session.packed
    assert found is not None
    caches = found.tensors()
    count = caches[f"pack_count_{layer}"][sequence]
    counts, start = count.tolist(), int(caches["pack_start"][layer, sequence])
    run_of = slice(start, start + sum(counts))
    if found.plan.kept == "pages":
        assert not any(name.startswith(("k_pack", "v_pack")) for name in caches)
        at = caches[f"pack_index_{layer}"][run_of], torch.arange(len(counts)).repeat_interleave(count)
        return list(zip(*(x[at].split(counts) for x in held.layers[layer]), strict=True))
    scales = [caches.get(f"{kind}_pack_scale_{layer}") for kind in "kv"]
    k, v = (
        unscaled(caches[f"{kind}_pack_{layer}"][run_of].clone(), by if by is None else by[run_of], torch.float32)
        for kind, by in zip("kv", scales, strict=True)
    )
    k, v = k.split(counts), v.split(counts)
    return list(zip(k, v, strict=True))


def check(setup: Setup, block: int, run: CompiledModel, rule: str, method: Method, near: float = 1e-4) -> None:
    """Every step of a generation of a ragged batch, what its heads keep, and its keys and values, are the oracle's."""
    records: list[StepRecord] = []
    prompts = prompts_for(block)
    result = run.generate(
        input_ids=prompts, max_new_tokens=new_tokens(block), keep_kv=True, observer=records.append, **RULES[rule][0]
    )
    assert result.kv is not None
    for i, prompt in enumerate(prompts):
        trace = setup.traced(sparse.generate, prompt, method, block, new_tokens(block), **RULES[rule][1])
        assert result.token_ids[i] == trace.tokens
        steps = steps_of(records, i, setup.shift)
        assert [s["positions"] for s in steps] == [s.plan.positions for s in trace.steps]
        assert [s["committed"] for s in steps] == [s.committed for s in trace.steps]
        low, high = trace.steps[-1].plan.window
        first = result.kv[i].first
        assert first == len(prompt) - setup.shift
        for layer in range(LAYERS):
            for (k, v), head in zip(kept(run, i, layer, result.kv[i]), trace.memory.kept[layer], strict=True):
                torch.testing.assert_close(k, head.k, rtol=near, atol=near)
                torch.testing.assert_close(v, head.v, rtol=near, atol=near)
            for got, want in zip(result.kv[i].layers[layer], (trace.memory.k, trace.memory.v), strict=True):
                torch.testing.assert_close(got[low - first : high - first], want[layer][low:high], rtol=near, atol=near)


@every_value(("case", CASES), ("family, rule", [("llada", "threshold"), ("llada", "steps"), ("dream", "threshold")]))
def test_tokens_rows_and_what_is_kept(setups: dict[str, Setup], family: str, case: str, rule: str) -> None:
    name, options, method = case_of(case, family)
    check(setups[family], 16, setups[family].optimized(name, 16, **options), rule, method)


def test_layers_keep_as_their_importance_says(setups: dict[str, Setup]) -> None:
    setup = setups["llada"]
    importance = (0.5, 0.1, 0.4)
    model = replace(setup.model, spec=replace(setup.model.spec, layer_importance=importance, block_length=16))
    recipe = build(RECIPES, "maskkv", model.spec, {"pairs": 10})
    run = CompiledModel(model, setup.graph, recipe, RegionCompiler("eager"), Buckets.of(None))
    # base 4 of 10; of the pool of 18, 16 (16.2) go to the two boundary layers, and 2 to the other
    method = Method("response", "mask_voting", pairs=(12, 6, 12), heads="mass", floor=0.1, **MASKKV)
    assert recipe.kv is not None
    assert recipe.kv.pairs == (12, 6, 12)
    check(setup, 16, run, "threshold", method)


def test_layers_keep_as_their_attention_says(setups: dict[str, Setup]) -> None:
    """SqueezeAttention's layers under MaskKV's votes (Table 12)."""
    setup = setups["llada"]
    spec = replace(setup.model.spec, attention_similarity=(0.5, 0.99, 0.8), block_length=16)
    model = replace(setup.model, spec=spec)
    recipe = build(RECIPES, "maskkv", spec, {"pairs": 10, "layers": "squeeze", "heads": "uniform"})
    # the layer that changes least keeps 4 of 10; the 26 that are left are shared by the others
    method = Method("response", "mask_voting", pairs=(13, 4, 13), **MASKKV)
    assert recipe.kv is not None
    assert recipe.kv.pairs == (13, 4, 13)
    run = CompiledModel(model, setup.graph, recipe, RegionCompiler("eager"), Buckets.of(None))
    check(setup, 16, run, "threshold", method)


def test_compiled(setups: dict[str, Setup]) -> None:
    for name in ("maskkv, all kinds of steps", "dllm_serve"):
        recipe, options, method = case_of(name, "dream")
        check(setups["dream"], 16, setups["dream"].optimized(recipe, 16, "inductor", **options), "threshold", method)

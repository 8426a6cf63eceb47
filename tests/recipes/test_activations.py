"""Recipes whose linear layers multiply 8-bit numbers by 8-bit numbers, against the oracles, which round alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import dgraph
from dgraph.passes import QuantizeWeights
from tests.amounts import every_value
from tests.models import test_llada2, test_sdar_moe
from tests.oracle import canvas as oracle
from tests.oracle import dllm_cache as dllm_cache_oracle
from tests.oracle import dyllm as dyllm_oracle
from tests.oracle import llada2, qwen3
from tests.oracle import sparse as sparse_oracle
from tests.oracle.eight_bits import linear_in
from tests.recipes import bidirectional, block_causal
from tests.recipes import test_canvas_against_oracle as on_canvas
from tests.recipes import test_dllm_cache_against_oracle as dllm_cache
from tests.recipes import test_dyllm_against_oracle as dyllm
from tests.recipes import test_sparse_against_oracle as sparse
from tests.tiny import rewritten

NEAR = 1e-5
VOCAB = 97
ROUTERS = (test_sdar_moe.EXPERTS, test_llada2.SIZES.experts)
"""Rows of routers, which are left as they are, and of no other weight of these models."""


@functools.cache
def in_kind(setup: Any, how: QuantizeWeights) -> Any:
    """The setup with weights and rows in 8 bits, computed in float64: there hardly a value lies so near to the middle
    between two numbers that another order of sums takes the other one.
    """
    spec, graph = replace(setup.model.spec, dtype=torch.float64), setup.graph.copy()
    graph.spec = spec
    for name, node in graph.weight_nodes().items():
        graph.tensors[name] = graph.tensors[name].double()
        node.meta["val"] = graph.symbols.of(graph.tensors[name])
    graph.propagate()
    weights = {name: weight.double() for name, weight in setup.weights.items()}
    return replace(setup, model=replace(setup.model, spec=spec), weights=weights, graph=rewritten(graph, how))


def on_blocks(how: QuantizeWeights, recipe: str, words: dict[str, Any], **options: Any) -> None:
    setup = in_kind(block_causal.setup_for(16), how)
    run = block_causal.optimized(setup, recipe, **options)
    block_causal.check(setup, 16, run, {"threshold": 0.6}, words, NEAR)


def with_every_key(how: QuantizeWeights, recipe: str, family: str, method: oracle.Method, **options: Any) -> None:
    setup = in_kind(bidirectional.setup_of(family), how)
    on_canvas.check(setup, 8, setup.optimized(recipe, 8, **options), "threshold", method, near=NEAR)


def with_experts(how: QuantizeWeights, recipe: str, family: Any, forward: Callable[..., Any], **options: Any) -> None:
    model = dgraph.adopt(family.remote(), block_length=16)
    setup = in_kind(block_causal.Setup(family.SIZES, family.WEIGHTS, model, dgraph.capture(model)), how)
    run = block_causal.optimized(setup, recipe, **options)
    block_causal.check(setup, 16, run, {"threshold": 0.6}, {"forward": forward}, NEAR)


def with_some_rows(how: QuantizeWeights) -> None:
    setup, (options, method) = in_kind(bidirectional.setup_of("llada"), how), dyllm.CASES["defaults"]
    dyllm.check(setup, 16, setup.optimized("dyllm", 16, **options), "threshold", method, NEAR)


def with_stored_outputs(how: QuantizeWeights) -> None:
    options, method = dllm_cache.CASES["all four kinds of steps"]
    setup = in_kind(bidirectional.setup_of("dream"), how)
    dllm_cache.check(setup, 16, setup.optimized("dllm_cache", 16, **options), "threshold", method, NEAR)


def with_kept_keys(how: QuantizeWeights, case: str) -> None:
    name, options, method = sparse.case_of(case, "llada")
    setup = in_kind(bidirectional.setup_of("llada"), how)
    sparse.check(setup, 16, setup.optimized(name, 16, **options), "threshold", method, NEAR)


CASES: dict[str, Callable[[QuantizeWeights], None]] = {
    "dense": lambda how: on_blocks(how, "dense", {"block_cache": "off", "evict": False}),
    "focus": lambda how: on_blocks(how, "focus", {}),
    "focus, counted": lambda how: on_blocks(how, "focus", {}, count="device"),
    "focus, experts": lambda how: with_experts(how, "focus", test_sdar_moe, test_sdar_moe.FORWARD),
    "focus, experts, counted": lambda how: with_experts(how, "focus", test_llada2, llada2.forward, count="device"),
    "fast_dllm": lambda how: with_every_key(how, "fast_dllm", "dream", oracle.fast_dllm("dual"), first="policy"),
    "dkv_cache": lambda how: with_every_key(how, "dkv_cache", "llada", oracle.dkv_cache(8)),
    "dyllm": with_some_rows,
    "dllm_cache": with_stored_outputs,
    "maskkv": lambda how: with_kept_keys(how, "maskkv, uniform heads"),
    "dllm_serve": lambda how: with_kept_keys(how, "dllm_serve"),
}


@every_value(("case", list(CASES)), ("kind", ["fp8", "int8"]), ("head", [False, True]))
def test_a_recipe_decodes_as_its_oracle_over_rounded_rows(
    case: str, kind: str, head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [*(ROUTERS if "experts" in case else ()), *(() if head else (VOCAB,))]
    layer = linear_in(kind, but=lambda weight: len(weight) in left)
    for module in (qwen3, llada2, oracle, dyllm_oracle, dllm_cache_oracle, sparse_oracle):
        monkeypatch.setattr(module, "linear", layer)
    for own, name in ((block_causal, "trace_of"), (on_canvas, "trace_of"), (dyllm, "traces_of")):
        monkeypatch.setattr(own, name, getattr(own, name).__wrapped__)  # what others traced is of other oracles
    CASES[case](QuantizeWeights(kind, activations=True, lm_head=head))

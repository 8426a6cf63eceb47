"""Tiny block-causal models, DyLLM's cases for them, and a look at each step, as several tests share them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import dgraph
from dgraph.ir.graph import Graph
from dgraph.lowering.program import ProgramResult
from dgraph.types.shapes import InputSpec
from tests.models import test_llada2 as llada2
from tests.models import test_sdar_moe as sdar_moe
from tests.oracle import focus, qwen3
from tests.oracle.dyllm import Memory, Method
from tests.oracle.dyllm_blocks import Blocks, Pass, as_qwen3, llada2_parts
from tests.passes.sparse_step import Found
from tests.passes.sparse_step import run as run_graph
from tests.recipes.block_causal import EOS, LAYERS, Setup, new_tokens, setup_for

FAMILIES = ("sdar", "sdar_moe", "llada2")
BLOCK = 16
NEW = new_tokens(BLOCK)

# Options of the recipe, and the same in the oracle's words. The tiny models turn their contexts further than a trained
# one, so the thresholds that leave some rows out are lower than the paper's.
CASES: dict[str, tuple[dict[str, Any], Method]] = {
    "defaults": ({}, Method(full_steps=1)),
    "tau 0.8": ({"tau": 0.8}, Method(0.8, full_steps=1)),
    "tau by layer": ({"tau": (0.9, 0.5, 0.8)}, Method((0.9, 0.5, 0.8), full_steps=1)),
    "gate only": ({"tau": 0.8, "partial": False}, Method(0.8, full_steps=1, partial=False)),
    "partial only": ({"tau": 0.8, "gate": False}, Method(0.8, full_steps=1, gate=False)),
    "three full steps": ({"tau": 0.7, "full_steps": 3}, Method(0.7, full_steps=3)),
    "every third full": ({"tau": 0.7, "every": 3}, Method(0.7, full_steps=1, every=3)),
    "nothing salient": ({"tau": -1.01}, Method(-1.01, full_steps=1)),
    "everything salient": ({"tau": 1.01}, Method(1.01, full_steps=1)),
}
TABLES = {**dict.fromkeys("kv", "page_table"), **dict.fromkeys("cf", "page_table_1")}
"""The page table of each kind of cache."""
CACHES = [("off", True), ("off", False), ("dc", True), ("dc", False), ("dc+", True), ("dc+", False)]


@functools.cache
def setup_of(family: str) -> Setup:
    """A tiny model; the weights under the names that the oracle reads."""
    if family == "sdar":
        return setup_for(BLOCK)
    other: Any = {"sdar_moe": sdar_moe, "llada2": llada2}[family]
    model = dgraph.adopt(other.remote(), block_length=BLOCK)
    weights = as_qwen3(other.WEIGHTS, other.SIZES) if family == "llada2" else other.WEIGHTS
    return Setup(other.SIZES, weights, model, dgraph.capture(model))


@functools.cache
def oracle_of(family: str, method: Method) -> Blocks:
    """It follows one sequence at a time; what it does with one does not depend on those before."""
    if family == "llada2":
        return Blocks(method, BLOCK, *llada2_parts(llada2.SIZES))
    return Blocks(method, BLOCK, sdar_moe.feed_forward if family == "sdar_moe" else qwen3.gated)


@dataclass
class Seen:
    """What a pass did with a sequence: positions, by layer, and what caches hold after it, by name."""

    positions: list[int]
    limits: list[int]
    salient: list[list[int]]
    projected: list[list[int]]
    caches: dict[str, Tensor]


@dataclass
class Watched:
    """A step program that notes what it did, by sequence."""

    graph: Graph
    seen: dict[int, list[Seen]] = field(default_factory=dict)
    stage_names = ("step",)

    @property
    def inputs(self) -> Mapping[str, InputSpec]:
        return self.graph.inputs

    @property
    def output_names(self) -> frozenset[str]:
        return frozenset(self.graph.outputs)

    def bound(self, inputs: Mapping[str, Tensor]) -> Callable[[int], ProgramResult]:
        return partial(self, inputs)

    def __call__(self, inputs: Mapping[str, Tensor], rows: int) -> ProgramResult:
        ((outputs, found),) = run_graph(self.graph, [inputs], {})
        bounds = inputs["cu_rows"].tolist()
        for s, (begin, end) in enumerate(pairwise(bounds)):
            if begin < end:
                self.seen.setdefault(s, []).append(self._seen(inputs, found, s, slice(begin, end)))
        assert outputs["salient"].tolist() == [int(flags.sum()) for flags in found.salient]
        return ProgramResult(outputs, (rows,), (rows,), (0.0,))

    def _seen(self, inputs: Mapping[str, Tensor], found: Found, sequence: int, rows: slice) -> Seen:
        at = inputs["positions"][rows]
        tables = {kind: inputs[name][sequence].long() for kind, name in TABLES.items() if name in inputs}
        caches = {}
        for name, cache in inputs.items():
            if name[1:].startswith("_cache_"):
                where = torch.arange(int(inputs["limit"][rows].max())) if name[0] in "kv" else at
                page = cache.shape[1]
                caches[name] = cache[tables[name[0]][where // page], where % page]

        def places(flags: list[Tensor]) -> list[list[int]]:
            return [at[f[rows]].tolist() for f in flags]

        limits = inputs["limit"][rows].tolist()
        return Seen(at.tolist(), limits, places(found.salient), places(found.projected), caches)


@functools.cache
def watched_by_oracle(
    family: str, method: Method, prompt: tuple[int, ...], block_cache: str, recommit: bool
) -> tuple[list[Seen], list[bool]]:
    """What the oracle does with a prompt in each step, and which of them are full."""
    setup, blocks, seen = setup_of(family), oracle_of(family, method), list[Seen]()

    def watch(step: Pass, memory: Memory) -> None:
        at, caches = torch.tensor(step.positions), {}
        for layer in range(LAYERS):
            caches |= {
                f"{kind}_cache_{layer}": getattr(memory, kind)[layer][: max(step.limits)].clone() for kind in "kv"
            }
            caches |= {f"{kind}_cache_{layer}": getattr(memory, kind)[layer][at] for kind in "cf"}
        salient, projected = ([getattr(layer, name) for layer in step.layers] for name in ("salient", "projected"))
        seen.append(Seen(step.positions, step.limits, salient, projected, caches))

    blocks.watch = watch
    try:
        trace = focus.generate(
            setup.weights, setup.config, prompt, max_new_tokens=NEW, block_length=BLOCK,
            mask_id=setup.model.spec.mask_id, eos_ids=(EOS,), threshold=0.7, evict=False, block_cache=block_cache,
            recommit=recommit, forward=blocks,
        )  # fmt: skip
    finally:
        blocks.watch = lambda step, memory: None
    count = len(trace.steps)
    return seen[-count:], [step.full for step in blocks.passes][-count:]

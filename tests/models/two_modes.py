"""Tiny models of the families that work in two modes, with their weights for the oracle, and how both decode."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

import dgraph
from dgraph.compiler.compiled_model import CompiledModel, Result
from dgraph.families import families
from dgraph.ir.graph import Graph
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.regions import RegionCompiler
from dgraph.models.nemotron import stored
from dgraph.recipes import RECIPES, build
from dgraph.runtime.stats import StepRecord
from tests.oracle.two_modes import Config, Model, Trace, Yarn

YARN = Yarn(16.0, 16)
CONFIGS = {
    "fast_dllm_v2": Config(bias=True),
    "nemotron": Config(yarn=YARN, body="encoder", head="diffusion_head"),
}


@dataclass(frozen=True, eq=False)
class Setup:
    """A tiny model of a family, its captured graph, and its weights as the oracle takes them."""

    model: dgraph.Model
    graph: Graph
    plain: Model

    def optimized(self, recipe: str, **options: Any) -> CompiledModel:
        """Op by op."""
        made = build(RECIPES, recipe, self.model.spec, options)
        return CompiledModel(self.model, self.graph, made, RegionCompiler("eager"), Buckets.of("exact"))


@functools.cache
def setup_of(family: str, block: int = 8, seed: int = 0, stops: bool = False) -> Setup:
    """Weights of a seed, for blocks of any length; stops: they know a stop token, else none ends a response."""
    model, graph = _captured(family, seed)
    spec = replace(model.spec, block_length=block, eos_ids=model.spec.eos_ids if stops else ())
    model = replace(model, spec=spec)
    name = stored if family == "nemotron" else str
    weights = {name(key): value for key, value in model.module.model.state_dict().items()}  # type: ignore[union-attr]
    stop = spec.eos_ids[0] if stops else -1
    causal, shift = spec.encoding == "causal", spec.logit_shift
    return Setup(model, graph, Model(weights, CONFIGS[family], block, spec.mask_id, stop, causal, shift))


@functools.cache
def _captured(family: str, seed: int) -> tuple[dgraph.Model, Graph]:
    model = families()[family].random(seed)
    return model, dgraph.capture(model)


def prompts_of(setup: Setup, lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Random prompts without mask and stop token."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 90, (n,), generator=draw).tolist() for n in lengths]


def compare(result: Result, records: list[StepRecord], traces: list[Trace]) -> None:
    """Tokens, what each step commits by which rows, keys and values."""
    assert result.token_ids == [trace.tokens for trace in traces]
    for index, trace in enumerate(traces):
        steps = []
        for record in records:
            mine = record.sequence == index
            if mine.any():
                at = mine & record.committed
                steps.append(list(zip(record.positions[at].tolist(), record.token[at].tolist(), strict=True)))
        assert steps == trace.steps
        if result.kv is None:
            continue
        assert result.kv[index].committed == trace.final
        for got, wanted in zip(result.kv[index].layers, trace.layers, strict=True):
            for mine, other in zip(got, wanted, strict=True):
                torch.testing.assert_close(mine[: trace.final], other, atol=1e-4, rtol=1e-4)

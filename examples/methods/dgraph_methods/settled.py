"""An experiment on DiffusionGemma: rows of a canvas whose prediction is stable and sure leave the step early."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from dgraph import RECIPES, ModelSpec, Recipe
from dgraph.errors import InputError
from dgraph.ir.graph import Graph
from dgraph.ops import OPS
from dgraph.passes import Effect, Pass
from dgraph.passes.base import Report
from dgraph.recipes import build
from dgraph.types.shapes import InputSpec

aten = torch.ops.aten
SAID = ("token", "confidence", "draw", "entropy")
DECIDED = InputSpec("decided_cache", torch.float32, ("pages_1", "page", 4), reset="block", initial=-1)
COUNTS = InputSpec("calm_cache", torch.float32, ("pages_1", "page", 2), reset="block")


@dataclass(frozen=True)
class DropSettled(Pass):
    """Rows whose most likely token has been the same and sure for some steps do not go through the later layers.

    Others see the keys that such a row wrote last; its decision and its mean embedding stay what they were then. Kept
    per position of the canvas: the decision, for how many steps it is the same and sure, and for how many the row was
    left out.

        before  dgraph.kv_write(%11, %12, k_cache, v_cache, positions, page_table, cu_rows)         # [N, ...]
        after   %4, %5 = dgraph.keep_index(%3, cu_rows, -1)                                         # K of N rows
                dgraph.kv_write(%11, %12, k_cache, v_cache, %7, page_table, %5)                     # [K, ...]
                %90 = dgraph.feature_merge(%89, %4, decided_cache, positions, page_table_1, cu_rows)  # [N, 4]

    Run it after SelfCondition. Approximate; with steps = 0, or entropy = 0, no row is left out.

    Attributes:
        after: the first layer that runs on the other rows alone, at least 1.
        steps: for how many steps a row is the same and sure before it is left out; 0 for never.
        entropy: it is sure below so many nats.
        every: a row that is left out runs in every so many steps; 0 for never again.
    """

    after: int = 1
    steps: int = 2
    entropy: float = 0.1
    every: int = 0

    effect = Effect.APPROXIMATE
    summary = "rows of a canvas whose prediction is stable and sure skip the later layers"
    signature = frozenset({*SAID, DECIDED.name, COUNTS.name})

    def identity(self) -> DropSettled:
        return replace(self, steps=0)

    def run(self, graph: Graph, report: Report) -> None:
        if "entropy" not in graph.outputs or "encoded" not in graph.inputs:
            report.skip("no step of a canvas whose rows say how sure they are; run SelfCondition first", graph.output)
            return
        if not 1 <= self.after < graph.spec.layers:
            raise InputError(f"after must be a layer from 1 to {graph.spec.layers - 1}, got {self.after}.")
        place = tuple(graph.input(name) for name in ("positions", "page_table_1", "cu_rows"))
        first, results = next(node for node in graph.calls if node.meta["layer"] == self.after), graph.results()

        call = partial(graph.calling(report.name), first)
        decided, counted = graph.add_input(DECIDED), graph.add_input(COUNTS)
        said, counts = (call(OPS["feature_read"], cache, *place) for cache in (decided, counted))
        token, calm, idle = (call(aten.select.int, *at) for at in ((said, 1, 0), (counts, 1, 0), (counts, 1, 1)))
        runs = call(aten.lt.Scalar, calm, self.steps or float("inf"))
        if self.every:
            runs = call(aten.logical_or.default, runs, call(aten.ge.Scalar, idle, self.every - 1))
        runs = call(aten.logical_or.default, runs, graph.input("encoded"))
        rows = graph.keep_rows(runs, before=first, by=report.name, but=(graph.output,))

        call = partial(graph.calling(report.name), graph.output)
        new = call(aten.stack.default, [call(aten.to.dtype, graph.result(name), torch.float32) for name in SAID], 1)
        merged = call(OPS["feature_merge"], new, rows.index, decided, *place)
        results |= {name: call(aten.select.int, merged, 1, at) for at, name in enumerate(SAID)}
        left, same = call(aten.logical_not.default, runs), call(aten.eq.Tensor, results["token"], token)
        same = call(aten.logical_and.default, same, call(aten.lt.Scalar, results["entropy"], self.entropy))
        more = [call(aten.add.Scalar, count, 1) for count in (calm, idle)]
        now = [call(aten.mul.Tensor, *each) for each in zip(more, (same, left), strict=True)]
        call(OPS["feature_write"], call(aten.stack.default, now, 1), counted, *place)
        graph.set_outputs(results | {n: call(aten.to.dtype, results[n], torch.int64) for n in ("token", "draw")})
        graph.sweep()
        report.did("rows that are not settled", self.after)


def settled(spec: ModelSpec, after: int = 1, steps: int = 2, entropy: float = 0.1, every: int = 0) -> Recipe:
    """`dense` on a model without a mask token; settled rows of a canvas skip later layers. Options: `DropSettled`."""
    if spec.noise != "uniform":
        raise InputError(f"settled: {spec.family} has a mask token; this is about canvases of random tokens.")
    dense, drop = build(RECIPES, "dense", spec, {}), DropSettled(after, steps, entropy, every)
    return replace(dense.inserting(drop, after="SelfCondition"), name="settled")

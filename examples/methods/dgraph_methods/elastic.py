"""Elastic-Cache (arXiv 2510.14973): layers run on a window of masks until attention to what matters has moved."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dgraph import ModelSpec, Phase, Recipe
from dgraph.errors import InputError
from dgraph.ir.graph import Graph
from dgraph.ops import OPS
from dgraph.passes import CacheKV, ChunkLMHead, Effect, FuseProjections, PackRows, Pass, Report
from dgraph.plans.papers import Paper
from dgraph.plans.regions import All
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Counted
from dgraph.types.shapes import InputSpec
from dgraph_methods.elastic_ops import FIRST_ROWS, MOVED

aten = torch.ops.aten
NOT, EITHER, BOTH = aten.logical_not.default, aten.logical_or.default, aten.logical_and.default
HELD = InputSpec("attended_cache_*", torch.float32, ("pages", "page", 3), reset="response")
FLAGS = ("candidate", "changed", "full")


@dataclass(frozen=True)
class ElasticRows(Pass):
    """Run the layers on a window of masks, and on all rows from the layer on after which attention has changed.

    The window: the first masks, the rows that the step may decode, those decoded in the step before, and one row for
    each layer, the decided one that the first masks attend to most. If the cosine of that row's attention with that in
    the step before is below gamma, or the row did not run then, later layers run on all rows of the sequence. The first
    layer always does (as published, it runs on the window). So with gamma above 1 the program is the dense one. New
    per layer l: `attended_cache_l` f32[pages, page, 3], attention of the row, its flag, and if it ran.

    Attributes:
        window, gamma: the number of first masks and the cosine; published: 16 and 32, and 0.9.
    """

    window: int = 32
    gamma: float = 0.9

    effect = Effect.APPROXIMATE
    papers = (Paper("Attention Is All You Need for KV Cache in Diffusion LLMs", "2510.14973"),)
    summary = "layers run on a window of masks until attention to the most attended rows moves (Elastic-Cache)"
    signature = frozenset({*FLAGS, "salient", HELD.name, "a_cache_*", "f_cache_*"})

    def __post_init__(self) -> None:
        if type(self.window) is not int or self.window < 1:
            raise InputError(f"elastic: window must be a number of masks, at least 1, got {self.window!r}.")

    def identity(self) -> ElasticRows:
        return replace(self, gamma=2.0)

    def run(self, graph: Graph, report: Report) -> None:
        for node in graph.find("packed_attention"):
            report.skip("it reads no cache, so no keys of other rows are kept; run CacheKV first", node)
        for node in (attentions := graph.find("paged_attention")):
            if isinstance(layer := graph.row_layer(node), str):
                report.skip(layer, node)
        if report.skipped or not attentions:
            return
        by, first, counted, held = report.name, graph.calls[0], [], []
        call = graph.calling(by)
        wanted, changed, refresh = (graph.add_input(InputSpec(n, torch.bool, ("N",))) for n in FLAGS)
        place = graph.place_of(attentions[0], graph.input("page_table"), by).nodes
        masked = call(first, aten.eq.Scalar, graph.input("input_ids"), graph.spec.mask_id)
        near, decided = call(first, FIRST_ROWS, masked, place[2], self.window), call(first, NOT, masked)
        window = call(first, EITHER, call(first, EITHER, near, wanted), changed)
        for index in range(len(attentions)):
            cache = graph.add_input(replace(HELD, name=f"attended_cache_{index}"))
            read = call(first, OPS["feature_read"], cache, *place)
            held.append((cache, read, call(first, aten.gt.Scalar, call(first, aten.select.int, read, 1, 1), 0)))
            window = call(first, EITHER, window, held[-1][-1])
        for attention, (cache, read, own) in zip(attentions, held, strict=True):
            ran, on, at = decided, lambda flags: flags, attention.next
            if attention is not attentions[0]:
                layer = graph.row_layer(attention)
                ran = call(layer.write, EITHER, window, refresh)
                some = graph.run_rows(layer, ran, by=by)
                on, attention = some.on, some.new[attention]
                counted.append(ran)
            top = graph.most_attended(graph.key_mass(attention, on(near), by=by), decided, by=by)
            mass, new = (graph.key_mass(attention, on(flags), by=by) for flags in (own, top))
            refresh = call(at, EITHER, refresh, call(at, MOVED, mass, read, place[2], float(self.gamma)))
            flags = (call(at, aten.to.dtype, n, torch.float32) for n in (top, call(at, BOTH, top, ran)))
            call(at, OPS["feature_write"], call(at, aten.stack.default, [new, *flags], 1), cache, *place)
            report.did("a window of masks, or all rows", attention.meta["layer"])
        graph.count_rows(counted, by=by)
        graph.sweep()


def elastic(spec: ModelSpec, window: int = 32, gamma: float = 0.9, max_num_logits: int = 2048) -> Recipe:
    """Elastic-Cache, on a bidirectional model; see `ElasticRows`. max_num_logits: rows whose logits exist at a time."""
    if spec.attention != "bidirectional":
        raise InputError(f"elastic: {spec.family} is {spec.attention}; Elastic-Cache is for bidirectional models.")
    passes = (PackRows(), FuseProjections(), CacheKV(), ElasticRows(window, gamma), ChunkLMHead(max_num_logits))
    return Recipe("elastic", 1, (Phase("step", passes),), plan=RowPlan(All(), Counted(full_steps=0, warm_up=1)))

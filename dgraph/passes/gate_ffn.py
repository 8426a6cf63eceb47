"""GateFFN: DyLLM, a feed-forward network that runs on salient rows only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch.fx import Node

from dgraph.errors import InputError
from dgraph.ir.graph import Graph
from dgraph.ir.row_counts import SALIENT
from dgraph.passes import salience
from dgraph.passes.base import Effect, Pass, Report
from dgraph.plans.papers import DYLLM, Paper
from dgraph.spec import ModelSpec
from dgraph.types.nodes import op_name


@dataclass(frozen=True)
class GateFFN(Pass):
    """Run each layer's feed-forward network and its norm on rows whose attention context has changed (DyLLM).

    The other rows reuse its output from when it last ran on them.

    A row is salient if the cosine between its context and that of the step before is below tau, or in a full step. The
    salient rows move to the front of a buffer for all rows. So row i of the buffer is not row i of the step. Linear
    layers stop after the salient rows, whose number is never read on the host. New inputs: `full` bool[N], and per
    layer l `c_cache_l` [pages, page, heads, head_dim] and `f_cache_l` [pages, page, hidden]. New output: `salient`
    i32[layers], the number of salient rows. On a block-causal model these caches have places for the positions of a
    step alone: [pages_1, page, ...], with the input `page_table_1` i32[b, P_1].

        before  %14 = dgraph.paged_attention(%12, k_cache, v_cache, page_table, cu_rows, limit, 0.25)
                %18 = dgraph.rms_norm(%17, post_attention_layernorm.weight, 1e-06)              f32[N, 64]
                %24 = linear(%23, mlp.down_proj.weight)                                         f32[N, 64]
                %25 = add(%17, %24)                                                             f32[N, 64]
        after   %14 = dgraph.paged_attention(%12, k_cache, v_cache, page_table, cu_rows, limit, 0.25)
                %15 = dgraph.drift(%14, c_cache, full, positions, page_table, cu_rows, 0.99)    bool[N]
                %16, %17 = dgraph.list_kept(%15, cu_rows)                                       (i64[N], i32[b+1])
                %21, %22 = dgraph.compact([%20, positions], %16)                                (f32[N, 64], i64[N])
                %23 = dgraph.rms_norm(%21, post_attention_layernorm.weight, 1e-06)              f32[N, 64]
                %29 = dgraph.rows_linear(%28, mlp.down_proj.weight, None, %17)                  f32[N, 64]
                dgraph.feature_write(%29, f_cache, %22, page_table, %17)
                %30 = dgraph.feature_take(f_cache, %row_slots)                                  f32[N, 64]
                %31 = add(%20, %30)                                                             f32[N, 64]

    Cached outputs are read where they are added: by the compiled region between two calls. The slots of the rows are
    found once for all layers, before these: %row_slots = dgraph.row_slots(positions, page_table, cu_rows, ...).

    A network that is parallel to the attention, and added with it, is gated alike. A norm that the two share runs on
    all rows.

    Where PartialAttention has found the salient rows, they are taken from it; its tau must be the same. Run it after
    CacheKV. Approximate; with tau above 1 every row is salient and the program is the dense one.

    Attributes:
        tau: the cosine below which a row is salient; one number, or one for each layer.
    """

    tau: float | tuple[float, ...] = 0.99

    effect: ClassVar[Effect] = Effect.APPROXIMATE
    papers: ClassVar[tuple[Paper, ...]] = (DYLLM.at("section 4; algorithm 3, lines 11 to 14"),)
    reuses: ClassVar[str] = "outputs of rows whose attention context has not changed"
    summary: ClassVar[str] = "feed-forward networks run on rows whose attention context has changed (DyLLM)"
    signature: ClassVar[frozenset[str]] = salience.INPUTS | {SALIENT, "f_cache_*"}

    def __post_init__(self) -> None:
        object.__setattr__(self, "tau", salience.checked(self.tau))

    @staticmethod
    def obstacle(spec: ModelSpec) -> str:
        """See `Pass.obstacle`."""
        if spec.noise == "uniform":
            return (
                "a step finds another canvas than the one before it: tokens are drawn anew, so what was computed for a "
                "row is of another token"
            )
        return ""

    def identity(self) -> GateFFN:
        """See `Pass.identity`."""
        return replace(self, tau=2.0)

    def run(self, graph: Graph, report: Report) -> None:
        for node in graph.find("attention") + graph.find("packed_attention"):
            report.skip("this attention reads no cache, so features have no place to be kept; run CacheKV first", node)
        counted = []
        for attention in [n for op in ("paged_attention", *salience.UPDATED) for n in graph.find(op)]:
            found = graph.row_network(attention)
            if salience.of_masked(graph, attention):
                found = "it runs on masked rows alone; in the next block they are others, of which nothing was kept"
            if isinstance(found, str):
                report.skip(found, attention)
                continue
            flags = self._flags(graph, attention, report.name)
            graph.run_rows(found, flags, by=report.name)
            counted.append(flags)
            report.did(f"{len(found.nodes)} calls of the feed-forward network on salient rows", attention.meta["layer"])
        if report.applied:
            graph.count_rows(counted, by=report.name)
            graph.sweep()

    def _flags(self, graph: Graph, attention: Node, by: str) -> Node:
        """The salient rows of the layer, from PartialAttention or found here."""
        layer = attention.meta["layer"]
        tau = salience.tau_of(self.tau, layer, graph.spec.layers)
        if (there := salience.finder(graph, layer)) is not None:
            if (other := salience.tau_in(there)) != tau:
                raise InputError(
                    f"tau is {tau:g} in layer {layer}, but {op_name(there.target)} finds its salient rows with "
                    f"{other:g}; give both passes the same tau."
                )
            return salience.flags_of(there)
        return graph.drift(attention, tau, by=by)

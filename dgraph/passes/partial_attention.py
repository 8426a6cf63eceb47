"""PartialAttention: DyLLM, attention that computes only its changed part anew."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch.fx import Node

from dgraph.errors import InputError
from dgraph.ir.graph import Graph, Listed
from dgraph.ir.layers import Layer, in_ranges, without
from dgraph.ir.row_counts import SALIENT
from dgraph.ir.row_flags import FULL, drifted
from dgraph.ir.some_rows import SomeRows, cannot_run, listed
from dgraph.ops import OPS
from dgraph.passes import salience
from dgraph.passes.apart import take_apart
from dgraph.passes.base import Effect, Pass, Report
from dgraph.plans.papers import DYLLM, Paper
from dgraph.spec import ModelSpec
from dgraph.types.nodes import args_of, op_name

CONTEXTS = "attention contexts, which it updates by what changes in all keys"


@dataclass(frozen=True)
class PartialAttention(Pass):
    """Project keys and values only of rows that were salient in the layer before, and update other contexts (DyLLM).

    Salient rows attend exactly. The contribution of the changed values is added to the contexts of the other rows.

    Layer 0 starts from the input `changed` bool[N], the rows whose token was decoded in the step before. Queries are
    projected for all rows. A row whose keys and values are not projected keeps those of the cache. A row is salient if
    the cosine between its new context and that of the step before is below tau. In a full step every row is salient and
    exact. New inputs: `full`, `changed` bool[N], and `c_cache_l` [pages, page, heads, head_dim] per layer l. New
    output: `salient` i32[layers], the number of salient rows. On a block-causal model contexts are kept as `GateFFN`
    says, and the attention reads `page_table_1` i32[b, P_1] as well.

        before  %3 = linear(%1, self_attn.k_proj.weight)                                        f32[N, 32]
                %4 = linear(%1, self_attn.v_proj.weight)                                        f32[N, 32]
                dgraph.kv_write(%13, %9, k_cache, v_cache, positions, page_table, cu_rows)
                %14 = dgraph.paged_attention(%12, k_cache, v_cache, page_table, cu_rows, limit, 0.25)
        after   %5, %6, %7, %8 = dgraph.compact([%1, %3, %4, positions], layers[-1].%27)
                %9 = dgraph.rows_linear(%5, self_attn.k_proj.weight, None, layers[-1].%28)      f32[N, 32]
                %12 = dgraph.rows_linear(%5, self_attn.v_proj.weight, None, layers[-1].%28)     f32[N, 32]
                %14 = dgraph.kv_update(%11, %13, k_cache, v_cache, %8, page_table, layers[-1].%28)
                %15, %16 = dgraph.partial_attention(%4, k_cache, v_cache, %14, layers[-1].%27, ..., 0.25, 0.99)

    A joint projection of queries, keys and values, made by FuseProjections or the model, is split again. Queries, and
    keys with values, become products over views of the weight. Run it after CacheKV, with GateFFN in either order; both
    have the same tau.

    Approximate; with tau above 1 every row is salient and exact, and the program is the dense one.

    Attributes:
        tau: the cosine below which a row is salient; one number, or one for each layer.
        update: True if rows that did not project keys and values take their context from the step before, updated.
            False: all rows attend to the current keys and values (`paged_attention`, `drift`), and no context of
            earlier steps is reused. False is not in the paper. It reads all values, and computes no differences of
            them. A layer that runs on masked rows alone (OnlyMasked) has no contexts to update, and needs False.
    """

    tau: float | tuple[float, ...] = 0.99
    update: bool = True

    effect: ClassVar[Effect] = Effect.APPROXIMATE
    papers: ClassVar[tuple[Paper, ...]] = (DYLLM.at("section 4; algorithms 3 and 4"),)
    reuses: ClassVar[str] = "keys and values of rows whose attention context has not changed"
    summary: ClassVar[str] = "keys and values of salient rows only, attention updated by what they changed (DyLLM)"
    signature: ClassVar[frozenset[str]] = salience.INPUTS | {SALIENT, salience.CHANGED.name}
    changes_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "tau", salience.checked(self.tau))
        if not isinstance(self.update, bool):
            raise InputError(f"update must be True or False, got {self.update!r}.")

    @property
    def carries(self) -> str:  # type: ignore[override]
        """See `Pass`; without `update`, contexts are computed anew."""
        return CONTEXTS if self.update else ""

    @staticmethod
    def obstacle(spec: ModelSpec) -> str:
        """See `Pass.obstacle`."""
        if spec.noise == "uniform":
            return (
                "a step finds another canvas than the one before it: tokens are drawn anew, so what was computed for a "
                "row is of another token"
            )
        return ""

    def identity(self) -> PartialAttention:
        """See `Pass.identity`."""
        return replace(self, tau=2.0)

    def run(self, graph: Graph, report: Report) -> None:
        for node in graph.find("attention") + graph.find("packed_attention"):
            report.skip("this attention reads no cache, so there is nothing to update; run CacheKV first", node)
        for attention in graph.find("paged_attention"):
            if reason := _obstacle(graph, attention, self.update) or _apart(graph, attention, report.name):
                report.skip(reason, attention)
                continue
            self._update(graph, attention, report)
        if report.applied:
            found = (salience.finder(graph, layer) for layer in range(graph.spec.layers))
            graph.count_rows((salience.flags_of(call) for call in found if call is not None), by=report.name)
            graph.sweep()

    def _update(self, graph: Graph, attention: Node, report: Report) -> None:
        by, layer = report.name, attention.meta["layer"]
        (write,) = graph.find("kv_write", layer)
        nodes = _projections(graph, attention, write)
        k, v, k_cache, v_cache, positions, page_table, cu_rows, *scales = args_of(write)
        changed = self._changed(graph, layer, cu_rows, by)
        some = SomeRows(graph, changed, by)
        some.run(nodes, write, [positions])
        new = some.new
        update = (new[k], new[v], k_cache, v_cache, new[positions], page_table, changed.cu_rows, *scales)
        tau = salience.tau_of(self.tau, layer, graph.spec.layers)
        for drift in salience.drifts(graph, layer):
            if (other := salience.tau_in(drift)) != tau:
                raise InputError(
                    f"tau is {tau:g} in layer {layer}, but {op_name(drift.target)} finds its salient rows with "
                    f"{other:g}; give both passes the same tau."
                )
        if salience.of_masked(graph, attention):
            graph.call(OPS["kv_write"], update, before=write, by=by)
            graph.fx.erase_node(write)
            report.did(f"{len(nodes)} calls for keys and values on salient rows, attention on masked rows", layer)
            return
        if self.update:
            graph.add_input(FULL)
            full, (cache, table) = graph.on_rows_of(FULL.name, attention, by), graph.cache_of("c", attention)
            dv = graph.call(OPS["kv_update"], update, before=write, by=by)
            q, _, _, _, _, limit, scale = args_of(attention)[:7]
            args = (q, k_cache, v_cache, dv, changed.index, changed.cu_rows, cache, full, positions, page_table)
            op = OPS["partial_attention" if graph.sharding is None else "partial_context"]
            own = () if table is page_table else (*(() if scales else (None, None)), table)
            partial = graph.call(op, (*args, cu_rows, limit, scale, tau, *scales, *own), before=attention, by=by)
            context, salient = graph.parts(partial, 2, by)
            if graph.sharding is not None:  # sums of this rank's share
                salient = drifted(graph, salient, full, cu_rows, tau, by)
            for drift in salience.drifts(graph, layer):
                if drift is not salient:
                    salience.no_longer(graph, drift, salient)
            graph.replace(attention, context)
        else:
            graph.call(OPS["kv_write"], update, before=write, by=by)
            if not salience.drifts(graph, layer):
                graph.drift(attention, tau, by=by)
        graph.fx.erase_node(write)
        report.did(
            f"{len(nodes)} calls for keys and values on salient rows, attention "
            f"{'updated' if self.update else 'on all rows'}",
            layer,
        )

    def _changed(self, graph: Graph, layer: int, cu_rows: Node, by: str) -> Listed:
        """The rows of which the layer's keys and values are projected."""
        found = salience.finder(graph, layer - 1) if layer else None
        if found is None:  # before the layers, so that the first reads like the others
            flags = graph.add_input(salience.CHANGED)
            return listed(graph, flags, cu_rows, graph.calls[0], by, like=graph.output)
        flags = salience.flags_of(found)
        return listed(graph, flags, cu_rows, flags.next, by)


def _obstacle(graph: Graph, attention: Node, update: bool) -> str | None:
    """Reason why an attention cannot be updated, nor read the keys and values that salient rows wrote, or None."""
    layer = attention.meta["layer"]
    if reason := in_ranges(attention):
        return reason
    writes = graph.find("kv_write", layer) if layer is not None else []
    if len(writes) != 1:
        return f"{len(writes)} writes of keys and values in the layer of this attention; expected one"
    rows = graph.row_set(args_of(writes[0])[0])
    if update and salience.of_masked(graph, attention):
        return "it runs on masked rows alone, so there is no context of the others to update; use update=False"
    if update and graph.row_set(attention) != rows:
        return "rows are evicted between the layer's keys and its attention, whose contexts would miss an update"
    if graph.find("least_similar", layer) + graph.find("least_drifted", layer):
        return "the layer runs on the rows whose values have changed already"
    if layer:
        found = salience.finder(graph, layer - 1)
        if found is None:
            return f"nothing finds the salient rows of layer {layer - 1}"
        if graph.row_set(salience.flags_of(found)) != rows:
            return f"rows are evicted between layers {layer - 1} and {layer}"
    nodes = _projections(graph, attention, writes[0])
    for node in dict.fromkeys((*nodes, *args_of(writes[0])[:2])):
        for user in node.users:
            if user not in nodes and user is not writes[0]:
                return f"{op_name(user.target)} also reads {node.name}, for all rows"
    return cannot_run(nodes)


def _projections(graph: Graph, attention: Node, write: Node) -> list[Node]:
    """The layer's calls that make keys and values and no queries."""
    layer = Layer(graph, attention)
    return without(layer.makers(*args_of(write)[:2]), layer.makers(layer.queries))


def _apart(graph: Graph, attention: Node, by: str) -> str | None:
    (write,) = graph.find("kv_write", attention.meta["layer"])
    layer = Layer(graph, attention)
    of_q, of_kv = layer.makers(layer.queries), layer.makers(*args_of(write)[:2])
    return take_apart(graph, of_q, of_kv, by)

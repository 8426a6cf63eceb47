"""SparseKV: attention over a window of the cache and, per KV head, the few other keys that matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch.fx import Node

from dgraph.errors import InputError
from dgraph.errors.former import tell_former
from dgraph.ir.graph import Graph
from dgraph.ir.layers import in_ranges
from dgraph.ir.row_flags import CU_KEYS, KEY_POSITIONS
from dgraph.ops import OPS
from dgraph.passes import salience
from dgraph.passes.base import Effect, Pass, Report
from dgraph.plans.kv import KEPT, PACKED, PAGES, check_budget, pairs_of
from dgraph.plans.papers import ADAKV, DLLM_SERVE, H2O, MASKKV, PYRAMIDKV, SNAPKV, SPARSE_DLLM, SQUEEZE, Paper
from dgraph.ranks.sharding import FIRST_KV_HEAD
from dgraph.spec import ModelSpec
from dgraph.types.nodes import args_of
from dgraph.types.shapes import InputSpec

aten = torch.ops.aten

WINDOW = InputSpec("window", torch.int32, ("b", 2))
ACTION = InputSpec("action", torch.int32, ("b",))

EVERYTHING = 1 << 31
"""More positions than any sequence has."""


class Voters(NamedTuple):
    """Rows whose attention is summed: positions from `first` on and below `last`, relative to the window's beginning.

    Attributes:
        first, last: the two bounds.
        first_quarters, last_quarters: the part of these rows that votes, from one quarter up to another.
    """

    first: int
    last: int
    first_quarters: int = 0
    last_quarters: int = 4

    @property
    def outside(self) -> bool:
        """True if rows before the window are among them."""
        return self.first < 0


VOTERS = {
    "mask_voting": Voters(0, EVERYTHING - 1),
    "front_voting": Voters(0, EVERYTHING - 1, 0, 1),
    "middle_voting": Voters(0, EVERYTHING - 1, 1, 3),
    "back_voting": Voters(0, EVERYTHING - 1, 3, 4),
    "prompt_voting": Voters(-EVERYTHING, 0),
    "all_voting": Voters(-EVERYTHING, EVERYTHING - 1),
    "snapkv": Voters(-32, 0),
}
"""Rows whose attention is summed, by selector.

MaskKV sums over the response's rows, or over its first, its second and third, or its last quarter (Table 11); over the
prompt's rows or over all (Table 13). SnapKV sums over the prompt's last 32 rows, its observation window.
"""
FORMER = {"h2o": "all_voting"}
"""Present names of selectors by their former ones, which go with version 0.3."""
SCORES = {"block": False, "shared": True}
"""Products of keys with the block's mean query, and whether all heads share their mean."""
SELECTORS = (*VOTERS, *SCORES)
ABSENT = (None, None)
"""In place of arguments for keys and for values."""
HEADS = ("uniform", "mass", "adaptive")
POOLINGS = ("max", "mean")


@dataclass(frozen=True)
class SparseKV(Pass):
    """Keep only the keys outside of each sequence's window that a selector ranks highest, per KV head.

    A step that selects (action SELECT of a sequence) sees all keys of its rows. It ranks the keys outside of the
    window, and copies the best of each head together with their values. Steps that reuse (REUSE) see the packed entries
    and the window in the dense cache. Nothing else is stored: positions outside of the window have no pages.

    New inputs: `window` i32[b, 2], `action` i32[b] and `pack_start` i32[layers, b]. Per layer l: `k_pack_l`, `v_pack_l`
    [entries, head_dim], `pack_count_l` i32[sequences, KV heads] and `pack_index_l` i32[entries]. If the caches are in
    float8, so are the packs, with `k_pack_scale_l` and `v_pack_scale_l` f32[entries].

        before  %9 = dgraph.paged_attention(%6, k_cache, v_cache, page_table, cu_rows, limit, 0.18)   f32[N, 8, 32]
        after   %9 = dgraph.kv_votes(%6, %7, positions, positions, cu_rows, cu_rows, limit, window, action, 0.18, ...)
                dgraph.kv_pack(%9, %7, %8, positions, cu_rows, window, action, k_pack, v_pack, pack_count, pack_index,
                               pack_start, 0, ...)
                %10 = dgraph.sparse_attention(%6, %7, %8, k_cache, v_cache, page_table, k_pack, v_pack, pack_count,
                                              pack_start, positions, cu_rows, cu_rows, limit, window, action, 0.18, 0)

    With kept="pages" all positions have pages, and nothing is copied. A step that selects lists the positions of the
    best keys, and steps that reuse read these in the cache. There are no `k_pack_l` and `v_pack_l`.

        after   dgraph.kv_pack(%9, None, None, positions, cu_rows, window, action, None, None, pack_count, pack_index,
                               pack_start, 0, ...)
                %10 = dgraph.sparse_attention(%6, %7, %8, k_cache, v_cache, page_table, None, None, pack_count,
                                              pack_start, positions, cu_rows, cu_rows, limit, window, action, 0.18, 0,
                                              ..., pack_index)

    If ranks have some heads each, some choices need scores of other ranks: a mean over heads, and budgets that are
    divided over a layer's heads. A KV head whose queries several ranks have needs them too. Every rank makes these
    choices alike, from scores gathered over ranks, and packs its own heads.

    Run it after passes that choose rows (EvictTokens, ReuseRows). Approximate; a budget of all candidates gives the
    dense program of the same rows.

    Attributes:
        selector: "mask_voting": the sum of the attention that a key gets from the response's rows (MaskKV, Eq. 6);
            "front_voting", "middle_voting" or "back_voting": from their first quarter, the middle half or the last
            quarter (Table 11); "prompt_voting": from the prompt's rows; "all_voting": from all rows (Table 13);
            "snapkv": from the prompt's last 32 rows; "block": its product with the block's mean query, per head
            (dLLM-Serve, Eq. 6); "shared": the same, averaged over all heads (Sparse-dLLM).
        ratio: entries per head, on average, as a share of the candidates; 0 if `pairs` gives their number.
        pairs: entries per head on average, one number or one for each layer.
        heads: division of a layer's budget: "uniform", "mass" (by the sum of each head's scores: MaskKV, Eq. 7) or
            "adaptive" (by a head's number of the layer's best scores: Ada-KV).
        floor: the share of the budget that "mass" and "adaptive" divide uniformly, in [0, 1].
        pool: width of the pooling over neighbouring candidates; odd, 1 for none.
        pooling: "max" or "mean".
        recent: number of last candidates before the window that are kept in any case.
        reuse: True for the program of steps in which no sequence selects: it reads the packed entries.
        cached: True if the keys to select from are read from the cache, since a step forwards only the rows of a block
            (block-causal models). Their inputs are `key_positions` i64[M] and `cu_keys` i32[b+1]. False: they are the
            keys of the step's own rows.
        kept: where the kept keys are, "packed" or in their "pages"; see `dgraph.plans.kv.KVPlan`.
        recent_share: share of `pairs` that goes to the last candidates before the window, besides `recent` (with
            "all_voting" and a half it is H2O); in [0, 1].
    """

    selector: str = "mask_voting"
    ratio: float = 0.5
    pairs: tuple[int, ...] = ()
    heads: str = "uniform"
    floor: float = 0.0
    pool: int = 1
    pooling: str = "max"
    recent: int = 0
    reuse: bool = False
    cached: bool = False
    kept: str = PACKED
    recent_share: float = 0.0

    effect: ClassVar[Effect] = Effect.APPROXIMATE
    papers: ClassVar[tuple[Paper, ...]] = (
        MASKKV,
        DLLM_SERVE.at("Eq. 6"),
        SPARSE_DLLM,
        SNAPKV,
        PYRAMIDKV,
        SQUEEZE,
        ADAKV,
        H2O,
    )
    summary: ClassVar[str] = "attention over a window and the other keys that matter (MaskKV, dLLM-Serve, Sparse-dLLM)"
    signature: ClassVar[frozenset[str]] = frozenset(
        {"window", "action", "pack_start", "k_pack_*", "v_pack_*", "pack_count_*", "pack_index_*"}
        | {"key_positions", "cu_keys"}
    )
    changes_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.pairs, list):  # as JSON has it
            object.__setattr__(self, "pairs", tuple(self.pairs))
        if self.selector in FORMER:
            tell_former(f"SparseKV(selector={self.selector!r})", f"{FORMER[self.selector]!r}")
            object.__setattr__(self, "selector", FORMER[self.selector])
        check_budget(self.ratio, self.pairs)
        for name, value, known in (
            ("selector", self.selector, SELECTORS),
            ("heads", self.heads, HEADS),
            ("pooling", self.pooling, POOLINGS),
            ("kept", self.kept, KEPT),
        ):
            if value not in known:
                raise InputError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}.")
        for name, share in (("floor", self.floor), ("recent_share", self.recent_share)):
            if type(share) not in (int, float) or not 0 <= share <= 1:
                raise InputError(f"{name} must be a number from 0 to 1, got {share!r}.")
        if type(self.pool) is not int or self.pool < 1 or self.pool % 2 == 0:
            raise InputError(f"pool must be odd and at least 1, got {self.pool!r}.")
        if type(self.recent) is not int or self.recent < 0:
            raise InputError(f"recent must be an integer of at least 0, got {self.recent!r}.")
        for name, switch in (("reuse", self.reuse), ("cached", self.cached)):
            if not isinstance(switch, bool):
                raise InputError(f"{name} must be True or False, got {switch!r}.")

    @staticmethod
    def obstacle(spec: ModelSpec) -> str:
        """See `Pass.obstacle`."""
        if spec.noise == "uniform":
            return "keys are kept by what rows that hold a mask attend to, and no row does"
        return ""

    def identity(self) -> SparseKV:
        """See `Pass.identity`."""
        return replace(self, ratio=1.0, pairs=(), recent_share=0.0)

    def run(self, graph: Graph, report: Report) -> None:
        for node in graph.find("attention") + graph.find("packed_attention"):
            report.skip("this attention reads no cache, so there is nothing to keep of it; run CacheKV first", node)
        for node in [n for op in salience.UPDATED for n in graph.find(op)]:
            report.skip("this attention is updated by what changes of all keys, so none can be dropped", node)
        for node in graph.find("sparse_attention"):
            report.skip("this attention reads packed keys already", node)
        if len(self.pairs) not in (0, 1, graph.spec.layers):
            raise InputError(
                f"pairs has {len(self.pairs)} numbers, but the model {graph.spec.layers} layers; give one, or one for "
                f"each layer."
            )
        if self.recent_share and not self.pairs:
            raise InputError(f"recent_share={self.recent_share:g} is a share of pairs; give pairs instead of ratio.")
        for node in graph.find("paged_attention"):
            layer = node.meta["layer"]
            if reason := in_ranges(node):
                report.skip(reason, node)
                continue
            writes = graph.find("kv_write", layer)
            if len(writes) != 1:
                report.skip(f"{len(writes)} writes of keys and values in the layer of this attention; expected 1", node)
                continue
            self._keep(graph, node, writes[0], report)
        if report.applied:
            graph.sweep()

    def _keep(self, graph: Graph, attention: Node, write: Node, report: Report) -> None:
        by, layer = report.name, attention.meta["layer"]
        q, k_cache, v_cache, page_table, cu_rows, limit, scale, *scales = args_of(attention)
        k, v, _, _, key_positions, _, cu_keys = args_of(write)[:7]
        window, action = graph.add_input(WINDOW), graph.add_input(ACTION)
        start = graph.add_input(InputSpec("pack_start", torch.int32, (graph.spec.layers, "b")))
        heads, width = (int(size) for size in k.meta["val"].shape[1:])

        def entries(name: str, dtype: torch.dtype, *sizes: int) -> Node:
            return graph.add_input(InputSpec(f"{name}_{layer}", dtype, ("entries", *sizes), layer=layer))

        in_pages = self.kept == PAGES
        packs: Sequence[Node | None] = ABSENT
        pack_scales: list[Node] = []
        if not in_pages:
            packs = [entries(f"{n}_pack", k_cache.meta["val"].dtype, width) for n in "kv"]
            pack_scales = [entries(f"{n}_pack_scale", torch.float32) for n, _ in zip("kv", scales, strict=False)]
        budgets = _kv_heads(graph) if self.heads != "uniform" and _kv_heads(graph) > heads else 0
        shape = ("sequences", heads)
        count = graph.add_input(InputSpec(f"pack_count_{layer}", torch.int32, shape, layer=layer, budgets=budgets))
        row_scales: list[Node] = []
        if self.cached and not self.reuse:
            key_positions, cu_keys = graph.add_input(KEY_POSITIONS), graph.add_input(CU_KEYS)
            places = (key_positions, page_table, cu_keys)
            k, v, *row_scales = (
                graph.call(OPS["feature_read"], (cache, *places), before=attention, by=by)
                for cache in (k_cache, v_cache, *scales)
            )
        keys = (key_positions, cu_keys)
        index = entries("pack_index", torch.int32) if in_pages or not self.reuse else None
        if not self.reuse:
            score = self.score(graph, attention, k, keys, (window, action), row_scales[:1], by)
            budget = (float(self.ratio), pairs_of(self.pairs, layer))
            recent = self.recent + int(self.recent_share * budget[1])
            settings = (*budget, self.heads, float(self.floor), self.pool, self.pooling, recent)
            score, *first = self._over_heads(graph, score, heads, attention, by)
            packed = (*packs, count, index, start, layer)
            args = (score, *(ABSENT if in_pages else (k, v)), *keys, window, action, *packed, *settings, *first)
            if pack_scales:
                args = (*args, *(() if first else (None,)), *(row_scales or (None, None)), *pack_scales)
            graph.call(OPS["kv_pack"], args, before=attention, by=by)
        caches = (k_cache, v_cache, page_table, *packs, count, start)
        seen = (key_positions, cu_rows, cu_keys, limit, window, action, scale, layer, not self.reuse)
        stored: tuple[Node | None, ...] = (*scales, *pack_scales, *row_scales)
        if in_pages:
            stored = (*(scales or ABSENT), *ABSENT, *(row_scales or ABSENT), index)
        read = (q, k, v, *caches, *seen, *stored)
        graph.replace(attention, graph.call(OPS["sparse_attention"], read, before=attention, by=by))
        report.did("paged_attention -> sparse_attention" if self.reuse else f"{self.selector}, kv_pack", layer)

    def score(
        self,
        graph: Graph,
        attention: Node,
        k: Node,
        keys: tuple[Node, Node],
        where: tuple[Node, Node],
        k_scale: Sequence[Node],
        by: str,
    ) -> Node:
        """Scores f32[M, KV heads] by which a step that selects ranks the keys outside of the window.

        A method from another package inherits this pass and implements it, by an op of its own.

        Args:
            graph: the graph; new calls come before the attention.
            attention: the attention whose keys are ranked.
            k: [M, KV heads, head_dim], the keys of the sequences.
            keys: their positions i64[M], and their offsets i32[b+1].
            where: the inputs `window` and `action`.
            k_scale: the scales of keys in float8, or nothing.
            by: the pass.
        """
        q, _, _, _, cu_rows, limit, scale = args_of(attention)[:7]
        key_positions, cu_keys = keys
        # Rows of a query may be fewer than those of the keys: an eviction stands between the two, or they are cached.
        positions = key_positions if cu_rows is cu_keys else graph.on_rows_of("positions", attention, by)
        if self.selector in VOTERS:
            voters = VOTERS[self.selector]
            args = (q, k, positions, key_positions, cu_rows, cu_keys, limit, *where, scale, voters.first, voters.last)
            quarters = voters.first_quarters, voters.last_quarters
            args = (*args, *k_scale) if quarters == (0, 4) else (*args, *(k_scale or (None,)), *quarters)
            return graph.call(OPS["kv_votes"], args, before=attention, by=by)
        shared = (q, k, positions, cu_rows, cu_keys, *where, scale, SCORES[self.selector], *k_scale)
        return graph.call(OPS["kv_scores"], shared, before=attention, by=by)

    def _over_heads(self, graph: Graph, score: Node, heads: int, before: Node, by: str) -> tuple[Node, ...]:
        """Arguments of a choice: the scores of this rank's heads.

        If a choice looks at heads of other ranks: the scores of all heads, and the number of this rank's first head.
        """
        if graph.sharding is None or graph.whole is None or graph.whole.heads == graph.spec.heads:
            return (score,)
        every, shared = _kv_heads(graph), SCORES.get(self.selector, False)
        copies = graph.sharding.world * heads // every  # ranks that have the same KV head, for other queries

        def call(target: Any, *args: Any) -> Node:
            return graph.call(target, args, before=before, by=by)

        if copies == 1 and not shared and self.heads == "uniform":
            return (score,)
        found = graph.of_all_ranks(score, by)
        if shared:
            mean = call(aten.mean.dim, found, [1], True)
            found = call(aten.expand.default, mean, [-1, heads if self.heads == "uniform" else every])
            if self.heads == "uniform":
                return (found,)
        elif copies > 1:
            each = call(aten.reshape.default, found, [-1, every, copies])
            found = call(aten.amax.default, each, [2]) if self.selector in SCORES else call(aten.mean.dim, each, [2])
        return found, graph.own_number(FIRST_KV_HEAD)


def _kv_heads(graph: Graph) -> int:
    """KV heads of the whole model."""
    return (graph.whole or graph.spec).kv_heads

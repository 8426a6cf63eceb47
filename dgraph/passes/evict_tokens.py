"""EvictTokens: FOCUS, the eviction of rows that will not be decoded in this step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.fx import Node

from dgraph.errors import InputError, PassError
from dgraph.ir.graph import Graph
from dgraph.ir.layers import in_ranges
from dgraph.ops import OPS
from dgraph.passes.base import Effect, Pass, Report
from dgraph.passes.chunk_lm_head import CANDIDATE
from dgraph.plans.papers import FOCUS, Paper
from dgraph.spec import ModelSpec
from dgraph.types.nodes import args_of
from dgraph.types.shapes import InputSpec

aten = torch.ops.aten

MASKED = InputSpec("masked", torch.bool, ("N",))
AVERAGES = {
    "block": InputSpec("average", torch.float32, ("b",)),
    "sequence": InputSpec("sequence_average", torch.float32, ("b",)),
}
"""The decoded tokens per step so far, by what they are averaged over."""
MEMBERS = {"candidates": CANDIDATE, "block": InputSpec("in_block", torch.bool, ("N",))}
"""Flags of the rows between which importance is measured."""
REACHED = InputSpec("reached", torch.int32, ("b",), reset="block", initial=-1)
"""The rightmost position that was kept in the block so far."""
BLOCK_STEP = InputSpec("block_step", torch.int32, ("b",))
NOISE = InputSpec("noise", torch.float32, ("N",))
SCRIPT = InputSpec("script", torch.float32, ("N",))

SIGNALS = ("delta", "importance")
SELECTIONS = ("top", "random", "bottom", "scripted")
CHOICES = {"signal": SIGNALS, "select": SELECTIONS, "average_over": tuple(AVERAGES), "among": tuple(MEMBERS)}


@dataclass(frozen=True)
class EvictTokens(Pass):
    """Keep, after layer `after`, only the rows that are likely to be decoded in this step (FOCUS).

    A candidate is a row whose token the step may commit (the paper's masked tokens). Its importance (Eq. 2) is the
    attention that it receives from the candidates of its sequence, or from all rows of its block (see `among`). It is
    computed from queries and keys after RoPE, pooled over neighbours, and summed over heads, of all ranks. The signal
    is the change of importance from layer `after - 1` to layer `after` (Eq. 3).

    Each sequence keeps max(K, N_sigma) candidates. K = ceil(alpha x decoded tokens per step so far) (Eq. 4). N_sigma is
    the number of rows whose signal is at least one standard deviation above the mean. It also keeps the candidate left
    of each kept row, and every row that holds a token. It also keeps every masked row between the rightmost row kept so
    far and the rightmost row kept now.

    Two defaults deviate from the paper, as its public code does. Eq. 2 sums over all rows of the block; by default it
    sums over candidates. `among="block"` sums over all rows of the block that the step forwards, since cached ones have
    no query. Eq. 17 to 19 and appendix E.3.1 average decoded tokens over all steps of a sequence; by default each block
    begins the average anew. `average_over="sequence"` keeps it.

    Keys and values of layer `after` are still written for all rows; from its attention on, all runs on the kept rows
    (row set K). As published, rows are evicted from the first step of a block on. Then a row right of all rows kept so
    far has no keys in the later layers. So the kept rows see their sequence up to the last kept row. After `full_steps`
    that evict nothing all rows have keys, if of an earlier step, and the kept rows see them.

    If rows predict the next position (a logit shift), the candidates are the rows before masks, one for each mask.
    Importance, budget and selection are theirs. A row that holds a token is always kept, since its keys change; it may
    be a candidate too. A row that holds a mask and predicts none (before a decoded position, and at the end of a block)
    is never selected. It is evicted, unless it lies between kept rows as above; the input `masked` flags rows that hold
    masks. So the last row of a block goes on once it is decoded, and before that only if nothing of its sequence is
    evicted. No row sees a key that was never written: a decoded position comes at most one after a row that was kept.

        before  dgraph.kv_write(%7, %8, k_cache, v_cache, positions, page_table, cu_rows)
                %9 = dgraph.paged_attention(%6, ...)                                            f32[N, 8, 32]
        after   dgraph.kv_write(%7, %8, k_cache, v_cache, positions, page_table, cu_rows)
                %9 = dgraph.importance(%6, %7, candidate, cu_rows, 0.18, 3)                     f32[N]
                %10 = sub(%9, layers[0]...)                                                     f32[N]
                %11 = dgraph.select_tokens(%10, candidate, positions, cu_rows, limit, average, reached, 1.5, 0)
                %15 = dgraph.keep_index(%12, cu_rows, -1)          -- stage cut --              (i64[K], i32[b+1])
                %18 = dgraph.compact([...every value that lives on...], %16)
                %26 = dgraph.paged_attention(%19, ...)                                          f32[K, 8, 32]

    Approximate; with alpha = inf nothing is evicted and the program is the dense one.

    Attributes:
        alpha: retention over the average number of decoded tokens; at least 1, may be infinite.
        after: the layer whose attention is the first on the kept rows; at least 1 for the signal "delta".
        signal: "delta", or "importance" at layer `after` alone.
        select: keep the "top" of the signal, the "bottom", or "random" rows (the paper's Table 3); "scripted" follows
            the input `script` f32[N], to measure speed. A script value of at least 0 replaces the signal, which is
            computed all the same. Alpha is 1 then, and `average` the number of rows to select.
        keep: a fixed number of candidates instead of the dynamic budget; 0 for the budget.
        pool: width of the max-pooling over neighbouring candidates; odd.
        full_steps: steps at the beginning of a block that evict nothing; 0 as published. A script decides itself which
            rows the first steps keep.
        average_over: the steps whose decoded tokens are averaged: those of the "block" that decoded some, or all of the
            "sequence". A script gives the number itself.
        among: rows whose queries and keys importance is measured between: "candidates", or all of the "block".
    """

    alpha: float = 1.5
    after: int = 1
    signal: str = "delta"
    select: str = "top"
    keep: int = 0
    pool: int = 3
    full_steps: int = 0
    average_over: str = "block"
    among: str = "candidates"

    effect: ClassVar[Effect] = Effect.APPROXIMATE
    papers: ClassVar[tuple[Paper, ...]] = (FOCUS.at("section 4 and appendix E"),)
    evicts: ClassVar[bool] = True
    summary: ClassVar[str] = "evicts rows that will not be decoded, after layer `after` (FOCUS)"
    signature: ClassVar[frozenset[str]] = frozenset(
        {"candidate", "masked", "reached", "block_step", "noise", "script", "kept", "score"}
        | {spec.name for spec in (*AVERAGES.values(), *MEMBERS.values())}
    )

    def __post_init__(self) -> None:
        for name in ("after", "keep", "pool", "full_steps"):
            number = getattr(self, name)
            if type(number) is not int:
                raise InputError(f"{name} must be an integer, got {number!r}.")
        if type(self.alpha) not in (int, float) or math.isnan(self.alpha) or self.alpha < 1:
            raise InputError(
                f"alpha must be at least 1 (the paper uses 1.2 to 1.8; inf evicts nothing), got {self.alpha}."
            )
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                raise InputError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}.")
        lowest = 1 if self.signal == "delta" else 0
        if self.after < lowest:
            raise InputError(
                f"after must be a layer of at least {lowest} for signal={self.signal!r}, got {self.after}."
            )
        if self.keep < 0:
            raise InputError(f"keep must be 0 (dynamic budget) or a number of rows, got {self.keep}.")
        if self.keep and self.select == "scripted":
            raise InputError(f"keep must be 0 with select='scripted': the script says how many, got {self.keep}.")
        if self.full_steps < 0:
            raise InputError(f"full_steps must be at least 0 (a block's first step evicts), got {self.full_steps}.")
        if self.pool < 1 or self.pool % 2 == 0:
            raise InputError(f"pool must be odd and at least 1, got {self.pool}.")

    @staticmethod
    def obstacle(spec: ModelSpec) -> str:
        """Reason why rows of a model cannot be evicted; "" if they can."""
        if spec.noise == "uniform":
            return (
                "no row is decoded before its whole canvas is: what each of them predicts is a part of what the next "
                "step reads, and of when the canvas is done"
            )
        return ""

    def identity(self) -> EvictTokens:
        """See `Pass.identity`."""
        return replace(self, alpha=math.inf, keep=0, select="top" if self.select == "scripted" else self.select)

    def run(self, graph: Graph, report: Report) -> None:
        reads = graph.find("paged_attention", self.after)
        writes = graph.find("kv_write", self.after)
        if not reads or not writes:
            for node in graph.find("packed_attention", self.after) + graph.find("attention", self.after):
                report.skip(
                    "this attention reads no cache, so evicted rows would be lost to it; run CacheKV first", node
                )
            if self.after >= graph.spec.layers:
                raise InputError(
                    f"after={self.after} is not a layer of this model, which has 0..{graph.spec.layers - 1}."
                )
            return
        anchor, write = reads[0], writes[0]
        if reason := self.obstacle(graph.spec) or in_ranges(anchor):
            report.skip(reason, anchor)
            return
        if graph.row_set(anchor) != graph.row_set(args_of(write)[0]):
            report.skip("rows are evicted between the layer's keys and its attention already", anchor)
            return
        by = report.name
        score = self._score(graph, anchor, write, by)
        cu_rows, limit = args_of(anchor)[4:6]
        candidate, positions = (graph.on_rows_of(name, anchor, by) for name in ("candidate", "positions"))
        scripted = self.select == "scripted"
        average = graph.add_input(AVERAGES["block" if scripted else self.average_over])
        reached = graph.add_input(REACHED)
        full_steps = 0 if scripted else self.full_steps
        if full_steps:
            full = graph.call(aten.lt.Scalar, (graph.add_input(BLOCK_STEP), full_steps), before=anchor, by=by)
            average = graph.call(aten.masked_fill.Scalar, (average, full, math.inf), before=anchor, by=by)
        alpha = 1.0 if scripted else float(self.alpha)
        args = [score, candidate, positions, cu_rows, limit, average, reached, alpha, self.keep]
        if graph.spec.logit_shift:  # else the candidates are the masked rows
            graph.add_input(MASKED)
            args.append(graph.on_rows_of("masked", anchor, by))
        chosen = graph.call(OPS["select_tokens"], args, before=anchor, by=by)
        keep, new_limit, new_reached = graph.parts(chosen, 3, by)
        # After the kept rows there are the keys of a full step, which a bidirectional model begins every block with.
        written = full_steps > 0 or graph.spec.attention == "bidirectional"
        instead = {} if written else {limit: new_limit}
        kept = graph.keep_rows(keep, before=anchor, by=by, instead=instead)
        results = graph.results()
        for name, value in (("reached", new_reached), ("score", score)):
            if name not in results or results[name] < value:  # of the eviction that comes last in the program
                results[name] = value
        graph.set_outputs(results)
        graph.sweep()
        carried = sum(len(args_of(c)[0]) for c in graph.find("compact") if args_of(c)[1] is kept.index)
        report.did(f"{self.select} of {self.signal}; {carried} values carried across the cut", self.after)

    def _score(self, graph: Graph, anchor: Node, write: Node, by: str) -> Node:
        """The signal over rows, oriented so that larger is kept."""
        graph.add_input(CANDIDATE)
        if self.select == "random":
            graph.add_input(NOISE)
            return graph.on_rows_of("noise", anchor, by)
        score = self._importance(graph, anchor, write, by)
        if self.signal == "delta":
            earlier = graph.find("paged_attention", self.after - 1)
            if not earlier:
                raise PassError(
                    f"layer {self.after - 1} has no paged attention to take the importance from; run CacheKV first."
                )
            before = self._importance(graph, earlier[0], graph.find("kv_write", self.after - 1)[0], by)
            # Between the two layers, rows may have been evicted.
            score = graph.call(aten.sub.Tensor, (score, graph.on_rows_of(before, anchor, by)), before=anchor, by=by)
        if self.select == "bottom":
            score = graph.call(aten.neg.default, (score,), before=anchor, by=by)
        if self.select == "scripted":
            graph.add_input(SCRIPT)
            script = graph.on_rows_of("script", anchor, by)
            says = graph.call(aten.ge.Scalar, (script, 0.0), before=anchor, by=by)
            score = graph.call(aten.where.self, (says, script, score), before=anchor, by=by)
        return score

    def _importance(self, graph: Graph, read: Node, write: Node, by: str) -> Node:
        q, cu_rows, scale = args_of(read)[0], args_of(read)[4], args_of(read)[6]
        # A layer that evicts rows has keys of all of them, and queries of those that go on.
        flags = graph.add_input(MEMBERS[self.among])
        k, member = (graph.on_rows_of(value, read, by) for value in (args_of(write)[0], flags))
        args = q, k, member, cu_rows, scale, self.pool
        return graph.over_ranks(graph.call(OPS["importance"], args, before=read, by=by), by)

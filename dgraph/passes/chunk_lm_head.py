"""ChunkLMHead: logits of candidate rows only, in chunks that are never all alive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node

from dgraph.errors import InputError
from dgraph.ir.graph import Graph
from dgraph.ir.linears import gathered, head_of
from dgraph.ops import OPS
from dgraph.passes.base import Effect, Pass, Report
from dgraph.plans.papers import DLLM_SERVE, Paper
from dgraph.ranks.sharding import FIRST_ID
from dgraph.spec import ModelSpec
from dgraph.types.shapes import InputSpec

CANDIDATE = InputSpec("candidate", torch.bool, ("N",))
TEMPERATURE = InputSpec("temperature", torch.float32, ("N",))
SEED = InputSpec("seed", torch.int64, ("N",))
DECISION = ("token", "confidence", "margin", "entropy")


@dataclass(frozen=True)
class ChunkLMHead(Pass):
    """Replace the LM head and the decision after it by one op that keeps no logits.

    Only rows whose token the step may commit (`candidate`) are projected, `max_num_logits` rows at a time; the logits
    of the others decide nothing. Each chunk gives its tokens and their confidences and is freed. This is the logit
    budget of dLLM-Serve. The graph's output `logits` becomes `token` i64 and `confidence`, `margin`, `entropy` f32. The
    mask token itself is never predicted.

        before  %3 = linear(%2, lm_head.weight)                                    f32[K, 2048]
                return logits=%3
        after   %3 = dgraph.lm_head(%2, lm_head.weight, None, candidate, temperature, seed, 2048, 3)  (i64[K], ...)
                return token=%4, confidence=%5, margin=%6, entropy=%7

    On a sharded graph each rank reduces the logits of its ids to 7 numbers a row (28 bytes). All ranks gather these
    numbers of all ranks and compute the same decision from them. No logits are gathered.

        after   %3 = dgraph.lm_head_part(%2, lm_head.weight, None, ..., shard.first_id, 151936)    f32[K, 8]
                %4 = dgraph.all_gather(%3, 'tp', 2)                                        f32[K, 14]
                %5 = dgraph.lm_head_combine(%4)                                            (i64[K], ...)

    Reassociates: a GEMM over fewer rows may sum in another order.

    Attributes:
        max_num_logits: rows whose logits exist at a time.
    """

    max_num_logits: int = 2048

    effect: ClassVar[Effect] = Effect.REASSOCIATES
    papers: ClassVar[tuple[Paper, ...]] = (DLLM_SERVE,)
    summary: ClassVar[str] = (
        "logits of candidate rows only, in chunks; token, confidence, margin and entropy without keeping logits"
    )
    signature: ClassVar[frozenset[str]] = frozenset({"logits", *DECISION, "candidate", "temperature", "seed"})

    def __post_init__(self) -> None:
        if type(self.max_num_logits) is not int or self.max_num_logits < 1:
            raise InputError(f"max_num_logits must be a number of rows, at least 1, got {self.max_num_logits!r}.")

    @staticmethod
    def obstacle(spec: ModelSpec) -> str:
        """See `Pass.obstacle`."""
        if spec.noise == "uniform":
            return (
                "the next step reads the mean embedding of what the LM head predicts, which this one does not give; "
                "SelfCondition does"
            )
        return ""

    def run(self, graph: Graph, report: Report) -> None:
        if "logits" not in graph.outputs:
            report.skip(f"the graph returns {', '.join(graph.outputs) or 'nothing'}, no logits", graph.output)
            return
        logits = graph.result("logits")
        linear = head_of(graph)
        if isinstance(linear, str):
            report.skip(linear, logits)
            return
        hidden = linear.x
        if graph.row_set(hidden) is None:
            report.skip("the LM head reads a padded batch; run PackRows first", logits)
            return
        for spec in (CANDIDATE, TEMPERATURE, SEED):
            graph.add_input(spec)
        per_row = [graph.on_rows_of(s.name, hidden, report.name) for s in (CANDIDATE, TEMPERATURE, SEED)]
        args = (hidden, linear.weight, linear.bias, *per_row, self.max_num_logits, graph.spec.mask_id)
        if gathered(logits) is None:
            head = graph.call(OPS["lm_head"], args, before=logits, by=report.name)
        else:
            head = self._of_ranks(graph, args, linear.node, report.name)
        results: dict[str, Node] = {}
        for name in graph.outputs:
            if name == "logits":
                results |= zip(DECISION, graph.parts(head, len(DECISION), report.name), strict=True)
            else:
                results[name] = graph.result(name)
        graph.set_outputs(results)
        graph.sweep()
        report.did(f"candidate rows, {self.max_num_logits} at a time")

    def _of_ranks(self, graph: Graph, args: tuple[Any, ...], logits: Node, by: str) -> Node:
        """The same on ranks: each computes the numbers of its ids."""
        part = (*args, False, graph.own_number(FIRST_ID), graph.spec.vocab)
        numbers = graph.call(OPS["lm_head_part"], part, before=logits, by=by)
        every = graph.of_all_ranks(numbers, by)
        return graph.call(OPS["lm_head_combine"], (every,), before=every.next, by=by, like=logits)

"""AdjustLogits: the LM head decides by logits that each sequence has scaled, shifted and cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dgraph.errors import PassError
from dgraph.ir.graph import Graph
from dgraph.ops import OPS
from dgraph.passes.base import Effect, Pass, Report
from dgraph.plans.papers import OURS, Paper
from dgraph.types.nodes import args_of
from dgraph.types.shapes import InputSpec

SEQUENCE = InputSpec("sequence", torch.int64, ("N",))
LEAST = InputSpec("least_share", torch.float32, ("b",))


@dataclass(frozen=True)
class AdjustLogits(Pass):
    """Let the chunked LM head adjust the logits of a chunk before it reduces them to decisions.

    The tables have a row per sequence: `logit_scale` and `logit_addend` f32[b, V], and `least_share` f32[b]. They carry
    biases, bans and penalties of each request (see `dgraph.runtime.sampling.adjustments`), so that requests with and
    without any share steps.

        before  %3 = dgraph.lm_head(%2, lm_head.weight, None, candidate, temperature, seed, 2048, 3)
        after   %3 = dgraph.lm_head_adjusted(%2, lm_head.weight, None, candidate, temperature, seed, 2048, 3, False,
                                             sequence, logit_scale, logit_addend, least_share)

    It must be the last pass. `CompiledModel` runs it for batches in which a request asks for one of these.
    """

    effect: ClassVar[Effect] = Effect.EXACT
    papers: ClassVar[tuple[Paper, ...]] = OURS
    summary: ClassVar[str] = "biases, bans, penalties and min-p of each request within the reduction of the LM head"
    signature: ClassVar[frozenset[str]] = frozenset({"sequence", "logit_scale", "logit_addend", "least_share"})

    def run(self, graph: Graph, report: Report) -> None:
        if graph.find("lm_head_part"):
            raise PassError(
                "no rank of a sharded model has whole rows of logits, which biases, bans, penalties and min_p need; "
                "leave these out, or serve without tensor parallelism."
            )
        heads = graph.find("lm_head")
        if not heads:
            report.skip("no lm_head has the logits of a chunk; run ChunkLMHead first", graph.output)
            return
        head = heads[0]
        given = args_of(head)
        vocab = given[1].meta["val"].shape[0]
        graph.add_input(SEQUENCE)
        sequence = graph.on_rows_of(SEQUENCE.name, given[3], report.name)
        tables = [
            graph.add_input(InputSpec(name, torch.float32, ("b", vocab))) for name in ("logit_scale", "logit_addend")
        ]
        packed = given[8] if len(given) > 8 else False
        args = (*given[:8], packed, sequence, *tables, graph.add_input(LEAST))
        new = graph.call(OPS["lm_head_adjusted"], args, before=head, by=report.name, like=head)
        graph.replace(head, new)
        graph.sweep()
        report.did("scale, shift and cut by sequence")

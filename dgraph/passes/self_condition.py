"""SelfCondition: the next step reads the predictions of a step, without a [rows, vocabulary] tensor in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node

from dgraph.ir.graph import Graph
from dgraph.ir.linears import capped_head, embedding_of, gathered
from dgraph.ir.stored_weights import stored_of
from dgraph.ops import OPS
from dgraph.passes.base import Effect, Pass, Report
from dgraph.passes.chunk_lm_head import SEED, TEMPERATURE
from dgraph.plans.papers import OURS, Paper
from dgraph.ranks.sharding import FIRST_ID
from dgraph.types.nodes import args_of
from dgraph.types.shapes import OWN, InputSpec, of_window, page_table

aten = torch.ops.aten

OUTPUTS = ("token", "confidence", "draw", "entropy")
TABLE = page_table(OWN)


@dataclass(frozen=True)
class SelfCondition(Pass):
    """Replace a tied LM head by vocabulary attention, and keep the mean embeddings that it predicts for the next step.

    softmax(cap(h E^T) / T) E is attention with the embedding E as keys and values. One op computes for each row the
    most likely token, its probability, a draw, the entropy and the mean embedding. The first four become the outputs
    `token`, `confidence`, `draw` and `entropy`. The mean embedding is read by the row of that position in the next
    step, in place of the input `soft`.

    It lies in a cache by position, `soft_cache` [pages_1, page, hidden], of which a row sees its own position alone (a
    window of 1). So a sequence has as many positions there as a canvas, whatever its length. They are 0 before the
    first step of each canvas, which begins with nothing predicted. Adds the inputs `page_table_1` i32[b, P_1],
    `temperature` f32[N] and `seed` i64[N].

        before  %90 = linear(%89, embed_tokens.weight)                                        f32[N, 262144]
                %93 = mul(tanh(div(%90, 30.0)), 30.0)                                         f32[N, 262144]
                return logits=%93
        after   %1 = dgraph.feature_read(soft_cache, positions, page_table_1, cu_rows)        f32[N, 2816]
                ...
                %91, ... = dgraph.vocabulary_attention(%89, embed_tokens.weight, temperature, seed, cu_rows, 30.0, -1)
                dgraph.feature_write(%95, soft_cache, positions, page_table_1, cu_rows)
                return token=%91, confidence=%92, draw=%93, entropy=%94

    On ranks each computes the numbers of its ids, which are gathered, and a share of the mean, which is summed:

        after   %91, %92 = dgraph.vocabulary_part(%89, embed_tokens.weight, ..., shard.first_id, 262144)
                %93 = dgraph.all_gather(%92, 'tp', 2)                                         f32[N, 12]
                ..., %98 = dgraph.vocabulary_combine(%93, %92, %91)                           f32[N, 2816]
                %99 = dgraph.all_reduce(%98, 'tp')                                            f32[N, 2816]

    Reassociates: sums over the vocabulary run tile by tile, and logits are not rounded to the dtype of the model.
    """

    effect: ClassVar[Effect] = Effect.REASSOCIATES
    papers: ClassVar[tuple[Paper, ...]] = OURS
    summary: ClassVar[str] = (
        "vocabulary attention in the place of a tied LM head; its mean embeddings go to the next step"
    )
    signature: ClassVar[frozenset[str]] = frozenset(
        {"logits", *OUTPUTS, "temperature", "seed", "soft", "soft_cache", TABLE.name}
    )

    def run(self, graph: Graph, report: Report) -> None:
        if "logits" not in graph.outputs:
            report.skip(f"the graph returns {', '.join(graph.outputs) or 'nothing'}, no logits", graph.output)
            return
        logits = graph.result("logits")
        if "soft" not in graph.inputs:
            report.skip("the model reads nothing of what it predicted (no input soft)", logits)
            return
        if "cu_rows" not in graph.inputs:
            report.skip("rows of a padded batch have no places in a cache; run PackRows first", logits)
            return
        found = capped_head(graph)
        if isinstance(found, str):
            report.skip(found, logits)
            return
        head, cap = found
        looked_up = embedding_of(graph)
        if isinstance(looked_up, str) or args_of(looked_up)[0] is not head.weight or head.bias is not None:
            report.skip("the LM head is not the embedding, so its rows are no mean of embeddings", head.node)
            return
        if (stored := stored_of(head.weight)) is not None and stored.quantised:
            why = "and vocabulary attention reads it as it is; leave it so (QuantizeWeights(embeddings=False))"
            report.skip(f"{stored.name} is stored in {stored.parts[0].meta['val'].dtype}, {why}", head.node)
            return
        by, soft = report.name, graph.input("soft")
        shape = of_window("pages", OWN), "page", int(soft.meta["val"].shape[1])
        cache = graph.add_input(InputSpec("soft_cache", soft.meta["val"].dtype, shape, reset="block"))
        place = [graph.input("positions"), graph.add_input(TABLE), graph.input("cu_rows")]
        first = next(node for node in graph.calls if soft in node.all_input_nodes)
        read = graph.call(OPS["feature_read"], (cache, *place), before=first, by=by)
        graph.redirect(soft, read, after=read)
        graph.drop_input("soft")
        per_row = [graph.add_input(spec) for spec in (TEMPERATURE, SEED)]
        args = (head.x, head.weight, *per_row, place[-1], cap, graph.spec.mask_id)
        if gathered(logits) is None:
            decided = graph.call(OPS["vocabulary_attention"], args, before=logits, by=by)
            *said, mean = graph.parts(decided, 5, by)
        else:
            *said, mean = self._of_ranks(graph, args, logits, by)
        graph.call(OPS["feature_write"], (mean, cache, *place), before=mean.next, by=by)
        graph.set_outputs(dict(zip(OUTPUTS, said, strict=True)))
        graph.sweep()
        report.did("LM head -> vocabulary_attention; soft embeddings in a cache")

    def _of_ranks(self, graph: Graph, args: tuple[Any, ...], logits: Node, by: str) -> list[Node]:
        """The same on ranks: each computes some numbers of a row and a share of its mean, for its ids."""
        given = (*args, graph.own_number(FIRST_ID), graph.spec.vocab)
        context, own = graph.parts(graph.call(OPS["vocabulary_part"], given, before=logits, by=by), 2, by)
        every = graph.of_all_ranks(own, by)
        decided = graph.call(OPS["vocabulary_combine"], (every, own, context), before=every.next, by=by)
        *said, share = graph.parts(decided, 5, by)
        total = graph.over_ranks(share, by)
        dtype = args[0].meta["val"].dtype
        if total.meta["val"].dtype == dtype:
            return [*said, total]
        return [*said, graph.call(aten.to.dtype, (total, dtype), before=total.next, by=by)]

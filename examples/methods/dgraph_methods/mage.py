"""MAGE (arXiv 2602.14209): a block of masks chooses, in its first step, the keys that its other steps read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from dgraph import ModelSpec
from dgraph.errors import InputError
from dgraph.ir.graph import Graph
from dgraph.passes import SparseKV
from dgraph.plans.kv import KVPlan
from dgraph.plans.papers import Paper
from dgraph.recipes import Dense
from dgraph.recipes.kept import KeyOptions, KVSelection
from dgraph.types.nodes import args_of
from dgraph_methods.mage_op import OP

PAPER = Paper("MAGE: All-[MASK] Block Already Knows Where to Look in Block Diffusion LLM", "2602.14209")


@dataclass(frozen=True)
class KeepUnion(SparseKV):
    """`SparseKV` whose keys are ranked by the attention of the block's rows, each to the `top` keys that it sees best.

    The union of these keys is what any row of the block needs. As many of it are kept as `pairs` says.

    Attributes:
        top: keys for which a row votes, by each query head.
    """

    top: int = 512

    papers = (PAPER,)
    summary = "attention over a block and the keys that its first step attended to most (MAGE)"

    def identity(self) -> KeepUnion:
        return replace(self, ratio=1.0, pairs=())

    def score(
        self, graph: Graph, attention: Node, k: Node, keys: tuple[Node, Node], where: tuple[Node, Node],
        k_scale: Sequence[Node], by: str,
    ) -> Node:  # fmt: skip
        if k_scale:
            raise InputError("mage: keys in float8 are not ranked; use kv_dtype='model'.")
        q, _, _, _, cu_rows, limit, scale = args_of(attention)[:7]
        positions, (at, cu_keys) = graph.on_rows_of("positions", attention, by), keys
        args = (q, k, positions, at, cu_rows, cu_keys, limit, *where, scale, self.top)
        return graph.call(OP, args, before=attention, by=by)


@dataclass(frozen=True, kw_only=True)
class Mage(KeyOptions, Dense):
    """MAGE: the first step of a block sees all keys, and keeps those that its rows attend to most for the other steps.

    In the paper layers whose attention is skewed get smaller budgets. Here each layer keeps the same number.

    Attributes:
        pairs: keys that a KV head keeps; published: 512.
    """

    pairs: int = 512

    name = "mage"
    papers = (PAPER,)
    window = "block"

    def selection(self, spec: ModelSpec) -> KVSelection:
        if spec.attention != "block_causal" or type(self.pairs) is not int or self.pairs < 1:
            raise InputError(
                f"mage: pairs must be at least 1 on a block-causal model, got {self.pairs!r} on {spec.family}, which "
                f"is {spec.attention}."
            )
        pass_ = KeepUnion(ratio=0.0, pairs=(self.pairs,), top=self.pairs)
        return KVSelection(KVPlan(self.window, pairs=pass_.pairs), pass_)

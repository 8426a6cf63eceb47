"""ShardTensorParallel: a captured graph, divided over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.errors import InputError, PassError, UnknownName
from dgraph.families.weights import Source
from dgraph.ir.graph import Graph
from dgraph.ir.layers import layers_of
from dgraph.ir.shard_propagation import Divided, Division
from dgraph.ir.stored_weights import stored_of, take_weights
from dgraph.ops import OPS
from dgraph.passes.base import Effect, Pass, Report
from dgraph.passes.shard_plan import Plan
from dgraph.plans.papers import OURS, Paper
from dgraph.ranks.sharding import FIRST_EXPERT, FIRST_ID, FIRST_KV_HEAD, GROUP, KINDS, Sharding
from dgraph.types.nodes import args_of, where

aten = torch.ops.aten

EXPERTS = ("split", "parallel")


@dataclass(frozen=True)
class ShardTensorParallel(Pass):
    """Divide a captured graph over ranks: each has some heads, some inner features of feed-forward networks, some ids.

    Projections of queries, keys and values, of gate and up are divided by their outputs. The projections of their
    results (o, down) are divided by inputs and give partial sums, which are summed over ranks. This is the scheme of
    Megatron-LM (Shoeybi et al., 2019, section 3). Where there are fewer KV heads than ranks, several ranks have the
    same one. A bias of a partial sum is the first rank's alone. Embedding and LM head are divided by ids, with zeros
    after the last one where ranks do not divide their number; the output `logits` is of all ids. Norms and routers are
    whole on every rank.

        before  %19 = linear(%18, self_attn.o_proj.weight)      f32[b, t, 32]
                %20 = add(%h, %19)                              f32[b, t, 32]
        after   %19 = linear(%18, self_attn.o_proj.weight)      f32[b, t, 32]
                %20 = dgraph.all_reduce(%19, 'tp')              f32[b, t, 32]
                %21 = add(%h, %20)                              f32[b, t, 32]

    The graph is the same on every rank; only tensors differ, `shard.first_id` and `shard.first_expert` i64[1] among
    them. It runs on a captured graph, before any other pass, so that all passes of a recipe see a model of fewer heads.
    `Graph.sharding` says over whom it is divided, `Graph.divided` what this rank has of each weight; heads and KV heads
    of `Graph.spec` are those of a rank, `Graph.whole` has those of the model.

    The role of each weight is declared by the view of the layers (`dgraph.ir.layers`), or else by hints. Nothing is
    guessed.

    Reassociates: a sum over inputs is a sum of sums, in the order of ranks. Over one rank it is exact.

    Attributes:
        world: number of ranks.
        group: the name of their group, see `dgraph.ranks.groups`.
        experts: "split": each rank has a part of every expert; "parallel": some experts.
        hints: pairs of a pattern of weights' names ("layers.*.mlp.fc1.weight") and one of
        `dgraph.ranks.sharding.KINDS`,
            which override the view. "column" is divided by outputs, "row" by inputs. The results of a "replicated"
            weight must be whole: for example all weights of a layer's attention, or none of them.
        rank: the rank whose tensors to keep; no part of the pass's configuration, as the graph does not depend on it.
        weights: source of the weights, if the graph's tensors only stand for them; no part of the configuration.

    Raises:
        InputError: sizes that ranks do not divide.
        PassError: a weight or a call that is not understood; the message says how to declare it.
    """

    world: int = 1
    group: str = GROUP
    experts: str = "split"
    hints: tuple[tuple[str, str], ...] = ()
    rank: int = field(default=0, repr=False, compare=False)
    weights: Source | None = field(default=None, repr=False, compare=False)

    effect: ClassVar[Effect] = Effect.REASSOCIATES
    papers: ClassVar[tuple[Paper, ...]] = OURS
    summary: ClassVar[str] = "divides heads, feed-forward networks, experts and ids over ranks (tensor parallelism)"
    changes_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "hints", tuple((str(pattern), kind) for pattern, kind in self.hints))
        if type(self.world) is not int or self.world < 1:
            raise InputError(f"world must be a number of ranks, at least 1, got {self.world!r}.")
        if not 0 <= self.rank < self.world:
            raise InputError(f"rank must be one of 0..{self.world - 1}, got {self.rank!r}.")
        if self.experts not in EXPERTS:
            raise InputError(f"experts must be one of {', '.join(map(repr, EXPERTS))}, got {self.experts!r}.")
        for _, kind in self.hints:
            if kind not in KINDS:
                raise UnknownName("kind of a weight", kind, KINDS)

    def identity(self) -> ShardTensorParallel:
        """Over one rank, in no group: a part of several runs only with the others."""
        return replace(self, world=1, group="", rank=0)

    def run(self, graph: Graph, report: Report) -> None:
        if graph.sharding is not None:
            raise PassError(f"the graph is divided over {graph.sharding.world} ranks already.")
        others = [step for step in graph.history if not step.startswith("QuantizeWeights(")]
        if others or not graph.find("attention"):
            report.skip("it is no graph as captured; divide it before any other pass", graph.output)
            return
        graph.sharding = Sharding(self.world, self.group)
        plan = Plan(graph, self.world, self.rank, self.experts, self.hints)
        whole = {node: node.meta["val"] for node in graph.nodes}
        graph.own[FIRST_ID] = self._first(graph, graph.spec.vocab)
        for node in [n for n in graph.calls if n.target is aten.embedding.default]:
            self._divide_embedding(graph, node, plan, report.name)
        for node in graph.find("experts"):
            self._divide_experts(graph, node, plan, report.name)
        divided = Divided(graph, plan.divisions, report.name)
        divided.run()
        logits = graph.result("logits")
        take_weights(graph, self.weights, plan.parts)
        graph.propagate()
        _check_types(graph, whole, divided)
        if logits in divided.of:
            self._gather_logits(graph, logits, divided, report.name)
        _localise_spec(graph, graph.sharding, self.rank, whole)
        for layer in layers_of(graph):
            q, k, _ = args_of(layer.attention)[:3]
            heads, kv = (f"{v.meta['val'].shape[1]} of {whole[v].shape[1]}" for v in (q, k))
            report.did(f"{heads} heads, {kv} KV heads a rank; {_kinds(graph, layer.index)}", layer.index)
        report.did(f"outside the layers: {_kinds(graph, None)}")

    def _first(self, graph: Graph, count: int) -> Tensor:
        """i64[1]: the first that a rank has of a number of things."""
        return torch.tensor([self.rank * -(-count // self.world)], device=graph.device)

    def _divide_embedding(self, graph: Graph, node: Node, plan: Plan, by: str) -> None:
        weight = args_of(node)[0]
        if plan.kind(weight) != "vocabulary":
            return
        args = (weight, args_of(node)[1], graph.own_number(FIRST_ID))
        part = graph.call(OPS["embedding_part"], args, before=node, by=by, like=node)
        graph.replace(node, part)

    def _divide_experts(self, graph: Graph, node: Node, plan: Plan, by: str) -> None:
        x, choice, *rest = args_of(node)
        down = rest[2]
        if plan.kind(down) != "experts" or self.experts != "parallel":
            return
        graph.own.setdefault(FIRST_EXPERT, self._first(graph, int(down.meta["val"].shape[0])))
        # The numbers of other ranks' experts fall outside of its own, and name no expert.
        local = graph.call(aten.sub.Tensor, (choice, graph.own_number(FIRST_EXPERT)), before=node, by=by, like=node)
        node.args = (x, local, *rest)

    def _gather_logits(self, graph: Graph, logits: Node, divided: Divided, by: str) -> None:
        found = divided.of[logits]
        if len(found.parts) != 1 or found.dim != logits.meta["val"].dim() - 1:
            raise divided.error(graph.output, logits, "expected logits of all ids, or divided by ids")
        every = graph.of_all_ranks(logits, by)
        vocab = sum(part[0] for part in found.parts)
        if every.meta["val"].shape[-1] != vocab:  # without the ids that fill the last part up
            every = graph.call(aten.slice.Tensor, (every, found.dim, 0, vocab), before=every.next, by=by, like=logits)
        graph.set_outputs({name: every if node is logits else node for name, node in graph.results().items()})


def _kinds(graph: Graph, layer: int | None) -> str:
    """Number of weights of a layer by kind of division, as text."""
    counts: dict[str, int] = {}
    scales = {part for node in graph.find("dequantise") if (of := stored_of(node)) for part in of.parts[1:]}
    for name, node in graph.weight_nodes().items():
        if name in graph.divided and node not in scales and all(user.meta["layer"] == layer for user in node.users):
            kind = graph.divided[name].kind
            counts[kind] = counts.get(kind, 0) + 1
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "every weight whole"


def _check_types(graph: Graph, whole: dict[Node, Any], divided: Divided) -> None:
    """Check that every value has its former type, but for the divided dimension: no constant was missed.

    Raises:
        PassError: another type.
    """
    for node in graph.calls:
        if node not in whole:
            continue
        found = divided.of.get(node)
        values = [(node.meta["val"], whole[node], found)]
        if isinstance(whole[node], (tuple, list)):
            kinds = found if isinstance(found, list) else [found] * len(whole[node])
            values = list(zip(node.meta["val"], whole[node], kinds, strict=True))
        for got, before, division in values:
            if not isinstance(before, Tensor):
                continue
            expected = list(before.shape)
            if isinstance(division, Division) and not division.is_partial:
                expected[division.dim] = division.own
            if list(got.shape) != expected:
                raise PassError(
                    f"{where(node)} is {graph.symbols.type_text(got)} on a rank, and was "
                    f"{graph.symbols.type_text(before)}; expected {division.text() if division else 'it whole'}. It "
                    f"has a constant that counts what is divided; keep that whole on every rank by hints."
                )


def _localise_spec(graph: Graph, sharding: Sharding, rank: int, whole: Mapping[Node, Any]) -> None:
    """Let the spec count the heads that a rank has, and store the whole model's spec and the first KV head.

    If layers differ in the whole model, it counts the heads of most layers.

    Raises:
        PassError: layers with equal numbers of heads of which a rank has different numbers.
    """
    heads_of = [args_of(layer.attention)[:2] for layer in layers_of(graph)]
    before = [tuple(int(whole[v].shape[1]) for v in pair) for pair in heads_of]
    counted = max(before, key=before.count)
    found = {
        tuple(int(v.meta["val"].shape[1]) for v in pair)
        for pair, were in zip(heads_of, before, strict=True)
        if were == counted
    }
    if len(found) > 1:
        raise PassError(
            f"ranks have {sorted(found)} heads and KV heads of layers; divide the attention of all or of none."
        )
    ((heads, kv_heads),) = found
    first = rank * graph.spec.kv_heads // sharding.world
    graph.own[FIRST_KV_HEAD] = torch.tensor([first], device=graph.device)
    graph.whole = graph.spec
    graph.spec = replace(graph.spec, heads=heads, kv_heads=kv_heads)

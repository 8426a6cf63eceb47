"""AdaptDrafts: where it fires, what rows read, and what it leaves alone bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import dgraph
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.compiler.phases import rewrite
from dgraph.errors import PassError
from dgraph.families.adapters import Adapter, LowRank
from dgraph.ir.graph import Graph
from dgraph.passes import AdaptDrafts, CacheKV, FuseProjections, PackRows, QuantizeWeights
from dgraph.testing import TinyModel, models, ranks
from tests.golden_files import check_golden
from tests.tiny import MASK, draw, interpret, ops_of, report_of, rewritten, rows_of

TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
SEQUENCES = [draw(6, 1), [*draw(3, 2), MASK, MASK]]
DRAFTED = torch.tensor([False] * 6 + [True] * 5)


def adapter_of(graph: Graph, targets: Sequence[str] = TARGETS, rank: int = 3, size: float = 0.3) -> Adapter:
    """Random products beside the weights of these layers."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * size

    chosen = {n: w for n, w in graph.tensors.items() if any(f"{target}.weight" in n for target in targets)}
    low_ranks = {n: LowRank(normal(rank, w.shape[1]), normal(w.shape[0], rank), 0.5) for n, w in chosen.items()}
    return Adapter("random", low_ranks)


@functools.cache
def tiny_with(targets: tuple[str, ...] = TARGETS) -> TinyModel:
    """Nemotron with such an adapter."""
    (plain,) = models(None, "nemotron")
    return TinyModel("nemotron", replace(plain.model, adapter=adapter_of(plain.graph, targets)))


def merged(graph: Graph) -> Graph:
    """The same graph, with weights to which the products are added."""
    assert graph.adapter is not None
    found = graph.copy()
    found.adapter = None
    for name, low in graph.adapter.weights.items():
        found.tensors[name] = graph.tensors[name] + low.scale * low.up @ low.down
    return found


def test_drafted_rows_read_the_sum_of_both_and_other_rows_every_bit_of_the_model_s_own() -> None:
    """Of projections that are fused, what lies in memory otherwise is summed otherwise."""
    rows = rows_of(SEQUENCES)
    for targets, others, exact in (
        (TARGETS, (), True),
        (TARGETS, (FuseProjections(),), False),
        (("o_proj",), (FuseProjections(),), True),
    ):
        graph = tiny_with(targets).graph
        adapted = rewritten(graph, PackRows(), AdaptDrafts(), *others)
        got = interpret(adapted, {**rows, "drafted": DRAFTED})["logits"]
        own = interpret(rewritten(graph, PackRows(), *others), rows)["logits"]
        sums = interpret(rewritten(merged(graph), PackRows(), *others), rows)["logits"]
        near = 0.0 if exact else 1e-4
        torch.testing.assert_close(got[~DRAFTED], own[~DRAFTED], atol=near, rtol=near)
        torch.testing.assert_close(got[DRAFTED], sums[DRAFTED], atol=1e-4, rtol=1e-4)
        assert (got[DRAFTED] - own[DRAFTED]).abs().max() > 0.1


def test_a_product_of_zeros_changes_no_bit() -> None:
    graph, rows = tiny_with().graph.copy(), rows_of(SEQUENCES)
    assert graph.adapter is not None
    zeros = {name: replace(low, up=torch.zeros_like(low.up)) for name, low in graph.adapter.weights.items()}
    graph.adapter = Adapter("zeros", zeros)
    got = interpret(rewritten(graph, PackRows(), AdaptDrafts()), {**rows, "drafted": DRAFTED})["logits"]
    assert torch.equal(got, interpret(rewritten(graph, PackRows()), rows)["logits"])


def test_it_fires_once_for_each_weight_in_steps_alone() -> None:
    tiny = tiny_with()
    report = report_of(rewritten(tiny.graph, PackRows()), AdaptDrafts())
    owners = ("self_attn.q", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.down")
    assert [(a.layer, a.what) for a in report.applied] == [
        (layer, f"{owner}_proj of rank 3 on drafted rows") for layer in range(4) for owner in owners
    ]
    phases = rewrite(tiny.graph, tiny.recipe("dense"))
    assert [name for name, phase in phases.items() if phase.graph.find("low_rank")] == ["step"]
    assert len(phases["step"].graph.find("low_rank")) == 4 * len(owners)
    assert "drafted" not in phases["prefill"].graph.inputs


def test_a_layer_in_the_dump() -> None:
    graph = rewritten(tiny_with().graph, PackRows(), AdaptDrafts(), FuseProjections(), CacheKV())
    check_golden("nemotron_adapted_step.txt", dgraph.dump(graph))


def test_the_model_s_weights_are_in_memory_once() -> None:
    tiny = tiny_with()
    own = {tensor.untyped_storage().data_ptr() for tensor in tiny.model.module.parameters()}
    graph = rewrite(tiny.graph, tiny.recipe("dense"))["step"].graph
    more = {name for name, t in graph.tensors.items() if t.untyped_storage().data_ptr() not in own}
    added = {name for name in more if "low_rank" in name}
    assert len(added) == 2 * 4 * len(TARGETS)
    assert {name.rpartition(".")[2] for name in more - added} <= {"inv_freq"}


def test_near_misses_and_refusals() -> None:
    graph = tiny_with().graph
    plain = models(None, "nemotron")[0].graph
    for chosen, reason in (
        (rewritten(plain, PackRows()), "the model has no adapter for drafts; load it with adapter="),
        (graph, "rows are not packed, so that none can be flagged; run PackRows first"),
    ):
        report = report_of(chosen, AdaptDrafts())
        assert report.applied == []
        assert [s.reason for s in report.skipped] == [reason]
    other = rewritten(graph, PackRows())
    assert other.adapter is not None
    low = next(iter(other.adapter.weights.values()))
    other.adapter = Adapter("theirs", {**other.adapter.weights, "model.layers.9.mlp.up_proj.weight": low})
    with pytest.raises(PassError, match=r"the adapter theirs is for 1 weights .* model\.layers\.9\.mlp\.up_proj"):
        rewritten(other, AdaptDrafts())
    with pytest.raises(PassError, match=r"AdaptDrafts"):
        rewritten(rewritten(plain, PackRows()), AdaptDrafts())


@pytest.mark.parametrize("step", [None, QuantizeWeights("int8"), QuantizeWeights("int4", (1, 8))], ids=str)
def test_ranks_add_their_parts(step: QuantizeWeights | None) -> None:
    """Also to weights of which two numbers lie in a byte."""
    tiny = tiny_with() if step is None else tiny_with().quantised(step)
    settings = {"input_ids": [[1, 2, 3], [5] * 13], "max_new_tokens": 16, "policy": "self_speculation"}

    def steps_of(made: CompiledModel) -> tuple[list[list[int]], list[int]]:
        result = made.generate(**settings)
        return result.token_ids, result.stats.sequence_steps

    whole = steps_of(tiny.optimized("dense"))
    assert ranks(2, lambda rank: steps_of(tiny.on_rank(rank, 2, "dense"))) == [whole] * 2


def test_what_comes_after_still_applies() -> None:
    """q, k and v are one product, as are gate and up, whatever is added to some of them."""
    graph = rewritten(tiny_with().graph, PackRows(), AdaptDrafts(), FuseProjections(), CacheKV())
    assert ops_of(graph, 0).count("linear") == 4
    assert ops_of(graph, 0).count("dgraph.low_rank") == len(TARGETS)

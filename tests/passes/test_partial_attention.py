"""PartialAttention: keys and values of salient rows, against the method in plain PyTorch, and its near misses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dgraph.errors import InputError, PassError
from dgraph.ir.graph import Graph
from dgraph.ir.verifier import VerifyError, verify
from dgraph.lowering.schedule import schedule
from dgraph.ops import OPS
from dgraph.passes import ChunkLMHead, EvictTokens, FuseProjections, GateFFN, PartialAttention
from dgraph.passes.base import Pass
from dgraph.text.writer import dump
from tests.golden_files import check_golden
from tests.oracle import dyllm
from tests.oracle.dyllm import Method
from tests.passes.sparse_step import (
    FAMILIES,
    LENGTHS,
    check_against_oracle,
    check_lossless,
    family_of,
    memory_of,
    own_table,
    run,
    step_of,
    three_steps,
)
from tests.tiny import Hand, ops_of, read_cache, report_of, rewritten

aten = torch.ops.aten

# -- where it fires ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_it_fires_once_per_layer(name: str, fused: bool) -> None:
    cached = family_of(name).cached
    if fused:
        cached = rewritten(cached, FuseProjections())
    layers = cached.spec.layers
    report = report_of(cached, PartialAttention())
    assert [a.layer for a in report.applied] == list(range(layers))
    assert report.skipped == []
    graph = rewritten(cached, PartialAttention())
    assert graph.find("paged_attention") == graph.find("kv_write") == graph.find("drift") == []
    for op in ("partial_attention", "kv_update", "compact"):
        assert [n.meta["layer"] for n in graph.find(op)] == list(range(layers)), op
    assert [n.meta["layer"] for n in graph.find("list_kept")] == [None, *range(layers - 1)]
    together = fused or name == "llada2"
    for layer in range(layers):
        assert len(graph.find("rows_linear", layer)) == (1 if together else 2)
        (write,) = graph.find("kv_update", layer)
        assert write.args[4] in graph.find("compact", layer)[0].users
    assert graph.outputs == (*cached.outputs, "salient")
    added = {f"c_cache_{layer}" for layer in range(layers)}
    assert set(graph.inputs) - set(cached.inputs) == {"full", "changed", *added, *own_table(cached.spec)}


@pytest.mark.parametrize("name", ["dream", "llada2"])
def test_a_fused_projection_is_taken_apart_without_a_copy(name: str) -> None:
    cached = rewritten(family_of(name).cached, FuseProjections())
    graph = rewritten(cached, PartialAttention())
    whole, parts = (
        {n: t for n, t in g.tensors.items() if "layers.1." in n and ("k_proj" in n or "query" in n or "q_proj" in n)}
        for g in (cached, graph)
    )
    assert [n.split(".", 3)[3] for n in sorted(parts) if "norm" not in n] == (
        [f"self_attn.{part}.{kind}" for part in ("k_proj+v_proj", "q_proj") for kind in ("bias", "weight")]
        if name == "dream"
        else ["attention.query_key_value[0:64].weight", "attention.query_key_value[64:128].weight"]
    )
    storages = [{t.untyped_storage().data_ptr() for t in tensors.values()} for tensors in (whole, parts)]
    assert storages[0] == storages[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_program_is_one_stage_over_one_row_set(name: str) -> None:
    graph = rewritten(family_of(name).cached, GateFFN(), PartialAttention(), ChunkLMHead())
    (stage,) = schedule(graph)
    assert (stage.rows, stage.cut) == ("N", None)
    assert {graph.row_set(n) for n in graph.calls} <= {"N", None}


# -- the method --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("tau", [0.7, (0.9, 0.2, 0.8)], ids=str)
@pytest.mark.parametrize("name", FAMILIES[:-1])
def test_it_is_the_method_in_plain_pytorch(name: str, tau: Any, padding: int) -> None:
    family = family_of(name)
    if isinstance(tau, tuple):
        tau = (tau * 2)[: family.config.layers]
    graph = rewritten(family.cached, PartialAttention(tau))
    counts = check_against_oracle(family, graph, Method(tau, gate=False), padding)
    assert 0 < counts[2] < counts[0]


@pytest.mark.parametrize("passes", [(GateFFN, PartialAttention), (PartialAttention, GateFFN)], ids=["gate", "partial"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", FAMILIES[:-1])
def test_both_passes_in_either_order(name: str, fused: bool, passes: tuple[Any, Any]) -> None:
    family = family_of(name)
    base: list[Pass] = [FuseProjections()] if fused else []
    graph = rewritten(family.cached, *base, *(cls(0.7) for cls in passes))
    check_against_oracle(family, graph, Method(0.7), padding=3)


@pytest.mark.parametrize("order", ["alone", "gate first", "gate last"])
@pytest.mark.parametrize("name", FAMILIES[:-1])
def test_all_rows_may_attend_to_keys_of_which_salient_rows_are_new(name: str, order: str) -> None:
    family = family_of(name)
    gate: list[Pass] = [GateFFN(0.7)] if order != "alone" else []
    partial = [PartialAttention(0.7, update=False)]
    passes = gate + partial if order == "gate first" else partial + gate
    graph = rewritten(family.cached, *passes)
    layers = list(range(graph.spec.layers))
    for op in ("paged_attention", "kv_write", "drift"):
        assert [n.meta["layer"] for n in graph.find(op)] == layers, op
    assert graph.find("partial_attention") == graph.find("kv_update") == []
    counts = check_against_oracle(family, graph, Method(0.7, gate=bool(gate), update=False), padding=5)
    assert 0 < counts[2] < counts[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_without_updates_and_with_tau_above_one_it_is_the_dense_program(name: str) -> None:
    cached = family_of(name).cached
    graph = rewritten(cached, PartialAttention(1.01, update=False))
    check_lossless(cached, graph, exactly=False, first=name != "llada2")


def test_update_is_a_switch() -> None:
    with pytest.raises(InputError, match="update must be True or False, got 1"):
        PartialAttention(update=1)  # type: ignore[arg-type]


def test_the_order_of_the_passes_does_not_matter() -> None:
    gate, partial, cached = GateFFN(), PartialAttention(), family_of("dream").cached
    one, other = rewritten(cached, gate, partial), rewritten(cached, partial, gate)
    assert sorted(ops_of(one)) == sorted(ops_of(other))
    assert one.tensors.keys() == other.tensors.keys()
    assert one.outputs == other.outputs
    assert set(one.inputs) == set(other.inputs)


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_with_tau_above_one_it_is_the_dense_program(name: str, gate: bool) -> None:
    cached = family_of(name).cached
    graph = rewritten(cached, PartialAttention(1.01), *([GateFFN(1.01)] if gate else []))
    check_lossless(cached, graph, exactly=False, first=name != "llada2")


@pytest.mark.parametrize("name", FAMILIES)
def test_with_tau_below_minus_one_only_decoded_rows_are_projected(name: str) -> None:
    graph = rewritten(family_of(name).cached, PartialAttention(-1.01), GateFFN(-1.01))
    memory, steps = memory_of(graph.spec, LENGTHS), three_steps(graph.spec)
    run(graph, steps[:1], memory)
    before = read_cache(memory, "k_cache_1", 2, LENGTHS[2])
    for (out, rows), inputs in zip(run(graph, steps[1:], memory), steps[1:], strict=True):
        assert out["salient"].tolist() == [0] * graph.spec.layers
        assert torch.equal(rows.projected[0], inputs["changed"])
        assert out["logits"].isfinite().all()
    assert torch.equal(read_cache(memory, "k_cache_1", 2, LENGTHS[2]), before)


@pytest.mark.parametrize("name", ["llada", "sdar"])
def test_a_full_step_of_one_sequence_beside_a_sparse_one_of_another(name: str) -> None:
    """A batch gives what each sequence gives alone, whichever of them takes a full step."""
    graph = rewritten(family_of(name).cached, PartialAttention(0.7), GateFFN(0.7))
    first, second = list(range(7, 16)), list(range(30, 37))
    together = memory_of(graph.spec, (9, 7))
    alone = [memory_of(graph.spec, (n,)) for n in (9, 7)]
    everything, nothing = [True, True], [False, False]
    for full, changed in ((everything, [[], []]), ([False, True], [[2], [3]]), (nothing, [[5, 6], []])):
        for sequence, where in zip((first, second), changed, strict=True):
            for position in where:
                sequence[position] += 40
        both = step_of([first, second], [0, 0], (9, 7), changed, full)
        ((out, _),) = run(graph, [both], together)
        logits = []
        for i, tokens in enumerate((first, second)):
            one = step_of([tokens], [0], (len(tokens),), changed[i : i + 1], full[i : i + 1])
            ((mine, _),) = run(graph, [one], alone[i])
            logits.append(mine["logits"])
        torch.testing.assert_close(out["logits"], torch.cat(logits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llada", "dream"])
def test_rows_of_the_response_alone_see_the_prompts_keys(name: str) -> None:
    """A step of the last rows only, with one decoded, is that step of the method."""
    family = family_of(name)
    graph = rewritten(family.cached, FuseProjections(), GateFFN(0.7), PartialAttention(0.7))
    memory, mine = memory_of(graph.spec, (11,)), dyllm.Memory(family.config, 11)
    tokens = list(range(7, 18))
    for t, start in enumerate((0, 4, 4, 0)):
        changed = [] if t == 0 else [3 + 2 * t]
        for position in changed:
            tokens[position] += 40
        inputs = step_of([tokens[start:]], [start], (11,), [changed], [t == 0])
        ((out, rows),) = run(graph, [inputs], memory)
        with torch.no_grad():
            logits, layers = dyllm.forward(
                family.weights, family.config, tokens[start:], range(start, 11), 11, mine, Method(0.7), changed, t == 0
            )
        torch.testing.assert_close(out["logits"], logits, rtol=1e-4, atol=1e-4)
        assert [(f.nonzero()[:, 0] + start).tolist() for f in rows.salient] == [layer.salient for layer in layers]


def test_a_value_that_changes_alone_makes_the_update_exact() -> None:
    """Layer 0, where a query does not depend on other rows: if keys stay, the updated context is the exact one."""
    family = family_of("llada")
    cached = family.cached.copy()
    name = "model.layers.0.self_attn.k_proj.weight"
    cached.tensors = {**cached.tensors, name: torch.zeros_like(cached.tensors[name])}
    graph = rewritten(cached, PartialAttention(0.9999))
    memory, exact = (memory_of(graph.spec, LENGTHS) for _ in range(2))
    steps = three_steps(graph.spec)
    run(graph, steps, memory)
    run(graph, three_steps(graph.spec, full=(True, True, True)), exact)
    for s, n in enumerate(LENGTHS):
        got, wanted = (read_cache(m, "c_cache_0", s, n) for m in (memory, exact))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


# -- with other passes -------------------------------------------------------------------------------------------


def test_after_it_only_projections_on_all_rows_are_fused() -> None:
    family = family_of("llada")
    graph = rewritten(family.cached, PartialAttention(0.7))
    assert [a.what for a in report_of(graph, FuseProjections()).applied] == ["gate_proj+up_proj"] * 3
    check_against_oracle(family, rewritten(graph, FuseProjections()), Method(0.7, gate=False))
    with pytest.raises(PassError, match="applied nowhere"):
        rewritten(graph, GateFFN(0.7), FuseProjections())


def test_both_passes_have_one_tau() -> None:
    cached = family_of("sdar").cached
    for passes in ((GateFFN(0.9), PartialAttention(0.95)), (PartialAttention(0.95), GateFFN(0.9))):
        with pytest.raises(
            InputError, match=r"tau is 0.9\d? in layer 0, but dgraph\.\w+ finds its salient rows with 0.9"
        ):
            rewritten(cached, *passes)


# -- near misses and errors --------------------------------------------------------------------------------------


def test_without_a_cache_there_is_nothing_to_update() -> None:
    report = report_of(family_of("sdar").packed, PartialAttention())
    assert {s.reason for s in report.skipped} == {
        "this attention reads no cache, so there is nothing to update; run CacheKV first"
    }


def test_around_an_eviction_layers_are_left_alone() -> None:
    report = report_of(
        rewritten(family_of("sdar").cached, EvictTokens(after=2, signal="importance")), PartialAttention()
    )
    assert [a.layer for a in report.applied] == [0, 1]
    assert [(s.layer, s.reason) for s in report.skipped] == [
        (2, "rows are evicted between the layer's keys and its attention, whose contexts would miss an update"),
        (3, "nothing finds the salient rows of layer 2"),
    ]
    gated = rewritten(family_of("sdar").cached, EvictTokens(after=2, signal="importance"), GateFFN())
    assert [a.layer for a in report_of(gated, PartialAttention()).applied] == [0, 1, 3]
    drawn = rewritten(family_of("sdar").cached, EvictTokens(after=2, select="random"), GateFFN())
    assert [a.layer for a in report_of(drawn, PartialAttention(update=False)).applied] == [0, 1, 2, 3]


def test_keys_that_something_else_reads_are_left_alone() -> None:
    report = report_of(rewritten(family_of("sdar").cached, EvictTokens(after=1)), PartialAttention())
    assert report.applied == []
    assert report.skipped[0].layer == 0
    assert report.skipped[0].reason.startswith("dgraph.importance also reads rope")


def hand_written(order: str, *, write: bool = True, split: bool = True) -> Graph:
    """A layer whose projection gives queries, keys and values in this order, split at once or by slices."""
    hand = Hand(layers=1)
    x = hand.input("x", "N", 16)
    positions, limit = hand.input("positions", "N", dtype=torch.int64), hand.input("limit", "N", dtype=torch.int32)
    cu_rows, table = (
        hand.input("cu_rows", "b+1", dtype=torch.int32),
        hand.input("page_table", "b", "P", dtype=torch.int32),
    )
    caches = [hand.input(f"{kind}_cache_0", "pages", "page", 4, 4) for kind in "kv"]
    hand.layer = 0
    whole = hand.call(aten.linear.default, x, hand.weight("layers.0.all.weight", 48, 16))
    if split:
        parts = hand.graph.parts(hand.call(aten.split_with_sizes.default, whole, [16, 16, 16], 1), 3, "")
    else:
        parts = tuple(hand.call(aten.slice.Tensor, whole, 1, 16 * i, 16 * i + 16) for i in range(3))
    by = {kind: hand.call(aten.reshape.default, part, [-1, 4, 4]) for kind, part in zip(order, parts, strict=True)}
    if write:
        hand.call(OPS["kv_write"].overload, by["k"], by["v"], *caches, positions, table, cu_rows)
    out = hand.call(OPS["paged_attention"].overload, by["q"], *caches, table, cu_rows, limit, 0.5)
    hand.layer = None
    return hand.returns(z=out)


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (
            hand_written("qkv", split=False),
            "queries, keys and values share linear_default, which is not split into them at once",
        ),
        (hand_written("qkv", write=False), "0 writes of keys and values in the layer of this attention; expected one"),
    ],
)
def test_near_misses(graph: Graph, reason: str) -> None:
    report = report_of(graph, PartialAttention())
    assert report.applied == []
    assert report.skipped[0].reason.startswith(reason)
    with pytest.raises(PassError, match="applied nowhere"):
        rewritten(graph, PartialAttention())


@pytest.mark.parametrize("order", ["qkv", "kvq", "vqk", "kqv"])
def test_a_projection_in_any_order_is_taken_apart(order: str) -> None:
    """Neighbouring parts that the same calls read stay one product."""
    graph = rewritten(hand_written(order), PartialAttention())
    cuts = {"qkv": ["0:16", "16:48"], "kvq": ["0:32", "32:48"], "vqk": ["0:16", "16:32", "32:48"]}
    cuts["kqv"] = cuts["vqk"]
    assert sorted(name for name in graph.tensors) == [f"layers.0.all[{cut}].weight" for cut in cuts[order]]


def test_a_plain_layer_is_updated() -> None:
    graph = rewritten(hand_written("qvk"), PartialAttention())
    assert [n.args[1].meta["weight"] for n in graph.find("rows_linear")] == ["layers.0.all[16:48].weight"]  # type: ignore[union-attr]


def test_keys_are_read_after_their_update() -> None:
    graph = rewritten(family_of("sdar").cached, PartialAttention())
    (read,) = graph.find("partial_attention", 1)
    early = graph.call(
        OPS["paged_attention"],
        (read.args[0], *read.args[1:3], *read.args[9:13]),
        before=graph.find("compact", 1)[0],
        by="",
    )
    early.meta["layer"] = 1
    with pytest.raises(VerifyError, match="before its write"):
        verify(graph)


def test_the_dump_of_a_step() -> None:
    passes = (FuseProjections(), GateFFN(), PartialAttention(), ChunkLMHead())
    check_golden("qwen3_dyllm_step.txt", dump(rewritten(family_of("sdar").cached, *passes)))

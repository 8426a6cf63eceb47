"""Rows of a layer: run on some, what their attention pays to keys, and how many they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from dgraph.errors import VerifyError
from dgraph.ir.graph import Graph
from dgraph.ir.row_counts import counted_rows
from dgraph.passes import Effect, GateFFN, Pass, Report
from dgraph.types.nodes import args_of
from dgraph.types.shapes import InputSpec
from tests.passes.sparse_step import LENGTHS, TOKENS, family_of, memory_of, step_of
from tests.tiny import caches_of, interpret, rewritten

CHOSEN = InputSpec("changed", torch.bool, ("N",))
FULL = InputSpec("full", torch.bool, ("N",))


@dataclass(frozen=True)
class Chosen(Pass):
    """Run each layer on the rows of the inputs `changed` and `full`."""

    network: bool = False

    effect: ClassVar[Effect] = Effect.APPROXIMATE
    signature: ClassVar[frozenset[str]] = frozenset(
        {"changed", "full", "salient", "a_cache_*", "f_cache_*", "page_table_1"}
    )

    def run(self, graph: Graph, report: Report) -> None:
        flags = []
        for attention in graph.find("paged_attention"):
            part = graph.row_network(attention) if self.network else graph.row_layer(attention)
            assert not isinstance(part, str), part
            chosen, full = (graph.add_input(spec) for spec in (CHOSEN, FULL))
            (at,) = graph.find("kv_write", attention.meta["layer"])
            flag = graph.call(torch.ops.aten.logical_or.default, (chosen, full), before=at, by=report.name)
            graph.run_rows(part, flag, by=report.name)
            flags.append(flag)
            report.did("on the chosen rows", attention.meta["layer"])
        graph.count_rows(flags, by=report.name)
        graph.sweep()


@pytest.mark.parametrize("network", [False, True], ids=["layer", "network"])
@pytest.mark.parametrize("family", ["llada", "sdar", "llada2"])
def test_where_all_rows_run_it_is_the_dense_program_and_else_rows_are_counted(family: str, network: bool) -> None:
    want = family_of(family).cached
    graph, spec = rewritten(want, Chosen(network)), want.spec
    memory, caches = memory_of(spec, LENGTHS), caches_of(spec, LENGTHS)
    memory |= {name.replace("f_", "a_"): value.clone() for name, value in memory.items() if name.startswith("f_")}
    changed = [[1, 4], [], [12]]
    full = step_of(TOKENS, [0] * 3, LENGTHS, changed, [True] * 3)
    few = step_of(TOKENS, [0] * 3, LENGTHS, changed, [False] * 3, padding=2)
    for name in ("changed", "full"):  # as the loop gives them
        few[name][sum(LENGTHS) :] = False
    got, dense = interpret(graph, full | memory), interpret(want, full | caches)
    torch.testing.assert_close(got["logits"], dense["logits"], rtol=0, atol=0)
    assert got["salient"].tolist() == [sum(LENGTHS)] * spec.layers
    again = interpret(graph, few | memory)
    assert again["salient"].tolist() == [3] * spec.layers
    torch.testing.assert_close(again["logits"][: sum(LENGTHS)], dense["logits"], rtol=1e-5, atol=1e-5)


def test_flags_of_other_rows_are_refused() -> None:
    graph = family_of("llada").cached.copy()
    layer = graph.row_layer(graph.find("paged_attention")[1])
    assert not isinstance(layer, str)
    with pytest.raises(VerifyError, match=r"cu_rows is i32\[b\+1\], but the rows of .* expected one flag for each row"):
        graph.run_rows(layer, graph.input("cu_rows"), by="test")
    with pytest.raises(VerifyError, match=r"changed is bool\[N\] of layer None; expected flags of the rows"):
        graph.count_rows([graph.add_input(CHOSEN)], by="test")
    graph = rewritten(family_of("llada").cached, GateFFN())
    assert graph.row_layer(graph.find("paged_attention")[1]) == "the layer is gated already"


def attention_by_hand(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """[N, Hkv, N] of one sequence whose rows see all: the mean over each group's heads."""
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    weights = (torch.einsum("rhd,khd->rhk", q, keys) * scale).softmax(-1)
    return weights.unflatten(1, (k.shape[1], -1)).mean(2)


@pytest.mark.parametrize("heads", [False, True])
def test_mass_of_keys_and_the_key_that_gets_most(heads: bool) -> None:
    graph = family_of("llada").cached.copy()
    attention = graph.find("paged_attention")[1]
    q, k = args_of(attention)[0], args_of(graph.find("kv_write", 1)[0])[0]
    scale = args_of(attention)[6]
    flags, full = graph.add_input(CHOSEN), graph.add_input(FULL)
    mass = graph.key_mass(attention, flags, by="test", heads=heads)
    results = {"mass": mass, "q": q, "k": k}
    if not heads:
        results["top"] = graph.most_attended(mass, full, by="test")
    graph.set_outputs(results)
    graph.sweep()
    inputs = step_of(TOKENS, [0] * 3, LENGTHS, [[1, 4], [], [12]], [False] * 3)
    inputs["full"] = torch.arange(sum(LENGTHS)) % 2 == 1
    got = interpret(graph, inputs | caches_of(graph.spec, LENGTHS))
    begin = 0
    for count in LENGTHS:
        rows = slice(begin, begin + count)
        pays = attention_by_hand(got["q"][rows], got["k"][rows], scale)
        want = pays[inputs["changed"][rows]].sum(0)
        torch.testing.assert_close(got["mass"][rows], (want.T if heads else want.mean(0)), rtol=1e-5, atol=1e-6)
        if not heads:
            best = want.mean(0).masked_fill(~inputs["full"][rows], -1).argmax()
            assert got["top"][rows].nonzero()[:, 0].tolist() == [int(best)]
        begin += count


def test_mass_needs_a_cache() -> None:
    graph = family_of("llada").packed.copy()
    attention = graph.find("packed_attention")[0]
    with pytest.raises(VerifyError, match="reads no cache of keys; expected a paged_attention, after CacheKV"):
        graph.key_mass(attention, graph.add_input(CHOSEN), by="test")


def test_a_layer_counts_once_and_an_output_of_another_make_is_refused() -> None:
    graph = rewritten(family_of("llada").cached, GateFFN())
    first = counted_rows(graph)
    assert list(first) == list(range(graph.spec.layers))
    flag = first[1]
    same = graph.call(torch.ops.aten.logical_not.default, (flag,), before=flag.next, by="test")
    graph.count_rows([same], by="test")
    assert counted_rows(graph) == {**first, 1: same}
    assert len(graph.find("stack")) == 1
    total = graph.result("salient")
    graph.set_outputs(
        {**graph.results(), "salient": graph.call(torch.ops.aten.neg.default, (total,), before=graph.output, by="test")}
    )
    with pytest.raises(VerifyError, match=r"nothing says which layers it counts\. Make it by graph\.count_rows"):
        counted_rows(graph)
    assert counted_rows(family_of("llada").cached) == {}


def test_rows_that_are_cut_later_were_run_and_count() -> None:
    graph = rewritten(family_of("llada").cached, Chosen())
    first = next(node for node in graph.calls if node.meta["layer"] == 2)
    graph.keep_rows(graph.add_input(InputSpec("candidate", torch.bool, ("N",))), before=first, by="test")
    inputs = step_of(TOKENS, [0] * 3, LENGTHS, [[1, 4], [], [12]], [False] * 3)
    inputs["candidate"] = inputs["positions"] % 2 == 0
    memory = memory_of(graph.spec, LENGTHS)
    memory |= {name.replace("f_", "a_"): value.clone() for name, value in memory.items() if name.startswith("f_")}
    got = interpret(graph, inputs | {name: value.nan_to_num() for name, value in memory.items()})
    assert got["salient"].tolist() == [3, 3, 2]
    assert len(got["logits"]) == int(inputs["candidate"].sum())

"""ReuseRows: layers on the rows whose values have changed, against the method in plain PyTorch, and its near misses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dgraph.errors import InputError, PassError
from dgraph.ir.graph import Graph
from dgraph.lowering.schedule import schedule
from dgraph.ops import OPS
from dgraph.passes import PASSES, ChunkLMHead, EvictTokens, FuseProjections, GateFFN, PartialAttention, ReuseRows
from dgraph.passes.base import Pass, pass_from_json
from dgraph.text.writer import dump
from tests.golden_files import check_golden
from tests.oracle import dllm_cache
from tests.passes.sparse_step import FAMILIES, LENGTHS, family_of, memory_of, own_table, three_steps
from tests.tiny import interpret, ops_of, read_cache, report_of, rewritten


def caches_of(graph: Graph) -> dict[str, Tensor]:
    """Empty caches of all kinds; what is kept of rows has the pages of keys."""
    memory = memory_of(graph.spec, LENGTHS)
    memory = {name: cache for name, cache in memory.items() if name not in own_table(graph.spec)}
    features = {f"a{name[1:]}": cache.clone() for name, cache in memory.items() if name.startswith("f_cache")}
    return {**memory, **features}


def logits_of(graph: Graph, steps: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    memory = caches_of(graph)
    return [interpret(graph, {**inputs, **memory}) for inputs in steps]


# -- where it fires ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_it_fires_once_per_layer_but_the_first(name: str, fused: bool) -> None:
    cached = family_of(name).cached
    if fused:
        cached = rewritten(cached, FuseProjections())
    layers = cached.spec.layers
    report = report_of(cached, ReuseRows())
    assert [a.layer for a in report.applied] == list(range(1, layers))
    assert report.skipped == []
    graph = rewritten(cached, ReuseRows())
    for op, count in (("least_similar", 1), ("list_kept", 1), ("compact", 2), ("feature_merge", 2)):
        assert [n.meta["layer"] for n in graph.find(op)] == [i for i in range(1, layers) for _ in range(count)], op
    assert len(graph.find("kv_write")) == len(graph.find("paged_attention")) == layers
    assert ops_of(graph, 0) == ops_of(cached, 0)
    assert graph.type_text(graph.result("salient")) == f"i32[{layers - 1}]"
    added = {f"{kind}_cache_{layer}" for kind in "af" for layer in range(1, layers)}
    assert set(graph.inputs) - set(cached.inputs) == {"full", *added}
    assert graph.inputs["a_cache_1"].shape == ("pages", "page", graph.spec.hidden)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_program_is_one_stage_over_one_row_set(name: str) -> None:
    graph = rewritten(family_of(name).cached, ReuseRows())
    (stage,) = schedule(graph)
    assert (stage.rows, stage.cut) == ("N", None)
    assert {graph.row_set(n) for n in graph.calls} <= {"N", None}


# -- the method --------------------------------------------------------------------------------------------------


def check(name: str, reuse: ReuseRows, steps: list[dict[str, Tensor]]) -> None:
    """Logits, rows and all caches of the steps are the method's."""
    family = family_of(name)
    graph = rewritten(family.cached, FuseProjections(), reuse)
    memory, layers, flags = caches_of(graph), graph.spec.layers, list[Tensor]()

    def least_similar(*args: Any) -> Tensor:
        flags.append(OPS["least_similar"].reference(*args))
        return flags[-1]

    found = [interpret(graph, {**inputs, **memory}, {"least_similar": least_similar}) for inputs in steps]
    first = 0
    for s, n in enumerate(LENGTHS):
        mine, rows = dllm_cache.Memory(family.config, n), slice(first, first + n)
        for t, (inputs, out) in enumerate(zip(steps, found, strict=True)):
            tokens, full = inputs["input_ids"][rows].tolist(), inputs["full"][rows].tolist()
            adapt = inputs["adapt"][rows].tolist() if reuse.idle else None
            with torch.no_grad():
                logits, computed = dllm_cache.forward(
                    family.weights, family.config, tokens, range(n), n, mine, reuse.share, full, family.feed_forward,
                    adapt,
                )  # fmt: skip
            torch.testing.assert_close(out["logits"][rows], logits, rtol=1e-4, atol=1e-4)
            places = flags[t * (layers - 1) : (t + 1) * (layers - 1)]
            assert [f[rows].nonzero()[:, 0].tolist() for f in places] == computed[1:]
            assert out["salient"].tolist() == [int(f.sum()) for f in places]
        for kind, values in (("k", mine.k), ("v", mine.v), ("a", mine.a), ("f", mine.f)):
            for layer in range(kind in "af", layers):
                got = read_cache(memory, f"{kind}_cache_{layer}", s, n)
                torch.testing.assert_close(got, values[layer], rtol=1e-4, atol=1e-4)
        first += n


def mixed_steps(name: str, padding: int) -> list[dict[str, Tensor]]:
    """Three steps; in the last one some rows of an updated sequence are full."""
    steps = three_steps(family_of(name).cached.spec, padding)
    steps[2]["full"][:4] = True
    steps[2]["input_ids"][LENGTHS[0] + 1] = 31  # where no value turns at all, rounding would rank the rows
    return steps


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("share", [0, 0.3, 1])
@pytest.mark.parametrize("name", FAMILIES[:-1])
def test_it_is_the_method_in_plain_pytorch(name: str, share: float, padding: int) -> None:
    check(name, ReuseRows(share), mixed_steps(name, padding))


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("share", [0, 0.3, 1])
@pytest.mark.parametrize("name", FAMILIES[:-1])
def test_rows_that_do_not_adapt_keep_what_they_have(name: str, share: float, padding: int) -> None:
    """In the second step a whole sequence and rows of another are idle, in the third all rows that are not full."""
    steps = mixed_steps(name, padding)
    for step in steps:
        step["adapt"] = torch.ones_like(step["full"])
    steps[1]["adapt"][LENGTHS[0] + 2 : sum(LENGTHS)] = False
    steps[2]["adapt"][: sum(LENGTHS)] = False
    check(name, ReuseRows(share, idle=True), steps)


def test_if_all_rows_adapt_none_is_idle() -> None:
    cached = family_of("llada").cached
    plain, idle = (rewritten(cached, ReuseRows(0.3, idle)) for idle in (False, True))
    assert set(idle.inputs) - set(plain.inputs) == {"adapt"}
    assert ops_of(plain) == ops_of(idle)
    steps = three_steps(cached.spec)
    adapting = [{**step, "adapt": torch.ones_like(step["full"])} for step in steps]
    for got, wanted in zip(logits_of(idle, adapting), logits_of(plain, steps), strict=True):
        assert torch.equal(got["logits"], wanted["logits"])


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_without_a_page_take_what_they_compute(name: str) -> None:
    """A full step in which the first page of each sequence is missing; keys are read from the rows themselves."""
    cached = family_of(name).cached
    graph, held = rewritten(cached, ReuseRows(0)), list[Any]()
    (step, *_) = three_steps(cached.spec, padding=2)
    memory = caches_of(graph)
    whole = {key: value.clone() for key, value in memory.items()}
    wanted = interpret(graph, {**step, **whole})

    def write(*args: Any) -> None:
        held[:] = args
        OPS["kv_write"].reference(*args)

    def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, *rest: Any) -> Tensor:
        k, v, _, _, positions, *_ = held
        cu_rows, limit, scale = rest
        return OPS["packed_attention"].reference(q, k, v, positions, cu_rows, limit, scale)

    gone = memory["page_table"][:, 0].clone()
    memory["page_table"][:, 0] = -1
    got = interpret(graph, {**step, **memory}, {"kv_write": write, "paged_attention": attend})
    live = sum(LENGTHS)
    torch.testing.assert_close(got["logits"][:live], wanted["logits"][:live], rtol=1e-4, atol=1e-4)
    for key in memory.keys() - {"page_table"}:
        assert memory[key][gone.long()].isnan().all(), key
        whole[key][gone.long()] = torch.nan
        torch.testing.assert_close(memory[key], whole[key], rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_with_a_share_of_one_it_is_the_dense_program(name: str) -> None:
    """Bit for bit; after padding rows, or where a fused projection is taken apart, to 1e-5 of the largest logit."""
    cached = family_of(name).cached
    steps, padded = three_steps(cached.spec), three_steps(cached.spec, 5)
    dense = logits_of(cached, steps)
    for fused in (False, True):
        passes: list[Pass] = [FuseProjections()] if fused else []
        graph = rewritten(cached, *passes, ReuseRows(1))
        for inputs in (steps, padded):
            for out, want in zip(logits_of(graph, inputs), dense, strict=True):
                got, wanted = out["logits"][: sum(LENGTHS)], want["logits"]
                assert out["salient"].tolist() == [sum(LENGTHS)] * (graph.spec.layers - 1)
                if inputs is steps and not fused and name != "llada2":  # its projection is one of all three
                    assert torch.equal(got, wanted)
                torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


def test_in_full_steps_it_is_the_dense_program() -> None:
    cached = family_of("dream").cached
    steps = three_steps(cached.spec, full=(True, True, True))
    both = zip(logits_of(rewritten(cached, ReuseRows(0)), steps), logits_of(cached, steps), strict=True)
    assert all(torch.equal(got["logits"], wanted["logits"]) for got, wanted in both)


# -- near misses and errors --------------------------------------------------------------------------------------


def reasons(graph: Graph, step: Pass) -> set[str]:
    return {s.reason for s in report_of(graph, step).skipped}


def test_without_a_cache_there_is_nothing_to_compare_with() -> None:
    packed = family_of("sdar").packed
    assert reasons(packed, ReuseRows()) == {
        "this attention reads no cache, so there is nothing to compare values with; run CacheKV"
    }
    with pytest.raises(PassError, match="applied nowhere"):
        rewritten(packed, ReuseRows())


def test_a_layer_has_its_rows_found_once() -> None:
    cached = family_of("sdar").cached
    assert reasons(rewritten(cached, ReuseRows()), ReuseRows()) == {"the layer is gated already"}
    assert reasons(rewritten(cached, GateFFN()), ReuseRows()) == {"the layer is gated already"}
    assert reasons(rewritten(cached, PartialAttention()), ReuseRows()) == {
        "this attention is updated by salient rows already"
    }
    assert reasons(rewritten(cached, ReuseRows()), PartialAttention()) == {
        "the layer runs on the rows whose values have changed already"
    }
    assert reasons(rewritten(cached, ReuseRows()), GateFFN()) == {"the layer is gated already"}


def test_a_layer_that_evicts_is_left_alone() -> None:
    report = report_of(rewritten(family_of("sdar").cached, EvictTokens(after=2, signal="importance")), ReuseRows())
    assert [s.layer for s in report.skipped] == [2]
    assert [a.layer for a in report.applied] == [1, 3]


@pytest.mark.parametrize("share", [-0.1, 1.01, float("nan"), "half", None, True])
def test_shares_out_of_range(share: Any) -> None:
    with pytest.raises(InputError, match=r"share must be a number from 0 \(reuse all rows\) to 1"):
        ReuseRows(share)


@pytest.mark.parametrize("idle", [1, None, "yes"])
def test_idle_is_a_switch(idle: Any) -> None:
    with pytest.raises(InputError, match="idle must be True or False, got"):
        ReuseRows(0.25, idle)


def test_it_reads_back_from_json() -> None:
    for reuse in (ReuseRows(0.5), ReuseRows(0.5, idle=True)):
        assert pass_from_json(reuse.to_json(), PASSES) == reuse


def test_the_dump_of_a_step() -> None:
    passes = (FuseProjections(), ReuseRows(), ChunkLMHead())
    check_golden("qwen3_reused_step.txt", dump(rewritten(family_of("sdar").cached, *passes)))


def test_the_dump_of_a_step_with_idle_rows() -> None:
    passes = (FuseProjections(), ReuseRows(idle=True), ChunkLMHead())
    check_golden("qwen3_idle_step.txt", dump(rewritten(family_of("sdar").cached, *passes)))

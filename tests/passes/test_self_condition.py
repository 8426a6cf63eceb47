"""SelfCondition and EncodeRows: numbers, where they fire, why they skip, and how their programs read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import dgraph
from dgraph.errors import PassError, VerifyError
from dgraph.families.quantised import Format
from dgraph.ir.graph import Graph
from dgraph.ir.stored_weights import quantised_as
from dgraph.ir.verifier import verify
from dgraph.ops.lm_head.lm_head import gumbel
from dgraph.passes import CacheKV, EncodeRows, FuseProjections, OnlyKV, PackRows, SelfCondition
from tests.golden_files import check_golden
from tests.models.gemma import CANVAS, HIDDEN, caches_of, draw, optimized, rows_of, run
from tests.tiny import Hand, interpret, ops_of, report_of, rewritten

CACHED = (PackRows(), FuseProjections(), CacheKV())


@pytest.fixture(scope="module")
def captured() -> Graph:
    return optimized(4.0, 0.3).captured


@pytest.fixture(scope="module")
def cached(captured: Graph) -> Graph:
    return rewritten(captured, *CACHED)


def test_a_step_gives_what_its_logits_say_and_the_next_one_reads_it(cached: Graph) -> None:
    """Two steps of a canvas, with the mean embedding handed over by hand and through the cache."""
    program = rewritten(cached, SelfCondition())
    prompt, canvas = draw(5, 1), draw(CANVAS, 2)
    plain, own = caches_of(cached, [len(prompt) + CANVAS]), caches_of(program, [len(prompt) + CANVAS])
    own["soft_cache"].zero_()
    heat = {"temperature": torch.full((len(prompt),), 0.5), "seed": torch.arange(len(prompt))}
    run(cached, rows_of([prompt], [0], [True]), plain)
    interpret(program, {**rows_of([prompt], [0], [True]), **own, **heat})
    own["soft_cache"].zero_()
    rows, soft = rows_of([canvas], [len(prompt)], [False]), torch.zeros(CANVAS, HIDDEN)
    (embedding,) = (t for name, t in cached.tensors.items() if name.endswith("embed_tokens.weight"))
    for step in range(2):
        temperature, seed = torch.full((CANVAS,), 0.6 + 0.2 * step), torch.arange(CANVAS) * 7 + step
        p = (run(cached, rows, plain, soft) / temperature[:, None]).softmax(-1)
        found = interpret(program, {**rows, **own, "temperature": temperature, "seed": seed})
        assert torch.equal(found["token"], p.argmax(-1))
        torch.testing.assert_close(found["confidence"], p.amax(-1))
        torch.testing.assert_close(found["entropy"], torch.special.entr(p).sum(-1), atol=1e-5, rtol=1e-4)
        assert torch.equal(found["draw"], (p.log() + gumbel(seed, p.shape[1])).argmax(-1))
        soft = p @ embedding


def test_where_they_fire(cached: Graph, captured: Graph) -> None:
    report = report_of(cached, SelfCondition())
    assert [(found.layer, found.what[:7]) for found in report.applied] == [(None, "LM head")]
    report = report_of(cached, EncodeRows())
    assert [found.layer for found in report.applied] == [None, 0, 1, 2, 3]
    step, prefill = (rewritten(cached, *passes) for passes in ((SelfCondition(),), (EncodeRows(), OnlyKV())))
    assert ops_of(step, None).count("dgraph.vocabulary_attention") == 1
    assert "where" not in ops_of(prefill)
    assert {"encoded", "soft", "soft_cache"}.isdisjoint(prefill.inputs)
    assert {"encoded", "soft_cache", "origin"} <= set(step.inputs)
    assert (step.inputs["soft_cache"].window, step.inputs["soft_cache"].reset) == (1, "block")
    assert not any("self_conditioning" in name or "decoder.layers.0.layer_scalar" in name for name in prefill.tensors)


def test_rows_that_are_encoded_are_what_they_were(cached: Graph) -> None:
    """The lossless limit of EncodeRows: bit for bit, for any prompt."""
    alone, prompt = rewritten(cached, EncodeRows()), draw(11, 1)
    rows = rows_of([prompt], [0], [True])
    both = [run(graph, rows, caches_of(graph, [len(prompt)])) for graph in (cached, alone)]
    assert torch.equal(*both)


def test_reasons_to_skip(captured: Graph, cached: Graph) -> None:
    def reasons(graph: Graph, step: SelfCondition | EncodeRows) -> list[str]:
        return [skip.reason for skip in report_of(graph, step).skipped]

    padded = ["rows of a padded batch have no places in a cache; run PackRows first"]
    assert reasons(captured, SelfCondition()) == padded
    prefill = rewritten(cached, EncodeRows(), OnlyKV())
    assert reasons(prefill, SelfCondition()) == ["the graph returns nothing, no logits"]
    assert reasons(prefill, EncodeRows()) == ["no row of this model says whether it is encoded"]
    hand = Hand()
    x = hand.input("x", "N", 4)
    other = hand.returns(logits=hand.call(torch.ops.aten.linear.default, x, hand.weight("w", 6, 4)))
    assert reasons(other, SelfCondition()) == ["the model reads nothing of what it predicted (no input soft)"]
    with pytest.raises(PassError, match=r"SelfCondition.* applied nowhere"):
        rewritten(other, SelfCondition())


@pytest.mark.parametrize("change", ["untied", "not capped", "quantised"])
def test_heads_that_are_no_tied_ones(cached: Graph, change: str) -> None:
    graph = cached.copy()
    logits = graph.result("logits")
    if change == "untied":
        (head,) = [n for n in graph.calls if n.target is torch.ops.aten.linear.default and n.meta["layer"] is None][-1:]
        weight = graph.add_weight("lm_head.weight", torch.randn(97, HIDDEN))
        head.args = (head.args[0], weight)
        expected = "the LM head is not the embedding"
    elif change == "quantised":
        weight = graph.weight_nodes()["model.decoder.embed_tokens.weight"]
        quantised_as(graph, weight, Format("int8"), "")
        expected = "embed_tokens.weight is stored in torch.int8, and vocabulary attention reads it as it is"
    else:
        wrong = graph.call(torch.ops.aten.exp.default, (logits,), before=graph.output, by="")
        graph.set_outputs({"logits": wrong})
        expected = "the logits come from exp, not from a linear LM head"
    assert expected in report_of(graph, SelfCondition()).skipped[0].reason


def test_a_cache_that_is_reset_may_be_read_before_it_is_written(cached: Graph) -> None:
    """No other may: the verifier says so of the same program with another declaration."""
    program = rewritten(cached, SelfCondition())
    verify(program)
    (first,) = program.find("feature_read")
    (last,) = program.find("feature_write")
    assert first < last
    program.inputs["soft_cache"] = replace(program.inputs["soft_cache"], reset="never")
    with pytest.raises(VerifyError, match="reads soft_cache before its write"):
        verify(program)


def test_programs_read_well() -> None:
    made = optimized(4.0, 0.3)
    check_golden("diffusion_gemma_step.txt", dgraph.dump(made.graph("step")))
    check_golden("diffusion_gemma_prefill.txt", dgraph.dump(made.graph("prefill")))

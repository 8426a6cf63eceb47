"""ChunkLMHead: tokens and confidences of masked rows are those of the full logits, however they are chunked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ir.graph import Graph
from dgraph.ops.lm_head.lm_head import decode_logits
from dgraph.passes import ChunkLMHead, OnlyKV
from tests.passes.scene import Scene, scene
from tests.tiny import MASK, VOCAB, Hand, draw, interpret, ops_of, report_of, rewritten, rows_of

aten = torch.ops.aten


@pytest.fixture(scope="module")
def step(cached: Graph) -> Scene:
    return scene(cached)


def test_it_fires_once_outside_the_layers(cached: Graph) -> None:
    report = report_of(cached, ChunkLMHead(7))
    assert [(a.layer, a.what) for a in report.applied] == [(None, "candidate rows, 7 at a time")]
    assert report.skipped == []
    graph = rewritten(cached, ChunkLMHead(7))
    assert graph.outputs == ("token", "confidence", "margin", "entropy")
    assert [graph.type_text(graph.result(n)) for n in graph.outputs] == ["i64[N]", "f32[N]", "f32[N]", "f32[N]"]
    (head,) = graph.find("lm_head")
    assert head.args[6:] == (7, MASK)
    assert head.args[2] is None
    assert head.args[1] is graph.weight("lm_head.weight")
    assert head.meta["role"] == "lm_head"
    before, after = ops_of(cached), ops_of(graph)
    assert after == [*before[:-1], "dgraph.lm_head", *["getitem"] * 4]
    new = [(s.name, s.dtype, s.shape) for n, s in graph.inputs.items() if n not in cached.inputs]
    assert new == [
        ("candidate", torch.bool, ("N",)),
        ("temperature", torch.float32, ("N",)),
        ("seed", torch.int64, ("N",)),
    ]


@pytest.mark.parametrize("chunk", [1, 3, 8, 2048])
def test_it_is_argmax_and_softmax_over_the_full_logits(cached: Graph, step: Scene, chunk: int) -> None:
    logits = interpret(cached, step.copy().inputs)["logits"]
    out = interpret(rewritten(cached, ChunkLMHead(chunk)), step.copy().inputs)
    masked = step.inputs["candidate"]
    logits[:, MASK] = -torch.inf
    assert torch.equal(out["token"][masked], logits[masked].argmax(-1))
    expected = logits[masked].softmax(-1).amax(-1)
    torch.testing.assert_close(out["confidence"][masked], expected, atol=1e-6, rtol=1e-5)
    assert (out["token"][~masked] == -1).all()
    assert (out["confidence"][~masked] == -torch.inf).all()
    p = logits[masked].softmax(-1)
    largest = p.sort(descending=True).values
    torch.testing.assert_close(out["margin"][masked], largest[:, 0] - largest[:, 1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out["entropy"][masked], torch.special.entr(p).sum(-1), atol=1e-5, rtol=1e-5)
    assert 0 < (~masked).sum() < len(masked)


def test_with_all_rows_masked_in_one_chunk_nothing_is_lost(cached: Graph, step: Scene) -> None:
    """The lossless limit: the same GEMM, so the same bits as the logits give."""
    mine = step.copy()
    mine.inputs["candidate"][:] = True
    logits = interpret(cached, step.copy().inputs)["logits"]
    out = interpret(rewritten(cached, ChunkLMHead(32)), mine.inputs)
    found = decode_logits(logits, mine.inputs["temperature"], mine.inputs["seed"], MASK)
    for name, value in found._asdict().items():
        assert torch.equal(out[name], value), name


def test_a_mask_is_never_predicted(packed: Graph) -> None:
    """Even by a head that prefers it everywhere."""
    graph = packed.copy()
    weight = torch.zeros(VOCAB, 64)
    hidden = interpret_hidden(packed)
    weight[MASK] = hidden.mean(0) * 100
    weight[5] = hidden.mean(0)
    graph.tensors["lm_head.weight"] = weight
    inputs = rows_of([[MASK] * 6])
    assert (interpret(graph, inputs)["logits"].argmax(-1) == MASK).any()
    for temperature in (0.0, 2.0):
        inputs["temperature"] = torch.full((6,), temperature)
        out = interpret(rewritten(graph, ChunkLMHead()), inputs)
        assert (out["token"] != MASK).all()
        assert (out["token"] >= 0).all()
        assert (out["confidence"] <= 1).all()


def interpret_hidden(packed: Graph) -> Tensor:
    """What the LM head reads."""
    graph = packed.copy()
    graph.set_outputs({"hidden": graph.result("logits").args[0]})  # type: ignore[dict-item]
    return interpret(graph, rows_of([[MASK] * 6]))["hidden"]


def test_a_draw_depends_on_the_rows_seed_alone(cached: Graph, step: Scene) -> None:
    outs = []
    for chunk in (2, 2048):
        mine = step.copy()
        mine.inputs["temperature"] += 1.5
        outs.append(interpret(rewritten(cached, ChunkLMHead(chunk)), mine.inputs)["token"])
    assert torch.equal(*outs)
    greedy = interpret(rewritten(cached, ChunkLMHead()), step.copy().inputs)["token"]
    assert not torch.equal(outs[0], greedy)
    mine = step.copy()
    mine.inputs["temperature"] += 1.5
    mine.inputs["seed"] += 1
    assert not torch.equal(interpret(rewritten(cached, ChunkLMHead()), mine.inputs)["token"], outs[0])


def test_a_head_with_a_bias() -> None:
    hand = Hand()
    h = hand.input("h", "N", 8)
    head = hand.call(aten.linear.default, h, hand.weight("head.weight", VOCAB, 8), hand.weight("head.bias", VOCAB))
    graph = hand.returns(logits=head)
    inputs = {"h": torch.randn(4, 8), **rows_of([draw(4)])}
    inputs["candidate"] = torch.ones(4, dtype=torch.bool)
    logits = interpret(graph, inputs)["logits"]
    logits[:, MASK] = -torch.inf
    chunked = rewritten(graph, ChunkLMHead())
    assert chunked.find("lm_head")[0].args[2] is chunked.weight("head.bias")
    assert torch.equal(interpret(chunked, inputs)["token"], logits.argmax(-1))


def test_other_outputs_keep_their_place() -> None:
    hand = Hand()
    h = hand.input("h", "N", 8)
    head = hand.call(aten.linear.default, h, hand.weight("head.weight", VOCAB, 8))
    graph = rewritten(hand.returns(first=h, logits=head, last=h), ChunkLMHead())
    assert graph.outputs == ("first", "token", "confidence", "margin", "entropy", "last")
    assert graph.result("last") is graph.input("h")


# -- near misses and errors --------------------------------------------------------------------------------------


def scaled_logits() -> Graph:
    hand = Hand()
    head = hand.call(aten.linear.default, hand.input("h", "N", 8), hand.weight("head.weight", VOCAB, 8))
    return hand.returns(logits=hand.call(aten.mul.Tensor, head, 0.5))


def test_logits_that_do_not_come_from_a_linear_are_a_near_miss() -> None:
    report = report_of(scaled_logits(), ChunkLMHead())
    assert report.applied == []
    assert [s.reason for s in report.skipped] == ["the logits come from mul, not from a linear LM head"]
    assert ops_of(scaled_logits()) == ["linear", "mul"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (OnlyKV(), "the graph returns nothing, no logits"),
        (ChunkLMHead(), "the graph returns token, confidence, margin, entropy, no logits"),
    ],
)
def test_a_graph_without_logits_is_a_near_miss(cached: Graph, change: Any, reason: str) -> None:
    report = report_of(rewritten(cached, change), ChunkLMHead())
    assert report.applied == []
    assert [s.reason for s in report.skipped] == [reason]


def test_a_padded_batch_is_a_near_miss(captured: Graph) -> None:
    report = report_of(captured, ChunkLMHead())
    assert report.applied == []
    assert [s.reason for s in report.skipped] == ["the LM head reads a padded batch; run PackRows first"]
    assert "lm_head" in report.skipped[0].node


@pytest.mark.parametrize("rows", [0, -1, 1.5, "8", True])
def test_the_size_of_a_chunk(rows: Any) -> None:
    with pytest.raises(InputError, match=r"max_num_logits must be a number of rows, at least 1, got"):
        ChunkLMHead(rows)

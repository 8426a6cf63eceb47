"""PackRows: the packed graph gives each token what the batch gave it; what has no row layout is refused."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

import dgraph
from dgraph.errors import PassError
from dgraph.ir import aten_kinds as kinds
from dgraph.ir.aten_rules import RULES, Rule, register
from dgraph.ir.graph import Graph
from dgraph.ops import OPS
from dgraph.passes import PackRows
from dgraph.types.nodes import op_name
from tests.oracle.models import random_weights, tiny_config
from tests.oracle.qwen3 import Cache, forward, project
from tests.plain import Plain, capture_plain
from tests.tiny import Hand, draw, interpret, ops_of, report_of, rewritten, rows_of

aten = torch.ops.aten


def full_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """dgraph.attention, one sequence at a time."""
    parts = zip(q.split(1), k.split(1), v.split(1), strict=True)
    return torch.cat([OPS["attention"].reference(*part, scale) for part in parts])


def rows_attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cu_rows: Tensor, limit: Tensor, scale: float
) -> Tensor:
    """dgraph.packed_attention where every row sees its whole sequence, by the arithmetic of dgraph.attention."""
    bounds = cu_rows.tolist()
    parts = [
        full_attention(*(x[a:z].transpose(0, 1)[None] for x in (q, k, v)), scale)[0].transpose(0, 1)
        for a, z in itertools.pairwise(bounds)
    ]
    return torch.cat(parts)


SAME = {"attention": full_attention, "packed_attention": rows_attention}


def batch_of(sequences: list[list[int]]) -> dict[str, Tensor]:
    ids = torch.tensor(sequences)
    return {"input_ids": ids, "positions": torch.arange(ids.shape[1]).expand(ids.shape).contiguous()}


def held(graph: Graph, tolerance: float = 0.0) -> Graph:
    """The packed graph, after it gave bit for bit (or within a tolerance) what the batch gave."""
    packed = rewritten(graph, PackRows())
    sequences = [draw(7, 1), draw(7, 2), draw(7, 3)]
    expected = interpret(graph, batch_of(sequences), SAME)["logits"].flatten(0, 1)
    got = interpret(packed, rows_of(sequences), SAME)["logits"]
    assert (got - expected).abs().max() <= tolerance
    assert got.std() > 0.01
    return packed


def test_it_fires_once_per_attention_and_every_value_is_over_rows(captured: Graph, packed: Graph) -> None:
    report = report_of(captured, PackRows())
    assert [(a.layer, a.what) for a in report.applied] == [(i, "attention -> packed_attention") for i in range(4)]
    assert report.skipped == []
    assert packed.find("attention") == []
    assert [n.meta["layer"] for n in packed.find("packed_attention")] == [0, 1, 2, 3]
    assert {packed.row_set(n) for n in packed.calls} == {"N"}
    assert not any(packed.symbols.names_in(s) & {"b", "t"} for n in packed.calls for s in n.meta["val"].shape)
    assert not {"sym_size", "transpose", "expand"} & set(ops_of(packed))
    assert [(s.name, s.shape) for s in packed.inputs.values()] == [
        ("input_ids", ("N",)),
        ("positions", ("N",)),
        ("cu_rows", ("b+1",)),
        ("limit", ("N",)),
    ]
    assert packed.tensors == captured.tensors


def test_the_captured_graph_is_left_as_it_was(captured: Graph) -> None:
    before = [str(n.args) for n in captured.nodes], dict(captured.inputs)
    rewritten(captured, PackRows())
    assert ([str(n.args) for n in captured.nodes], captured.inputs) == before


def test_bit_for_bit_where_attention_is_the_same(captured: Graph) -> None:
    held(captured)


def test_ragged_rows_equal_each_sequence_alone(captured: Graph, packed: Graph) -> None:
    sequences = [draw(n, n) for n in (5, 1, 12, 8)]
    got = interpret(packed, rows_of(sequences))["logits"].split([len(s) for s in sequences])
    for sequence, logits in zip(sequences, got, strict=True):
        expected = interpret(captured, batch_of([sequence]))["logits"][0]
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)


def test_limits_and_positions_are_each_rows_own(packed: Graph) -> None:
    """Block-causal rows of a sequence against the plain forward of the oracle."""
    config = tiny_config()
    weights = random_weights(config, 0)
    sequences, starts = [draw(11, 1), draw(6, 2)], [0, 0]
    inputs = rows_of(sequences, starts)
    block = 4
    ends = (inputs["positions"] // block + 1) * block
    inputs["limit"] = torch.minimum(ends, inputs["limit"]).int()
    got = interpret(packed, inputs)["logits"].split([11, 6])
    for sequence, logits in zip(sequences, got, strict=True):
        n = len(sequence)
        cache = Cache(config, n, weights["model.norm.weight"])
        limits = [min(n, (p // block + 1) * block) for p in range(n)]
        with torch.no_grad():
            expected = project(weights, forward(weights, config, sequence, range(n), limits, cache))
        torch.testing.assert_close(logits, expected, atol=5e-5, rtol=1e-5)


def test_padding_rows_change_nothing(packed: Graph) -> None:
    sequences = [draw(5, 1), draw(3, 2)]
    inputs = rows_of(sequences)
    padded = {
        name: torch.cat([value, value.new_zeros(4)]) if name in ("input_ids", "positions", "limit") else value
        for name, value in inputs.items()
    }
    got = interpret(packed, padded)["logits"]
    assert torch.equal(got[:8], interpret(packed, inputs)["logits"])


# -- rules, on hand-built graphs ---------------------------------------------------------------------------------

Body = Callable[[Hand, Node, Node, Node, Node], Node]


def stream(body: Body) -> Graph:
    """embed -> body(x [b, t, 16], positions, b, t) -> attention over 4 heads of 4 -> head."""
    hand = Hand()
    ids = hand.input("input_ids", "b", "t", dtype=torch.int64)
    positions = hand.input("positions", "b", "t", dtype=torch.int64)
    embed, head = hand.weight("embed", 97, 16), hand.weight("head", 97, 16)
    b, t = (hand.call(aten.sym_size.int, ids, i) for i in (0, 1))
    x = hand.call(aten.embedding.default, embed, ids)
    hand.layer = 0
    y = body(hand, x, positions, b, t)
    q = hand.call(aten.transpose.int, hand.call(aten.reshape.default, y, [b, t, 4, 4]), 1, 2)
    out = hand.call(aten.transpose.int, hand.call(OPS["attention"], q, q, q, 0.5), 1, 2)
    out = hand.call(aten.reshape.default, out, [b, t, 16])
    hand.layer = None
    return hand.returns(logits=hand.call(aten.linear.default, out, head))


def heads(h: Hand, x: Node, b: Node, t: Node) -> Node:
    """[b, 4, t, 4]"""
    return h.call(aten.transpose.int, h.call(aten.reshape.default, x, [b, t, 4, 4]), 1, 2)


def flat(h: Hand, x: Node, b: Node, t: Node) -> Node:
    """Back to [b, t, 16]."""
    return h.call(aten.reshape.default, h.call(aten.transpose.int, x, 1, 2), [b, t, 16])


def add_weight_over_heads(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    """A weight [4, 1, 4] meets [b, heads, t, 4]: its middle dimension stood at the place of tokens."""
    return flat(h, h.call(aten.add.Tensor, heads(h, x, b, t), h.weight("bias", 4, 1, 4)), b, t)


def rotary(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    """Frequencies [4] -> [b, 4, 1] @ positions [b, 1, t] -> angles [b, t, 4], as older versions of transformers."""
    frequencies = h.call(aten.unsqueeze.default, h.call(aten.unsqueeze.default, h.weight("f", 4), 0), 2)
    frequencies = h.call(aten.expand.default, frequencies, [b, -1, 1])
    columns = h.call(aten.unsqueeze.default, h.call(aten.to.dtype, p, torch.float32), 1)
    angles = h.call(aten.transpose.int, h.call(aten.matmul.default, frequencies, columns), 1, 2)
    cos = h.call(aten.unsqueeze.default, h.call(aten.cos.default, angles), 1)
    return flat(h, h.call(aten.mul.Tensor, heads(h, x, b, t), cos), b, t)


def softmax_of_heads(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    return flat(h, h.call(aten.softmax.int, heads(h, x, b, t), 1), b, t)


def permuted(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    """[b, t, 2, 8] -> [b, 8, 2, t] -> [b, t, 8, 2]: heads and columns are exchanged."""
    y = h.call(aten.reshape.default, x, [b, t, 2, 8])
    y = h.call(aten.permute.default, h.call(aten.permute.default, y, [0, 3, 2, 1]), [0, 3, 1, 2])
    return h.call(aten.reshape.default, y, [b, t, 16])


def split_and_cat(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    halves = h.call(aten.split_with_sizes.default, heads(h, x, b, t), [1, 3], 1)
    first, second = h.graph.parts(halves, 2, "")
    return flat(h, h.call(aten.cat.default, [second, first], 1), b, t)


def chunked(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    first, second = h.graph.parts(h.call(aten.chunk.default, x, 2, -1), 2, "")
    return h.call(aten.cat.default, [h.call(aten.neg.default, second), first], -1)


def repeated_heads(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    """The repeat_kv of plain modules: [b, 2, 1, t, 4] -> [b, 2, 2, t, 4] -> [b, 4, t, 4]."""
    y = h.call(aten.slice.Tensor, heads(h, x, b, t), 1, 0, 2)
    y = h.call(aten.expand.default, h.call(aten.unsqueeze.default, y, 2), [b, 2, 2, t, 4])
    return flat(h, h.call(aten.reshape.default, y, [b, 4, t, 4]), b, t)


def reduced(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    mean = h.call(aten.mean.dim, heads(h, x, b, t), [1, -1], True)
    return flat(h, h.call(aten.mul.Tensor, heads(h, x, b, t), mean), b, t)


def selected(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    one = h.call(aten.select.int, heads(h, x, b, t), 1, 2)  # [b, t, 4]
    return h.call(aten.cat.default, [one, one, one, one], 2)


def cumulative(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    return h.call(aten.to.dtype, h.call(aten.cumsum.default, x, 2, dtype=torch.float64), torch.float32)


def normed(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    y = h.call(aten.layer_norm.default, x, [16], h.weight("ln.weight", 16), h.weight("ln.bias", 16), 1e-5)
    y = h.call(OPS["rms_norm"], heads(h, y, b, t), h.weight("rms", 4), 1e-6)
    return h.call(aten.rms_norm.default, flat(h, y, b, t), [16], None, 1e-6)


def flattened(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    """Through a list of all tokens [b * t, 16] and back."""
    y = h.call(aten.relu.default, h.call(aten.flatten.using_ints, x, 0, 1))
    return h.call(aten.reshape.default, y, [b, t, 16])


def one_per_head_and_sequence(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    """Through [b * heads, t, 4], as batched matrix products want it."""
    y = h.call(aten.relu.default, h.call(aten.reshape.default, heads(h, x, b, t), [-1, t, 4]))
    return flat(h, h.call(aten.reshape.default, y, [b, 4, t, 4]), b, t)


def by_position(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    return h.call(aten.add.Tensor, x, h.call(aten.embedding.default, h.weight("positions.weight", 16, 16), p))


def unbound(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    """Queries, keys and values of a fused projection, as many plain modules have them."""
    parts = h.call(aten.unbind.int, h.call(aten.reshape.default, x, [b, t, 2, 8]), 2)
    first, second = h.graph.parts(parts, 2, "")
    return h.call(aten.reshape.default, h.call(aten.stack.default, [second, first], 2), [b, t, 16])


def rolled_columns(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    """Ops that dgraph.ir.aten_rules knows keep their values where their dimensions are not those of tokens."""
    y = h.call(aten.roll.default, x, [1], [2])
    y = h.call(aten.gather.default, y, 2, h.call(aten.argsort.default, y, -1))
    return h.call(aten.add.Tensor, y, h.call(aten.amax.default, y, [-1], True))


def times_a_matrix(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    """A projection that is written as x @ w."""
    return h.call(aten.matmul.default, x, h.weight("w", 16, 16))


def by_letters(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    """Projections into heads and out of them, with the letters of tokens in any place, and a sum of two experts."""
    y = h.call(aten.einsum.default, "b t d, h k d -> b h t k", [x, h.weight("in", 4, 4, 16)])
    y = h.call(aten.einsum.default, "bhtk,hkd->btd", [y, h.weight("out", 4, 4, 16)])
    gate = h.call(aten.softmax.int, h.call(aten.linear.default, x, h.weight("gate", 2, 16)), -1)
    experts = h.call(aten.einsum.default, "...d,edf->...ef", [y, h.weight("experts", 2, 16, 16)])
    return h.call(aten.einsum.default, "bte,btef->btf", [gate, experts])


def normalised(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    """F.normalize of heads, as it is captured."""
    y = heads(h, x, b, t)
    norm = h.call(aten.clamp_min.default, h.call(aten.linalg_vector_norm.default, y, 2.0, [-1], True), 1e-12)
    return flat(h, h.call(aten.div.Tensor, y, h.call(aten.expand_as.default, norm, y)), b, t)


def chosen(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    """Between entries and numbers, by flags that stand where tokens do."""
    flags = h.call(aten.gt.Scalar, h.weight("flags", 1, 1, 16), 0)
    y = h.call(aten.where.self, flags, x, h.call(aten.neg.default, x))
    return h.call(aten.where.ScalarOther, h.call(aten.lt.Scalar, y, 1), y, 0.5)


def two_per_token(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    """[b, 2 * t, 8], two neighbours of each token, and back."""
    y = h.call(aten.softmax.int, h.call(aten.reshape.default, x, [b, -1, 8]), -1)
    return h.call(aten.reshape.default, y, [b, t, 16])


def scaled_by_weights(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    """A factor that is computed from weights alone stays as it is."""
    factor = h.call(aten.exp.default, h.weight("scale", 16))
    return h.call(aten.mul.Tensor, x, h.call(aten.unsqueeze.default, h.call(aten.unsqueeze.default, factor, 0), 0))


GOOD = [
    add_weight_over_heads,
    rotary,
    softmax_of_heads,
    permuted,
    split_and_cat,
    chunked,
    repeated_heads,
    reduced,
    selected,
    cumulative,
    normed,
    flattened,
    one_per_head_and_sequence,
    by_position,
    unbound,
    rolled_columns,
    times_a_matrix,
    by_letters,
    normalised,
    chosen,
    two_per_token,
    scaled_by_weights,
]


@pytest.mark.parametrize("body", GOOD)
def test_a_rule_keeps_the_values(body: Body) -> None:
    # torch's softmax sums a dimension that is not the last in another order.
    packed = held(stream(body), 1e-6 if body is softmax_of_heads else 0.0)
    assert "sym_size" not in ops_of(packed)


def across_tokens(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    """A forgotten transpose: [b, 4, t, 4] read as [b, t, 16] mixes tokens."""
    return h.call(aten.reshape.default, heads(h, x, b, t), [b, t, 16])


def no_rule(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    return h.call(aten.renorm.default, x, 2, 2, 1.0)


def by_place(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    return h.call(aten.constant_pad_nd.default, h.call(aten.slice.Tensor, x, 2, 0, 12), [2, 2])


def rolled_tokens(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    return h.call(aten.roll.default, x, [1], [1])


def tokens_against_tokens(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    """[b, t, 1] * [b, 1, t]: packed, both would be [N, 1]."""
    one = h.call(aten.select.int, x, 2, 0)
    pairs = h.call(aten.mul.Tensor, h.call(aten.unsqueeze.default, one, 2), h.call(aten.unsqueeze.default, one, 1))
    return h.call(aten.matmul.default, pairs, x)


def sum_of_tokens(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    return h.call(aten.cumsum.default, x, 1)


def mean_of_tokens(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    return h.call(aten.sub.Tensor, x, h.call(aten.mean.dim, x, [1], True))


def mean_of_all(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    return h.call(aten.sub.Tensor, x, h.call(aten.mean.default, x))


def first_token(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    return h.call(aten.add.Tensor, x, h.call(aten.slice.Tensor, x, 1, 0, 1))


def token_pairs(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    return h.call(aten.matmul.default, h.call(aten.matmul.default, x, h.call(aten.transpose.int, x, 1, 2)), x)


def pairs_by_letters(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    return h.call(aten.einsum.default, "bts,bsd->btd", [h.call(aten.einsum.default, "btd,bsd->bts", [x, x]), x])


def numbered(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    """A table of positions that is cut to the length of the batch instead of read by position."""
    table = h.call(aten.slice.Tensor, h.weight("table", 64, 16), 0, 0, t)
    return h.call(aten.add.Tensor, x, table)


def norm_over_tokens(h: Hand, x: Node, p: Node, b: Node, t: Node) -> Node:
    return h.call(aten.layer_norm.default, x, [t, 16])


BAD: list[tuple[Body, str, str]] = [
    (across_tokens, "reshape", r"it turns f32\[b, 4, t, 4\] into f32\[b, t, 16\], across tokens"),
    (
        no_rule,
        "renorm",
        r"no rule is known for it\. Add one with dgraph\.ir\.aten_rules\.register in a module of the ent",
    ),
    (by_place, "constant_pad_nd", r"its arguments say by their places which dimensions are meant"),
    (rolled_tokens, "roll", r"it works along dimension 1, which runs over tokens"),
    (tokens_against_tokens, "mul", r"tokens of unsqueeze_default f32\[b, t, 1\] meet others in f32\[b, t, t\]"),
    (sum_of_tokens, "cumsum", r"it works along dimension 1, which runs over tokens"),
    (mean_of_tokens, "mean", r"it works along dimension 1, which runs over tokens"),
    (mean_of_all, "mean", r"it works along dimension 0, which runs over tokens"),
    (first_token, "slice", r"it works along dimension 1, which runs over tokens"),
    (token_pairs, "matmul", r"only rows and a constant matrix, or one times columns"),
    (pairs_by_letters, "einsum", r"tokens of embedding_default f32\[b, t, 16\] meet others in f32\[b, t, t\]"),
    (numbered, "slice", r"it makes values along tokens out of values that have none"),
    (norm_over_tokens, "layer_norm", r"it works along dimension 1, which runs over tokens"),
]


@pytest.mark.parametrize(("body", "op", "why"), BAD, ids=lambda v: getattr(v, "__name__", None))
def test_what_has_no_row_layout_is_refused(body: Body, op: str, why: str) -> None:
    graph = stream(body)
    culprit = next(n for n in graph.calls if op_name(n.target) == op and n.meta["layer"] == 0)
    culprit.meta["source"] = "model.py:12"
    with pytest.raises(PassError, match=why) as caught:
        rewritten(graph, PackRows())
    assert str(caught.value).startswith(f"PackRows: op {op} in module block (layer 0 (block), node ")


def test_a_package_adds_a_rule_for_an_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgraph.ir.aten_rules.RULES", dict(RULES))
    register("renorm", Rule(kinds.along("dim"), dims=("dim",)))
    packed = held(stream(no_rule))
    assert next(n.args[2] for n in packed.calls if op_name(n.target) == "renorm") == 1


def test_a_graph_without_attention_is_a_near_miss(packed: Graph) -> None:
    report = report_of(packed, PackRows())
    assert [s.reason for s in report.skipped] == ["no dgraph.attention over [b, heads, t, head_dim]"]
    assert report.applied == []


# -- plain modules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"kv_heads": 2, "enable_gqa": True}])
def test_a_plain_module_is_packed(options: dict[str, Any]) -> None:
    packed = held(capture_plain(Plain(**options)))
    assert list(packed.inputs) == ["input_ids", "positions", "cu_rows", "limit"]
    assert ops_of(packed).count("dgraph.packed_attention") == 2


def test_a_graph_that_reads_no_positions_is_packed() -> None:
    graph = stream(lambda h, x, p, b, t: x)
    graph.sweep()
    assert list(graph.inputs) == ["input_ids"]
    assert list(held(graph).inputs) == ["input_ids", "positions", "cu_rows", "limit"]


class Rolls(nn.Module):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return torch.roll(x, 1, dims=1)


def test_the_message_names_module_and_line() -> None:
    graph = capture_plain(Plain(blocks=1, twist=Rolls()))
    with pytest.raises(PassError) as caught:
        rewritten(graph, PackRows())
    message = str(caught.value)
    line = inspect.getsourcelines(Rolls)[1] + 2
    assert "PackRows: op roll in module twist (outside the layers (twist), node roll" in message
    assert f"test_pack_rows.py:{line} has no row layout" in message


def test_two_families_give_rows_alike(model: dgraph.Model, packed: Graph) -> None:
    layer = [n for n in packed.calls if n.meta["layer"] == 1]
    assert [packed.type_text(n) for n in layer if op_name(n.target) == "linear"] == [
        "f32[N, 64]",
        "f32[N, 32]",
        "f32[N, 32]",
        "f32[N, 64]",
        "f32[N, 128]",
        "f32[N, 128]",
        "f32[N, 64]",
    ]
    assert all(n.meta["by"] in ("", "PackRows") for n in packed.nodes)
    assert {n.meta["by"] for n in packed.find("packed_attention")} == {"PackRows"}
    assert model.spec.layers == 4

"""ShardTensorParallel: ranks together compute what one does, with the same graph, and each has its parts alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import dgraph
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.compiler.phases import scoring
from dgraph.errors import InputError, PassError, UnknownName, VerifyError
from dgraph.ir.graph import Graph
from dgraph.ir.linears import head_of
from dgraph.ir.verifier import verify
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.regions import RegionCompiler
from dgraph.ops.statistics import MARGIN
from dgraph.passes import ChunkLMHead, FuseProjections, MeasureRows, PackRows, ShardTensorParallel
from dgraph.passes.base import pass_from_json
from dgraph.passes.manager import run_passes
from dgraph.runtime.loop.label_scoring import Question, Scorer
from dgraph.testing import models
from dgraph.testing.models import TinyModel, prompts
from dgraph.testing.ranks import ranks
from dgraph.text.views import graph_of
from dgraph.text.writer import dump, to_json
from tests.golden_files import check_golden
from tests.tiny import MASK, VOCAB, interpret, ops_of, report_of, rewritten, rows_of, tiny_spec

TOLERANCE = 2e-4
"""Of logits of about 20 in fp32, after four layers whose sums are in another order."""


def inputs(seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(0, MASK, (2, 9), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "positions": torch.arange(9).expand(2, 9)}


def on_ranks(graph: Graph, world: int, **options: object) -> tuple[list[Tensor], list[Graph]]:
    """Logits and graphs, by rank."""
    graphs = [rewritten(graph, ShardTensorParallel(world, rank=rank, **options)) for rank in range(world)]  # type: ignore[arg-type]
    return ranks(world, lambda rank: interpret(graphs[rank], inputs())["logits"]), graphs


def cases() -> list[tuple[TinyModel, int, str]]:
    ways = [(1, "split"), (2, "split"), (4, "split"), (1, "parallel"), (2, "parallel"), (4, "parallel")]
    return [(m, *way) for m in models() for way in ways if way[1] == "split" or "moe" in str(m) or "llada2" in str(m)]


@pytest.mark.parametrize(("tiny", "world", "experts"), cases(), ids=lambda value: str(value))
def test_ranks_compute_what_one_does(tiny: TinyModel, world: int, experts: str) -> None:
    want = interpret(tiny.graph, inputs())["logits"]
    got, graphs = on_ranks(tiny.graph, world, experts=experts)
    assert all(torch.equal(logits, got[0]) for logits in got)
    assert len({dump(graph) for graph in graphs}) == len({graph.history for graph in graphs}) == 1
    if world == 1:
        assert torch.equal(got[0], want)
    else:
        torch.testing.assert_close(got[0], want, rtol=0, atol=TOLERANCE)
    spec, whole = graphs[0].spec, tiny.graph.spec
    assert (spec.heads, spec.kv_heads) == (whole.heads // world, max(whole.kv_heads // world, 1))
    assert replace(spec, heads=whole.heads, kv_heads=whole.kv_heads) == whole


def test_every_layer_is_divided_and_sums_twice() -> None:
    (tiny,) = models(None, "llada2")
    report = report_of(tiny.graph, ShardTensorParallel(2))
    heads = "2 of 4 heads, 1 of 2 KV heads a rank"
    assert [(a.layer, a.what) for a in report.applied] == [
        (0, f"{heads}; 1 per head, 2 row, 2 column"),
        *[(layer, f"{heads}; 1 per head, 2 row, 2 experts, 2 column") for layer in (1, 2, 3)],
        (None, "outside the layers: 2 vocabulary"),
    ]
    assert report.skipped == []
    graph = rewritten(tiny.graph, ShardTensorParallel(2))
    for layer in range(4):  # experts and the expert that all rows share are summed at once
        assert ops_of(graph, layer).count("dgraph.all_reduce") == 2
    assert ops_of(graph, None).count("dgraph.all_reduce") == 1
    assert ops_of(graph).count("dgraph.all_gather") == 1


def test_a_sharded_step_as_text() -> None:
    (tiny,) = models(None, "llada2")
    check_golden("llada2_sharded_captured.txt", dump(rewritten(tiny.graph, ShardTensorParallel(2, experts="parallel"))))


def test_dumps_of_a_part_need_no_ranks_and_read_no_weights() -> None:
    text = dgraph.dump("tiny_sdar", tp=2)
    assert text.startswith("sdar: 12 layers, hidden 256, 4 heads and 2 KV heads of 32")
    assert "\nsharded   over 2 ranks (tp), as one of them sees it\n" in text
    assert "model.layers.0..11.self_attn.o_proj.weight f32[256, 128] row," in text
    graph = graph_of("tiny_sdar", tp=2)
    assert sum(tensor.untyped_storage().nbytes() for tensor in graph.tensors.values()) < 4096
    assert to_json(graph)["sharding"]["divided"]["lm_head.weight"] == {"type": "f32[1024, 256]", "kind": "vocabulary"}
    assert "dgraph.lm_head_combine" in str(dgraph.diff("tiny_sdar", "captured", "dense", tp=4))
    with pytest.raises(InputError, match=r"8 heads of weight .* cannot be divided over 3 ranks"):
        dgraph.dump("tiny_sdar", tp=3)
    with pytest.raises(InputError, match="optimized already"):
        graph_of(models(None, "sdar")[0].optimized("dense"), tp=2)


def test_parts_of_all_ranks_are_the_whole() -> None:
    (tiny,) = models(None, "llada2")
    _, graphs = on_ranks(tiny.graph, 2)
    for name in graphs[0].tensors:
        if name.startswith("shard."):
            continue
        whole, parts = tiny.graph.tensors[name], [graph.tensors[name] for graph in graphs]
        if name not in graphs[0].divided:
            assert all(part is whole for part in parts)
            continue
        dim = graphs[0].divided[name].dim
        pieces = [
            (begin, whole_part)
            for graph, part in zip(graphs, parts, strict=True)
            for (begin, _), whole_part in zip(
                graph.divided[name].ranges,
                part.split([end - begin for begin, end in graph.divided[name].ranges]
                           + [graph.divided[name].padded - sum(e - b for b, e in graph.divided[name].ranges)], dim),
                strict=False,
            )
        ]  # fmt: skip
        together = torch.cat([piece for _, piece in sorted(pieces, key=lambda piece: piece[0])], dim)
        assert torch.equal(together, whole), name
        assert all(part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr() for part in parts)
    assert graphs[1].tensors["lm_head.weight"].shape == (49, 32)
    assert not graphs[1].tensors["lm_head.weight"][48:].any()
    assert [graph.tensors["shard.first_id"].item() for graph in graphs] == [0, 49]


def test_fewer_kv_heads_than_ranks() -> None:
    (tiny,) = models(None, "sdar")
    graphs = [rewritten(tiny.graph, ShardTensorParallel(4, rank=rank)) for rank in range(4)]
    keys = [graph.tensors["model.layers.1.self_attn.k_proj.weight"] for graph in graphs]
    assert torch.equal(keys[0], keys[1])
    assert torch.equal(keys[2], keys[3])
    assert not torch.equal(keys[1], keys[2])


class Attention(nn.Module):
    """Of queries, keys and values that are one product, with biases; the queries are normed all at once if asked."""

    def __init__(self, norm: bool):
        super().__init__()
        self.qkv, self.o = nn.Linear(16, 32), nn.Linear(16, 16)
        self.norm = nn.Parameter(torch.empty(16)) if norm else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([16, 8, 8], dim=-1)
        if self.norm is not None:
            q = q * (q.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * self.norm
        q, k, v = (value.unflatten(-1, (-1, 4)).transpose(1, 2) for value in (q, k, v))
        return self.o(torch.ops.dgraph.attention(q, k, v, 0.5).transpose(1, 2).flatten(-2))


class Unit(nn.Module):
    """Gate and up as one product."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(16, 24), nn.Linear(12, 16)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).split([12, 12], dim=-1)
        return self.down(nn.functional.silu(gate) * up)


class Chain(nn.Module):
    """A feed-forward network that the view does not know: a projection after another, and one after that."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(16, 8), nn.Linear(8, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.three(self.two(self.one(x).relu()).tanh())


class Layer(nn.Module):
    def __init__(self, mlp: nn.Module, norm: bool):
        super().__init__()
        self.attention, self.mlp = Attention(norm), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Hand(nn.Module):
    """One layer, and a head that is the embedding."""

    def __init__(self, mlp: nn.Module, norm: bool = False):
        super().__init__()
        self.layers = nn.ModuleList([Layer(mlp, norm)])
        self.embed = nn.Embedding(VOCAB, 16)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return nn.functional.linear(self.layers[0](self.embed(input_ids)), self.embed.weight)


def captured(module: nn.Module) -> Graph:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return dgraph.capture(dgraph.Model("hand", module.eval(), tiny_spec(layers=1)))


@pytest.mark.parametrize("world", [1, 2])
def test_biases_are_added_once_and_a_tied_embedding_is_divided_once(world: int) -> None:
    graph = captured(Hand(Unit()))
    want = interpret(graph, inputs())["logits"]
    got, graphs = on_ranks(graph, world)
    torch.testing.assert_close(got[0], want, rtol=0, atol=TOLERANCE if world > 1 else 0)
    if world == 2:
        assert graphs[0].divided["layers.0.mlp.gate_up.weight"].ranges == ((0, 6), (12, 18))
        assert graphs[1].divided["layers.0.attention.qkv.bias"].ranges == ((8, 16), (20, 24), (28, 32))
        first, second = (graph.tensors["layers.0.attention.o.bias"] for graph in graphs)
        assert first.any()
        assert not second.any()
    tied = [tensor for name, tensor in graphs[0].tensors.items() if "embed" in name]
    assert all(tensor is tied[0] for tensor in tied)


def test_a_norm_over_all_heads_is_refused_unless_attention_is_whole() -> None:
    graph = captured(Hand(Unit(), norm=True))
    with pytest.raises(
        PassError, match=r"layer 0.*rms_norm reads.*divided.*8 of 16.*layers\.0\.attention\.norm.*norm of each head"
    ):
        rewritten(graph, ShardTensorParallel(2))
    hints = (("layers.*.attention.*", "replicated"),)
    want = interpret(graph, inputs())["logits"]
    got, graphs = on_ranks(graph, 2, hints=hints)
    torch.testing.assert_close(got[0], want, rtol=0, atol=TOLERANCE)
    assert graphs[0].spec.heads == 4
    assert graphs[0].divided.keys() >= {"layers.0.mlp.down.weight", "layers.0.mlp.down.bias"}


def test_what_the_view_does_not_know_is_refused_until_hinted() -> None:
    graph = captured(Hand(Chain()))
    with pytest.raises(
        PassError, match=r"weight 'layers\.0\.mlp\.one\.weight' f32\[8, 16\] in layer 0.*hint.*replicated"
    ):
        rewritten(graph, ShardTensorParallel(2))
    hints = (
        ("layers.*.one.*", "column"),
        ("layers.*.two.*", "row"),
        ("layers.*.three.*", "replicated"),
    )
    want = interpret(graph, inputs())["logits"]
    got, graphs = on_ranks(graph, 2, hints=hints)
    torch.testing.assert_close(got[0], want, rtol=0, atol=TOLERANCE)
    assert ops_of(graphs[0], 0).index("tanh") > ops_of(graphs[0], 0).index("dgraph.all_reduce")
    with pytest.raises(
        PassError, match=r"linear reads weight 'layers\.0\.mlp\.two\.weight'.*whole; expected to be divided by"
    ):
        rewritten(graph, ShardTensorParallel(2, hints=(hints[0], ("*.two.*", "replicated"), hints[2])))


@pytest.mark.parametrize(
    ("world", "what"),
    [(3, "4 heads of weight 'model.layers.0.self_attn.q_proj.weight' cannot be divided over 3 ranks")],
)
def test_sizes_that_do_not_divide(world: int, what: str) -> None:
    (tiny,) = models(None, "sdar")
    with pytest.raises(InputError, match=what):
        rewritten(tiny.graph, ShardTensorParallel(world))


@pytest.mark.parametrize(
    ("make", "error", "what"),
    [
        (lambda: ShardTensorParallel(0), InputError, "world must be a number of ranks"),
        (lambda: ShardTensorParallel(2, rank=2), InputError, "rank must be one of 0..1, got 2"),
        (lambda: ShardTensorParallel(2, experts="none"), InputError, "experts must be one of"),
        (lambda: ShardTensorParallel(2, hints=(("a", "colum"),)), UnknownName, "'column'"),
    ],
)
def test_bad_settings(make: Callable[[], object], error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=what):
        make()


def test_bad_hints() -> None:
    (tiny,) = models(None, "sdar")
    with pytest.raises(InputError, match=r"the hint 'nothing\.\*': 'row' is of no weight"):
        rewritten(tiny.graph, ShardTensorParallel(2, hints=(("nothing.*", "row"),)))


def test_only_a_graph_as_captured_is_divided() -> None:
    (tiny,) = models(None, "sdar")
    with pytest.raises(PassError, match="divide it before any other pass"):
        rewritten(tiny.graph, PackRows(), ShardTensorParallel(2))
    with pytest.raises(PassError, match="divided over 2 ranks already"):
        rewritten(tiny.graph, ShardTensorParallel(2), ShardTensorParallel(2))


def test_the_rank_is_no_part_of_the_pass() -> None:
    first, second = ShardTensorParallel(2, rank=0), ShardTensorParallel(2, rank=1)
    assert first == second
    assert repr(first) == repr(second)
    assert hash(first) == hash(second)
    assert first.to_json() == second.to_json()
    assert "rank" not in first.to_json()
    assert pass_from_json(first.to_json(), {"ShardTensorParallel": ShardTensorParallel}) == first


def test_packed_rows_are_those_of_one_process() -> None:
    (tiny,) = models(None, "llada2")
    sequences = [[5, 6, 7], [8, 9, 10, 11]]
    whole = rewritten(tiny.graph, PackRows(), FuseProjections())
    want = interpret(whole, rows_of(sequences))["logits"]
    graphs = [tiny.graph.copy() for _ in range(2)]
    for rank, graph in enumerate(graphs):
        run_passes(
            graph, [ShardTensorParallel(2, rank=rank), PackRows(), FuseProjections()], frozenset({"FuseProjections"})
        )
    got = ranks(2, lambda rank: interpret(graphs[rank], rows_of(sequences))["logits"])
    torch.testing.assert_close(got[0], want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["llada2", "dream"])
def test_no_logits_are_gathered_where_none_are_kept(family: str) -> None:
    """Each rank decides alike, what one process decides, at any temperature."""
    (tiny,) = models(None, family)
    given = rows_of([[5, 6, MASK], [MASK, 9, MASK, MASK]])
    given |= {"candidate": given["input_ids"] == MASK, "seed": torch.arange(7) * 31}
    given["temperature"] = torch.tensor([0.0, 0.0, 0.9, 0.0, 0.0, 0.5, 0.7])
    want = interpret(rewritten(tiny.graph, PackRows(), ChunkLMHead(2)), given)
    graphs = [rewritten(tiny.graph, ShardTensorParallel(2, rank=r), PackRows(), ChunkLMHead(2)) for r in range(2)]
    (gather,) = graphs[0].find("all_gather")
    assert graphs[0].type_text(gather) == "f32[N, 16]"
    assert not any(graphs[0].type_text(node).endswith(", 97]") for node in graphs[0].calls)
    first, second = ranks(2, lambda rank: interpret(graphs[rank], given))
    for name, value in want.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], value, rtol=1e-4, atol=1e-4)
    head = head_of(graphs[0])
    assert not isinstance(head, str)
    assert head.shape == (49, 32)


@pytest.mark.parametrize("family", ["llada2", "dream"])
def test_a_sum_over_ranks_that_is_missing_is_found(family: str) -> None:
    """Each of them, after any pass."""
    (tiny,) = models(None, family)
    graph = rewritten(tiny.graph, ShardTensorParallel(2, experts="parallel"), PackRows(), FuseProjections())
    count = len(graph.find("all_reduce"))
    assert count == 1 + 2 * graph.spec.layers
    for i in range(count):
        broken = graph.copy()
        missing = broken.find("all_reduce")[i]
        value = missing.all_input_nodes[0]
        broken.replace(missing, value)
        with pytest.raises(VerifyError, match=rf"(?s)rule 'partial sums' .* reads {value.name}, of which each rank"):
            verify(broken)


def test_statistics_of_a_sharded_model_are_refused() -> None:
    (tiny,) = models(None, "sdar")
    with pytest.raises(PassError, match="margin: no rank of a sharded model has whole logits"):
        rewritten(tiny.graph, ShardTensorParallel(2), PackRows(), ChunkLMHead(), MeasureRows((MARGIN,)))


@pytest.mark.parametrize("recipe", ["dense", "focus"])
def test_responses_are_those_of_one_process(recipe: str) -> None:
    """FOCUS among them: its importance is a sum over the heads of all ranks."""
    (tiny,) = models(None, "llada2")
    want = tiny.optimized(recipe).generate(input_ids=prompts(tiny), max_new_tokens=12).token_ids

    def respond(rank: int) -> list[list[int]]:
        graph = rewritten(tiny.graph, ShardTensorParallel(2, rank=rank))
        how = RegionCompiler("eager"), Buckets.of("exact")
        opt = CompiledModel(tiny.model, graph, tiny.recipe(recipe), *how)
        return opt.generate(input_ids=prompts(tiny), max_new_tokens=12).token_ids

    assert ranks(2, respond) == [want, want]


def test_labels_are_as_probable_as_in_one_process() -> None:
    (tiny,) = models(None, "dream")
    question = Question.of(tiny.model.spec, [5, 6, 7], [[8], [9], [10, 11]], [12], [13], 64)

    def ask(graph: Graph) -> list[float]:
        program = LoweredProgram(scoring(graph), RegionCompiler("eager"), Buckets())
        return Scorer(tiny.model.spec, lambda: program, 8, torch.device("cpu"))(question)

    graphs = [rewritten(tiny.graph, ShardTensorParallel(2, rank=rank)) for rank in range(2)]
    first, second = ranks(2, lambda rank: ask(graphs[rank]))
    assert first == second
    assert first == pytest.approx(ask(tiny.graph), abs=1e-5)

"""Routing against a transcription in plain Python; experts against a loop over rows; both on a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from dgraph.errors import InputError
from dgraph.families.quantised import ROW_KINDS, WHOLE, Format, QuantisedRows, quantise, quantised_rows
from dgraph.ops import OPS
from dgraph.ops.experts.experts import can_group
from tests.ops.triton.mixtures import draw, literal, mixture, routing
from tests.oracle.llada2 import Config, block_routing, grouped_choice, sigmoid_routing, softmax_routing

route, experts = OPS["route"].reference, OPS["experts"].reference


# -- routing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("groups", "top_groups", "topk"), [(1, 1, 3), (4, 2, 3), (8, 4, 8), (2, 1, 8), (4, 4, 1)])
@pytest.mark.parametrize("biased", [True, False])
def test_sigmoid_routing_is_its_transcription(groups: int, top_groups: int, topk: int, biased: bool) -> None:
    config = Config(experts=16, groups=groups, top_groups=top_groups, topk=topk)
    logits, bias = draw(40, 16), draw(16, seed=1) * 0.2 if biased else None
    choice, weight = route(logits, bias, "sigmoid", groups, top_groups, topk, topk > 1, config.scale)
    for row in range(40):
        want = sigmoid_routing(logits[row], bias, config)
        assert choice[row].tolist() == [e for e, _ in want]
        assert_close(weight[row], torch.tensor([w for _, w in want]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("normalise", [True, False])
def test_softmax_routing_is_its_transcription(normalise: bool) -> None:
    logits = draw(30, 12) * 2
    choice, weight = route(logits, None, "softmax", 1, 1, 4, normalise, 1.0)
    for row in range(30):
        want = softmax_routing(logits[row], 4, normalise)
        assert choice[row].tolist() == [e for e, _ in want]
        assert_close(weight[row], torch.tensor([w for _, w in want]), rtol=1e-5, atol=1e-6)


def test_ties_go_to_the_lower_id() -> None:
    """Few distinct values, so that experts and whole groups tie."""
    values = torch.randint(0, 2, (200, 16), generator=torch.Generator().manual_seed(3)).float()
    choice, _ = route(values, None, "sigmoid", 4, 2, 5, True, 1.0)
    scores = values.sigmoid().tolist()
    assert choice.tolist() == [grouped_choice(row, 4, 2, 5) for row in scores]
    same, weight = route(torch.zeros(2, 16), None, "softmax", 1, 1, 4, False, 1.0)
    assert same.tolist() == [[0, 1, 2, 3]] * 2
    assert (weight == 1 / 16).all()


def test_a_bias_changes_the_choice_and_no_weight() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    plain, weight = route(logits, None, "sigmoid", 1, 1, 2, False, 1.0)
    assert plain.tolist() == [[0, 1]]
    biased, other = route(logits, torch.tensor([0.0, 0.0, 0.0, 9.0]), "sigmoid", 1, 1, 2, False, 1.0)
    assert biased.tolist() == [[3, 0]]
    assert_close(other, logits.sigmoid()[:, [3, 0]], rtol=0, atol=0)
    assert torch.equal(other[0, 1], weight[0, 0])


def test_each_expert_may_have_a_scale_of_its_own() -> None:
    """As DiffusionGemma routes: the softmax of those chosen, brought to one, and then each expert's own factor."""
    logits, factors = draw(30, 12) * 2, draw(12, seed=2).exp()
    plain = route(logits, None, "softmax", 1, 1, 4, True, 1.0)
    choice, weight = route(logits, None, "softmax", 1, 1, 4, True, 1.0, None, factors)
    assert choice.equal(plain[0])
    for row in range(30):
        chosen = logits[row].softmax(-1)[choice[row]]
        assert_close(weight[row], chosen / chosen.sum() * factors[choice[row]], rtol=1e-5, atol=1e-6)


def test_a_group_is_judged_by_its_two_best() -> None:
    """The best expert of all is out of reach: its group has no second."""
    logits = torch.tensor([[5.0, -9.0, -9.0, 1.0, 1.0, -9.0]])
    choice, _ = route(logits, None, "sigmoid", 2, 1, 2, True, 1.0)
    assert choice.tolist() == [[3, 4]]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("tanh", 1, 1, 2), r"score must be one of 'sigmoid', 'softmax', got 'tanh'"),
        (("sigmoid", 5, 1, 2), r"16 experts do not form 5 equal groups"),
        (("sigmoid", 16, 1, 2), r"16 experts do not form 16 equal groups of at least 2"),
        (("sigmoid", 4, 5, 2), r"top_groups must be between 1 and 4, got 5"),
        (("sigmoid", 4, 2, 9), r"topk must be between 1 and the 8 experts to choose from, got 9"),
        (("softmax", 1, 1, 0), r"topk must be between 1 and the 16 experts to choose from, got 0"),
    ],
)
def test_routing_that_cannot_be(args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        route(draw(3, 16), None, *args, True, 1.0)


# -- blocks that share experts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("levels", "biased"), [(0, True), (2, False)], ids=["drawn", "ties"])
def test_rows_of_a_block_choose_of_its_experts(levels: int, biased: bool) -> None:
    """Of sequences of any length, as one dense batch and packed; a block may be one row."""
    config = Config(experts=16, topk=3, capacity=4, block=4)
    bias = draw(16, seed=1) * 0.2 if biased else torch.zeros(16)
    positions = torch.tensor([*range(3, 10), *range(8, 13), 20, 21, 30])
    cu_rows = torch.tensor([0, 7, 7, 12, 15]).int()
    logits = torch.randint(0, levels, (15, 16)).float() if levels else draw(15, 16) * 2
    numbers = OPS["block_numbers"].reference(positions, cu_rows, config.block)
    allowed = OPS["block_experts"].reference(logits, bias, numbers, config.capacity)
    choice, weight = route(logits, bias, "sigmoid", 1, 1, 3, True, config.scale, allowed)
    assert (allowed.sum(1) == 4).all()
    wanted = [
        row
        for begin, end in itertools.pairwise(cu_rows.tolist())
        for row in block_routing(logits[begin:end], bias, (positions[begin:end] // 4).tolist(), config)
    ]
    assert choice.tolist() == [[e for e, _ in row] for row in wanted]
    assert_close(weight, torch.tensor([[w for _, w in row] for row in wanted]), rtol=1e-5, atol=1e-6)


def test_sequences_side_by_side_with_one_position_are_two_blocks() -> None:
    numbers = OPS["block_numbers"].reference
    packed = numbers(torch.tensor([8, 9, 8, 9, 77]), torch.tensor([0, 2, 4]).int(), 32)
    assert packed[0] == packed[1] != packed[2] == packed[3]
    assert packed[4] == 0
    dense = numbers(torch.tensor([[8, 9], [8, 32]]), None, 32)
    assert dense.flatten().unique().numel() == 3
    assert (dense > 0).all()


@pytest.mark.parametrize(
    ("capacity", "blocks", "message"),
    [
        (0, torch.zeros(3).long(), r"capacity must be between 1 and 16 experts, got 0"),
        (17, torch.zeros(3).long(), r"capacity must be between 1 and 16 experts, got 17"),
        (4, torch.zeros(2).long(), r"blocks must have a number for each row of logits \[3, 16\], got \[2\]"),
    ],
)
def test_blocks_that_cannot_choose(capacity: int, blocks: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        OPS["block_experts"].reference(draw(3, 16), None, blocks, capacity)
    with pytest.raises(InputError, match="block must be a number of positions, at least 1, got 0"):
        OPS["block_numbers"].reference(torch.arange(3), None, 0)


# -- experts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k", "count"), [(1, 1, 2), (7, 3, 5), (40, 4, 16), (3, 2, 64)])
def test_the_reference_is_the_literal_sum(n: int, k: int, count: int) -> None:
    args = mixture(n, k, count)
    assert_close(experts(*args), literal(*args).float(), rtol=1e-5, atol=1e-6)


def test_what_can_be_grouped() -> None:
    args = mixture(4, 2, 3)
    for dtype, wanted in (
        (torch.float32, True),
        (torch.bfloat16, True),
        (torch.float16, False),
        (torch.float64, False),
    ):
        assert can_group(args[0].to(dtype), args[3].to(dtype)) == wanted


@pytest.mark.parametrize("at", range(5))
def test_shapes_that_do_not_fit(at: int) -> None:
    args = list(mixture(4, 2, 3))
    args[at] = args[at][..., :-1]
    with pytest.raises(InputError, match=r"dgraph::experts: .* do not fit each other: \[4, 1"):
        experts(*args)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k", "count", "d", "f"), [(300, 8, 64, 256, 128), (5, 2, 16, 64, 32)])
def test_grouped_products_on_cuda_in_a_graph(n: int, k: int, count: int, d: int, f: int) -> None:
    """bf16, captured once and replayed on other rows and choices."""
    calls = [
        tuple(t.bfloat16() if t.is_floating_point() and t.dim() > 1 else t for t in mixture(n, k, count, d, f, seed))
        for seed in (0, 7)
    ]
    static = [t.cuda() for t in calls[0]]
    assert can_group(static[0], static[3])
    op = OPS["experts"].overload
    with torch.cuda.stream(torch.cuda.Stream()):
        op(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = op(*static)
    for args in (calls[1], calls[0]):
        for target, source in zip(static, args, strict=True):
            target.copy_(source)
        graph.replay()
        torch.cuda.synchronize()
        assert_close(result.cpu().double(), literal(*args), rtol=3e-2, atol=3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize("high", [1, 128, WHOLE])
@pytest.mark.parametrize(("count", "out", "into", "n"), [(8, 320, 2816, 40), (5, 704, 704, 300), (3, 130, 80, 500)])
def test_numbers_by_numbers_of_groups_on_cuda(kind: str, high: int, count: int, out: int, into: int, n: int) -> None:
    """Of positive values, whose sums show what is lost in each; in every tile, with groups of no row."""
    from dgraph.ops.experts.triton import grouped

    numbers = draw(n, into).abs()
    x = QuantisedRows(*(part.cuda() for part in quantised_rows(numbers, kind)), numbers.dtype)
    weight = quantise(draw(count, out, into, seed=1).abs().cuda(), Format(kind, (high, WHOLE)))
    assert grouped.pays(x.values, weight.values) == (torch.cuda.get_device_capability() >= (9, 0))
    if not grouped.pays(x.values, weight.values):
        pytest.skip("needs Hopper's bulk copies")
    ends = torch.randint(0, n, (count,), generator=torch.Generator().manual_seed(n)).sort().values.int()
    ends[0], ends[-1] = 0, n
    every = weight.dequantised(torch.float32).double()
    rtol = 5e-3 if kind == "fp8" else 1e-3  # matrix units cut off what they add up of float8
    for tile in grouped.TILES_OF_NUMBERS:
        found, begin = grouped.multiply(x, weight, ends.cuda(), tile), 0
        for end, by in zip(ends.tolist(), every, strict=True):
            assert_close(found[begin:end].double(), x.dequantised()[begin:end].double() @ by.T, rtol=rtol, atol=0)
            begin = end


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "score", "biased"), [(1, "sigmoid", True), (300, "sigmoid", False), (5000, "softmax", False)]
)
def test_routing_on_cuda_at_the_sizes_of_models(n: int, score: str, biased: bool) -> None:
    groups = (8, 4) if score == "sigmoid" else (1, 1)
    args = routing(n, 256, *groups, 8, score=score, biased=biased)
    on_cuda = tuple(t.cuda() if isinstance(t, torch.Tensor) else t for t in args)
    (choice, weight), (wanted, weights) = OPS["route"].overload(*on_cuda), route(*args)
    assert choice.cpu().equal(wanted)
    assert_close(weight.cpu(), weights, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 37, 40_960])
def test_slots_on_cuda_are_numbered_in_order(n: int) -> None:
    from dgraph.ops.experts.triton.experts import ordered

    choice = torch.randint(-1, 257, (n, 8), generator=torch.Generator().manual_seed(n))
    ends, rank = (t.cpu() for t in ordered(choice.cuda(), 256))
    of_expert, order = torch.where(choice < 0, 256, choice).flatten().sort(stable=True)
    bounds = torch.searchsorted(of_expert, torch.arange(256), right=True)
    assert ends.equal(bounds.int())
    live = order[: int(bounds[-1])]
    starts = torch.cat([bounds.new_zeros(1), bounds[:-1]])
    assert (starts[choice.flatten()[live]] + rank[live]).equal(torch.arange(len(live)))

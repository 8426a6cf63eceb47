"""Routing against a transcription in plain Python; experts in every form against the loop over experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from dgraph.errors import InputError
from dgraph.ops import OPS
from dgraph.ops.triton.experts import by_masking, by_sorting, can_group, kernel
from tests.oracle.llada2 import Config, grouped_choice, sigmoid_routing, softmax_routing

route, experts = OPS["route"].reference, OPS["experts"].reference
FORMS = {"sorting": by_sorting, "masking": by_masking, "kernel": kernel}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mixture(n: int, k: int, count: int, d: int = 16, f: int = 8, seed: int = 0) -> tuple[Tensor, ...]:
    """Rows, choices, weights, gate_up and down; a tenth of the choices name no expert."""
    generator = torch.Generator().manual_seed(seed)
    choice = torch.rand((n, count), generator=generator).argsort(-1)[:, :k]
    choice = torch.where(torch.rand((n, k), generator=generator) < 0.1, -1, choice)
    weights = draw(count, 2 * f, d, seed=seed + 1) * d**-0.5, draw(count, d, f, seed=seed + 2) * f**-0.5
    return draw(n, d, seed=seed), choice, torch.rand((n, k), generator=generator), *weights


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


# -- experts -----------------------------------------------------------------------------------------------------


def literal(x: Tensor, choice: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Row by row, slot by slot, in float64."""
    x, weight, gate_up, down = (t.double() for t in (x, weight, gate_up, down))
    out, f = torch.zeros_like(x), down.shape[2]
    for row in range(len(x)):
        for slot, expert in enumerate(choice[row].tolist()):
            if 0 <= expert < len(down):
                gate, up = gate_up[expert, :f] @ x[row], gate_up[expert, f:] @ x[row]
                out[row] += weight[row, slot] * (down[expert] @ (gate * gate.sigmoid() * up))
    return out


@pytest.mark.parametrize("form", [experts, *FORMS.values()], ids=["reference", *FORMS])
@pytest.mark.parametrize(("n", "k", "count"), [(1, 1, 2), (7, 3, 5), (40, 4, 16), (3, 2, 64)])
def test_every_form_is_the_literal_sum(form: Callable[..., Tensor], n: int, k: int, count: int) -> None:
    args = mixture(n, k, count)
    assert_close(form(*args), literal(*args).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_in_bf16(form: Callable[..., Tensor]) -> None:
    args = tuple(t.bfloat16() if t.is_floating_point() else t for t in mixture(20, 3, 6))
    got = form(*args)
    assert got.dtype == torch.bfloat16
    assert_close(got.double(), literal(*args), rtol=2e-2, atol=2e-2)
    assert_close(got, experts(*args), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("form", [experts, *FORMS.values()], ids=["reference", *FORMS])
def test_experts_without_rows_and_rows_without_experts(form: Callable[..., Tensor]) -> None:
    """What is in either does not matter."""
    x, choice, weight, gate_up, down = mixture(9, 2, 6)
    choice[:, 1] = -1
    choice[:, 0] = 4
    choice[3, 0] = 77
    weight[:, 1], weight[3], x[3] = torch.nan, torch.nan, torch.nan
    for other in (0, 1, 2, 3, 5):
        gate_up[other], down[other] = torch.nan, torch.nan
    got = form(x, choice, weight, gate_up, down)
    gate, up = (x @ gate_up[4].T).chunk(2, dim=-1)
    want = weight[:, :1] * ((gate * gate.sigmoid() * up) @ down[4].T)
    assert not got[3].any()
    live = torch.arange(9) != 3
    assert_close(got[live], want[live], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", [experts, *FORMS.values()], ids=["reference", *FORMS])
def test_the_order_of_experts_changes_no_bit(form: Callable[..., Tensor]) -> None:
    x, choice, weight, gate_up, down = mixture(12, 3, 5)
    order = torch.tensor([3, 0, 4, 1, 2])
    renamed = torch.where(choice < 0, choice, order.argsort()[choice.clamp(min=0)])
    assert torch.equal(form(x, renamed, weight, gate_up[order], down[order]), form(x, choice, weight, gate_up, down))


def test_no_rows() -> None:
    args = mixture(4, 2, 3)
    none = tuple(t[:0] for t in args[:3])
    assert kernel(*none, *args[3:]).shape == (0, 16)


@pytest.mark.parametrize("form", [by_sorting, by_masking], ids=["sorting", "masking"])
def test_nothing_is_read_by_the_host(form: Callable[..., Tensor]) -> None:
    """On the meta device there are no values to read; there a grouped product is of bf16 alone."""
    args = [t.to("meta", torch.bfloat16 if t.is_floating_point() else t.dtype) for t in mixture(6, 2, 4)]
    assert form(*args).shape == (6, 16)


def test_what_can_be_grouped() -> None:
    args = mixture(4, 2, 3)
    assert can_group(args[0], args[3])
    assert can_group(args[0].bfloat16(), args[3].bfloat16())
    assert not can_group(args[0].double(), args[3].double())
    doubled = tuple(t.double() if t.is_floating_point() else t for t in args)
    assert_close(kernel(*doubled), literal(*doubled))


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

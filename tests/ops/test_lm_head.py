"""dgraph::lm_head: chunks, greedy decoding and seeded draws."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from dgraph.errors import InputError
from dgraph.ops import OPS
from dgraph.ops.lm_head.lm_head import decode_logits, gumbel
from dgraph.ops.statistics import CURRENT, declare, kept_rows

lm_head = torch.ops.dgraph.lm_head


def problem(rows: int = 23, width: int = 12, vocab: int = 50) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    h, weight = (torch.randn(n, width, generator=generator) for n in (rows, vocab))
    bias, masked = torch.randn(vocab, generator=generator), torch.rand(rows, generator=generator) < 0.7
    return h, weight, bias, masked


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chunks_change_nothing(temperature: float) -> None:
    h, weight, bias, masked = problem()
    heat, seed = torch.full((23,), temperature), torch.arange(23)
    whole = lm_head(h, weight, bias, masked, heat, seed, 1000, -1)
    for chunk in (1, 2, 7, 23):
        token, *rest = lm_head(h, weight, bias, masked, heat, seed, chunk, -1)
        assert token.equal(whole[0])
        assert_close(rest, whole[1:], rtol=1e-5, atol=1e-5)


def test_no_more_rows_at_once_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    h, weight, bias, masked = problem()
    seen: list[int] = []
    project = F.linear
    monkeypatch.setattr(F, "linear", lambda x, *rest: (seen.append(len(x)), project(x, *rest))[1])
    lm_head(h, weight, bias, masked, torch.zeros(23), torch.arange(23), 5, -1)
    assert max(seen) <= 5
    assert sum(seen) == int(masked.sum())


def test_greedy_is_argmax_and_softmax() -> None:
    h, weight, bias, masked = problem()
    token, confidence, margin, entropy = lm_head(h, weight, bias, masked, torch.zeros(23), torch.arange(23), 1000, -1)
    logits = F.linear(h[masked], weight, bias)
    assert token[masked].equal(logits.argmax(-1))
    assert confidence[masked].equal(logits.softmax(-1).amax(-1))
    assert (token[~masked] == -1).all()
    assert (confidence[~masked] == -torch.inf).all()
    assert (margin[~masked] == -torch.inf).all()
    assert (entropy[~masked] == torch.inf).all()


@pytest.mark.parametrize("heat", [0.0, 0.3, 1.0, 4.0])
def test_margin_and_entropy_are_of_the_distribution_at_that_temperature(heat: float) -> None:
    logits = 4 * torch.randn(60, 30, generator=torch.Generator().manual_seed(0)).double()
    logits[0, 3:5] = 20.0  # two of equal probability
    logits[1] = 0.0  # all of equal probability
    logits[2, 7] = 900.0  # one for certain
    logits[3, 1:] = -torch.inf
    found = decode_logits(logits.float(), torch.full((60,), heat), torch.arange(60))
    for row, margin, entropy in zip(logits.tolist(), found.margin.tolist(), found.entropy.tolist(), strict=True):
        weights = [math.exp((x - max(row)) / (heat or 1)) for x in row]
        p = sorted((w / sum(weights) for w in weights), reverse=True)
        assert margin == pytest.approx(p[0] - p[1], abs=1e-5)
        assert entropy == pytest.approx(-sum(x * math.log(x) for x in p if x > 0), abs=1e-4)


def test_margin_and_entropy_leave_the_suppressed_id_out() -> None:
    logits = torch.tensor([[1.0, 50.0, 1.0, -torch.inf]])
    found = decode_logits(logits, torch.zeros(1), torch.zeros(1).long(), suppress=1)
    assert_close([found.margin, found.entropy], [torch.zeros(1), torch.tensor([math.log(2)])])


def test_greedy_ties_take_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    token, confidence, *_ = decode_logits(logits, torch.zeros(2), torch.zeros(2).long())
    assert token.tolist() == [1, 0]
    assert_close(confidence[1].item(), 0.25)


def test_confidence_of_a_draw_is_its_probability_at_that_temperature() -> None:
    logits = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    heat = torch.linspace(0.2, 3, 40)
    token, confidence, *_ = decode_logits(logits, heat, torch.arange(40))
    probabilities = (logits / heat[:, None]).softmax(-1)
    assert_close(confidence, probabilities.gather(1, token[:, None]).squeeze(1))


def test_the_suppressed_id_is_never_produced_and_carries_no_probability() -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0]]).expand(200, 3)
    for heat in (0.0, 1.0):
        token, confidence, *_ = decode_logits(logits, torch.full((200,), heat), torch.arange(200), suppress=1)
        without = torch.tensor([0.0, 1.0]).softmax(0)
        assert set(token.tolist()) <= {0, 2}
        assert_close(confidence, without[token.div(2, rounding_mode="floor")])
    assert logits[0, 1] == 9.0


def test_a_draw_depends_on_logits_temperature_and_seed_alone() -> None:
    h, weight, bias, masked = problem()
    heat, seed = torch.full((23,), 1.0), torch.randint(-(2**63), 2**63 - 1, (23,))
    token, *_ = lm_head(h, weight, bias, masked, heat, seed, 4, -1)
    order = torch.randperm(23)
    shuffled, *_ = lm_head(h[order], weight, bias, masked[order], heat[order], seed[order], 9, -1)
    assert shuffled.equal(token[order])
    logits = torch.zeros(1000, 64)
    draws, *_ = decode_logits(logits, torch.ones(1000), torch.arange(1000))
    assert draws.equal(decode_logits(logits, torch.ones(1000), torch.arange(1000))[0])
    assert len(set(draws.tolist())) == 64
    assert len(set(decode_logits(logits, torch.ones(1000), torch.full((1000,), 3))[0].tolist())) == 1


def test_greedy_and_drawn_rows_mix() -> None:
    logits = torch.randn(50, 20, generator=torch.Generator().manual_seed(2))
    heat = torch.arange(50) % 2 * 1.5
    token, confidence, *_ = decode_logits(logits, heat, torch.arange(50))
    cold = heat == 0
    assert token[cold].equal(logits[cold].argmax(-1))
    alone = decode_logits(logits[~cold], heat[~cold], torch.arange(50)[~cold])
    assert token[~cold].equal(alone.token)
    assert confidence[~cold].equal(alone.confidence)


@pytest.mark.parametrize("stride", [1, 2**20, 2**32, 3**35])
def test_draws_follow_the_probabilities(stride: int) -> None:
    """Chi-square over 20,000 seeds that differ in low or high bits only."""
    n, logits = 20_000, torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -3.0])
    token, *_ = decode_logits(logits.expand(n, 6), torch.full((n,), 1.3), torch.arange(n) * stride)
    expected = (logits / 1.3).softmax(0) * n
    chi = ((torch.bincount(token, minlength=6) - expected).square() / expected).sum()
    assert chi < 20.5  # 5 degrees of freedom, p = 0.001


def test_noise_is_gumbel_and_independent_across_seeds_and_ids() -> None:
    noise = gumbel(torch.arange(64), 4000)
    assert noise.dtype == torch.float32
    assert noise.isfinite().all()
    assert_close(noise.mean().item(), 0.57722, rtol=0, atol=0.02)
    assert_close(noise.var().item(), torch.pi**2 / 6, rtol=0.02, atol=0)
    correlation = torch.corrcoef(noise) - torch.eye(64)
    assert correlation.abs().max() < 0.08  # 4.9 standard errors of 4,000 pairs
    assert torch.corrcoef(noise[:, :64].T.contiguous()).fill_diagonal_(0).abs().max() < 0.62
    assert len(noise.unique()) > 0.99 * noise.numel()


def test_noise_is_the_integer_hash_of_seed_and_id() -> None:
    """In unbounded integers and float64: nothing overflows, and no device can do otherwise."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x21F0AAAD % 2**32
        x = (x ^ (x >> 15)) * 0x735A2D97 % 2**32
        return x ^ (x >> 15)

    def noise(seed: int, token: int) -> float:
        key = mix(mix(seed % 2**32) ^ (seed >> 32) % 2**32)
        bits = mix((mix(token ^ key) + mix(key ^ 0x5BD1E995)) % 2**32)
        return -math.log(-math.log1p(-min((bits + 0.5) / 2**32, 1 - 2**-24)))

    seeds = [0, 1, -1, 2**31, 2**32, 2**63 - 1, -(2**63), 123456789123456789]
    want = [[noise(seed, token) for token in range(500)] for seed in seeds]
    assert_close(gumbel(torch.tensor(seeds), 500), torch.tensor(want), rtol=1e-5, atol=1e-5)


def test_max_num_logits_must_be_positive() -> None:
    h, weight, bias, masked = problem()
    with pytest.raises(InputError, match="max_num_logits must be at least 1 row, got 0"):
        lm_head(h, weight, bias, masked, torch.zeros(23), torch.arange(23), 0, -1)


# -- over ranks ----------------------------------------------------------------------------------------------------


def over_ranks(
    world: int,
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: tuple[Tensor, ...],
    suppress: int,
    current: Tensor,
) -> list[Tensor]:
    """The results of so many ranks, of which each has a part of the ids, filled up with ids that would win."""
    vocab = len(weight)
    each = -(-vocab // world)
    high = torch.full((world * each - vocab,), 1e4)
    weight = torch.cat([weight, torch.zeros(len(high), weight.shape[1])])
    bias = torch.cat([torch.zeros(vocab) if bias is None else bias, high])
    calls = [
        (h, part, offset, *rows, 5, suppress, False, torch.tensor([rank * each]), vocab)
        for rank, (part, offset) in enumerate(zip(weight.split(each), bias.split(each), strict=True))
    ]
    several = [[torch.ops.dgraph.lm_head_part(*call, *stands) for call in calls] for stands in ((), (current,))]
    assert all(part.shape == (len(h), 8) for numbers in several for part in numbers)
    without, found = (list(OPS["lm_head_combine"].reference(torch.cat(numbers, dim=1))) for numbers in several)
    assert not without.pop().any(), "no token stands anywhere"
    assert all(map(torch.equal, without, found[:4]))
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 7, 60])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_ranks_decide_what_one_does(world: int, temperature: float) -> None:
    """Draws among them: their noise is that of an id in the whole vocabulary."""
    h, weight, bias, masked = problem()
    bias[7] = 100.0
    rows = masked, temperature * (torch.arange(23) % 3 > 0), torch.arange(23) * 7919
    stands = torch.arange(-1, 22) * 3 % len(weight)
    stands[0] = -1
    state = torch.zeros(23, 1, *kept_rows((CURRENT,), len(weight)).element[-1:])
    more = False, torch.arange(23), stands, state, declare((CURRENT,))
    want = torch.ops.dgraph.lm_head_measured(h, weight, bias, *rows, 1000, 7, *more)
    p = F.linear(h, weight, bias).index_fill(1, torch.tensor([7]), -torch.inf)
    p = (p / torch.where(rows[1] > 0, rows[1], 1.0)[:, None]).softmax(-1)
    there = masked & (stands >= 0)
    assert_close(want[4][there, 0], p[there, stands[there]], rtol=1e-4, atol=1e-6)
    assert not want[4][~there].any()
    got = over_ranks(world, h, weight, bias, rows, 7, stands)
    assert got[0].equal(want[0])
    assert not (got[0] == 7).any()
    assert_close(got[1:], list(want[1:]), rtol=1e-5, atol=1e-5)


def test_ranks_break_ties_by_the_lowest_id() -> None:
    h, zero = torch.randn(3, 6), torch.zeros(3)
    weight = torch.randn(1, 6).expand(8, 6).contiguous()
    rows = torch.ones(3).bool(), zero, zero.long()
    token, confidence, margin, _, current = over_ranks(4, h, weight, None, rows, 0, torch.tensor([5, 0, 8]))
    assert_close(current[:, 0], torch.tensor([1 / 7, 0, 0]))
    assert token.tolist() == [1, 1, 1]
    assert_close(confidence, torch.full((3,), 1 / 7))
    assert_close(margin, zero)

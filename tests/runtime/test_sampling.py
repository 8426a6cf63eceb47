"""Logits to tokens: every link of the chain against its formula, and draws that depend on what is drawn alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from dgraph.errors import InputError
from dgraph.ops.lm_head.lm_head import RowDecisions, decode_logits
from dgraph.runtime.sampling.random_numbers import row_seeds, sequence_keys
from dgraph.runtime.sampling.sampler import Credit, RowContext, Sampler, guided, kept_ids, without_prompt
from dgraph.runtime.sampling.stops import Trimmed, first_stop, trim

VOCAB, BLOCK, MASK = 11, 4, 10


def context(b: int = 2, step: int = 0, key: int = 0, **changes: Any) -> RowContext:
    """All rows of the second block of b sequences."""
    sequence = torch.arange(b).repeat_interleave(BLOCK)
    column = torch.arange(BLOCK).repeat(b)
    position = BLOCK + column
    keys = sequence_keys(key, torch.arange(b))
    fields = {
        "sequence": sequence,
        "position": position,
        "column": column,
        "masked": torch.ones(b * BLOCK, dtype=torch.bool),
        "forwards": torch.full((b * BLOCK,), step),
        "seed": row_seeds(keys[:, sequence], position, torch.full_like(position, step)),
        "tokens": torch.arange(b * 2 * BLOCK).view(b, 2 * BLOCK) % VOCAB,
        "block": BLOCK,
    }
    return RowContext(**fields | changes)


def draw(b: int = 2, seed: int = 0) -> Tensor:
    return 2 * torch.randn(b * BLOCK, VOCAB, generator=torch.Generator().manual_seed(seed))


def decode(logits: Tensor, where: RowContext | None = None, **options: Any) -> RowDecisions:
    return Sampler(**options).begin(MASK).decode(logits, where or context(len(logits) // BLOCK))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_defaults_do_what_the_lm_head_does(temperature: float) -> None:
    logits, where = draw(), context()
    want = decode_logits(logits, torch.full((8,), temperature), where.seed, MASK)
    assert_close(decode(logits, where, temperature=temperature), want, rtol=0, atol=0)
    assert not Sampler(temperature=temperature).needs_logits
    assert Sampler(temperature=temperature, top_k=1).needs_logits


def filtered(row: list[float], temperature: float, top_p: float, top_k: int) -> list[float]:
    """Probabilities after temperature, top-p and top-k, in plain Python."""
    scaled = [x / (temperature or 1) for x in row]
    weight = [math.exp(x) for x in scaled]
    order = sorted(range(len(row)), key=lambda i: (-scaled[i], i))
    kept, total = [], 0.0
    for i in order:
        if total > top_p and top_p < 1:
            break
        kept.append(i)
        total += weight[i] / sum(weight)
    if top_k:
        smallest = scaled[kept[min(top_k, len(kept)) - 1]]
        kept = [i for i in kept if scaled[i] >= smallest]
    return [weight[i] / sum(weight[j] for j in kept) if i in kept else 0.0 for i in range(len(row))]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.7])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.5, 0), (0.95, 0), (1.0, 3), (0.9, 2), (1e-6, 0), (0.99, 99)])
def test_top_p_and_top_k_are_those_of_dream(temperature: float, top_p: float, top_k: int) -> None:
    logits = draw(8)
    logits[0, :4] = 3.0  # ties
    options = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    found = decode(logits, **options)
    logits[:, MASK] = -math.inf
    for row, token, confidence, margin, entropy in zip(logits.tolist(), *(x.tolist() for x in found), strict=True):
        p = filtered(row, temperature, top_p, top_k)
        assert p[token] > 0
        assert temperature or token == row.index(max(row))
        assert confidence == pytest.approx(p[token], abs=1e-5)
        first, second = sorted(p, reverse=True)[:2]
        assert margin == pytest.approx(first - second, abs=1e-5)
        assert entropy == pytest.approx(-sum(x * math.log(x) for x in p if x), abs=1e-4)


def test_ties_at_the_border_of_top_k_stay() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    assert kept_ids(logits, 1.0, 2).tolist() == [[True, True, True, False]]
    assert kept_ids(torch.zeros(1, 4), 0.5, 0).tolist() == [[True, True, True, False]]  # 0.5 is not above 0.5


def test_draws_depend_on_seed_prompt_position_and_step_alone() -> None:
    logits = torch.zeros(40 * BLOCK, VOCAB)
    hot = {"temperature": 1.0}
    first = decode(logits, context(40), **hot).token
    assert first.equal(decode(logits, context(40), **hot).token)
    assert decode(logits[:8], context(2), **hot).token.equal(first[:8])  # not on the batch
    assert not decode(logits, context(40, step=1), **hot).token.equal(first)
    assert not decode(logits, context(40, key=1), **hot).token.equal(first)
    assert set(first.tolist()) == set(range(MASK))


def test_lladas_gumbel_form_has_the_law_of_the_softmax_at_that_temperature() -> None:
    """argmax(exp(z) / (-log u)^T) in float64, and our draws: both against softmax(z / T)."""
    n, heat, z = 20_000, 1.6, torch.tensor([1.5, 0.0, -1.0, 0.7])
    u = torch.rand(n, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    theirs = (z.double().exp() / (-u.log()) ** heat).argmax(-1)
    ours = decode_logits(z.expand(n, 4), torch.full((n,), heat), torch.arange(n)).token
    expected = (z / heat).softmax(0) * n
    for token in (theirs, ours):
        chi = ((torch.bincount(token, minlength=4) - expected).square() / expected).sum()
        assert chi < 16.3  # 3 degrees of freedom, p = 0.001


def test_rows_may_have_temperatures_of_their_own() -> None:
    logits, where = draw(), context(temperature=torch.tensor([0.0, 2.0] * 4))
    found = decode(logits, where)
    assert found.token[::2].equal(decode(logits).token[::2])
    assert found.token[1::2].equal(decode(logits, temperature=2.0).token[1::2])


def test_guidance() -> None:
    z, u = draw(seed=1), draw(seed=2)
    assert_close(guided(z, u, 0.0), z)
    want = decode(u + 2.5 * (z - u))
    assert_close(decode(z, context(unconditional=u), cfg_scale=1.5), want)
    with pytest.raises(InputError, match=r"cfg_scale 1.5 needs logits without the prompt, got none"):
        decode(z, cfg_scale=1.5)
    tokens = without_prompt(torch.arange(8).view(2, 4), torch.tensor([1, 3]), MASK)
    assert tokens.tolist() == [[MASK, 1, 2, 3], [MASK, MASK, MASK, 7]]


def test_suppressed_ids_are_never_produced() -> None:
    logits = torch.zeros(40 * BLOCK, VOCAB)
    logits[:, 3], logits[:, MASK] = 20.0, 40.0
    for heat in (0.0, 1.0):
        found = decode(logits, temperature=heat, suppress=(3, 4))
        assert set(found.token.tolist()) <= set(range(MASK)) - {3, 4}
        assert_close(found.confidence, torch.full((160,), 1 / 8))


def test_distrusted_ids_come_last_and_take_no_share() -> None:
    logits = torch.zeros(BLOCK, VOCAB)
    logits[0, 3], logits[1, 5], logits[:, MASK] = 9.0, 2.0, 9.0
    for options in ({}, {"confidence_of": "logits"}):
        found = decode(logits, context(1), distrust=(3, 4), **options)
        assert found.token.tolist() == [3, 5, 0, 0]
        assert_close(found.confidence, torch.tensor([0.0, math.exp(2) / (math.exp(2) + 7), 1 / 8, 1 / 8]))
        assert_close(found.entropy, decode(logits, context(1)).entropy)
    alone = decode(logits, context(1), distrust=(3,), top_k=1)
    assert alone.confidence[0] == 0  # nothing else is left, which is no reason for NaN


def test_confidence_of_the_logits_knows_no_temperature() -> None:
    logits = draw()
    found = decode(logits, temperature=2.0, top_k=4, confidence_of="logits")
    assert found.token.equal(decode(logits, temperature=2.0, top_k=4).token)
    logits[:, MASK] = -math.inf
    assert_close(found.confidence, logits.softmax(-1).gather(1, found.token[:, None])[:, 0])


def test_the_penalty_is_on_the_token_in_front() -> None:
    logits = draw()
    where = context(position=torch.tensor([0, 1, 2, 3] * 2))
    want = logits.clone()
    for row, (sequence, position) in enumerate(zip(where.sequence.tolist(), where.position.tolist(), strict=True)):
        if position > 0:
            want[row, where.tokens[sequence, position - 1]] -= 1.5
    before = logits.clone()
    assert_close(decode(logits, where, penalty_lambda=1.5), decode(want, where))
    assert logits.equal(before)


def test_processors_run_in_order_and_see_where_they_are() -> None:
    seen: list[RowContext] = []

    def shift(logits: Tensor, where: RowContext) -> Tensor:
        seen.append(where)
        return logits + torch.nn.functional.one_hot(where.column, VOCAB) * 100

    def flip(logits: Tensor, where: RowContext) -> Tensor:
        return -logits

    logits, where = draw(), context()
    assert decode(logits, where, processors=(shift,)).token.tolist() == [0, 1, 2, 3] * 2
    found = decode(logits, where, processors=(shift, flip))
    want = decode(-(logits + torch.nn.functional.one_hot(where.column, VOCAB) * 100), where)
    assert_close(found, want)
    assert all(s is where for s in seen)
    with pytest.raises(InputError, match=r"must return logits \[8, 11\], got \[8, 10\]"):
        decode(logits, where, processors=(lambda z, where: z[:, 1:],))
    with pytest.raises(InputError, match=r"must return logits \[8, 11\], got NoneType"):
        decode(logits, where, processors=(lambda z, where: None,))


@pytest.mark.parametrize("seed", range(5))
def test_credit_against_its_formula(seed: int) -> None:
    """Two sequences over some steps and blocks, one of which rests in between."""
    rng, credit = random.Random(seed), Credit(0.8, 0.2, 0.7)
    decoder = Sampler(credit=credit).begin(MASK)
    amount = [[[0.0] * VOCAB for _ in range(BLOCK)] for _ in range(2)]
    forwards = [0, 0]
    for number in range(12):
        present = [s for s in range(2) if rng.random() < 0.8] or [0]
        for s in present:
            if rng.random() < 0.25:
                forwards[s] = 0  # a new block
        rows = [(s, c) for s in present for c in range(BLOCK) if rng.random() < 0.9]
        if not rows:
            continue
        present = sorted({s for s, _ in rows})
        masked = [rng.random() < 0.7 for _ in rows]
        sequence, column = torch.tensor(rows).T
        logits = draw(2, number)[: len(rows)]
        where = context(
            sequence=sequence, column=column, position=column, masked=torch.tensor(masked),
            forwards=torch.tensor([forwards[s] for s in sequence.tolist()]), seed=torch.zeros(len(rows)).long(),
        )  # fmt: skip
        clean = logits.clone()
        clean[:, MASK] = -math.inf
        for s in present:
            factor = credit.beta if forwards[s] else 0.0
            amount[s] = [[x * factor for x in row] for row in amount[s]]
            forwards[s] += 1
        want = clean.clone()
        for i, ((s, c), m) in enumerate(zip(rows, masked, strict=True)):
            p = clean[i].softmax(0).tolist()
            if m:
                amount[s][c][p.index(max(p))] += max(p) ** credit.gamma
            want[i] += credit.alpha * torch.tensor(amount[s][c]).log1p()
        assert_close(decoder.decode(logits, where), decode(want, where), rtol=1e-4, atol=1e-5)


def test_credit_brings_the_steady_leader_ahead() -> None:
    decoder = Sampler(credit=Credit()).begin(MASK)
    steady = torch.zeros(BLOCK, VOCAB)
    steady[:, 2] = 2.0
    confidences = [decoder.decode(steady, context(1, step=i)).confidence[0].item() for i in range(6)]
    assert confidences == sorted(confidences)
    assert decoder.decode(steady, context(1)).confidence[0].item() == pytest.approx(confidences[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "Sampler: temperature is a finite number, at least 0, got -1"),
        ({"temperature": math.inf}, "Sampler: temperature is a finite number, at least 0, got inf"),
        ({"top_p": 0}, r"Sampler: top_p is a probability in \(0, 1\], got 0"),
        ({"top_p": True}, "Sampler: top_p is a probability"),
        ({"top_k": -1}, "Sampler: top_k is a number of ids, 0 for all, got -1"),
        ({"top_k": 2.0}, "Sampler: top_k is a number of ids"),
        ({"suppress": [1]}, r"Sampler: suppress is a tuple of token ids, got \[1\]"),
        ({"distrust": (-1,)}, r"Sampler: distrust is a tuple of token ids, got \(-1,\)"),
        ({"confidence_of": "p"}, "Sampler: confidence_of is one of sampled, logits, got 'p'"),
        ({"penalty_lambda": math.nan}, "Sampler: penalty_lambda is a finite number, at least 0, got nan"),
        ({"cfg_scale": -0.5}, "Sampler: cfg_scale is a finite number, at least 0, got -0.5"),
        ({"credit": 0.8}, "Sampler: credit is a Credit or None, got 0.8"),
        ({"processors": (3,)}, r"Sampler: processors is a tuple of callables, got \(3,\)"),
    ],
)
def test_what_a_sampler_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Sampler(**options)


@pytest.mark.parametrize(("field", "value"), [("beta", 1.1), ("gamma", -1), ("alpha", math.inf), ("alpha", "1")])
def test_what_credit_refuses(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"Credit: {field} is a .*, got {value!r}"):
        Credit(**{field: value})


def test_ids_outside_the_vocabulary_are_refused() -> None:
    for name in ("suppress", "distrust"):
        with pytest.raises(InputError, match=f"Sampler: {name} holds id 11, but the vocabulary has 11 ids"):
            decode(draw(), **{name: (2, VOCAB)})


def test_logits_in_bf16_are_decided_in_fp32() -> None:
    found = decode(draw().bfloat16(), top_p=0.9)
    assert [x.dtype for x in found] == [torch.int64] + [torch.float32] * 3
    assert [len(x) for x in decode(torch.zeros(0, VOCAB), context(0))] == [0] * 4


# -- stop strings ------------------------------------------------------------------------------------------------


class Words:
    """One id per word, in order."""

    def __init__(self, *words: str):
        self.words = words

    def decode(self, ids: Sequence[int], /) -> str:
        return "".join(self.words[i] for i in ids)


def test_the_first_stop_string_cuts() -> None:
    assert first_stop("one two one", ["two", "one"]) == (0, "one")
    assert first_stop("abc", ["b", "bc"]) == (1, "bc")
    assert first_stop("abc", ["x"]) is None
    assert first_stop("abc", []) is None


def test_a_response_is_trimmed_at_a_stop_string() -> None:
    words = Words("Hello", " wor", "ld", "\n\nQ", ":", " more")
    ids = [0, 1, 2, 3, 4, 5]
    assert trim(words, ids, ["\n\nQ:"]) == Trimmed("Hello world", [0, 1, 2], "\n\nQ:")
    assert trim(words, ids, ["rld", "Q"]) == Trimmed("Hello wo", [0], "rld")  # across tokens
    assert trim(words, ids, ["Hello"]) == Trimmed("", [], "Hello")
    assert trim(words, ids, ["re"]) == Trimmed("Hello world\n\nQ: mo", [0, 1, 2, 3, 4], "re")
    assert trim(words, ids, ["none"]) == Trimmed("Hello world\n\nQ: more", ids)
    assert trim(words, [], ["x"]) == Trimmed("", [])


@pytest.mark.parametrize(
    ("stops", "message"), [("x", "are a list, got the string 'x'"), ([""], "got ''"), ([3], "got 3")]
)
def test_what_no_stop_string_is(stops: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        trim(Words("a"), [0], stops)

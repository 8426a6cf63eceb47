"""dgraph::vocabulary_attention: what logits, softmax and product give, over any chunks of ids and any ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from dgraph.errors import InputError
from dgraph.ops import OPS
from dgraph.ops.lm_head.lm_head import decode_logits
from dgraph.ops.vocabulary import vocabulary_part
from tests.ops.triton.vocabularies import embedding

attention = torch.ops.dgraph.vocabulary_attention


def literal(args: tuple[Any, ...]) -> list[Tensor]:
    """In float64 with all logits at once; the draw by dgraph::lm_head's rule on what the softcap leaves."""
    h, weight, temperature, seed, cu_rows, softcap, suppress = args
    live = int(cu_rows[-1])
    logits = h[:live].double() @ weight.double().T
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    heat = temperature[:live]
    drawn = decode_logits(logits, heat, seed[:live], suppress)
    certain = decode_logits(logits, heat * 0, seed[:live], suppress)
    if suppress >= 0:
        logits[:, suppress] = -torch.inf
    p = (logits / torch.where(heat > 0, heat, 1.0)[:, None]).softmax(-1)
    confidence = p.gather(1, certain.token[:, None])[:, 0]
    return [certain.token, confidence, drawn.token, drawn.entropy, p @ weight.double()]


@pytest.mark.parametrize("ids", [64, 333, 700, 4096])
@pytest.mark.parametrize(("softcap", "suppress"), [(None, -1), (5.0, 11), (2.0, 699)])
def test_it_is_logits_softmax_and_product(
    monkeypatch: pytest.MonkeyPatch, ids: int, softcap: float | None, suppress: int
) -> None:
    monkeypatch.setattr(vocabulary_part, "IDS", ids)
    args = embedding(30, 23, softcap=softcap, suppress=suppress)
    got = attention(*args)
    for found, wanted in zip(got, literal(args), strict=True):
        assert_close(found[:23], wanted.to(found.dtype), rtol=1e-5, atol=1e-5)
    for found, filler in zip(got, (-1, -torch.inf, -1, torch.inf, 0), strict=True):
        assert (found[23:] == filler).all()
    cold = args[2][:23] == 0
    assert got[0][:23][cold].equal(got[2][:23][cold])
    assert not got[0][:23][~cold].equal(got[2][:23][~cold])


def test_without_a_softcap_it_decides_as_the_lm_head() -> None:
    h, weight, temperature, seed, cu_rows, *_ = embedding(40, 40, softcap=None)
    best, _, token, entropy, _ = attention(h, weight, temperature, seed, cu_rows, None, 7)
    rows = torch.ones(40, dtype=torch.bool), temperature, seed, 64, 7
    head = torch.ops.dgraph.lm_head(h, weight, None, *rows)
    assert token.equal(head[0])
    assert_close(entropy, head[3], rtol=1e-5, atol=1e-5)
    assert best.equal(torch.ops.dgraph.lm_head(h, weight, None, rows[0], temperature * 0, *rows[2:])[0])


def test_a_draw_depends_on_the_row_and_its_seed_alone() -> None:
    h, weight, temperature, seed, _, softcap, suppress = embedding(50, 50)
    whole = attention(h, weight, temperature, seed, torch.tensor([50]), softcap, suppress)
    order = torch.randperm(50)[:20]
    some = attention(h[order], weight, temperature[order], seed[order], torch.tensor([20]), softcap, suppress)
    for one, other in zip(some, whole, strict=True):
        assert_close(one, other[order], rtol=1e-5, atol=1e-5)


def test_ties_of_capped_logits_take_the_lowest_id_of_any_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary_part, "IDS", 4)
    weight = torch.tensor([[-1.0], [50.0], [90.0], [70.0], [60.0], [80.0]])
    args = torch.ones(1, 1), weight, torch.zeros(1), torch.zeros(1).long(), torch.tensor([1])
    assert attention(*args, 2.0, -1)[0].tolist() == [1]
    assert attention(*args, 2.0, 1)[0].tolist() == [2]
    assert attention(*args, None, -1)[0].tolist() == [2]


def test_the_soft_embedding_is_in_the_dtype_of_the_rows() -> None:
    args = embedding(9, 9)
    half = tuple(x.bfloat16() if isinstance(x, Tensor) and x.dim() == 2 else x for x in args)
    got, want = attention(*half), attention(*(x.float() if isinstance(x, Tensor) and x.dim() == 2 else x for x in half))
    assert [x.dtype for x in got] == [torch.int64, torch.float32, torch.int64, torch.float32, torch.bfloat16]
    assert got[0].equal(want[0])
    assert_close(got[4].float(), want[4], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("world", [1, 2, 3, 7, 60])
def test_ranks_decide_what_one_does(world: int) -> None:
    """Each has a part of the ids, the last of them filled up with ids that would win."""
    args = embedding(30, 23, vocab=50, suppress=7)
    h, weight, *rows = args
    each = -(-50 // world)
    filled = torch.cat([weight, 1e3 * torch.ones(world * each - 50, weight.shape[1])])
    parts = [
        torch.ops.dgraph.vocabulary_part(h, part, *rows, torch.tensor([rank * each]), 50)
        for rank, part in enumerate(filled.split(each))
    ]
    every = torch.cat([numbers for _, numbers in parts], dim=1)
    combine = OPS["vocabulary_combine"].reference
    found = [combine(every, numbers, context) for context, numbers in parts]
    want = attention(*args)
    for rank in found:
        assert rank[0].equal(want[0])
        assert rank[2].equal(want[2])
        assert_close([rank[1], rank[3]], [want[1], want[3]], rtol=1e-5, atol=1e-5)
    assert_close(torch.stack([rank[4] for rank in found]).sum(0), want[4], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(9, 39)}, r"h must be \[N, d\] and weight \[V, d\], got \[9, 39\] and \[700, 40\]"),
        ({2: torch.zeros(8)}, r"temperature and seed must be \[9\], one for each row of h, got \[8\] and \[9\]"),
        ({5: 0.0}, r"softcap must be None or above 0, got 0.0"),
        ({1: torch.zeros(1, 40).expand(2**24 + 1, 40)}, r"at most 16777216 ids, got 16777217; use dgraph::lm_head"),
    ],
)
def test_a_call_that_cannot_be(change: dict[int, Any], message: str) -> None:
    args = [change.get(i, value) for i, value in enumerate(embedding(9, 9))]
    with pytest.raises(InputError, match=message):
        attention(*args)

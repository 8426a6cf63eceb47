"""sparse_attention against a list of the keys that each row and head sees, and against the ops without packing."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from dgraph.errors import InputError
from dgraph.ops import OPS
from dgraph.ops.attention.sparse import DENSE, REPACK, REUSE, SELECT
from dgraph.ops.attention.sparse_draws import draw, in_pages
from dgraph.ops.draws import cu_rows_of, pad_rows, page_table_of, positions_of

NAMES = OPS["sparse_attention"].arguments[:19]  # without scales
op = torch.ops.dgraph.sparse_attention
packed_attention, paged_attention = torch.ops.dgraph.packed_attention, torch.ops.dgraph.paged_attention


def random_call(seed: int, actions: tuple[int, ...] = (REUSE, DENSE, SELECT, REPACK)) -> dict[str, Any]:
    """A ragged batch of the given actions."""
    rng = random.Random(seed)
    b, heads = rng.randint(1, 5), rng.choice([1, 2, 3])
    lows = [rng.choice([0, 3, 16, 29]) for _ in range(b)]
    rows = [rng.choice([0, 1, 4, 9, 17]) for _ in range(b)]
    args = draw(
        torch.Generator().manual_seed(seed),
        [rng.choice(actions) for _ in range(b)],
        rows,
        [(low, low + rng.choice([0, 1, 8, 40])) for low in lows],
        [[rng.choice([0, 1, 7, 20]) for _ in range(heads)] for _ in range(b)],
        [n + rng.choice([0, 0, 11]) for n in rows],
        page=rng.choice([1, 4, 7]),
        group=rng.choice([1, 2, 3]),
        padding=rng.choice([0, 3]),
    )
    return dict(zip(NAMES, args, strict=True))


def softmax_over(q: Tensor, pairs: list[tuple[Tensor, Tensor]], scale: float) -> Tensor:
    """One query [D] over a list of keys and values, in float64; zeros without any."""
    if not pairs:
        return torch.zeros(q.shape, dtype=torch.float64)
    keys, values = (torch.stack(part).double() for part in zip(*pairs, strict=True))
    return torch.softmax(keys @ q.double() * scale, 0) @ values


def pairs_of(call: dict[str, Any], s: int, i: int, head: int) -> list[tuple[Tensor, Tensor]]:
    """What row i of sequence s sees with a KV head, one key at a time."""
    limit = int(call["limit"][i])
    if int(call["action"][s]) in (DENSE, SELECT):
        rows = range(int(call["cu_keys"][s]), int(call["cu_keys"][s + 1]))
        return [(call["k"][j, head], call["v"][j, head]) for j in rows if int(call["key_positions"][j]) < limit]
    counts = call["pack_count"][s].tolist()
    begin = int(call["pack_start"][call["layer"], s]) + sum(counts[:head])
    pairs = [(call["k_pack"][e], call["v_pack"][e]) for e in range(begin, begin + counts[head])]
    low, high = call["window"][s].tolist()
    for p in range(low, min(high, limit)):
        slot = int(call["page_table"][s, p // call["k_cache"].shape[1]]), p % call["k_cache"].shape[1]
        pairs.append((call["k_cache"][slot][head], call["v_cache"][slot][head]))
    return pairs


@pytest.mark.parametrize("seed", range(12))
def test_every_row_and_head_against_the_list_of_its_keys(seed: int) -> None:
    call = random_call(seed)
    got = op(**call)
    group = call["q"].shape[1] // call["pack_count"].shape[1]
    starts = call["cu_rows"].tolist()
    for s, (start, end) in enumerate(itertools.pairwise(starts)):
        for i, h in itertools.product(range(start, end), range(got.shape[1])):
            want = softmax_over(call["q"][i, h], pairs_of(call, s, i, h // group), call["scale"])
            assert_close(got[i, h].double(), want, rtol=1e-5, atol=1e-5)
    assert not got[starts[-1] :].any()


@pytest.mark.parametrize("seed", range(8))
def test_entries_in_pages_give_what_they_give_packed(seed: int) -> None:
    """The same bits: wherever a vector lies, it is summed in the same order."""
    call = random_call(seed)
    assert_close(op(*in_pages(torch.Generator().manual_seed(seed), tuple(call.values()))), op(**call), rtol=0, atol=0)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_packing_everything_outside_of_the_window_is_paged_attention(share: float) -> None:
    """The order of the entries does not matter, nor how many positions the window leaves to them."""
    generator, page, heads, d = torch.Generator().manual_seed(5), 4, 2, 8
    counts, lengths = (6, 0, 3), (37, 20, 12)
    table, pages = page_table_of(lengths, page, generator)
    k_cache, v_cache = (torch.randn(pages, page, heads, d, generator=generator) for _ in range(2))
    q = torch.randn(sum(counts), 2 * heads, d, generator=generator)
    limit = torch.tensor(lengths).repeat_interleave(torch.tensor(counts)).int()
    window = torch.tensor([[int((1 - share) * n / 2), n - int((1 - share) * n / 2)] for n in lengths]).int()
    packed = [(q.new_zeros(d), q.new_zeros(d))]  # an entry of nobody
    start, cleared = [], table.clone()
    for s, length in enumerate(lengths):
        start.append(len(packed))
        low, high = window[s].tolist()
        outside = [p for p in range(length) if not low <= p < high]
        for head in range(heads):
            for i in torch.randperm(len(outside), generator=generator).tolist():
                slot = int(table[s, outside[i] // page]), outside[i] % page
                packed.append((k_cache[slot][head], v_cache[slot][head]))
        inside = range(low // page, -(-high // page))
        cleared[s] = torch.tensor([int(t) if i in inside else -1 for i, t in enumerate(table[s])])
    k_pack, v_pack = (torch.stack(part) for part in zip(*packed, strict=True))
    count = torch.tensor([[n - int(w[1] - w[0])] * heads for n, w in zip(lengths, window, strict=True)]).int()
    cu_rows, none = cu_rows_of(counts), q.new_zeros(0, heads, d)
    where = (none[:, 0, 0].long(), cu_rows, torch.zeros_like(cu_rows), limit, window, torch.zeros(3).int())
    packs = (k_pack, v_pack, count, torch.tensor([start]).int())
    got = op(q, none, none, k_cache, v_cache, cleared, *packs, *where, 0.3, 0, False)
    want = paged_attention(q, k_cache, v_cache, table, cu_rows, limit, 0.3)
    assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("action", [DENSE, SELECT])
def test_dense_sequences_give_the_bits_of_packed_attention(action: int) -> None:
    call = random_call(3) | {"dense": True}
    b = len(call["action"])
    counts = (5, 33, 0, 1, 12)[:b]
    q, k, v = (torch.randn(sum(counts), h, 8) for h in (call["q"].shape[1], *[call["k"].shape[1]] * 2))
    at, cu_rows = positions_of(counts, [0] * b), cu_rows_of(counts)
    limit = (at // 4 * 4 + 4).int()
    call |= {"q": q, "k": k, "v": v, "key_positions": at, "cu_rows": cu_rows, "cu_keys": cu_rows, "limit": limit}
    call["action"] = torch.full_like(call["action"], action)
    want = packed_attention(q, k, v, at, cu_rows, limit, call["scale"])
    assert_close(op(**call), want, rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(6))
def test_a_sequence_gives_the_same_bits_alone_and_in_a_batch(seed: int) -> None:
    call = random_call(seed + 50)
    got = op(**call)
    for s, (start, end) in enumerate(itertools.pairwise(call["cu_rows"].tolist())):
        keys = slice(*call["cu_keys"][s : s + 2].tolist())
        alone = call | {name: call[name][start:end] for name in ("q", "limit")}
        alone |= {name: call[name][keys] for name in ("k", "v", "key_positions")}
        alone |= {name: call[name][s : s + 1] for name in ("page_table", "pack_count", "window", "action")}
        alone |= {"pack_start": call["pack_start"][:, s : s + 1], "cu_rows": cu_rows_of([end - start])}
        alone["cu_keys"] = cu_rows_of([keys.stop - keys.start])
        assert_close(op(**alone), got[start:end], rtol=0, atol=0)


def test_without_dense_sequences_no_key_rows_are_needed() -> None:
    call = random_call(8, (REUSE, REPACK))
    assert not call["dense"]
    none = {name: call[name][:0] for name in ("k", "v", "key_positions")}
    none["cu_keys"] = torch.zeros_like(call["cu_keys"])
    assert_close(op(**(call | none)), op(**call), rtol=0, atol=0)


def test_a_limit_hides_positions_of_the_window_and_no_entries() -> None:
    args = draw(torch.Generator(), [REUSE], [4], [(10, 20)], [[5, 0]], sees_all=True)
    call = dict(zip(NAMES, args, strict=True))
    low = op(**(call | {"limit": torch.full_like(call["limit"], 3)}))
    assert_close(low, op(**(call | {"window": torch.tensor([[10, 10]]).int()})), rtol=1e-6, atol=1e-6)
    assert low[:, :2].abs().sum() > 0
    assert not low[:, 2:].any()


def test_errors_say_what_is_wrong() -> None:
    args = draw(torch.Generator(), [REUSE, SELECT], [4, 2], [(10, 20), (0, 2)], [[5, 3]] * 2, sees_all=True)
    call = dict(zip(NAMES, args, strict=True))
    with pytest.raises(InputError, match=r"sequence 1 is to see the key rows .* dense=False"):
        op(**(call | {"dense": False}))
    with pytest.raises(InputError, match="must be a multiple of KV heads, got 3, 2"):
        op(**(call | {"q": call["q"][:, :3]}))
    with pytest.raises(InputError, match=r"keep 8 entries from \d+ on, but the packed caches have 7"):
        op(**(call | {name: call[name][:7] for name in ("k_pack", "v_pack")}))
    with pytest.raises(InputError, match="sees position 19 in the cache, but the page table holds 4 pages of 4"):
        op(**(call | {"page_table": call["page_table"][:, :4]}))
    with pytest.raises(InputError, match="page_table entry is negative"):
        op(**(call | {"page_table": call["page_table"] * 0 - 1}))
    for wrong in ({"pack_index": torch.zeros(8).int()}, {"v_pack": None}, {"k_pack": None, "v_pack": None}):
        with pytest.raises(InputError, match="are either packed, k_pack and v_pack, or positions in the cache"):
            op(**(call | wrong))
    paged = list(in_pages(torch.Generator(), args))
    with pytest.raises(InputError, match=r"keep 8 entries from \d+ on, but the packed caches have 7"):
        op(*paged[:-1], paged[-1][:7])
    with pytest.raises(InputError, match=f"sees position {1 << 30} in the cache, but the page table holds"):
        op(*paged[:-1], torch.full_like(paged[-1], 1 << 30))
    op(**(call | {"q": pad_rows(call["q"], 2), "limit": pad_rows(call["limit"], 2)}))

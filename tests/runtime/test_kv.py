"""Pages: who owns them, what growing keeps, what comes back."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from torch import Tensor

from dgraph.errors import DgraphError, InputError
from dgraph.ops.kv.scales import by_head
from dgraph.runtime import KVStore
from dgraph.runtime.kv.store import SPARE, check_page_size
from dgraph.types.shapes import InputSpec
from tests.runtime.fake import caches, fake_spec


def store(page_size: int = 4, layers: int = 2) -> KVStore:
    return KVStore(caches(*[(3, 5)] * layers), page_size=page_size)


def gather(kv: KVStore, sequence: int, *span: int, first: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each layer."""
    tokens = span[0] if span else None
    begin = span[1] if len(span) > 1 else first
    names = [name for name in kv.tensors() if name[0] == "k"]
    return [
        (kv.gather(name, sequence, tokens, begin), kv.gather(f"v{name[1:]}", sequence, tokens, begin)) for name in names
    ]


def fill(kv: KVStore, sequence: int, tokens: int, value: float) -> None:
    """Write `value + position` into every layer through the page table."""
    table = kv.page_table([sequence])[0].long()
    positions = torch.arange(tokens)
    page, slot = table[positions // kv.page_size], positions % kv.page_size
    for layer, cache in enumerate(kv.tensors().values()):
        cache[page, slot] = (value + layer / 8 + positions)[:, None, None]


def check(kv: KVStore, sequence: int, tokens: int, value: float) -> None:
    layers = gather(kv, sequence, tokens)
    flat = [t for pair in layers for t in pair]
    for layer, cache in enumerate(flat):
        assert cache.shape == (tokens, 3, 5)
        assert cache.equal((value + layer / 8 + torch.arange(tokens))[:, None, None].expand(-1, 3, 5))


def test_pages_are_disjoint_and_come_back() -> None:
    rng, kv = random.Random(0), store()
    live: dict[int, int] = {}
    most = 0
    for _ in range(200):
        if live and rng.random() < 0.6:
            handle = rng.choice(list(live))
            kv.free(handle)
            del live[handle]
        else:
            counts = [rng.randint(1, 30) for _ in range(rng.randint(1, 3))]
            for handle, tokens in zip(kv.allocate(counts), counts, strict=True):
                live[handle] = tokens
                fill(kv, handle, tokens, handle * 1000)
        table = kv.page_table(list(live))
        owned = table[table >= 0].tolist()
        assert len(owned) == len(set(owned)) == kv.pages - kv.free_pages
        most = max(most, len(owned))
        assert sum(map(kv.pages_for, live.values())) == len(owned)
        for handle, tokens in live.items():
            check(kv, handle, tokens, handle * 1000)
    for handle in live:
        kv.free(handle)
    assert kv.free_pages == kv.pages
    assert most <= kv.pages <= most + most // SPARE  # freed pages are used again before new ones are made


def test_it_grows_by_what_is_missing_and_keeps_what_is_there() -> None:
    kv = store(page_size=2)
    assert (kv.pages, kv.bytes) == (0, 0)
    (first,) = kv.allocate([5])
    assert (kv.pages, kv.free_pages) == (3, 0)
    assert kv.bytes == 2 * 2 * 3 * 2 * 3 * 5 * 4
    fill(kv, first, 5, 7.0)
    second, third = kv.allocate([2, 3])
    assert kv.pages == 6
    assert kv.page_table([third, first, second]).tolist() == [[4, 5, -1], [0, 1, 2], [3, -1, -1]]
    check(kv, first, 5, 7.0)
    assert list(kv.tensors()) == ["k_cache_0", "v_cache_0", "k_cache_1", "v_cache_1"]
    assert kv.tensors()["v_cache_1"].shape == (6, 2, 3, 5)
    kv.free(first)
    before = kv.tensors()["k_cache_0"]
    kv.allocate([6])
    assert kv.tensors()["k_cache_0"] is before  # nothing moves while pages are free
    assert kv.page_table([]).shape == (0, 0)


def test_a_pool_that_may_grow_has_room_for_a_few_more() -> None:
    """So that the batch after the first, which is of another size by a few pages, finds the caches that there are."""
    kv = store(page_size=2)
    for pages, made in ((64, 66), (66, 66), (67, 69)):
        (handle,) = kv.allocate([2 * pages])
        assert (kv.pages, kv.free_pages) == (made, made - pages)
        kv.free(handle)
    kv.unlimited()
    kv.limit = 70
    (handle,) = kv.allocate([2 * 70])
    assert kv.pages == 70


def test_positions_before_the_first_have_no_pages() -> None:
    kv = store()
    whole, late, none = kv.allocate([6, 14, 8], first=[0, 9, 8])
    assert (kv.pages, kv.free_pages) == (4, 0)  # 2 for [0, 6), 2 for [9, 14) with what shares a page, none for [8, 8)
    assert kv.page_table([late, whole, none]).tolist() == [[-1, -1, 2, 3], [0, 1, -1, -1], [-1, -1, -1, -1]]
    table = kv.page_table([late])[0].long()
    for layer, cache in enumerate(kv.tensors().values()):
        for p in range(8, 14):
            cache[table[p // 4], p % 4] = layer / 8 + p
    flat = [t for pair in gather(kv, late, 14, first=9) for t in pair]
    for layer, cache in enumerate(flat):
        assert cache.shape == (5, 3, 5)
        assert cache.equal((layer / 8 + torch.arange(9, 14))[:, None, None].expand(-1, 3, 5))
    assert [k.shape[0] for k, _ in gather(kv, late, first=8)] == [8, 8]
    for first in (0, 7):
        with pytest.raises(DgraphError, match=f"sequence {late} has no pages for position {first}; ask for later"):
            gather(kv, late, 14, first)
    kv.free(late)
    assert kv.free_pages == 2
    kv.free(none)
    assert kv.free_pages == 2
    assert kv.page_table(kv.allocate([8])).tolist() == [[2, 3]]  # what it gave back, in order
    assert kv.pages == 4
    kv.free(whole)
    assert sorted(kv.page_table(kv.allocate([12], first=[5])).flatten().tolist()) == [-1, 0, 1]


def test_pages_before_a_position_come_back() -> None:
    """Whole pages only, and each of them once."""
    kv = store()
    first, second = kv.allocate([14, 6])
    fill(kv, first, 14, 1.0)
    fill(kv, second, 6, 500.0)
    kv.release(first, 3)
    assert kv.free_pages == 0
    kv.release(first, 9)
    kv.release(first, 9)
    assert (kv.pages, kv.free_pages) == (6, 2)
    assert kv.page_table([first, second]).tolist() == [[-1, -1, 2, 3], [4, 5, -1, -1]]
    check(kv, second, 6, 500.0)
    for layer, (k, v) in enumerate(gather(kv, first, 14, first=8)):
        for kind, cache in enumerate((k, v)):
            assert cache.equal((1.0 + (2 * layer + kind) / 8 + torch.arange(8, 14))[:, None, None].expand(-1, 3, 5))
    with pytest.raises(DgraphError, match=f"sequence {first} has no pages for position 0; ask for later"):
        gather(kv, first, 14)
    (third,) = kv.allocate([8])
    assert sorted(kv.page_table([third])[0].tolist()) == [0, 1]
    fill(kv, third, 8, 900.0)
    check(kv, second, 6, 500.0)
    kv.release(first, 99)
    assert kv.free_pages == 2
    for handle in (first, second, third):
        kv.free(handle)
    assert kv.free_pages == kv.pages == 6
    assert len(set(kv.page_table(kv.allocate([24]))[0].tolist())) == 6
    with pytest.raises(DgraphError, match="sequence 0 is not allocated"):
        kv.release(first, 4)


def test_unused_pages_are_finite() -> None:
    kv = store()
    (only,) = kv.allocate([9])
    assert all(torch.isfinite(t).all() for t in kv.tensors().values())
    assert gather(kv, only)[0][0].shape == (12, 3, 5)
    kept = gather(kv, only, 3)[1][1]
    fill(kv, only, 9, 1.0)
    assert kept.eq(0).all()  # a copy


def test_out_of_memory_leaves_the_store_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = store()
    (first,) = kv.allocate([8])
    fill(kv, first, 8, 3.0)
    real, calls = KVStore._empty, []

    def fails(self: KVStore, name: str, pages: int) -> torch.Tensor:
        calls.append(pages)
        if len(calls) == 3:  # in the second layer
            raise torch.OutOfMemoryError("no memory")
        return real(self, name, pages)

    monkeypatch.setattr(KVStore, "_empty", fails)
    with pytest.raises(torch.OutOfMemoryError):
        kv.allocate([100])
    monkeypatch.undo()
    assert (kv.pages, kv.free_pages) == (2, 0)
    check(kv, first, 8, 3.0)
    (second,) = kv.allocate([4])
    fill(kv, second, 4, 9.0)
    check(kv, first, 8, 3.0)
    assert {len(t) for t in kv.tensors().values()} == {3}


def test_page_sizes_fit_the_block() -> None:
    for size in (1, 2, 8, 16, 32, 64):
        assert check_page_size(fake_spec(16), size) == size
    assert check_page_size(fake_spec(16), None) == 16
    for size in (0, -16, 3, 24):
        with pytest.raises(InputError, match=r"multiple or a divisor of fake's block length 16, got"):
            check_page_size(fake_spec(16), size)
    with pytest.raises(InputError, match="a page holds at least 1 position, got page_size=0"):
        store(page_size=0)


def test_each_cache_has_its_own_shape_and_type() -> None:
    scores = InputSpec("score_cache_1", torch.float16, ("pages", "page"))
    kv = KVStore([*caches((3, 5), (1, 7), dtype=torch.bfloat16), scores], page_size=4)
    (only,) = kv.allocate([9])
    shapes = {name: (t.dtype, tuple(t.shape)) for name, t in kv.tensors().items()}
    for layer, size in enumerate(((3, 5), (1, 7))):
        assert shapes[f"k_cache_{layer}"] == shapes[f"v_cache_{layer}"] == (torch.bfloat16, (3, 4, *size))
    assert shapes["score_cache_1"] == (torch.float16, (3, 4))
    assert kv.bytes == 12 * (2 * 15 + 2 * 7 + 1) * 2
    assert kv.gather("v_cache_1", only, 9).shape == (9, 1, 7)
    assert kv.gather("score_cache_1", only, 9, 4).shape == (5,)
    with pytest.raises(DgraphError, match=r"there is no cache 'k_cache_2'; it has k_cache_0, v_cache_0"):
        kv.gather("k_cache_2", only)
    for shape in (("pages", "page", "heads"), ("pages", 4, 2)):
        wanted = r"which the runtime cannot allocate: expected \(\"pages\", \"page\", ...\)"
        with pytest.raises(InputError, match=wanted):
            KVStore([InputSpec("odd_cache_0", torch.float32, shape)], page_size=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_what_begins_with_a_response_is_reset_with_its_pages(dtype: torch.dtype) -> None:
    """Nothing of the sequence that had the pages before is left, and nothing of others is touched."""
    fresh = InputSpec("seen_cache_0", dtype, ("pages", "page", 2), reset="response", initial=-1.0)
    kv = KVStore([*caches((3, 5)), fresh], page_size=4)
    first, second = kv.allocate([8, 4])
    assert kv.tensors()["seen_cache_0"].float().eq(-1).all()
    for tensor in kv.tensors().values():
        tensor.fill_(7)
    kv.free(first)
    (third,) = kv.allocate([12])
    assert kv.gather("seen_cache_0", third).float().eq(-1).all()
    assert kv.gather("seen_cache_0", second).float().eq(7).all()
    assert kv.gather("k_cache_0", third, 8).eq(7).all()


def test_a_number_for_each_head_lies_beside_those_of_its_neighbours() -> None:
    spec = InputSpec("k_scale_0", torch.float32, ("pages", "page", 3), by_head=True)
    kv = KVStore([spec, *caches((3, 5))], page_size=4)
    first, second = kv.allocate([7, 2])
    table = kv.page_table([first])[0].long()
    positions = torch.arange(7)
    written = torch.randn(7, 3)
    kv.tensors()["k_scale_0"][table[positions // 4], positions % 4] = written
    kv.extend(second, 100)  # grows: the caches are others
    scale = kv.tensors()["k_scale_0"]
    assert scale.shape[1:] == (4, 3)
    assert scale.stride() == (12, 1, 4), "pages, positions, heads"
    assert kv.gather("k_scale_0", first, 7).equal(written)
    assert kv.tensors()["k_cache_0"].is_contiguous()
    assert by_head(torch.randn(2, 4, 3)).stride() == (12, 1, 4), "as kernels ask for them"


@pytest.mark.parametrize("shape", [("pages", "page", 3, 5), ("N", "page", 3), ("b",)])
def test_only_such_a_cache_lies_by_head(shape: tuple[int | str, ...]) -> None:
    with pytest.raises(InputError, match=r"input 'x': by_head is for a paged cache of one number for each head"):
        InputSpec("x", torch.float32, shape, by_head=True)


def test_misuse_is_named() -> None:
    kv = store()
    (only,) = kv.allocate([4])
    with pytest.raises(DgraphError, match="sequence 0 has 4 positions, asked for 5"):
        gather(kv, only, 5)
    kv.free(only)
    for call in (kv.free, partial(gather, kv), lambda s: kv.page_table([s])):
        with pytest.raises(DgraphError, match="sequence 0 is not allocated"):
            call(only)


def test_a_pool_that_was_limited_gives_its_memory_back_when_nobody_owns_a_page() -> None:
    kv = store()
    kv.limit = 6
    kv.reserve(6)
    (handle,) = kv.allocate([9])
    kv.unlimited()
    assert (kv.pages, kv.free_pages) == (6, 3), "somebody has pages"
    kv.free(handle)
    kv.unlimited()
    assert (kv.pages, kv.bytes) == (0, 0)
    (handle,) = kv.allocate([5])
    fill(kv, handle, 5, 3.0)
    check(kv, handle, 5, 3.0)

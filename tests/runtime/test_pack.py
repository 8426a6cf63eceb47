"""Packed caches: where each sequence begins, what growing changes, and how much they take."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch
from torch import Tensor

from dgraph.errors import InputError, PoolFull
from dgraph.plans.kv import KVPlan
from dgraph.runtime.kv.packed import PackedKV
from dgraph.types.shapes import InputSpec

KEPT = KVPlan("response", pairs=(2, 4))
SHARE = KVPlan("block", ratio=0.5)


def packed_inputs(layer: int, heads: int, width: int, dtype: torch.dtype, budgets: int = 0) -> list[InputSpec]:
    """What SparseKV declares in a layer."""
    keys = [InputSpec(f"{n}_pack_{layer}", dtype, ("entries", width), layer=layer) for n in "kv"]
    count = InputSpec(f"pack_count_{layer}", torch.int32, ("sequences", heads), layer=layer, budgets=budgets)
    return [*keys, count, InputSpec(f"pack_index_{layer}", torch.int32, ("entries",), layer=layer)]


def make(plan: KVPlan, dtype: torch.dtype = torch.float32) -> PackedKV:
    return PackedKV([spec for layer in (0, 1) for spec in packed_inputs(layer, 3, 5, dtype)], 2, plan)


def prepare(packed: PackedKV, candidates: Sequence[int], slots: int) -> None:
    """A batch of so many slots, the first of which have sequences."""
    packed.widen(slots)
    packed.open(range(len(candidates)), candidates)


def addresses(packed: PackedKV, *but: str) -> dict[str, int]:
    return {name: t.data_ptr() for name, t in packed.tensors().items() if name not in ("pack_start", *but)}


def test_names_shapes_and_types() -> None:
    packed = make(KEPT)
    assert packed.bytes == 0
    prepare(packed, [9, 3], 4)
    found = packed.tensors()
    names = [f"{name}_{i}" for i in (0, 1) for name in ("pack_count", "k_pack", "v_pack", "pack_index")]
    assert found.keys() == {*names, "pack_start"}
    for layer, entries in ((0, (2 + 2) * 3), (1, (4 + 3) * 3)):
        assert found[f"k_pack_{layer}"].shape == found[f"v_pack_{layer}"].shape == (entries, 5)
        assert found[f"pack_index_{layer}"].shape == (entries,)
        assert found[f"pack_count_{layer}"].shape == (4, 3)
        assert {found[f"pack_{kind}_{layer}"].dtype for kind in ("count", "index")} == {torch.int32}
        assert all(t.eq(0).all() for t in found.values() if t.dtype == torch.float32)
    assert packed.bytes == (12 + 21) * (2 * 5 * 4 + 4) + 2 * 4 * 3 * 4
    half = make(KEPT, torch.bfloat16)
    prepare(half, [9, 3], 4)
    assert {half.tensors()[f"{kind}_pack_1"].dtype for kind in "kv"} == {torch.bfloat16}


def test_starts_by_layer() -> None:
    """Slots without a sequence, and sequences without candidates, keep nothing."""
    packed = make(KEPT)
    prepare(packed, [9, 3, 1], 4)
    start = packed.tensors()["pack_start"]
    assert start.dtype == torch.int32
    assert start.tolist() == [[0, 6, 12, 0], [0, 12, 21, 0]]
    share = make(SHARE)
    prepare(share, [9, 1, 6], 3)
    assert share.tensors()["pack_start"].tolist() == [[0, 0, 12]] * 2
    assert len(share.tensors()["k_pack_0"]) == (4 + 0 + 3) * 3


def test_heads_of_a_rank_have_room_for_the_budgets_of_others() -> None:
    """A rank has one of four heads, which may use what all keep together: 8 of 9 candidates, and all of 3."""
    packed = PackedKV(packed_inputs(0, 1, 5, torch.float32, budgets=4), 1, KEPT)
    prepare(packed, [9, 3], 2)
    assert packed.tensors()["pack_start"].tolist() == [[0, 8]]
    assert len(packed.tensors()["k_pack_0"]) == 8 + 3


def test_layers_may_differ() -> None:
    """KV heads, head size, and whether a layer keeps anything at all."""
    specs = packed_inputs(0, 3, 5, torch.float32) + packed_inputs(2, 1, 7, torch.float16)
    packed = PackedKV(specs, 3, KVPlan("response", pairs=(2,)))
    prepare(packed, [9, 1], 2)
    found = packed.tensors()
    assert found["pack_start"].tolist() == [[0, 6], [0, 0], [0, 2]]
    assert (found["k_pack_0"].shape, found["k_pack_2"].shape) == ((9, 5), (3, 7))
    assert (found["pack_count_0"].shape, found["pack_count_2"].shape) == ((2, 3), (2, 1))
    assert found["v_pack_2"].dtype == torch.float16
    assert "k_pack_1" not in found
    with pytest.raises(InputError, match="'x_pack' holds packed entries; declare of which layer"):
        PackedKV([InputSpec("x_pack", torch.float32, ("entries", 2))], 3, KEPT)


def test_what_is_big_enough_stays_where_it_is() -> None:
    packed = make(KVPlan("response", ratio=0.5))
    prepare(packed, [8, 8], 2)
    before, bytes_before = addresses(packed), packed.bytes
    for t in packed.tensors().values():
        t.fill_(7)
    for candidates, sequences in (([8, 8], 2), ([4], 2), ([2, 13], 2), ([16], 1)):
        prepare(packed, candidates, sequences)
        assert addresses(packed) == before
        assert packed.bytes == bytes_before
        assert all(packed.tensors()[f"pack_count_{layer}"].eq(0).all() for layer in (0, 1))
        assert packed.tensors()["k_pack_0"].eq(7).all(), "nothing is cleared that nobody sees"
    assert packed.tensors()["pack_start"].tolist() == [[0]] * 2


def test_only_what_is_too_small_is_replaced() -> None:
    """More sequences need other counts, a larger budget other entries; layers grow apart."""
    packed = make(KEPT)
    prepare(packed, [2, 2], 2)
    before = packed.tensors()
    prepare(packed, [2], 5)
    after = packed.tensors()
    assert after["pack_count_0"].shape == (5, 3)
    assert after["k_pack_0"] is before["k_pack_0"]
    prepare(packed, [9, 9], 2)  # layer 0 keeps 2 of each as before
    grown = packed.tensors()
    for name in ("k_pack", "v_pack", "pack_index"):
        assert grown[f"{name}_0"] is after[f"{name}_0"]
        assert grown[f"{name}_1"] is not after[f"{name}_1"]
    assert grown["pack_count_0"] is after["pack_count_0"]
    assert len(grown["k_pack_1"]) == 8 * 3


def test_with_room_for_all_nothing_is_replaced() -> None:
    packed = make(KEPT)
    packed.widen(3)
    each = 2 * 5 * 4 + 4  # keys, values and a position
    assert packed.needs(9) == (2 * 3, 4 * 3)
    counts = 2 * 3 * 3 * 4
    assert packed.bytes == packed.pool_bytes((0, 0), 3) == counts
    packed.reserve(3, 9)
    assert packed.bytes == packed.pool_bytes((18, 36), 3) == counts + 3 * (2 + 4) * 3 * each
    before = addresses(packed)
    for candidates in ([9], [1, 9], [9, 2, 9]):
        prepare(packed, candidates, 3)
        assert addresses(packed) == before
    packed.open([0], [3])
    packed.tensors()["k_pack_0"].fill_(7)
    packed.reserve(5, 9)
    assert packed.tensors()["k_pack_0"][: 2 * 3].eq(7).all(), "others have some"
    for slot in range(3):
        packed.close(slot)
    packed.give_back()
    assert packed.bytes == 2 * 3 * 3 * 4
    prepare(packed, [9], 3)
    assert len(packed.tensors()["k_pack_1"]) == 4 * 3


def test_no_candidates() -> None:
    packed = make(KEPT)
    prepare(packed, [0], 1)
    assert packed.tensors()["k_pack_0"].shape == (0, 5)
    assert packed.tensors()["pack_start"].tolist() == [[0], [0]]


def test_out_of_memory_is_made_up_for_by_the_next_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = make(KEPT)
    prepare(packed, [1], 1)
    real, made = torch.zeros, []

    def zeros(*size: object, **options: object) -> Tensor:
        made.append(size)
        if len(made) == 3:  # values of layer 0, or later
            raise torch.OutOfMemoryError("no memory")
        return real(*size, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(torch.OutOfMemoryError):
        prepare(packed, [9] * 4, 1 + 3)
    monkeypatch.undo()
    prepare(packed, [9] * 3, 3)
    found = packed.tensors()
    assert {len(found[f"{kind}_pack_{layer}"]) for kind in "kv" for layer in (0, 1)} == {3 * 2 * 3, 3 * 4 * 3}
    assert len(found["pack_index_1"]) == 3 * 4 * 3


def test_slots_come_and_go() -> None:
    """A run that came back is used again; growing keeps what others have packed."""
    packed = make(KVPlan("response", ratio=1.0))
    packed.widen(4)
    packed.open([0, 2], [4, 3])
    packed.tensors()["k_pack_1"][12:21] = 5
    packed.close(0)
    packed.open([1], [2])
    packed.open([3], [9])
    assert packed.tensors()["pack_start"].tolist() == [[0, 0, 12, 21]] * 2
    assert packed.tensors()["k_pack_1"][12:21].eq(5).all()
    packed.open([0], [2])
    assert packed.tensors()["pack_start"][0].tolist() == [6, 0, 12, 21]


def test_what_went_wrong_in_a_slot_is_not_found_by_the_next() -> None:
    packed = make(KVPlan("response", ratio=1.0))
    packed.widen(2)
    packed.open([0, 1], [4, 3])
    for name, cache in packed.tensors().items():
        if name[0] in "kv":
            cache.fill_(torch.nan)
    packed.clear(1)
    packed.close(1)
    for name in ("k_pack_0", "v_pack_1"):
        assert packed.tensors()[name][:12].isnan().all(), "the other's stay"
        assert packed.tensors()[name][12:21].eq(0).all()


def test_caches_that_were_allotted_stay_where_they_are_and_lose_nothing() -> None:
    """Of random sequences as many have room as their entries fit, however these lie; each finds what it has packed."""
    packed, random = make(KVPlan("response", pairs=(2, 5))), Random(1)
    packed.allot((60, 110))
    packed.widen(12)
    before, held = addresses(packed), dict[int, int]()
    assert packed.bytes == packed.pool_bytes((60, 110), 12)
    moved = False
    for turn in range(300):
        slot, candidates = random.randrange(12), random.randrange(9)
        if slot in held:
            packed.close(slot)
            del held[slot]
        needed, free = packed.needs(candidates), packed.free
        taken = [sum(packed.needs(each)[at] for each in held.values()) for at in (0, 1)]
        assert free == (60 - taken[0], 110 - taken[1])
        if any(mine > there for mine, there in zip(needed, free, strict=True)):
            with pytest.raises(PoolFull, match=r"packed keys: \d+ entries of a layer are needed, \d+ are free"):
                packed.check_room([candidates])
            continue
        starts = packed.tensors()["pack_start"][:, list(held)].tolist()
        packed.check_room([candidates])
        packed.open([slot], [candidates])
        moved |= packed.tensors()["pack_start"][:, list(held)].tolist() != starts
        held[slot] = candidates
        for layer in (0, 1):
            begin = int(packed.tensors()["pack_start"][layer, slot])
            for name in ("k_pack", "v_pack", "pack_index"):
                packed.tensors()[f"{name}_{layer}"][begin : begin + needed[layer]] = slot + 1
        for other, candidate in held.items():
            for layer in (0, 1):
                begin = int(packed.tensors()["pack_start"][layer, other])
                for name in ("k_pack", "v_pack", "pack_index"):
                    mine = packed.tensors()[f"{name}_{layer}"][begin : begin + packed.needs(candidate)[layer]]
                    assert mine.eq(other + 1).all(), turn
        assert addresses(packed) == before
    assert moved
    for slot in list(held):
        packed.close(slot)
    packed.allot((4, 4))
    assert packed.bytes == packed.pool_bytes((4, 4), 0)
    packed.give_back()
    assert (packed.bytes, packed.free) == (0, None)


def test_caches_that_grow_do_so_in_few_steps() -> None:
    packed, sizes = make(KVPlan("response", ratio=1.0)), set[int]()
    packed.widen(64)
    for slot in range(64):
        packed.open([slot], [8])
        sizes.add(len(packed.tensors()["k_pack_0"]))
    assert len(sizes) <= 12
    assert max(sizes) <= 64 * 8 * 3 * 3 // 2

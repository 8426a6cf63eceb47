"""What the host sends to the device between two steps: in few copies, and without a wait."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dgraph.runtime.decoding import Decoding
from dgraph.runtime.graphs.upload import ALIGNED, upload
from dgraph.runtime.kv.store import KVStore
from dgraph.runtime.loop.batch import Batch
from dgraph.runtime.requests import Request
from dgraph.runtime.state.base import OUT
from tests.runtime.fake import make_session

BLOCK = 4
CPU = torch.device("cpu")
CHOSEN = Decoding(max_new_tokens=24, ignore_eos=True)


def sent() -> list[Tensor]:
    return [
        torch.arange(5),
        torch.tensor([True, False, True]),
        torch.randn(3, 7),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.zeros(0, 4, dtype=torch.int32),
        torch.arange(12, dtype=torch.int32).view(3, 4).T,
        torch.tensor([7]).expand(6),
    ]


def check_sent(device: torch.device) -> None:
    values = sent()
    wanted = [value.clone() for value in values]
    there = upload(device, *values)
    for value in values:
        value.untyped_storage().fill_(0)
    for mine, value in zip(there, wanted, strict=True):
        assert (mine.device.type, mine.dtype, mine.shape) == (device.type, value.dtype, value.shape)
        assert mine.is_contiguous()
        assert mine.data_ptr() % ALIGNED == 0
        assert torch.equal(mine.cpu(), value)


def test_tensors_arrive_as_they_are_in_memory_of_their_own() -> None:
    check_sent(CPU)
    assert upload(CPU) == []


def growing(device: str = "cpu") -> Batch:
    """Three sequences of one batch whose pages come as they grow."""
    session = make_session(BLOCK, page_size=2, device=device)
    batch = session.batch([CHOSEN], session.shape(3, 40, BLOCK, True), fixed=True, by_block=True)
    batch.admit([0, 2], [Request([1, 2, 3, 4, 5], CHOSEN), Request([6] * 8, CHOSEN)])
    batch.admit([1], [Request([7, 8], CHOSEN)])
    return batch


def tables_of(batch: Batch) -> list[list[int]]:
    table = batch.caches()["page_table"]
    return [[page for page in row if page >= 0] for row in table[:3].tolist()]


def test_pages_are_written_once_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    tables = KVStore.page_tables

    def counted(self: KVStore, sequences: list[int], columns: int = 0) -> dict[str, Tensor]:
        written.append(len(sequences))
        return tables(self, sequences, columns)

    batch = growing()
    monkeypatch.setattr(KVStore, "page_tables", counted)
    first = tables_of(batch)
    assert written == [3], "slots that were admitted one after the other"
    for slot in range(3):
        batch.extend(slot, 20)
    grown = tables_of(batch)
    assert written == [3, 3], "all that grew"
    for slot, (before, now) in enumerate(zip(first, grown, strict=True)):
        assert len(before) < len(now) == 10, slot
        assert now[: len(before)] == before, slot
        (handle,) = batch.running[slot].handles
        assert now == batch.kv.page_table([handle])[0].tolist()
    batch.extend(0, 20)
    batch.caches()
    assert written == [3, 3], "nothing has changed"
    batch.extend(1, 24)
    batch.retire([1])
    batch.extend(2, 24)
    assert tables_of(batch)[2][:10] == grown[2]
    assert written == [3, 3, 1], "a slot that nobody has is left as it is"


def change(batch: Batch) -> None:
    """All that happens to the slots of `growing` between steps."""
    for slot in range(3):
        batch.extend(slot, 20)
    batch.order([2, 0, 1])
    batch.caches()
    batch.retire([1])
    batch.admit([1], [Request([7, 8, 9], CHOSEN)])
    batch.caches()


def check_changed(batch: Batch) -> None:
    """Slots have the places that they were given, and the fourth, which a batch of a fixed shape has beside the
    three, has none; the next request of a slot has its place.
    """
    state = batch.transition.state
    assert batch.shape.slots == 4
    assert state.place.tolist() == [1, 2, 0, OUT]
    assert state.active.tolist() == [True, True, True, False]
    assert state.prompt_end.tolist()[:3] == [5, 3, 8]
    for slot, table in enumerate(tables_of(batch)):
        (handle,) = batch.running[slot].handles
        assert table == [page for page in batch.kv.page_table([handle])[0].tolist() if page >= 0], slot


def test_what_happens_to_slots_is_there_at_the_next_step() -> None:
    batch = growing()
    batch.caches()
    change(batch)
    check_changed(batch)


@pytest.mark.gpu
def test_on_a_gpu_tensors_arrive_as_they_are() -> None:
    check_sent(torch.device("cuda"))


@pytest.mark.gpu
def test_on_a_gpu_nothing_that_happens_to_slots_waits_for_the_device() -> None:
    growing("cuda").clear()  # what is made once
    batch = growing("cuda")
    batch.caches()
    torch.cuda.set_sync_debug_mode("error")
    try:
        change(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check_changed(batch)

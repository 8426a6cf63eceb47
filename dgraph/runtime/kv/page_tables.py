"""Page tables of the slots of a batch, as programs read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from dgraph.runtime.graphs.upload import upload
from dgraph.runtime.kv.store import KVStore
from dgraph.runtime.requests import SlotState


class PageTables:
    """Page tables at fixed addresses on the device, i32[slots, pages] each, by the names that programs ask for.

    Pages come and go while a step runs; all changes are written at once before the next step, for which the device
    waits. Slots that have had no request yet point to page 0, where dummy rows read and write.

    Args:
        kv: the store that owns the pages.
        count: sequences of a slot; two under guidance.
        slots, pages: sizes of a table.
    """

    def __init__(self, kv: KVStore, count: int, slots: int, pages: int):
        self._kv, self._pages = kv, pages
        first = torch.zeros((count, slots, pages), dtype=torch.int32, device=kv.device)
        self._tables = {name: first.clone() for name in kv.page_tables([])}
        self._stale: set[int] = set()

    def changed(self, slots: Iterable[int]) -> None:
        """Note that slots have other pages now."""
        self._stale.update(slots)

    def left(self, slots: Iterable[int]) -> None:
        """Note that slots are free again; their rows stay as they are."""
        self._stale.difference_update(slots)

    def of(self, place: int) -> dict[str, Tensor]:
        """The tables of one sequence of each slot, by name."""
        return {name: table[place] for name, table in self._tables.items()}

    def write(self, running: Mapping[int, SlotState]) -> None:
        """Write the pages of the slots that have others now. running: the request in each slot that has one."""
        if not self._stale:
            return
        slots = sorted(self._stale)
        self._stale.clear()
        written, values = list[Tensor](), list[Tensor]()
        for place, sequences in enumerate(zip(*(running[slot].handles for slot in slots), strict=True)):
            for name, table in self._kv.page_tables(sequences, columns=self._pages).items():
                written.append(self._tables[name][place])
                values.append(table)
        at, *values = upload(self._kv.device, torch.tensor(slots), *values)
        for table, value in zip(written, values, strict=True):
            table.index_copy_(0, at, value)

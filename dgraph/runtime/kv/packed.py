"""Packed keys and values of many sequences: the entries outside of the window that each KV head keeps."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.plans.kv import KVPlan, pairs_of
from dgraph.runtime.graphs.upload import upload
from dgraph.types.shapes import InputSpec


class _Runs:
    """Allocator of runs of entries for slots: first fit."""

    def __init__(self) -> None:
        self._taken: list[tuple[int, int]] = []  # (first, end), ascending
        self._of: dict[int, tuple[int, int]] = {}

    def take(self, slot: int, count: int) -> int:
        """Allocate a free run of `count` entries for a slot, in place of its last run; return its first entry."""
        self.drop(slot)
        begin = 0
        for first, end in self._taken:
            if begin + count <= first:
                break
            begin = end
        self._of[slot] = (begin, begin + count)
        insort(self._taken, self._of[slot])
        return begin

    def of(self, slot: int) -> tuple[int, int]:
        """Begin and end of a slot's run."""
        return self._of[slot]

    def others(self, slots: Sequence[int]) -> bool:
        """True if a slot that is not among these has a run."""
        return not self._of.keys() <= set(slots)

    def drop(self, slot: int) -> None:
        """Give up the run of a slot."""
        if slot in self._of:
            self._taken.remove(self._of.pop(slot))


class PackedKV:
    """Packed caches of all layers.

    Each layer has the caches [entries, ...] that its passes declared: keys, values and positions, or positions alone of
    keys that stay in their pages. It also has the number of entries of each head of each sequence, i32[sequences, Hkv],
    and the first entry of each sequence.

    A slot owns a run of entries in every layer; its length is the most that the plan lets its sequence keep. Within a
    run the heads' entries follow one another. Caches grow as needed and keep their entries. Growing replaces the
    tensors, so ask for `tensors()` after `open`.

    Args:
        caches: declarations of packed inputs, `("entries", ...)` and one `("sequences", Hkv)` of each layer, with the
            layer that they belong to.
        layers: number of layers of the model.
        plan: how many entries a sequence keeps.
        device: device of the caches.

    Raises:
        InputError: a declaration without a layer.
    """

    def __init__(self, caches: Iterable[InputSpec], layers: int, plan: KVPlan, device: torch.device | str = "cpu"):
        self.plan, self.device = plan, torch.device(device)
        self._counts: dict[int, InputSpec] = {}
        self._entries: dict[int, list[InputSpec]] = {}
        for spec in caches:
            if spec.layer is None:
                raise InputError(f"input {spec.name!r} holds packed entries; declare of which layer: layer=...")
            if spec.shape[0] == "sequences":
                self._counts[spec.layer] = spec
            else:
                self._entries.setdefault(spec.layer, []).append(spec)
        self._caches: dict[str, Tensor] = {}
        self._start = torch.zeros(layers, 0, dtype=torch.int32, device=self.device)
        # Layers that keep equally many entries have their runs at equal places.
        self._runs = {self._like(layer): _Runs() for layer in self._counts}

    @property
    def bytes(self) -> int:
        """Size of all caches in bytes."""
        return sum(t.numel() * t.element_size() for t in self._caches.values())

    def widen(self, slots: int) -> None:
        """Make room for the counts of that many slots; entries packed before are forgotten."""
        self._runs = {like: _Runs() for like in self._runs}
        self._start = torch.zeros(len(self._start), slots, dtype=torch.int32, device=self.device)
        for spec in self._counts.values():
            count = self._caches.get(spec.name)
            if count is None or len(count) < slots:
                self._caches[spec.name] = self._zeros(spec, slots)
            else:
                count.zero_()

    def open(self, slots: Sequence[int], candidates: Sequence[int]) -> None:
        """Make room for sequences, which have nothing packed yet.

        Args:
            slots: their rows of the batch; entries of earlier sequences in these slots are forgotten.
            candidates: positions of each sequence outside of its window, at most.
        """
        found: dict[tuple[int, int], tuple[list[int], int]] = {}
        starts = torch.zeros(len(self._start), len(slots), dtype=torch.int32)
        keeps = any(runs.others(slots) for runs in self._runs.values())
        for layer, spec in self._counts.items():
            like, (heads,) = self._like(layer), spec.element
            if like not in found:
                counts = [self.plan.entries(layer, n, heads, spec.budgets) for n in candidates]
                begins = [self._runs[like].take(slot, n) for slot, n in zip(slots, counts, strict=True)]
                found[like] = begins, max(b + n for b, n in zip(begins, counts, strict=True))
            begins, end = found[like]
            starts[layer] = torch.tensor(begins)
            self._grow(layer, end, keeps)
        at, starts = upload(self.device, torch.tensor(slots), starts)
        for spec in self._counts.values():
            self._caches[spec.name].index_fill_(0, at, 0)
        self._start.index_copy_(1, at, starts)

    def reserve(self, slots: int, candidates: int, limit: int | None = None) -> bool:
        """Make room now for `slots` sequences of `candidates` candidates each; False if that exceeds `limit` bytes.

        Caches that grow later are replaced, and CUDA graphs that read them are recorded anew.
        """
        keeps, bytes, entries = any(runs.others(()) for runs in self._runs.values()), 0, dict[int, int]()
        for layer, spec in self._counts.items():
            entries[layer] = slots * self.plan.entries(layer, candidates, spec.element[0], spec.budgets)
            each = (math.prod(one.element) * one.dtype.itemsize for one in self._entries.get(layer, []))
            bytes += entries[layer] * sum(each)
        if limit is not None and bytes > limit:
            return False
        for layer, count in entries.items():
            self._grow(layer, count, keeps)
        return True

    def give_back(self) -> None:
        """Free the room for entries, when no slot has any."""
        for spec in (spec for specs in self._entries.values() for spec in specs):
            if spec.name in self._caches:
                self._caches[spec.name] = self._zeros(spec, 0)

    def clear(self, slot: int) -> None:
        """Zero the entries of a slot, after its numbers went wrong."""
        for layer in self._counts:
            begin, end = self._runs[self._like(layer)].of(slot)
            for spec in self._entries.get(layer, []):
                self._caches[spec.name][begin:end] = 0

    def close(self, slot: int) -> None:
        """Hand the entries of a slot back."""
        for runs in self._runs.values():
            runs.drop(slot)

    def tensors(self) -> dict[str, Tensor]:
        """The caches under the names that programs ask for, and `pack_start` i32[layers, b]."""
        return {**self._caches, "pack_start": self._start}

    def _like(self, layer: int) -> tuple[int, int]:
        """Key that is equal for layers that keep equally many entries of equally many candidates."""
        return pairs_of(self.plan.pairs, layer), self._counts[layer].element[0]

    def _grow(self, layer: int, entries: int, keeps: bool) -> None:
        """Make the caches of a layer long enough. keeps: they hold entries of others."""
        there = {name: len(cache) for name, cache in self._caches.items()}
        specs = [spec for spec in self._entries.get(layer, []) if there.get(spec.name, -1) < entries]
        old = {spec.name: self._caches.pop(spec.name, None) for spec in specs}
        if not keeps:
            old.clear()  # let go of the old ones first, so that both never exist at once
        for spec in specs:
            new, before = self._zeros(spec, entries), old.pop(spec.name, None)
            if before is not None:
                new[: len(before)] = before
            self._caches[spec.name] = new

    def _zeros(self, spec: InputSpec, count: int) -> Tensor:
        # Zeros, not uninitialised memory: a kernel may load entries past a head's last and weigh them by 0.
        return torch.zeros(count, *spec.element, dtype=spec.dtype, device=self.device)

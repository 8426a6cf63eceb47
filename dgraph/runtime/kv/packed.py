"""Packed keys and values of many sequences: the entries outside of the window that each KV head keeps."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dgraph.errors import InputError, PoolFull
from dgraph.plans.kv import KVPlan, pairs_of
from dgraph.runtime.graphs.upload import upload
from dgraph.types.shapes import InputSpec


class _Runs:
    """Allocator of runs of entries for slots: first fit."""

    def __init__(self) -> None:
        self._taken: list[tuple[int, int]] = []  # (first, end), ascending
        self._of: dict[int, tuple[int, int]] = {}

    @property
    def count(self) -> int:
        """Entries of all runs together."""
        return sum(end - first for first, end in self._taken)

    @property
    def end(self) -> int:
        """End of the last run."""
        return self._taken[-1][1] if self._taken else 0

    def take(self, slots: Sequence[int], counts: Sequence[int]) -> int:
        """Allocate a free run of `counts` entries for each slot, in place of its last run; return the end of all."""
        self.drop(slots)
        for slot, count in zip(slots, counts, strict=True):
            begin = 0
            for first, end in self._taken:
                if begin + count <= first:
                    break
                begin = end
            self._of[slot] = (begin, begin + count)
            insort(self._taken, self._of[slot])
        return self.end

    def of(self, slot: int) -> tuple[int, int]:
        """Begin and end of a slot's run."""
        return self._of[slot]

    def others(self, slots: Sequence[int]) -> bool:
        """True if a slot that is not among these has a run."""
        return not self._of.keys() <= set(slots)

    def drop(self, slots: Iterable[int]) -> None:
        """Give up the runs of these slots."""
        for slot in slots:
            if slot in self._of:
                self._taken.remove(self._of.pop(slot))

    def close_gaps(self) -> list[tuple[int, int, int, int]]:
        """Move every run down to the end of the one before it.

        Returns:
            Slot, former begin and end, and begin now, of each run from the first that has moved on.
        """
        spans, at = list[tuple[int, int, int, int]](), 0
        for slot, (first, end) in sorted(self._of.items(), key=lambda run: run[1]):
            if spans or first != at:
                spans.append((slot, first, end, at))
            self._of[slot] = (at, at + end - first)
            at += end - first
        self._taken = sorted(self._of.values())
        return spans


class PackedKV:
    """Packed caches of all layers.

    Each layer has the caches [entries, ...] that its passes declared: keys, values and positions, or positions alone of
    keys that stay in their pages. It also has the number of entries of each head of each sequence, i32[sequences, Hkv],
    and the first entry of each sequence.

    A slot owns a run of entries in every layer; its length is the most that the plan lets its sequence keep. Within a
    run the heads' entries follow one another. Layers that keep equally many entries of any sequence are alike, and have
    their runs at equal places.

    Caches that were allotted (see `allot`) stay where they are. Where the free entries lie in gaps, runs are moved
    together. Other caches grow as needed, by half at least, and keep their entries. Growing replaces the tensors, so
    ask for `tensors()` after `open`.

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
            entries = self._entries.setdefault(spec.layer, [])
            if spec.shape[0] == "sequences":
                self._counts[spec.layer] = spec
            else:
                entries.append(spec)
        self._caches: dict[str, Tensor] = {}
        self._start = torch.zeros(layers, 0, dtype=torch.int32, device=self.device)
        self._alike: dict[tuple[int, ...], list[int]] = {}
        for layer, spec in self._counts.items():
            self._alike.setdefault((pairs_of(plan.pairs, layer), spec.element[0], spec.budgets), []).append(layer)
        self._runs = {like: _Runs() for like in self._alike}
        self._allotted: tuple[int, ...] | None = None

    def needs(self, candidates: int) -> tuple[int, ...]:
        """Entries that a sequence takes in each group of layers alike; candidates: positions outside of its window."""
        first = ((layers[0], self._counts[layers[0]]) for layers in self._alike.values())
        return tuple(self.plan.entries(at, candidates, spec.element[0], spec.budgets) for at, spec in first)

    def pool_bytes(self, entries: Sequence[int], slots: int) -> int:
        """Bytes of that many entries of each group, and of the counts of `slots` sequences."""
        counts = sum(self._bytes_of(spec) for spec in self._counts.values())
        each = (sum(self._bytes_of(s) for at in layers for s in self._entries[at]) for layers in self._alike.values())
        return slots * counts + sum(count * bytes for count, bytes in zip(entries, each, strict=True))

    @property
    def free(self) -> tuple[int, ...] | None:
        """Entries of each group that no sequence has; None for caches that grow as needed."""
        if self._allotted is None:
            return None
        return tuple(count - runs.count for count, runs in zip(self._allotted, self._runs.values(), strict=True))

    def check_room(self, candidates: Sequence[int]) -> None:
        """Check that sequences with these numbers of candidates have room.

        Raises:
            PoolFull: more entries than are free, in caches that were allotted.
        """
        for needed, free in zip(zip(*map(self.needs, candidates), strict=True), self.free or (), strict=False):
            if sum(needed) > free:
                raise PoolFull(f"packed keys: {sum(needed)} entries of a layer are needed, {free} are free.")

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
        given = [self.needs(count) for count in candidates]
        for place, (like, runs) in enumerate(self._runs.items()):
            keeps, mine = runs.others(slots), [each[place] for each in given]
            there = self._size(like)
            if runs.take(slots, mine) > there >= runs.count:
                runs.drop(slots)
                self._close_gaps(like)
                runs.take(slots, mine)
            for layer in self._alike[like]:
                self._grow(layer, runs.end, keeps)
        starts = torch.zeros(len(self._start), len(slots), dtype=torch.int32)
        for like, layers in self._alike.items():
            starts[layers] = torch.tensor([self._runs[like].of(slot)[0] for slot in slots], dtype=torch.int32)
        at, starts = upload(self.device, torch.tensor(slots), starts)
        for spec in self._counts.values():
            self._caches[spec.name].index_fill_(0, at, 0)
        self._start.index_copy_(1, at, starts)

    def reserve(self, slots: int, candidates: int) -> None:
        """Make room now for `slots` sequences of `candidates` candidates each.

        Caches that grow later are replaced, and CUDA graphs that read them are recorded anew.
        """
        for layers, runs, each in zip(self._alike.values(), self._runs.values(), self.needs(candidates), strict=True):
            for layer in layers:
                self._grow(layer, slots * each, runs.others(()))

    def allot(self, entries: Sequence[int]) -> None:
        """Make room for exactly that many entries of each group, when no slot has any; the caches never grow then."""
        self._allotted = tuple(entries)
        for spec in self._counts.values():
            self._caches.pop(spec.name, None)  # `widen` makes those of the next batch
        for layers, count in zip(self._alike.values(), entries, strict=True):
            for spec in (spec for layer in layers for spec in self._entries[layer]):
                if len(self._caches.get(spec.name, ())) != count:
                    self._caches.pop(spec.name, None)  # first, so that both never exist at once
                    self._caches[spec.name] = self._zeros(spec, count)

    def give_back(self) -> None:
        """Free the room for entries, when no slot has any; caches grow as needed from now on."""
        self._allotted = None
        for spec in (spec for specs in self._entries.values() for spec in specs):
            if spec.name in self._caches:
                self._caches[spec.name] = self._zeros(spec, 0)

    def clear(self, slot: int) -> None:
        """Zero the entries of a slot, after its numbers went wrong."""
        for like, layers in self._alike.items():
            begin, end = self._runs[like].of(slot)
            for spec in (spec for layer in layers for spec in self._entries[layer]):
                self._caches[spec.name][begin:end] = 0

    def close(self, slot: int) -> None:
        """Hand the entries of a slot back."""
        for runs in self._runs.values():
            runs.drop([slot])

    def tensors(self) -> dict[str, Tensor]:
        """The caches under the names that programs ask for, and `pack_start` i32[layers, b]."""
        return {**self._caches, "pack_start": self._start}

    def _size(self, like: tuple[int, ...]) -> int:
        """Entries for which caches of layers alike have room."""
        specs = (spec for layer in self._alike[like] for spec in self._entries[layer])
        return min((len(self._caches.get(spec.name, ())) for spec in specs), default=0)

    def _close_gaps(self, like: tuple[int, ...]) -> None:
        """Move the runs of layers alike together, with their entries; no tensor is replaced."""
        spans = self._runs[like].close_gaps()
        if not spans:
            return
        layers = self._alike[like]
        former = torch.cat([torch.arange(first, end) for _, first, end, _ in spans])
        slots, starts = torch.tensor([[slot, now] for slot, _, _, now in spans]).T
        begin, end = spans[0][3], spans[0][3] + len(former)
        at, starts, former = upload(self.device, slots, starts.int().expand(len(layers), -1), former)
        for spec in (spec for layer in layers for spec in self._entries[layer]):
            cache = self._caches[spec.name]
            cache[begin:end] = cache[former]
        for row, layer in enumerate(layers):
            self._start[layer].index_copy_(0, at, starts[row])

    def _grow(self, layer: int, entries: int, keeps: bool) -> None:
        """Make the caches of a layer long enough. keeps: they hold entries of others."""
        there = {spec.name: len(self._caches.get(spec.name, ())) for spec in self._entries[layer]}
        specs = [s for s in self._entries[layer] if s.name not in self._caches or there[s.name] < entries]
        old = {spec.name: self._caches.pop(spec.name, None) for spec in specs}
        if not keeps:
            old.clear()  # let go of the old ones first, so that both never exist at once
        for spec in specs:
            new, before = self._zeros(spec, max(entries, there[spec.name] * 3 // 2)), old.pop(spec.name, None)
            if before is not None:
                new[: len(before)] = before
            self._caches[spec.name] = new

    @staticmethod
    def _bytes_of(spec: InputSpec) -> int:
        return math.prod(spec.element) * spec.dtype.itemsize

    def _zeros(self, spec: InputSpec, count: int) -> Tensor:
        # Zeros, not uninitialised memory: a kernel may load entries past a head's last and weigh them by 0.
        return torch.zeros(count, *spec.element, dtype=spec.dtype, device=self.device)

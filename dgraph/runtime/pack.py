"""Packed keys and values of many sequences: what each KV head keeps of what its window does not show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.plans.kv import KVPlan
from dgraph.shapes import InputSpec


class PackedKV:
    """Per layer the caches [entries, ...] that its passes declared (keys, values, positions), how many entries each
    head of each sequence has i32[sequences, Hkv], and where a sequence's begin.

    A sequence owns a run of entries in every layer, as long as its plan lets it keep at most. Within it the heads'
    entries follow one another. Caches grow by need; growing replaces the tensors, so ask for `tensors()` after
    `prepare`.

    Args:
        caches: declarations of packed inputs, `("entries", ...)` and one `("sequences", Hkv)` of each layer, with the
            layer that they belong to.
        layers: of the model.
        plan: how many entries a sequence keeps.
        device: where they are.
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
        self._start = torch.zeros(layers, 0, dtype=torch.int32)
        self._room = [-1] * layers

    @property
    def bytes(self) -> int:
        """Size of all caches in bytes."""
        return sum(t.numel() * t.element_size() for t in self._caches.values())

    def prepare(self, candidates: Sequence[int], sequences: int) -> None:
        """Make room for one batch; what it had packed before is forgotten.

        Args:
            candidates: of each sequence, positions outside of its window, at most.
            sequences: rows of the batch, at least one for each of these; the others keep nothing.
        """
        rows = [*candidates, *[0] * (sequences - len(candidates))]
        starts = []
        for layer in range(len(self._room)):
            counts = [0] * sequences
            if layer in self._counts:
                (heads,) = self._counts[layer].element
                counts = [self.plan.entries(layer, n, heads) for n in rows]
            ends = torch.tensor(counts, dtype=torch.int64).cumsum(0)
            starts.append(ends - torch.tensor(counts))
            if layer in self._counts:
                self._make(layer, int(ends[-1]), sequences)
        self._start = torch.stack(starts).int().to(self.device)

    def tensors(self) -> dict[str, Tensor]:
        """The caches under the names that programs ask for, and `pack_start` i32[layers, b]."""
        return {**self._caches, "pack_start": self._start}

    def _make(self, layer: int, entries: int, sequences: int) -> None:
        name = self._counts[layer].name
        count = self._caches.get(name)
        if count is None or len(count) < sequences:
            count = self._caches[name] = self._zeros(self._counts[layer], sequences)
        count.zero_()
        if entries <= self._room[layer]:
            return
        self._room[layer] = -1  # until all of the layer's caches are there
        specs = self._entries.get(layer, [])
        for spec in specs:
            self._caches.pop(spec.name, None)  # let go of the old one first, so that both never exist at once
        for spec in specs:
            self._caches[spec.name] = self._zeros(spec, entries)
        self._room[layer] = entries

    def _zeros(self, spec: InputSpec, count: int) -> Tensor:
        # Zeros, not uninitialised memory: a kernel may load entries past a head's last and weigh them by 0.
        return torch.zeros(count, *spec.element, dtype=spec.dtype, device=self.device)

"""Packed keys and values of many sequences: what each KV head keeps of what its window does not show."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dgraph.plans.kv import KVPlan
from dgraph.spec import ModelSpec


class PackedKV:
    """Per layer, one key and one value cache [entries, D], how many entries each head of each sequence has
    i32[sequences, Hkv], and where a sequence's begin.

    A sequence owns a run of entries in every layer, as long as its plan lets it keep at most. Within it the heads'
    entries follow one another. Caches grow by need; growing replaces the tensors, so ask for `tensors()` behind
    `prepare`.

    Args:
        spec: the model.
        plan: how many entries a sequence keeps.
        dtype, device: of keys and values.
    """

    def __init__(
        self, spec: ModelSpec, plan: KVPlan, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ):
        self.spec, self.plan = spec, plan
        self.dtype, self.device = dtype or spec.dtype, torch.device(device)
        self._caches: dict[str, Tensor] = {}
        self._start = torch.zeros(spec.layers, 0, dtype=torch.int32)
        self._room = [-1] * spec.layers

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
        spec, rows = self.spec, [*candidates, *[0] * (sequences - len(candidates))]
        starts = []
        for layer in range(spec.layers):
            counts = [self.plan.entries(layer, n, spec.kv_heads) for n in rows]
            ends = torch.tensor(counts, dtype=torch.int64).cumsum(0)
            starts.append(ends - torch.tensor(counts))
            self._make(layer, int(ends[-1]), sequences)
        self._start = torch.stack(starts).int().to(self.device)

    def tensors(self) -> dict[str, Tensor]:
        """The caches under the names that programs ask for: k_pack_0, v_pack_0, pack_count_0, ..., pack_start."""
        return {**self._caches, "pack_start": self._start}

    def _make(self, layer: int, entries: int, sequences: int) -> None:
        count = self._caches.get(f"pack_count_{layer}")
        if count is None or len(count) < sequences:
            count = torch.zeros(sequences, self.spec.kv_heads, dtype=torch.int32, device=self.device)
            self._caches[f"pack_count_{layer}"] = count
        count.zero_()
        if entries <= self._room[layer]:
            return
        self._room[layer] = -1  # until all of the layer's caches are there
        for name in (f"k_pack_{layer}", f"v_pack_{layer}", f"pack_index_{layer}"):
            self._caches.pop(name, None)  # let go of the old one first, so that both never exist at once
        # Zeros, not uninitialised memory: a kernel may load entries past a head's last and weigh them by 0.
        for kind in "kv":
            shape = (entries, self.spec.head_dim)
            self._caches[f"{kind}_pack_{layer}"] = torch.zeros(shape, dtype=self.dtype, device=self.device)
        index = torch.zeros(entries if self.plan.repacks else 0, dtype=torch.int32, device=self.device)
        self._caches[f"pack_index_{layer}"] = index
        self._room[layer] = entries

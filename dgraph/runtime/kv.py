"""Paged caches of many sequences: keys and values, and whatever else a program keeps per position."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from dgraph.errors import DgraphError, InputError
from dgraph.spec import ModelSpec

NO_PAGE = -1


class KVStore:
    """One key and one value cache [pages, page, Hkv, D] per layer, further caches, and who owns which page.

    Position p of a sequence lives at cache[table[p // page], p % page] in every layer. Pages are handed out
    when a sequence is allocated and come back when it is freed; the caches grow when too few are free.
    Growing replaces the tensors, so ask for `tensors()` after the last `allocate`.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        features: Mapping[str, tuple[int, ...]] | None = None,
    ):
        """`features`: names of further caches, and what they hold per position."""
        if page_size < 1:
            raise InputError(f"KV store: a page holds at least 1 position, got page_size={page_size}.")
        self.page_size, self.dtype, self.device = page_size, dtype, torch.device(device)
        self._layers = layers
        self._shapes: dict[str, tuple[int, ...]] = dict(features or {})
        self._shapes |= {f"{kind}_cache_{layer}": (kv_heads, head_dim) for layer in range(layers) for kind in "kv"}
        self._caches = {name: self._empty(name, 0) for name in self._shapes}
        self._pages = 0
        self._free: list[int] = []  # the lowest page last: low pages are used first
        self._owned: dict[int, list[int]] = {}
        self._next = 0

    @classmethod
    def for_spec(
        cls,
        spec: ModelSpec,
        *,
        page_size: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        names: Iterable[str] = (),
    ) -> KVStore:
        """The store of a model. `page_size` (positions, default: the block length) is a multiple or a
        divisor of the block length, so that a block never straddles more pages than it must."""
        # What a program caches beside keys and values, by the first letter of its name: the attention's context and the
        # feed-forward network's output (DyLLM), and what the attention adds to the stream (dLLM-Cache).
        kinds = {"c": (spec.heads, spec.head_dim), "f": (spec.hidden,), "a": (spec.hidden,)}
        features = {name: kinds[name[0]] for name in sorted(names) if name[0] in kinds and name[1:7] == "_cache"}
        size = spec.block_length if page_size is None else page_size
        if size < 1 or (size % spec.block_length and spec.block_length % size):
            raise InputError(
                f"KV store: page_size must be a multiple or a divisor of {spec.family}'s block length "
                f"{spec.block_length}, got {size}."
            )
        return cls(
            spec.layers,
            spec.kv_heads,
            spec.head_dim,
            page_size=size,
            dtype=dtype or spec.dtype,
            device=device,
            features=features,
        )

    @property
    def pages(self) -> int:
        """Pages that exist."""
        return self._pages

    @property
    def free_pages(self) -> int:
        """Pages that no sequence owns."""
        return len(self._free)

    @property
    def bytes(self) -> int:
        """Size of all caches in bytes."""
        return sum(t.numel() * t.element_size() for t in self._caches.values())

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` positions."""
        return -(-tokens // self.page_size)

    def allocate(self, tokens: Sequence[int], first: Sequence[int] | None = None) -> list[int]:
        """Room for one sequence per entry, for that many positions; returns their handles in order.

        first: of each sequence, the first position that needs a page; those on pages in front of it have none.
        What a page holds at first is finite but arbitrary: zeros, or what an earlier sequence left.
        """
        absent = [0] * len(tokens) if first is None else [n // self.page_size for n in first]
        counts = [self.pages_for(n) - none for n, none in zip(tokens, absent, strict=True)]
        missing = sum(counts) - len(self._free)
        if missing > 0:
            self._grow(self._pages + missing)
        handles = []
        for count, none in zip(counts, absent, strict=True):
            self._owned[self._next] = [NO_PAGE] * none + [self._free.pop() for _ in range(count)]
            handles.append(self._next)
            self._next += 1
        return handles

    def free(self, sequence: int) -> None:
        """Hand the pages of a sequence back."""
        self._free.extend(page for page in reversed(self._pages_of(sequence)) if page != NO_PAGE)
        del self._owned[sequence]

    def release(self, sequence: int, first: int) -> None:
        """Hand those pages of a sequence back that hold positions in front of `first` only."""
        owned = self._pages_of(sequence)
        for i in range(min(first // self.page_size, len(owned))):
            if owned[i] != NO_PAGE:
                self._free.append(owned[i])
                owned[i] = NO_PAGE

    def page_table(self, sequences: Sequence[int], rows: int = 0, columns: int = 0) -> Tensor:
        """i32[b, P], P the most pages of any of them; -1 where a sequence has no page.

        rows, columns: at least so many; rows past the sequences belong to none.
        """
        pages = [self._pages_of(s) for s in sequences]
        shape = max(rows, len(pages)), max([columns, *map(len, pages)])
        table = torch.full(shape, NO_PAGE, dtype=torch.int32)
        for row, owned in zip(table, pages, strict=False):
            row[: len(owned)] = torch.tensor(owned, dtype=torch.int32)
        return table.to(self.device)

    def tensors(self) -> dict[str, Tensor]:
        """The caches under the names that programs ask for: k_cache_0, v_cache_0, k_cache_1, ..."""
        return dict(self._caches)

    def gather(self, sequence: int, tokens: int | None = None, first: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Per layer, copies of the keys and values [tokens - first, Hkv, D] of positions first .. tokens-1 (default:
        all pages).

        Raises:
            DgraphError: a position without a page.
        """
        pages = torch.tensor(self._pages_of(sequence), dtype=torch.int64, device=self.device)
        room = len(pages) * self.page_size
        if tokens is not None and tokens > room:
            raise DgraphError(f"KV store: sequence {sequence} has {room} positions, asked for {tokens}.")

        begin = first // self.page_size
        if (pages[begin:] == NO_PAGE).any():
            raise DgraphError(f"KV store: sequence {sequence} has no pages for position {first}; ask for later ones.")

        def rows(kind: str, layer: int) -> Tensor:
            return self._caches[f"{kind}_cache_{layer}"][pages].flatten(0, 1)[first:tokens]

        return [(rows("k", layer), rows("v", layer)) for layer in range(self._layers)]

    def _pages_of(self, sequence: int) -> list[int]:
        if sequence not in self._owned:
            raise DgraphError(
                f"KV store: sequence {sequence} is not allocated (never was, or was freed already); "
                f"{len(self._owned)} are."
            )
        return self._owned[sequence]

    def _grow(self, pages: int) -> None:
        if not self._owned:  # nothing to keep
            self._pages, self._free = 0, []
        kept = self._pages
        for name in self._caches:
            old = self._caches[name]
            if kept == 0:  # let go of the old tensor first, so that both never exist at once
                old = self._caches[name] = self._empty(name, 0)
            new = self._empty(name, pages)
            new[:kept] = old[:kept]
            self._caches[name] = new
        # Only now: if memory ran out above, what was allocated before is still whole.
        self._free = list(range(pages - 1, kept - 1, -1)) + self._free
        self._pages = pages

    def _empty(self, name: str, pages: int) -> Tensor:
        # Zeros, not uninitialised memory: a kernel may load positions past a row's limit and weigh them by 0,
        # and 0 * NaN would reach the result.
        return torch.zeros(pages, self.page_size, *self._shapes[name], dtype=self.dtype, device=self.device)

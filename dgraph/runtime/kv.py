"""Paged caches of many sequences: keys and values, and whatever else a program keeps per position."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dgraph.errors import DgraphError, InputError
from dgraph.shapes import InputSpec
from dgraph.spec import ModelSpec

NO_PAGE = -1


class KVStore:
    """Paged caches of declared shapes, and who owns which page.

    Position p of a sequence lives at cache[table[p // page], p % page] in every cache. Pages are handed out
    when a sequence is allocated and come back when it is freed; the caches grow when too few are free.
    Growing replaces the tensors, so ask for `tensors()` after the last `allocate`.

    Args:
        caches: declarations of inputs per position, `("pages", "page", ...)`; of each its own sizes and dtype.
        page_size: positions of a page.
        device: where they are.

    Raises:
        InputError: page_size below 1, or a cache whose sizes are not numbers.
    """

    def __init__(self, caches: Iterable[InputSpec], *, page_size: int, device: torch.device | str = "cpu"):
        if page_size < 1:
            raise InputError(f"KV store: a page holds at least 1 position, got page_size={page_size}.")
        self.page_size, self.device = page_size, torch.device(device)
        self._specs: dict[str, InputSpec] = {}
        self._caches: dict[str, Tensor] = {}
        self._pages = 0
        self.declare(caches)
        self._free: list[int] = []  # the lowest page last: low pages are used first
        self._owned: dict[int, list[int]] = {}
        self._next = 0

    def declare(self, caches: Iterable[InputSpec]) -> None:
        """Make the caches that are not there yet, with as many pages as the others.

        Raises:
            InputError: a cache whose sizes are not numbers.
        """
        for spec in caches:
            if spec.name not in self._specs:
                self._specs[spec.name] = spec
                self._caches[spec.name] = self._empty(spec.name, self._pages)

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

        first: of each sequence, the first position that needs a page; those on pages before it have none.
        What a page holds at first is what its cache is declared to begin a response with; else finite but arbitrary:
        zeros, or what an earlier sequence left.
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
        self._reset([page for handle in handles for page in self._owned[handle] if page != NO_PAGE])
        return handles

    def _reset(self, pages: list[int]) -> None:
        """What begins anew with a response, on those pages."""
        index = torch.tensor(pages, dtype=torch.int64, device=self.device)
        for name, spec in self._specs.items():
            if spec.reset == "response":
                self._caches[name][index] = spec.initial

    def free(self, sequence: int) -> None:
        """Hand the pages of a sequence back."""
        self._free.extend(page for page in reversed(self._pages_of(sequence)) if page != NO_PAGE)
        del self._owned[sequence]

    def release(self, sequence: int, first: int) -> None:
        """Hand those pages of a sequence back that hold positions before `first` only."""
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
        """The caches under the names that programs ask for."""
        return dict(self._caches)

    def gather(self, name: str, sequence: int, tokens: int | None = None, first: int = 0) -> Tensor:
        """A copy of what a cache holds [tokens - first, ...] of positions first .. tokens-1 (default: all pages).

        Raises:
            DgraphError: a cache that does not exist, or a position without a page.
        """
        if name not in self._caches:
            raise DgraphError(f"KV store: there is no cache {name!r}; it has {', '.join(self._caches) or 'none'}.")
        pages = torch.tensor(self._pages_of(sequence), dtype=torch.int64, device=self.device)
        room = len(pages) * self.page_size
        if tokens is not None and tokens > room:
            raise DgraphError(f"KV store: sequence {sequence} has {room} positions, asked for {tokens}.")
        if (pages[first // self.page_size :] == NO_PAGE).any():
            raise DgraphError(f"KV store: sequence {sequence} has no pages for position {first}; ask for later ones.")
        return self._caches[name][pages].flatten(0, 1)[first:tokens]

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
        spec = self._specs[name]
        return torch.zeros(pages, self.page_size, *spec.element, dtype=spec.dtype, device=self.device)


def check_page_size(spec: ModelSpec, page_size: int | None) -> int:
    """Positions of a page, default the block length: a multiple or a divisor of it, so that a block never straddles
    more pages than it must.

    Raises:
        InputError: neither of them.
    """
    size = spec.block_length if page_size is None else page_size
    if size < 1 or (size % spec.block_length and spec.block_length % size):
        raise InputError(
            f"KV store: page_size must be a multiple or a divisor of {spec.family}'s block length "
            f"{spec.block_length}, got {size}."
        )
    return size

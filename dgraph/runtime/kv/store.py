"""Paged caches of many sequences: keys and values, and other values that a program keeps per position."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from dgraph.errors import DgraphError, InputError, PoolFull
from dgraph.runtime.graphs.upload import upload
from dgraph.spec import ModelSpec
from dgraph.types.shapes import InputSpec, of_window

NO_PAGE = -1
PARTS = 2
"""Windows of a prompt that a call prefills of one sequence at most, if keys behind a window are dropped."""
SPARE = 32
"""A pool that may grow gets one spare page for every 32.

Later batches seldom have exactly the size of the first, and CUDA graphs that read a cache are recorded anew when it has
grown.
"""


class KVStore:
    """Paged caches of declared shapes, and the owners of each page.

    Position p of a sequence lives at cache[table[p // page], p % page] in every cache. Pages are handed out
    when a sequence is allocated or extended and come back when it is freed; the caches grow when too few are free.
    Growing replaces the tensors, so ask for `tensors()` after the last `allocate`. A page may have several owners: each
    `retain`s it, and it is free when all have dropped it.

    Caches of layers with a window are in pages of their own, one `Ring` for each declared window. Statements here about
    pages hold for those of the other layers; a sequence gets both, and loses both, together.

    Args:
        caches: declarations of inputs per position, `("pages", "page", ...)`, each with its own sizes and dtype.
        page_size: positions of a page.
        device: device of the caches.
        prefilled: names of those that prompts are written to; None for all.

    Attributes:
        limit: the most pages that there may be; None for as many as memory holds.
        spare: pages whose only owner `keep`s them, and could do without.
        reclaim: called with a number of pages when too few are free and the pool may not grow; drops spare pages.
        rings: the pages of layers with a window, by window.
        renews: True if some cache is reset with each block.

    Raises:
        InputError: page_size below 1, or a cache whose sizes are not numbers.
    """

    window = 0

    def __init__(
        self,
        caches: Iterable[InputSpec],
        *,
        page_size: int,
        device: torch.device | str = "cpu",
        prefilled: Collection[str] | None = None,
    ):
        if page_size < 1:
            raise InputError(f"KV store: a page holds at least 1 position, got page_size={page_size}.")
        self.page_size, self.device = page_size, torch.device(device)
        self._specs: dict[str, InputSpec] = {}
        self._caches: dict[str, Tensor] = {}
        self.rings: dict[int, Ring] = {}
        self._prefilled, self.renews = prefilled, False
        self.limit: int | None = None
        self.reclaim: Callable[[int], None] = lambda pages: None
        self._pages = 0
        self.declare(caches)
        self._free: list[int] = []  # the lowest page last: low pages are used first
        self._owners: list[int] = []  # of each page
        self._kept: set[int] = set()
        self.spare = 0
        self._owned: dict[int, list[int]] = {}
        self._next = 0

    def declare(self, caches: Iterable[InputSpec]) -> None:
        """Make the caches that do not exist yet, with as many pages as the others.

        Raises:
            InputError: a cache whose sizes are not numbers.
        """
        for spec in caches:
            self.renews |= spec.reset == "block"
            if spec.window != self.window:
                if spec.window not in self.rings:
                    self.rings[spec.window] = Ring(spec.window, page_size=self.page_size, device=self.device)
                ring = self.rings[spec.window]
                ring.declare([spec])
                ring.prefilled |= self._prefilled is None or spec.name in self._prefilled
            elif spec.name not in self._specs:
                self._specs[spec.name] = spec
                self._caches[spec.name] = self._empty(spec.name, self._pages)

    def unlimited(self) -> None:
        """Let the pool grow as needed; if no page is owned, it begins with no pages."""
        self.limit, self.reclaim = None, lambda pages: None
        if not any(self._owners):
            self._pages, self._free, self._owners = 0, [], []
            for name in self._caches:
                self._caches[name] = self._empty(name, 0)
        for ring in self.rings.values():
            ring.unlimited()

    @property
    def declared(self) -> tuple[InputSpec, ...]:
        """The declarations of the caches."""
        return (*self._specs.values(), *(spec for ring in self.rings.values() for spec in ring.declared))

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
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` positions."""
        return -(-tokens // self.page_size)

    @property
    def position_bytes(self) -> int:
        """Bytes that a position takes in all caches together."""
        return sum(math.prod(spec.element) * spec.dtype.itemsize for spec in self._specs.values())

    def pool_bytes(self, pages: int, rings: Iterable[int] = ()) -> int:
        """Bytes of that many pages, and that many of each ring."""
        stores = zip((self, *self.rings.values()), (pages, *rings), strict=True)
        return sum(count * each.page_size * each.position_bytes for each, count in stores)

    def allocate(
        self,
        tokens: Sequence[int],
        first: Sequence[int] | None = None,
        shared: Sequence[Sequence[int]] | None = None,
        rings: Sequence[Sequence[int]] | None = None,
    ) -> list[int]:
        """Allocate room for one sequence per entry, for that many positions; return their handles in order.

        A page begins with its cache's declared initial value if that is reset with a response. Else its values are
        finite but arbitrary: zeros, or those of an earlier sequence.

        Args:
            tokens: positions of each sequence.
            first: the first position of each sequence that needs a page; positions on pages before it have none.
            shared: pages that each sequence begins with, which others own as well.
            rings: pages of each sequence in each ring for its whole life (see `ring_pages`); default as many as for all
                of its positions.

        Raises:
            PoolFull: more pages than are free, in a pool that may not grow.
        """
        absent = [0] * len(tokens) if first is None else [n // self.page_size for n in first]
        given = [[] for _ in tokens] if shared is None else shared
        counts = [self.pages_for(n) - none - len(have) for n, none, have in zip(tokens, absent, given, strict=True)]
        for have in given:  # first of all, so that reclaiming cannot take them
            for page in have:
                self.retain(page)
        held = [[self.pages_for(n)] * len(self.rings) for n in tokens] if rings is None else rings
        try:
            self._make_room(sum(counts))
            for at, ring in enumerate(self.rings.values()):
                ring._make_room(sum(each[at] for each in held))
        except PoolFull:
            for have in given:
                for page in have:
                    self.drop(page)
            raise
        handles = []
        for count, none, have, each in zip(counts, absent, given, held, strict=True):
            self._owned[self._next] = [NO_PAGE] * none + [*have, *self._take(count)]
            for ring, pages in zip(self.rings.values(), each, strict=True):
                ring._owned[self._next] = ring._take(pages)
            handles.append(self._next)
            self._next += 1
        return handles

    @property
    def windows(self) -> tuple[int, ...]:
        """Windows behind which keys are dropped, those of a prompt among them."""
        return tuple(window for window, ring in self.rings.items() if ring.prefilled)

    def renew(self, sequences: Sequence[int]) -> None:
        """Begin a block of each of those sequences: caches that last for a block are reset to their initial values."""
        for ring in self.rings.values():
            ring._reset([page for sequence in sequences for page in ring._pages_of(sequence)])

    def ring_pages(self, tokens: int, rows: int, prompt: int = 0) -> tuple[int, ...]:
        """Pages that a sequence of `tokens` positions takes in each ring.

        A step forwards at most `rows` of its rows, and a prefill call at most `prompt` of them.
        """
        return tuple(r.pages_of(tokens, max(rows, prompt) if r.prefilled else rows) for r in self.rings.values())

    def part(self, block: int) -> int | None:
        """Rows of a prompt that a call prefills of one sequence at most, whole blocks; None for any number."""
        return max(block, PARTS * max(self.windows) // block * block) if self.windows else None

    def settle(self, sequence: int, start: int, rows: int) -> None:
        """Give back the ring pages that a sequence no longer needs.

        From now on a call forwards at most `rows` of its rows, none before the position `start`.
        """
        for ring in self.rings.values():
            ring.settle(sequence, start, rows)

    def widen(self, rows: Mapping[int, int]) -> bool:
        """Give sequences ring pages for first calls that forward more of their rows; `settle` gives them back.

        rows: of the call, by sequence. False, and nothing has changed, if too few pages are free.
        """
        missing = [
            {s: max(0, ring_size(each.window, n, self.page_size) - len(each._pages_of(s))) for s, n in rows.items()}
            for each in self.rings.values()
        ]
        try:
            for ring, more in zip(self.rings.values(), missing, strict=True):
                ring._make_room(sum(more.values()))
        except PoolFull:
            return False
        for ring, more in zip(self.rings.values(), missing, strict=True):
            for sequence, count in more.items():
                ring._owned[sequence] += ring._take(count)
        return True

    def reserve(self, pages: int) -> None:
        """Make `pages` pages now; if no page is owned, exactly that many.

        Caches that grow later are replaced, and CUDA graphs that read them are captured anew.
        """
        if pages > self._pages or (pages < self._pages and not any(self._owners)):
            self._grow(pages)

    def extend(self, sequence: int, tokens: int) -> bool:
        """Give a sequence room for that many positions in all; return True if it got more pages.

        Raises:
            PoolFull: more pages than are free, in a pool that may not grow.
        """
        owned = self._pages_of(sequence)
        missing = self.pages_for(tokens) - len(owned)
        if missing <= 0:
            return False
        self._make_room(missing)
        owned += self._take(missing)
        return True

    def retain(self, page: int) -> None:
        """Add an owner to a page that is owned."""
        self.spare -= self._alone(page)
        self._owners[page] += 1

    def drop(self, page: int) -> None:
        """Remove an owner of a page; without owners it is free."""
        self._owners[page] -= 1
        self.spare += self._alone(page)
        if self._owners[page] == 0:
            self._free.append(page)

    def keep(self, page: int) -> None:
        """Add an owner to an owned page until the page is needed: it is spare when all others have dropped it."""
        self.retain(page)
        self._kept.add(page)

    def let_go(self, page: int) -> None:
        """Give up a page that was kept."""
        self.spare -= self._alone(page)
        self._kept.remove(page)
        self.drop(page)

    def _alone(self, page: int) -> bool:
        return self._owners[page] == 1 and page in self._kept

    def owners(self, page: int) -> int:
        """Number of owners of a page."""
        return self._owners[page]

    def owned(self, sequence: int) -> tuple[int, ...]:
        """The pages of a sequence, -1 where it has none."""
        return tuple(self._pages_of(sequence))

    def _make_room(self, pages: int) -> None:
        missing = pages - len(self._free)
        if missing > 0 and self.limit is not None and self._pages + missing > self.limit:
            self.reclaim(missing)
            missing = pages - len(self._free)
            if self._pages + max(missing, 0) > self.limit:
                raise PoolFull(
                    f"KV store: {pages} pages of {self.page_size} positions are needed, {len(self._free)} of "
                    f"{self.limit} are free."
                )
        if missing > 0:
            pages = self._pages + missing
            self._grow(pages if self.limit is not None else pages + pages // SPARE)

    def _take(self, count: int) -> list[int]:
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        self._reset(pages)
        return pages

    def _reset(self, pages: list[int]) -> None:
        """Reset the caches that begin anew with a response, or with a block, on those pages."""
        self._fill(pages, (spec for spec in self._specs.values() if spec.reset != "never"))

    def _fill(self, pages: list[int], specs: Iterable[InputSpec]) -> None:
        """Set those pages of some caches to the initial values."""
        initial = {spec.name: spec.initial for spec in specs}
        if initial and pages:
            (index,) = upload(self.device, torch.tensor(pages))
            for name, value in initial.items():
                self._caches[name][index] = value  # `index_fill_` does not know float8

    def clear(self, sequence: int) -> None:
        """Reset the pages that a sequence owns alone to finite initial values, after its numbers went wrong."""
        pages = [page for page in self._pages_of(sequence) if page != NO_PAGE and self._owners[page] == 1]
        self._fill(pages, self._specs.values())
        for ring in self.rings.values():
            ring.clear(sequence)

    def free(self, sequence: int) -> None:
        """Hand the pages of a sequence back."""
        for page in reversed(self._pages_of(sequence)):
            if page != NO_PAGE:
                self.drop(page)
        del self._owned[sequence]
        for ring in self.rings.values():
            ring.free(sequence)

    def release(self, sequence: int, first: int) -> None:
        """Hand back those pages of a sequence that only hold positions before `first`."""
        owned = self._pages_of(sequence)
        for i in range(min(first // self.page_size, len(owned))):
            if owned[i] != NO_PAGE:
                self.drop(owned[i])
                owned[i] = NO_PAGE

    def page_table(self, sequences: Sequence[int], rows: int = 0, columns: int = 0) -> Tensor:
        """i32[b, P] on the host, P the most pages of any of them; -1 where a sequence has no page.

        rows, columns: the least size of the table; rows past the sequences are -1.
        """
        pages = [self._columns(s, columns) for s in sequences]
        shape = max(rows, len(pages)), max([columns, *map(len, pages)])
        table = torch.full(shape, NO_PAGE, dtype=torch.int32)
        for row, owned in zip(table, pages, strict=False):
            row[: len(owned)] = torch.tensor(owned, dtype=torch.int32)
        return table

    def page_tables(self, sequences: Sequence[int], columns: int = 0) -> dict[str, Tensor]:
        """The tables of all pages and of each ring, under the names that programs ask for; see `page_table`."""
        stores = (self, *self.rings.values())
        return {of_window("page_table", each.window): each.page_table(sequences, 0, columns) for each in stores}

    def tensors(self) -> dict[str, Tensor]:
        """The caches under the names that programs ask for."""
        found = dict(self._caches)
        for ring in self.rings.values():
            found |= ring.tensors()
        return found

    def gather(self, name: str, sequence: int, tokens: int | None = None, first: int = 0) -> Tensor:
        """[tokens - first, ...]: a copy of a cache at positions first .. tokens-1 (default: all pages).

        Raises:
            DgraphError: a cache that does not exist or keeps a window alone, or a position without a page.
        """
        if any(name in ring._caches for ring in self.rings.values()):
            raise DgraphError(
                f"KV store: {name!r} keeps a window of its positions alone; build the recipe with rings=False."
            )
        if name not in self._caches:
            raise DgraphError(f"KV store: there is no cache {name!r}; it has {', '.join(self._caches) or 'none'}.")
        pages = torch.tensor(self._pages_of(sequence), dtype=torch.int64, device=self.device)
        room = len(pages) * self.page_size
        if tokens is not None and tokens > room:
            raise DgraphError(f"KV store: sequence {sequence} has {room} positions, asked for {tokens}.")
        if (pages[first // self.page_size :] == NO_PAGE).any():
            raise DgraphError(f"KV store: sequence {sequence} has no pages for position {first}; ask for later ones.")
        return self._caches[name][pages].flatten(0, 1)[first:tokens]

    def _columns(self, sequence: int, columns: int) -> list[int]:
        """The row of a sequence in a page table."""
        return self._pages_of(sequence)

    def _pages_of(self, sequence: int) -> list[int]:
        if sequence not in self._owned:
            raise DgraphError(
                f"KV store: sequence {sequence} is not allocated (never was, or was freed already); "
                f"{len(self._owned)} are."
            )
        return self._owned[sequence]

    def _grow(self, pages: int) -> None:
        if not any(self._owners):  # nothing to keep
            self._pages, self._free = 0, []
        kept = self._pages
        for name in self._caches:
            old = self._caches[name]
            if kept == 0:  # let go of the old tensor first, so that both never exist at once
                old = self._caches[name] = self._empty(name, 0)
            new = self._empty(name, pages)
            new[:kept] = old[:kept]
            self._caches[name] = new
        # Only now: if memory runs out above, the earlier allocations are still intact.
        self._free = list(range(pages - 1, kept - 1, -1)) + self._free
        self._owners = [*self._owners[:kept], *[0] * (pages - kept)]
        self._pages = pages

    def _empty(self, name: str, pages: int) -> Tensor:
        # Zeros, not uninitialised memory: a kernel may load positions past a row's limit and weigh them by 0,
        # and 0 * NaN would reach the result.
        spec = self._specs[name]
        return spec.empty((pages, self.page_size, *spec.element), self.device).zero_()


class Ring(KVStore):
    """Pages of layers whose rows see a window: a sequence has a few, which its positions take in turn.

    Position p of a sequence of n pages lives at cache[ring[p // page % n], p % page]. So its page table repeats its
    pages and never changes while it is decoded. A call forwards at most r rows of a sequence, in the order of their
    positions; it reads and writes r + window - 1 neighbouring positions. These have places of their own if a ring has
    at least that many places (n * page). So no row finds a position overwritten that it sees; positions out of its
    sight may be.

    Attributes:
        prefilled: True if prompts are written to it.
    """

    def __init__(self, window: int, *, page_size: int, device: torch.device | str = "cpu"):
        self.window, self.prefilled = window, False
        super().__init__((), page_size=page_size, device=device)

    def pages_of(self, tokens: int, rows: int) -> int:
        """Pages that a sequence of `tokens` positions takes, if a call forwards at most `rows` of its rows."""
        return min(self.pages_for(tokens), ring_size(self.window, rows, self.page_size))

    def settle(self, sequence: int, start: int, rows: int) -> None:
        ring = self._pages_of(sequence)
        count = min(len(ring), ring_size(self.window, rows, self.page_size))
        first = max(0, start - self.window + 1) // self.page_size
        kept = {column % count: ring[column % len(ring)] for column in range(first, first + count)}
        for page in set(ring).difference(kept.values()):
            self.drop(page)
        self._owned[sequence] = [kept[column] for column in range(count)]

    def _columns(self, sequence: int, columns: int) -> list[int]:
        ring = self._pages_of(sequence)
        return [ring[column % len(ring)] for column in range(columns)]


def ring_size(window: int, rows: int, page: int) -> int:
    """Pages of a ring: enough for rows + window - 1 neighbouring positions (see `Ring`).

    They are also enough for all pages with any of the window - 1 positions before a step's rows, which `Ring.settle`
    keeps.
    """
    return max(-(-(rows + window - 1) // page), -(-(window - 2) // page) + 1)


def page_size_for(block: int, device: torch.device) -> int:
    """Positions per KV page: about 128 on a GPU, which attention reads fastest; a block elsewhere."""
    return block * max(1, 128 // block) if device.type == "cuda" else block


def check_page_size(spec: ModelSpec, page_size: int | None) -> int:
    """Positions of a page, default the block length.

    A size is a multiple or a divisor of the block length, so that a block never straddles more pages than it must.

    Raises:
        InputError: it is neither.
    """
    size = spec.block_length if page_size is None else page_size
    if size < 1 or (size % spec.block_length and spec.block_length % size):
        raise InputError(
            f"KV store: page_size must be a multiple or a divisor of {spec.family}'s block length "
            f"{spec.block_length}, got {size}."
        )
    return size

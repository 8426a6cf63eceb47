"""Pools of an engine: the memory for keys and values, divided among pages, rings and packed keys."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dgraph.errors import InputError
from dgraph.runtime.loop.session import BlockSession
from dgraph.runtime.requests import (
    Request,
    first_cached,
    first_positions,
    kept_candidates,
    positions,
    ring_pages,
)

MIXED_SHARE = 32
"""Ring pages for prompts that steps encode take at most one in `MIXED_SHARE` of the memory. They save a forward, and
hold no request.
"""


@dataclass(frozen=True)
class Holding:
    """Share of a request in each pool.

    Attributes:
        first: pages when it is admitted.
        life: pages at its end, where none is given back before.
        kept: of these, pages after its first step.
        rings: pages of each ring while its prompt is prefilled; it never has more.
        entries: packed entries in each group of layers alike, for its whole life.
    """

    first: int
    life: int
    kept: int
    rings: tuple[int, ...]
    entries: tuple[int, ...]

    @classmethod
    def of(cls, request: Request, session: BlockSession, block: int, by_block: bool = False) -> Holding:
        """The share of a request; by_block: pages are given out as it grows."""
        kv, packed, spec = session.kv, session.packed, session.spec
        gone = first_cached(len(request.ids), block, spec, packed) // kv.page_size
        absent = 0 if spec.attention == "block_causal" else gone
        whole = kv.pages_for(positions(request, block, spec))
        first = kv.pages_for(first_positions(request, block, by_block, spec))
        entries = () if packed is None else packed.needs(kept_candidates(request, packed.plan))
        rings = ring_pages(request, block, spec, kv)
        return cls(first - absent, whole - absent, whole - gone, rings, entries)


@dataclass(frozen=True)
class PoolSizes:
    """Sizes of an engine's pools.

    Attributes:
        pages: of layers that see all positions.
        rings: pages of each ring.
        entries: packed entries of each group of layers alike; see `PackedKV.needs`.
    """

    pages: int
    rings: tuple[int, ...] = ()
    entries: tuple[int, ...] = ()

    def bytes(self, session: BlockSession, slots: int) -> int:
        """Bytes that they take on the device, with the counts of packed keys of `slots` sequences."""
        packed = session.packed
        own = 0 if packed is None else packed.pool_bytes(self.entries, slots)
        return session.kv.pool_bytes(self.pages, self.rings) + own

    def with_rings(self, more: int) -> PoolSizes:
        """The same with `more` pages of each ring beside those that it has."""
        return replace(self, rings=tuple(pages + more for pages in self.rings))

    def allocate(self, session: BlockSession) -> None:
        """Make the caches of a session, which has no sequence, of these sizes; they never grow then."""
        kv = session.kv
        for store, pages in zip((kv, *kv.rings.values()), (self.pages, *self.rings), strict=True):
            store.limit = pages
            store.reserve(pages)
        if session.packed is not None:
            session.packed.allot(self.entries)


def pool_sizes(
    session: BlockSession,
    slots: int,
    longest: Sequence[Request],
    usual: Request | None,
    block: int,
    kv_bytes: int,
    by_block: bool = False,
    mixed: int = 0,
) -> PoolSizes:
    """Divide memory among the pools of an engine.

    They have what `slots` of the longest requests can use, if memory holds that. Else they have what as many usual
    requests take as it holds. Where all keys stay in pages, these requests have room for any length in the other pools,
    so that they wait for pages alone.

    Args:
        session: its caches.
        slots: requests at a time, at most.
        longest: the longest requests: one has most pages, another most packed keys.
        usual: a request as most will be. None: one whose pages take as much memory as all that it has beside pages.
        block: positions of a block.
        kv_bytes: bytes of all pools together.
        by_block: pages are given out as a request grows.
        mixed: rows of prompts that steps encode, at most.

    Raises:
        InputError: memory does not hold one page beside the other pools.
    """
    kv, spec = session.kv, session.spec
    top = [Holding.of(request, session, block) for request in longest]
    mine = None if usual is None else Holding.of(usual, session, block, by_block)
    page_bytes = kv.position_bytes * kv.page_size
    entries = tuple(map(max, zip(*(each.entries for each in top), strict=True)))
    packed = entries if session.paged or mine is None else mine.entries
    # One sequence prefills its prompt, the others hold the ring pages that they keep after theirs.
    begun = tuple(map(max, zip(*(each.rings for each in top), strict=True)))
    causal = spec.attention == "block_causal"
    rows = max(request.step_rows(block, spec) if causal else request.end for request in longest)
    after = kv.ring_pages(max(positions(request, block, spec) for request in longest), rows)

    def of(count: int) -> PoolSizes:
        """Pools of `count` usual requests."""
        rings = (b + (min(count, slots) - 1) * a for b, a in zip(begun, after, strict=True))
        kept = (min(count * some, slots * all) for some, all in zip(packed, entries, strict=True))
        found = PoolSizes(0, tuple(rings), tuple(kept))
        if mine is None:
            return replace(found, pages=found.bytes(session, slots) // max(1, page_bytes))
        pages = count * min(mine.first, mine.kept) + max(0, mine.first - mine.kept)  # one is in its first step
        return replace(found, pages=pages)

    # First steps that encode prompts hold more ring pages; where none is free, prompts have a forward of their own.
    riding = min(kv.pages_for(mixed), kv_bytes // MIXED_SHARE // max(1, kv.pool_bytes(0, [1] * len(begun))))
    kv_bytes -= kv.pool_bytes(0, [riding] * len(begun))
    most = PoolSizes(slots * max(each.life for each in top), of(slots).rings, tuple(slots * n for n in entries))
    if most.bytes(session, slots) <= kv_bytes:
        return most.with_rings(riding)
    counts = range(1, 1 + slots * (1 if session.paged else max(request.end for request in longest)))
    fitting = counts[: bisect_right(counts, kv_bytes, key=lambda count: of(count).bytes(session, slots))]
    found = of(fitting[-1] if fitting else 1)
    # One of the longest has room, unless that leaves too few pages for a usual one. Where memory does not hold a usual
    # one either, shorter ones still run: pages and packed keys get equal shares of what it takes.
    share = min(1.0, kv_bytes / max(1, found.bytes(session, slots)))
    less = tuple(int(share * count) for count in found.entries)
    for held in (tuple(map(max, zip(found.entries, entries, strict=True))), less):
        beside = PoolSizes(0, found.rings, held).bytes(session, slots)
        pages = min(most.pages, (kv_bytes - beside) // page_bytes) if page_bytes else most.pages
        if mine is None or pages >= mine.life:
            break
    if pages < 1:
        raise InputError(
            f"kv_bytes={kv_bytes} does not hold one page of {kv.page_size} positions, which takes {page_bytes} bytes"
            f"{f', beside {beside} for layers with a window and packed keys' if beside else ''}."
        )
    return PoolSizes(pages, found.rings, held).with_rings(riding)

"""Cache of the keys and values of earlier prompts: full pages, found by their content."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dgraph.runtime.kv.store import KVStore

Content = tuple[int, ...]


@dataclass(eq=False)
class _Part:
    """Pages whose keys follow from their tokens and those before them. parent: the part before; None for the first."""

    pages: tuple[int, ...]
    content: Content
    parent: _Part | None
    children: dict[Content, _Part] = field(default_factory=dict)


class PrefixCache:
    """Pages of prompts, by content.

    In a block-causal model the keys of a full block depend only on the tokens up to its end. So two prompts that begin
    alike can share pages, in parts that are whole pages as well as whole blocks. Where a row of a prompt sees only the
    rows before it, its keys depend only on these. Any whole page is a part then.

    It owns its pages beside the sequences that use them. When the pool has too few pages, those that no sequence owns
    go. The least recently used go first, and pages at the end of a prompt before those that they follow.

    Args:
        kv: the store of the pages.
        block: positions that see each other; 1 where a row of a prompt sees only the rows before it.

    Attributes:
        asked, found: tokens of prompts that were looked up, and that were there.
    """

    def __init__(self, kv: KVStore, block: int):
        self._kv, self._block, self._size = kv, block, math.lcm(block, kv.page_size)
        self._root: dict[Content, _Part] = {}
        self._used: OrderedDict[_Part, None] = OrderedDict()  # the least recently used first
        self.asked = self.found = 0

    def __len__(self) -> int:
        """Pages that it owns."""
        return len(self._used) * (self._size // self._kv.page_size)

    @property
    def spare(self) -> int:
        """Pages that could be dropped, since no sequence owns them. The owner of a page owns those before it, too."""
        return self._kv.spare

    def look_up(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Pages that hold the keys of the beginning of a prompt."""
        found: list[_Part] = []
        children = self._root
        for content in self._contents(ids):
            part = children.get(content)
            if part is None:
                break
            found.append(part)
            children = part.children
        for part in found:
            self._used.move_to_end(part)
        self.asked += len(ids) // self._block * self._block
        self.found += len(found) * self._size
        return tuple(page for part in found for page in part.pages)

    def add(self, ids: Sequence[int], pages: Sequence[int]) -> None:
        """Keep the pages of a prompt that has been prefilled.

        pages: of its sequence, from the first position on.
        """
        each = self._size // self._kv.page_size
        parent, children = None, self._root
        for number, content in enumerate(self._contents(ids)):
            part = children.get(content)
            if part is None:
                mine = tuple(pages[number * each : (number + 1) * each])
                part = children[content] = _Part(mine, content, parent)
                for page in mine:
                    self._kv.keep(page)
                self._used[part] = None
            self._used.move_to_end(part)
            parent, children = part, part.children

    def reclaim(self, pages: int) -> None:
        """Drop `pages` pages that no sequence owns, or as many as there are."""
        # Parts that others follow come after these; so leaves are looked for again after each round.
        while pages > 0:
            free = [part for part in self._used if not part.children and self._alone(part)]
            if not free:
                return
            for part in free:
                if pages > 0:
                    self._drop(part)
                    pages -= len(part.pages)

    def forget(self, ids: Sequence[int]) -> None:
        """Drop everything kept of a prompt from its first page on, even if sequences use it: its keys went wrong."""
        first = next((self._root.get(content) for content in self._contents(ids)), None)
        waiting = [] if first is None else [first]
        order: list[_Part] = []
        while waiting:
            part = waiting.pop()
            order.append(part)
            waiting += part.children.values()
        for part in reversed(order):
            self._drop(part)

    def clear(self) -> None:
        """Drop everything."""
        for part in reversed(list(self._used)):
            for page in part.pages:
                self._kv.let_go(page)
        self._used.clear()
        self._root.clear()

    def _contents(self, ids: Sequence[int]) -> Iterator[Content]:
        """The tokens of each part that a prompt fills."""
        return (tuple(ids[at - self._size : at]) for at in range(self._size, len(ids) + 1, self._size))

    def _alone(self, part: _Part) -> bool:
        return all(self._kv.owners(page) == 1 for page in part.pages)

    def _drop(self, part: _Part) -> None:
        siblings = self._root if part.parent is None else part.parent.children
        del siblings[part.content]
        del self._used[part]
        for page in part.pages:
            self._kv.let_go(page)

"""Keys and values of prompts that have been seen before: full pages, found by their content."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from dgraph.runtime.kv import KVStore

Content = tuple[int, ...]


@dataclass(eq=False)
class _Page:
    """A page whose keys follow from its tokens and those before it. parent: the page before; None for the first."""

    page: int
    content: Content
    parent: _Page | None
    children: dict[Content, _Page] = field(default_factory=dict)


class PrefixCache:
    """Pages of prompts, by content. In a block-causal model the keys of a full block depend on the tokens up to its end
    alone, so two prompts that begin alike can share the pages of what they have in common.

    It owns its pages beside the sequences that use them. When the pool has too few, pages that nobody else owns go, the
    least recently used first, those at the end of a prompt before those that they follow.

    Args:
        kv: whose pages they are.
        block: of the model; a page is a multiple or a divisor of it.

    Attributes:
        asked, found: tokens of prompts that were looked up, and that were there.
    """

    def __init__(self, kv: KVStore, block: int):
        self._kv, self._block = kv, block
        self._root: dict[Content, _Page] = {}
        self._used: OrderedDict[_Page, None] = OrderedDict()  # the least recently used first
        self.asked = self.found = 0

    def __len__(self) -> int:
        return len(self._used)

    @property
    def spare(self) -> int:
        """Pages that could be dropped: nobody else owns them, nor a page that follows them."""
        return sum(self._kv.owners(page.page) == 1 for page in self._used)

    def look_up(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Pages that hold the keys of the beginning of a prompt, whole blocks of it."""
        size, whole = self._kv.page_size, len(ids) // self._block * self._block
        found: list[_Page] = []
        children = self._root
        for first in range(0, whole - size + 1, size):
            page = children.get(tuple(ids[first : first + size]))
            if page is None:
                break
            found.append(page)
            children = page.children
        # A sequence begins at a block.
        while len(found) * size % self._block:
            found.pop()
        for page in found:
            self._used.move_to_end(page)
        self.asked += whole
        self.found += len(found) * size
        return tuple(page.page for page in found)

    def add(self, ids: Sequence[int], pages: Sequence[int]) -> None:
        """Keep the pages of a prompt that has been prefilled. pages: of its sequence, from the first position on."""
        size, whole = self._kv.page_size, len(ids) // self._block * self._block
        parent, children = None, self._root
        for number in range(whole // size):
            content = tuple(ids[number * size : (number + 1) * size])
            page = children.get(content)
            if page is None:
                page = children[content] = _Page(pages[number], content, parent)
                self._kv.retain(page.page)
                self._used[page] = None
            self._used.move_to_end(page)
            parent, children = page, page.children

    def reclaim(self, pages: int) -> None:
        """Drop so many pages that nobody else owns, if there are."""
        # Pages that others follow come after these; so leaves are looked for again after each round.
        while pages > 0:
            free = [p for p in self._used if not p.children and self._kv.owners(p.page) == 1][:pages]
            if not free:
                return
            for page in free:
                self._drop(page)
            pages -= len(free)

    def forget(self, ids: Sequence[int]) -> None:
        """Drop what is kept of a prompt from its first page on, whoever uses it: its keys went wrong."""
        size = self._kv.page_size
        first = self._root.get(tuple(ids[:size]))
        waiting = [] if first is None else [first]
        order: list[_Page] = []
        while waiting:
            page = waiting.pop()
            order.append(page)
            waiting += page.children.values()
        for page in reversed(order):
            self._drop(page)

    def clear(self) -> None:
        """Drop everything."""
        for page in self._used:
            self._kv.drop(page.page)
        self._used.clear()
        self._root.clear()

    def _drop(self, page: _Page) -> None:
        siblings = self._root if page.parent is None else page.parent.children
        del siblings[page.content]
        del self._used[page]
        self._kv.drop(page.page)

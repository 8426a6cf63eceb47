"""Keys and values of sequences: paged caches, packed entries, and page tables."""

from __future__ import annotations

from dgraph.moved import names_of

__getattr__ = names_of(__name__, "dgraph.runtime.kv.store")

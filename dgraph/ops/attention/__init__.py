"""Attention over rows, pages, packed entries and sparse keys."""

from __future__ import annotations

from dgraph.moved import names_of

__getattr__ = names_of(__name__, "dgraph.ops.attention.attention")

"""Rows of a graph as a list."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node


@dataclass(frozen=True)
class Listed:
    """Some rows of a row set as a list.

    Attributes:
        index: i64[K], the number of each in that set, ascending, -1 after the last.
        cu_rows: i32[b+1], their offsets per sequence.
    """

    index: Node
    cu_rows: Node

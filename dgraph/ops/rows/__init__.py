"""Norms and rotations, row by row."""

from __future__ import annotations

from dgraph.moved import names_of

__getattr__ = names_of(__name__, "dgraph.ops.padded")

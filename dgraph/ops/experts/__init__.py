"""Mixtures of experts: routing and grouped products."""

from __future__ import annotations

from dgraph.moved import names_of

__getattr__ = names_of(__name__, "dgraph.ops.experts.experts")

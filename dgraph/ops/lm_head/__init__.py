"""The LM head in chunks, reduced to tokens and confidences."""

from __future__ import annotations

from dgraph.moved import names_of

__getattr__ = names_of(__name__, "dgraph.ops.lm_head.lm_head")

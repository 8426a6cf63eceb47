"""Sampling of tokens from logits: confidences, random numbers, and stop strings."""

from __future__ import annotations

from dgraph.moved import names_of
from dgraph.runtime.sampling.sampler import Sampler as Sampler

__getattr__ = names_of(__name__, "dgraph.runtime.sampling.sampler")

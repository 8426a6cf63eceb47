"""Sampling of tokens from logits: confidences, random numbers, and stop strings."""

from __future__ import annotations

from dgraph.runtime.sampling.sampler import Sampler as Sampler

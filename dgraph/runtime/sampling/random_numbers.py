"""Random numbers that do not depend on batch size, row order or device.

A draw is a hash of (seed, prompt, position, step of its sequence). The mixer is a 32-bit one (Wellons, "lowbias32") on
int64 values: its products stay below 2**63, so nothing relies on overflow.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
_LANES = (0x9E3779B9, 0x85EBCA6B)  # two independent 32-bit chains make one 62-bit seed
_NOISE = 0x27D4EB2F
_POLICY = 0x40000000
_CANVAS = 0x20000000

IntOrTensor = TypeVar("IntOrTensor", int, Tensor)


def mix(x: IntOrTensor) -> IntOrTensor:
    """A bijection of 32-bit words (0 <= x < 2**32) that scatters them; ints or i64 tensors."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & WORD
    x = ((x ^ (x >> 15)) * 0x735A2D97) & WORD
    return x ^ (x >> 15)


def sequence_keys(seed: int, prompt: Tensor) -> Tensor:
    """i64[2, b]: keys of `row_seeds` from prompt indices i64[b]. `seed` is any int; its low 64 bits count."""
    lanes = [mix(mix(lane ^ (seed & WORD)) ^ ((seed >> 32) & WORD)) for lane in _LANES]
    start = torch.tensor(lanes, dtype=torch.int64, device=prompt.device)
    return mix(start[:, None] ^ prompt)


def row_seeds(keys: Tensor, positions: Tensor, counter: Tensor) -> Tensor:
    """i64[N] seeds >= 0 of rows.

    keys: i64[2, N] from `sequence_keys`, per row; positions i64[N]: absolute positions; counter i64[N]:
    forward steps that the row's sequence has done before.
    """
    high, low = mix(mix(keys ^ counter) ^ positions).unbind(0)
    return (high >> 2 << 32) | low


def uniform(seeds: Tensor) -> Tensor:
    """f32 in [0, 1) from `row_seeds`, independent of a program's draws from the same seeds."""
    word = mix(mix((seeds & WORD) ^ _NOISE) ^ (seeds >> 32))
    return (word >> 8).float() * 2.0**-24


def random_ids(keys: Tensor, positions: Tensor, counter: Tensor, vocab: int) -> Tensor:
    """i64[b, B]: tokens drawn uniformly from a vocabulary, independent of all other draws.

    keys: i64[2, b]; positions i64[b, B], below 2^29; counter i64[b].
    """
    return (row_seeds(keys[:, :, None], positions ^ _CANVAS, counter[:, None]) & WORD) * vocab >> 32


def policy_noise(keys: Tensor, positions: Tensor, counter: Tensor) -> Tensor:
    """f32[b, B] in [0, 1) for a decode policy, independent of the draws of programs.

    keys: i64[2, b]; positions i64[b, B], below 2^30; counter i64[b].
    """
    return uniform(row_seeds(keys[:, :, None], positions ^ _POLICY, counter[:, None]))


def policy_order(keys: Tensor, positions: Tensor) -> Tensor:
    """f32[b, B] in [0, 1), as `policy_noise`, but the same in every step: an order of positions that is drawn once."""
    return policy_noise(keys, positions, torch.full_like(keys[0], WORD))  # a count that no sequence reaches

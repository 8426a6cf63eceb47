"""Choice of the kernel that sums over ranks on GPUs: a pure function of facts that all ranks share.

So all ranks choose the same kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

Kind = Literal["nccl", "one_shot", "two_shot", "multimem"]
KINDS: tuple[Kind, ...] = ("nccl", "one_shot", "two_shot", "multimem")
"""Kinds of sums over ranks.

- one_shot: every rank reads all of the others' values and sums by itself.
- two_shot: every rank sums a part and gives it to the others.
- multimem: as two-shot, but the switch sums (NVLink multicast).
- nccl: the algorithm that NCCL chooses.
"""

ALIGNMENT = 16
"""Bytes that the kernels of symmetric memory move at a time."""
LARGEST = 64 << 20
"""Bytes up to which these kernels are used.

Above, NCCL is bound by the link as well, and needs no buffer of that size.
"""
ONE_SHOT: Mapping[int, int] = {2: 512 << 10, 4: 256 << 10, 8: 128 << 10}
"""Bytes up to which one-shot is taken, by world.

One-shot waits once where two-shot waits twice, and reads once per other rank. The value for two H200s is measured, and
that for four lies between measured sizes (benchmarks/results/parallel.md). The value for eight is an assumption.
"""
MULTIMEM: Mapping[int, tuple[int, ...]] = {9: (4, 8), 10: (8,)}
"""Worlds for which the switch sums faster than the ranks do, by the major number of the compute capability.

For two ranks, each reads no more than it would send.
"""


def choose(
    size: int, world: int, capability: tuple[int, int], available: Collection[str], largest: int = LARGEST
) -> Kind:
    """Choose the kernel for a sum of `size` bytes.

    Args:
        size: bytes of one rank's tensor.
        world: ranks.
        capability: of the GPUs, the lowest of all.
        available: kinds that work on every rank. A single kind is taken wherever it can be.
        largest: bytes of the symmetric buffer.
    """
    if len(available) == 1:
        (only,) = available
        whole = size % (ALIGNMENT * (1 if only == "one_shot" else world)) == 0
        return next((kind for kind in KINDS if kind == only and whole and size <= largest), "nccl")
    if size > largest or size % ALIGNMENT:
        return "nccl"
    if "one_shot" in available and size <= ONE_SHOT.get(world, 0):
        return "one_shot"
    if size % (ALIGNMENT * world):
        return "nccl"
    if "multimem" in available and world in MULTIMEM.get(capability[0], ()):
        return "multimem"
    return "two_shot" if "two_shot" in available else "nccl"

"""Which kernel sums over ranks, as a table."""

from __future__ import annotations

import pytest

from dgraph.parallel.choice import LARGEST, choose

ALL = ("nccl", "one_shot", "two_shot", "multimem")
KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("size", "world", "capability", "available", "kind"),
    [
        (256 * KIB, 2, (9, 0), ALL, "one_shot"),  # 32 rows of 4096 in bf16
        (512 * KIB, 2, (9, 0), ALL, "one_shot"),
        (MIB, 2, (9, 0), ALL, "two_shot"),
        (8 * MIB, 2, (9, 0), ALL, "two_shot"),  # two ranks gain nothing from the switch
        (256 * KIB, 4, (9, 0), ALL, "one_shot"),
        (512 * KIB, 4, (9, 0), ALL, "multimem"),
        (512 * KIB, 4, (9, 0), ("nccl", "one_shot", "two_shot"), "two_shot"),  # no multicast
        (512 * KIB, 4, (10, 0), ALL, "two_shot"),
        (8 * MIB, 8, (10, 0), ALL, "multimem"),
        (8 * MIB, 8, (8, 0), ALL, "two_shot"),
        (8 * MIB, 8, (9, 0), ("nccl",), "nccl"),
        (8 * MIB, 3, (9, 0), ("nccl", "two_shot"), "nccl"),  # no equal shares of 16 bytes
        (9 * MIB, 3, (9, 0), ("nccl", "two_shot"), "two_shot"),
        (LARGEST + 64, 2, (9, 0), ALL, "nccl"),
        (1000, 2, (9, 0), ALL, "nccl"),  # not a multiple of 16 bytes
        (16, 8, (9, 0), ALL, "one_shot"),
        (16, 8, (9, 0), ("nccl", "two_shot"), "nccl"),
        (8 * MIB, 2, (9, 0), ("multimem",), "multimem"),  # asked for
        (8 * MIB, 2, (9, 0), ("one_shot",), "one_shot"),
        (16, 2, (9, 0), ("two_shot",), "nccl"),
        (LARGEST + 64, 2, (9, 0), ("one_shot",), "nccl"),
    ],
)
def test_the_kernel_of_a_sum(
    size: int, world: int, capability: tuple[int, int], available: tuple[str, ...], kind: str
) -> None:
    assert choose(size, world, capability, available) == kind

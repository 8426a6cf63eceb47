"""Sums over ranks in symmetric memory: one kernel that reads other GPUs' memory, in place of NCCL's several steps.

Each rank has one buffer, which all ranks map before any CUDA graph is recorded, so that a graph holds its address for
good. The kernels wait for each other at their begin and at their end. When one has ended, no rank reads the buffer any
more, and the next sum on that stream may overwrite it.

All of them compute an element once and hand it on, or in the order of ranks on each: every rank gets the same bits.
(`multimem_one_shot_all_reduce` promises no such thing and is not used.)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dgraph.parallel.choice import LARGEST, Kind
from dgraph.private.torch import symmetric

DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes that the kernels sum."""


class Symmetric:
    """The symmetric buffer of this rank, and the sums in it. All ranks of the group make theirs together.

    Args:
        group: the process group, of NCCL.
        device: the GPU of this rank.
        size: bytes of the largest sum.

    Attributes:
        kinds: the kernels that can be used.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, size: int = LARGEST):
        self._group, self.size = group.group_name, size
        self._buffer, multicast = symmetric(size, device, group)
        self.kinds: tuple[Kind, ...] = ("one_shot", "two_shot", *(("multimem",) if multicast else ()))

    def all_reduce(self, x: Tensor, kind: Kind) -> Tensor:
        """Sum a tensor over ranks into a new tensor.

        x: float32 or bfloat16, a multiple of 16 bytes (and of 16 bytes per rank, unless the kind is one-shot), no
        larger than the buffer.
        """
        ops = torch.ops.symm_mem
        shared = self._buffer[: x.numel() * x.element_size()].view(x.dtype).view(x.shape)
        if kind == "one_shot":
            summed: Tensor = ops.one_shot_all_reduce_copy(shared, x.contiguous(), "sum", self._group)
            return summed
        shared.copy_(x)
        reduce = ops.multimem_all_reduce_ if kind == "multimem" else ops.two_shot_all_reduce_
        reduce(shared, "sum", self._group)
        return shared.clone()

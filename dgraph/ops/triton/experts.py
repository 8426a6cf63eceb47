"""dgraph::experts on a CUDA device: rows sorted by expert, then two grouped matrix products.

No kernel of our own is needed: the sort, the bounds of each expert's rows and both products stay on the device, so the
whole call can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dgraph.ops.experts import check, chosen, combine, gated


def kernel(x: Tensor, choice: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    check(x, choice, weight, gate_up, down)
    if not len(x):
        return torch.empty_like(x)
    if can_group(x, gate_up):
        return by_sorting(x, choice, weight, gate_up, down)
    return by_masking(x, choice, weight, gate_up, down)


def can_group(x: Tensor, gate_up: Tensor) -> bool:
    """Whether a grouped product takes these operands without reading the bounds on the host.

    On a GPU it does so for bf16 with rows of a multiple of 16 bytes, from compute capability 8.0 on.
    """
    if not x.is_cuda:
        return x.dtype in (torch.float32, torch.bfloat16)
    aligned = x.shape[1] % 8 == 0 and gate_up.shape[1] % 16 == 0
    return x.dtype == torch.bfloat16 and aligned and torch.cuda.get_device_capability(x.device) >= (8, 0)


def by_sorting(x: Tensor, choice: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Each slot's row is gathered behind the rows of lower experts; slots without an expert stand behind them all."""
    experts, slots = gate_up.shape[0], choice.shape[1]
    live = chosen(choice, experts)
    of_expert, order = torch.where(live, choice, experts).flatten().sort(stable=True)
    ends = torch.searchsorted(of_expert, torch.arange(experts, device=x.device), right=True).int()
    both = F.grouped_mm(x[order // slots].contiguous(), gate_up.transpose(1, 2), offs=ends)
    each = F.grouped_mm(gated(both), down.transpose(1, 2), offs=ends)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    each = each[place].view(*choice.shape, x.shape[1])
    # What lies behind the last bound was never written.
    return combine(each.masked_fill(~live[:, :, None], 0.0), weight, live)


def by_masking(x: Tensor, choice: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Every expert over every row, for what cannot be grouped: E / k times the work, but still without a host read."""
    each = x.new_zeros((*choice.shape, x.shape[1]))
    for expert in range(gate_up.shape[0]):
        result = F.linear(gated(F.linear(x, gate_up[expert])), down[expert])
        each = torch.where((choice == expert)[:, :, None], result[:, None], each)
    return combine(each, weight, chosen(choice, gate_up.shape[0]))

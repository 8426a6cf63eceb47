"""Memory that a model takes before it is loaded, held against what is free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.families.weights import WeightSource
from dgraph.settings import dtype_name

_GIB = 2**30
_MEMORY = Path("/proc/meminfo")


def copied_bytes(weights: Mapping[str, Tensor], source: WeightSource) -> dict[torch.dtype, int]:
    """Bytes that `read_all` takes for weights, by their dtype; those that stay in a mapped file take none."""
    seen: set[int] = set()
    found: dict[torch.dtype, int] = {}
    for name, tensor in weights.items():
        if name not in source or name in source.formats or id(tensor) in seen or source.stays(name, tensor):
            continue
        seen.add(id(tensor))
        found[tensor.dtype] = found.get(tensor.dtype, 0) + tensor.numel() * tensor.element_size()
    return found


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free on a device: of a CPU with swap; None where that cannot be told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu" or not _MEMORY.is_file():
        return None
    lines = dict(line.split(":", 1) for line in _MEMORY.read_text(encoding="ascii").splitlines() if ":" in line)
    sizes = [int(lines[key].split()[0]) * 1024 for key in ("MemAvailable", "SwapFree") if key in lines]
    return sum(sizes) if "MemAvailable" in lines else None


def check_room(name: str, weights: Mapping[str, Tensor], source: WeightSource, device: torch.device) -> None:
    """Refuse a model whose weights do not fit into what is free, before any is read.

    Raises:
        InputError: with both sizes, and what takes less.
    """
    wanted, free = copied_bytes(weights, source), free_bytes(device)
    need = sum(wanted.values())
    if free is None or need <= free:
        return
    dtype = max(wanted, key=wanted.__getitem__)
    less = [f"--weights int4 (weights='int4', about {need / dtype.itemsize * 0.56 / _GIB:.1f} GiB)"]
    if dtype == torch.float32:
        less.insert(0, "--dtype bf16 (dtype='bf16', half of it)")
    others = " or more GPUs (--tp)" if device.type == "cuda" else ""
    raise InputError(
        f"the weights of {name} take {need / _GIB:.1f} GiB in {dtype_name(dtype)}, and {free / _GIB:.1f} GiB are free "
        f"on {device}, of which keys and activations need a part, too. Give {', or '.join(less)}; or another device"
        f"{others}."
    )

"""One small kernel of ours, compiled for a GPU that need not be there: what a process of its own does with a store.

python -m tests.lowering.one_kernel STORE [BLOCK ...]
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dgraph.cache.store import Store
from dgraph.lowering.kernels import Kernels
from dgraph.private.triton import LoadedKernel

TARGET = "cuda 90"
HASH = "ab" * 32
KERNEL = {"_list_kept.json": json.dumps({"hash": HASH}).encode(), "_list_kept.cubin": b"\x7fELF" * 9}
"""A hash, and the files of a kernel that nobody can run."""


class Driver:
    """In place of the driver of a Hopper GPU: Triton compiles for it, and nothing can be launched."""

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default one."""
        return 0

    def get_current_target(self) -> Any:
        """What is compiled for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


class Binary(SimpleNamespace):
    """In place of a kernel of Triton, with its files in a folder."""

    @classmethod
    def at(cls, folder: Path, named: str = HASH) -> Binary:
        """Files in a folder; the metadata are of kernel `named`."""
        path = folder / "_list_kept.json"
        folder.mkdir(exist_ok=True)
        path.write_text(json.dumps({"hash": named}))
        code = KERNEL["_list_kept.cubin"]
        return cls(hash=HASH, name="_list_kept", metadata_group={path.name: str(path)}, asm={"cubin": code}, _run=None)

    def loaded(self) -> dict[str, LoadedKernel]:
        """As the only one that is loaded."""
        return {self.hash: LoadedKernel("dgraph.ops.selection.triton.keep_index", TARGET, self)}


def files_below(folder: Path) -> dict[str, int]:
    """Names and times of the files in a folder and below."""
    return {p.name: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


def compile_kernel(block: int = 256) -> Any:
    """The kernel of keep_index for a block size, as a first launch would make it."""
    from triton.runtime import driver

    from dgraph.ops.selection.triton.keep_index import _list_kept

    driver.set_active(Driver())
    tensors = (torch.bool, torch.int64, torch.int64, torch.int64)
    return _list_kept.warmup(*tensors, 3, 40, 5, block, 256, num_warps=4, grid=(1,))


def run(store: Store, blocks: list[int]) -> dict[str, Any]:
    """Restore, compile, keep: what each of them did."""
    told: list[str] = []
    kernels = Kernels(TARGET, store, told.append)
    with kernels.remembered():
        made = [compile_kernel(block) for block in blocks]
    return {
        "restored": kernels.restored,
        "compiled": kernels.compiled,
        "again": kernels.save(),
        "told": told,
        "hashes": [kernel.hash for kernel in made],
        "code": [hashlib.sha256(kernel.asm["cubin"]).hexdigest() for kernel in made],
        "files": sorted(p.name for kernel in made for p in _folder(kernel).iterdir()),
    }


def _folder(kernel: Any) -> Path:
    return Path(next(iter(kernel.metadata_group.values()))).parent


def main() -> None:
    """Print one JSON object."""
    print(json.dumps(run(Store(sys.argv[1]), [int(block) for block in sys.argv[2:]])))


if __name__ == "__main__":
    main()

"""Sums over ranks by kind and size: right, the same bits on every rank, the same in a CUDA graph, and how long.

    torchrun --nproc-per-node=2 -m benchmarks.collectives --markdown FILE --json FILE
    torchrun --nproc-per-node=2 -m benchmarks.collectives --device cpu --sizes 4,64 --repeat 5

Every kind is tried by itself: what fails is printed at once, with its reason, and left out of the table. Run it before
anything else on a new machine: `dgraph.parallel.choice` says which kind a model's sums will take, by size. Where NVLink
multicast must not be touched, set TORCH_SYMM_MEM_DISABLE_MULTICAST=1 and NCCL_NVLS_ENABLE=0 before.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import dgraph.parallel
from benchmarks.tables import Cell, Report
from dgraph.parallel.choice import ALIGNMENT, KINDS, Kind, choose
from dgraph.parallel.group import ProcessGroup
from dgraph.ranks.groups import group_of

KIB = 1 << 10
SIZES = [4 << at for at in range(15)]
"""KiB: 4 KiB to 64 MiB."""
REPLAYS = 20
"""Sums in a row, so that what is timed is neither the launch of a graph nor that one rank begins before the other."""

Sum = Callable[[Tensor], Tensor]


def sum_of(group: ProcessGroup, kind: Kind) -> Sum:
    """The sum over ranks by one kind.

    Raises:
        RuntimeError: the ranks have no symmetric memory, or their switch no multicast.
    """
    if kind == "nccl":

        def reduce(x: Tensor) -> Tensor:
            total = x.clone()
            dist.all_reduce(total, group=group.process_group)
            return total

        return reduce
    found = group.symmetric
    if found is None or kind not in found.kinds:
        raise RuntimeError("not available here" if found is None else f"only {', '.join(found.kinds)} are available")
    return lambda x: found.all_reduce(x, kind)


def error_bound(dtype: torch.dtype, ranks: int) -> float:
    """Largest error of a sum over ranks, as a share of the sum of absolute values.

    Numbers of W ranks that are added in any order are rounded W - 1 times, each time by at most u = eps / 2 of the sum
    so far. The error is therefore at most (W - 1) u / (1 - (W - 1) u).
    """
    roundings = (ranks - 1) * torch.finfo(dtype).eps / 2
    return roundings / (1 - roundings)


def check(group: ProcessGroup, reduce: Sum, dtype: torch.dtype, size: int) -> None:
    """Compare the sum with that in float64, and its bits over ranks.

    Raises:
        AssertionError: the sum is further off than `error_bound`, or ranks have different bits.
    """
    own = drawn(group.rank, dtype, size, group.device)
    got = reduce(own)
    exact = sum(drawn(rank, dtype, size, group.device).double() for rank in range(group.world))
    scale = sum(drawn(rank, dtype, size, group.device).double().abs() for rank in range(group.world))
    assert isinstance(exact, Tensor)
    assert isinstance(scale, Tensor)
    far = ((got.double() - exact).abs() / scale.clamp_min(1e-6)).max().item()
    # All ranks know of each other's before one of them fails, so that none waits for ever.
    every = group.exchange((far, digest(got)))
    worst = max(distance for distance, _ in every)
    bound = error_bound(dtype, group.world)
    assert worst <= bound, f"{worst:.2g} from the sum in float64, at most {bound:.2g} ({dtype}, {size} bytes)"
    assert len({bits for _, bits in every}) == 1, f"other bits on other ranks ({dtype}, {size} bytes): {every}"


def check_recorded(group: ProcessGroup, reduce: Sum, size: int) -> None:
    """Three sums in a row in a CUDA graph, replayed on new values, are those of the same sums run at once."""
    own = drawn(group.rank, torch.bfloat16, size, group.device)
    held = own.clone()
    graph, thrice = recorded(lambda: reduce(reduce(reduce(held)) / 64) / 64)
    same = True
    for again in range(3):
        held.copy_(own + again)
        graph.replay()
        expected = reduce(reduce(reduce(own + again)) / 64) / 64
        same &= torch.equal(thrice[0], expected)
    assert all(group.exchange(same)), f"a replay gave something else ({size} bytes)"


def recorded(function: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A function's launches as a CUDA graph, as `dgraph.runtime.graphs.pool` records it, and where its result lies."""
    side, made = torch.cuda.Stream(), list[Tensor]()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="relaxed")
        try:
            made.append(function())
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    return graph, made


def drawn(rank: int, dtype: torch.dtype, size: int, device: torch.device) -> Tensor:
    """What a rank gives: so many bytes, the same every time."""
    count = size // dtype.itemsize
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype).to(device)


def digest(x: Tensor) -> str:
    """Of the bits of a tensor."""
    return hashlib.sha256(x.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:16]


def microseconds(group: ProcessGroup, reduce: Sum, size: int, repeat: int, graphs: bool) -> float:
    """Of one sum in bf16, the slowest rank's: the median of so many times."""
    own = drawn(group.rank, torch.bfloat16, size, group.device)

    def many() -> Tensor:
        for _ in range(REPLAYS):
            total = reduce(own)
        return total

    run: Callable[[], object] = recorded(many)[0].replay if graphs else many
    times = []
    for _ in range(repeat + 3):
        group.exchange(None)  # all begin together
        if group.device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if group.device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / REPLAYS * 1e6)
    return max(group.exchange(statistics.median(times[3:])))


def main(arguments: Sequence[str] | None = None) -> None:
    """Check and time every kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default cuda if there is one")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="KiB")
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    dgraph.parallel.init(given.device)
    group = group_of("tp")
    assert isinstance(group, ProcessGroup)
    sizes = [int(size) * KIB for size in given.sizes.split(",")]
    on_gpu = group.recordable and group.device.type == "cuda"
    say(group, f"{group.world} ranks on {group.device}, torch {torch.__version__}, capability {group.capability}")
    say(group, f"symmetric memory: {group.symmetric.kinds if group.symmetric is not None else 'none'}")
    report, times, failed = Report("Sums over ranks"), dict[str, dict[int, float]](), list[list[Cell]]()
    for kind in [kind for kind in KINDS if kind in given.kinds.split(",")]:
        for name, what in trials(group, kind, sizes, given.repeat, on_gpu, times):
            try:
                what()
                say(group, f"{kind}: {name}: well")
            except Exception as error:
                say(group, f"{kind}: {name}: FAILED: {type(error).__name__}: {error}", anyway=True)
                if not isinstance(error, (AssertionError, RuntimeError)):
                    traceback.print_exc()
                failed.append([kind, name, str(error).partition("\n")[0]])
            if failed and failed[-1][:2] == [kind, "available"]:  # on every rank alike
                break
    if group.rank:
        return
    names = list(times)
    rows: list[list[Cell]] = []
    for size in sizes:
        found: list[Cell] = [times[name].get(size, "") for name in names]
        kinds = ("nccl",) if group.symmetric is None else ("nccl", *group.symmetric.kinds)
        rows.append([shown(size), *found, choose(size, group.world, group.capability, kinds)])
    report.table(
        f"Microseconds of a sum of bf16 over {group.world} ranks",
        ["size", *names, "chosen"],
        rows,
        f"one of {REPLAYS} in a row, copy to and from the buffer included; the slowest rank's median",
    )
    if failed:
        report.table("What failed", ["kind", "what", "why"], failed)
    report.data |= {"microseconds": {name: {str(s): t for s, t in each.items()} for name, each in times.items()}}
    report.data |= {"failed": failed, "world": group.world}
    report.write(given.markdown, given.json)


def trials(
    group: ProcessGroup, kind: Kind, sizes: Sequence[int], repeat: int, graphs: bool, times: dict[str, dict[int, float]]
) -> list[tuple[str, Callable[[], None]]]:
    """What is tried of a kind, by name, in order."""
    label = kind if group.device.type == "cuda" else "gloo"

    def available() -> None:
        sum_of(group, kind)

    def right() -> None:
        for dtype in (torch.float32, torch.bfloat16):
            for size in (ALIGNMENT * group.world, *sizes):
                check(group, sum_of(group, kind), dtype, size)

    def in_graphs() -> None:
        for size in (ALIGNMENT * group.world, 256 * KIB):
            check_recorded(group, sum_of(group, kind), size)

    def timed(in_graph: bool) -> Callable[[], None]:
        def run() -> None:
            name = f"{label}, graph" if in_graph else label
            for size in sizes:
                took = microseconds(group, sum_of(group, kind), size, repeat, in_graph)
                times.setdefault(name, {})[size] = took

        return run

    found = [("available", available), ("right, same bits", right), ("time", timed(False))]
    return [*found, ("in CUDA graphs", in_graphs), ("time in CUDA graphs", timed(True))] if graphs else found


def say(group: ProcessGroup, text: str, anyway: bool = False) -> None:
    """Print on rank 0, or on any."""
    if not group.rank or anyway:
        print(f"rank {group.rank}: {text}" if anyway else text, flush=True)


def shown(size: int) -> str:
    """Bytes as KiB or MiB."""
    return f"{size // KIB} KiB" if size < KIB * KIB else f"{size // KIB // KIB} MiB"


if __name__ == "__main__":
    main()

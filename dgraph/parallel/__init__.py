"""Ranks that hold one model together, as processes that `torchrun` or `dgraph ... --tp N` starts.

    mesh = dgraph.parallel.init()
    opt = dgraph.optimize("tiny_sdar", "focus", mesh=mesh)
    print(opt.generate("Sort these words: river stone").texts)

The same program runs on every rank. Sums over ranks go through gloo on a CPU. On GPUs they go through symmetric memory
where that works, by a kernel that is chosen by size (`dgraph.parallel.choice`), and else through NCCL. Variables of the
environment change that:

    DGRAPH_ALL_REDUCE   nccl, one_shot, two_shot or multimem for every sum that it can do; default auto
    DGRAPH_CHECK_RANKS  1: ranks compare every collective and every step, and say where they part first
    DGRAPH_SHARE_GPU    1: ranks may share a GPU; they sum through gloo then, and without CUDA graphs (for tests)
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dgraph.errors import InputError, UnknownName, warn
from dgraph.parallel.choice import KINDS, Kind
from dgraph.parallel.group import ProcessGroup
from dgraph.parallel.star import Address, Star, connect, listen
from dgraph.parallel.symmetric import Symmetric
from dgraph.ranks.groups import join
from dgraph.ranks.sharding import GROUP, Sharding

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["init", "of", "started"]

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables of the environment that torchrun sets for a process."""
WAIT = timedelta(minutes=10)
"""Longest wait of a collective for ranks that live; one of them may compile."""

_GROUPS: dict[DeviceMesh, tuple[str, ProcessGroup]] = {}


def started() -> bool:
    """True if this process is one of several ranks that torchrun has started."""
    return all(name in os.environ for name in VARIABLES) and os.environ["WORLD_SIZE"] != "1"


def init(device: str | None = None, all_reduce: str | None = None) -> DeviceMesh:
    """Join the ranks that torchrun has started: one mesh of all of them, whose group is named "tp".

    On GPUs the current device becomes cuda:LOCAL_RANK.

    Args:
        device: "cpu" or "cuda"; default "cuda" if there is one.
        all_reduce: "auto", or one of `dgraph.parallel.choice.KINDS`; default as the environment says.

    Returns:
        A mesh of one dimension, for `dgraph.optimize(..., mesh=)`. Called again, the same one.

    Raises:
        InputError: not started by torchrun, fewer GPUs than ranks, or sums that these GPUs cannot do.
        RankLost: a rank does not come.
    """
    from torch.distributed.device_mesh import init_device_mesh

    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise InputError(
            f"ranks find each other by what torchrun tells them, and {', '.join(missing)} is missing. Start the "
            f"program with torchrun --nproc-per-node=2 PROGRAM, or use dgraph ... --tp 2."
        )
    kind = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type
    for mesh in _GROUPS:
        if mesh.device_type == kind:
            found: DeviceMesh = mesh
            return found
    world, local, shares = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]), _flag("DGRAPH_SHARE_GPU")
    given: dict[str, Any] = {"timeout": WAIT}
    if kind == "cuda":
        here = torch.cuda.device_count()
        if not here or (local >= here and not shares):
            raise InputError(
                f"rank {os.environ['RANK']} of {world} needs GPU {local} of this machine, which has {here}. Start at "
                f"most one rank per GPU, or set DGRAPH_SHARE_GPU=1 (slow, for tests)."
            )
        torch.cuda.set_device(local % here)
        if not shares:
            given["device_id"] = torch.device("cuda", local)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" and not shares else "gloo", **given)
    mesh = init_device_mesh(kind, (world,), mesh_dim_names=(GROUP,))
    of(mesh, all_reduce)
    return mesh


def of(mesh: DeviceMesh, all_reduce: str | None = None) -> Sharding:
    """Join the group of a mesh that the caller has made, under the name of its dimension ("tp" if that has none).

    Every rank of the mesh calls it. A mesh that was joined before keeps its group.

    Args:
        mesh: of one dimension; a row of a larger one is mesh["tp"].
        all_reduce: as for `init`.

    Returns:
        The sharding of a graph over that group.

    Raises:
        InputError: a mesh of several dimensions, or this process is not in it; else as `init`.
    """
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ("none",)
        raise InputError(
            f"a model is sharded over a mesh of one dimension, got {mesh.ndim} of shape {tuple(mesh.shape)} (names: "
            f"{', '.join(names)}). Give one of them, as mesh[{names[-1]!r}]."
        )
    if mesh.get_coordinate() is None:
        raise InputError(f"rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}, so it has no part of it.")
    if mesh not in _GROUPS:
        name = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else GROUP
        group = _joined(mesh, all_reduce)
        _GROUPS[mesh] = name, group
        join(name, group)
        atexit.register(_leave, group)
    return Sharding(mesh.size(), _GROUPS[mesh][0])


def _joined(mesh: DeviceMesh, all_reduce: str | None) -> ProcessGroup:
    asked = all_reduce or os.environ.get("DGRAPH_ALL_REDUCE") or "auto"
    if asked not in ("auto", *KINDS):
        raise UnknownName("kind of all-reduce", asked, ("auto", *KINDS))
    forced: Kind | None = next((kind for kind in KINDS if kind == asked), None)
    of_torch = mesh.get_group()
    star = _star(of_torch)
    device = torch.device(mesh.device_type)
    capability, symmetric = (0, 0), None
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        capability = min(star.exchange(torch.cuda.get_device_capability(device)))
        if dist.get_backend(of_torch) != "gloo":
            dist.all_reduce(torch.zeros(1, device=device), group=of_torch)  # NCCL connects, which no graph may record
            if forced != "nccl":
                symmetric = _symmetric(star, of_torch, device)
    if forced not in (None, "nccl") and (symmetric is None or forced not in symmetric.kinds):
        had = ("nccl", *(symmetric.kinds if symmetric is not None else ()))
        raise InputError(
            f"all_reduce={asked!r} cannot be used on these devices ({device}); they have {', '.join(had)}."
        )
    return ProcessGroup(
        of_torch,
        star,
        device,
        symmetric=symmetric,
        forced=forced,
        capability=capability,
        checks=_flag("DGRAPH_CHECK_RANKS"),
    )


def _symmetric(star: Star, of_torch: dist.ProcessGroup, device: torch.device) -> Symmetric | None:
    """Make symmetric memory if it works on every rank; None if it fails on one."""
    found, reason = None, ""
    try:
        found = Symmetric(of_torch, device)
    except Exception as error:  # drivers, links and permissions fail in many ways
        reason = str(error).partition("\n")[0] or type(error).__name__
    every = star.exchange((reason, found.kinds if found is not None else ()))
    failed = [f"rank {rank}: {why}" for rank, (why, _) in enumerate(every) if why]
    if failed or found is None:
        if not star.rank:
            warn(f"symmetric memory does not work here, so NCCL does every sum, which takes longer ({failed[0]}).")
        return None
    found.kinds = tuple(kind for kind in found.kinds if all(kind in kinds for _, kinds in every))
    return found


def _star(of_torch: dist.ProcessGroup) -> Star:
    rank, world = dist.get_rank(of_torch), dist.get_world_size(of_torch)
    source = dist.get_global_rank(of_torch, 0)

    box: list[Any] = [None]

    def publish(address: Address) -> None:
        box[0] = address
        dist.broadcast_object_list(box, src=source, group=of_torch)

    if rank == 0:
        return listen(os.environ.get("MASTER_ADDR", "127.0.0.1"), world, publish)
    dist.broadcast_object_list(box, src=source, group=of_torch)
    return connect(box[0], rank, world)


def _leave(group: ProcessGroup) -> None:
    """Leave the group at exit, with a goodbye unless an error ends this process.

    Gloo's threads end here, as one that the interpreter meets at its end aborts the process. NCCL ends with the
    process: its destructor waits for the CUDA graphs that recorded it, which live until then.
    """
    if getattr(sys, "last_value", None) is None:
        group.close()
    if group.device.type != "cuda":
        with suppress(Exception):
            dist.destroy_process_group()


def _flag(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")

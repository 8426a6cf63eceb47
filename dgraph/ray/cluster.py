"""The Ray cluster in which a command of dgraph runs: a running one, or one of its own."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from dgraph.blueprint import Blueprint
from dgraph.cache.place import FOLDER_VARIABLE, SIZE_VARIABLE
from dgraph.errors import DgraphError, warn


def actor_options(blueprint: Blueprint, given: dict[str, Any]) -> dict[str, Any]:
    """Options of a Ray actor with the engines of a blueprint.

    They ask for a GPU if the engines need one, and pass on the path and size limit of this process's artifact cache.

    Args:
        blueprint: the engines' blueprint.
        given: `ray_actor_options` that are added, and override these.
    """
    found: dict[str, Any] = {"num_gpus": 1} if blueprint.on == "cuda" else {}
    found |= given
    environment = {name: value for name in (FOLDER_VARIABLE, SIZE_VARIABLE) if (value := os.environ.get(name))}
    if environment:
        runtime = dict(found.get("runtime_env") or {})
        found["runtime_env"] = {**runtime, "env_vars": {**environment, **(runtime.get("env_vars") or {})}}
    return found


@contextmanager
def joined() -> Iterator[None]:
    """Join a Ray cluster for the block.

    It is the cluster that `RAY_ADDRESS` names, or that runs on this machine; else a new one, which ends with the block.
    A cluster that this process has already joined is left as it is. Ray's output goes to stderr meanwhile: stdout is
    for results.

    Raises:
        DgraphError: Ray cannot be started, or reached.
    """
    import ray

    with redirect_stdout(sys.stderr):
        if ray.is_initialized():
            yield
            return
        try:
            ray.init(logging_level=logging.WARNING)
        except Exception as error:  # Ray raises many kinds
            raise DgraphError(f"Ray cannot be started, or reached: {str(error).partition(chr(10))[0]}") from error
        try:
            yield
        finally:
            ray.shutdown()


def needs(actor: dict[str, Any]) -> dict[str, float]:
    """Resources that Ray reserves for an actor with these options, by Ray's names for them."""
    wanted = {"CPU": actor.get("num_cpus", 1), "GPU": actor.get("num_gpus", 0), **actor.get("resources", {})}
    return {name: amount for name, amount in wanted.items() if amount}


def room(each: dict[str, float]) -> int:
    """The number of actors that fit into the cluster as it is now. each: resources of one, by name."""
    import ray

    have = ray.cluster_resources()
    return min((int(have.get(name, 0) // amount) for name, amount in each.items()), default=1)


def check_room(count: int, each: dict[str, float]) -> None:
    """Warn if `count` replicas do not fit into the cluster now; one that grows by itself may get the room."""
    found = room(each)
    if count > found:
        wanted = " and ".join(f"{amount:g} {name}" for name, amount in each.items())
        warn(f"the cluster has room for {found} of {count} replicas now, each of {wanted}; the others wait for it.")

"""The Ray cluster that a command of dgraph runs in: the one that is there, or one of its own."""

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
    """What Ray gives to an actor with the engines of a blueprint: a GPU where they need one, and the artifact cache
    that this process has, by its path.

    Args:
        given: `ray_actor_options` that hold besides and instead.
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
    """Part of a cluster: the one that `RAY_ADDRESS` names, or that runs on this machine; else a new one, which ends
    with the block. One that this process is part of already is left as it is. What Ray says meanwhile goes to stderr:
    stdout is for results.

    Raises:
        DgraphError: it cannot be reached.
    """
    import ray

    with redirect_stdout(sys.stderr):
        if ray.is_initialized():
            yield
            return
        try:
            ray.init(logging_level=logging.WARNING)
        except Exception as error:  # of many kinds
            raise DgraphError(f"Ray cannot be started, or reached: {str(error).partition(chr(10))[0]}") from error
        try:
            yield
        finally:
            ray.shutdown()


def needs(actor: dict[str, Any]) -> dict[str, float]:
    """What Ray reserves for an actor with these options, by the names that it has for it."""
    wanted = {"CPU": actor.get("num_cpus", 1), "GPU": actor.get("num_gpus", 0), **actor.get("resources", {})}
    return {name: amount for name, amount in wanted.items() if amount}


def room(each: dict[str, float]) -> int:
    """How many of what needs so much find room in the cluster as it is now."""
    import ray

    have = ray.cluster_resources()
    return min((int(have.get(name, 0) // amount) for name, amount in each.items()), default=1)


def check_room(count: int, each: dict[str, float]) -> None:
    """Warn where the cluster has not the room for so many now; one that grows by itself may get it."""
    found = room(each)
    if count > found:
        wanted = " and ".join(f"{amount:g} {name}" for name, amount in each.items())
        warn(f"the cluster has room for {found} of {count} replicas now, each of {wanted}; the others wait for it.")

"""The processes of one replica: its actor, and one more for each other rank of a tensor-parallel model."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from dgraph.blueprint import Blueprint
from dgraph.engine.engine import Engine
from dgraph.errors import InputError
from dgraph.ranks.rendezvous import rendezvous
from dgraph.ray.cluster import needs

ALL_VISIBLE = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Variable that lets each rank see all GPUs of its machine, as symmetric memory needs; Ray hides the others' GPUs."""


def check_ranks(count: int, blueprint: Blueprint) -> None:
    """Refuse a number of ranks that a replica cannot have.

    Raises:
        InputError: below 1, or several that would serve several recipes.
    """
    if type(count) is not int or count < 1:
        raise InputError(f"tp must be a whole number of devices, at least 1, got {count!r}.")
    if count > 1 and len(blueprint.recipes) > 1:
        raise InputError(f"devices that share a model serve it under one recipe, got {', '.join(blueprint.recipes)}.")


def placement(count: int, actor: dict[str, Any]) -> dict[str, Any]:
    """Ray's placement of a replica of several ranks: a bundle for each, all on one machine.

    Each bundle is as large as the first rank's needs. A single rank is the actor alone.

    Args:
        count: number of ranks.
        actor: `ray_actor_options` of the first rank.

    Returns:
        Keywords of `ray.serve.deployment`, `ray_actor_options` among them.
    """
    if count == 1:
        return {"ray_actor_options": actor}
    runtime = dict(actor.get("runtime_env") or {})
    runtime["env_vars"] = {ALL_VISIBLE: "1", **(runtime.get("env_vars") or {})}
    return {
        "ray_actor_options": {**actor, "runtime_env": runtime},
        "placement_group_bundles": [needs(actor) for _ in range(count)],
        "placement_group_strategy": "STRICT_PACK",
    }


class Rank:
    """Actor of a rank of a replica, other than the first, which it follows.

    Args:
        environment: variables by which ranks find each other, as torchrun sets them.
    """

    def __init__(self, environment: dict[str, str]):
        self._environment = environment

    def follow(self, blueprint: Blueprint) -> None:
        """Run the first rank's steps on this rank's engine, until the first rank closes its own."""
        for engine in _engines(blueprint, self._environment, lambda what: None).values():
            engine.join()


def engines(blueprint: Blueprint, count: int, tell: Callable[[str], None]) -> tuple[dict[str, Engine], list[Any]]:
    """The engines of a replica, and the actors of its other ranks, which end when the last reference to them is gone.

    Call it in the actor of the first rank, whose placement group has a bundle for each rank.
    """
    if count == 1:
        return blueprint.engines(tell), []
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    world = rendezvous(count)
    group: Any = ray.util.get_current_placement_group()
    others = []
    for rank in range(1, count):
        wanted = dict(group.bundle_specs[rank])
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        actor: Any = ray.remote(Rank)
        options = {"num_cpus": wanted.pop("CPU", 0), "num_gpus": wanted.pop("GPU", 0), "resources": wanted}
        other = actor.options(scheduling_strategy=where, **options).remote({**world, "RANK": str(rank)})
        other.follow.remote(blueprint)
        others.append(other)
    return _engines(blueprint, {**world, "RANK": "0"}, tell), others


def _engines(blueprint: Blueprint, environment: dict[str, str], tell: Callable[[str], None]) -> dict[str, Engine]:
    """Build the engines of one rank; all ranks build theirs at the same time."""
    import dgraph.parallel

    os.environ.update({**environment, "LOCAL_RANK": str(_local_rank())})
    return blueprint.engines(tell, dgraph.parallel.init(blueprint.on))


def _local_rank() -> int:
    """Index of this process's own GPU among those that it sees; 0 if Ray gave it none."""
    import ray

    own = [str(id) for id in ray.get_gpu_ids()]
    if not own:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",").index(own[0]) if visible else int(own[0])

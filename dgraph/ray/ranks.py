"""The processes of one replica: this one, and the other ranks where its model is tensor parallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dgraph.blueprint import Blueprint
from dgraph.engine.engine import Engine
from dgraph.errors import InputError
from dgraph.ray.cluster import needs


def check_ranks(count: int) -> None:
    """Refuse a number of ranks that a replica cannot have.

    Raises:
        InputError: below 1, or more than one: they cannot be started yet.
    """
    if type(count) is not int or count < 1:
        raise InputError(f"tp must be a whole number of devices, at least 1, got {count!r}.")
    if count > 1:
        raise InputError(f"a replica on Ray has one device now, got tp={count}; use more replicas, or leave it at 1.")


def bundles(count: int, actor: dict[str, Any]) -> dict[str, Any]:
    """What Ray reserves for a replica of several ranks: a bundle each, as large as what the first one asks for, all on
    one machine. {} for a single rank, which is one actor.
    """
    if count == 1:
        return {}
    return {"placement_group_bundles": [needs(actor) for _ in range(count)], "placement_group_strategy": "STRICT_PACK"}


def engines(blueprint: Blueprint, count: int, tell: Callable[[str], None]) -> dict[str, Engine]:
    """The engines of a replica, which its first rank drives."""
    check_ranks(count)
    return blueprint.engines(tell)

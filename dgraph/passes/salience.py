"""Shared parts of DyLLM's passes: thresholds, and the calls of a graph that find salient rows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from dgraph.errors import InputError
from dgraph.ir.graph import Graph
from dgraph.ir.linears import head_of
from dgraph.ir.row_flags import FULL
from dgraph.ops import op_of
from dgraph.types.nodes import args_of
from dgraph.types.shapes import OWN, InputSpec, page_table

CHANGED = InputSpec("changed", torch.bool, ("N",))
INPUTS = frozenset({FULL.name, "c_cache_*", page_table(OWN).name})
"""Names that either pass may add."""


def checked(tau: Any) -> float | tuple[float, ...]:
    """A threshold, or one per layer, as numbers; JSON gives a list.

    Raises:
        InputError: something else.
    """
    several = tuple(tau) if isinstance(tau, (list, tuple)) else (tau,)
    if not several or any(type(t) not in (int, float) or not math.isfinite(t) for t in several):
        raise InputError(f"tau must be a number, or one for each layer (the paper uses 0.99 to 0.9975), got {tau!r}.")
    return several if isinstance(tau, (list, tuple)) else tau


def tau_of(tau: float | tuple[float, ...], layer: int, layers: int) -> float:
    """The threshold of a layer.

    Raises:
        InputError: there is not one for each layer.
    """
    if not isinstance(tau, tuple):
        return float(tau)
    if len(tau) != layers:
        raise InputError(f"tau has {len(tau)} values, but the model {layers} layers; give one for each layer, or one.")
    return float(tau[layer])


FINDERS = ("partial_attention", "drift", "drifted", "least_similar", "least_drifted")
"""Ops that find the salient rows of their layer."""
UPDATED = ("partial_attention", "partial_context")
"""Attentions that are updated by changed values; all take the place of their rows at the same arguments."""


def finder(graph: Graph, layer: int) -> Node | None:
    """The call that finds the salient rows of a layer; None if there is no such call."""
    return next((node for op in FINDERS for node in graph.find(op, layer)), None)


def tau_in(found: Node) -> float:
    """The threshold of the call that `finder` found."""
    op = op_of(found.target)
    assert op is not None
    (tau,) = op.values("tau", args_of(found))
    return float(tau)


def flags_of(found: Node) -> Node:
    """The salient rows as flags, from the call that `finder` found."""
    op = op_of(found.target)
    assert op is not None
    return found if op.name != "partial_attention" else next(u for u in found.users if args_of(u)[1] == 1)


def drifts(graph: Graph, layer: int) -> list[Node]:
    """Calls that compare the contexts of a layer with those of the step before."""
    return graph.find("drift", layer) + graph.find("drifted", layer)


def no_longer(graph: Graph, drift: Node, flags: Node) -> None:
    """Let readers of the result of `drift` read `flags`, and remove the calls that compare rows for it."""
    op = op_of(drift.target)
    assert op is not None
    made = [args_of(drift)[0]] if op.name == "drifted" else []
    if made and graph.sharding is not None:
        made.append(args_of(made[0])[0])
    graph.replace(drift, flags)
    for node in made:
        graph.fx.erase_node(node)


def of_masked(graph: Graph, node: Node) -> bool:
    """True if a value is over the masked rows alone (OnlyMasked), which differ in every step and block."""
    head = head_of(graph)
    if isinstance(head, str) or head.kind != "head" or graph.row_set(head.x) != graph.row_set(node):
        return False
    return args_of(head.node)[8:9] == (True,)  # packed

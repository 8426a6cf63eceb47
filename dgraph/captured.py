"""A model's graph as recipes start from it: captured, with quantised weights, divided over ranks."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from dgraph.cache.store import Store
from dgraph.errors import InputError, UnknownName
from dgraph.families import Model
from dgraph.frontend.frozen import capture_or_load
from dgraph.graph import Graph
from dgraph.passes.manager import run_passes
from dgraph.passes.quantize_weights import SPELLINGS, QuantizeWeights
from dgraph.spec import ModelSpec
from dgraph.stored import formats_of
from dgraph.weights import Quantising, Shapes, Source

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Weights = str | QuantizeWeights | None
"""How weights are stored: by name ("fp8", "int8", "int4"; "w8a8-fp8", "w8a8-int8" with the rows that they meet), the
pass with its settings, or as they are."""

# Of a model, its graphs with quantised weights, as long as both live: recipes of one model share these weights.
_QUANTISED: weakref.WeakKeyDictionary[
    nn.Module, weakref.WeakValueDictionary[tuple[QuantizeWeights | None, ModelSpec], Graph]
] = weakref.WeakKeyDictionary()


def quantising(weights: Weights) -> QuantizeWeights | None:
    """The pass that stores weights so; None for weights as they are.

    Raises:
        UnknownName: an unknown format.
        InputError: neither a name nor the pass.
    """
    if weights is None or isinstance(weights, QuantizeWeights):
        return weights
    if not isinstance(weights, str):
        raise InputError(f"weights must be the name of a format, or a QuantizeWeights, got {weights!r}.")
    if weights not in SPELLINGS:
        raise UnknownName("format of weights", weights, SPELLINGS)
    return SPELLINGS[weights]


def graph_of_model(
    model: Model,
    store: Store | None,
    weights: QuantizeWeights | None = None,
    mesh: DeviceMesh | None = None,
    facts: Mapping[str, object] | None = None,
) -> Graph:
    """A model's graph.

    Each weight that is quantised is read, quantised and dropped before the next one, if the model was opened
    (`Model.weights`); otherwise the model keeps its own. Ranks quantise whole weights, and keep their parts of these.

    Args:
        model: loaded, or opened if weights are quantised or divided.
        store: where captured graphs are stored.
        weights: how they are stored; None: as they are.
        mesh: ranks over which the graph is divided; every rank calls this.
        facts: what must be the same on all ranks.

    Raises what `capture_or_load`, `run_passes` and `dgraph.parallel.divide` do.
    """
    graph = _without_adapter(model, store, weights, mesh, facts)
    if model.adapter is not None:
        graph = graph.copy()  # which others of the same module may share
        graph.adapter = model.adapter
    return graph


def _without_adapter(
    model: Model,
    store: Store | None,
    weights: QuantizeWeights | None,
    mesh: DeviceMesh | None,
    facts: Mapping[str, object] | None,
) -> Graph:
    if mesh is None and (weights is not None or model.weights is not None):
        known = _QUANTISED.setdefault(model.module, weakref.WeakValueDictionary())
        graph = known.get((weights, model.spec))
        if graph is None:
            graph, _ = capture_or_load(model.module, model.spec, model.prefix, store, model.weights)
            if weights is not None:
                graph = graph.copy()
                run_passes(graph, [replace(weights, weights=model.weights)])
            known[weights, model.spec] = graph
        return graph
    graph, _ = capture_or_load(model.module, model.spec, model.prefix, store, model.weights)
    if mesh is None:
        return graph
    from dgraph.parallel.divide import divide

    source: Source | None = model.weights
    if weights is not None:
        whole, graph = graph.tensors, graph.copy()
        run_passes(graph, [replace(weights, weights=Shapes())])
        source = Quantising(model.weights, whole, formats_of(graph))
    return divide(graph, mesh, {**(facts or {}), "weights": weights}, model.hints, source)

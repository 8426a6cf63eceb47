"""A model's graph as recipes start from it: captured, with quantised weights, divided over ranks."""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, get_type_hints

from torch import nn

from dgraph.cache.store import Store
from dgraph.errors import InputError, UnknownName
from dgraph.families import Model
from dgraph.families.weights import Quantising, Shapes, Source
from dgraph.frontend.frozen import capture_or_load
from dgraph.ir.graph import Graph
from dgraph.ir.stored_weights import formats_of
from dgraph.passes.manager import run_passes
from dgraph.passes.quantize_weights import SPELLINGS, QuantizeWeights
from dgraph.settings import named, typed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Weights = str | QuantizeWeights | None
"""Storage of weights: a text (see `quantising`), the pass with its settings, or None for weights as they are."""

# Of a model, its graphs with quantised weights, as long as both live and its parameters are as they were: recipes of
# one model share these weights.
_QUANTISED: weakref.WeakKeyDictionary[nn.Module, weakref.WeakValueDictionary[tuple[object, ...], Graph]] = (
    weakref.WeakKeyDictionary()
)


def quantising(weights: Weights) -> QuantizeWeights | None:
    """Return the pass that stores weights in a format; None for weights as they are.

    Args:
        weights: FORMAT[:KEY=VALUE,...], as "fp8" or "int4:block=1x64,lm_head=true,embeddings=true". The format is one
            of `SPELLINGS`; "w8a8" alone rounds the rows that meet the weights of a checkpoint that came in 8 bits. A
            key is a field of `QuantizeWeights`: its booleans as true or false, `block` as ROWSxCOLUMNS (-1 for all),
            `which` and `but`. The last two take one pattern each and may be repeated.

    Raises:
        UnknownName: an unknown format or key.
        InputError: neither a text nor the pass, a value that its key cannot have, or what the pass refuses.
    """
    if weights is None or isinstance(weights, QuantizeWeights):
        return weights
    if not isinstance(weights, str):
        raise InputError(f"weights must be the name of a format, or a QuantizeWeights, got {weights!r}.")
    name, options = named(weights)
    if name not in SPELLINGS:
        raise UnknownName("format of weights", name, SPELLINGS)
    return replace(SPELLINGS[name], **_settings(weights, options))


_NAMED = ("format", "activations")
"""Fields of `QuantizeWeights` that the name of a format says."""


def _settings(weights: str, options: Sequence[str]) -> dict[str, Any]:
    """Fields of the pass by the KEY=VALUE texts in `weights`."""
    types = get_type_hints(QuantizeWeights)
    known = {f.name: types[f.name] for f in fields(QuantizeWeights) if f.compare and f.name not in _NAMED}
    found: dict[str, Any] = {}
    for text in options:
        key, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"weights are FORMAT[:KEY=VALUE,...], got {text!r} as KEY=VALUE in {weights!r}.")
        if key not in known:
            raise UnknownName("key of weights", key, known)
        if known[key] == tuple[str, ...]:
            found[key] = (*found.get(key, ()), value)
            continue
        if key in found:
            raise InputError(f"{key} is there twice in weights {weights!r}; give it once.")
        found[key] = typed("of weights,", key, value, bool) if known[key] is bool else _block(value)
    return found


def _block(text: str) -> tuple[int, int]:
    """ROWSxCOLUMNS."""
    sizes = re.fullmatch(r"(-?\d+)x(-?\d+)", text)
    if sizes is None:
        raise InputError(f"of weights, block is ROWSxCOLUMNS, as 1x128 or 128x128 (-1 for all), got {text!r}.")
    return int(sizes[1]), int(sizes[2])


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
        store: store of captured graphs.
        weights: format in which they are stored; None: as they are.
        mesh: ranks over which the graph is divided; every rank calls this.
        facts: values that must be the same on all ranks.

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
        key = weights, model.spec, _state_of(model.module)
        graph = known.get(key)
        if graph is None:
            graph, _ = capture_or_load(model.module, model.spec, model.prefix, store, model.weights)
            if weights is not None:
                graph = graph.copy()
                run_passes(graph, [replace(weights, weights=model.weights)])
            known[key] = graph
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


def _state_of(module: nn.Module) -> tuple[tuple[int, int], ...]:
    """Another one once parameters were replaced, or changed in place: those of inference mode do not count changes."""
    return tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in module.parameters())

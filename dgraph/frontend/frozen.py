"""Captured graphs in the artifact cache: capture is the longest part of a warm start.

A graph is stored in the form of `dgraph.ir.stored_graph`, as any saved graph is, without weights. One that is read back
is typed anew from the model's own tensors, and verified like any other.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import torch
from torch import nn

from dgraph.cache.key import Key, graph_key
from dgraph.cache.store import Store
from dgraph.errors import DgraphError
from dgraph.families.weights import WeightSource, weights_of
from dgraph.frontend.capture import capture_module
from dgraph.ir.graph import Graph
from dgraph.ir.stored_graph import from_data, to_data
from dgraph.ir.stored_weights import as_stored
from dgraph.ir.verifier import verify
from dgraph.spec import ModelSpec

FILE = "graph.json"

READ_LATER = {
    "attention_similarity",
    "block_length",
    "encoding",
    "eos_ids",
    "image_id",
    "layer_importance",
    "mask_id",
    "next_token",
    "noise",
    "pad_id",
    "rule",
}
"""Facts of a spec that recipes and decode loops read, and no capture does."""


def capture_or_load(
    module: nn.Module,
    spec: ModelSpec,
    prefix: str = "",
    store: Store | None = None,
    weights: WeightSource | None = None,
) -> tuple[Graph, bool]:
    """A module's verified graph, from the store if the same forward was captured before.

    Args:
        module, spec, prefix: as for `capture_module`.
        store: cache of graphs. Only a module with an attribute `identity` is looked up, and stored. This string
            says everything its forward depends on but its tensors.
        weights: weights of a model whose parameters are not read, see `dgraph.families.Model`. Weights that are stored
            quantised are read as they are stored.

    Returns:
        The graph, and True if it was captured just now.

    Raises:
        CaptureError: as `capture_module`.
        VerifyError: the captured graph breaks a rule.
    """
    graph, made = _captured_or_loaded(module, spec, prefix, store)
    if weights is not None and weights.formats:
        as_stored(graph, weights)
        verify(graph)
    return graph, made


def _captured_or_loaded(module: nn.Module, spec: ModelSpec, prefix: str, store: Store | None) -> tuple[Graph, bool]:
    identity = getattr(module, "identity", "")
    if store is None or not identity:
        graph = capture_module(module, spec, prefix)
        verify(graph)
        return graph, True
    key = key_of(module, identity, spec)
    found = store.find(key)
    if found is not None:
        try:
            graph = from_data(json.loads(found.files[FILE]), weights_of(module, prefix), spec)
            verify(graph)
            return graph, False
        except (DgraphError, ValueError) as error:
            store.reject(key.digest, f"it does not load ({str(error).partition(chr(10))[0]})")
    with store.making(key.digest):
        graph = capture_module(module, spec, prefix)
        verify(graph)
        try:
            data = to_data(graph)
            from_data(data, weights_of(module, prefix), spec)  # proves now that it can be read back
        except DgraphError as error:
            store.warn(f"a captured graph cannot be stored in the artifact cache {store.root}: {error}.")
        else:
            store.put(key, {FILE: json.dumps(data, separators=(",", ":")).encode()})
    return graph, True


def key_of(module: nn.Module, identity: str, spec: ModelSpec) -> Key:
    """The key of a captured graph; facts of the spec that recipes alone read are no part of it."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    said = {name: value for name, value in spec.to_json().items() if name not in READ_LATER}
    facts = {
        "identity": identity,
        "spec": json.dumps(said, sort_keys=True),
    }
    return graph_key(facts, device, Path(inspect.getfile(type(module))))

"""Places of the calls of an exported forward: the layer of each, and the module that it came from.

A module path with a number, `model.layers.3.mlp`, says both. Paths may not number the attentions 0, 1, 2, ...: layers
are attributes, lie in several lists, or one module runs several times. Then the residual stream says it. A layer begins
at the last place before its attention at which one value alone goes on of all that the tokens gave.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

import torch
from torch.fx import Node

from dgraph.types.nodes import op_name

Place = tuple[int | None, str]
"""The layer, None outside the layers, and the module relative to it."""

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_ATTENTIONS = ("scaled_dot_product_attention", "dgraph.attention")


def split_layer(path: str) -> Place:
    """A dotted path as (layer index, rest): "layers.3.mlp" is (3, "mlp"), "model.norm" is (None, "model.norm")."""
    found = _LAYER.search(path)
    if found is None:
        return None, path
    return int(found.group(1)), path[found.end() :]


def module_path(node: Node) -> str:
    """The dotted path of the module that made a node; "" for the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    return "" if path.startswith("_") else path  # export's placeholder for nodes that no module made


def places_of(nodes: Sequence[Node], tokens: Node | None, prefix: str) -> dict[Node, Place]:
    """The place of each call.

    Args:
        nodes: nodes of an exported forward, in order, with the types that export gives them.
        tokens: its input of token ids.
        prefix: dotted path before every module's name, to be left out.
    """
    calls = [node for node in nodes if node.op == "call_function"]
    paths = {node: module_path(node).removeprefix(prefix) for node in calls}
    places = {node: split_layer(path) for node, path in paths.items()}
    attentions = [node for node in calls if op_name(node.target) in _ATTENTIONS]
    if tokens is None or [places[node][0] for node in attentions] in ([], list(range(len(attentions)))):
        return places
    layers = _by_stream(calls, tokens, attentions)
    if layers is None:
        return places
    own = _own_paths(layers, paths)
    return {
        node: (layer, path if layer is None else path.removeprefix(own[layer]).lstrip("."))
        for node, path in paths.items()
        for layer in [layers.get(node)]
    }


def _by_stream(calls: Sequence[Node], tokens: Node, attentions: Sequence[Node]) -> dict[Node, int] | None:
    """The layer of each call that reads the tokens, by where the residual stream is all that goes on; None where it
    never is.
    """
    at = {tokens: 0}
    for node in calls:
        if isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)) and not at.keys().isdisjoint(
            node.all_input_nodes
        ):
            at[node] = len(at)
    given = list(at)
    last = [max((at[user] for user in node.users if user in at), default=len(given)) for node in given]
    streams: list[int] = []
    live: set[int] = set()
    for i in range(len(given)):
        live = {j for j in live if last[j] > i} | {i}
        if len(live) == 1 and i:
            streams.append(i)
    starts = [max((i for i in streams if i < at[node]), default=0) for node in attentions if node in at]
    if len(starts) < len(attentions) or not starts[0] or sorted(set(starts)) != starts:
        return None
    ends = [*starts[1:], _end_of_last(given, [at[node] for node in attentions], starts, streams)]
    return {
        node: layer
        for layer, (start, end) in enumerate(zip(starts, ends, strict=True))
        for node in given[start + 1 : end + 1]
    }


def _end_of_last(
    given: Sequence[Node], attentions: Sequence[int], starts: Sequence[int], streams: Sequence[int]
) -> int:
    """Find the end of the last layer: as far behind its attention as in the layer before, else at its last sum."""
    last = attentions[-1]
    after = [i for i in streams if i > last]
    if len(starts) > 1 and (end := last + starts[-1] - attentions[-2]) in after:
        return end
    sums = [i for i in after if op_name(given[i].target) == "add"]
    return max(sums or after or [last])


def _own_paths(layers: Mapping[Node, int], paths: Mapping[Node, str]) -> list[str]:
    """The path that all modules of each layer begin with and no other layer's; else an empty text."""
    found: list[list[list[str]]] = [[] for _ in range(1 + max(layers.values()))]
    for node, layer in layers.items():
        if paths[node]:
            found[layer].append(paths[node].split("."))
    same = (itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*each, strict=False)) for each in found)
    shared = [".".join(parts[0] for parts in each) for each in same]
    return [path if shared.count(path) == 1 else "" for path in shared]

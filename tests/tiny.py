"""What several tests of the core share: small models, hand-built graphs, and a plain interpreter of graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.families.quantised import Format, quantise
from dgraph.ir.graph import Graph
from dgraph.ops import OPS, op_of
from dgraph.passes.base import Pass, Report
from dgraph.passes.manager import run_passes
from dgraph.spec import ModelSpec
from dgraph.types.nodes import op_name
from dgraph.types.shapes import Dim, InputSpec

VOCAB = 97
MASK = VOCAB - 1
BLOCK = 8
PAGE = 4


def tiny_spec(**changes: Any) -> ModelSpec:
    """Facts of a model of two layers that no test runs."""
    fields: dict[str, Any] = {
        "family": "hand",
        "layers": 2,
        "hidden": 16,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 4,
        "vocab": VOCAB,
        "mask_id": MASK,
        "eos_ids": (),
        "pad_id": 0,
        "block_length": BLOCK,
        "attention": "block_causal",
        "logit_shift": 0,
        "max_positions": 256,
        "dtype": torch.float32,
    }
    return ModelSpec(**(fields | changes))


class Hand:
    """A graph that is written down node by node; `call` appends one."""

    def __init__(self, **spec: Any):
        self.graph = Graph(tiny_spec(**spec))
        self.graph.set_outputs({})
        self.layer: int | None = None

    def input(self, name: str, *shape: Dim, dtype: torch.dtype = torch.float32) -> Node:
        return self.graph.add_input(InputSpec(name, dtype, shape))

    def weight(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Node:
        generator = torch.Generator().manual_seed(len(self.graph.tensors))
        return self.graph.add_weight(name, torch.randn(shape, generator=generator).to(dtype))

    def stored(self, rows: int, columns: int, dtype: torch.dtype = torch.float32, kind: str = "int8") -> Node:
        """A weight in 8 bits, dequantised."""
        whole = torch.randn((rows, columns), generator=torch.Generator().manual_seed(rows))
        found, name = quantise(whole, Format(kind)), f"w{rows}.weight"
        parts = self.graph.add_weight(name, found.values), self.graph.add_weight(f"{name}_scale", found.scales)
        return self.call(OPS["dequantise"].overload, *parts, None, [1, -1], dtype)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call(target, args, kwargs, before=self.graph.output, by="")
        node.meta.update(layer=self.layer, role="block" if self.layer is not None else "", source="")
        return node

    def returns(self, **results: Node) -> Graph:
        self.graph.set_outputs(results)
        return self.graph


def rewritten(graph: Graph, *passes: Pass) -> Graph:
    """A copy of the graph after passes, each verified."""
    copy = graph.copy()
    run_passes(copy, passes)
    return copy


def report_of(graph: Graph, step: Pass) -> Report:
    """What a pass reports on a copy of the graph, whether or not it applied."""
    return run_passes(graph.copy(), [step], frozenset({step.name}))[0]


def ops_of(graph: Graph, layer: int | str | None = "all") -> list[str]:
    """Names of the calls, in order; of one layer if given."""
    return [op_name(n.target) for n in graph.calls if layer in ("all", n.meta["layer"])]


@torch.no_grad()
def interpret(
    graph: Graph, inputs: Mapping[str, Tensor], instead: Mapping[str, Callable[..., Any]] | None = None
) -> dict[str, Tensor]:
    """Run a graph node by node in plain torch; caches among the inputs are written in place.

    instead: functions that stand for dgraph ops, by the op's short name.
    """
    values: dict[Node, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = graph.tensors[node.meta["weight"]] if "weight" in node.meta else inputs[node.meta["input"]]
        elif node.op == "call_function":
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
            op = op_of(node.target)
            function: Any = node.target if op is None else (instead or {}).get(op.name, op.reference)
            values[node] = function(*args, **kwargs)
    return {name: values[node] for name, node in graph.results().items()}


def draw(length: int, seed: int = 0) -> list[int]:
    """Token ids without the mask."""
    return torch.randint(0, MASK, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def rows_of(sequences: Sequence[Sequence[int]], starts: Sequence[int] | None = None) -> dict[str, Tensor]:
    """Inputs of a packed step: each sequence's rows at consecutive positions from its start, all visible to each."""
    starts = starts or [0] * len(sequences)
    counts = [len(s) for s in sequences]
    ids = torch.tensor([token for s in sequences for token in s], dtype=torch.int64)
    spans = list(zip(starts, counts, strict=True))
    return {
        "input_ids": ids,
        "positions": torch.tensor([p for start, n in spans for p in range(start, start + n)], dtype=torch.int64),
        "limit": torch.tensor([start + n for start, n in spans for _ in range(n)], dtype=torch.int32),
        "cu_rows": torch.tensor([0, *counts]).cumsum(0).int(),
        "candidate": ids == MASK,
        "temperature": torch.zeros(len(ids)),
        "seed": torch.arange(len(ids)) * 7 + 1,
        **{name: torch.ones(len(counts)) for name in ("average", "sequence_average")},
        "block_step": torch.ones(len(counts), dtype=torch.int32),
        "reached": torch.tensor(starts, dtype=torch.int32) - 1,
    }


def caches_of(spec: ModelSpec, lengths: Sequence[int]) -> dict[str, Tensor]:
    """Empty paged caches (NaN) for sequences of those lengths, pages in no particular order."""
    needed = [-(-n // PAGE) for n in lengths]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(1)).int()
    table = torch.full((len(lengths), max(needed)), -1, dtype=torch.int32)
    for s, part in enumerate(order.split(needed)):
        table[s, : len(part)] = part
    shape = (len(order), PAGE, spec.kv_heads, spec.head_dim)
    caches = {f"{kind}_cache_{layer}": torch.full(shape, torch.nan) for layer in range(spec.layers) for kind in "kv"}
    return {"page_table": table, **caches}


def read_cache(inputs: Mapping[str, Tensor], name: str, sequence: int, length: int) -> Tensor:
    """Positions [0, length) of one sequence in a paged cache."""
    own = name[0] in "cf" and "page_table_1" in inputs
    table = inputs["page_table_1" if own else "page_table"][sequence]
    return torch.stack([inputs[name][table[p // PAGE], p % PAGE] for p in range(length)])

"""Inputs of weights in the first step of some prompts: a prompt, and a response that is masked throughout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.cache.store import open_store
from dgraph.compiler.base_graph import Weights, graph_of_model, quantising
from dgraph.compiler.phases import lowerable
from dgraph.compiler.saving import formats_for
from dgraph.errors import InputError
from dgraph.evaluate.calibrate import encoded, first_step, response_length
from dgraph.families import resolve
from dgraph.families.quantised import Format
from dgraph.ir.graph import Graph
from dgraph.ir.verifier import verify
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.regions import RegionCompiler
from dgraph.passes.manager import run_passes
from dgraph.passes.pack_rows import PackRows
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.request_checks import check_request
from dgraph.settings import DtypeLike


@dataclass(frozen=True, eq=False)
class Inputs:
    """A model and prompts, on which the inputs of its weights can be computed.

    Attributes:
        graph: graph of the model, over packed rows; its tensors may be replaced by others.
        prompts: ids of each prompt.
        masks: number of masks after each prompt.
        formats: formats of the weights that are to be quantised, by name.
    """

    graph: Graph
    prompts: Sequence[Sequence[int]]
    masks: int
    formats: Mapping[str, Format]

    def of(self, nodes: Sequence[Node]) -> Iterator[list[Tensor]]:
        """The values of some nodes of the graph, prompt by prompt; only the nodes that they need are computed."""
        if not nodes:
            return
        graph = self.graph.copy()
        same = dict(zip(self.graph.nodes, graph.nodes, strict=True))
        names = [f"inputs_{i}" for i in range(len(nodes))]
        graph.set_outputs({name: same[node] for name, node in zip(names, nodes, strict=True)})
        graph.sweep()
        verify(graph, "inputs")
        program = LoweredProgram(lowerable(graph), RegionCompiler("eager"), Buckets.of("exact"))
        for prompt in self.prompts:
            outputs = program(
                first_step(graph.spec, prompt, self.masks, graph.device), len(prompt) + self.masks
            ).outputs
            yield [outputs[name] for name in names]


def inputs_for(
    model: Any,
    prompts: Sequence[str] | None = None,
    weights: Weights = "int4",
    *,
    input_ids: Sequence[Sequence[int]] | None = None,
    max_new_tokens: int | None = None,
    dtype: DtypeLike = None,
    device: str | torch.device | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Inputs:
    """Inputs of the weights of a model that are to be quantised. The whole unquantised model is in memory meanwhile.

    Args:
        model: the name of an embedded model, a checkpoint folder, a model object, or a `Model`.
        prompts: texts, framed by the model's chat template.
        weights: storage of the weights after quantising.
        input_ids: instead of texts, ids per prompt, used as they are.
        max_new_tokens: masks after each prompt; None for a block of a block-causal model, 128 of a bidirectional one.
        dtype, device: dtype and device of a model that is loaded by name or folder; see `dgraph.load`.
        facts: fields of the spec that a model object does not know.

    Raises:
        InputError: no prompt, or one that cannot be used; a model that is quantised already.
        UnknownName, CheckpointError, CaptureError: as `dgraph.optimize`.
    """
    if (prompts is None) == (input_ids is None):
        raise InputError("give either prompts (texts) or input_ids, not both and not neither.")
    found, step = resolve(model, dtype, device, **dict(facts or {})), quantising(weights)
    ids = [list(row) for row in input_ids] if input_ids is not None else encoded(found, prompts or ())
    if not ids:
        raise InputError("no prompt to measure inputs on; give at least one.")
    masks = response_length(found.spec) if max_new_tokens is None else max_new_tokens
    checked = check_request(found.spec, ids, Decoding(max_new_tokens=masks), None)
    formats = {} if step is None else formats_for(found, step)
    graph = graph_of_model(found, open_store()).copy()
    run_passes(graph, [PackRows()])
    return Inputs(graph, checked, masks, formats)

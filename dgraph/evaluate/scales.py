"""Scales of inputs with which weights of few bits round best (AWQ, Lin et al., 2023, arXiv 2306.00978, section 3.2).

A channel of large inputs weighs more in a product, so its column of the weight should be rounded more finely: columns
are multiplied by s before rounding, and what makes the inputs is divided by s. That is a norm, whose vector is divided,
or the product that is gated before a down projection, whose rows are; so nothing is computed besides. Per group of
weights that read the same inputs, s = (mean |x|)^a, and a is what makes the squared error of the outputs least.

Inputs are those of a first step: a prompt, and a response that is masked throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.cache.store import open_store
from dgraph.captured import Weights, graph_of_model, quantising
from dgraph.errors import InputError
from dgraph.evaluate.calibrate import encoded, first_step, response_length
from dgraph.families import resolve
from dgraph.graph import Graph
from dgraph.linears import linears_of
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.regions import RegionCompiler
from dgraph.nodes import args_of, op_name
from dgraph.passes.manager import run_passes
from dgraph.passes.pack_rows import PackRows
from dgraph.quantised import Format, quantise
from dgraph.runtime.checks import check_request
from dgraph.runtime.decoding import Decoding
from dgraph.saving import Fold, formats_for
from dgraph.verify import verify

aten = torch.ops.aten

GRID = 20
"""Values of a that are tried, from 0 (no scales) on, below 1."""
ROWS = 256
"""Rows of inputs, evenly from all prompts, that the error is measured on."""
LEAST = 1e-4
"""Of a mean |x|: a channel that is always zero has no scale."""


@dataclass(frozen=True)
class Group:
    """Weights that read the same inputs.

    Attributes:
        inputs: the node of these, over packed rows.
        made: the name of the weight that can be divided along its first dimension instead of the inputs.
        read: the names of the weights.
    """

    inputs: Node
    made: str
    read: tuple[str, ...]


def scales_for(
    model: Any,
    prompts: Sequence[str] | None = None,
    weights: Weights = "int4",
    *,
    input_ids: Sequence[Sequence[int]] | None = None,
    max_new_tokens: int | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    facts: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Fold, ...]:
    """The scales with which `dgraph.save_quantised(model, out, weights, folds=...)` writes a checkpoint.

    The whole model, as it is, is in memory meanwhile.

    Args:
        model: the name of an embedded model, a checkpoint folder, a model object, or a `Model`.
        prompts: texts, framed by the model's chat template.
        weights: how they will be stored.
        input_ids: instead of texts, ids per prompt, used as they are.
        max_new_tokens: masks after each prompt; None for a block of a block-causal model, 128 of a bidirectional one.
        dtype, device: where and how to load a name or folder; see `dgraph.load`.
        facts: fields of the spec that a model object does not know.
        progress: called with (groups done, groups in all).

    Returns:
        A fold for each group of weights that rounds better with one.

    Raises:
        InputError: no prompt, or one that cannot be used; a model that is quantised already.
        UnknownName, CheckpointError, CaptureError: as `dgraph.optimize`.
    """
    if (prompts is None) == (input_ids is None):
        raise InputError("give either prompts (texts) or input_ids, not both and not neither.")
    found, step = resolve(model, dtype, device, **dict(facts or {})), quantising(weights)
    ids = [list(row) for row in input_ids] if input_ids is not None else encoded(found, prompts or ())
    if not ids:
        raise InputError("no prompt to find scales on; give at least one.")
    if step is None:
        return ()
    masks = response_length(found.spec) if max_new_tokens is None else max_new_tokens
    checked = check_request(found.spec, ids, Decoding(max_new_tokens=masks), None)
    formats = formats_for(found, step)
    graph = graph_of_model(found, open_store()).copy()
    run_passes(graph, [PackRows()])
    groups = [group for group in groups_of(graph) if not formats.keys().isdisjoint(group.read)]
    tensors = dict(graph.tensors)
    graph.set_outputs({f"inputs_{i}": group.inputs for i, group in enumerate(groups)})
    graph.sweep()
    verify(graph, "scales")
    program = LoweredProgram(graph, RegionCompiler("eager"), Buckets.of("exact"))
    seen = [Seen() for _ in groups]
    each = -(-ROWS // len(checked))
    for prompt in checked:
        outputs = program(first_step(found.spec, prompt, masks, graph.device), len(prompt) + masks).outputs
        for i, one in enumerate(seen):
            one.add(outputs[f"inputs_{i}"], each)
    folds = []
    for i, (group, one) in enumerate(zip(groups, seen, strict=True)):
        scales = best(one, [(tensors[name], formats[name]) for name in group.read if name in formats])
        if scales is not None:
            folds.append(Fold(group.made, group.read, scales.cpu()))
        if progress is not None:
            progress(i + 1, len(groups))
    return tuple(folds)


class Seen:
    """What is kept of a group's inputs: the sum of |x| by channel, and some rows."""

    def __init__(self) -> None:
        self._sum: Tensor | float = 0.0
        self._count, self._rows = 0, list[Tensor]()

    def add(self, inputs: Tensor, rows: int) -> None:
        """Take in the inputs [n, in] of a prompt; `rows`: how many to keep, evenly."""
        wide = inputs.float()
        self._sum, self._count = self._sum + wide.abs().sum(0), self._count + len(wide)
        self._rows.append(wide[:: -(-len(wide) // rows)].clone())

    @property
    def mean(self) -> Tensor:
        """Mean |x|, f32[in]."""
        return torch.as_tensor(self._sum) / self._count

    @property
    def rows(self) -> Tensor:
        """f32[n, in]."""
        return torch.cat(self._rows)


@torch.no_grad()
def best(seen: Seen, weights: Sequence[tuple[Tensor, Format]]) -> Tensor | None:
    """The scales f32[in] of the least squared error of the outputs of some weights; None if that is without scales."""
    mean, rows = seen.mean.clamp(min=LEAST), seen.rows
    tried = [mean ** (i / GRID) for i in range(GRID)]
    tried = [scales / (scales.max() * scales.min()).sqrt() for scales in tried]
    errors = torch.zeros(GRID, dtype=torch.float64)
    for weight, format in weights:
        for item in weight.float().reshape(-1, *weight.shape[-2:]):
            for i, scales in enumerate(tried):
                rounded = quantise(item * scales, format).dequantised(torch.float32) / scales
                errors[i] += float(((rounded - item) @ rows.t()).square().sum())
    least = int(errors.argmin())
    return None if least == 0 else tried[least]


def groups_of(graph: Graph) -> Iterator[Group]:
    """The groups of a packed graph: what reads a norm alone, and down projections of a gated product."""
    linears = {linear.node: linear for linear in linears_of(graph.calls, "plain")}
    for node in graph.calls:
        if op_name(node.target) == "dgraph.rms_norm":
            weight = args_of(node)[1]
        elif node.target is aten.mul.Tensor:
            ups = [linears[a] for a in args_of(node) if a in linears and len(a.users) == 1]
            weight = ups[0].weight if len(ups) == 1 and ups[0].bias is None else None
        else:
            continue
        read = [_reads(user, node, linears) for user in node.users]
        nodes = [weight, *read]
        if read and all(isinstance(n, Node) and "weight" in n.meta and len(n.users) == 1 for n in nodes):
            names = [n.meta["weight"] for n in nodes if n is not None]
            yield Group(node, names[0], tuple(names[1:]))


def _reads(user: Node, inputs: Node, linears: Mapping[Node, Any]) -> Node | None:
    """The weight that is multiplied by some inputs; None if they are read in another way."""
    if user in linears and linears[user].x is inputs:
        weight: Node = linears[user].weight
        return weight
    if op_name(user.target) == "dgraph.experts" and args_of(user)[0] is inputs:
        gate_up: Node = args_of(user)[3]
        return gate_up
    return None

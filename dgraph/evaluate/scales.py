"""Scales of inputs with which low-bit weights round best (AWQ, Lin et al., 2023, arXiv 2306.00978, section 3.2).

A channel of large inputs weighs more in a product, so its column of the weight should be rounded more finely. Columns
are multiplied by s before rounding, and the weight that makes the inputs is divided by s. It is the vector of a norm,
or the rows of the up projection whose gated product a down projection reads. So nothing more is computed at run time.
Each group of weights that read the same inputs has s = (mean |x|)^a, with the a of the least squared error of the
outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.compiler.saving import Fold
from dgraph.evaluate.inputs import Inputs
from dgraph.families.quantised import Format, quantise
from dgraph.ir.graph import Graph
from dgraph.ir.linears import linears_of
from dgraph.types.nodes import args_of, op_name

aten = torch.ops.aten

GRID = 20
"""Number of values of a that are tried, from 0 (no scales) on, below 1."""
ROWS = 256
"""Rows of inputs, evenly from all prompts, on which the error is measured."""
LEAST = 1e-4
"""Lower bound of mean |x|, as a channel that is always zero would have the scale 0."""


@dataclass(frozen=True)
class Group:
    """Weights that read the same inputs.

    Attributes:
        inputs: the node of the inputs, over packed rows.
        made: the name of the weight that can be divided along its first dimension instead of the inputs.
        read: the names of the weights.
    """

    inputs: Node
    made: str
    read: tuple[str, ...]


def scales_for(inputs: Inputs, progress: Callable[[int, int], None] | None = None) -> tuple[Fold, ...]:
    """The scales with which `dgraph.save_quantised(model, out, weights, folds=...)` writes a checkpoint.

    Args:
        inputs: inputs of the model.
        progress: called with (groups done, groups in all).

    Returns:
        A fold for each group of weights that rounds better with one.
    """
    formats = inputs.formats
    groups = [group for group in groups_of(inputs.graph) if not formats.keys().isdisjoint(group.read)]
    seen = [Seen() for _ in groups]
    each = -(-ROWS // len(inputs.prompts))
    for values in inputs.of([group.inputs for group in groups]):
        for one, value in zip(seen, values, strict=True):
            one.add(value, each)
    folds = []
    for i, (group, one) in enumerate(zip(groups, seen, strict=True)):
        scales = best(one, [(inputs.graph.tensors[name], formats[name]) for name in group.read if name in formats])
        if scales is not None:
            folds.append(Fold(group.made, group.read, scales.cpu()))
        if progress is not None:
            progress(i + 1, len(groups))
    return tuple(folds)


class Seen:
    """Statistics of a group's inputs: the sum of |x| by channel, and some rows."""

    def __init__(self) -> None:
        self._sum: Tensor | float = 0.0
        self._count, self._rows = 0, list[Tensor]()

    def add(self, inputs: Tensor, rows: int) -> None:
        """Add the inputs [n, in] of a prompt. rows: most rows to keep, at even distances."""
        wide = inputs.float()
        self._sum, self._count = self._sum + wide.abs().sum(0), self._count + len(wide)
        self._rows.append(wide[:: -(-len(wide) // rows)].clone())

    @property
    def mean(self) -> Tensor:
        """Mean |x|, f32[in]."""
        return torch.as_tensor(self._sum) / self._count

    @property
    def rows(self) -> Tensor:
        """The kept rows, f32[n, in]."""
        return torch.cat(self._rows)


@torch.no_grad()
def best(seen: Seen, weights: Sequence[tuple[Tensor, Format]]) -> Tensor | None:
    """The scales f32[in] with the least squared error of the outputs of some weights; None if no scales are best."""
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
    """Yield the groups of a packed graph: weights that read only a norm, and down projections of a gated product."""
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

"""Text of everything that a graph holds and calls; memory and time of its steps depend on nothing else."""

from __future__ import annotations

from collections import Counter
from operator import getitem

import torch
from torch.fx import Node

from dgraph.ir.graph import Graph
from dgraph.types.nodes import args_of, op_name


def contents(graph: Graph) -> str:
    """Weights and inputs by type, calls by the types that they read: one line each, with the number of equal ones.

    The text shows how weights are stored and which rows are rounded. There are no names in it, so that equal layers
    share their lines, and graphs that were made alike have one text.
    """
    lines = Counter(_line(graph, node) for node in graph.nodes if node.op != "output" and node.target is not getitem)
    return "\n".join(f"{line}  x {count}" for line, count in sorted(lines.items()))


def _line(graph: Graph, node: Node) -> str:
    if node.op == "placeholder":
        return f"{'weight' if 'weight' in node.meta else 'input'}: {graph.type_text(node)}"
    read = torch.fx.map_arg((*args_of(node), *node.kwargs.items()), graph.type_text)
    return f"{op_name(node.target)}({', '.join(map(str, read))}): {graph.type_text(node)}"

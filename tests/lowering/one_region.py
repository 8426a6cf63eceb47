"""One small region, compiled or loaded: what a process of its own does with a store.

python -m tests.lowering.one_region STORE
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from dgraph.cache.store import Store
from dgraph.ir.graph import Graph
from dgraph.lowering.regions import RegionCompiler
from dgraph.lowering.schedule import Region, schedule
from tests.tiny import Hand


def region(scale: float = 2.0) -> tuple[Graph, Region]:
    """y = rms_norm(scale * x) + x over rows [N, 4]; another scale is another region."""
    hand = Hand()
    x, weight = hand.input("x", "N", 4), hand.weight("norm.weight", 4)
    scaled = hand.call(torch.ops.aten.mul.Tensor, x, scale)
    normed = hand.call(torch.ops.dgraph.rms_norm.default, scaled, weight, 1e-6)
    graph = hand.returns(y=hand.call(torch.ops.aten.add.Tensor, normed, x))
    (stage,) = schedule(graph)
    (only,) = stage.steps
    assert isinstance(only, Region)
    return graph, only


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Values for the region."""
    return torch.linspace(-1, 1, 28).view(7, 4), torch.tensor([1.0, 0.5, 2.0, -1.0])


def run(store: Store | None, scale: float = 2.0) -> dict[str, Any]:
    """Make the region with a store and run it: what was compiled, what loaded, what was told, the result."""
    told: list[str] = []
    compiler = RegionCompiler(progress=told.append, store=store)
    function = compiler.function(*region(scale))
    with torch.no_grad():
        (y,) = function(*inputs())
    counts = {"compiled": len(compiler.compiled), "loaded": len(compiler.loaded), "unstored": len(compiler.unstored)}
    return {**counts, "told": told, "y": y.tolist()}


def compilations() -> dict[str, int]:
    """How often Inductor's counters say that it compiled, or looked into its own caches, in this process."""
    from torch._dynamo.utils import counters

    found = {"graphs": counters["aot_autograd"]["total"]}
    return found | {name: counters["inductor"][name] for name in ("fxgraph_cache_miss", "fxgraph_cache_hit")}


def main() -> None:
    """Print one JSON object."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    result = run(Store(sys.argv[1]))
    seconds = time.perf_counter() - start
    print(json.dumps({**result, "counters": compilations(), "seconds": seconds}))


if __name__ == "__main__":
    main()

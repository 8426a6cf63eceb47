"""The graphs that the recipes make of the tiny model, and one step of a batch for them."""

from __future__ import annotations

import pytest
import torch

import dgraph
from dgraph.ir.graph import Graph
from dgraph.recipes import RECIPES, build
from tests.passes.scene import Scene, scene


@pytest.fixture(scope="session")
def dense(captured: Graph) -> dict[str, Graph]:
    """Per phase."""
    phases = dgraph.rewrite(captured, build(RECIPES, "dense", captured.spec, {}))
    return {name: phase.graph for name, phase in phases.items()}


@pytest.fixture(scope="session")
def focus(captured: Graph) -> dict[str, Graph]:
    """Per phase; as published, since the step below has no step before it that forwarded all rows of its blocks."""
    phases = dgraph.rewrite(captured, build(RECIPES, "focus", captured.spec, {"max_num_logits": 5, "full_steps": 0}))
    return {name: phase.graph for name, phase in phases.items()}


@pytest.fixture(scope="session")
def step(cached: Graph) -> Scene:
    torch.set_num_threads(1)
    return scene(cached)

"""A pass, a region and a kernel that are broken on purpose are named, each with its node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import dgraph
from dgraph.comparison import bisect as bisect_module
from dgraph.comparison.ways import Lowered
from dgraph.errors import InputError, PassError, UnknownName
from dgraph.ir.graph import Graph
from dgraph.lowering import executor
from dgraph.lowering.regions import RegionCompiler
from dgraph.lowering.schedule import Region
from dgraph.numerics import run
from dgraph.numerics.small_runs import small_runs
from dgraph.ops import Op
from dgraph.ops import launcher as plain_launcher
from dgraph.passes import EvictTokens, PackRows
from dgraph.recipes import Phase, Recipe
from dgraph.runtime.graphs.pool import GraphPool
from dgraph.testing import models
from dgraph.types.nodes import op_name
from tests.numerics.wrong import Hopeless, Scale
from tests.runtime.recorder import Recorder

(SDAR,) = models(None, "sdar")
PLAIN = RegionCompiler.function


def with_step(step: Any, after: int = 3) -> Recipe:
    """The dense recipe with one more pass in its step."""
    dense = SDAR.recipe("dense")
    phases = [
        replace(p, passes=(*p.passes[:after], step, *p.passes[after:])) if p.name == "step" else p for p in dense.phases
    ]
    return replace(dense, phases=tuple(phases))


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    found = dgraph.bisect(SDAR.graph, "focus", backend="eager")
    assert not found
    names = [(check.phase, check.name) for check in found.checks]
    assert ("step", "EvictTokens") in names
    assert names[-2:] == [("step", "op by op"), ("step", "kernels")]
    assert all(check.compared for check in found.checks)
    assert "No results part." in str(found)
    assert found.to_json()["fault"] is None


def test_a_broken_pass_is_named_with_its_node() -> None:
    found = dgraph.bisect(SDAR.graph, with_step(Scale(by=1.1)), backend="eager")
    assert found.fault is not None
    fault = found.fault
    assert (fault.check.phase, fault.check.name) == ("step", "Scale")
    assert found.checks[-1] == fault.check
    assert [(each.ref.layer, each.line.op) for each in fault.made] == [(2, "mul")]
    assert fault.node is not None
    assert fault.node.startswith("layers[2].")
    assert "made: mul in layers[2]" in str(found)
    assert "Scale(by=1.1) (exact) is the first after which results part, in phase step." in str(found)


def test_a_tolerance_says_how_far_results_may_part() -> None:
    recipe = with_step(Scale(by=1 + 1e-4))
    assert dgraph.bisect(SDAR.graph, recipe, backend="eager")
    assert not dgraph.bisect(SDAR.graph, recipe, backend="eager", tolerance=1e-2)


def test_a_pass_that_approximates_is_found_as_it_is_set() -> None:
    found = dgraph.bisect(SDAR.graph, "focus", backend="eager", as_set=True)
    assert found.fault is not None
    assert found.fault.check.name == EvictTokens.__name__
    assert {each.line.op for each in found.fault.made} >= {"dgraph.importance", "dgraph.select_tokens"}
    with pytest.raises(PassError, match="no setting at which it changes nothing"):
        dgraph.bisect(SDAR.graph, Recipe("made", 1, (Phase("step", (PackRows(), Hopeless(by=2.0))),)))


def broken_launcher(op: Op, device: torch.device) -> Callable[..., Any]:
    """Kernels, of which that of attention scales its result."""
    function = plain_launcher(op, device)
    return (lambda *args: function(*args) * 1.5) if op.name == "paged_attention" else function


def test_a_broken_kernel_is_named_with_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "launcher", broken_launcher)
    found = dgraph.bisect(SDAR.graph, "dense", backend="eager")
    assert found.fault is not None
    assert found.fault.check.name == "kernels"
    assert found.fault.node is not None
    assert found.fault.node.startswith("layers[0].")
    assert [each.line.op for each in found.fault.made] == ["dgraph.paged_attention"]


def broken_region(self: RegionCompiler, graph: Graph, region: Region) -> Callable[..., Any]:
    """Regions that stand for compiled ones: those with the gate of layer 1 add to its product."""
    function = PLAIN(RegionCompiler("eager"), graph, region)
    gates = [node for node in region.nodes if op_name(node.target) == "silu" and node.meta["layer"] == 1]
    if self.backend == "eager" or not gates:
        return function
    return lambda *args: tuple(value + 1.0 for value in function(*args))


def test_a_broken_region_is_named_with_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RegionCompiler, "function", broken_region)
    found = dgraph.bisect(SDAR.graph, "dense")
    assert found.fault is not None
    assert found.fault.check.name == "regions"
    assert [each.line.op for each in found.fault.made].count("silu") == 1
    assert found.fault.node is not None
    assert found.fault.node.startswith(("layers[1].", "layers[2]."))
    assert "runs as one: " in str(found)


@pytest.mark.parametrize("wrong", [False, True])
def test_recorded_stages_are_compared_with_those_that_are_not(wrong: bool) -> None:
    """As on a GPU, with a recorder in the place of CUDA graphs."""

    class Forgetful(Recorder):
        def replay(self) -> None:
            if not wrong:
                super().replay()

    phases = dgraph.rewrite(SDAR.graph, SDAR.recipe("dense"))
    graph, compiler = phases["step"].graph, RegionCompiler("eager")
    recorded = Lowered(compiler, kernels=True, pool=GraphPool(recorder=Forgetful))
    small = small_runs(SDAR.graph, phases)["step"]
    found = small.beside((graph, run), (graph, recorded), None)
    if not wrong:
        assert found.parted is None
        return
    assert found.parted is not None
    assert found.parting is None, "values of nodes are those without a recording"


def test_graphs_are_a_stage_on_a_gpu() -> None:
    assert list(bisect_module.STAGES) == ["op by op", "regions", "kernels", "graphs"]


def test_an_optimized_model_has_its_own_recipe() -> None:
    made = SDAR.optimized("dense")
    found = dgraph.bisect(made, backend="eager")
    assert found.name.endswith("under dense")
    with pytest.raises(InputError, match="made already, with its own recipe; leave recipe out"):
        dgraph.bisect(made, "focus")
    with pytest.raises(InputError, match="its own dtype"):
        dgraph.bisect(SDAR.graph, "focus", dtype="bf16")
    with pytest.raises(UnknownName, match="'alhpa'"):
        dgraph.bisect(SDAR.graph, "focus", alhpa=1.0)
    with pytest.raises(InputError, match="backend must be one of"):
        dgraph.bisect(SDAR.graph, "focus", backend="fast")

"""Regions whose kernels start early: compiled so, looked at, and compiled again if one of them does not wait."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dgraph.cache.store import Store
from dgraph.early import regions_start_early
from dgraph.errors import LoweringError
from dgraph.lowering import inductor
from dgraph.lowering.inductor import Source, compiled
from dgraph.lowering.traced import trace
from dgraph.private import torch as torch_private
from dgraph.private.torch import EARLY, inductor_settings, launched_by_triton, settle_kernels, wait_first
from tests.test_early import GOOD, LOAD, WAIT, kernel, module

HASTY = module(GOOD, kernel("second", LOAD, WAIT))


def doubled(x: Tensor) -> list[tuple[int, Tensor]]:
    return [(0, (x + x).relu())]


def source() -> Source:
    """A region on the CPU, with the setting of a GPU."""
    made = trace(doubled, [torch.arange(4.0)]).source
    return Source(made.text, made.module, made.inputs, made.device, settings={EARLY: True})


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """In place of Inductor: whether each compilation was to start early, and torch to keep a copy."""
    found: list[tuple[bool, bool]] = []

    def compile_region(module: Any, inputs: Any, options: dict[str, Any], functions: Any = None) -> Callable[..., Any]:
        found.append((options[EARLY], functions is not None))
        return module.forward

    monkeypatch.setattr(inductor, "_COMPILED", {})
    monkeypatch.setattr(inductor, "compile_region", compile_region)
    monkeypatch.setattr(inductor, "pack_region", lambda function: {"region.pickle": b"code"})
    return found


def stores(folder: Path) -> list[Store | None]:
    return [None, Store(folder / "cache")]


@pytest.mark.parametrize("stored", [0, 1])
@pytest.mark.parametrize(("text", "expected"), [(module(GOOD), [(True, True)]), (HASTY, [(True, True), (False, True)])])
def test_a_region_that_does_not_wait_is_compiled_again(
    tmp_path: Path,
    attempts: list[tuple[bool, bool]],
    monkeypatch: pytest.MonkeyPatch,
    stored: int,
    text: str,
    expected: list[tuple[bool, bool]],
) -> None:
    monkeypatch.setattr(inductor, "source_of_region", lambda function: text)
    store = stores(tmp_path)[stored]
    made = compiled(source(), store)
    assert attempts == expected
    assert made.function(torch.tensor([1.0, -1.0]))[0].tolist() == [2.0, 0.0]
    assert (made.new, made.stored) == (True, store is not None)


@pytest.mark.parametrize("stored", [0, 1])
def test_a_region_that_cannot_be_looked_at_does_not_start_early(
    tmp_path: Path, attempts: list[tuple[bool, bool]], monkeypatch: pytest.MonkeyPatch, stored: int
) -> None:
    def unseen(function: Any) -> str:
        raise LoweringError("torch keeps no copy of it")

    monkeypatch.setattr(inductor, "source_of_region", unseen)
    store = stores(tmp_path)[stored]
    if store is None:
        compiled(source())
    else:
        with pytest.warns(UserWarning, match="cannot be kept in the artifact cache .*: torch keeps no copy"):
            compiled(source(), store)
    assert attempts == [(True, True), (False, False)]


def test_a_region_that_never_starts_early_is_not_looked_at(
    attempts: list[tuple[bool, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor, "source_of_region", lambda function: pytest.fail("looked"))
    made = source()
    compiled(Source(made.text, made.module, made.inputs, made.device, settings={EARLY: False}))
    assert attempts == [(False, False)]


@pytest.mark.parametrize("stored", [0, 1])
def test_inductor_says_what_it_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: int) -> None:
    seen: list[str] = []

    def looked(text: str) -> list[str]:
        seen.append(text)
        return []

    monkeypatch.setattr(inductor, "_COMPILED", {})
    monkeypatch.setattr(inductor, "hasty_kernels", looked)
    made = compiled(source(), stores(tmp_path)[stored])
    assert made.function(torch.tensor([1.0, -1.0, 3.0, 0.0]))[0].tolist() == [2.0, 0.0, 6.0, 0.0]
    assert len(seen) == 1
    assert "async_compile = AsyncCompile()" in seen[0]


def test_generated_kernels_wait_first() -> None:
    triton = pytest.importorskip("torch._inductor.codegen.triton").TritonKernel
    loads = ["xoffset = 0", LOAD, WAIT, "tl.extra.cuda.gdc_launch_dependents()", "tmp1 = tmp0"]
    own = triton._filter_pdl

    def body(early: bool) -> list[Any]:
        code = SimpleNamespace(_lines=list(loads))
        triton._filter_pdl(SimpleNamespace(_enable_pdl_codegen=lambda: early), code)
        return code._lines

    with wait_first():
        assert body(True) == [WAIT, loads[3], loads[0], LOAD, loads[4]]
        assert body(False) == loads
    assert triton._filter_pdl is own


def test_the_settings_of_a_device_say_whether_its_kernels_start_early(monkeypatch: pytest.MonkeyPatch) -> None:
    for early in (True, False):
        monkeypatch.setattr(torch_private, "regions_start_early", lambda device, early=early: early)
        assert inductor_settings(torch.device("cuda", 0))[EARLY] is early


def test_triton_keeps_kernels_where_inductor_would(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "undone")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    settle_kernels()
    cache_folder = pytest.importorskip("dgraph.private.triton").cache_folder
    pytest.importorskip("triton")
    assert cache_folder() == str(tmp_path / "triton" / "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "own"))
    settle_kernels()
    assert cache_folder() == str(tmp_path / "own")


def test_kernels_of_regions_that_triton_launches_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    codecache = pytest.importorskip("torch._inductor.codecache")
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    launched, other = (SimpleNamespace(_run=SimpleNamespace(launch=len)) for _ in range(2))
    asleep, of_torch = SimpleNamespace(_run=None), SimpleNamespace(run=len)
    tuners = []
    for kernels in ((asleep, launched, of_torch), (other,)):
        tuners.append(object.__new__(CachingAutotuner))
        tuners[-1].compile_results = [SimpleNamespace(kernel=k) for k in kernels]  # type: ignore[misc]
    generated = SimpleNamespace(kernel_0=tuners[0], call=len, kernel_1=tuners[1])
    monkeypatch.setattr(codecache.PyCodeCache, "modules", [SimpleNamespace(x=1), generated])
    assert launched_by_triton() == [launched, other]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_chain_of_kernels_equals_ops_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over columns and rows by turns, in integers, on memory that is used again: none may read too early."""
    monkeypatch.setenv("TORCHINDUCTOR_ENABLE_PDL", "1")
    if not regions_start_early(torch.device("cuda", 0)):
        pytest.skip("needs a device whose kernels start early")

    def mix(x: Tensor) -> list[tuple[int, Tensor]]:
        for _ in range(4):
            x = (3 * x + x.sum(0, keepdim=True)) % 1009
            x = (5 * x + x.sum(1, keepdim=True)) % 997
        return [(0, x)]

    monkeypatch.setattr(inductor, "_COMPILED", {})
    start = torch.arange(300 * 70, device="cuda").view(300, 70) % 101
    held = start.clone()
    traced = trace(mix, [held])
    known = {id(kernel) for kernel in launched_by_triton()}
    advance = traced.on([held], compiled(traced.source).function)
    assert len({id(kernel) for kernel in launched_by_triton()} - known) > 1
    advance()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            advance()
    held.copy_(start)
    want = start
    for _ in range(20):
        graph.replay()
        for _ in range(5):
            ((_, want),) = mix(want)
        assert torch.equal(held, want)

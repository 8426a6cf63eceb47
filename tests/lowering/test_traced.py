"""Functions that are traced and compiled to write in place: that they do what they say, and what is refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dgraph.cache.store import Store
from dgraph.errors import LoweringError
from dgraph.lowering import inductor
from dgraph.lowering.inductor import compiled, known
from dgraph.lowering.traced import TraceCompiler, trace


def turn(x: Tensor, y: Tensor) -> list[tuple[int, Tensor]]:
    """x becomes what y was, and more; y what x was."""
    return [(0, y + 1), (1, x)]


def inputs() -> list[Tensor]:
    return [torch.arange(6.0), torch.full((6,), 10.0)]


def test_inputs_become_what_the_function_says() -> None:
    held = inputs()
    traced = trace(turn, held)
    assert torch.equal(held[0], torch.arange(6.0)), "tracing writes nothing"
    traced.on(held, traced.source.module())()
    assert torch.equal(held[0], torch.full((6,), 11.0))
    assert torch.equal(held[1], torch.arange(6.0))


def test_every_value_of_a_trace_is_of_one_fake_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each value would take more time than all else."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    made: list[FakeTensorMode] = []
    init = FakeTensorMode.__init__

    def counted(self: FakeTensorMode, *args: Any, **options: Any) -> None:
        made.append(self)
        init(self, *args, **options)

    traces = []
    for count in (1, 9):
        held = [torch.arange(6.0)]
        with monkeypatch.context() as patch:
            patch.setattr(FakeTensorMode, "__init__", counted)
            traces.append(trace(lambda x, count=count: [(0, sum([x] * count, x))], held))
        made, found = [], len(made)
        assert found <= 2, "of the trace, and of its result"
    assert len(traces[1].source.text) > len(traces[0].source.text)


def test_tensors_that_a_function_holds_are_inputs_and_not_part_of_the_code() -> None:
    texts = set()
    for value in (1.0, 2.0):
        table = torch.full((6,), value)
        held = inputs()
        traced = trace(lambda x, y, table=table: [(0, x + table)], held)
        assert [c is table for c in traced.constants] == [True]
        traced.on(held, traced.source.module())()
        assert torch.equal(held[0], torch.arange(6.0) + value)
        texts.add(traced.source.text)
    assert len(texts) == 1


def test_what_a_text_tells_apart() -> None:
    x = torch.zeros(4)
    texts = [
        trace(lambda x: [(0, x + 1)], [x]).source.text,
        trace(lambda x: [(0, x + 2)], [x]).source.text,
        trace(lambda x: [(0, x + 1)], [torch.zeros(5)]).source.text,
        trace(lambda x: [(0, x + 1)], [x.double()]).source.text,
        trace(lambda x, y: [(1, x + 1)], [x, x.clone()]).source.text,
    ]
    assert len(set(texts)) == len(texts)
    assert trace(lambda x: [(0, x + 1)], [x.clone()]).source.text == texts[0]


def test_compiled_once_and_found_by_a_later_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "cache")
    monkeypatch.setattr("dgraph.lowering.inductor._COMPILED", {})
    source = trace(turn, inputs()).source
    assert known(source, store) is None
    made = compiled(source, store)
    assert made.new
    assert made.stored
    monkeypatch.setattr("dgraph.lowering.inductor._COMPILED", {})
    assert known(source) is None
    found = known(trace(turn, inputs()).source, store)
    assert found is not None
    held = inputs()
    trace(turn, held).on(held, found.function)()
    assert torch.equal(held[0], torch.full((6,), 11.0))
    assert torch.equal(held[1], torch.arange(6.0))


def test_what_does_not_compile_is_compiled_with_other_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs whose compiler fails on some reductions; what was stored is found under the region's own key."""
    real, tried = inductor.compile_region, []

    def compile_region(module: Any, inputs: Any, settings: dict[str, Any], functions: Any = None) -> Any:
        tried.append(dict(settings))
        if settings.get("epilogue_fusion", True):
            raise RuntimeError("PassManager::run failed")
        return real(module, inputs, settings, functions)

    monkeypatch.setattr(inductor, "_COMPILED", {})
    monkeypatch.setattr(inductor, "compile_region", compile_region)
    source = trace(turn, inputs()).source
    with pytest.raises(LoweringError, match="PassManager"):
        compiled(source)
    assert tried == [source.options]
    monkeypatch.setattr(inductor, "SECOND", {"cpu": {"epilogue_fusion": False}})
    store = Store(tmp_path)
    made = compiled(source, store)
    assert made.new
    assert tried[1:] == [source.options, {**source.options, "epilogue_fusion": False}]
    monkeypatch.setattr(inductor, "_COMPILED", {})
    found = known(source, store)
    assert found is not None
    held = inputs()
    trace(turn, held).on(held, found.function)()
    assert torch.equal(held[0], torch.full((6,), 11.0))


def test_nothing_is_compiled_unless_it_is_asked_for_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgraph.lowering.inductor._COMPILED", {})
    compiler, held = TraceCompiler(), inputs()
    assert compiler.function("turning", turn, held, "key", ahead=False) is None
    run = compiler.function("turning", turn, held, "key", ahead=True)
    assert run is not None
    run()
    assert torch.equal(held[1], torch.arange(6.0))
    assert compiler.compiled == ["turning"]
    assert compiler.function("turning", None, held, "key", ahead=False) is not None, "traced once"  # type: ignore[arg-type]
    assert TraceCompiler().function("turning", turn, inputs(), "key", ahead=False) is not None, "in this process"


def test_what_was_compiled_for_no_store_is_stored_for_later_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dgraph.lowering.inductor._COMPILED", {})
    TraceCompiler().function("turning", turn, inputs(), "key", ahead=True)
    store = Store(tmp_path / "cache")
    assert TraceCompiler(store).function("turning", turn, inputs(), "key", ahead=True) is not None
    monkeypatch.setattr("dgraph.lowering.inductor._COMPILED", {})
    later = TraceCompiler(store)
    assert later.function("turning", turn, inputs(), "key", ahead=False) is not None
    assert (later.compiled, later.loaded) == ([], ["turning"])


@pytest.mark.parametrize("ahead", [False, True])
def test_what_an_earlier_object_compiled_counts_as_loaded(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    monkeypatch.setattr("dgraph.lowering.inductor._COMPILED", {})
    TraceCompiler().function("turning", turn, inputs(), "key", ahead=True)
    later = TraceCompiler()
    assert later.function("turning", turn, inputs(), "key", ahead=ahead) is not None
    assert (later.compiled, later.loaded) == ([], ["turning"])


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: [(0, x + x.sum().item())], "tensor"),
        (lambda x: [(0, x + torch.rand(6))], "draws random numbers"),
        (lambda x: [(0, x.sigmoid().bernoulli())], "draws random numbers"),
        (lambda x: [(0, x / 0 if x[0] > 1 else x)], "tensor"),
        (lambda x: [(0, x.nothing())], "nothing"),
    ],
    ids=["item", "rand", "bernoulli", "if", "error"],
)
def test_what_cannot_be_compiled_is_refused_with_one_warning(function: object, reason: str) -> None:
    compiler, held = TraceCompiler(), inputs()[:1]
    with pytest.warns(UserWarning, match=f"it is not compiled and runs op by op: .*{reason}"):
        assert compiler.function("it", function, held, "key", ahead=True) is None  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiler.function("it", function, held, "other", ahead=True) is None  # type: ignore[arg-type]
    assert len(compiler.refused) == 1
    assert torch.equal(held[0], torch.arange(6.0))


def test_what_would_be_compiled_wrongly_is_refused() -> None:
    x = torch.zeros(4)
    with pytest.raises(LoweringError, match="same memory"):
        trace(lambda x, y: [(0, y + 1)], [x, x.view(2, 2).flatten()])
    with pytest.raises(LoweringError, match="strides"):
        trace(lambda x: [(0, x + 1)], [torch.zeros(4, 4).t()])

"""What Inductor is told for a GPU: to hold whole rows, and that its kernels let the next one start early."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dgraph.private import inductor
from dgraph.private.inductor import WHOLE_ROWS

GPU = torch.device("cuda", 0)


@pytest.fixture
def kernels() -> Any:
    """Torch's class of generated kernels."""
    return pytest.importorskip("torch._inductor.codegen.triton", reason="needs Triton").TritonKernel


def begun(kernels: Any) -> list[str]:
    """What Inductor makes of the body of a kernel."""
    body = SimpleNamespace(_lines=["tmp0 = tl.load(in_ptr0)", "tl.store(out_ptr0, tmp0)"])
    kernels._filter_pdl(SimpleNamespace(GDC_WAIT=kernels.GDC_WAIT, GDC_LAUNCH=kernels.GDC_LAUNCH), body)
    return body._lines


@pytest.mark.parametrize("early", [True, False])
def test_kernels_let_the_next_one_start_first_of_all(
    kernels: Any, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor, "starts_early", lambda device: early)
    plain, own = begun(kernels), kernels._filter_pdl
    with inductor._for_devices({GPU}):
        assert begun(kernels) == [kernels.GDC_LAUNCH] * early + plain
    assert kernels._filter_pdl is own
    assert begun(kernels) == plain


def test_nothing_changes_where_a_compilation_fails(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.virtualized import V

    monkeypatch.setattr(inductor, "starts_early", lambda device: True)
    own, choices = kernels._filter_pdl, type(V.choices)
    with pytest.raises(KeyError), inductor._for_devices({GPU}):
        raise KeyError
    assert kernels._filter_pdl is own
    assert type(V.choices) is choices


@pytest.mark.parametrize(
    ("hint", "values", "cooperative", "expected"),
    [
        ("INNER", 4096, False, True),
        ("INNER", WHOLE_ROWS, False, True),
        ("INNER", WHOLE_ROWS + 1, False, False),
        ("OUTER", 4096, False, False),
        ("OUTER", 32, False, True),
        ("INNER", 4096, True, False),
    ],
)
def test_rows_that_registers_hold(
    kernels: Any, hint: str, values: int, cooperative: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything else is as torch chooses it."""
    import sympy
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    sizes = SimpleNamespace(
        statically_known_leq=lambda left, right: bool(left <= right), optimization_hint=lambda size: int(size)
    )
    features: Any = SimpleNamespace(
        get_reduction_hint=lambda: ReductionHint[hint], reduction_numel=sympy.Integer(values), numel=sympy.Integer(64)
    )
    monkeypatch.setattr(inductor, "starts_early", lambda device: False)
    with inductor._for_devices({GPU}) as settings, V.set_graph_handler(SimpleNamespace(sizevars=sizes)):  # type: ignore[arg-type]
        assert V.choices.should_use_persistent_reduction(features, cooperative) is expected
        with torch._inductor.config.patch({"triton.persistent_reductions": False}):
            assert V.choices.should_use_persistent_reduction(features, cooperative) is False
    assert str(WHOLE_ROWS) in settings["inductor_choices_class"]().uuid()


def test_a_cpu_compiles_as_torch_does(kernels: Any) -> None:
    from torch._inductor.virtualized import V

    own, choices = kernels._filter_pdl, type(V.choices)
    with inductor._for_devices({torch.device("cpu")}) as settings:
        assert settings == {}
        assert kernels._filter_pdl is own
        assert type(V.choices) is choices

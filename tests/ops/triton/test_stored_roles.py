"""Products by stored weights in roles: which calls take the kernel, what it compiles to, and what it gives on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dgraph.families.quantised import WHOLE, Format, quantise
from dgraph.ops.products.triton.words import FP8, INT4
from tests.ops.triton.compiled import found_by


def given(rows: int, columns: int = 256, kind: str = "int4", device: str = "cpu", outputs: int = 48) -> tuple[Any, Any]:
    """Rows in bf16, and a weight stored in a kind."""
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, columns, generator=generator).bfloat16() for n in (rows, outputs))
    return x.to(device), quantise((weight * columns**-0.5).to(device), Format(kind))


@pytest.mark.parametrize(
    ("taken", "rows", "words", "changes"),
    [
        (True, 1, INT4, {}),
        (True, 256, INT4, {}),
        (False, 257, INT4, {}),
        (False, 0, INT4, {}),
        (False, 32, FP8, {}),
        (True, 33, FP8, {}),
        (False, 33, 0, {}),
        (False, 33, INT4, {"scaled": 2}),
        (True, 33, INT4, {"scaled": 0}),
    ],
)
def test_which_calls_it_takes(
    monkeypatch: pytest.MonkeyPatch, taken: bool, rows: int, words: int, changes: dict[str, int]
) -> None:
    """Few rows by numbers of 8 bits, many, and numbers that are scaled one by one are the other kernel's."""
    from dgraph.ops.products.triton import stored_roles
    from dgraph.ops.products.triton.stored import Layout

    x, weight = given(rows)
    of = replace(Layout.of(weight, 128, torch.bfloat16), words=words, **changes)
    assert not stored_roles._fits(x, weight, of), "no GPU of its kind"
    monkeypatch.setattr(stored_roles, "understood", lambda device: True)
    assert stored_roles._fits(x, weight, of) == taken


def test_rows_that_the_copy_engine_cannot_read_are_the_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from dgraph.ops.products.triton import stored_roles
    from dgraph.ops.products.triton.stored import Layout

    monkeypatch.setattr(stored_roles, "understood", lambda device: True)
    for columns, taken in ((256, True), (264, False)):  # 4-bit numbers of a row take 128 bytes, or 132
        x, weight = given(40, columns)
        of = replace(Layout.of(weight, 128, torch.bfloat16), words=INT4)
        assert stored_roles._fits(x, weight, of) == taken


@pytest.mark.parametrize(("rows", "as_it_is"), [(1, True), (128, True), (200, True), (300, False)])
def test_of_which_rows_a_weight_is_dequantised(monkeypatch: pytest.MonkeyPatch, rows: int, as_it_is: bool) -> None:
    """Where no kernel is fast; without the one in roles that is from 129 rows on."""
    from dgraph.ops.products.triton import stored, stored_roles

    x, weight = given(rows)
    monkeypatch.setattr(stored, "dequantised", lambda weight, dtype: "dequantised")
    assert stored_roles.taken(weight, x) is (weight if rows <= 128 else "dequantised")
    monkeypatch.setattr(stored_roles, "understood", lambda device: True)
    monkeypatch.setattr(stored, "kind_of", lambda values, dtype: INT4)
    monkeypatch.setattr(stored_roles, "in_bulk", lambda x: True)
    assert stored_roles.taken(weight, x) is (weight if as_it_is else "dequantised")
    assert stored_roles.taken(x, x) is x, "a weight as it is"


@pytest.mark.release
def test_numbers_go_to_the_matrix_units_from_registers() -> None:
    """Eight products an iteration, of which four are unrolled; nothing is spilled, and a program has its memory."""
    found = found_by("compiled_stored_roles")
    assert len(found) == 18
    for name, told in found.items():
        assert told["products"] == told["left factors in registers"] == 32, name
        assert told["stack"] == 0, name
        assert told["shared"] <= 227 * 1024, name


KINDS = {
    "int4": Format("int4"),
    "int4, long groups": Format("int4", (1, 256)),
    "fp8": Format("fp8"),
    "fp8, blocks": Format("fp8", (128, 128)),
    "int8": Format("int8"),
    "int8, one scale": Format("int8", (WHOLE, WHOLE)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("d_in", "d_out"), [(1024, 1536), (416, 200), (4096, 256)])
def test_it_on_a_gpu(kind: str, d_in: int, d_out: int) -> None:
    """Rows that are not live hold NaN; equal calls give equal bits."""
    from dgraph.ops.products.triton import stored_roles
    from dgraph.ops.products.triton.stored import Layout
    from dgraph.ops.triton import hopper

    if not hopper.understood(torch.device("cuda", 0)):
        pytest.skip("needs a GPU of compute capability 9.0")
    generator = torch.Generator("cuda").manual_seed(d_in)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    weight, bias = quantise(draw(d_out, d_in) * d_in**-0.5, KINDS[kind]), draw(d_out)
    for n in (1, 16, 17, 33, 64, 100, 256):
        x, live = draw(n, d_in), max(n - 3, 1)
        x[live:] = torch.nan
        count = torch.tensor([0, live], dtype=torch.int32, device="cuda")
        of = Layout.of(weight, stored_roles.DEPTH.value, x.dtype)
        plain = x[:live].double() @ weight.dequantised(torch.float64).T + bias
        for pair in (False, True):
            want = F.silu(plain.chunk(2, 1)[0]) * plain.chunk(2, 1)[1] if pair else plain
            first, second = (stored_roles.in_roles(x, weight, of, bias, count, pair)[:live] for _ in range(2))
            assert (first - want).norm() <= 4e-3 * want.norm(), (n, pair)
            assert first.equal(second)

"""Regions and transitions that Inductor generates and Triton compiles for a GPU, where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ops.triton.compiled import found_by
from tests.runtime.test_compiled_transition import PLANS

pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled on the GPU that is there by other tests")


def test_a_norm_that_is_rounded_is_one_kernel_which_holds_its_rows(tmp_path: Path) -> None:
    """So are norms of heads that are part of a wider row."""
    found = found_by("compiled_regions", "norm", "heads", TRITON_CACHE_DIR=str(tmp_path))
    assert {name: len(kernels) for name, kernels in found.items()} == {"norm": 1, "heads": 2}
    for kernel in (*found["norm"], *found["heads"]):
        assert kernel["how"] == "persistent_reduction", "a row is read once"
        assert kernel["lets_start"], "the next kernel, before its first access to memory"


@pytest.mark.release
def test_every_kind_of_transition_compiles(tmp_path: Path) -> None:
    packing = [f"{kind} packing" for kind in PLANS]
    found = found_by("compiled_regions", *PLANS, *packing, TRITON_CACHE_DIR=str(tmp_path))
    assert set(found) == {*PLANS, *packing}
    for kind, kernels in found.items():
        assert 0 < len(kernels) < 40, kind
        assert all(kernel["lets_start"] for kernel in kernels), kind
        assert {kernel["how"] for kernel in kernels} == {"pointwise", "persistent_reduction"}, kind

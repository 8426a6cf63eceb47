"""The interpreter of this test process, and skipping with a reason where a kernel cannot run."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from tests.ops.triton.interpreter import Interpreter, interpreter


@pytest.fixture(autouse=True)
def can_run(request: pytest.FixtureRequest) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Interpreter]:
    with interpreter() as running:
        yield running

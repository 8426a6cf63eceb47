"""Skipping with a reason where a kernel cannot run."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest
import torch


@pytest.fixture(autouse=True)
def can_run(request: pytest.FixtureRequest) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    interprets = "interpreted" in request.node.nodeid or "interpreted" in request.fixturenames
    if interprets and _version("triton") < (3, 7):
        pytest.skip("the interpreter of triton below 3.7 fails on scalars of numpy 2")
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def _version(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in importlib.metadata.version(package).split(".")[:2])

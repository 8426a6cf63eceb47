"""Every test of an op runs on one thread from one seed; one process interprets kernels for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.ops.triton.interpreter import Interpreter, interpreter


@pytest.fixture(autouse=True)
def one_thread_and_seed() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Interpreter]:
    with interpreter() as running:
        yield running

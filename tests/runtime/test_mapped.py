"""Numbers that a device writes and the host reads while the device goes on."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch

from dgraph.private.torch import copy_all
from dgraph.runtime.graphs.pinned import Mapped


def test_what_is_written_is_read() -> None:
    mapped = Mapped((2, 3), torch.int64, torch.device("cpu"))
    assert mapped.read().tolist() == [[0, 0, 0], [0, 0, 0]]
    copy_all([mapped.tensor], [torch.arange(6).view(2, 3)])
    mapped.post()
    assert mapped.read().tolist() == [[0, 1, 2], [3, 4, 5]]
    mapped.tensor[1] = 7
    mapped.post()
    assert mapped.read().tolist() == [[0, 1, 2], [7, 7, 7]]


@pytest.mark.gpu
def test_a_graph_tells_the_host_before_its_end() -> None:
    mapped = Mapped((4,), torch.int64, torch.device("cuda"))
    assert mapped.tensor.is_cuda
    number = torch.zeros(4, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        number.add_(1)
        copy_all([mapped.tensor], [number])
        mapped.post()
        torch.cuda._sleep(200_000_000)  # a tenth of a second
    for turn in (1, 2, 3):
        if turn == 3:
            torch.cuda._sleep(20_000_000)  # the graph is launched while the device is at something else
        graph.replay()
        begin = time.perf_counter()
        assert mapped.read().tolist() == [turn] * 4, "of this replay, not of one before"
        told = time.perf_counter() - begin
        torch.cuda.synchronize()
        assert told < (time.perf_counter() - begin) / 2


@pytest.mark.gpu
def test_nothing_keeps_it() -> None:
    mapped = Mapped((4,), torch.int64, torch.device("cuda"))
    memory = weakref.ref(mapped._memory)
    gc.disable()
    try:
        del mapped
        assert memory() is None
    finally:
        gc.enable()

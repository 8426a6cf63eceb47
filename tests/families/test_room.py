"""Weights are held against free memory before any is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dgraph
from dgraph.errors import InputError
from dgraph.families import room


def test_what_does_not_fit_is_refused_with_what_takes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda device: 2**20)
    told = r"weights of .* take 0\.0 GiB in float32, and 0\.0 GiB are free on cpu.*--dtype bf16.*--weights int4"
    with pytest.raises(InputError, match=told):
        dgraph.load("tiny_sdar")
    assert dgraph.load("tiny_sdar", dtype="auto").spec.dtype == torch.bfloat16  # it stays in its mapped file


def test_free_memory_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_MEMORY", tmp_path / "meminfo")
    assert room.free_bytes(torch.device("cpu")) is None
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  4 kB\nSwapFree: 1 kB\n")
    assert room.free_bytes(torch.device("cpu")) == 5 * 1024

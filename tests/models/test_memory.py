"""How much memory it takes to read and to write a quantised checkpoint: what is stored, and one weight."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.memory import peak_of
from tests.models.test_opened import large

SETUP = """
import dgraph
from dgraph.passes import QuantizeWeights
from dgraph.saving import save_quantised
dgraph.capture("tiny_sdar")
"""
WIDE = 512 * 2048 * 4
"""Bytes of the largest weight, in fp32."""
OVERHEAD = 8e6
"""What Python and torch hold besides."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large(tmp_path_factory.mktemp("memory"))


@pytest.fixture(scope="module")
def saved(folder: Path) -> Path:
    from dgraph.saving import save_quantised

    return save_quantised(folder, folder.parent / "int8", "int8").folder


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.release
def test_a_quantised_checkpoint_is_read_into_its_own_size(folder: Path, saved: Path) -> None:
    peak = peak_of(SETUP, f"graph = dgraph.capture({str(saved)!r})")
    assert peak < size_of(saved) + WIDE + OVERHEAD < 0.75 * size_of(folder)


@pytest.mark.release
def test_a_checkpoint_is_written_a_weight_at_a_time(folder: Path) -> None:
    out = folder.parent / "again"
    peak = peak_of(SETUP, f"save_quantised({str(folder)!r}, {str(out)!r}, 'int4')")
    assert peak < 4 * WIDE + OVERHEAD < 0.75 * size_of(folder)

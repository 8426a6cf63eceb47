"""How much memory it takes to read and to write a quantised checkpoint: what is stored, and one weight."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.memory import peak_of
from tests.models.test_opened import large

SETUP = """
import dgraph
import torch
from dgraph.compiler.base_graph import graph_of_model, quantising
from dgraph.models.shapes import random_model
from dgraph.compiler.saving import save_quantised
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
    from dgraph.compiler.saving import save_quantised

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


@pytest.mark.release
def test_weights_of_a_folder_are_quantised_one_by_one(folder: Path, saved: Path) -> None:
    model = f"dgraph.load({str(folder)!r}, opened=True)"
    peak = peak_of(SETUP, f"graph = graph_of_model({model}, None, quantising('int8'))")
    assert peak < size_of(saved) + 4 * WIDE + OVERHEAD < 0.75 * size_of(folder)


@pytest.mark.release
def test_weights_of_a_shape_are_drawn_and_quantised_one_by_one() -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 1024, "head_dim": 64}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4}
    model = f"random_model('sdar-8b', 'cpu', torch.float32, opened=True, mask_id=1023, **{sizes!r})"
    peak = peak_of(SETUP, f"graph = graph_of_model({model}, None, quantising('int8'))")
    linear = 6 * (3 * 512 * 2048 + 3 * 512 * 512)  # numbers in linear layers
    ends = 2 * 512 * 1024 * 4  # bytes of the vectors of ids and of the LM head
    assert peak < linear + ends + 5 * WIDE + OVERHEAD < 0.6 * (4 * linear + ends)

"""Checkpoints of which each rank reads its parts alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dgraph
import dgraph.parallel.divide
from dgraph.cache.store import open_store
from dgraph.errors import InputError
from dgraph.families import Model, resolve
from dgraph.families.weights import WeightSource, hollow
from dgraph.frontend.frozen import capture_or_load
from dgraph.ir.graph import Graph
from dgraph.models.checkpoint import build_native
from dgraph.models.shapes import random_model
from dgraph.models.tiny import KEYS
from dgraph.passes import ShardTensorParallel
from dgraph.passes.manager import run_passes
from dgraph.ranks.sharding import Part, Sharding
from dgraph.testing.ranks import ranks
from tests.amounts import first_cases
from tests.compiled import compiled
from tests.oracle import llada2 as oracle
from tests.remote import write

SIZES = oracle.Config()


def mixture(folder: Path) -> Path:
    return write(folder / "LLaDA2.0-mini", oracle.keys(SIZES), oracle.random_weights(SIZES, seed=4), 3)


def large(folder: Path) -> Path:
    """64 MB, most of it in projections; a head that is the embedding."""
    config = {
        **KEYS,
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 1024,
        "tie_word_embeddings": True,
        "mask_token_id": 1023,
    }
    shapes = {name: value.shape for name, value in build_native("LlamaForCausalLM", config, "").state_dict().items()}
    draw = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items() if name != "lm_head.weight"}
    return write(folder / "large", config, weights, 2)


def captured(model: Model) -> Graph:
    return capture_or_load(model.module, model.spec, model.prefix, open_store())[0]


@first_cases(2, "make, world, experts", [(large, 4, "split"), (mixture, 2, "parallel"), (mixture, 2, "split")])
def test_a_rank_reads_its_parts_alone(make: Callable[[Path], Path], world: int, experts: str, tmp_path: Path) -> None:
    folder = make(tmp_path)
    whole, opened = (resolve(folder, opened=lazy, block_length=32) for lazy in (False, True))
    assert whole.weights is None
    assert opened.weights is not None
    assert sum(p.untyped_storage().nbytes() for p in opened.module.parameters()) < 4096
    expected, graph = captured(whole), captured(opened)
    size = sum(t.nbytes for t in {id(t): t for t in expected.tensors.values()}.values())
    for rank in range(world):
        before, mine, reference = opened.weights.taken, graph.copy(), expected.copy()
        step = ShardTensorParallel(world, experts=experts, rank=rank, weights=opened.weights)
        run_passes(mine, [step])
        run_passes(reference, [ShardTensorParallel(world, experts=experts, rank=rank)])
        assert mine.tensors.keys() == reference.tensors.keys()
        assert all(torch.equal(mine.tensors[name], tensor) for name, tensor in reference.tensors.items())
        assert opened.weights.taken - before < 1.05 * size / world
        assert sum(t.untyped_storage().nbytes() for t in {id(t): t for t in mine.tensors.values()}.values()) < size
    assert (make is large) == (size > 60e6)


@pytest.mark.parametrize(
    "part",
    [None, Part.of("experts", 0, [(1, 3)]), Part.of("experts", 1, [(2, 5), (8, 9)]), Part.of("experts", 2, [(1, 4)])],
)
def test_parts_of_a_stack_of_blocks(part: Part | None) -> None:
    whole = torch.randn(4, 10, 6)
    blocks = [block for item in whole for block in item.split(5)]
    source = WeightSource({"stack": blocks})
    like = hollow(whole.shape, torch.bfloat16, "cpu")
    expected = whole if part is None else part.take(whole)
    assert torch.equal(source.take("stack", like, part), expected.bfloat16())
    assert source.taken == expected.nbytes


SMALL: dict[str, Any] = {
    "vocab_size": 101, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "block_length": 8, "mask_id": 100, "eos_ids": (1,), "pad_id": 1,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 16}


@pytest.mark.parametrize(("shape", "changes"), [("sdar-8b", {"tie_word_embeddings": True}), ("llada2-mini", EXPERTS)])
def test_parts_of_random_weights_are_those_of_one_model(shape: str, changes: dict[str, Any]) -> None:
    sizes = {**SMALL, **changes}
    whole, opened = (random_model(shape, "cpu", torch.float32, opened=lazy, **sizes) for lazy in (False, True))
    expected, graph = captured(whole), captured(opened)
    for rank in range(2):
        mine, reference = graph.copy(), expected.copy()
        run_passes(mine, [ShardTensorParallel(2, rank=rank, weights=opened.weights)])
        run_passes(reference, [ShardTensorParallel(2, rank=rank)])
        assert mine.tensors.keys() == reference.tensors.keys()
        for name, tensor in reference.tensors.items():
            assert torch.equal(mine.tensors[name], tensor), name
            assert mine.tensors[name].is_contiguous(), name


def test_ranks_of_an_opened_model_say_what_one_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dgraph.parallel.divide, "of", lambda mesh: Sharding(2))
    how: dict[str, Any] = {"input_ids": [[5, 6, 7, 8]], "max_new_tokens": 8, "steps": 4}

    def tokens(rank: int) -> list[list[int]]:
        mesh: Any = object()
        opened = dgraph.load("tiny_sdar", opened=True)
        opt = dgraph.optimize(opened, "dense", backend="eager", mesh=mesh)
        assert sum(p.untyped_storage().nbytes() for p in opened.module.parameters()) < 4096
        return opt.generate(**how).token_ids

    alone = compiled("tiny_sdar", "dense").generate(**how).token_ids
    assert ranks(2, tokens) == [alone, alone]


def test_an_opened_model_is_for_ranks() -> None:
    opened = dgraph.load("tiny_sdar", opened=True)
    with pytest.raises(InputError, match=r"weights of tiny_sdar were left where they are stored \(opened=True\)"):
        dgraph.optimize(opened, "dense", backend="eager")

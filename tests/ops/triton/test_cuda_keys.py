"""The kernels that rank and pack keys, on a GPU at the sizes of models."""

from __future__ import annotations

import pytest
import torch

from dgraph.ops import OPS
from dgraph.ops.attention.sparse import DENSE, REPACK, SELECT
from tests.ops.triton.keys import packing, scoring, voting
from tests.ops.triton.problems import compare, expected, moved, mutated

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [(32, 8), (28, 4), (16, 16)], ids=str)
def test_keys_are_ranked_at_the_sizes_of_models(heads: tuple[int, int], dtype: torch.dtype) -> None:
    counts, phases = (700, 0, 1300, 33, 520), (SELECT, SELECT, SELECT, SELECT, DENSE)
    calls = [("kv_scores", scoring(counts, phases, heads=heads, d=128))]
    for voters in ((0, 2**31 - 1), (-32, 0), (-(2**31), 2**31 - 1)):
        calls.append(("kv_votes", voting(counts, phases, voters=voters, heads=heads, d=128)))
    calls.append(("kv_votes", voting(counts, phases, quarters=(1, 3), heads=heads, d=128)))
    for name, args in calls:
        halved = moved(args, "cpu", dtype)
        want = expected(name, moved(halved, "cpu", torch.float32))
        compare([OPS[name].overload(*moved(halved, "cuda"))], want, 1e-4 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("divided", ["uniform", "mass", "adaptive"])
def test_keys_are_packed_at_the_sizes_of_models(divided: str, dtype: torch.dtype) -> None:
    """Scores stay as they are, so what is kept is the same in every dtype, and a copy of it exact."""
    args = packing((2900, 0, 1300, 33), (SELECT, SELECT, REPACK, SELECT), divided=divided, floor=0.1, heads=8, d=128)
    halved = (args[0], *moved(args[1:], "cpu", dtype))
    there = moved(halved, "cuda")
    OPS["kv_pack"].overload(*there)
    compare(mutated("kv_pack", there), expected("kv_pack", halved), 0)


@pytest.mark.parametrize("divided", ["uniform", "mass", "adaptive"])
def test_a_rank_packs_its_own_heads(divided: str) -> None:
    """Four of twelve heads, with budgets that are divided over all of them."""
    args = packing((2900, 0, 1300, 33), (SELECT, SELECT, REPACK, SELECT), divided=divided, floor=0.1, heads=4, d=128)
    scores = torch.rand(len(args[0]), 12, generator=torch.Generator().manual_seed(1)) * (1 + torch.arange(12))
    call = (scores, *args[1:], torch.tensor([4]))
    there = moved(call, "cuda")
    OPS["kv_pack"].overload(*there)
    compare(mutated("kv_pack", there), expected("kv_pack", call), 0)

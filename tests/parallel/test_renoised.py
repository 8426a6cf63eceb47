"""DiffusionGemma over ranks: windows, values that are keys, experts beside a dense unit, and what a canvas predicts."""

from __future__ import annotations

import pytest

from dgraph.ops import OPS
from dgraph.runtime.policies import Renoise
from dgraph.testing import TinyModel, models, prompts, ranks
from dgraph.text.writer import dump
from tests.golden_files import check_golden
from tests.parallel.divided import check_equal, run_of

RULE = Renoise(1.0, confidence=0.2, steps=5)
OTHERS = ((4, "split"), (2, "parallel"))
"""Ranks, and how they divide experts, that only a release tries."""


@pytest.fixture(scope="module")
def tiny() -> TinyModel:
    (found,) = models(None, "diffusion_gemma")
    return found


@pytest.mark.parametrize(
    ("world", "experts"),
    [(2, "split"), (4, "parallel"), *(pytest.param(*case, marks=pytest.mark.release) for case in OTHERS)],
)
def test_ranks_decode_as_one_process_does(tiny: TinyModel, world: int, experts: str) -> None:
    """Of layers with two KV heads and with one: ranks share a head where there are more of them."""
    whole, each = check_equal(tiny, world, "dense", {"rings": False}, experts, policy=RULE, max_new_tokens=20, seed=1)
    assert len({tuple(ids) for ids in whole.result.token_ids}) == 3
    assert whole.result.kv is not None
    assert [layer[0].shape[1] for layer in whole.result.kv[0].layers] == [2, 1, 2, 1]
    first = each[0].result.kv
    assert first is not None
    assert [layer[0].shape[1] for layer in first[0].layers] == [1, 1, 1, 1]


def test_rings_of_ranks(tiny: TinyModel) -> None:
    """Each rank lets keys behind a window go, of its own heads."""
    given = {"input_ids": prompts(tiny), "policy": RULE, "max_new_tokens": 20, "seed": 1}
    wanted = tiny.optimized("dense").generate(**given).token_ids
    found = ranks(2, lambda rank: tiny.on_rank(rank, 2, "dense").generate(**given).token_ids)
    assert found == [wanted] * 2


def test_logits_exist_on_no_rank(tiny: TinyModel) -> None:
    """What a step decides by is put together from six numbers a row and rank, and the mean embedding is a sum."""
    made = ranks(2, lambda rank: tiny.on_rank(rank, 2, "dense"))
    graph = made[0].programs["step"].graph
    (gathered,) = graph.find("all_gather")
    (combined,) = graph.find("vocabulary_combine")
    assert graph.type_text(gathered) == "f32[N, 12]"
    assert not graph.find("vocabulary_attention")
    (written,) = (node for node in graph.find("feature_write"))
    assert written.args[0].target is OPS["all_reduce"].overload  # type: ignore[union-attr]
    assert combined.args[0] is gathered
    assert (graph.spec.heads, graph.spec.kv_heads) == (tiny.model.spec.heads // 2, 1)
    check_golden("diffusion_gemma_step_of_2_ranks.txt", dump(graph))


def test_seeds_and_positions_draw_the_same_on_every_rank(tiny: TinyModel) -> None:
    """A draw goes by an id's number in the whole vocabulary, which two ranks do not divide."""
    assert tiny.model.spec.vocab % 2
    asked = {"policy": RULE, "max_new_tokens": 9, "seed": 7}
    wanted = run_of(tiny.optimized("dense", rings=False), tiny, **asked).result.token_ids
    other = run_of(tiny.optimized("dense", rings=False), tiny, **{**asked, "seed": 8}).result.token_ids
    made = ranks(2, lambda rank: run_of(tiny.on_rank(rank, 2, "dense", rings=False), tiny, **asked).result.token_ids)
    assert made == [wanted] * 2
    assert wanted != other

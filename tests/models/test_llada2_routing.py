"""LLaDA2.2, where the rows of a block share their experts: logits, passes and generations against plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dgraph
from dgraph.errors import CheckpointError
from dgraph.families import families
from dgraph.models.llada2 import Config
from dgraph.models.tiny import build_tiny
from dgraph.passes import CacheKV, FuseProjections, GateFFN, PackRows
from dgraph.passes.manager import run_passes
from dgraph.runtime.decoding import Decoding
from dgraph.testing import TinyModel, check_ranks_agree
from tests.engine.alone import check_as_alone
from tests.models.test_llada2 import SIZES as UNSHARED
from tests.models.test_llada2 import expected, near, remote
from tests.oracle import llada2 as oracle
from tests.oracle.qwen3 import Cache, project
from tests.recipes.block_causal import Setup, check, optimized, prompts_for
from tests.remote import SEQUENCES, logits_of, write
from tests.tiny import caches_of, draw, interpret, ops_of, rewritten, rows_of

BLOCK = 8
SIZES = replace(UNSHARED, capacity=5, block=BLOCK)
WEIGHTS = oracle.random_weights(SIZES, seed=4)


@pytest.fixture(scope="module")
def setup() -> Setup:
    model = dgraph.adopt(remote(WEIGHTS, SIZES), block_length=BLOCK)
    return Setup(SIZES, WEIGHTS, model, dgraph.capture(model))


def test_module_graph_and_every_pass_equal_the_oracle(setup: Setup) -> None:
    """Sequences of several blocks side by side, the last of each one short."""
    sequences = [*SEQUENCES, draw(21, 5)]
    wanted = [expected(tokens, WEIGHTS, SIZES) for tokens in sequences]
    for tokens, logits in zip(sequences, wanted, strict=True):
        near(logits_of(setup.model, tokens), logits)
        assert (logits - expected(tokens, WEIGHTS, UNSHARED)).abs().max() > 0.1, "the shared experts are not felt"
    batch = {"input_ids": torch.tensor([sequences[3], sequences[3][::-1]]), "positions": torch.arange(21).expand(2, 21)}
    both = [expected(row.tolist(), WEIGHTS, SIZES) for row in batch["input_ids"]]
    near(interpret(setup.graph, batch)["logits"], torch.stack(both))
    packed, rows = rewritten(setup.graph, PackRows()), rows_of(sequences)
    near(interpret(packed, rows)["logits"], torch.cat(wanted))
    cached = rewritten(packed, FuseProjections(), CacheKV())
    inputs = {**rows, **caches_of(setup.model.spec, [len(s) for s in sequences])}
    near(interpret(cached, inputs)["logits"], torch.cat(wanted))


def test_what_the_graph_says(setup: Setup) -> None:
    """The numbers of blocks are found once, before the layers."""
    packed = rewritten(setup.graph, PackRows())
    (numbers,) = packed.find("block_numbers")
    assert numbers.meta["layer"] is None
    assert packed.type_text(numbers) == "i64[N]"
    (first, second) = packed.find("block_experts")
    assert packed.type_text(first) == packed.type_text(second) == "bool[N, 16]"
    assert ops_of(setup.graph, 1) == ops_of(setup.graph, 2)


def test_rows_that_are_left_out_do_not_choose(setup: Setup) -> None:
    """Of a block of which some rows are forwarded, these share the experts: in whatever company, and padded or not."""
    cached = rewritten(setup.graph, PackRows(), CacheKV())
    tokens, keep = draw(16, 2), [0, 1, 2, 3, 4, 5, 6, 7, 9, 12, 13]
    cache = Cache(SIZES, 16, torch.ones(()))  # type: ignore[arg-type]
    oracle.forward(WEIGHTS, SIZES, tokens, range(16), [16] * 16, cache)
    some = oracle.forward(WEIGHTS, SIZES, [tokens[p] for p in keep], keep, [16] * len(keep), cache)
    whole = project(WEIGHTS, some)
    inputs = {**rows_of([tokens, tokens]), **caches_of(setup.model.spec, [16, 16])}
    caches = {name: value for name, value in inputs.items() if name not in rows_of([tokens])}
    interpret(cached, inputs)
    second = rows_of([[tokens[p] for p in keep], tokens])
    second["positions"] = torch.tensor([*keep, *range(16)])
    second["limit"] = torch.full((len(keep) + 16,), 16, dtype=torch.int32)
    near(interpret(cached, {**caches, **second})["logits"][: len(keep)], whole)
    dense = expected(tokens, WEIGHTS, SIZES)[keep]
    assert (whole - dense)[8:].abs().max() > 0.01, "nothing depends on the rows of a block"


ORACLE = {"forward": oracle.forward}


def test_dense_is_the_oracle(setup: Setup) -> None:
    options = {"evict": False, "block_cache": "off", "recommit": True, **ORACLE}
    check(setup, BLOCK, optimized(setup, "dense", "eager"), {"threshold": 0.7}, options)


@pytest.mark.parametrize(
    ("buckets", "options"),
    [("exact", {}), ([48, 200], {"count": "device"})],
    ids=["exact", "padded, rows counted on the device"],
)
def test_focus_is_the_oracle(setup: Setup, buckets: Any, options: dict[str, Any]) -> None:
    """After an eviction the rows of a block are those that are kept."""
    check(setup, BLOCK, optimized(setup, "focus", "eager", buckets, **options), {"threshold": 0.7}, ORACLE)


@pytest.mark.parametrize("recipe", ["focus", pytest.param("dense", marks=pytest.mark.release)])
def test_a_batch_gives_what_each_prompt_gives_alone(setup: Setup, recipe: str) -> None:
    run, prompts = optimized(setup, recipe), prompts_for(BLOCK)
    settings: dict[str, Any] = {"max_new_tokens": 20, "threshold": 0.6}
    together = run.generate(input_ids=prompts, **settings).token_ids
    assert together == [run.generate(input_ids=[p], **settings).token_ids[0] for p in prompts]


def test_a_gated_feed_forward_is_refused_where_rows_share_experts(setup: Setup) -> None:
    """Rows that are not computed again would have chosen with them."""
    report = run_passes(setup.graph.copy(), [PackRows(), CacheKV(), GateFFN()])[-1]
    assert [one.layer for one in report.applied if one.layer is not None] == [0]
    assert [one.layer for one in report.skipped] == [1, 2]
    assert all("also reads block_numbers" in one.reason for one in report.skipped)


@pytest.mark.release
def test_ranks_agree(setup: Setup) -> None:
    check_ranks_agree(TinyModel("llada2", setup.model), "focus", {})


def test_an_official_folder(tmp_path: Path) -> None:
    model = dgraph.load(write(tmp_path / "LLaDA2.2-flash", oracle.keys(SIZES), WEIGHTS))
    near(logits_of(model, SEQUENCES[0]), expected(SEQUENCES[0], WEIGHTS, SIZES))
    assert model.spec.block_length == BLOCK, "the config says which blocks were routed"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"expert_capacity": 2}, r"expert_capacity is 2, expected 3 to 16 experts"),
        ({"expert_capacity": 17}, r"expert_capacity is 17, expected 3 to 16 experts"),
        ({"block_size": None}, r"block_size is 0, expected the positions of a routed block"),
    ],
)
def test_a_config_that_describes_something_else(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"test does not describe a LLaDA2 model: {message}"):
        Config.of(oracle.keys(SIZES, **config), "test")


@pytest.mark.parametrize("block", [8, 12])
def test_prompts_that_end_within_a_routed_block_share_no_experts_with_the_first_step(block: int) -> None:
    keys = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "expert_capacity": 3}
    llada2 = families()["llada2"]
    module = build_tiny(llada2.build, {**keys, "n_group": 4, "topk_group": 2, "block_size": 8}, 0)
    model = llada2.model("routed", module, {}, torch.float32, mask_id=96, eos_ids=(), pad_id=95)
    made = dgraph.optimize(model, "dense", backend="eager")
    prompts = [torch.randint(1, 90, (16,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(3)]
    decoding = Decoding(max_new_tokens=16, threshold=0.9, block_length=block)
    check_as_alone(made, prompts, [decoding] * 3, max_sequences=1, max_tokens=64, block_length=block)

"""DyLLM on block-causal models against plain PyTorch: rows, salient rows, tokens and caches, step by step."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import pytest
import torch

import dgraph
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram, run_in_order
from dgraph.lowering.regions import RegionCompiler
from dgraph.recipes import RECIPES, build
from dgraph.runtime.loop.session import BlockSession
from dgraph.runtime.policies import ConfidenceThreshold
from tests.amounts import every_value, first_cases
from tests.recipes.block_causal import LAYERS, check, optimized, prompts_for
from tests.recipes.block_dyllm import (
    BLOCK,
    CACHES,
    CASES,
    FAMILIES,
    NEW,
    Watched,
    oracle_of,
    setup_of,
    watched_by_oracle,
)

# -- rows, tokens, keys and values -------------------------------------------------------------------------------


def check_run(
    family: str,
    case: str,
    rule: dict[str, Any],
    backend: str = "eager",
    buckets: Any = None,
    near: float = 1e-4,
    kv_dtype: str | None = None,
    **more: Any,
) -> None:
    options, method = CASES[case]
    run = optimized(setup_of(family), "dyllm", backend, buckets, kv_dtype=kv_dtype, **options, **more)
    check(
        setup_of(family),
        BLOCK,
        run,
        rule,
        {"evict": False, "block_cache": "off", **more, "forward": oracle_of(family, method)},
        near,
    )


@every_value(("family", FAMILIES), ("case", CASES))
def test_tokens_rows_and_keys(family: str, case: str) -> None:
    check_run(family, case, {"threshold": 0.7})


@every_value(("family", FAMILIES), ("case", ["tau 0.8", "gate only", "partial only"]))
def test_one_token_a_step(family: str, case: str) -> None:
    check_run(family, case, {"steps": BLOCK})


@every_value(("family", FAMILIES), ("block_cache, recommit", CACHES))
def test_beside_a_block_cache(family: str, block_cache: str, recommit: bool) -> None:
    check_run(family, "tau 0.8", {"threshold": 0.7}, block_cache=block_cache, recommit=recommit)


@pytest.mark.release
@every_value(("family", ["sdar", "llada2"]), ("buckets", [None, "hybrid", [48, 200]]))
def test_compiled_by_inductor(family: str, buckets: Any) -> None:
    check_run(family, "tau 0.8", {"threshold": 0.7}, "inductor", buckets)


# -- salient rows and every cache --------------------------------------------------------------------------------


@every_value(
    ("case", CASES),
    ("family, block_cache, recommit", [("sdar", *CACHES[0]), *((family, *CACHES[5]) for family in FAMILIES)]),
)
def test_salient_rows_and_every_cache(family: str, case: str, block_cache: str, recommit: bool) -> None:
    """Of each step of a ragged batch: rows, limits, salient rows of each layer, and what all caches hold."""
    options, method = CASES[case]
    setup, prompts = setup_of(family), prompts_for(BLOCK)
    recipe = build(RECIPES, "dyllm", setup.model.spec, {**options, "block_cache": block_cache, "recommit": recommit})
    graphs = {name: phase.graph for name, phase in dgraph.rewrite(setup.graph, recipe).items()}
    step = Watched(graphs["step"])
    prefill = LoweredProgram(graphs["prefill"], RegionCompiler("eager"), Buckets.of(None), run_in_order)
    session = BlockSession(
        setup.model.spec, {"prefill": prefill, "step": step}, block_cache=block_cache, recommit=recommit,  # type: ignore[arg-type]
        plan=recipe.plan, page_size=4,
    )  # fmt: skip
    stats = session.generate(prompts, max_new_tokens=NEW, policy=ConfidenceThreshold(0.7)).stats
    sparse = skipped = 0
    counts: list[list[list[int]]] = []
    for s, prompt in enumerate(prompts):
        wanted, full = watched_by_oracle(family, method, tuple(prompt), block_cache, recommit)
        assert len(step.seen[s]) == len(wanted)
        for got, want in zip(step.seen[s], wanted, strict=True):
            assert (got.positions, got.limits, got.salient) == (want.positions, want.limits, want.salient)
            assert got.projected == (want.projected if method.partial else [])
            assert set(got.caches) == {n for n in want.caches if n[0] != "f" or method.gate}
            for name, values in got.caches.items():
                torch.testing.assert_close(values, want.caches[name], rtol=1e-3, atol=1e-3)
        counts.append([[len(layer) for layer in seen.salient] for seen in wanted])
        sparse += sum(not f for f in full)
        skipped += sum(
            len(seen.positions) * LAYERS - sum(map(len, seen.salient))
            for seen, f in zip(wanted, full, strict=True)
            if not f
        )
    together = [[sum(c) for c in zip(*step, strict=True)] for step in zip_longest(*counts, fillvalue=[0] * LAYERS)]
    assert stats.salient == together
    assert sparse > 3
    assert (skipped > 0) == (method.tau != 1.01)


@first_cases(1, "family", FAMILIES)
def test_the_cases_differ(family: str) -> None:
    """By what the contexts of all steps are."""
    found = set()
    for _, method in CASES.values():
        seen = [s for p in prompts_for(BLOCK) for s in watched_by_oracle(family, method, tuple(p), *CACHES[5])[0]]
        found.add(sum(float(step.caches[f"c_cache_{LAYERS - 1}"].double().abs().sum()) for step in seen))
    assert len(found) == len(CASES)

"""The kit for packages with methods: its checks pass where they should, and fail where they should."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

import dgraph
from dgraph.ir.graph import Graph
from dgraph.passes import CacheKV, Effect, EvictTokens, PackRows, Pass, SparseKV
from dgraph.passes.base import Report
from dgraph.recipes import Phase
from dgraph.testing import (
    TinyModel,
    check_against,
    check_backends_agree,
    check_batch_equals_alone,
    check_fires,
    check_lossless,
    check_ranks_agree,
    check_skips,
    models,
    prompts,
)
from tests.amounts import first_cases
from tests.oracle.focus import generate
from tests.oracle.qwen3 import Config


@dataclass(frozen=True)
class DropLayers(Pass):
    """A wrong method: the last layer is left out."""

    effect: ClassVar[Effect] = Effect.APPROXIMATE
    summary: ClassVar[str] = "drops the last layer"
    changes_weights: ClassVar[bool] = True

    def run(self, graph: Graph, report: Report) -> None:
        ends = {node.meta["layer"]: node for node in graph.calls if node.meta["layer"] is not None}
        ends[3].replace_all_uses_with(ends[2])
        graph.sweep()
        report.did("the last layer", 3)


def dropping(tiny: TinyModel) -> dgraph.Recipe:
    dense = tiny.recipe("dense")
    step = dense.phase("step")
    first, *rest = step.passes
    changed = Phase("step", (first, DropLayers(), *rest), step.optional)
    return replace(dense, name="dropping", phases=tuple(changed if p.name == "step" else p for p in dense.phases))


SDAR, LLADA = models(None, "sdar")[0], models(None, "llada")[0]


def kinds_first(tiny: TinyModel) -> bool:
    """Order of families: a causal one, a bidirectional one and one with experts before the others."""
    return str(tiny) not in ("llada", "sdar", "sdar_moe")


def test_there_is_a_model_of_every_family() -> None:
    found = models()
    assert [str(tiny) for tiny in found] == [
        *("dream", "fast_dllm_v2", "llada", "llada2", "llada_moe", "native", "nemotron", "sdar", "sdar_moe")
    ]
    assert [str(tiny) for tiny in models("bidirectional")] == ["dream", "llada", "llada_moe"]
    assert models(None, "sdar")[0] is SDAR, "captured once"
    with pytest.raises(dgraph.DgraphError, match="unknown family 'sda'"):
        models(None, "sda")


@first_cases(3, "tiny", sorted(models(), key=kinds_first), ids=str)
def test_their_decode_is_not_trivial(tiny: TinyModel) -> None:
    """Steps commit one token or several, and responses are not all alike."""
    found = tiny.optimized("dense").generate(input_ids=prompts(tiny), max_new_tokens=20, threshold=0.7)
    assert found.stats.decoded > found.stats.steps > 3
    assert len({tuple(ids) for ids in found.token_ids}) == 3
    assert len({token for ids in found.token_ids for token in ids}) > 8


@first_cases(3, "tiny", sorted(models(), key=kinds_first), ids=str)
def test_checks_pass_on_focus(tiny: TinyModel) -> None:
    causal = tiny.model.spec.attention == "block_causal"
    rows = "dense" if causal else tiny.recipe("fast_dllm", first="policy")  # whose rows it forwards
    check_lossless(tiny, "focus", {"alpha": float("inf"), "block_cache": "off"}, against=rows, exact=True)
    check_batch_equals_alone(tiny, "focus", {"alpha": 1.5})
    check_fires(tiny, "focus", {}, "EvictTokens", [1])


def test_a_method_that_loses_something_is_found() -> None:
    with pytest.raises(AssertionError, match=r"prompt 0 gets .* under dropping with .* and .* under dense"):
        check_lossless(SDAR, dropping(SDAR), {})
    with pytest.raises(AssertionError, match=r"EvictTokens fired in layers \[1\], expected \[2\]"):
        check_fires(SDAR, "focus", {}, "EvictTokens", [2])


def test_keys_and_values_are_compared_too() -> None:
    """With one block of two tokens at a time, tokens could be equal by chance; caches are not."""
    with pytest.raises(AssertionError, match=r"(keys|values) of layer|prompt \d gets"):
        check_lossless(LLADA, "fast_dllm", {}, max_new_tokens=12)


def test_backends_agree() -> None:
    check_backends_agree(SDAR, "focus", {"alpha": 1.5})


def test_ranks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that divides a layer's budget over its own heads keeps other keys."""
    check_ranks_agree(LLADA, "maskkv", {"pairs": 4})
    monkeypatch.setattr(SparseKV, "_over_heads", lambda self, graph, score, *rest: (score,))
    with pytest.raises(AssertionError, match=r"under maskkv on rank 0 of 2 and .* under one process"):
        check_ranks_agree(LLADA, "maskkv", {"pairs": 4})


def oracle(tiny: TinyModel, prompt: list[int], decoding: Any) -> list[int]:
    native: Any = tiny.model.module.model  # type: ignore[union-attr]
    c, spec = native.config, tiny.model.spec
    config = Config(
        c.num_hidden_layers, c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim,
        c.intermediate_size, c.vocab_size, rope_theta=500.0, eps=c.rms_norm_eps,
    )  # fmt: skip
    return generate(
        dict(native.state_dict()), config, prompt, block_length=spec.block_length, mask_id=spec.mask_id,
        eos_ids=spec.eos_ids, evict=False, block_cache="off", recommit=True, **decoding,
    ).tokens  # fmt: skip


def test_an_oracle_is_compared() -> None:
    check_against(SDAR, "dense", {}, oracle)
    with pytest.raises(AssertionError, match="the plain implementation gives"):
        check_against(SDAR, dropping(SDAR), {}, oracle)


def test_reasons_to_skip() -> None:
    check_skips(SDAR, [PackRows()], EvictTokens(), "CacheKV")
    with pytest.raises(AssertionError, match=r"EvictTokens skipped for .*, expected 'the moon'"):
        check_skips(SDAR, [PackRows(), CacheKV()], EvictTokens(after=3), "the moon")

"""SparseD: its op, that all tiles are the model without it, and a plain implementation."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from dgraph_methods.sparsed import KeepTiles, sparsed
from dgraph_methods.sparsed_op import OP
from plain import about, above, decode, llama
from torch import Tensor

import dgraph
from dgraph.errors import InputError
from dgraph.passes import CacheKV, PackRows
from dgraph.testing import (
    TinyModel,
    check_against,
    check_backends_agree,
    check_batch_equals_alone,
    check_effects,
    check_fires,
    check_ranks_agree,
    check_skips,
    models,
    prompts,
)
from dgraph.testing.ops import check_op

MODELS = models("bidirectional")
SOME = {"skip": 0.2, "select": 0.4, "size": 4}


def test_the_op() -> None:
    check_op(OP, dtypes=(torch.float32,))


@pytest.mark.parametrize("tiny", MODELS, ids=str)
def test_all_tiles_are_the_model_without_it(tiny: TinyModel) -> None:
    want = tiny.optimized("dense").generate(input_ids=prompts(tiny), max_new_tokens=20, steps=4)
    found = tiny.optimized("sparsed", select=1.0, size=4).generate(input_ids=prompts(tiny), max_new_tokens=20, steps=4)
    assert found.token_ids == want.token_ids


@pytest.mark.parametrize("tiny", MODELS, ids=str)
def test_a_prompt_of_a_batch_gets_what_it_gets_alone(tiny: TinyModel) -> None:
    check_batch_equals_alone(tiny, "sparsed", SOME, policy="llada", steps=4)


def test_inductor_gives_the_same_tokens() -> None:
    check_backends_agree(MODELS[0], "sparsed", SOME, steps=4)


def test_ranks_with_some_heads_each_give_the_same_tokens() -> None:
    check_ranks_agree(MODELS[1], "sparsed", SOME, steps=4)


def oracle(tiny: TinyModel, prompt: list[int], decoding: dict[str, Any]) -> list[int]:
    """The first fifth of the tokens with full attention; then each head's tiles of the last such step."""
    spec, new, size = tiny.model.spec, decoding["max_new_tokens"], SOME["size"]
    bounds = [range(a, min(a + size, len(prompt))) for a in range(0, len(prompt), size)]
    of_prompt, end = len(bounds), len(prompt) + new
    bounds += [range(a, min(a + size, end)) for a in range(len(prompt), end, size)]
    held: dict[tuple[int, int], Tensor] = {}  # by layer and head: which key each query sees

    def attend(whole: bool, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed = []
        for head in range(len(q)):
            score = q[head] @ k[head].T * spec.head_dim**-0.5
            if not whole:
                score = score.masked_fill(~held[layer, head], -torch.inf)
            weights = score.softmax(-1)
            mixed.append(weights @ v[head])
            if whole:
                seen = torch.zeros(end, end, dtype=torch.bool)
                for queries in bounds:
                    mean = [float(weights[list(queries)][:, list(keys)].mean()) for keys in bounds]
                    for part in (range(of_prompt), range(of_prompt, len(bounds))):
                        best = sorted(part, key=lambda tile: -mean[tile])[: max(1, round(SOME["select"] * len(part)))]
                        for tile in best:
                            seen[queries[0] : queries[-1] + 1, list(bounds[tile])] = True
                held[layer, head] = seen
        return torch.stack(mixed)

    def forward(canvas: Tensor, start: int, stop: int, number: int) -> Tensor:
        decoded = int((canvas[len(prompt) :] != spec.mask_id).sum())
        whole = decoded < max(1, round(SOME["skip"] * new))
        return about(llama(tiny, canvas, functools.partial(attend, whole)), torch.arange(end), end, spec.logit_shift)

    return decode(tiny, prompt, new, forward, above(decoding["threshold"]))


@pytest.mark.parametrize("tiny", models("bidirectional", "dream", "llada"), ids=str)  # of which `llama` is the forward
def test_against_a_plain_implementation(tiny: TinyModel) -> None:
    check_against(tiny, "sparsed", SOME, oracle)
    options: dict[str, Any] = {"input_ids": prompts(tiny), "max_new_tokens": 20, "threshold": 0.7}
    dense = tiny.optimized("dense").generate(**options)
    assert tiny.optimized("sparsed", **SOME).generate(**options).token_ids != dense.token_ids


def test_it_fires_in_every_layer_and_says_where_it_cannot() -> None:
    for tiny in MODELS:
        check_fires(tiny, "sparsed", {}, "KeepTiles", range(tiny.model.spec.layers))
    check_skips(MODELS[0], (PackRows(), CacheKV()), KeepTiles(), "all rows of a sequence must be there")


def test_what_cannot_be() -> None:
    with pytest.raises(InputError, match=r"select must be in \(0, 1\] and size at least 1, got KeepTiles\(select=0"):
        sparsed(MODELS[0].model.spec, select=0)
    with pytest.raises(InputError, match="SparseD is a method of bidirectional models"):
        sparsed(models("block_causal")[0].model.spec)


def test_it_is_a_value() -> None:
    made = sparsed(MODELS[0].model.spec, **SOME)
    assert dgraph.Recipe.from_json(made.to_json()) == made


def test_it_is_what_it_declares() -> None:
    check_effects(MODELS[0], "sparsed", SOME)

"""Elastic-Cache: its ops, the limit at which every row runs, and a plain implementation, step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dgraph_methods.elastic import ElasticRows, elastic
from dgraph_methods.elastic_ops import FIRST_ROWS, MOVED
from plain import about, above, decode
from torch import Tensor

import dgraph
from dgraph.errors import InputError
from dgraph.ops import Op
from dgraph.passes import PackRows
from dgraph.testing import (
    TinyModel,
    check_against,
    check_batch_equals_alone,
    check_effects,
    check_fires,
    check_lossless,
    check_ranks_agree,
    check_skips,
    models,
    prompts,
)
from dgraph.testing.ops import check_op

MODELS = models("bidirectional")
SOME = {"window": 4, "gamma": 0.9}


@pytest.mark.parametrize("op", [FIRST_ROWS, MOVED], ids=lambda op: op.name)
def test_the_op(op: Op) -> None:
    check_op(op, dtypes=(torch.float32,))


@pytest.mark.parametrize("tiny", MODELS, ids=str)
def test_where_all_attention_counts_as_changed_every_row_runs(tiny: TinyModel) -> None:
    check_lossless(tiny, "elastic", {"gamma": 2.0, "window": 2})


@pytest.mark.parametrize("tiny", MODELS, ids=str)
def test_a_prompt_of_a_batch_gets_what_it_gets_alone(tiny: TinyModel) -> None:
    check_batch_equals_alone(tiny, "elastic", SOME)


def test_ranks_with_some_heads_each_give_the_same_tokens() -> None:
    check_ranks_agree(models("bidirectional", "llada")[0], "elastic", SOME)


class Plain:
    """One response, on the weights of a tiny Llama or Qwen2, every layer's state in plain lists."""

    def __init__(self, tiny: TinyModel):
        weights = {name.removeprefix("model."): w for name, w in tiny.model.module.named_parameters()}
        self.weights = {name.removeprefix("model."): w.detach() for name, w in weights.items()}
        self.spec, self.config = tiny.model.spec, tiny.model.module.model.config
        self.held: list[dict[str, Tensor]] = []
        self.attended: list[tuple[int, Tensor | None]] = [(-1, None)] * self.spec.layers
        self.ran: list[list[int]] = []
        self.before: Tensor | None = None

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config.rms_norm_eps)

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        size = self.spec.head_dim
        angle = positions[:, None] * self.config.rope_parameters["rope_theta"] ** -(torch.arange(0, size, 2) / size)
        cos, sin = (torch.cat([each, each], -1)[:, None] for each in (angle.cos(), angle.sin()))
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin

    @torch.no_grad()
    def forward(self, canvas: Tensor, start: int, stop: int, number: int) -> Tensor:
        spec, everything = self.spec, torch.arange(len(canvas))
        masked, full = canvas == spec.mask_id, not number
        near = masked & (masked.cumsum(0) <= SOME["window"])
        window = near | (masked & (everything >= start) & (everything < stop))
        if self.before is not None:
            window = window | (canvas != self.before)
        self.before = canvas.clone()
        for token, _ in self.attended:
            window = window | (everything == token)
        h, refresh, ran = self.weights["embed_tokens.weight"][canvas], full, []
        for layer in range(spec.layers):
            if full:
                heads = (len(canvas), spec.kv_heads, spec.head_dim)
                sizes = {"k": heads, "v": heads, "a": (len(canvas), spec.hidden), "f": (len(canvas), spec.hidden)}
                self.held.append({name: torch.zeros(size) for name, size in sizes.items()})
            held, at = self.held[layer], f"layers.{layer}."
            rows = everything if refresh or not layer else everything[window]
            x = self.norm(h[rows], f"{at}input_layernorm")
            q, k, v = (self.linear(x, f"{at}self_attn.{n}_proj").unflatten(1, (-1, spec.head_dim)) for n in "qkv")
            held["k"][rows], held["v"][rows] = self.rotated(k, rows), v
            keys, values = (held[n].repeat_interleave(spec.heads // spec.kv_heads, 1) for n in "kv")
            scores = torch.einsum("rhd,khd->hrk", self.rotated(q, rows), keys) * spec.head_dim**-0.5
            weights = scores.softmax(-1)
            mixed = torch.einsum("hrk,khd->rhd", weights, values).flatten(1)
            held["a"][rows] = self.linear(mixed, f"{at}self_attn.o_proj")
            h = h + held["a"]
            x = self.norm(h[rows], f"{at}post_attention_layernorm")
            gate, up = (self.linear(x, f"{at}mlp.{name}_proj") for name in ("gate", "up"))
            held["f"][rows] = self.linear(F.silu(gate) * up, f"{at}mlp.down_proj")
            h = h + held["f"]
            pays = torch.zeros(len(canvas), len(canvas)).index_put((rows,), weights.mean(0))  # by row, to each key
            token, old = self.attended[layer]
            same = old is not None and float(F.cosine_similarity(pays[token], old, dim=0)) >= SOME["gamma"]
            refresh = refresh or not same
            top = int(pays[near].sum(0).masked_fill(masked, -1).argmax())
            self.attended[layer] = (top, pays[top] if top in rows else None)
            ran.append(len(rows))
        self.ran.append(ran[1:])
        logits = self.linear(self.norm(h, "norm"), "lm_head")
        return about(logits, everything, len(canvas), spec.logit_shift)


def oracle(tiny: TinyModel, prompt: list[int], decoding: dict[str, Any]) -> list[int]:
    return decode(tiny, prompt, decoding["max_new_tokens"], Plain(tiny).forward, above(decoding["threshold"]))


def test_against_a_plain_implementation() -> None:
    (tiny,) = models("bidirectional", "llada")
    check_against(tiny, "elastic", SOME, oracle)
    ran = []
    for prompt in prompts(tiny):
        plain = Plain(tiny)
        decode(tiny, prompt, 20, plain.forward, above(0.7))
        run = tiny.optimized("elastic", **SOME).generate(input_ids=[prompt], max_new_tokens=20, threshold=0.7)
        assert run.stats.salient == plain.ran
        ran += [(len(prompt) + 20, *rows) for rows in plain.ran]
    assert any(rows[1] < rows[-1] for rows in ran), "attention moves in a later layer than the first"
    assert any(rows[-1] < rows[0] for rows in ran), "some steps run on a window alone"


def test_it_fires_in_every_layer_and_says_where_it_cannot() -> None:
    for tiny in MODELS:
        check_fires(tiny, "elastic", {}, "ElasticRows", range(tiny.model.spec.layers))
    check_skips(MODELS[0], (PackRows(),), ElasticRows(), "run CacheKV first")


def test_what_cannot_be() -> None:
    with pytest.raises(InputError, match="window must be a number of masks, at least 1, got 0"):
        elastic(MODELS[0].model.spec, window=0)
    with pytest.raises(InputError, match="Elastic-Cache is for bidirectional models"):
        elastic(models("block_causal")[0].model.spec)


def test_it_is_a_value_and_what_it_declares() -> None:
    made = elastic(MODELS[0].model.spec, **SOME)
    assert dgraph.Recipe.from_json(made.to_json()) == made
    check_effects(MODELS[0], "elastic", SOME)

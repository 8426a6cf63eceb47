"""MAGE: its op, all keys kept, and a plain implementation on a block-causal model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dgraph_methods.mage import KeepUnion, Mage
from dgraph_methods.mage_op import OP
from torch import Tensor

import dgraph
from dgraph.errors import InputError
from dgraph.ops import OPS
from dgraph.passes import PackRows
from dgraph.testing import (
    TinyModel,
    check_against,
    check_batch_equals_alone,
    check_effects,
    check_fires,
    check_lossless,
    check_skips,
    models,
    prompts,
)
from dgraph.testing.ops import check_op, samples_of

MODELS = models("block_causal")
(SDAR,) = models("block_causal", "sdar")
PAIRS = 3


def test_the_op() -> None:
    check_op(OP, dtypes=(torch.float32,))


def test_a_row_that_votes_for_every_key_votes_as_kv_votes_does() -> None:
    for sample in samples_of(OP):
        q, _, _, at, _, cu_keys, _, window, _, _, _ = args = sample.args
        found = OP.reference(*args[:10], 99)
        all_keys = OPS["kv_votes"].reference(*args[:10], 0, 2**31 - 1)
        below = torch.repeat_interleave(window[:, 0], cu_keys.diff())
        last = bool(len(q)) and all(int(hi) > int(at.max()) for _, hi in window)  # nothing votes from after it
        if last:
            torch.testing.assert_close(found[at < below], all_keys[at < below])


@pytest.mark.parametrize("tiny", MODELS, ids=str)
def test_where_all_keys_are_kept_nothing_changes(tiny: TinyModel) -> None:
    check_lossless(tiny, "mage", {"pairs": 10_000})


@pytest.mark.parametrize("tiny", MODELS, ids=str)
def test_a_prompt_of_a_batch_gets_what_it_gets_alone(tiny: TinyModel) -> None:
    check_batch_equals_alone(tiny, "mage", {"pairs": PAIRS})


class Plain:
    """One response of a tiny SDAR: keys and values by position, and the positions that each head keeps."""

    def __init__(self, tiny: TinyModel, end: int):
        self.weights = {n.split("model.")[-1]: w.detach() for n, w in tiny.model.module.named_parameters()}
        self.spec, self.config = tiny.model.spec, tiny.model.module.model.config
        shape = (self.spec.layers, end, self.spec.kv_heads, self.spec.head_dim)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)
        self.kept: list[list[Tensor]] = []

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config.rms_norm_eps)

    def rotated(self, x: Tensor, rows: Tensor) -> Tensor:
        size = self.spec.head_dim
        angle = rows[:, None] * self.config.rope_parameters["rope_theta"] ** -(torch.arange(0, size, 2) / size)
        cos, sin = (torch.cat([each, each], -1)[:, None] for each in (angle.cos(), angle.sin()))
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin

    def choose(self, weights: Tensor, start: int, layer: int) -> None:
        """Keep keys before the block, by the attention [heads, rows, keys] of its rows to the best of these."""
        before = weights[:, :, :start]
        order = before.argsort(dim=-1, descending=True, stable=True)[..., :PAIRS]
        votes = torch.zeros_like(before).scatter(-1, order, before.gather(-1, order)).sum(1)
        votes = votes.unflatten(0, (self.spec.kv_heads, -1)).mean(1)
        self.kept[layer] = list(votes.argsort(dim=-1, descending=True, stable=True)[:, :PAIRS])

    @torch.no_grad()
    def forward(self, canvas: Tensor, rows: Tensor, start: int, phase: str) -> Tensor:
        spec, at = self.spec, torch.arange(len(canvas))
        seen = (at < (rows // spec.block_length + 1)[:, None] * spec.block_length)[None]
        h = self.weights["embed_tokens.weight"][canvas[rows]]
        for layer in range(spec.layers):
            name = f"layers.{layer}.self_attn"
            x = self.norm(h, f"layers.{layer}.input_layernorm")
            q, k, v = (self.linear(x, f"{name}.{n}_proj").unflatten(1, (-1, spec.head_dim)) for n in "qkv")
            q, k = (self.rotated(self.norm(y, f"{name}.{n}_norm"), rows) for n, y in (("q", q), ("k", k)))
            self.keys[layer][rows], self.values[layer][rows] = k, v
            group = spec.heads // spec.kv_heads
            keys, values = (held[layer].repeat_interleave(group, 1) for held in (self.keys, self.values))
            mine = seen
            if phase == "reuse":
                kept = torch.stack([torch.isin(at, head) for head in self.kept[layer]]).repeat_interleave(group, 0)
                mine = seen & (kept[:, None] | (at >= start))
            scores = torch.einsum("rhd,khd->hrk", q, keys) * spec.head_dim**-0.5
            weights = scores.masked_fill(~mine, -torch.inf).softmax(-1)
            if phase == "select":
                self.choose(weights[:, rows >= start], start, layer)
            h = h + self.linear(torch.einsum("hrk,khd->rhd", weights, values).flatten(1), f"{name}.o_proj")
            x, mlp = self.norm(h, f"layers.{layer}.post_attention_layernorm"), f"layers.{layer}.mlp"
            gate, up = (self.linear(x, f"{mlp}.{n}_proj") for n in ("gate", "up"))
            h = h + self.linear(F.silu(gate) * up, f"{mlp}.down_proj")
        return F.linear(self.norm(h, "norm"), self.weights.get("lm_head.weight", self.weights["embed_tokens.weight"]))


def oracle(tiny: TinyModel, prompt: list[int], decoding: dict[str, Any]) -> list[int]:
    spec, size, new = tiny.model.spec, tiny.model.spec.block_length, decoding["max_new_tokens"]
    first, end = len(prompt) // size * size, -(-(len(prompt) + new) // size) * size
    canvas = torch.tensor([*prompt, *[spec.mask_id] * (end - len(prompt))])
    plain = Plain(tiny, end)
    plain.kept = [[]] * spec.layers
    if first:
        plain.forward(canvas, torch.arange(first), 0, "prefill")
    for start in range(first, end, size):
        phase, block = "select", slice(start, start + size)
        while (canvas[block] == spec.mask_id).any():
            begin = start - size if phase == "select" and start > first else start  # its keys are final only now
            logits = plain.forward(canvas, torch.arange(begin, start + size), start, phase)[start - begin :]
            logits[:, spec.mask_id] = -torch.inf
            sure, token = logits.softmax(-1).max(-1)
            sure = sure.masked_fill(canvas[block] != spec.mask_id, -1)
            commit = (sure > decoding["threshold"]) | (torch.arange(size) == sure.argmax())
            canvas[block] = torch.where(commit & (sure >= 0), token, canvas[block])
            phase = "reuse"
    response = canvas[len(prompt) : len(prompt) + new].tolist()
    return response[: next((i for i, token in enumerate(response) if token in spec.eos_ids), new)]


def test_against_a_plain_implementation() -> None:
    check_against(SDAR, "mage", {"pairs": PAIRS}, oracle)
    options: dict[str, Any] = {"input_ids": prompts(SDAR), "max_new_tokens": 20, "threshold": 0.7}
    dense = SDAR.optimized("dense").generate(**options)
    assert SDAR.optimized("mage", pairs=PAIRS).generate(**options).token_ids != dense.token_ids


def test_it_fires_in_every_layer_and_says_where_it_cannot() -> None:
    check_fires(SDAR, "mage", {}, "KeepUnion", range(SDAR.model.spec.layers))
    check_skips(SDAR, (PackRows(),), KeepUnion(), "run CacheKV first")
    with pytest.raises(InputError, match="pairs must be at least 1 on a block-causal model, got 512 on llada"):
        Mage().build(models("bidirectional", "llada")[0].model.spec)


def test_it_is_a_value_and_what_it_declares() -> None:
    made = Mage(pairs=PAIRS).build(SDAR.model.spec)
    assert dgraph.Recipe.from_json(made.to_json()) == made
    check_effects(SDAR, "mage", {"pairs": PAIRS})

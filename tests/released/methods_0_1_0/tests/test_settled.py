"""Rows of a canvas that leave early: the limits, and a plain implementation, step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dgraph_methods.settled import DropSettled
from torch import Tensor

from dgraph.errors import InputError
from dgraph.passes import CacheKV, PackRows
from dgraph.runtime.policies import Renoise
from dgraph.runtime.stats import StepRecord
from dgraph.testing import TinyModel, check_batch_equals_alone, check_fires, check_lossless, check_skips, models

(TINY,) = models(None, "diffusion_gemma")
RULE = Renoise(1.0, confidence=0.0, steps=9)
SOME = {"steps": 1, "entropy": 2.0}


@pytest.mark.parametrize(
    "options", [{"steps": 0, "entropy": 99.0}, {"entropy": 0.0}, {"steps": 1, "entropy": 99.0, "every": 1}]
)
def test_settings_at_which_no_row_is_left_out(options: dict[str, Any]) -> None:
    check_lossless(TINY, "settled", options, policy=RULE)


def test_a_prompt_of_a_batch_gets_what_it_gets_alone() -> None:
    check_batch_equals_alone(TINY, "settled", SOME, policy=RULE)


def test_where_it_fires_and_where_not() -> None:
    check_fires(TINY, "settled", {"after": 2}, "DropSettled", [2])
    check_skips(TINY, (PackRows(), CacheKV()), DropSettled(), "run SelfCondition first")
    with pytest.raises(InputError, match="after must be a layer from 1 to 3, got 4"):
        TINY.optimized("settled", after=4)
    (other,) = models(None, "llada")
    with pytest.raises(InputError, match="llada has a mask token"):
        other.recipe("settled")


class Plain:
    """One canvas after another, on the modules of the tiny model, with a dictionary for whatever is kept."""

    def __init__(self, tiny: TinyModel, options: DropSettled, rule: Renoise):
        module = tiny.model.module
        self.decoder, self.config, self.options, self.rule = module.model.decoder, module.config, options, rule
        self.scalars = [layer.layer_scalar for layer in module.model.encoder.language_model.layers]
        self.grow = self.config.hidden_size**0.5

    def layers(self, x: Tensor, positions: Tensor, past: list[Any], kept: list[Any], runs: Tensor | None) -> Tensor:
        """The stream of rows [n, hidden] after all layers; runs: which go through the later ones, None if encoded."""
        turned = self.decoder.rotary_emb(positions[None], x.dtype)
        for number, layer in enumerate(self.decoder.layers):
            mine = torch.ones(len(x), dtype=torch.bool) if runs is None or number < self.options.after else runs
            attention, window = layer.self_attn, self.config.kind(number).window
            cos, sin = (each[0][mine] for each in turned[self.config.layer_types[number]])
            h = layer.input_layernorm(x[mine])
            q, k = (p(h).unflatten(-1, (-1, attention.size)) for p in (attention.q_proj, attention.k_proj))
            v = k if attention.v_proj is None else attention.v_proj(h).unflatten(-1, (-1, attention.size))
            q, k = (
                torch.ops.dgraph.rope(attention.q_norm(q), cos, sin),
                torch.ops.dgraph.rope(attention.k_norm(k), cos, sin),
            )
            v = F.rms_norm(v, v.shape[-1:], eps=attention.eps)
            if kept[number] is None:
                kept[number] = [torch.zeros(len(x), *k.shape[1:]) for _ in "kv"]
            for held, new in zip(kept[number], (k, v), strict=True):
                held[mine] = new
            keys, values = kept[number]
            if past[number] is not None:
                keys, values = (torch.cat(pair) for pair in zip(past[number], kept[number], strict=True))
            at, origin = (
                torch.arange(len(keys)),
                positions[mine] if runs is None else positions[:1].expand(int(mine.sum())),
            )
            seen = (
                at[None] > origin[:, None] - window if window else torch.ones(len(origin), len(keys), dtype=torch.bool)
            )
            if runs is None:
                seen = seen & (at[None] <= positions[mine][:, None])
            group = q.shape[1] // keys.shape[1]
            scores = torch.einsum("rhd,khd->hrk", q, keys.repeat_interleave(group, 1)).masked_fill(~seen, -torch.inf)
            mixed = torch.einsum("hrk,khd->rhd", scores.softmax(-1), values.repeat_interleave(group, 1)).flatten(1)
            y = x[mine] + layer.post_attention_layernorm(attention.o_proj(mixed))
            dense = layer.post_feedforward_layernorm_1(layer.mlp(layer.pre_feedforward_layernorm(y)))
            routed = layer.experts(layer.pre_feedforward_layernorm_2(y), *layer.router(y))
            y = y + layer.post_feedforward_layernorm(dense + layer.post_feedforward_layernorm_2(routed))
            x = x.clone()
            x[mine] = y * (self.scalars[number] if runs is None else layer.layer_scalar)
        return x

    def canvas(self, known: list[int], steps: list[StepRecord]) -> list[int]:
        """Checks what every step of a canvas predicts; how many rows each one ran on."""
        table, count, size = self.decoder.embed_tokens.weight, len(self.decoder.layers), len(steps[0].input_ids)
        past: list[Any] = [None] * count
        self.layers(table[known] * self.grow, torch.arange(len(known)), [None] * count, past, None)
        kept: list[Any] = [None] * count
        soft, best = torch.zeros(size, table.shape[1]), torch.full((size,), -1)
        calm, idle, ran = torch.zeros(size), torch.zeros(size), []
        for number, step in enumerate(steps):
            x = table[step.input_ids] * self.grow
            x = F.rms_norm(x + self.decoder.self_conditioning(soft * self.grow), x.shape[-1:], eps=self.decoder.eps)
            runs = calm < self.options.steps
            if self.options.every:
                runs |= idle >= self.options.every - 1
            h = self.decoder.norm(self.layers(x, step.positions, past, kept, runs))[runs]
            cap = self.config.final_logit_softcapping
            p = (torch.tanh(h @ table.T / cap) * cap / float(self.rule.heat(torch.tensor([number])))).softmax(-1)
            before, soft[runs] = best.clone(), p @ table
            best[runs] = p.argmax(-1)
            if number == 0:
                sure = torch.zeros(size, dtype=torch.bool)
            sure[runs] = -(p * p.log()).sum(-1) < self.options.entropy
            calm, idle = (calm + 1) * ((best == before) & sure), (idle + 1) * ~runs
            assert step.token.equal(best), f"step {number}"
            ran.append(int(runs.sum()))
        return ran


@torch.no_grad()
@pytest.mark.parametrize(
    "options", [SOME, {"steps": 2, "entropy": 1.0, "every": 3}, {"steps": 1, "entropy": 9.0, "after": 3}]
)
def test_every_step_predicts_what_a_plain_implementation_does(options: dict[str, Any]) -> None:
    records: list[StepRecord] = []
    prompt, made = [5, 9, 2, 33, 7, 1, 60, 3, 8, 4, 21], TINY.optimized("settled", **options)
    found = made.generate(
        input_ids=[prompt], policy=RULE, max_new_tokens=16, seed=2, ignore_eos=True, observer=records.append
    )
    plain, ran = Plain(TINY, DropSettled(**options), RULE), []
    for first in (0, RULE.steps + 1):
        known = [*prompt, *found.token_ids[0][: first and 8]]
        ran += plain.canvas(known, records[first : first + RULE.steps])
    assert found.stats.rows["suffix"] == sum(ran) + 8  # and a canvas that is encoded
    assert sum(ran) < 2 * 8 * RULE.steps, "some are left out"

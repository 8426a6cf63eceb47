"""Train a small model that works in two modes, in the form of a Nemotron-Labs-Diffusion checkpoint.

    python -m training.two_modes OUT

A sequence is a progression: a first number and a step, modulo `NUMBERS`, and every so often another step. Each sequence
has one open block. Causal rows read the tokens before it and learn to predict the next one. Rows that see all of the
block read it, and its masked rows learn their own tokens. These are the two losses of arXiv 2607.05722, whose block
begins with a token that is known. Nothing foretells where the step changes, so a draft that is made before is wrong
from there on. On one core of a CPU it takes some minutes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from dgraph.models.nemotron import TINY_ROPE, stored

NUMBERS = 29
MASK, EOS = NUMBERS, NUMBERS + 1
BLOCK = 8
CHANGE = 0.04
"""The chance that the step becomes another one, at each number after the second."""
LENGTH = 48
"""Tokens of a sequence."""
CONFIG: dict[str, Any] = {
    "architectures": ["NemotronLabsDiffusionModel"],
    "vocab_size": NUMBERS + 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "mask_token_id": MASK,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    "block_size": BLOCK,
    "rope_parameters": TINY_ROPE,
}


def progressions(rows: int, length: int, draw: torch.Generator) -> Tensor:
    """i64 [rows, length]: numbers below `NUMBERS`."""
    steps = torch.randint(1, NUMBERS, (rows, length), generator=draw)
    changes = torch.rand(rows, length, generator=draw) < CHANGE
    changes[:, :2] = torch.tensor([True, False])
    since = torch.where(changes, torch.arange(length), 0).cummax(dim=1).values  # a step holds until the next change
    taken = steps.gather(1, since)
    taken[:, 0] = torch.randint(0, NUMBERS, (rows,), generator=draw)
    return taken.cumsum(dim=1) % NUMBERS


def losses(model: torch.nn.Module, rows: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Mean losses of the next token of causal rows, and of masked tokens of an open block."""
    tokens = progressions(rows, LENGTH, draw)
    at = torch.arange(LENGTH)
    start = torch.randint(1, LENGTH - BLOCK + 1, (rows, 1), generator=draw)
    rate = torch.where(torch.rand(rows, 1, generator=draw) < 0.5, 1.0, torch.rand(rows, 1, generator=draw))
    open_rows = (at >= start) & (at < start + BLOCK)
    masked = open_rows & (at > start) & (torch.rand(rows, LENGTH, generator=draw) < rate)
    before = at < start + BLOCK
    sees = torch.where(open_rows[:, :, None], before[:, None, :], at[None, None, :] <= at[None, :, None])
    blind = torch.where(sees, 0.0, torch.finfo(torch.float32).min)[:, None]
    logits = model(input_ids=tokens.masked_fill(masked, MASK), attention_mask=blind).logits
    causal = (at < start)[:, :-1]
    following = F.cross_entropy(logits[:, :-1][causal], tokens[:, 1:][causal])
    return following, F.cross_entropy(logits[masked], tokens[masked])


def train(steps: int, rows: int, rate: float, seed: int) -> torch.nn.Module:
    """Train a model for `steps` steps; its losses are printed."""
    from transformers import Ministral3Config, Ministral3ForCausalLM

    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    model = Ministral3ForCausalLM(Ministral3Config(**CONFIG, attn_implementation="eager"))  # type: ignore[call-arg]
    fit(model, lambda: losses(model, rows, draw), steps, rate)
    return model


def fit(
    model: torch.nn.Module, losses: Callable[[], tuple[Tensor, Tensor]], steps: int, rate: float, name: str = ""
) -> None:
    """Train a model in place; its losses are printed.

    Args:
        model: all of its parameters learn.
        losses: draws a batch, and gives the mean losses of next tokens and of masked ones; their sum is minimised.
        steps: number of updates.
        rate: the highest learning rate, reached after a tenth of them.
        name: text that is printed in front of the losses.
    """
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, steps, pct_start=0.1)
    for step in range(steps):
        following, denoised = losses()
        optimiser.zero_grad()
        (following + denoised).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 100 == 99:
            print(f"{name}step {step + 1}: next token {following.item():.3f}, masked {denoised.item():.3f}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, train, write a checkpoint folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder of the checkpoint; made if it is not there")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--rows", type=int, default=64, help="sequences of a step")
    parser.add_argument("--rate", type=float, default=4e-3, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    model = train(args.steps, args.rows, args.rate, args.seed)
    weights = {stored(name): value.to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    save_file(weights, args.out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()

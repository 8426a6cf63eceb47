"""What FOCUS does where rows predict the next position, beside rows that predict their own: two small models.

    python -m benchmarks.focus_shift --out OUT

Both go on from the small trained model of two modes in tests/models, whose causal rows predict the next number of a
progression: its blocks become as long as `BLOCK`, and in one of them the row before a masked number learns to predict
it, in the other its own row. Then they continue the same beginnings under `dense` and `focus`. On one core of a CPU it
takes some minutes; OUT holds the models, which a later call takes as they are.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import dgraph
from dgraph.families import Model
from training.two_modes import EOS, MASK, NUMBERS, fit, progressions

BASE = Path("tests/models/trained_two_modes")
BLOCK, LENGTH, ROWS, NEW = 16, 64, 32, 48
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "focus, alpha inf, block_cache off": ("focus", {"alpha": float("inf"), "block_cache": "off"}),
    "focus, alpha inf": ("focus", {"alpha": float("inf")}),
    "focus, alpha 3": ("focus", {"alpha": 3.0}),
    "focus, alpha 1.5": ("focus", {"alpha": 1.5}),
    "focus, alpha 1.2": ("focus", {"alpha": 1.2}),
}


def losses(module: Any, shift: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Mean losses of the next number of causal rows, and of masked numbers of one open block of each row."""
    tokens, at = progressions(ROWS, LENGTH, draw), torch.arange(LENGTH)
    start = torch.randint(2, LENGTH - BLOCK + 1, (ROWS, 1), generator=draw)
    rate = torch.where(torch.rand(ROWS, 1, generator=draw) < 0.5, 1.0, torch.rand(ROWS, 1, generator=draw))
    inside = (at >= start) & (at < start + BLOCK)
    masked = inside & (at > start) & (torch.rand(ROWS, LENGTH, generator=draw) < rate)
    sees = torch.where(inside[:, :, None], (at < start + BLOCK)[:, None, :], at[None, None, :] <= at[None, :, None])
    blind = torch.where(sees, 0.0, torch.finfo(torch.float32).min)[:, None]
    logits = module(input_ids=tokens.masked_fill(masked, MASK), attention_mask=blind).logits
    causal = (at < start)[:, :-1]
    following = F.cross_entropy(logits[:, :-1][causal], tokens[:, 1:][causal])
    predicting = masked.roll(-shift, dims=1)
    return following, F.cross_entropy(logits[predicting], tokens[masked])


def train(shift: int, steps: int, rate: float, file: Path) -> Model:
    """The model as it was stored, or trained now."""
    model = dgraph.load(BASE, dtype=torch.float32, block_length=BLOCK, logit_shift=shift, eos_ids=(EOS,))
    module = model.module.model
    if file.is_file():
        module.load_state_dict(torch.load(file))
        return model
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    module.set_attn_implementation("eager")
    module.requires_grad_(True)
    fit(module, lambda: losses(module, shift, draw), steps, rate, f"shift {shift}, ")
    module.requires_grad_(False)
    torch.save(module.state_dict(), file)
    return model


def beginnings(count: int) -> list[list[int]]:
    """Of 4 to 20 numbers, with one step."""
    draw = torch.Generator().manual_seed(11)
    first, step = (
        torch.randint(0, NUMBERS, (count,), generator=draw),
        torch.randint(1, NUMBERS, (count,), generator=draw),
    )
    lengths = torch.randint(4, 21, (count,), generator=draw).tolist()
    return [[(int(a) + i * int(d)) % NUMBERS for i in range(n)] for a, d, n in zip(first, step, lengths, strict=True)]


def share(flags: Sequence[bool]) -> float:
    return 100 * sum(flags) / len(flags)


def measure(model: Model, shift: int, prompts: list[list[int]], threshold: float) -> None:
    """One line for each arm."""
    dense: list[list[int]] = []
    for name, (recipe, options) in ARMS.items():
        run = dgraph.optimize(model, recipe, backend="eager", **options)
        result = run.generate(input_ids=prompts, max_new_tokens=NEW, threshold=threshold, max_batch=64)
        found, stats = result.token_ids, result.stats
        dense = dense or found
        right = [
            all((b - a) % NUMBERS == (p[1] - p[0]) % NUMBERS for a, b in zip([p[-1], *ids], ids, strict=False))
            for p, ids in zip(prompts, found, strict=True)
        ]
        same = [a == b for mine, theirs in zip(found, dense, strict=True) for a, b in zip(mine, theirs, strict=True)]
        steps = stats.rows.get("step", stats.rows.get("prefix", 0))
        line = (
            *(shift, name, f"{share(right):.1f}", f"{share(same):.2f}"),
            f"{sum(stats.sequence_decoded) / sum(stats.sequence_steps):.2f}",
            *(f"{rows / stats.decoded:.2f}" for rows in (steps, stats.rows.get("suffix", steps))),
        )
        print("| " + " | ".join(map(str, line)) + " |", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--count", type=int, default=200, help="prompts")
    parser.add_argument("--threshold", type=float, default=0.9)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    models = [train(shift, args.steps, args.rate, args.out / f"shift-{shift}.pt") for shift in (0, 1)]
    print("| shift | recipe | right, % | tokens as dense, % | tokens/step | rows/token before eviction | after it |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    for shift, model in enumerate(models):
        measure(model, shift, beginnings(args.count), args.threshold)


if __name__ == "__main__":
    main()

"""Leaving settled rows of a canvas out of the later layers: what changes, and how many rows that spares.

    PYTHONPATH=examples/methods python -m benchmarks.settled_rows [--prompts 8] [--tokens 24] [--markdown FILE]

The tiny random DiffusionGemma, fp32, op by op, with a fixed number of steps for every canvas, and until a canvas is
stable and sure. Its layers add to the residual stream what they do, or 2.5 times that, as weights that are drawn
without regard to it would: the more, the more a row's prediction depends on what other rows hold. Random weights say
how far an approximation carries there, and nothing about trained ones.

Equal tokens are counted place by place, against `dense`. As a measure of how far answers part by themselves, `dense` is
also run with every weight of the first layer's output projection changed by one part in ten million.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from dgraph_methods.settled import settled

import dgraph
from benchmarks.tables import Cell, Report
from dgraph.families import Model
from dgraph.models.diffusion_gemma import ADDED, family
from dgraph.runtime.policies import Renoise

SETTINGS = (
    {"steps": 2, "entropy": 0.1},
    {"steps": 2, "entropy": 1.0},
    {"steps": 4, "entropy": 1.0},
    {"steps": 2, "entropy": 1.0, "every": 4},
    {"steps": 2, "entropy": 1.0, "after": 2},
)
COLUMNS = ["layers add", "rows left out", "steps", "equal tokens %", "spared of later layers %", "of all layers %"]


@torch.no_grad()
def model_of(added: float, changed: float = 0.0) -> Model:
    """The family's tiny model whose layers add so much of what they do; changed: of the first layer's projection."""
    made = family.random()
    for path, parameter in made.module.named_parameters():
        if path.removesuffix(".weight").endswith(ADDED):
            parameter.mul_(added)
        if path.endswith("layers.0.self_attn.o_proj.weight"):
            parameter.mul_(1 + changed)
    return made


def equal(found: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> float:
    """Percent of places at which two answers have the same token."""
    pairs = [a == b for one, other in zip(found, wanted, strict=True) for a, b in zip(one, other, strict=True)]
    return 100 * sum(pairs) / len(pairs)


def lines(added: float, rule: Renoise, args: argparse.Namespace) -> list[list[Cell]]:
    """A row of the table for every setting."""
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 60, (11,), generator=draw).tolist() for _ in range(args.prompts)]
    asked = {"input_ids": prompts, "policy": rule, "max_new_tokens": args.tokens, "seed": 1, "ignore_eos": True}
    model = model_of(added)
    dense, other = (dgraph.optimize(each, "dense", backend="eager") for each in (model, model_of(added, 1e-7)))
    result, changed = dense.generate(**asked), other.generate(**asked)
    wanted, found = result.token_ids, list[list[Cell]]()
    found.append([added, "none", result.stats.steps, 100.0, 0.0, 0.0])
    same = equal(changed.token_ids, wanted)
    found.append([added, "none, weights changed by 1e-7", changed.stats.steps, same, 0.0, 0.0])
    for setting in SETTINGS:
        run = dgraph.optimize(model, settled(model.spec, **setting), backend="eager").generate(**asked)
        spared = 1 - run.stats.rows["suffix"] / run.stats.rows["prefix"]
        later = 1 - setting.get("after", 1) / model.spec.layers
        words = ", ".join(f"{name} {value}" for name, value in setting.items())
        same = equal(run.token_ids, wanted)
        found.append([added, words, run.stats.steps, same, 100 * spared, 100 * spared * later])
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24, help="of a response, in canvases of 8")
    parser.add_argument("--steps", type=int, default=16, help="of a canvas, at most")
    parser.add_argument("--added", type=float, nargs="+", default=[1.0, 2.5])
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = Report("Settled rows of a canvas")
    note = f"{args.prompts} prompts, {args.tokens} tokens each; `after` is 1 if not given."
    for what, sure in ((f"{args.steps} steps a canvas", 0.0), ("until a canvas is stable and sure", 0.2)):
        rule = Renoise(bound=1.0, confidence=sure, steps=args.steps)
        found = [line for added in args.added for line in lines(added, rule, args)]
        report.table(f"Settled rows of tiny random weights, {what}", COLUMNS, found, note)
    report.write(args.markdown, args.json)


if __name__ == "__main__":
    main()

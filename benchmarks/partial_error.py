"""How far partial attention is from exact attention, by layer and step (the DyLLM paper's Figure 4).

    python -m benchmarks.partial_error --prompts 4 --markdown out.md --json out.json --plot errors.png

Exact attention has the same inputs: the queries of the step, and the keys and values that the cache holds once the
step has written its own. So the error is what reused contexts are wrong by, gathered since the row was last exact;
stale keys and values are not in it. Figure 4 measures cosine similarity; its text does not say more. Given are
1 - cosine, and the relative L2 error |C - C*| / |C*|, of a row's context C over all heads with exact attention C*.

Counted are rows whose context was updated; those that are exact anyway (salient, or in a full step) would add zeros.
Steps run without CUDA graphs while they are compared.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dgraph
from benchmarks.tables import Cell, Report
from dgraph.compiler.compiled_model import Optimized
from dgraph.evaluate.questions import choose, stored
from dgraph.ops import OPS, Op
from dgraph.ops.padded import sequence_of
from dgraph.runtime.stats import StepRecord

TAUS = (0.98, 0.99, 0.995, 0.9975)
COLUMNS = 12
"""Layers that a table shows at most."""
PARTS = 4
"""Ranges of steps that a table shows."""
MEASURES = {"relative L2": "l2", "1 - cosine": "angle"}


@dataclass(frozen=True)
class Errors:
    """Of R rows: l2 and angle (1 - cosine) f32[R]; prompt bool[R]: the row is not of the response."""

    l2: Tensor
    angle: Tensor
    prompt: Tensor

    @classmethod
    def of(cls, found: Sequence[Errors]) -> Errors:
        """All of them as one."""
        return cls(*(torch.cat([getattr(f, name) for f in found]) for name in ("l2", "angle", "prompt")))

    def where(self, rows: Tensor) -> Errors:
        """Of chosen rows, bool[R]."""
        return Errors(self.l2[rows], self.angle[rows], self.prompt[rows])


def errors(got: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """Relative L2 error and 1 - cosine, f32[R] each, of contexts [R, H, D]; over all heads, computed in fp64."""
    a, b = got.flatten(1).double(), exact.flatten(1).double()
    distance, norms = (a - b).norm(dim=1), (a.norm(dim=1), b.norm(dim=1))
    l2 = torch.where(distance == 0, 0.0, distance / norms[1])
    # From the distance of the directions: 1 - a.b would lose the digits of small angles.
    directions = a / norms[0].clamp(min=1e-300)[:, None] - b / norms[1].clamp(min=1e-300)[:, None]
    return l2.float(), (directions.pow(2).sum(1) / 2).float()


class Compare:
    """Compares what every partial attention of a program gives with exact attention; an observer of its calls.

    Args:
        layers: those that have one, in the order in which they run.
        prompts: length of each sequence's prompt.

    Attributes:
        found: by step and layer, of the updated rows; without those where every row is exact.
        calls: of the op, in all steps; each runs all layers.
        rows, updated: rows of sparse steps, and how many of them were updated; summed over layers.
        worst_exact: the largest relative L2 error of rows of sparse steps that should be exact.
    """

    def __init__(self, layers: Sequence[int], prompts: Sequence[int]):
        self.layers, self.prompts = layers, torch.tensor(prompts)
        self.found: dict[tuple[int, int], Errors] = {}
        self.rows = self.updated = self.calls = self.step = 0
        self.worst_exact = 0.0

    def __call__(self, op: Op, args: tuple[Any, ...], result: Any) -> None:
        """Observe a call of an op."""
        if op.name != "partial_attention":
            return
        q, k_cache, v_cache, _, index, cu_changed, _, full, positions, page_table, cu_rows, limit, scale, tau = args
        exact = OPS["paged_attention"].overload(q, k_cache, v_cache, page_table, cu_rows, limit, scale)
        context, _ = result
        live = int(cu_rows[-1])
        sparse = ~full[:live]
        updated = sparse & (tau <= 1)
        updated[index[: int(cu_changed[-1])]] = False
        l2, angle = errors(context[:live], exact[:live])
        if updated.any():
            prompt = positions[:live] < self.prompts.to(positions.device)[sequence_of(cu_rows, live)]
            layer = self.layers[self.calls % len(self.layers)]
            self.found[self.step, layer] = Errors(*(value[updated].cpu() for value in (l2, angle, prompt)))
        self.worst_exact = max([self.worst_exact, *l2[sparse & ~updated].tolist()])
        self.rows += int(sparse.sum())
        self.updated += int(updated.sum())
        self.calls += 1

    def next_step(self, record: StepRecord) -> None:
        """Observe the end of a step."""
        self.step = record.step + 1


@dataclass(frozen=True)
class Measured:
    """Errors of a program.

    Attributes:
        found: by step and layer, of the updated rows.
        updated: share of the rows of sparse steps whose context was updated.
        worst_exact: the largest relative L2 error of the others: 0, or what another kernel rounds otherwise.
        steps: of the decode loop.
        layers: those with partial attention.
    """

    found: dict[tuple[int, int], Errors]
    updated: float
    worst_exact: float
    steps: int
    layers: list[int]

    def over(self, steps: range | None = None, layer: int | None = None) -> Errors | None:
        """Over some steps and one layer, or all; None where no row was updated."""
        chosen = [
            found
            for (step, of), found in sorted(self.found.items())
            if (steps is None or step in steps) and (layer is None or of == layer)
        ]
        return Errors.of(chosen) if chosen else None


def measure(program: Optimized, prompts: Sequence[Sequence[int]], tokens: int) -> Measured:
    """Decode prompts of ids together, one token per step, and compare every partial attention with exact attention.

    Raises:
        ValueError: the program has no partial attention.
    """
    layers = [node.meta["layer"] for node in program.graph().find("partial_attention")]
    if not layers:
        raise ValueError(f"recipe {program.recipe.name!r} has no partial attention; use dyllm with partial=True.")
    compare = Compare(layers, [len(ids) for ids in prompts])
    with ExitStack() as watched:
        for lowered in program.programs.values():
            watched.enter_context(lowered.observed(compare))
        result = program.generate(
            input_ids=prompts, max_new_tokens=tokens, steps=program.spec.block_length, observer=compare.next_step
        )
    share = compare.updated / max(1, compare.rows)
    return Measured(compare.found, share, compare.worst_exact, result.stats.steps, layers)


def quantiles(values: Tensor) -> tuple[float, float]:
    """Median and 95th percentile: the smallest values that at least so large a share does not exceed."""
    ordered = values.sort().values
    half, most = (ordered[-(-len(ordered) * percent // 100) - 1].item() for percent in (50, 95))
    return half, most


def tables(report: Report, found: dict[float, Measured]) -> None:
    """By layer, by step, and by kind of row."""
    first = next(iter(found.values()))
    count = len(first.layers)
    shown = sorted({first.layers[-(-count * i // COLUMNS) - 1] for i in range(1, COLUMNS + 1) if count * i >= COLUMNS})
    longest = max(m.steps for m in found.values())
    spans = [range(a, b) for a, b in itertools.pairwise(longest * i // PARTS for i in range(PARTS + 1)) if b > a]
    _table(report, "by layer", found, [f"layer {n}" for n in shown], [_layer(n) for n in shown])
    titles = [f"steps {s.start}-{s.stop - 1}" for s in spans]
    _table(report, "by step", found, titles, [_steps(s) for s in spans])
    _table(report, "by row", found, ["prompt", "response", "all"], [_kind(True), _kind(False), Measured.over])
    for tau, m in found.items():
        report.data[str(tau)] = {
            "updated": m.updated,
            "worst_exact": m.worst_exact,
            "cells": [
                {
                    "step": step,
                    "layer": layer,
                    "rows": len(e.l2),
                    **{name: quantiles(getattr(e, name)) for name in MEASURES.values()},
                }
                for (step, layer), e in sorted(m.found.items())
            ],
        }


Choose = Callable[[Measured], Errors | None]


def _layer(layer: int) -> Choose:
    return lambda m: m.over(layer=layer)


def _steps(steps: range) -> Choose:
    return lambda m: m.over(steps=steps)


def _kind(prompt: bool) -> Choose:
    def choose_rows(m: Measured) -> Errors | None:
        found = m.over()
        return None if found is None else found.where(found.prompt == prompt)

    return choose_rows


def _table(
    report: Report, what: str, found: dict[float, Measured], titles: Sequence[str], choices: Sequence[Choose]
) -> None:
    rows: list[list[Cell]] = []
    for measure_name, name in MEASURES.items():
        for tau, m in found.items():
            chosen = [choice(m) for choice in choices]
            rows.append([f"{measure_name}, tau {tau:g}", *(_cell(e, name) for e in chosen), 100 * m.updated])
    title = f"Error of partial attention {what}: median / 95th percentile (the paper's Figure 4)"
    note = "Updated: share of the rows of sparse steps whose context was updated and not computed, in percent."
    report.table(title, ["error", *titles, "updated"], rows, note)


def _cell(found: Errors | None, name: str) -> str:
    if found is None or not len(found.l2):
        return "n/a"
    return " / ".join(f"{value:.2g}" for value in quantiles(getattr(found, name)))


def plot(found: dict[float, Measured], path: Path, title: str) -> None:
    """Draw the median relative L2 error by layer and step, a heat map per tau on one scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    figure, axes = plt.subplots(len(found), 1, figsize=(9, 2.4 * len(found)), layout="constrained", squeeze=False)
    medians = {
        tau: {at: quantiles(e.l2)[0] for at, e in m.found.items() if quantiles(e.l2)[0] > 0} for tau, m in found.items()
    }
    seen = [value for cells in medians.values() for value in cells.values()] or [1.0]
    scale = LogNorm(min(seen), max(seen))
    for axis, (tau, m) in zip(axes[:, 0], found.items(), strict=True):
        image = torch.full((len(m.layers), m.steps), torch.nan)
        for (step, layer), value in medians[tau].items():
            image[m.layers.index(layer), step] = value
        drawn = axis.imshow(image.numpy(), aspect="auto", origin="lower", norm=scale, interpolation="nearest")
        axis.set(ylabel="layer")
        axis.set_title(f"tau {tau:g}", fontsize="small")
    axes[-1, 0].set(xlabel="step")
    figure.colorbar(drawn, ax=axes[:, 0].tolist(), label="relative L2 error, median")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny_llada", help="an embedded model")
    parser.add_argument("--task", action="append", help="only prompts of this task; may be repeated")
    parser.add_argument("--prompts", type=int, default=4, help="per task")
    parser.add_argument("--tokens", type=int, default=32, help="length limit of a response")
    parser.add_argument("--tau", type=float, action="append", help="may be repeated")
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="draw errors by layer and step (needs matplotlib)")
    args = parser.parse_args()
    model = dgraph.load(args.model, torch.float32)
    assert model.tokenizer is not None
    questions = choose(stored(args.model), args.task or [], args.prompts)
    prompts = [model.tokenizer.encode(q.prompt) for q in questions]
    found = {}
    for tau in args.tau or TAUS:
        program = dgraph.optimize(model, "dyllm", backend=args.backend, tau=tau)
        found[tau] = measure(program, prompts, args.tokens)
    report = Report(f"Partial attention on {args.model}: {len(prompts)} prompts")
    tables(report, found)
    report.write(args.markdown, args.json)
    if args.plot is not None:
        plot(found, args.plot, report.title)


if __name__ == "__main__":
    main()

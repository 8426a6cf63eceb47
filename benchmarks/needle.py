"""Retrieval from a cache that keeps few keys: MaskKV's Figure 7, and dLLM-Serve's Figure 6 with retrieval as the task.

    python -m benchmarks.needle --markdown out.md --json out.json

The embedded model finds one value among pairs ("river is 123."), the one asked for at a given depth of their order.
Every arm decodes the same held-out prompts: MaskKV with each selector at each number of pairs, dLLM-Serve (keys chosen
per head) and Sparse-dLLM (the same for all heads) at each ratio, and the dense model.

A threshold commits such an answer in the first step, which sees every key; so the default is one token a step, and
the last table counts the steps after the choice of keys, and the tokens of responses that they commit. Under MaskKV
such a step may reuse contexts of rows that a step with every key computed: see `response_interval` and `rho`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import dgraph
from benchmarks.tables import Cell, Report
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.errors import DgraphError, InputError
from dgraph.evaluate.comparisons import exact
from dgraph.evaluate.report import percent
from dgraph.evaluate.scores import wilson
from dgraph.families import Model
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.regions import RegionCompiler
from dgraph.models.tasks import held_out, needle
from dgraph.recipes.sparse import METHODS
from dgraph.runtime.stats import StepRecord

LENGTHS = (128, 256, 512)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
PAIRS = (8, 16, 32, 64, 128, 256)
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5)
PER_BLOCK = ("dllm_serve", "sparse_dllm")
DENSE = "dense"


@dataclass(frozen=True)
class Arm:
    """A line of the tables (`name`) and its budget: pairs of MaskKV, a ratio of the others, 0 for dense."""

    name: str
    budget: float
    recipe: str
    options: dict[str, Any] = field(compare=False)

    @property
    def label(self) -> str:
        """Name and budget as they print."""
        return self.name if self.recipe == DENSE else f"{self.name}, {self.budget:g}"


@dataclass(frozen=True)
class Score:
    """Sums over prompts.

    Attributes:
        prompts, hits: number of prompts, and of those that were answered rightly.
        steps, reused: steps of all prompts, and those that forwarded no row of the prompt: they read kept keys.
        tokens, late: tokens of the responses, and those that such steps committed.
    """

    prompts: int = 0
    hits: int = 0
    steps: int = 0
    reused: int = 0
    tokens: int = 0
    late: int = 0

    @classmethod
    def of(cls, scores: Iterable[Score]) -> Score:
        """The sum of scores."""
        sums = [0] * 6
        for s in scores:
            sums = [a + b for a, b in zip(sums, (s.prompts, s.hits, s.steps, s.reused, s.tokens, s.late), strict=True)]
        return cls(*sums)

    def __str__(self) -> str:
        low, high = wilson(self.hits, self.prompts)
        return f"{percent(self.hits / self.prompts)} ({100 * low:.0f} to {100 * high:.0f})" if self.prompts else "n/a"


Scores = dict[tuple[int, float], Score]
"""By length and depth."""


def cells_of(found: dict[Arm, Scores]) -> list[dict[str, Any]]:
    """Every cell as plain values."""
    return [
        {"arm": arm.name, "budget": arm.budget, **arm.options, "length": length, "depth": depth, **vars(score)}
        for arm, scores in found.items()
        for (length, depth), score in scores.items()
    ]


@dataclass(frozen=True)
class Prompt:
    """A prompt of about `length` tokens (exactly: `ids`) with the needle at `depth`, 0 for the first pair."""

    length: int
    depth: float
    ids: list[int]
    answer: str


class Steps:
    """Observes which steps of each prompt forward none of it, and what they commit."""

    def __init__(self, prompts: Sequence[Prompt]):
        self.starts = [len(p.ids) for p in prompts]
        self.reused: list[list[bool]] = [[] for _ in prompts]
        self.late: list[dict[int, bool]] = [{} for _ in prompts]

    def __call__(self, record: StepRecord) -> None:
        for prompt in record.sequence.unique().tolist():
            mine = record.sequence == prompt
            reused = int(record.positions[mine].min()) >= self.starts[prompt]
            self.reused[prompt].append(reused)
            for position in record.positions[mine & record.committed].tolist():
                self.late[prompt][position - self.starts[prompt]] = reused

    def score(self, prompt: int, hit: bool, tokens: int) -> Score:
        """Of one prompt whose response has so many tokens."""
        steps, late = self.reused[prompt], [self.late[prompt].get(place, False) for place in range(tokens)]
        return Score(1, int(hit), len(steps), sum(steps), tokens, sum(late))


class Bench:
    """The model, captured once, and how its prompts are decoded; backend: of the regions, which all arms share."""

    def __init__(self, model: Model, backend: str, tokens: int, max_batch: int, **rule: Any):
        if model.tokenizer is None:
            raise InputError(f"{model.name} has no tokenizer.json, so it cannot read a prompt; add one.")
        self.model, self.tokenizer, self.rule = model, model.tokenizer, rule
        self.graph, self.compiler = dgraph.capture(model), RegionCompiler(backend)
        self.tokens, self.max_batch = tokens, max_batch

    def prompts(self, lengths: Sequence[int], depths: Sequence[float], count: int) -> list[Prompt]:
        """Held-out ones, `count` of each cell, the same for the same cell."""
        found = []
        for length in lengths:
            pairs = self.pairs_within(length)
            for depth in depths:
                at = round(depth * (pairs - 1))
                span = (at / pairs, (at + 1) / pairs)
                for example in held_out("needle", count, length, fewest=pairs, most=pairs, depth=span):
                    found.append(Prompt(length, depth, self.tokenizer.encode(example.prompt), example.answer))
        return found

    def pairs_within(self, length: int) -> int:
        """The most pairs of which a first draw is no longer than `length` tokens."""
        count = 2
        while len(self.tokenizer.encode(needle(random.Random(length), count + 1, count + 1).prompt)) <= length:
            count += 1
        return count

    def program(self, arm: Arm) -> CompiledModel:
        """An arm's program.

        Raises:
            DgraphError: the model has not what its recipe needs.
        """
        recipe = dgraph.recipe(arm.recipe, self.model.spec, **arm.options)
        return CompiledModel(self.model, self.graph, recipe, self.compiler, Buckets.default(self.graph.device))

    def cells(self, arm: Arm, prompts: Sequence[Prompt]) -> Scores:
        """Decode the prompts under an arm; the scores of each cell.

        Raises:
            DgraphError: as `program`.
        """
        steps = Steps(prompts)
        result = self.program(arm).generate(
            input_ids=[p.ids for p in prompts],
            max_new_tokens=self.tokens,
            max_batch=self.max_batch,
            observer=steps,
            **self.rule,
        )
        assert result.texts is not None
        found: Scores = {}
        for index, (prompt, text, ids) in enumerate(zip(prompts, result.texts, result.token_ids, strict=True)):
            cell = (prompt.length, prompt.depth)
            one = steps.score(index, exact(prompt.answer, text), len(ids))
            found[cell] = Score.of([found.get(cell, Score()), one])
        return found


def tables(report: Report, found: dict[Arm, Scores], skipped: dict[str, str]) -> None:
    """Exact match by budget, over all cells and by length, and the steps that read kept keys."""
    dense = [scores for arm, scores in found.items() if arm.recipe == DENSE]
    for per_block, unit in ((False, "pairs"), (True, "ratio")):
        arms = {
            (a.name, a.budget): scores
            for a, scores in found.items()
            if a.recipe != DENSE and (a.recipe in PER_BLOCK) == per_block
        }
        budgets, names = sorted({budget for _, budget in arms}), list(dict.fromkeys(name for name, _ in arms))
        if not arms:
            continue
        columns = [unit, *(f"{b:g}" for b in budgets)]
        rows: list[list[Cell]] = [[DENSE, *(str(Score.of(s.values())) for _ in budgets)] for s in dense]
        rows += [[name, *(str(Score.of(arms.get((name, b), {}).values())) for b in budgets)] for name in names]
        note = " ".join(f"{name} was left out: {why}" for name, why in skipped.items())
        title = f"Exact match, % (95 %), over all lengths and depths, by {unit} kept"
        report.table(title, columns, rows, "" if per_block else note)
        lengths = sorted({length for scores in arms.values() for length, _ in scores})
        each: list[list[Cell]] = [
            [f"{name}, {length} tokens", *(_share(arms.get((name, b), {}), length) for b in budgets)]
            for name in names
            for length in lengths
        ]
        report.table(f"Exact match, %, by length and {unit} kept", columns, each)
    _reuse(report, found)


def _reuse(report: Report, found: dict[Arm, Scores]) -> None:
    rows: list[list[Cell]] = []
    by_name: dict[str, list[Score]] = {}
    for arm, scores in found.items():
        by_name.setdefault(arm.name, []).extend(scores.values())
    for name, of in by_name.items():
        s = Score.of(of)
        shares = (s.reused / s.steps, s.late / s.tokens if s.tokens else None)
        rows.append([name, s.steps / s.prompts, *map(percent, shares)])
    title = "Steps that read kept keys, and tokens of responses that they committed"
    report.table(title, ["arm", "steps per prompt", "such steps, %", "such tokens, %"], rows)


def _share(scores: Scores, length: int) -> str:
    s = Score.of(score for (n, _), score in scores.items() if n == length)
    return percent(s.hits / s.prompts) if s.prompts else "n/a"


def arms_of(selectors: Sequence[str], pairs: Sequence[int], ratios: Sequence[float]) -> list[Arm]:
    """The dense arm, then those of the tables, smaller budgets first."""
    maskkv = [Arm(s, n, "maskkv", {"selector": s, "pairs": n}) for n in pairs for s in selectors]
    return [Arm(DENSE, 0, DENSE, {}), *(Arm(r, x, r, {"ratio": x}) for x in ratios for r in PER_BLOCK), *maskkv]


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny_llada", help="an embedded bidirectional model")
    parser.add_argument("--prompts", type=int, default=2, help="per length and depth")
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS, help="tokens of a prompt, about")
    parser.add_argument("--depths", type=float, nargs="*", default=DEPTHS)
    parser.add_argument("--selectors", nargs="*", default=tuple(METHODS), choices=tuple(METHODS))
    parser.add_argument("--pairs", type=int, nargs="*", default=PAIRS, help="budgets of MaskKV")
    parser.add_argument("--ratios", type=float, nargs="*", default=RATIOS, help="budgets of the methods per block")
    parser.add_argument("--tokens", type=int, default=24, help="length limit of a response")
    parser.add_argument("--steps", type=int, default=32, help="per block")
    parser.add_argument("--threshold", type=float, help="instead of steps")
    parser.add_argument("--max-batch", type=int, default=60)
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rule = {"steps": args.steps} if args.threshold is None else {"threshold": args.threshold}
    model = dgraph.load(args.model, getattr(torch, args.dtype), args.device)
    bench = Bench(model, args.backend, args.tokens, args.max_batch, **rule)
    prompts = bench.prompts(args.lengths, args.depths, args.prompts)
    found: dict[Arm, Scores] = {}
    skipped: dict[str, str] = {}
    report = Report(f"Needle on {args.model}: {len(prompts)} prompts an arm")
    for arm in arms_of(args.selectors, args.pairs, args.ratios):
        if arm.name in skipped:
            continue
        try:
            found[arm] = bench.cells(arm, prompts)
        except DgraphError as error:
            skipped[arm.name] = str(error)
            print(f"{arm.name} is left out: {error}", flush=True)
        else:
            print(f"{arm.label}: {Score.of(found[arm].values())}", flush=True)
            report.data["cells"] = cells_of(found)
            report.write(None, args.json)
    tables(report, found, skipped)
    report.write(args.markdown, args.json)


if __name__ == "__main__":
    main()

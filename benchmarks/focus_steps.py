"""Why FOCUS commits fewer tokens a step than the dense model at the same threshold.

    python -m benchmarks.focus_steps --count 10 --markdown out.md --json out.json

Each step of a decode is compared with what the dense model would have committed from the very state that the step began
with: the same tokens in the block, every row forwarded, every key fresh. A token that this one commits and the step
does not is lost to one cause:

  budget          its row was evicted, and would not have been had the step kept as many rows as the dense model commits
  signal          its row was evicted, and the signal ranks it below that many others
  out of sight    its row was kept, and is not sure because keys after the last kept row are not seen
  stale keys      its row was kept and, with the same keys in sight, would be sure if all of them were fresh
  not forwarded   no row of it was in the step at all

What is lost in a step is not lost for good: most of it is committed a step or two later. The shares say what to change,
the number of steps beside them what it is worth.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dgraph
from benchmarks.tables import Cell, Report
from dgraph.bench.floor import work_of
from dgraph.cli.options import recipe_options
from dgraph.evaluate.questions import OPEN, Question, choose, drawn, hard_tasks, stored
from dgraph.families import Model
from dgraph.runtime.stats import StepRecord
from dgraph.settings import named

CAUSES = ("budget", "signal", "out of sight", "stale keys", "not forwarded")
ARMS = (
    *("dense", "dense:block_cache=dc+", "focus:full_steps=0", "focus:full_steps=0,average_over=block"),
    *("focus:full_steps=0,average_over=block,alpha=4", "focus:full_steps=1"),
)
KINDS = ("hard", "text")


class Dense:
    """What the dense model answers in a block, from any state of it: a plain forward of everything before and in it.

    Args:
        model: a native block-causal one, which no one else captures: its layers are told what to see.
        after: the layer from which on keys can be out of sight.
    """

    def __init__(self, model: Model, after: int = 1):
        self.spec, self.limit, self.at = model.spec, 0, 0
        self.model: Any = model.module.model
        assert isinstance(self.model, nn.Module)
        self.model.set_attn_implementation("sdpa")
        for layer in self.model.model.layers[after:]:
            layer.register_forward_pre_hook(self._hide, with_kwargs=True)

    def _hide(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        seen = kwargs["attention_mask"].clone()
        seen[..., self.at :, self.limit :] = False
        return args, {**kwargs, "attention_mask": seen}

    @torch.no_grad()
    def __call__(self, tokens: Sequence[int], start: int, limit: int) -> tuple[Tensor, Tensor]:
        """Token i64[B] and confidence f32[B] of each position of the block from `start` on, whose rows see the
        positions below `limit`. tokens: everything up to the block's end.
        """
        self.at, self.limit = start, limit
        block = torch.arange(len(tokens)) // self.spec.block_length
        seen = (block[:, None] >= block[None, :])[None, None]
        ids, positions = torch.tensor([tokens]), torch.arange(len(tokens))[None]
        logits = self.model(input_ids=ids, position_ids=positions, attention_mask=seen, use_cache=False).logits
        logits = logits[0, start:].float()
        logits[:, self.spec.mask_id] = -torch.inf
        best = logits.softmax(dim=-1).max(dim=-1)
        return best.indices, best.values


def committed(confidence: Tensor, masked: Tensor, threshold: float) -> set[int]:
    """Columns of a block that a threshold commits: those above it, at least the surest."""
    sure = torch.where(masked, confidence, -torch.inf)
    return set((sure > threshold).nonzero().flatten().tolist()) or {int(sure.argmax())}


@dataclass
class Losses:
    """Sums over steps of what dense steps from the same states would have committed, and of what these did.

    Attributes:
        steps, first: all of them, and those that open a block.
        dense, mine, instead: tokens that the dense model commits, that the step does, and of these the ones that the
            dense model does not.
        lost: by (cause, whether the step opens a block).
        idle: steps without a row that could be committed.
        rows: that went through the last layers.
    """

    steps: int = 0
    first: int = 0
    dense: int = 0
    mine: int = 0
    instead: int = 0
    idle: int = 0
    rows: int = 0
    lost: Counter[tuple[str, bool]] = field(default_factory=Counter)

    def shares(self) -> Iterator[Cell]:
        """Percent of all that was lost, by cause: in steps that open a block, then in the others."""
        total = max(sum(self.lost.values()), 1)
        for opening in (True, False):
            yield from (100 * self.lost[cause, opening] / total for cause in CAUSES)


class Watch:
    """An observer that finds what each step lost, and why.

    Args:
        dense: the plain forward.
        prompts: ids of every prompt.
        threshold: of the decode.
        hides: whether the kept rows see nothing after the last of them.
    """

    def __init__(self, dense: Dense, prompts: Sequence[Sequence[int]], threshold: float, hides: bool):
        self.dense, self.threshold, self.hides, self.losses = dense, threshold, hides, Losses()
        self.canvas = [list(p) for p in prompts]
        self.opened: set[tuple[int, int]] = set()

    def __call__(self, record: StepRecord) -> None:
        for prompt in record.sequence.unique().tolist():
            self._sequence(record, prompt, record.sequence == prompt)

    def _sequence(self, record: StepRecord, prompt: int, mine: Tensor) -> None:
        losses, block = self.losses, self.dense.spec.block_length
        losses.steps += 1
        losses.rows += int(record.kept[mine].sum())
        rows = mine & record.candidate
        if not rows.any():
            losses.idle += 1
            return
        positions, canvas = record.positions, self.canvas[prompt]
        start = int(positions[rows].min()) // block * block
        canvas += [self.dense.spec.mask_id] * (start + block - len(canvas))
        opening = (prompt, start) not in self.opened
        self.opened.add((prompt, start))
        losses.first += opening
        now = canvas[: start + block]
        masked = torch.tensor(now[start:]) == self.dense.spec.mask_id
        column = {int(p) - start: i for i, p in enumerate(positions) if rows[i]}
        wanted = committed(self.dense(now, start, start + block)[1], masked, self.threshold)
        found = {c for c, i in column.items() if record.committed[i]}
        kept = {c for c, i in column.items() if record.kept[i]}
        limit = self._limit(record, mine, start)
        inside = wanted
        if limit < start + block and wanted - found:
            inside = committed(self.dense(now, start, limit)[1], masked, self.threshold)
        best = self._best(record, column, len(wanted))
        for c in wanted - found:
            if c not in column:
                cause = "not forwarded"
            elif c not in kept:
                cause = "budget" if c in best else "signal"
            else:
                cause = "stale keys" if c in inside else "out of sight"
            losses.lost[cause, opening] += 1
        losses.dense += len(wanted)
        losses.mine += len(found)
        losses.instead += len(found - wanted)
        for c in found:
            canvas[start + c] = int(record.token[column[c]])

    def _limit(self, record: StepRecord, mine: Tensor, start: int) -> int:
        """Positions below it are seen by the rows that went on."""
        current = mine & (record.positions >= start)
        limit = int(record.limit[current].max())
        if self.hides:
            limit = min(limit, int(record.positions[current & record.kept].max()) + 1)
        return limit

    @staticmethod
    def _best(record: StepRecord, column: dict[int, int], count: int) -> set[int]:
        """The columns that the signal ranks highest."""
        if record.score is None:
            return set()
        score = record.score
        return set(sorted(column, key=lambda c: (-float(score[column[c]]), c))[:count])


FIGURES = (
    "tokens a step",
    "dense, from the same states",
    "of these lost, %",
    *(f"  {cause}, steps that open a block, %" for cause in CAUSES),
    *(f"  {cause}, other steps, %" for cause in CAUSES),
    "tokens a step that dense would not commit",
    "steps that open a block, %",
    "steps without a candidate",
    "rows a token",
)


def measure(
    model: Model, dense: Dense, arm: str, questions: Sequence[Question], threshold: float, tokens: int
) -> Losses:
    """What the steps of an arm, written as for `dgraph eval`, lose."""
    name, given = named(arm)
    options = recipe_options(name, given)
    program = dgraph.optimize(model, name, backend="eager", **options)
    hides = work_of(program.graph("step")).hides
    assert model.tokenizer is not None
    prompts = [model.tokenizer.encode(q.prompt) for q in questions]
    watch = Watch(dense, prompts, threshold, hides)
    program.generate(input_ids=prompts, max_new_tokens=tokens, threshold=threshold, max_batch=16, observer=watch)
    return watch.losses


def figures(losses: Losses) -> list[Cell]:
    """The figures of an arm, by `FIGURES`."""
    lost = sum(losses.lost.values())
    return [
        losses.mine / losses.steps,
        losses.dense / losses.steps,
        100 * lost / max(losses.dense, 1),
        *losses.shares(),
        losses.instead / losses.steps,
        100 * losses.first / losses.steps,
        losses.idle,
        losses.rows / max(losses.mine, 1),
    ]


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny_sdar", help="an embedded block-causal model")
    parser.add_argument(
        "--arm", action="append", help=f"as `dgraph eval -r`; may be repeated (default: {' '.join(ARMS)})"
    )
    parser.add_argument("--kind", choices=KINDS, action="append", help="may be repeated (default: all)")
    parser.add_argument("--count", type=int, default=10, help="per hard task, and of open text")
    parser.add_argument("--seed", type=int, default=0, help="of the hard tasks' prompts")
    parser.add_argument("--tokens", type=int, default=96, help="length limit of a response")
    parser.add_argument("--threshold", type=float, default=0.9)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = dgraph.load(args.model, torch.float32, "cpu")
    dense, report = (
        Dense(dgraph.load(args.model, torch.float32, "cpu")),
        Report(f"Where FOCUS loses tokens: {args.model}, threshold {args.threshold}"),
    )
    arms = args.arm or ARMS
    for kind in args.kind or KINDS:
        if kind == "text":
            questions = choose(stored(args.model), [OPEN], args.count)
        else:
            questions = drawn(args.model, hard_tasks(args.model), args.count, args.seed)
        columns = []
        for arm in arms:
            columns.append(figures(measure(model, dense, arm, questions, args.threshold, args.tokens)))
            print(arm, *(f"{c:.3g}" if isinstance(c, float) else c for c in columns[-1]), sep="\t", flush=True)
        rows = [[name, *cells] for name, *cells in zip(FIGURES, *columns, strict=True)]
        report.table(f"{kind}, {len(questions)} prompts", ["", *arms], rows)
        report.write(args.markdown, args.json)


if __name__ == "__main__":
    main()

"""FOCUS on the embedded model: quality, steps and rows (the paper's Tables 3 to 6 and Figure 4).

    python -m benchmarks.focus_quality --prompts 50 --markdown out.md --json out.json --plot figure4.png

Every arm decodes the same held-out prompts: tasks with an exact answer, and open text. Figures are those of
`dgraph eval`; rows per token counts the rows that went through the layers after the eviction (all layers for dense),
commits included.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dgraph
from benchmarks.tables import Report
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.evaluate.arms import Choice, expand
from dgraph.evaluate.questions import OPEN, Question, choose, stored
from dgraph.evaluate.results import Keys, Store
from dgraph.evaluate.run import Evaluation
from dgraph.recipes import Ablation
from dgraph.runtime.stats import StepRecord

TASKS = ("math", "needle", "sort", "follow")
THRESHOLDS = (0.9, 0.8, 0.7)
QUINTILES = 5


@dataclass(frozen=True)
class Arm:
    """One row of a table: a recipe with options."""

    label: str
    recipe: str
    options: dict[str, Any]


PUBLISHED = {"alpha": 1.5, "full_steps": 0}
"""FOCUS as its paper has it on a block-causal model."""
ARMS = (
    Arm("dense", "dense", {}),
    Arm("DC", "dense", {"block_cache": "dc"}),
    Arm("DC+", "dense", {"block_cache": "dc+"}),
    Arm("DC+, no recommit", "dense", {"block_cache": "dc+", "recommit": False}),
    Arm("focus, alpha 1.2", "focus", PUBLISHED | {"alpha": 1.2}),
    Arm("focus, alpha 1.5", "focus", PUBLISHED),
    Arm("focus, alpha 1.8", "focus", PUBLISHED | {"alpha": 1.8}),
    Arm("focus, alpha 1.5, no recommit", "focus", PUBLISHED | {"recommit": False}),
    Arm("focus, alpha 1.5, importance", "focus", PUBLISHED | {"ablation": Ablation(signal="importance")}),
    Arm("focus, first step full", "focus", {}),
)

SIGNALS = (
    ("delta, layers 0 to 1", {"ablation": Ablation("delta", after=1)}),
    ("delta, layers 1 to 2", {"ablation": Ablation("delta", after=2)}),
    ("importance, layer 0", {"ablation": Ablation("importance", after=0)}),
    ("importance, layer 1", {"ablation": Ablation("importance", after=1)}),
    ("importance, layer 2", {"ablation": Ablation("importance", after=2)}),
)


class Bench:
    """The model, its prompts, and ways to run an arm."""

    def __init__(self, name: str, prompts: int, tokens: int, backend: str, device: str):
        self.model = dgraph.load(name, torch.float32, device)
        self.tasks, self.text = choose(stored(name), TASKS, prompts), choose(stored(name), [OPEN], prompts)
        self.tokens, self.backend = tokens, backend
        self.store = Store()

    def optimize(self, arm: Arm) -> CompiledModel:
        """The arm's program."""
        return dgraph.optimize(self.model, arm.recipe, backend=self.backend, **arm.options)

    def observe(
        self, program: CompiledModel, questions: Sequence[Question], observer: Callable[[StepRecord], None]
    ) -> None:
        """Decode prompts of one kind at threshold 0.9 under the eyes of an observer."""
        prompts = [q.prompt for q in questions]
        program.generate(prompts, max_new_tokens=self.tokens, threshold=0.9, max_batch=100, observer=observer)

    def quality(self, arm: Arm, thresholds: Sequence[float]) -> Iterator[list[str | int | float]]:
        """Per threshold: exact match in percent, then steps, tokens per step, rows per token on tasks and on text."""
        sweep = {"threshold": thresholds}
        arms, references = expand(self.model.spec, [Choice(arm.recipe, arm.options)], [Choice("")], sweep)
        evaluation = Evaluation(
            self.model,
            arms,
            references,
            [*self.tasks, *self.text],
            self.store,
            Keys(self.model.name, {}),
            self.tokens,
            max_batch=100,
            backend=self.backend,
        )
        evaluation.run()
        for one in arms:
            scores = [evaluation.score(one, *TASKS), evaluation.score(one, OPEN)]
            cells: list[str | int | float] = [100.0 * (scores[0].exact_match or 0.0)]
            for score in scores:
                cells += [score.steps_per_prompt, score.tokens_per_step, score.rows_per_token]
            yield cells


COLUMNS = ("EM %", *(f"{kind} {what}" for kind in ("tasks", "text") for what in ("steps", "tokens/step", "rows/token")))


def tables_4_to_6(bench: Bench, report: Report) -> None:
    """Every arm at every threshold."""
    for arm in ARMS:
        for threshold, cells in zip(THRESHOLDS, bench.quality(arm, THRESHOLDS), strict=True):
            _collect(report, "tables 4 to 6", [f"{arm.label}, threshold {threshold}", *cells])
    _flush(report, "tables 4 to 6", "Dense, delayed cache and FOCUS (the paper's Tables 4 to 6)")


def table_3(bench: Bench, report: Report) -> None:
    """A fixed number of kept rows: the best, random ones, the worst, by both signals."""
    for keep in (2, 4, 8):
        arms = [("random", "delta")] + [(s, signal) for signal in ("delta", "importance") for s in ("top", "bottom")]
        for select, signal in arms:
            arm = Arm("", "focus", {"full_steps": 0, "ablation": Ablation(signal, select, keep)})
            label = f"K = {keep}, {select}" + ("" if select == "random" else f" by {signal}")
            for cells in bench.quality(arm, [0.9]):
                _collect(report, "table 3", [label, *cells])
    _flush(report, "table 3", "A fixed number of kept rows at threshold 0.9 (the paper's Table 3)")


def figure_4(bench: Bench, report: Report) -> None:
    """Share of masked rows that are decoded in a step, by quintile of the signal within the step.

    Nothing is evicted here (alpha = inf), so the signal is measured on the dense trajectory.
    """
    for label, options in SIGNALS:
        program = bench.optimize(Arm("", "focus", {"alpha": float("inf"), "block_cache": "off", **options}))
        for kind, questions in (("tasks", bench.tasks), ("text", bench.text)):
            counter = Quintiles(program.spec.eos_ids)
            bench.observe(program, questions, counter)
            _collect(report, "figure 4", [f"{label}, {kind}", *counter.shares(), counter.rows])
    columns = [f"Q{i + 1}" for i in range(QUINTILES)]
    _flush(
        report,
        "figure 4",
        "Share of masked rows decoded in the step, by quintile of the signal, lowest first (the paper's Figure 4)",
        ["signal", *columns, "rows"],
        "Rows that decode to the stop token are left out: their number is a matter of padding.",
    )


class Quintiles:
    """An observer that counts decoded rows by quintile of their signal among the masked rows of their step."""

    def __init__(self, eos_ids: Sequence[int]):
        self.eos = torch.tensor(eos_ids)
        self.decoded = torch.zeros(QUINTILES)
        self.seen = torch.zeros(QUINTILES)

    def __call__(self, record: StepRecord) -> None:
        assert record.score is not None
        for sequence in record.sequence.unique():
            rows = (record.sequence == sequence) & record.candidate & ~torch.isin(record.token, self.eos)
            count = int(rows.sum())
            if count < QUINTILES:
                continue
            rank = record.score[rows].argsort(stable=True).argsort()
            bucket = rank * QUINTILES // count
            self.seen += torch.bincount(bucket, minlength=QUINTILES)
            self.decoded += torch.bincount(bucket, weights=record.committed[rows].float(), minlength=QUINTILES)

    @property
    def rows(self) -> int:
        """Masked rows that were counted."""
        return int(self.seen.sum())

    def shares(self) -> list[float]:
        """Per quintile the share of rows that were decoded."""
        shares: Tensor = self.decoded / self.seen.clamp(min=1)
        return shares.tolist()


def _collect(report: Report, key: str, row: list[str | int | float]) -> None:
    report.data.setdefault(key, []).append(row)
    print(*(f"{c:.3g}" if isinstance(c, float) else c for c in row), sep="\t", flush=True)


def _flush(report: Report, key: str, title: str, columns: Sequence[str] = ("arm", *COLUMNS), note: str = "") -> None:
    report.table(title, columns, report.data[key], note)


def plot_figure_4(report: Report, path: Path) -> None:
    """Draw the shares of `figure_4` as lines, one panel per kind of prompt."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, kind in zip(axes, ("tasks", "text"), strict=True):
        for row in report.data["figure 4"]:
            label, _, row_kind = row[0].rpartition(", ")
            if row_kind == kind:
                axis.plot(range(1, QUINTILES + 1), row[1 : QUINTILES + 1], marker="o", label=label)
        axis.set(title=kind, xlabel="quintile of the signal", xticks=range(1, QUINTILES + 1))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of masked rows decoded in the step")
    axes[0].legend()
    figure.savefig(path, dpi=110)


SECTIONS: dict[str, Callable[[Bench, Report], None]] = {
    "tables": tables_4_to_6,
    "table3": table_3,
    "figure4": figure_4,
}


def _sections(wanted: str) -> Iterator[str]:
    yield from SECTIONS if wanted == "all" else [wanted]


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny_sdar")
    parser.add_argument("--prompts", type=int, default=50, help="per task, and of open text")
    parser.add_argument("--tokens", type=int, default=96, help="length limit of a response")
    parser.add_argument("--section", choices=(*SECTIONS, "all"), default="all")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="draw Figure 4 (needs matplotlib)")
    args = parser.parse_args()
    bench = Bench(args.model, args.prompts, args.tokens, args.backend, args.device)
    report = Report(f"FOCUS on {args.model}")
    for section in _sections(args.section):
        SECTIONS[section](bench, report)
        report.write(args.markdown, args.json)
    if args.plot is not None and "figure 4" in report.data:
        plot_figure_4(report, args.plot)


if __name__ == "__main__":
    main()

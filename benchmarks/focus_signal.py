"""FOCUS's Figure 4 on a model with prompts of its own and tasks: how often a masked row is decoded, by its signal.

    python -m benchmarks.focus_signal --model smol_sdar --device cuda --markdown out.md

`benchmarks.focus_quality` does so on the tiny models, whose held-out tasks it knows. Nothing is evicted (alpha = inf),
so the signal is measured on the steps of `dense`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import dgraph
from benchmarks.focus_quality import QUINTILES, SIGNALS, Quintiles
from benchmarks.tables import Cell, Report
from dgraph.evaluate.questions import stored
from dgraph.evaluate.tasks import TASKS, questions_of


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smol_sdar", help="an embedded model")
    parser.add_argument("--task", choices=tuple(TASKS), default="gsm8k", help="beside the model's stored prompts")
    parser.add_argument("--prompts", type=int, default=64, help="of either kind")
    parser.add_argument("--tokens", type=int, default=128, help="length limit of a response")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = dgraph.load(args.model, None, args.device)
    kinds = {args.task: questions_of(args.task, args.prompts, 1), "stored": stored(args.model)[: args.prompts]}
    rows: list[list[Cell]] = []
    for label, options in SIGNALS:
        given: dict[str, Any] = {"alpha": float("inf"), "block_cache": "off", **options}
        program = dgraph.optimize(model, "focus", **given)
        for kind, questions in kinds.items():
            counter, prompts = Quintiles(program.spec.eos_ids), [q.prompt for q in questions]
            program.generate(prompts, max_new_tokens=args.tokens, threshold=0.9, max_batch=64, observer=counter)
            rows.append([f"{label}, {kind}", *(100 * share for share in counter.shares()), counter.rows])
    report = Report(f"Masked rows decoded in their step, %, by quintile of FOCUS's signal: {args.model}")
    note = "Lowest fifth first; rows that decode to the stop token are left out."
    report.table("Figure 4", ["signal, prompts", *(f"Q{i + 1}" for i in range(QUINTILES)), "rows"], rows, note)
    report.write(args.markdown, args.json)


if __name__ == "__main__":
    main()

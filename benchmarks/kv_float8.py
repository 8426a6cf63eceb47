"""Keys and values in float8 against those in the model's dtype: tokens, exam, bytes of a position, and step times.

    python -m benchmarks.kv_float8 [tiny_sdar tiny_llada] [--per-task 20] [--task text] [--recipe dense ...]
        [--markdown FILE]

Per recipe the same prompts are answered twice, greedily, by the same program but for `kv_dtype`. Equal tokens are
counted place by place: a response that goes another way at one token counts as different from there on. Prompts
are those that an embedded model comes with and was never trained on; "exact" is the share of right answers.
Bytes are of a position in the paged caches of all layers. Seconds are of the whole decode, of use on a GPU alone: on a
CPU float8 is converted before it is read.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import dgraph
from benchmarks.tables import Cell, Report
from dgraph.compiler.compiled_model import Optimized, Result
from dgraph.errors import InputError
from dgraph.evaluate.questions import Question, choose, stored
from dgraph.evaluate.scores import equal_tokens

RECIPES = (
    "dense",
    "focus",
    "fast_dllm",
    "dkv_cache",
    "vicinity",
    "dyllm",
    "dllm_cache",
    "maskkv",
    "dllm_serve",
    "sparse_dllm",
)
COLUMNS = ["recipe", "equal tokens", "same response", "exact", "exact fp8", "bytes", "bytes fp8", "s", "s fp8"]


def answered(run: Optimized, questions: list[Question], tokens: int, batch: int) -> tuple[Result, float]:
    """Responses to all questions, and the seconds that they took."""
    began = time.perf_counter()
    found = run.generate([q.prompt for q in questions], max_new_tokens=tokens, max_batch=batch)
    return found, time.perf_counter() - began


def exact(questions: list[Question], found: Result) -> str:
    """Right answers of all; open text has none."""
    told = [q.right(text) for q, text in zip(questions, found.texts, strict=True)]
    known = [right for right in told if right is not None]
    return f"{sum(known)}/{len(known)}" if known else "-"


def line(model: dgraph.Model, recipe: str, questions: list[Question], args: argparse.Namespace) -> list[Cell]:
    """One row of the table."""
    runs = [dgraph.optimize(model, recipe, backend=args.backend, kv_dtype=dtype) for dtype in (None, "fp8")]
    if args.device == "cuda":  # compile, record and warm up
        for run in runs:
            answered(run, questions[: args.batch], args.tokens, args.batch)
    (plain, seconds), (rounded, seconds_8) = (answered(run, questions, args.tokens, args.batch) for run in runs)
    pairs = [equal_tokens(a, b) for a, b in zip(rounded.token_ids, plain.token_ids, strict=True)]
    same = sum(a == b for a, b in zip(rounded.token_ids, plain.token_ids, strict=True))
    equal, places = (sum(column) for column in zip(*pairs, strict=True))
    sizes = [run._session.kv.position_bytes for run in runs]
    shares = f"{100 * equal / max(places, 1):.1f} %", f"{same}/{len(questions)}"
    return [recipe, *shares, exact(questions, plain), exact(questions, rounded), *sizes, seconds, seconds_8]


def main() -> None:
    """Print one table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["tiny_sdar", "tiny_llada"])
    parser.add_argument("--recipe", nargs="+", default=list(RECIPES))
    parser.add_argument("--task", nargs="+", default=[], help="only these, as text; default all that have answers")
    parser.add_argument("--per-task", type=int, default=20, help="prompts of each task")
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of a response")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = Report("Keys and values in float8")
    for name in args.models:
        model = dgraph.load(name, device=args.device)
        questions = choose(stored(name), args.task, args.per_task)
        lines = []
        for recipe in args.recipe:
            try:
                lines.append(line(model, recipe, questions, args))
            except InputError as error:
                print(f"{name}: {error}")
        report.table(f"{name}, {model.spec.dtype}", COLUMNS, lines, f"{len(questions)} prompts, {args.tokens} tokens.")
        report.write(args.markdown, args.json)


if __name__ == "__main__":
    main()

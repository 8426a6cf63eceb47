"""Seconds from nothing to a compiled program, each in a process of its own: cold, from torch's caches, from ours.

    python -m benchmarks.startup --repeat 5
    python -m benchmarks.startup --shape sdar-8b --device cuda --recipe focus

`cold` finds every cache empty. `torch's caches` finds what Inductor kept of a cold run, and no artifact cache.
`artifact cache` finds the artifacts of a cold run, and everything of Inductor and Triton empty.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.tables import Report

PARTS = ("import", "load", "capture", "rewrite", "regions", "first answer")
COUNTS = ("compiled", "loaded", "kernels compiled")
"""Regions that Inductor compiled, regions that came from a cache, and kernels of ours that Triton compiled."""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own: seconds of each part, and what was compiled."""
    marks = [("import", args.started)]
    import torch

    import dgraph

    torch.set_num_threads(args.threads or torch.get_num_threads())
    marks.append(("load", time.time()))
    model: Any = args.model
    if args.shape:
        from dgraph.models.shapes import random_model

        changes: dict[str, Any] = {"attention": "block_causal", "logit_shift": 0}
        if args.layers:
            changes["num_hidden_layers"] = args.layers
        dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
        model = random_model(args.shape, args.device, dtype, **changes)
    else:
        model = dgraph.load(model, device=args.device)

    def tell(what: str) -> None:
        part = {"capturing": "capture", "rewriting": "rewrite"}.get(what.split()[0], "")
        part = part or ("regions" if " region " in what else "")
        if part and all(part != name for name, _ in marks):
            marks.append((part, time.time()))

    program = dgraph.optimize(model, args.recipe, artifacts=not args.no_cache, progress=tell)
    marks.append(("first answer", time.time()))
    program.generate(input_ids=[list(range(5, 5 + args.prompt))], max_new_tokens=args.tokens)
    marks.append(("end", time.time()))
    seconds = {name: later - now for (name, now), (_, later) in itertools.pairwise(marks)}
    counts = {"compiled": program.compiler.compiled, "loaded": program.compiler.loaded}
    counts["kernels compiled"] = program.kernels.compiled
    return {"seconds": seconds, **{name: len(found) for name, found in counts.items()}}


def child(argv: list[str], caches: dict[str, Path], *flags: str) -> dict[str, Any]:
    """Run `measure` in a new process that knows only these caches."""
    known = {"DGRAPH_CACHE": "artifacts", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    environment = {**os.environ, **{name: str(caches[kind]) for name, kind in known.items()}}
    command = [sys.executable, "-m", "benchmarks.startup", *argv, *flags, "--started", repr(time.time())]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def rounds(argv: list[str], repeat: int) -> dict[str, list[dict[str, Any]]]:
    """Every arm, `repeat` times, arms taking turns."""
    found: dict[str, list[dict[str, Any]]] = {"cold": [], "torch's caches": [], "artifact cache": []}
    for i in range(repeat):
        with tempfile.TemporaryDirectory() as folder:
            old, new = Path(folder, "old"), Path(folder, "new")
            kept = {kind: old / kind for kind in ("artifacts", "inductor", "triton")}
            fresh = {kind: new / kind for kind in kept}
            for path in (*kept.values(), *fresh.values()):
                path.mkdir(parents=True, mode=0o700)
            found["cold"].append(child(argv, kept))
            found["torch's caches"].append(child(argv, {**kept, "artifacts": fresh["artifacts"]}, "--no-cache"))
            found["artifact cache"].append(child(argv, {**fresh, "artifacts": kept["artifacts"]}))
        print(f"round {i + 1} of {repeat}: ", *(f"{arm} {total(runs[-1]):.1f} s;" for arm, runs in found.items()))
    return found


def total(run: dict[str, Any]) -> float:
    """Seconds until a program is compiled, without its first answer."""
    return sum(s for name, s in run["seconds"].items() if name != "first answer")


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny_sdar", help="an embedded model or a checkpoint folder")
    parser.add_argument("--shape", help="instead: a published shape with random weights")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, for a trial")
    parser.add_argument("--recipe", default="focus")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="of torch; default: its own choice")
    parser.add_argument("--prompt", type=int, default=24, help="tokens of the prompt of the first answer")
    parser.add_argument("--tokens", type=int, default=8, help="tokens of the first answer")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-cache", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)  # in a child: when its parent started it
    args = parser.parse_args()
    if args.started is not None:
        print(json.dumps(measure(args)))
        return

    found = rounds(sys.argv[1:], args.repeat)
    cold = statistics.median(map(total, found["cold"]))
    rows: list[list[str | int | float]] = []
    for arm, runs in found.items():
        parts = [statistics.median(run["seconds"].get(part, 0.0) for run in runs) for part in PARTS]
        whole = statistics.median(map(total, runs))
        rows.append([arm, *parts[:-1], whole, cold / whole, parts[-1], *(runs[-1][count] for count in COUNTS)])
    report = Report(f"Start of {args.shape or args.model} under {args.recipe}")
    columns = ["caches", *PARTS[:-1], "total", "cold / this", "first answer", *COUNTS]
    report.table(f"Seconds, median of {args.repeat} new processes", columns, rows)
    report.data = {"runs": found}
    report.write(args.markdown, args.json)


if __name__ == "__main__":
    main()

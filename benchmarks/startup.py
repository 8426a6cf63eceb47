"""Seconds from nothing to a compiled program, each in a process of its own: cold, from torch's caches, from ours.

    python -m benchmarks.startup --repeat 5
    python -m benchmarks.startup --shape sdar-8b --device cuda --recipe focus
    python -m benchmarks.startup --weights as-they-are fp8 int4

`cold` finds every cache empty. `torch's caches` finds what Inductor kept of a cold run, and no artifact cache.
`artifact cache` finds the artifacts of a cold run, and everything of Inductor and Triton empty. Weights that are to be
quantised are read when they are, which is then part of the capture and not of the load. "busy" are seconds of
processors of a whole process, first answer and compilers among them: they say more than the clock on a machine that
others use.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.tables import Report

PARTS = ("import", "load", "capture", "rewrite", "regions", "first answer")
ARMS = ("cold", "torch's caches", "artifact cache")
PLAIN = "as-they-are"
"""Of --weights: none is quantised."""
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
    (weights,) = (None if given == PLAIN else given for given in args.weights)
    if args.shape:
        from dgraph.models.shapes import random_model

        changes: dict[str, Any] = {"attention": "block_causal", "logit_shift": 0}
        if args.layers:
            changes["num_hidden_layers"] = args.layers
        dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
        model = random_model(args.shape, args.device, dtype, opened=weights is not None, **changes)
    else:
        model = dgraph.load(model, device=args.device, opened=weights is not None)

    def tell(what: str) -> None:
        part = {"capturing": "capture", "rewriting": "rewrite"}.get(what.split()[0], "")
        part = part or ("regions" if " region " in what else "")
        if part and all(part != name for name, _ in marks):
            marks.append((part, time.time()))

    program = dgraph.optimize(model, args.recipe, artifacts=not args.no_cache, progress=tell, weights=weights)
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
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**json.loads(done.stdout.splitlines()[-1]), "busy": busy}


def rounds(
    argv: list[str], weights: list[str], arms: list[str], repeat: int
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Every arm of all weights, `repeat` times, arms taking turns."""
    every: dict[str, dict[str, list[dict[str, Any]]]] = {stored: {arm: [] for arm in arms} for stored in weights}
    for i, (stored, found) in itertools.product(range(repeat), every.items()):
        with tempfile.TemporaryDirectory() as folder:
            mine = [*argv, "--weights", stored]
            old, new = Path(folder, "old"), Path(folder, "new")
            kept = {kind: old / kind for kind in ("artifacts", "inductor", "triton")}
            fresh = {kind: new / kind for kind in kept}
            for path in (*kept.values(), *fresh.values()):
                path.mkdir(parents=True, mode=0o700)
            how = {
                "cold": (kept, ()),
                "torch's caches": ({**kept, "artifacts": fresh["artifacts"]}, ("--no-cache",)),
                "artifact cache": ({**fresh, "artifacts": kept["artifacts"]}, ()),
            }
            for arm, runs in found.items():
                caches, flags = how[arm]
                runs.append(child(mine, caches, *flags))
        print(
            f"round {i + 1} of {repeat}, {stored}: ",
            *(f"{arm} {total(runs[-1]):.1f} s, busy {runs[-1]['busy']:.1f};" for arm, runs in found.items()),
            flush=True,
        )
    return every


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
    parser.add_argument("--weights", nargs="+", default=[PLAIN], help=f"how they are stored, or {PLAIN}; each in turn")
    parser.add_argument(
        "--arms", nargs="+", default=list(ARMS), choices=ARMS, help="cold first, which fills the caches"
    )
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
    if args.arms[0] != ARMS[0]:
        parser.error(f"--arms begins with {ARMS[0]!r}, which fills the caches that the others find; got {args.arms}")
    found = rounds(sys.argv[1:], args.weights, args.arms, args.repeat)
    rows: list[list[str | int | float]] = []
    for stored, arm in itertools.product(found, args.arms):
        runs, first = found[stored][arm], found[args.weights[0]][arm]
        parts = [statistics.median(run["seconds"].get(part, 0.0) for run in runs) for part in PARTS]
        whole, cold, other = (statistics.median(map(total, of)) for of in (runs, found[stored]["cold"], first))
        busy, others = (statistics.median(run["busy"] for run in of) for of in (runs, first))
        counts = (runs[-1][count] for count in COUNTS)
        rows.append(
            [stored, arm, *parts[:-1], whole, cold / whole, whole / other, busy, busy / others, parts[-1], *counts]
        )
    report = Report(f"Start of {args.shape or args.model} under {args.recipe}")
    columns = ["weights", "caches", *PARTS[:-1], "total", "cold / this", f"this / {args.weights[0]}", "busy"]
    columns += [f"busy / {args.weights[0]}", "first answer"]
    columns += COUNTS
    report.table(f"Seconds, median of {args.repeat} new processes", columns, rows)
    report.data = {"runs": found}
    report.write(args.markdown, args.json)


if __name__ == "__main__":
    main()

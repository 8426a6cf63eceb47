"""A dense step beside `torch.compile` of the model's own forward, over the same rows.

    python -m benchmarks.dense_step
    python -m benchmarks.dense_step --models sdar-8b llada-8b --sequences 1 64 --json out.json

A step is that of a block without a prompt, over random ids: no cache is read that the model's own forward would not
compute, and every row is decoded. `eager` and `torch.compile` take the module as it was loaded, and reduce its logits
to a token and its probability for each row, as a decoding loop must. `dgraph` is the step of recipe `dense`.

On a CPU: one thread, CPU time of the process. On a GPU: both replay CUDA graphs; the copies of a step's inputs into the
memory of its graph are in its time. Arms go in turn; ratios are medians over rounds of the two times of one round.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dgraph
from benchmarks.cpu_step import in_turn, inputs_of
from benchmarks.tables import Cell, Report
from dgraph.families import Model
from dgraph.models.shapes import SHAPES, random_model

BESIDE = "torch.compile"


def own_forward(model: Model) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The module's forward with tokens and probabilities of all rows.

    Returns:
        (ids: i64[b, t], positions: i64[b, t]) -> (token: i64[b, t], confidence: f32[b, t])
    """

    def forward(ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        out = model.module(ids, position_ids=positions)
        logits = out if isinstance(out, Tensor) else out.logits
        confidence, token = logits.float().softmax(-1).max(-1)
        return token, confidence

    return forward


def captured(arm: Callable[[], Any]) -> Callable[[], Any]:
    """The arm as a CUDA graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            arm()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = arm()

    def replay() -> Any:
        graph.replay()
        return kept

    return replay


def on_gpu_in_turn(arms: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each arm, round by round; three rounds before them are not counted."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(rounds + 3):
        for name, arm in list(arms.items())[:: 1 if i % 2 else -1]:
            begin.record()
            arm()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end))
    return {name: found[3:] for name, found in times.items()}


def load(name: str, device: torch.device) -> Model:
    """An embedded model, a checkpoint folder, or a published shape in bf16 with random weights."""
    if name in SHAPES:
        return random_model(name, device=device)
    return dgraph.load(name, device=str(device))


@torch.no_grad()
def measure(report: Report, name: str, counts: list[int], rounds: int, device: torch.device) -> list[list[Cell]]:
    """Rows of the table for one model."""
    model = load(name, device)
    program = dgraph.optimize(model, "dense").programs["step"]
    rows: list[list[Cell]] = []
    for sequences in counts:
        block = model.spec.block_length
        inputs = {key: value.to(device) for key, value in inputs_of(program, 0, sequences).items()}
        count = len(inputs["input_ids"])
        for key, value in inputs.items():
            if value.is_floating_point() and value.dim() > 2:
                inputs[key] = value.to(next(model.module.parameters()).dtype)
        # With masks alone every row of a bidirectional model would be the same.
        inputs["input_ids"] = torch.randint(5, model.spec.vocab, (count,), device=device)
        ids = inputs["input_ids"].view(sequences, block)
        positions = torch.arange(block, device=device).expand(sequences, block).contiguous()
        forward = own_forward(model)
        torch.compiler.reset()
        compiled = torch.compile(forward, dynamic=False)
        arms: dict[str, Callable[[], Any]] = {
            BESIDE: partial(compiled, ids, positions),
            "dgraph": partial(program, inputs, count),
        }
        if device.type == "cuda":
            arms[BESIDE] = captured(arms[BESIDE])
            times = on_gpu_in_turn(arms, rounds)
        else:
            arms["eager"] = partial(forward, ids, positions)
            times = in_turn(arms, rounds)
        ours, theirs = arms["dgraph"]().outputs["token"].flatten(), arms[BESIDE]()[0].flatten()
        same = float((ours == theirs).double().mean())
        ratio = statistics.median(a / b for a, b in zip(times["dgraph"], times[BESIDE], strict=True))
        medians = [statistics.median(times[key]) if key in times else "" for key in ("eager", BESIDE, "dgraph")]
        rows.append([name, sequences, count, *medians, ratio, same])
        report.data.setdefault(name, {})[str(sequences)] = {"ms": times, "same_tokens": same}
        print(*rows[-1], flush=True)
        del arms, compiled, forward, inputs
        gc.collect()
    return rows


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny_sdar", "tiny_llada"])
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    report = Report("A dense step beside torch.compile of the model's own forward")
    rows = [row for name in args.models for row in measure(report, name, args.sequences, args.rounds, device)]
    columns = ["model", "sequences", "rows", "eager ms", f"{BESIDE} ms", "dgraph ms", "ratio", "same tokens"]
    report.table(f"Medians of {args.rounds} rounds", columns, rows, "ratio: dgraph / torch.compile.")
    report.write(args.markdown, args.json)


if __name__ == "__main__":
    main()

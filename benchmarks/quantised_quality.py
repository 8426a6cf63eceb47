"""What quantised weights change of what a model predicts, in every format and by every way to round.

    python -m benchmarks.quantised_quality [tiny_sdar tiny_llada] [--per-task 10] [--count 32] [--markdown FILE]

Of each held-out prompt two steps are forwarded: the first, whose response is masked throughout, and one in which every
other token of what the model answers is there. Of the rows that are masked: KL(weights as they are || quantised ones),
in nats, and the share of rows whose most probable token is another one; open text apart from tasks, which these models
nearly solve. Calibrated weights were searched on `--count` other prompts of the tasks, and where it says so on `--text`
other ones of open text besides.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import dgraph
from benchmarks.tables import Cell, Report
from dgraph.cache.store import open_store
from dgraph.cli.calibrate import prompts_of
from dgraph.compiler.base_graph import Weights, graph_of_model, quantising
from dgraph.compiler.saving import save_quantised
from dgraph.evaluate.calibrate import encoded, first_step, response_length
from dgraph.evaluate.gptq import gptq_for
from dgraph.evaluate.inputs import inputs_for
from dgraph.evaluate.questions import OPEN, choose, stored
from dgraph.evaluate.scales import scales_for
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.regions import RegionCompiler
from dgraph.passes import PackRows, QuantizeWeights
from dgraph.passes.manager import run_passes

PLAIN: dict[str, Weights] = {
    **{kind: kind for kind in ("fp8", "int8", "int4", "w8a8-fp8", "w8a8-int8")},
    **{
        f"w8a8-{kind}, head and embeddings": QuantizeWeights(kind, activations=True, lm_head=True, embeddings=True)
        for kind in ("fp8", "int8")
    },
}
CALIBRATED = (
    "int4, awq",
    "int4, awq, text too",
    "int4, gptq",
    "int4, gptq, text too",
    "int4 with zeros",
    "int4 with zeros, gptq, text too",
)
COLUMNS = ["weights", "KL, tasks", "KL, text", "other tokens, tasks", "other tokens, text"]
Step = tuple[list[int], list[bool]]
"""Ids of a prompt and a response, and which of them are predicted."""


@torch.no_grad()
def predictions(model: str, weights: Weights, steps: Sequence[Step]) -> list[Tensor]:
    """f32[predicted, V] of each step: log-probabilities of the rows that are masked."""
    found = dgraph.load(model)
    graph = graph_of_model(found, open_store(), quantising(weights)).copy()
    run_passes(graph, [PackRows()])
    program = LoweredProgram(graph, RegionCompiler("eager"), Buckets.of("exact"))
    made = []
    for ids, masked in steps:
        masks = response_length(found.spec)
        inputs = first_step(found.spec, ids[: len(ids) - masks], masks, graph.device)
        inputs["input_ids"] = torch.tensor(ids)
        logits = program(inputs, len(ids)).outputs["logits"]
        made.append(logits[torch.tensor(masked)].float().log_softmax(-1))
    return made


def steps_of(model: str, prompts: Sequence[str]) -> list[Step]:
    """Two steps of each prompt."""
    found = dgraph.load(model)
    spec, masks = found.spec, response_length(found.spec)
    run = dgraph.optimize(found, "dense", backend="eager", artifacts=False)
    answers = run.generate(list(prompts), max_new_tokens=masks, max_batch=16).token_ids
    steps = []
    for prompt, answer in zip(encoded(found, prompts), answers, strict=True):
        told = [token if i % 2 and token != spec.mask_id else spec.mask_id for i, token in enumerate(answer[:masks])]
        told += [spec.mask_id] * (masks - len(told))
        for response in ([spec.mask_id] * masks, told):
            steps.append(([*prompt, *response], [False] * len(prompt) + [token == spec.mask_id for token in response]))
    return steps


def compared(exact: Sequence[Tensor], other: Sequence[Tensor]) -> tuple[float, float]:
    """The mean divergence in nats, and the share of rows with another first token."""
    one, two = torch.cat(list(exact)), torch.cat(list(other))
    divergence = (one.exp() * (one - two)).sum(-1).mean()
    return float(divergence), float((one.argmax(-1) != two.argmax(-1)).float().mean())


def written(model: str, arm: str, prompts: Sequence[str], folder: Path) -> str:
    """A checkpoint of int4 weights as an arm has them."""
    step = QuantizeWeights("int4", zeros="zeros" in arm)
    inputs = inputs_for(model, prompts, step) if "," in arm else None
    folds = scales_for(inputs) if inputs is not None and "awq" in arm else ()
    rounded = gptq_for(inputs) if inputs is not None and "gptq" in arm else {}
    return str(save_quantised(model, folder / arm.replace(" ", "-"), step, folds=folds, rounded=rounded).folder)


def main() -> None:
    """Print one table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["tiny_sdar", "tiny_llada"])
    parser.add_argument("--per-task", type=int, default=10, help="held-out prompts of each task, and of open text")
    parser.add_argument("--count", type=int, default=32, help="prompts of the tasks to calibrate on")
    parser.add_argument("--text", type=int, default=16, help="prompts of open text to calibrate on besides")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = Report("What quantised weights predict")
    for model in args.models:
        questions = choose(stored(model), [*{q.task for q in stored(model)}], args.per_task)
        texts = [q.prompt for q in stored(model) if q.task == OPEN]
        texts = [prompt for prompt in dict.fromkeys(texts) if prompt not in {q.prompt for q in questions}][: args.text]
        groups = [[q.prompt for q in questions if (q.task == OPEN) is text] for text in (False, True)]
        steps = [steps_of(model, prompts) for prompts in groups]
        exact = [predictions(model, None, some) for some in steps]
        lines: list[list[Cell]] = []
        with tempfile.TemporaryDirectory() as folder:
            for arm in (*PLAIN, *CALIBRATED):
                name, weights = model, PLAIN.get(arm)
                if weights is None:
                    prompts = [*prompts_of(model, args.count, 0), *(texts if "text" in arm else [])]
                    name = written(model, arm, prompts, Path(folder))
                found = [
                    compared(one, predictions(name, weights, some)) for one, some in zip(exact, steps, strict=True)
                ]
                lines.append([arm, *(f"{kl:.2e}" for kl, _ in found), *(f"{100 * o:.2f} %" for _, o in found)])
                print(lines[-1], flush=True)
        rows = [sum(len(step) for step in some) for some in exact]
        note = f"{len(groups[0])} prompts of tasks, {len(groups[1])} of open text: {rows[0]} and {rows[1]} rows. "
        note += f"Calibrated on {args.count} prompts of tasks, and {len(texts)} of open text."
        report.table(model, COLUMNS, lines, note)
        report.write(args.markdown, args.json)


if __name__ == "__main__":
    main()

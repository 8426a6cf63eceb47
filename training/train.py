"""Train a tiny model: next-token prediction first, then diffusion, on tasks and open text.

    python -m training.corpus CORPUS
    python -m training.train --corpus CORPUS --phase ar --out AR
    python -m training.train --corpus CORPUS --phase diffusion --init AR --out OUT

`--family` says which: "sdar" (block diffusion) or "llada" (full bidirectional masked diffusion, whose retrieval task
grows from 15 to 62 pairs, a prompt of 512 tokens). Weights are kept in fp32 and computed in bf16 by autocast. Batches
depend on the seed, the stage and the step in it alone. Without `--phase` both phases run in one go and OUT holds the
last phase's weights.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader

from dgraph.models.tasks import TASKS, held_out

from . import checkpoint, corpus
from . import tokenizer as bpe
from .data import Batch, Layout, Mixture
from .evaluate import evaluate, run_examples, text_examples
from .masked_diffusion import masked_diffusion
from .model import SHAPES, TinyModel
from .objective import Inputs, block_diffusion, next_token
from .trainer import LogLine, Stage, Trainer, run_phase

STAGES = {"sdar": (Stage(16),), "llada": (Stage(15, 0.45), Stage(30, 0.65), Stage(62))}
"""Retrieval by family: about 128, 256 and 512 tokens of pairs at the end of each stage's range."""
ROWS = {"sdar": 256, "llada": 112}
LENGTHS = {"sdar": 512, "llada": 1152}
"""Packed rows in a batch and tokens in a row."""
LIMITS = {"sdar": 512, "llada": 576}
"""Tokens in the longest document."""


def main() -> None:
    args = _arguments()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # batches are made in worker processes
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    passages, held_out_passages = corpus.read(args.corpus)
    if args.init:
        model = checkpoint.read(args.init, device=args.device)
    else:
        model = TinyModel(SHAPES[args.family]).to(args.device)
    source = args.tokenizer or args.init
    tokenizer = bpe.load(source) if source else bpe.train(passages, model.config.vocab_size, seed=args.seed)
    bpe.save(tokenizer, args.out)
    if args.device == "cuda" and not args.no_compile:
        for layer in model.model.layers:
            layer.compile(fullgraph=True, dynamic=False)

    with open(args.out / "log.jsonl", "a") as file:

        def log(line: LogLine) -> None:
            print(line, flush=True)
            file.write(json.dumps(line) + "\n")
            file.flush()

        settings = {k: str(v) for k, v in vars(args).items()}
        log({"parameters": sum(p.numel() for p in model.parameters()), **settings})
        for phase in ("ar", "diffusion") if args.phase == "both" else (args.phase,):
            train_phase(phase, model, tokenizer, passages, args, log)
        if args.phase != "ar":
            text = text_examples(held_out_passages, min(100, args.count))
            report = evaluate(_frozen(model), tokenizer, text, args.count, 0.9)
            report |= {"dtype": "bfloat16", "device": args.device}
            log(report)
            (args.out / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n")


def train_phase(
    phase: str,
    model: TinyModel,
    tokenizer: Tokenizer,
    passages: list[str],
    args: argparse.Namespace,
    log: Callable[[LogLine], None],
) -> None:
    """Run the phase "ar" or "diffusion" on `model` and leave its checkpoint in `args.out`."""
    ar, family = phase == "ar", model.config.family
    steps, minutes = (args.ar_steps, args.ar_minutes) if ar else (args.diffusion_steps, args.diffusion_minutes)
    seed = args.seed * 2 + (not ar)
    peak, final = (args.ar_lr, 0.2) if ar else (args.diffusion_lr, 0.0)
    compiled = args.device == "cuda" and not args.no_compile
    trainer = Trainer(model, steps, peak, final, args.dense, compiled, minutes=minutes)
    generator = torch.Generator(args.device).manual_seed(seed)

    def batches_of(number: int, stage: Stage) -> Iterable[Batch]:
        layout = Layout(args.limit, stage.pairs, regions=family == "llada" and not ar)
        left = steps - trainer.done
        data = Mixture(tokenizer, passages, args.rows, args.length, left, seed + 1000 * number, layout)
        return DataLoader(data, batch_size=None, num_workers=args.workers)

    def inputs_of(batch: Batch) -> Inputs:
        if ar:
            return next_token(batch)
        if family == "llada":
            return masked_diffusion(batch, generator)
        return block_diffusion(batch, args.noisy_blocks, generator)

    def probe() -> LogLine:
        frozen = _frozen(model)
        return {t: run_examples(frozen, tokenizer, held_out(t, 64, 1))["exact_match"] for t in TASKS}

    save = partial(checkpoint.write, model, args.out)
    run_phase(trainer, STAGES[family], batches_of, inputs_of, log, probe, 0 if ar else args.probe_every, save)


def _frozen(model: TinyModel) -> TinyModel:
    """A bf16 copy of the model as a checkpoint would hold it."""
    copy = TinyModel(model.config).to(model.lm_head.weight.device, torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    return copy.eval()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", choices=list(SHAPES), default="sdar")
    parser.add_argument("--corpus", type=Path, required=True, help="folder made by training.corpus")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="checkpoint folder to go on from")
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer; else that of --init, or a new one")
    parser.add_argument("--phase", choices=["ar", "diffusion", "both"], default="both")
    parser.add_argument("--ar-steps", type=int, default=5000)
    parser.add_argument("--diffusion-steps", type=int, default=5000)
    parser.add_argument("--ar-minutes", type=float, default=60.0, help="the phase ends then at the latest")
    parser.add_argument("--diffusion-minutes", type=float, default=60.0, help="the phase ends then at the latest")
    parser.add_argument("--ar-lr", type=float, default=2e-3)
    parser.add_argument("--diffusion-lr", type=float, default=2e-3)
    parser.add_argument("--rows", type=int, help="packed rows in a batch")
    parser.add_argument("--length", type=int, help="tokens in a row")
    parser.add_argument("--limit", type=int, help="tokens in the longest document")
    parser.add_argument("--noisy-blocks", type=int, default=12, help="blocks learnt per row and step (sdar)")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--probe-every", type=int, default=1000, help="steps of diffusion between short evaluations")
    parser.add_argument("--count", type=int, default=200, help="held-out prompts per task in the evaluation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dense", action="store_true", help="dense masks instead of FlexAttention")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.rows = args.rows or ROWS[args.family]
    args.length = args.length or LENGTHS[args.family]
    args.limit = args.limit or LIMITS[args.family]
    return args


if __name__ == "__main__":
    main()

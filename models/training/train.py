"""Train a tiny SDAR: next-token prediction first, then block diffusion, on tasks and open text.

    python -m dgraph.models.training.corpus CORPUS
    python -m dgraph.models.training.train --corpus CORPUS --phase ar --out AR
    python -m dgraph.models.training.train --corpus CORPUS --phase diffusion --init AR --out OUT

Weights are kept in fp32 and computed in bf16 by autocast. Batches depend on the seed and the step alone. Without
`--phase` both phases run in one go and OUT holds the last phase's weights.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.data import DataLoader

from . import checkpoint, corpus
from . import tokenizer as bpe
from .data import KIND_NAMES, Batch, Mixture
from .evaluate import evaluate, run_examples, text_examples
from .model import Mask, TinyConfig, TinyModel
from .objective import Inputs, block_diffusion, dense_mask, next_token, token_losses
from .tasks import TASKS, held_out

LogLine = dict[str, Any]


class Trainer:
    """One phase's optimizer and schedule: the rate rises to `peak` over `warmup` steps, then falls to final * peak.

    `dense` asks for dense masks (any device), else FlexAttention's; `compiled` compiles the loss and the masks.
    """

    def __init__(
        self,
        model: TinyModel,
        steps: int,
        peak: float,
        final: float,
        dense: bool,
        compiled: bool,
        warmup: int = 100,
    ) -> None:
        matrices = [p for p in model.parameters() if p.dim() == 2]
        vectors = [p for p in model.parameters() if p.dim() != 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.model, self.steps, self.dense = model, steps, dense
        self.device = model.lm_head.weight.device
        cuda = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), fused=cuda)
        warmup = min(warmup, max(1, steps // 10))

        def rate(step: int) -> float:
            return (step + 1) / warmup if step < warmup else 1 - (1 - final) * (step - warmup) / max(1, steps - warmup)

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)
        self.block_mask: Callable[..., Any] = torch.compile(create_block_mask) if compiled else create_block_mask
        self.losses: Callable[..., Tensor] = torch.compile(token_losses) if compiled else token_losses

    def mask(self, inputs: Inputs) -> Mask:
        """What the rows of `inputs` see, in the form the chosen kernel takes."""
        rows, length = inputs.input_ids.shape
        if self.dense:
            return dense_mask(inputs.visible, rows, length, self.device)
        return self.block_mask(inputs.visible, rows, None, length, length, device=self.device)

    def step(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """One update; the loss before it, and the unweighted loss per row [R, P]."""
        with torch.autocast(self.device.type, torch.bfloat16):
            hidden = self.model.hidden(inputs.input_ids, inputs.positions, self.mask(inputs))
            losses = self.losses(hidden, self.model.lm_head.weight, inputs.targets)
        loss = (losses * inputs.weights).sum() / inputs.scale
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        return loss.detach(), losses.detach()


def run_phase(
    trainer: Trainer,
    batches: DataLoader[Batch],
    inputs_of: Callable[[Batch], Inputs],
    log: Callable[[LogLine], None],
    probe: Callable[[], LogLine],
    probe_every: int,
    minutes: float,
) -> None:
    """Run a phase's steps; log the mean loss per task every 50 steps and `probe` every `probe_every`.

    Raises TimeoutError after `minutes`: a schedule cut short would leave a model that says nothing.
    """
    began = last = time.perf_counter()
    for step, batch in enumerate(batches, 1):
        inputs = inputs_of(batch.to(trainer.device))
        loss, losses = trainer.step(inputs)
        if step % 50 == 0 or step <= 3 or step == trainer.steps:
            weights = (inputs.weights > 0).float()
            means = {
                name: round(float((losses * at).sum() / at.sum().clamp_min(1)), 4)
                for number, name in enumerate(KIND_NAMES)
                for at in [weights * (inputs.tasks == number)]
            }
            now = time.perf_counter()
            log({"step": step, "loss": round(float(loss), 4), **means, "seconds": round(now - began, 1)})
            if now - began > 60 * minutes:
                raise TimeoutError(
                    f"the phase reached {minutes} minutes at step {step} of {trainer.steps}; ask for fewer steps"
                )
            last = now
        if probe_every and step % probe_every == 0 and step < trainer.steps:
            log({"step": step, **probe()})
    log({"phase seconds": round(last - began, 1)})


def main() -> None:
    args = _arguments()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # batches are made in worker processes
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    passages, held_out_passages = corpus.read(args.corpus)
    if args.init:
        model = checkpoint.read(args.init, device=args.device)
        tokenizer = bpe.load(args.init)
    else:
        tokenizer = bpe.train(passages, seed=args.seed)
        model = TinyModel(TinyConfig(vocab_size=tokenizer.get_vocab_size())).to(args.device)
    bpe.save(tokenizer, args.out)
    text = text_examples(held_out_passages, min(100, args.count))
    compiled = args.device == "cuda" and not args.no_compile
    if compiled:
        for layer in model.model.layers:
            layer.compile(fullgraph=True, dynamic=False)

    with open(args.out / "log.jsonl", "a") as file:

        def log(line: LogLine) -> None:
            print(line, flush=True)
            file.write(json.dumps(line) + "\n")
            file.flush()

        log(
            {
                "parameters": sum(p.numel() for p in model.parameters()),
                **{k: str(v) for k, v in vars(args).items()},
            }
        )
        for phase in ("ar", "diffusion") if args.phase == "both" else (args.phase,):
            steps = args.ar_steps if phase == "ar" else args.diffusion_steps
            seed = args.seed * 2 + (phase == "diffusion")
            data = Mixture(tokenizer, passages, args.rows, args.length, steps, seed)
            loader: DataLoader[Batch] = DataLoader(data, batch_size=None, num_workers=args.workers)
            peak, final = (args.ar_lr, 0.2) if phase == "ar" else (args.diffusion_lr, 0.0)
            trainer = Trainer(model, steps, peak, final, args.dense, compiled)
            generator = torch.Generator(args.device).manual_seed(seed)

            def inputs_of(batch: Batch, phase: str = phase, generator: torch.Generator = generator) -> Inputs:
                if phase == "ar":
                    return next_token(batch)
                return block_diffusion(batch, args.noisy_blocks, generator)

            def probe() -> LogLine:
                frozen = _frozen(model)
                return {t: run_examples(frozen, tokenizer, held_out(t, 64, 1))["exact_match"] for t in TASKS}

            every = args.probe_every if phase == "diffusion" else 0
            run_phase(trainer, loader, inputs_of, log, probe, every, args.minutes)
            checkpoint.write(model, args.out)
        if args.phase != "ar":
            report = evaluate(_frozen(model), tokenizer, text, args.count, 0.9)
            log(report)
            (args.out / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n")


def _frozen(model: TinyModel) -> TinyModel:
    """A bf16 copy of the model as a checkpoint would hold it."""
    copy = TinyModel(model.config).to(model.lm_head.weight.device, torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    return copy.eval()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="folder made by dgraph.models.training.corpus")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="checkpoint folder to go on from")
    parser.add_argument("--phase", choices=["ar", "diffusion", "both"], default="both")
    parser.add_argument("--ar-steps", type=int, default=5000)
    parser.add_argument("--diffusion-steps", type=int, default=5000)
    parser.add_argument("--ar-lr", type=float, default=2e-3)
    parser.add_argument("--diffusion-lr", type=float, default=2e-3)
    parser.add_argument("--rows", type=int, default=256, help="packed rows in a batch")
    parser.add_argument("--length", type=int, default=512, help="tokens in a row")
    parser.add_argument("--noisy-blocks", type=int, default=12, help="blocks learnt per row and step")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--minutes", type=float, default=60.0, help="a phase that takes longer is an error")
    parser.add_argument("--probe-every", type=int, default=1000)
    parser.add_argument("--count", type=int, default=200, help="held-out prompts per task in the evaluation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dense", action="store_true", help="dense masks instead of FlexAttention")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()

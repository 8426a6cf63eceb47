"""An independent block-diffusion decoder in plain PyTorch, and the figures it measures.

    python -m dgraph.models.training.evaluate CHECKPOINT --out FILE

Open text comes from a corpus folder, or else from the checkpoint's own held_out.jsonl.

A block of masks is denoised step by step: one forward of the block over the cached clean blocks, then the most
confident masked rows are committed. A finished block is forwarded once more, clean, to fix its keys and values.
Exact match and tokens per step are reported per task, tokens per step and a likelihood bound on open text.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from . import checkpoint, corpus
from .data import BLOCK, Batch, document, pack, split_passage
from .model import KeyValueCache, TinyModel
from .objective import block_diffusion, dense_mask, token_losses
from .tasks import TASKS, Example, held_out, matches, read_examples, write_examples
from .tokenizer import EOS_ID, MASK_ID, encode_prompt, load


@dataclass
class Decoded:
    """One sequence's response: ids up to its first end token (left out), and what decoding it took.

    steps: denoising forwards; committed: tokens they committed, end padding too; output: tokens a reader gets,
    the first end token included; blocks: finished blocks.
    """

    ids: list[int] = field(default_factory=list)
    steps: int = 0
    committed: int = 0
    output: int = 0
    blocks: int = 0


@torch.inference_mode()
def decode(
    model: TinyModel,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    threshold: float | None = 0.9,
) -> list[Decoded]:
    """Greedy block-diffusion decoding of prompts of different lengths, all in one batch.

    A step commits every masked row whose confidence (the probability of its most likely token) exceeds
    `threshold`, at least the most confident one; `threshold` None commits exactly one row a step.
    """
    device = model.lm_head.weight.device
    lengths = [len(prompt) for prompt in prompts]
    capacity = -(-(max(lengths) + max_new_tokens) // BLOCK) * BLOCK
    tokens = torch.full((len(prompts), capacity), MASK_ID, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt, device=device)
    cache = KeyValueCache(model.config, len(prompts), capacity, model.lm_head.weight)
    start = torch.tensor([length // BLOCK * BLOCK for length in lengths], device=device)
    end = torch.tensor(lengths, device=device) + max_new_tokens

    def forward(rows: Tensor, positions: Tensor) -> Tensor:
        """Hidden states of `rows` at `positions` [rows, T], whose keys and values enter the cache."""
        limit = (positions // BLOCK + 1) * BLOCK
        length = int(limit.max())
        visible = torch.arange(length, device=device) < limit[:, :, None]
        view = cache.select(rows, length)
        return model.hidden(tokens[rows[:, None], positions], positions, visible[:, None], view)

    everyone = torch.arange(len(prompts), device=device)
    if prefix := int(start.max()):
        forward(everyone, torch.arange(prefix, device=device).expand(len(prompts), -1))
    results = [Decoded() for _ in prompts]
    offsets = torch.arange(BLOCK, device=device)
    active = everyone
    while len(active):
        positions = start[active, None] + offsets
        masked = tokens[active[:, None], positions] == MASK_ID
        hidden = forward(active, positions)
        confidence, choice = model.lm_head(hidden).float().softmax(-1).max(-1)
        confidence = confidence.masked_fill(~masked, -1.0)
        commit = torch.zeros_like(masked) if threshold is None else confidence > threshold
        commit.scatter_(1, confidence.argmax(1, keepdim=True), True)
        commit &= masked
        tokens[active[:, None], positions] = torch.where(commit, choice, tokens[active[:, None], positions])
        for row, number in zip(active.tolist(), commit.sum(1).tolist(), strict=True):
            results[row].steps += 1
            results[row].committed += number
        complete = ~(masked & ~commit).any(1)
        if not complete.any():
            continue
        finished = active[complete]
        stopped = (tokens[finished[:, None], positions[complete]] == EOS_ID).any(1)
        stopped |= start[finished] + BLOCK >= end[finished]
        for row in finished.tolist():
            results[row].blocks += 1
        if len(going_on := finished[~stopped]):
            forward(going_on, start[going_on, None] + offsets)
            start[going_on] += BLOCK
        active = active[~torch.isin(active, finished[stopped])]
    for row, result in enumerate(results):
        response = tokens[row, lengths[row] : lengths[row] + max_new_tokens].tolist()
        result.ids = response[: response.index(EOS_ID)] if EOS_ID in response else response
        result.output = min(len(result.ids) + 1, max_new_tokens)
    return results


def summarize(results: Iterable[Decoded]) -> dict[str, float]:
    """Sums over sequences: tokens committed per step, tokens output per step, steps per block."""
    results = list(results)
    steps = sum(r.steps for r in results)
    return {
        "sequences": len(results),
        "steps": steps,
        "committed_per_step": round(sum(r.committed for r in results) / steps, 3),
        "output_per_step": round(sum(r.output for r in results) / steps, 3),
        "steps_per_block": round(steps / sum(r.blocks for r in results), 3),
    }


def run_examples(
    model: TinyModel,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    max_new_tokens: int = 96,
    threshold: float | None = 0.9,
) -> dict[str, float]:
    """Exact match (per cent) and decode dynamics on examples of one task."""
    prompts = [encode_prompt(tokenizer, example.prompt) for example in examples]
    results = decode(model, prompts, max_new_tokens, threshold)
    right = sum(matches(e, tokenizer.decode(r.ids)) for e, r in zip(examples, results, strict=True))
    return {"exact_match": round(100 * right / len(examples), 2), **summarize(results)}


def text_examples(passages: Iterable[str], count: int, shortest: int = 600) -> list[Example]:
    """Continuation examples from held-out passages of at least `shortest` characters, split at a line."""
    rng = random.Random("text examples")
    chosen = [passage for passage in passages if len(passage) >= shortest][:count]
    return [Example("text", *split_passage(passage, rng)) for passage in chosen]


@torch.inference_mode()
def text_bound(
    model: TinyModel, tokenizer: Tokenizer, examples: Sequence[Example], length: int = 512, draws: int = 4
) -> float:
    """Upper bound of the nats per response token (its end counted, padding after it not).

    Estimated with `draws` random maskings of every block; a passage is cut at `length` tokens.
    """
    device = model.lm_head.weight.device
    documents = []
    for example in examples:
        answer = tokenizer.encode(example.answer, add_special_tokens=False).ids
        documents.append(document(encode_prompt(tokenizer, example.prompt), answer, "text", length))
    generator = torch.Generator(device).manual_seed(0)
    total = weight = 0.0
    for at in range(0, len(documents), 16):
        group = documents[at : at + 16]
        arrays = pack(group, len(group), length)
        batch = Batch(**{name: torch.from_numpy(array) for name, array in arrays.items()}).to(device)
        for _ in range(draws):
            inputs = block_diffusion(batch, length // BLOCK, generator, padding_weight=0.0)
            rows, width = inputs.input_ids.shape
            mask = dense_mask(inputs.visible, rows, width, device)
            hidden = model.hidden(inputs.input_ids, inputs.positions, mask)
            losses = token_losses(hidden, model.lm_head.weight, inputs.targets)
            total += float((losses * inputs.weights).sum())
            weight += float(inputs.scale)
    return total / weight


def evaluate(
    model: TinyModel,
    tokenizer: Tokenizer,
    text: Sequence[Example],
    count: int,
    threshold: float,
    seed: int = 0,
) -> dict[str, Any]:
    """All figures: `count` held-out prompts per task and the given text examples."""
    report: dict[str, Any] = {"threshold": threshold, "block_length": BLOCK, "tasks": {}}
    for task in TASKS:
        report["tasks"][task] = run_examples(model, tokenizer, held_out(task, count, seed), threshold=threshold)
    one = run_examples(model, tokenizer, held_out("math", count, seed), threshold=None)
    report["math_one_token_a_step"] = one
    if text:
        prompts = [encode_prompt(tokenizer, example.prompt)[:384] for example in text]
        report["text"] = summarize(decode(model, prompts, 128, threshold))
        report["text"]["nats_per_token_bound"] = round(text_bound(model, tokenizer, text), 3)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--corpus", type=Path, help="folder made by dgraph.models.training.corpus, for open text")
    parser.add_argument("--count", type=int, default=200, help="held-out prompts per task")
    parser.add_argument("--text-count", type=int, default=100)
    parser.add_argument("--threshold", type=float, default=0.9)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--write-held-out",
        type=Path,
        help="only write 100 held-out examples per task and 50 of the standard library here",
    )
    args = parser.parse_args()
    if args.write_held_out:
        if not args.corpus:
            parser.error("--write-held-out needs --corpus for its open text")
        tasks = [example for task in TASKS for example in held_out(task, 100)]
        text = text_examples(corpus.read(args.corpus, "python")[1], 50)
        write_examples(args.write_held_out, [*tasks, *text])
        return
    stored = args.checkpoint / "held_out.jsonl"
    if args.corpus:
        text = text_examples(corpus.read(args.corpus)[1], args.text_count)
    else:
        text = [e for e in read_examples(stored) if e.task == "text"] if stored.exists() else []
    model = checkpoint.read(args.checkpoint, getattr(torch, args.dtype), args.device).eval()
    report = evaluate(model, load(args.checkpoint), text, args.count, args.threshold)
    report["dtype"], report["device"] = args.dtype, args.device
    rendered = json.dumps(report, indent=1)
    print(rendered)
    if args.out:
        args.out.write_text(rendered + "\n")


if __name__ == "__main__":
    main()

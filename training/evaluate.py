"""The figures of a tiny model, measured with the plain decoders of `decode`.

    python -m training.evaluate CHECKPOINT --out FILE

Open text comes from a corpus folder, or else from the checkpoint's own held_out.jsonl.

Exact match and tokens per step are reported per task, with a confidence threshold and with one token a step;
retrieval also by the prompt's length and the needle's depth; tokens per step and a likelihood bound on open text.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from dgraph.models.tasks import TASKS, Example, held_out, matches, needle, read_examples, write_examples

from . import checkpoint, corpus
from .data import BLOCK, RESPONSE_LENGTH, Batch, document, pack, region_document, split_passage, tail
from .decode import Decoded, decode, summarize
from .masked_diffusion import masked_diffusion
from .model import TinyModel
from .objective import Noise, block_diffusion, dense_mask, token_losses
from .tokenizer import encode_prompt, load

NEW_TOKENS = {"sdar": 96, "llada": RESPONSE_LENGTH}
"""Length of a response to a task by family."""
TEXT_PROMPT_TOKENS, TEXT_TOKENS = 384, 128
"""Longest prompt and length of the response on open text."""
NEEDLE_LENGTHS = {"sdar": (64, 128), "llada": (128, 256, 384, 512)}
"""Prompt tokens of the retrieval table by family: the lengths that it was trained on."""
DEPTHS = 5
TASK_NEEDLE_LENGTH = 128
"""Prompt tokens of the retrieval task's longest prompts; longer ones of the table are stored besides."""
GROUP = 128
"""Sequences decoded at once."""


def decode_all(
    model: TinyModel, prompts: Sequence[list[int]], new_tokens: int, threshold: float | None
) -> list[Decoded]:
    """`decode` in groups of sequences of like length, so that memory is bounded; results in the given order."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found: dict[int, Decoded] = {}
    for at in range(0, len(order), GROUP):
        group = order[at : at + GROUP]
        found |= zip(group, decode(model, [prompts[i] for i in group], new_tokens, threshold), strict=True)
    return [found[i] for i in range(len(prompts))]


def run_examples(
    model: TinyModel,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    max_new_tokens: int | None = None,
    threshold: float | None = 0.9,
) -> dict[str, float]:
    """Exact match (per cent) and decode dynamics on examples of one task."""
    prompts = [encode_prompt(tokenizer, example.prompt) for example in examples]
    results = decode_all(model, prompts, max_new_tokens or NEW_TOKENS[model.config.family], threshold)
    right = sum(matches(e, tokenizer.decode(r.ids)) for e, r in zip(examples, results, strict=True))
    return {"exact_match": round(100 * right / len(examples), 2), **summarize(results)}


def pairs_within(tokenizer: Tokenizer, length: int, draws: int = 32) -> int:
    """The number of pairs of retrieval prompts of about `length` tokens: none of `draws` prompts is longer."""
    rng = random.Random(f"pairs {length}")
    count = 2
    while max(len(encode_prompt(tokenizer, needle(rng, count + 1, count + 1).prompt)) for _ in range(draws)) <= length:
        count += 1
    return count


def needle_cell(tokenizer: Tokenizer, length: int, part: int, count: int) -> list[Example]:
    """Held-out retrieval prompts of about `length` tokens, the needle in fifth `part` of their depth, from 0."""
    pairs, depth = pairs_within(tokenizer, length), (part / DEPTHS, (part + 1) / DEPTHS)
    return held_out("needle", count, seed=length * DEPTHS + part, fewest=pairs, most=pairs, depth=depth)


def needle_table(
    model: TinyModel, tokenizer: Tokenizer, count: int, threshold: float | None = 0.9
) -> dict[str, list[float]]:
    """Exact match (per cent) of retrieval: prompt tokens -> one figure per fifth of the depth, first pairs first."""
    table = {}
    for length in NEEDLE_LENGTHS[model.config.family]:
        cells = (needle_cell(tokenizer, length, part, count) for part in range(DEPTHS))
        table[str(length)] = [
            run_examples(model, tokenizer, cell, threshold=threshold)["exact_match"] for cell in cells
        ]
    return table


def stored_examples(family: str, tokenizer: Tokenizer, passages: Iterable[str]) -> list[Example]:
    """Examples of a checkpoint's held_out.jsonl: 100 prompts per task, 5 of every long cell of the table, 50 texts."""
    tasks = [example for task in TASKS for example in held_out(task, 100)]
    lengths = [length for length in NEEDLE_LENGTHS[family] if length > TASK_NEEDLE_LENGTH]
    long = [e for length in lengths for part in range(DEPTHS) for e in needle_cell(tokenizer, length, part, 5)]
    return [*tasks, *long, *text_examples(passages, 50)]


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

    Estimated with `draws` random maskings of every block, or of the first 128 response tokens of a full
    bidirectional model; a passage is cut at `length` tokens.
    """
    whole = model.config.family == "llada"
    device = model.lm_head.weight.device
    documents = []
    for example in examples:
        prompt = encode_prompt(tokenizer, example.prompt)
        answer = tokenizer.encode(example.answer, add_special_tokens=False).ids
        if whole:
            documents.append(region_document(tail(prompt, length - TEXT_TOKENS), answer, "text", TEXT_TOKENS))
        else:
            documents.append(document(prompt, answer, "text", length))
    generator = torch.Generator(device).manual_seed(0)
    total, weight, quiet = 0.0, 0.0, Noise(padding_weight=0.0, blockwise=0.0)
    for at in range(0, len(documents), 16):
        group = documents[at : at + 16]
        arrays = pack(group, len(group), length)
        batch = Batch(**{name: torch.from_numpy(array) for name, array in arrays.items()}).to(device)
        for _ in range(draws):
            if whole:
                inputs = masked_diffusion(batch, generator, quiet)
            else:
                inputs = block_diffusion(batch, length // BLOCK, generator, quiet)
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
    """All figures: `count` held-out prompts per task, a quarter of it per cell of the table, and the given text."""
    examples = {task: held_out(task, count, seed) for task in TASKS}
    report: dict[str, Any] = {"threshold": threshold, "block_length": BLOCK}
    report["new_tokens"] = NEW_TOKENS[model.config.family]
    for name, rule in (("tasks", threshold), ("tasks_one_token_a_step", None)):
        report[name] = {task: run_examples(model, tokenizer, chosen, None, rule) for task, chosen in examples.items()}
    report["needle_by_tokens_and_depth"] = needle_table(model, tokenizer, max(1, count // 4), threshold)
    if text:
        prompts = [tail(encode_prompt(tokenizer, example.prompt), TEXT_PROMPT_TOKENS) for example in text]
        report["text"] = summarize(decode_all(model, prompts, TEXT_TOKENS, threshold))
        report["text"]["nats_per_token_bound"] = round(text_bound(model, tokenizer, text), 3)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--corpus", type=Path, help="folder made by training.corpus, for open text")
    parser.add_argument("--count", type=int, default=200, help="held-out prompts per task")
    parser.add_argument("--text-count", type=int, default=100)
    parser.add_argument("--threshold", type=float, default=0.9)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--write-held-out",
        type=Path,
        help="only write the checkpoint's held-out examples here, its open text from the standard library",
    )
    args = parser.parse_args()
    if args.write_held_out:
        if not args.corpus:
            parser.error("--write-held-out needs --corpus for its open text")
        family, passages = checkpoint.read_config(args.checkpoint).family, corpus.read(args.corpus, "python")[1]
        write_examples(args.write_held_out, stored_examples(family, load(args.checkpoint), passages))
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

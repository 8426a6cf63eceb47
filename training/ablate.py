"""Ablation of the objectives that make a diffusion model of a causal one, at a size that a laptop trains.

    python -m training.ablate --out TABLE                               a few minutes on a CPU
    python -m training.ablate --base base --mask-token "<reponame>" --data gsm8k.jsonl --steps 2000 --rows 48 \
        --length 1024 --learnt 512 --rate 1e-3 --seeds 2 --only plain shift --out TABLE           on a GPU

Without `--base` a small random Llama learns the tasks of the embedded models causally first (OUT/base), and is asked
held-out ones after each conversion. Every arm is a run of `training.convert` in a folder of its own, so the same
command goes on where it was stopped. OUT/table.json holds the figures of the table.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import dgraph
from dgraph.errors import InputError
from dgraph.families import embedded
from dgraph.models.tasks import held_out, make, matches
from dgraph.models.tokenizer import read_tokenizer

from .adopted import Adopted
from .checkpoint import write_folder, write_json
from .conversion import Conversion, Settings, documents_of_files, load_base
from .convert import MODEL, Folder, train
from .objective import next_token
from .pairs import Passes, chat_document
from .trainer import Trainer

ARMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "1/t": {"by_rate": True},
    "complementary": {"complementary": True},
    "1/t, complementary": {"by_rate": True, "complementary": True},
    "shift": {"shift": 1},
    "prompts learnt": {"learn_prompts": True},
    "annealed blocks": {"anneal": 0.5},
    "shift, complementary": {"shift": 1, "complementary": True},
    "shift, annealed blocks": {"shift": 1, "anneal": 0.5},
    "complementary, annealed blocks": {"complementary": True, "anneal": 0.5},
    "shift, complementary, annealed blocks": {"shift": 1, "complementary": True, "anneal": 0.5},
    "low rank": {"rank": 8},
    "bidirectional": {"form": "bidirectional"},
    "bidirectional, 1/t": {"form": "bidirectional", "by_rate": True},
    "bidirectional, complementary": {"form": "bidirectional", "complementary": True},
    "bidirectional, shift": {"form": "bidirectional", "shift": 1},
    "bidirectional, prompts learnt": {"form": "bidirectional", "learn_prompts": True},
}
"""Settings that differ from those that all arms share, by the name of a line of the table."""
EASY = ("follow", "sort")
"""The tasks of the small base, which few steps suffice for."""
NEW_TOKENS = 64


@dataclass(frozen=True)
class Small:
    """Settings of the small base: a random Llama, and causal training on the tasks."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    examples: int = 4000
    steps: int = 1500
    rows: int = 8
    length: int = 128
    rate: float = 3e-3


def small_base(folder: Path, small: Small, seed: int = 0) -> None:
    """Train the small base and write it, with OUT/tasks.jsonl beside it; do nothing where it is already."""
    import transformers

    data = folder.parent / "tasks.jsonl"
    if (folder / "config.json").is_file():
        return
    rng = random.Random(seed)
    examples = [make(rng.choice(EASY), rng) for _ in range(small.examples)]
    lines = (json.dumps({"prompt": e.prompt, "response": e.answer}) + "\n" for e in examples)
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(lines), encoding="utf-8")
    tokenizer = read_tokenizer(embedded()["tiny_sdar"].folder)
    assert tokenizer is not None
    assert tokenizer.mask_id is not None
    config = transformers.LlamaConfig(
        vocab_size=2048,
        hidden_size=small.hidden,
        intermediate_size=3 * small.hidden,
        num_hidden_layers=small.layers,
        num_attention_heads=small.heads,
        num_key_value_heads=small.heads,
        max_position_embeddings=1024,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config)
    trainer = Trainer(Adopted(model), small.steps, small.rate, 0.0, True, False, autocast=torch.float32)
    documents = [chat_document(tokenizer.encode(e.prompt), tokenizer.encode_part(e.answer), eos_id=1) for e in examples]
    batches = Passes(documents, small.rows, small.length, seed)
    for step in range(small.steps):
        inputs = next_token(batches[step].to(trainer.device))
        loss, _ = trainer.step(inputs)
        if (step + 1) % 100 == 0:
            print(f"base: step {step + 1} of {small.steps}, loss {float(loss):.3f}", flush=True)
    described = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    tensors = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    tokenizer.save(folder)
    write_folder(folder, tensors, described, dtype=torch.float32)


def run(name: str, args: argparse.Namespace, common: Settings, seed: int) -> dict[str, Any]:
    """One line of the table: an arm with one seed, trained to its end unless it is, and measured."""
    settings = replace(common, **ARMS[name], seed=seed)
    base = load_base(args.base, args.mask_token, args.device)
    cuda = base.model.device.type == "cuda"
    autocast = torch.bfloat16 if cuda else torch.float32
    documents = documents_of_files(base, args.data, settings)
    conversion = Conversion(base, settings, documents, dense=not cuda, compiled=cuda, autocast=autocast)
    data = {str(path): path.stat().st_size for path in args.data}
    described = {"base": args.base, "mask_token": args.mask_token, **asdict(settings), "data": data}
    folder = Folder(args.out / f"{name.replace('/', ' per ').replace(',', '')} {seed}".replace(" ", "-"), described)
    train(conversion, folder, held_out_every=max(20, settings.steps // 5))
    last = folder.rows()[-1]
    line: dict[str, Any] = {"arm": name, "seed": seed, "form": settings.form, "steps": int(last["step"])}
    line |= {"held_out_loss": float(last["held_out"]), "seconds": float(last["seconds"])}
    return line | (ask(folder.path / MODEL, args.count, args.device) if args.ask else {})


def ask(model: Path, count: int, device: str) -> dict[str, Any]:
    """Exact match (per cent) on held-out tasks of the small base, decoded by dgraph at a threshold of 0.9."""
    examples = [example for task in EASY for example in held_out(task, count)]
    program = dgraph.optimize(model, "dense", backend="eager", device=device)
    result = program.generate([e.prompt for e in examples], max_new_tokens=NEW_TOKENS, threshold=0.9)
    right = sum(matches(e, text) for e, text in zip(examples, result.texts or (), strict=True))
    stats = result.stats
    steps, decoded = sum(stats.sequence_steps), sum(stats.sequence_decoded)
    return {"exact_match": round(100 * right / len(examples), 1), "tokens_per_step": round(decoded / steps, 2)}


def render(lines: Sequence[dict[str, Any]]) -> str:
    """The table in Markdown: means over seeds, and the range of them where there are several."""
    columns = ("held_out_loss", "exact_match", "tokens_per_step", "seconds")
    rows = ["| objective | form | seeds | held-out loss | exact match, % | tokens/step | seconds |"]
    rows.append("|---|---|---:|---:|---:|---:|---:|")
    for name in dict.fromkeys(line["arm"] for line in lines):
        chosen = [line for line in lines if line["arm"] == name]
        cells = [_cell([line[key] for line in chosen if line.get(key) is not None]) for key in columns]
        rows.append(f"| {name} | {chosen[0]['form']} | {len(chosen)} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean = f"{sum(values) / len(values):.3g}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3g} to {max(values):.3g})"


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    args.ask = args.base is None and args.count > 0
    began = time.monotonic()
    try:
        if args.base is None:
            small_base(args.out / "base", Small())
            args.base, args.data = str(args.out / "base"), [args.out / "tasks.jsonl"]
        names = ("steps", "rows", "length", "learnt", "rate")
        common = Settings(**{name: getattr(args, name) for name in names})
        table = args.out / "table.json"
        lines: list[dict[str, Any]] = json.loads(table.read_text(encoding="utf-8")) if table.is_file() else []
        for seed in range(args.seeds):
            for name in args.only or ARMS:
                if any(line["arm"] == name and line["seed"] == seed for line in lines):
                    continue
                lines.append(run(name, args, common, seed))
                write_json(table, lines)
                print(f"{time.monotonic() - began:.0f} s: {lines[-1]}", flush=True)
    except InputError as error:
        raise SystemExit(f"error: {error}") from None
    print(render(lines))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--base", help="a folder of a causal model, or base; else a small one is made")
    parser.add_argument("--mask-token", help="of the base")
    parser.add_argument("--data", type=Path, action="append", default=[], help="JSONL, with --base; may repeat")
    parser.add_argument("--only", nargs="+", choices=list(ARMS), help="these objectives")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--count", type=int, default=20, help="held-out prompts of each task, 0 for none")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in (("steps", 200), ("rows", 8), ("length", 128), ("learnt", 64), ("rate", 2e-3)):
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{default} by default")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()

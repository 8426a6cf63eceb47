"""Sparse KV caches at LLaDA-8B's shape with random weights: long prompts, and many sequences.

    python -m benchmarks.maskkv_speed --sections prompt --prompt 32768
    python -m benchmarks.maskkv_speed --sections batch --contexts 4096
    python -m benchmarks.maskkv_speed --layers 2 --prompt 256 --device cpu --backend eager

Every arm commits one token per step. Section "prompt": one sequence with a long prompt, against the original loop (see
`benchmarks.full_forward`, which says what that holds in memory). A step is timed from its beginning to that of the next
by events on the device, while nobody watches; its kind follows from the recipe's row plan. Milliseconds per token are
those of a whole response where it takes less than `--full` seconds, else the mean of each kind of step in the first
block, times how often a response has that kind. Section "batch": steps that reuse what is cached, and what they read
of it. Memory is torch's: all that is allocated at a time, the weights included.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dgraph
from benchmarks.full_forward import peak_bytes, reset_peak, seconds_per_step
from benchmarks.tables import Cell, Report
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.families import Model
from dgraph.lowering.program import Program, ProgramResult
from dgraph.models.shapes import random_model
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Apart
from dgraph.plans.view import View
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.requests import Request

PROMPT_ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "maskkv": ("maskkv", {"pairs": 256}),
    "maskkv+fast_dllm": ("maskkv+fast_dllm", {"pairs": 256}),
    "fast_dllm": ("fast_dllm", {"cache": "dual"}),
    "dllm_serve": ("dllm_serve", {"ratio": 0.5}),
}
BATCH_ARMS = ("dllm_serve", "fast_dllm")
KINDS = ("first", "prompt refresh", "response refresh", "adaptive", "reuse")
# What a CPU can run for a trial; only the numbers of heads and of layers say anything.
TINY = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 4}
TINY_VOCAB = {"vocab_size": 500, "mask_id": 499, "pad_id": 0}


def kind_of(plan: RowPlan, step: int, block: int) -> str:
    """The kind of a step of a sequence that decodes one token in each; "prompt refresh" forwards everything."""
    if step == 0:
        return "first"
    schedule, now = plan.schedule, View(step=torch.tensor([step]), block_step=torch.tensor([step % block]))
    if schedule.whole(now):
        return "prompt refresh"
    if isinstance(schedule, Apart):
        return "response refresh" if schedule.full(now) else "adaptive"
    return "reuse"


class Clock:
    """When each step began; on a GPU by events, which the host does not wait for."""

    def __init__(self, device: torch.device):
        self.device = device
        self.marks: list[Any] = []

    def mark(self) -> None:
        """A step begins here, or the last one ends."""
        if self.device.type != "cuda":
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def milliseconds(self) -> list[float]:
        """Of each step, to the beginning of the next."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        if self.device.type != "cuda":
            return [1e3 * (end - begin) for begin, end in pairs]
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) for begin, end in pairs]


class Timed:
    """A program that says when it is called."""

    def __init__(self, program: Program, clock: Clock):
        self._program, self._clock = program, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def __call__(self, inputs: Any, rows: int) -> ProgramResult:
        return self.bound(inputs)(rows)

    def bound(self, inputs: Any) -> Callable[[int], ProgramResult]:
        run = self._program.bound(inputs)

        def timed(rows: int) -> ProgramResult:
            self._clock.mark()
            return run(rows)

        return timed


class Arm:
    """A recipe on a model, whose steps are timed."""

    def __init__(self, model: Model, name: str, args: argparse.Namespace):
        begin = time.perf_counter()
        recipe, options = PROMPT_ARMS[name]
        stored = {"weights": args.weights, "kv_dtype": args.kv_dtype}
        self.program: CompiledModel = dgraph.optimize(
            model, recipe, backend=args.backend, buckets="fine", **options, **stored
        )
        self.device, self.block = self.program.captured.device, model.spec.block_length
        self.built = time.perf_counter() - begin
        self.session = self.program._session
        self._programs = dict(self.session.programs)

    def decode(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[float]]:
        """Seconds of a generation, and milliseconds of each of its steps."""
        clock = Clock(self.device)
        self.session.programs = {name: Timed(program, clock) for name, program in self._programs.items()}
        begin = time.perf_counter()
        stats = self.program.generate(input_ids=prompts, max_new_tokens=tokens, steps=self.block).stats
        clock.mark()
        times = clock.milliseconds()
        seconds = time.perf_counter() - begin
        # With an observer absent a few steps may run after the last token; they decode nothing.
        if stats.decoded != tokens * len(prompts) or len(times) < tokens:
            raise RuntimeError(f"{stats.decoded} tokens in {len(times)} steps, expected {tokens} of each prompt.")
        return seconds, times[:tokens]

    def kinds(self, steps: int) -> list[str]:
        """Of so many steps from the first on."""
        assert self.program.recipe.plan is not None
        return [kind_of(self.program.recipe.plan, step, self.block) for step in range(steps)]

    def by_kind(self, times: list[float]) -> dict[str, float]:
        """Median milliseconds of each kind of step."""
        kinds = self.kinds(len(times))
        return {k: statistics.median(t for t, of in zip(times, kinds, strict=True) if of == k) for k in set(kinds)}

    def reserve(self, prompts: list[list[int]], tokens: int) -> None:
        """Allocate the caches of a response that is not decoded; contents are lost."""
        decoding = Decoding(max_new_tokens=tokens, steps=self.block)
        shape = self.session.shape(len(prompts), max(map(len, prompts)) + tokens, self.block, fixed=False)
        batch = self.session.batch([decoding], shape)
        batch.admit(range(len(prompts)), [Request(prompt, decoding) for prompt in prompts])
        batch.clear()

    def kv_bytes(self) -> int:
        """Of everything that is cached, as allocated."""
        return self.session.kv.bytes + (self.session.packed.bytes if self.session.packed is not None else 0)

    def kv_read(self, sequences: int, positions: int) -> int:
        """Bytes of keys and values that a step on one block of each sequence reads: entries as they were counted on the
        device and the block, or all positions.
        """
        spec, packed = self.program.spec, self.session.packed
        seen = sequences * spec.layers * spec.kv_heads * (positions if packed is None else self.block)
        if packed is not None:
            counts = (value for name, value in packed.tensors().items() if name.startswith("pack_count"))
            seen += sum(int(count[:sequences].sum()) for count in counts)
        return seen * spec.head_dim * 2 * spec.dtype.itemsize


class Limit:
    """Seconds that are left; negative when there are none."""

    def __init__(self, seconds: float):
        self._end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        return self._end - time.perf_counter()


def long_prompt(model: Model, args: argparse.Namespace, limit: Limit, report: Report) -> None:
    """One sequence with a long prompt: the original loop and every arm."""
    prompt = prompts_of(model, 1, args.prompt)
    vanilla, memory = 0.0, 0
    rows: list[list[Cell]] = []
    if "vanilla" in args.arms:
        canvas = torch.cat([torch.tensor(prompt), torch.full((1, args.tokens), model.spec.mask_id)], dim=1)
        reset_peak()
        vanilla = seconds_per_step(model, canvas.to(args.device), args.tokens, args.full_steps, warm=1)
        memory = peak_bytes()
        rows.append(["original loop", *[""] * len(KINDS), 1e3 * vanilla, "measured", 1.0, memory / 1e9, 1.0, ""])
        print(*rows[-1], sep="\t", flush=True)
    for name in [a for a in PROMPT_ARMS if a in args.arms]:
        if limit.left < 0:
            print(f"{name}: not measured, the time limit is over", flush=True)
            continue
        arm = Arm(model, name, args)
        reset_peak()  # what building takes is another matter
        _, times = arm.decode(prompt, arm.block)  # compiles kernels and captures
        _, times = arm.decode(prompt, arm.block)
        kinds = arm.by_kind(times)
        needed = Counter(arm.kinds(args.tokens))
        kinds.setdefault("prompt refresh", kinds["first"])
        whole = 1e-3 * sum(kinds[kind] * count for kind, count in needed.items())
        how = "from kinds"
        if whole < min(args.full, limit.left):
            arm.decode(prompt, args.tokens)  # captures what this length needs
            whole, times = arm.decode(prompt, args.tokens)
            kinds, how = arm.by_kind(times), "measured"
        per_token, peak = 1e3 * whole / args.tokens, peak_bytes()
        arm.reserve(prompt, args.tokens)
        shown: list[Cell] = [kinds[k] if k in needed else "" for k in KINDS]
        ratios: list[Cell] = [1e3 * vanilla / per_token if vanilla else "", peak / 1e9, peak / memory if memory else ""]
        rows.append([name, *shown, per_token, how, *ratios, arm.kv_bytes() / 1e9])
        report.data[name] = {"ms": times, "built_s": arm.built, "steps": dict(needed), "kv_bytes": arm.kv_bytes()}
        print(*rows[-1], sep="\t", flush=True)
        del arm
        release()
    columns = ["arm", *(f"{kind} ms" for kind in KINDS), "ms/token", "", "faster", "peak GB", "of vanilla", "KV GB"]
    report.table(f"1 sequence, prompt {args.prompt}, {args.tokens} new tokens, 1 per step", columns, rows)


def many_sequences(model: Model, args: argparse.Namespace, limit: Limit, report: Report) -> None:
    """Steps of a batch that reuse what is cached, at several contexts."""
    for context in args.contexts:
        rows: list[list[Cell]] = []
        prompts = prompts_of(model, args.batch, context - args.batch_tokens)
        for name in [a for a in BATCH_ARMS if a in args.arms]:
            if limit.left < 0:
                print(f"{name} at {context}: not measured, the time limit is over", flush=True)
                continue
            arm = Arm(model, name, args)
            reset_peak()
            try:
                _, times = arm.decode(prompts, args.batch_tokens)
                reuse, read = arm.by_kind(times)["reuse"], arm.kv_read(args.batch, context)
                rows.append([name, reuse, read / 1e9, arm.kv_bytes() / 1e9, peak_bytes() / 1e9])
                report.data[f"{name} at {context}"] = {"ms": times, "kv_read": read, "kv_bytes": arm.kv_bytes()}
            except torch.OutOfMemoryError:
                rows.append([name, "out of memory", "", "", peak_bytes() / 1e9])
            print(context, *rows[-1], sep="\t", flush=True)
            del arm
            release()
        title = f"{args.batch} sequences, context {context}, {model.spec.layers} layers, {args.batch_tokens} steps"
        report.table(title, ["arm", "ms per reuse step", "KV read GB", "KV held GB", "peak GB"], rows)


def prompts_of(model: Model, count: int, length: int) -> list[list[int]]:
    """Random ids, the same for every arm."""
    draw = torch.Generator().manual_seed(0)
    return torch.randint(10, model.spec.vocab // 2, (count, length), generator=draw).tolist()


def release() -> None:
    """Give back what a program held: its parts refer to each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=("prompt", "batch"), default=["prompt", "batch"])
    parser.add_argument("--arms", nargs="+", choices=("vanilla", *PROMPT_ARMS), default=["vanilla", *PROMPT_ARMS])
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, for a trial or to fit a batch")
    parser.add_argument("--prompt", type=int, default=32768)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 16384], help="of a batch, response included")
    parser.add_argument("--batch-tokens", type=int, default=32, help="new tokens of each sequence of a batch")
    parser.add_argument("--full-steps", type=int, default=2, help="timed steps of the original loop")
    parser.add_argument("--full", type=float, default=20.0, help="seconds that a measured response may take")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which no arm is begun")
    parser.add_argument("--weights", help="as `dgraph.optimize` takes them; without the arm vanilla")
    parser.add_argument("--kv-dtype", help="as `dgraph.optimize` takes it")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu: a tiny model")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    limit = Limit(args.limit)
    longest = max([args.prompt + args.tokens, *args.contexts]) + args.block
    changes: dict[str, Any] = {"block_length": args.block, "eos_ids": (), "max_position_embeddings": longest}
    if args.layers:
        changes["num_hidden_layers"] = args.layers
    if args.device == "cpu":
        changes |= {**TINY, **TINY_VOCAB}
    if args.weights and "vanilla" in args.arms:
        parser.error("--weights are made while they are stored, so that the original loop has none; name other --arms")
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    model = random_model("llada-8b", args.device, dtype, opened=args.weights is not None, **changes)
    report = Report("Sparse KV caches at the llada-8b shape")
    for section in args.sections:
        (long_prompt if section == "prompt" else many_sequences)(model, args, limit, report)
        report.write(args.markdown, args.json)


if __name__ == "__main__":
    main()

"""Sparse KV caches at LLaDA-8B's shape with random weights: long prompts, and many sequences.

    python -m benchmarks.maskkv_speed --sections prompt --prompt 32768
    python -m benchmarks.maskkv_speed --sections prompt --prompt 1024,4096,16384 --full 0 --limit 100
    python -m benchmarks.maskkv_speed --ablation --prompt 32768 --full 0 --limit 100
    python -m benchmarks.maskkv_speed --sections batch --contexts 4096
    python -m benchmarks.maskkv_speed --layers 2 --prompt 64,256 --device cpu --backend eager

On an H200 the third command, MaskKV's Table 5 and Figure 5, takes at most two minutes. Several prompt lengths end with
a table by length (Figure 4).

Every arm commits one token per step. Section "prompt": one sequence with a long prompt, against the original loop (see
`benchmarks.full_forward`, which says what that holds in memory). A step is timed from its beginning to that of the next
by events on the device, while nobody watches; its kind follows from the recipe's row plan. Milliseconds per token are
those of a whole response where it takes less than `--full` seconds, else the mean of each kind of step in the first
block, times how often a response has that kind. Section "batch": steps that reuse what is cached, and what they read
of it. Memory is torch's: all that is allocated at a time, the weights included; a CPU counts none.

Section "ablation": dLLM-Cache with logits of every forwarded row, and what each part of MaskKV saves of that. Budgets
of layers that are measured in the response itself (online) need every layer's keys before the first may go. So that
row is reckoned from those around it.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from dgraph.passes import ChunkLMHead
from dgraph.passes.base import Pass
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Apart
from dgraph.plans.view import View
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.requests import Request

FEW: dict[str, Any] = {"pairs": 256, "layers": "uniform"}
"""MaskKV's budget; random layers are not worth measuring."""
PROMPT_ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "maskkv": ("maskkv", FEW),
    "maskkv+fast_dllm": ("maskkv+fast_dllm", FEW),
    "fast_dllm": ("fast_dllm", {"cache": "dual"}),
    "fast_dllm:cache=prefix": ("fast_dllm", {"cache": "prefix"}),
    "dllm_cache": ("dllm_cache", {}),
    "dllm_serve": ("dllm_serve", {"ratio": 0.5}),
    "sparse_dllm": ("sparse_dllm", {"ratio": 0.5}),
}
ABLATION: dict[str, tuple[str, dict[str, Any]]] = {
    "dllm_cache, every row projected": ("dllm_cache", {"response_interval": 5}),
    "+ mask-only projection": ("dllm_cache", {"response_interval": 5}),
    "+ prompt-state exclusion": ("maskkv", {"ratio": 1.0}),
    "+ maskkv, offline": ("maskkv", FEW),
}
"""Rows of MaskKV's Table 5, each with one part more; the interval is MaskKV's."""
WHOLE, _, EXCLUDED, OFFLINE = ABLATION
ONLINE = "+ maskkv, online (reckoned)"
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
        recipe, options = {**PROMPT_ARMS, **ABLATION}[name]
        given = {"kv_dtype": args.kv_dtype} if args.kv_dtype else {}
        if "pairs" in options:
            given["pairs"] = args.pairs
        built = dgraph.recipe(recipe, model.spec, **{**options, **given})
        if name == WHOLE:
            built = replace(built, phases=tuple(replace(p, passes=without_head(p.passes)) for p in built.phases))
        self.program: CompiledModel = dgraph.optimize(
            model, built, backend=args.backend, buckets="fine", weights=args.weights
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

    def logit_bytes(self, prompt: int, tokens: int) -> int:
        """Of the logits that exist at a time in the first step of a response."""
        spec, passes = self.program.spec, self.program.recipe.phase("step").passes
        most = [p.max_num_logits for p in passes if isinstance(p, ChunkLMHead)]
        return (min(tokens, *most) if most else prompt + tokens) * spec.vocab * spec.dtype.itemsize

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


@dataclass(frozen=True)
class Measured:
    """A response to one prompt under an arm.

    Attributes:
        kinds: median milliseconds of each kind of step.
        steps: number of steps of each kind that the response has.
        ms: milliseconds per token.
        how: "measured", or "from kinds" of the first block's steps.
        peak: most bytes that tensors had at a time; 0 on a CPU.
        times: milliseconds of each timed step.
    """

    kinds: dict[str, float]
    steps: dict[str, int]
    ms: float
    how: str
    peak: int
    times: list[float]


def measured(arm: Arm, prompt: list[list[int]], args: argparse.Namespace, limit: Limit) -> Measured:
    """Time an arm on a prompt, the whole response if it is short enough; its caches are reserved afterwards."""
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
    peak = peak_bytes()
    arm.reserve(prompt, args.tokens)
    return Measured(kinds, dict(needed), 1e3 * whole / args.tokens, how, peak, times)


def sweep(model: Model, args: argparse.Namespace, limit: Limit, report: Report) -> None:
    """One sequence with a long prompt at each length, and all lengths side by side."""
    found = {length: long_prompt(model, length, args, limit, report) for length in args.prompt}
    names = list(dict.fromkeys(name for of_length in found.values() for name in of_length))
    if len(found) > 1:
        columns = ["arm", *(f"{length} {unit}" for length in found for unit in ("ms/token", "peak GB"))]
        rows: list[list[Cell]] = [
            [name, *(cell for of in found.values() for cell in of.get(name, ("", "")))] for name in names
        ]
        report.table("Time and memory by the length of the prompt", columns, rows)


def long_prompt(
    model: Model, length: int, args: argparse.Namespace, limit: Limit, report: Report
) -> dict[str, tuple[Cell, Cell]]:
    """One sequence with a long prompt: the original loop and every arm; milliseconds per token and peak GB of each."""
    prompt = prompts_of(model, 1, length)
    vanilla, memory = 0.0, 0
    rows: list[list[Cell]] = []
    found: dict[str, tuple[Cell, Cell]] = {}
    if "vanilla" in args.arms:
        canvas = torch.cat([torch.tensor(prompt), torch.full((1, args.tokens), model.spec.mask_id)], dim=1)
        reset_peak()
        vanilla = seconds_per_step(model, canvas.to(args.device), args.tokens, args.full_steps, warm=1)
        memory = peak_bytes()
        rows.append(["original loop", *[""] * len(KINDS), 1e3 * vanilla, "measured", 1.0, memory / 1e9, 1.0, ""])
        found["original loop"] = 1e3 * vanilla, memory / 1e9
        print(*rows[-1], sep="\t", flush=True)
    for name in [a for a in PROMPT_ARMS if a in args.arms]:
        if limit.left < 0:
            print(f"{name}: not measured, the time limit is over", flush=True)
            continue
        arm = Arm(model, name, args)
        it = measured(arm, prompt, args, limit)
        shown: list[Cell] = [it.kinds[k] if k in it.steps else "" for k in KINDS]
        ratios: list[Cell] = [1e3 * vanilla / it.ms if vanilla else "", it.peak / 1e9]
        rows.append([name, *shown, it.ms, it.how, *ratios, it.peak / memory if memory else "", arm.kv_bytes() / 1e9])
        found[name] = it.ms, it.peak / 1e9
        key = name if len(args.prompt) == 1 else f"{name} at {length}"
        report.data[key] = {"ms": it.times, "built_s": arm.built, "steps": it.steps, "kv_bytes": arm.kv_bytes()}
        print(*rows[-1], sep="\t", flush=True)
        del arm
        release()
    columns = ["arm", *(f"{kind} ms" for kind in KINDS), "ms/token", "", "faster", "peak GB", "of vanilla", "KV GB"]
    report.table(f"1 sequence, prompt {length}, {args.tokens} new tokens, 1 per step", columns, rows)
    return found


def ablation(model: Model, args: argparse.Namespace, limit: Limit, report: Report) -> None:
    """Memory that each part of MaskKV saves, at the longest prompt."""
    length = max(args.prompt)
    prompt = prompts_of(model, 1, length)
    found: dict[str, dict[str, float]] = {}
    for name in ABLATION:
        if limit.left < 0:
            print(f"{name}: not measured, the time limit is over", flush=True)
            continue
        arm = Arm(model, name, args)
        it = measured(arm, prompt, args, limit)
        cached = arm.kv_bytes()
        found[name] = {"logits": arm.logit_bytes(length, args.tokens), "first": cached, "later": cached}
        found[name] |= {"peak": it.peak, "ms": it.ms}
        print(name, found[name], sep="\t", flush=True)
        del arm
        release()
    if EXCLUDED in found and OFFLINE in found:
        last = found.pop(OFFLINE)
        found |= {ONLINE: {**last, **{key: found[EXCLUDED][key] for key in ("first", "peak")}}, OFFLINE: last}
    report.data["ablation"] = found
    rows: list[list[Cell]] = [
        [name, *(row[key] / 1e9 for key in ("logits", "first", "later", "peak")), row["ms"]]
        for name, row in found.items()
    ]
    columns = ["", "logits GB", "cached GB, first step", "cached GB, later", "peak GB", "ms/token"]
    report.table(
        f"Parts of MaskKV, prompt {length}, {args.tokens} new tokens, {model.spec.layers} layers", columns, rows
    )


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


def without_head(passes: tuple[Pass, ...]) -> tuple[Pass, ...]:
    """Passes after which a program gives logits of every row."""
    return tuple(p for p in passes if not isinstance(p, ChunkLMHead))


def lengths(text: str) -> list[int]:
    """Numbers with commas between them."""
    return [int(part) for part in text.split(",")]


def prompts_of(model: Model, count: int, length: int) -> list[list[int]]:
    """Random ids, the same for every arm."""
    draw = torch.Generator().manual_seed(0)
    return torch.randint(10, model.spec.vocab // 2, (count, length), generator=draw).tolist()


def release() -> None:
    """Give back what a program held: its parts refer to each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


SECTIONS = {"prompt": sweep, "batch": many_sequences, "ablation": ablation}


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=tuple(SECTIONS), default=["prompt", "batch"])
    parser.add_argument("--ablation", action="store_const", dest="sections", const=["ablation"], help="that section")
    parser.add_argument("--arms", nargs="+", choices=("vanilla", *PROMPT_ARMS), default=["vanilla", *PROMPT_ARMS])
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, for a trial or to fit a batch")
    parser.add_argument("--prompt", type=lengths, default=[32768], help="tokens, or several lengths as 1024,4096")
    parser.add_argument("--pairs", type=int, default=FEW["pairs"], help="positions that a head keeps under maskkv")
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
    longest = max([max(args.prompt) + args.tokens, *args.contexts]) + args.block
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
        SECTIONS[section](model, args, limit, report)
        report.write(args.markdown, args.json)


if __name__ == "__main__":
    main()

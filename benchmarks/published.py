"""Steps of DiffusionGemma and Nemotron-Labs-Diffusion at published sizes, beside their floors and published figures.

    python -m benchmarks.published --markdown published.md --json published.json
    python -m benchmarks.published --arms nemotron --batch 1 8 --layers 4
    python -m benchmarks.published --tiny --device cpu --backend eager

Weights are random and made on the device. DiffusionGemma runs the protocol of vLLM's figures: 1,024 random tokens in,
1,024 out, every canvas of 256 denoised 16 times and encoded once, no early stop. Nemotron-Labs-Diffusion-8B runs blocks
of 32 after 768 tokens, at about the 800 positions of its published figures.

ms is the median time between two steps of the decode loop, what lies between forwards included. Its floor is that of a
step of as many rows, from the same process (`dgraph.bench.floor`), its experts reached at random; experts says how many
of a layer's the random weights send the rows of one canvas to, so that a step which reads fewer shows. Tokens per
second are those of the whole call, prefill included; the last canvas is not encoded, as nothing follows it.

A line is printed as each figure comes, and the files are written after it: a run that is cut leaves what it has (see
`benchmarks.runs`). An arm that fails is told and passed over. Nothing is begun after --seconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import torch

import dgraph
from benchmarks import runs
from benchmarks.tables import Cell
from dgraph.bench.floor import Device, floor_of, work_of
from dgraph.bench.load import endless, prompts_of
from dgraph.bench.measure import Clock, Counter
from dgraph.bench.profile import profiled
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.engine.memory.measure import give_back
from dgraph.families import Model
from dgraph.models.moe import RoutedExperts
from dgraph.models.shapes import random_model
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.policies import Renoise


@dataclass(frozen=True)
class Protocol:
    """How a shape is run.

    Attributes:
        shape: see `dgraph.models.shapes`.
        prompt, tokens: of each sequence.
        decoding: the rest of it.
        tiny: config keys of a model with which the script itself is tried.
        note: what the published figures are.
    """

    shape: str
    prompt: int
    tokens: int
    decoding: Mapping[str, Any]
    tiny: Mapping[str, Any]
    note: str


@dataclass(frozen=True)
class Arm:
    """A protocol by weights of a kind; published: figures of others, by sequences."""

    protocol: Protocol
    weights: str | None
    batches: tuple[int, ...]
    published: Mapping[int, str] = field(default_factory=dict)


GEMMA = Protocol(
    "diffusion-gemma-26b-a4b",
    1024,
    1024,
    {"policy": Renoise(confidence=0.0, steps=16)},
    {
        **{"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
        **{"global_head_dim": 32, "num_global_key_value_heads": 1, "num_experts": 8, "top_k_experts": 2},
        **{"sliding_window": 12, "max_position_embeddings": 256, "block_length": 8},
    },
    "vLLM's figure is of FP8 weights and one sequence (vllm.ai/blog/2026-06-10-diffusion-gemma, prefill included); "
    "none is published of BF16 or of more sequences on this GPU.",
)
NEMOTRON = Protocol(
    "nemotron-8b",
    768,
    64,
    {"steps": 16},
    {
        **{"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "block_length": 8},
    },
    "Published: one forward by replay of a CUDA graph, BF16, on a B200, contexts of about 800 "
    "(linyewei526/Nemotron-Labs-Diffusion). A B200 has 8 TB/s and about twice the FLOP/s of an H200.",
)
B200 = {1: "5.6 ms", 8: "10.7 ms", 32: "20.9 ms", 64: "35.4 ms", 128: "66.2 ms"}
ARMS = {
    "gemma": Arm(GEMMA, None, (1, 8, 32)),
    "gemma-fp8": Arm(GEMMA, "fp8", (1,), {1: "vLLM 1288 tok/s"}),
    "gemma-w8a8-fp8": Arm(GEMMA, "w8a8-fp8", (1,), {1: "vLLM 1288 tok/s"}),
    "nemotron": Arm(NEMOTRON, None, (1, 8, 32, 128), B200),
}


@dataclass
class Figure:
    """What was measured of one arm at a number of sequences.

    Attributes:
        arm: its name.
        sequences, steps: at a time; of the decode loop.
        rows: of a step, the most of any.
        ms, slowest: of the median step, and of the slowest of all runs.
        seconds, prefill: of the median run of the whole call, and of its part before the first step.
        tokens_per_second: all sequences together, over the whole call.
        peak: bytes allocated at a time, from the first call on, weights included; None on a CPU.
        floor: milliseconds of a step of so many rows, by part; None if it was not measured.
        groups: milliseconds of a step on a GPU by group of kernels, as the profiler sees it; None if it did not.
        published: what others measured.
    """

    arm: str
    sequences: int
    steps: int
    rows: int
    ms: float
    slowest: float
    seconds: float
    prefill: float
    tokens_per_second: float
    peak: int | None
    floor: dict[str, float] | None
    groups: dict[str, float] | None
    published: str

    def cells(self) -> list[Cell]:
        """As a row of its table."""
        floor = None if self.floor is None else self.floor["total"]
        compared: list[Cell] = ["-", "-"] if floor is None else [floor, self.ms / floor]
        peak: Cell = "-" if self.peak is None else self.peak / 1e9
        timed: list[Cell] = [self.ms, *compared, self.slowest, self.tokens_per_second, 1e3 * self.prefill]
        return [self.arm, self.sequences, self.rows, self.steps, *timed, peak, self.published]


PROFILED = 8
"""Steps that the profiler sees."""
COLUMNS = (
    *("arm", "sequences", "rows", "steps", "ms", "floor ms", "of floor", "slowest", "tok/s", "prefill ms", "peak GB"),
    "published",
)


@dataclass
class Run(runs.Run):
    """See `benchmarks.runs`; figures: what was measured. What was built and how long it took is among the notes."""

    figures: list[Figure] = field(default_factory=list)

    def write(self) -> None:
        """Write what there is."""
        protocols = {ARMS[figure.arm].protocol.shape: ARMS[figure.arm].protocol for figure in self.figures}
        for shape, protocol in protocols.items():
            figures = [figure for figure in self.figures if ARMS[figure.arm].protocol is protocol]
            self.table(shape, COLUMNS, [figure.cells() for figure in figures], protocol.note)
            self._groups(shape, figures)
        self.report.data["figures"] = [asdict(figure) for figure in self.figures]
        super().write()

    def _groups(self, shape: str, figures: Sequence[Figure]) -> None:
        """Where the time of the steps goes that were profiled."""
        seen = [(figure, figure.groups) for figure in figures if figure.groups is not None]
        if not seen:
            return
        names = list(dict.fromkeys(name for _, groups in seen for name in groups))
        rows = [[f.arm, f.sequences, *(groups.get(name, 0.0) for name in names)] for f, groups in seen]
        self.table(f"{shape}: ms of a step by kernels", ["arm", "sequences", *names], rows)


def reached(model: Model, rows: int) -> float | None:
    """How many experts of a layer the rows of a canvas of random tokens go to, on average; None without experts."""
    counts: list[int] = []

    def count(module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        counts.append(given[1].unique().numel())

    hooks = [m.register_forward_pre_hook(count) for m in model.module.modules() if isinstance(m, RoutedExperts)]
    if not hooks:
        return None
    inputs: Any = model.module.inputs
    parameter = next(model.module.parameters())
    with torch.no_grad(), parameter.device:
        ids, positions = torch.randint(model.spec.vocab, (1, rows)), torch.arange(rows)[None]
        sizes = {"b": 1, "t": rows}
        more = [torch.zeros([sizes.get(s, s) for s in one.shape], dtype=one.dtype) for one in inputs]
        model.module(ids, positions, *more)
    for hook in hooks:
        hook.remove()
    return statistics.mean(counts)


def built(run: Run, name: str, batches: Sequence[int]) -> tuple[Model, CompiledModel, dict[str, int]]:
    """A model, its program, and the lengths of a sequence."""
    given, arm = run.given, ARMS[name]
    protocol = arm.protocol
    changes: dict[str, Any] = dict(protocol.tiny) if given.tiny else {}
    if given.layers:
        changes["num_hidden_layers"] = given.layers
    device = torch.device(given.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    run.say(f"{name}: making {protocol.shape}")
    begin = time.perf_counter()
    model = endless(random_model(protocol.shape, device, dtype, opened=arm.weights is not None, **changes))
    block = model.spec.block_length
    lengths = {"prompt": protocol.prompt, "tokens": protocol.tokens}
    if given.tiny:
        lengths = {"prompt": 2 * block, "tokens": 2 * block}
    if arm.weights is None and (experts := reached(model, block)) is not None:
        run.note(f"{name}: {block} rows go to {experts:.1f} experts of a layer")
    made = time.perf_counter() - begin
    # The rows of these steps and of these prefills, and no others: each is a CUDA graph, or padding.
    buckets = sorted({rows * b for b in batches for rows in (block, lengths["prompt"])})
    begin = time.perf_counter()
    program = dgraph.optimize(
        model,
        "dense",
        backend=given.backend,
        weights=arm.weights,
        buckets=buckets if device.type == "cuda" else None,
        tune=not given.no_tune,
        artifacts=not given.tiny,
        progress=lambda what: run.say(f"{name}: {what}"),
    )
    run.note(f"{name}: made in {made:.1f} s, compiled in {time.perf_counter() - begin:.1f} s")
    return model, program, lengths


def figure_of(run: Run, name: str, program: CompiledModel, prompts: list[list[int]], decoding: Decoding) -> Figure:
    """Time one number of sequences; the floor is left open."""
    cuda, batch = program.captured.device.type == "cuda", len(prompts)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    if program.graph_pool is not None:
        program.warm_up(batch, len(prompts[0]) + decoding.max_new_tokens, decoding=decoding)
        run.say(f"{name}, {batch}: warm")
    program.generate(input_ids=prompts, decoding=decoding)
    clocks, seconds, stats = [], [], None
    for _ in range(run.given.repeat):
        clock, begin = Clock(), time.perf_counter()
        stats = program.generate(input_ids=prompts, decoding=decoding, progress=clock).stats
        seconds.append(time.perf_counter() - begin)
        clocks.append((clock, clock.times[0] - begin))
    assert stats is not None
    steps = [later - now for clock, _ in clocks for now, later in pairwise(clock.times)]
    whole = statistics.median(seconds)
    return Figure(
        name,
        batch,
        stats.steps,
        max(stats.step_rows),
        1e3 * statistics.median(steps),
        1e3 * max(steps),
        whole,
        statistics.median(before for _, before in clocks),
        stats.tokens / whole,
        torch.cuda.max_memory_allocated() if cuda else None,
        None,
        None,
        ARMS[name].published.get(batch, "none"),
    )


def floor_by_part(
    program: CompiledModel, prompts: list[list[int]], decoding: Decoding, times: Device
) -> dict[str, float]:
    """Milliseconds of the floor of those steps that had the most rows."""
    work = work_of(program.graph("step"))
    counter = Counter.of(program, work)
    program.generate(input_ids=prompts, decoding=decoding, observer=counter)
    most = max(count.rows[0] for count in counter.counts)
    return floor_of(work, [count for count in counter.counts if count.rows[0] == most], times).to_json()


def where_it_goes(program: CompiledModel, prompts: list[list[int]], decoding: Decoding, steps: int) -> dict[str, float]:
    """Milliseconds of a step by group of kernels, those between kernels included; see `dgraph.bench.profile`."""

    def generate(progress: Any) -> Any:
        return program.generate(input_ids=prompts, decoding=decoding, progress=progress)

    return profiled(generate, steps, PROFILED, program.programs["step"].stage_names).groups


def measure(run: Run, name: str, batches: Sequence[int], times: Device) -> None:
    """All figures of an arm."""
    model, program, lengths = built(run, name, batches)
    said = ARMS[name].protocol.decoding
    decoding = Decoding(max_new_tokens=lengths["tokens"], ignore_eos=True, **said)
    for batch in batches:
        what = f"{name}, {batch} sequences"
        if run.late(what):
            return
        prompts = prompts_of(model, [lengths["prompt"]] * batch)
        with run.told(what):
            found = figure_of(run, name, program, prompts, decoding)
            run.figures.append(found)
            memory = "" if found.peak is None else f", peak {found.peak / 1e9:.1f} GB"
            run.say(
                f"{what}: {found.ms:.2f} ms a step of {found.rows} rows, {found.tokens_per_second:.0f} tok/s{memory}"
            )
            run.write()
            found.floor = floor_by_part(program, prompts, decoding, times)
            floor = found.floor["total"]
            run.say(f"{what}: floor {floor:.2f} ms, {found.ms / floor:.2f} times it")
            if program.captured.device.type == "cuda":
                found.groups = where_it_goes(program, prompts, decoding, found.steps)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, write; 1 if an arm failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="in this order")
    parser.add_argument("--batch", type=int, nargs="+", help="instead of an arm's own numbers of sequences")
    parser.add_argument("--layers", type=int, help="fewer layers than the shapes have, for a trial")
    parser.add_argument("--repeat", type=int, default=3, help="runs of the whole call")
    parser.add_argument("--no-tune", action="store_true", help="tilings that kernels derive from shapes")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script itself")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    runs.add_run(parser, seconds=500)
    given = parser.parse_args(arguments)
    times = Device(torch.device(given.device))
    with Run(given, "DiffusionGemma and Nemotron-Labs-Diffusion at published sizes", arguments is None) as run:
        for name in given.arms:
            if run.late(name):
                continue
            # In ascending order: what is captured for more sequences serves fewer no better than their own.
            with run.told(name):
                measure(run, name, sorted(given.batch or ARMS[name].batches), times)
            give_back(times.device)
    return min(1, run.failed)


if __name__ == "__main__":
    raise SystemExit(main())

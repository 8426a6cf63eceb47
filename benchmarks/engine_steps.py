"""What a step costs around its forward: `generate` against another version of itself, and how long a device waits.

    python -m benchmarks.engine_steps --shape llada-8b --recipe fast_dllm --batch 1 --prompt 512 --steps 32
    python -m benchmarks.engine_steps --shape sdar-8b --recipe focus --batch 64 --prompt 1024 --steps 8

Milliseconds per step come from two lengths of response in turn, so that prefill and start cancel out; run it once with
each version to compare. On a GPU a trace of the engine says where no kernel ran in the middle half of the run. A
profiler's own work makes the device wait for the host, so the share of time in which no kernel runs is also given of
the same run without one: what passes between the end of a CUDA graph and the begin of the next, by events in the
graphs, and what the trace has between the kernels of one. Copies and kernels that are launched between graphs are part
of the wait. How long kernels run in a trace says nothing of that: a card that waits more gets less warm, and computes
faster.
Weights are random and every step commits as many tokens. A run that is cut leaves what it has (see `benchmarks.runs`).
`benchmarks.engine_load --parts steps` measures the same of an engine beside its loads.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

import dgraph
from benchmarks.recipes import add_recipe, chosen
from benchmarks.runs import Run, add_run
from benchmarks.tables import Cell
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.engine.engine import Engine
from dgraph.models.shapes import SHAPES, random_model
from dgraph.runtime.decoding import Decoding


def per_step(program: CompiledModel, prompts: list[list[int]], tokens: int, steps: int, repeat: int) -> list[float]:
    """Milliseconds per step of `generate`, once per repetition."""

    def once(new: int) -> tuple[float, int]:
        begin = time.perf_counter()
        found = program.generate(input_ids=prompts, max_new_tokens=new, steps=steps)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - begin, found.stats.steps

    once(2 * tokens)
    once(tokens)
    found = []
    for _ in range(repeat):
        (long, many), (short, few) = once(2 * tokens), once(tokens)
        found.append(1e3 * (long - short) / (many - few))
    return found


@dataclass(frozen=True)
class Waits:
    """When kernels ran, and when none did in the middle half of a run.

    Attributes:
        short: seconds of the whole run between kernels that followed each other within `AT_ONCE`, as those of a graph
            do.
        share: of the time of the middle half in which none did.
        between: per pair of kernels, the one before and the one after: how often, and microseconds in all.
    """

    short: float
    share: float
    between: list[tuple[str, str, int, float]]


AT_ONCE = 20.0
"""Microseconds after which a kernel of the same CUDA graph has begun."""


@dataclass(frozen=True)
class Span:
    """A run on the device without a profiler.

    Attributes:
        seconds: from the begin of the first CUDA graph to the end of the last, by events in the graphs: without what
            the host does before it has anything to launch, and after everything is launched.
        waiting: of these, between the end of a graph and the begin of the next; copies and kernels that are launched
            there are part of it.
    """

    seconds: float
    waiting: float


def waits_of(engine: Engine, prompts: Sequence[Sequence[int]], decoding: Decoding) -> Waits:
    """Where the device waits while an engine answers, longest in all first. The profiler's own work is part of it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        engine.generate(prompts, decoding)
    return waits_between(
        (event.time_range.start, event.time_range.end, event.name)
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )


@contextmanager
def _graphs_do(**methods: Callable[..., None]) -> Iterator[None]:
    """Within, these are what all CUDA graphs do, by name."""
    before = {name: getattr(torch.cuda.CUDAGraph, name) for name in methods}
    for name, method in methods.items():
        setattr(torch.cuda.CUDAGraph, name, method)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(torch.cuda.CUDAGraph, name, method)


class GraphTimes:
    """When CUDA graphs begin and end on the device, by events that are their first and their last node.

    An event in a graph is stamped when the device gets there, however long the host takes to launch the graph, and anew
    by each replay.
    """

    def __init__(self) -> None:
        self._events: WeakKeyDictionary[torch.cuda.CUDAGraph, tuple[torch.cuda.Event, torch.cuda.Event]]
        self._events = WeakKeyDictionary()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Graphs that are recorded within get the events."""
        capture_begin, capture_end = torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end

        def begun(graph: torch.cuda.CUDAGraph, *given: Any, **options: Any) -> None:
            capture_begin(graph, *given, **options)
            begin, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
            self._events[graph] = begin, end
            begin.record()

        def ended(graph: torch.cuda.CUDAGraph) -> None:
            try:
                if graph in self._events:
                    self._events[graph][1].record()
            finally:  # or the stream would go on recording
                capture_end(graph)

        with _graphs_do(capture_begin=begun, capture_end=ended):
            yield

    @contextmanager
    def replays(self) -> Iterator[list[tuple[float, float]]]:
        """A list that has, after what is within is over, milliseconds from begin to end of each graph replayed there.

        A replay is read before the next one of the same graph stamps its events again, and behind the launch of another
        if it is over by then: before a launch the device may be waiting, and nothing more is done than must be. Whether
        it is over, a plain event behind the launch says, since an event in a graph looks reached until the device gets
        there again. A graph that is launched again before its end leaves no time to read it, nor does the device wait
        for the host then. So its replays are one span, from what the device was at when the second was launched.

        Raises, when a graph is launched:
            RuntimeError: it has no events.
        """
        replay = torch.cuda.CUDAGraph.replay
        found: list[tuple[float, float]] = []
        # By graph, the last launched last: plain events behind the launch before it, and behind its own.
        pending: dict[torch.cuda.CUDAGraph, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
        since: dict[torch.cuda.CUDAGraph, float] = {}

        def mark() -> torch.cuda.Event:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event

        base = last = mark()
        base.synchronize()

        def read(graph: torch.cuda.CUDAGraph) -> None:
            del pending[graph]
            begin, end = self._events[graph]
            found.append((since.pop(graph, base.elapsed_time(begin)), base.elapsed_time(end)))

        def launched(graph: torch.cuda.CUDAGraph) -> None:
            nonlocal last
            if graph not in self._events:
                raise RuntimeError("a CUDA graph has no events: record it within `GraphTimes.recording()`")
            if graph in pending and pending[graph][1].query():
                read(graph)
            elif graph in pending:
                at_work = next((before for before, _ in reversed(pending.values()) if before.query()), None)
                if at_work is not None:
                    since.setdefault(graph, base.elapsed_time(at_work))
            replay(graph)
            before, last = last, mark()
            pending.pop(graph, None)
            for other in [each for each, (_, end) in pending.items() if end.query()]:
                read(other)
            pending[graph] = before, last

        with _graphs_do(replay=launched):
            yield found
        torch.cuda.synchronize()
        for graph in list(pending):
            read(graph)


def span_of(engine: Engine, prompts: Sequence[Sequence[int]], decoding: Decoding, graphs: GraphTimes) -> Span:
    """When CUDA graphs ran while an engine answered; they were all recorded within `graphs.recording()`."""
    with graphs.replays() as found:
        engine.generate(prompts, decoding)
    return span_between(found)


def span_between(graphs: Iterable[tuple[float, float]]) -> Span:
    """The same of graphs that ran from some millisecond to another, in any order."""
    spans = sorted(graphs)
    waiting, until = 0.0, spans[0][0]
    for begin, end in spans:
        waiting += max(0.0, begin - until)
        until = max(until, end)
    return Span(1e-3 * (until - spans[0][0]), 1e-3 * waiting)


def waits_between(kernels: Iterable[tuple[float, float, str]]) -> Waits:
    """The same of kernels that ran from some microsecond to another, in any order."""
    spans = sorted(kernels)
    short, until = 0.0, spans[0][0]
    for start, stop, _ in spans:
        short += start - until if 0 < start - until <= AT_ONCE else 0.0
        until = max(until, stop)
    half = spans[len(spans) // 4 : 3 * len(spans) // 4]
    found: dict[tuple[str, str], list[float]] = {}
    reached, last = half[0][0], half[0][2]
    for start, stop, name in half:
        if start > reached:
            found.setdefault((last[:48], name[:48]), []).append(start - reached)
        if stop > reached:
            reached, last = stop, name
    between = sorted(((*pair, len(each), sum(each)) for pair, each in found.items()), key=lambda row: -row[3])
    return Waits(1e-6 * short, sum(row[3] for row in between) / (reached - half[0][0]), between)


@dataclass(frozen=True)
class EngineSteps:
    """What an engine did of a batch that it had had before.

    Attributes:
        seconds, steps, tokens: in all, prefill included; block-causal models find prompts in the prefix cache.
        span: of the same again, by events in the CUDA graphs, of `AGAIN` runs the one that waited for a median share;
            waits: and once more, traced. None where it was not traced.
    """

    seconds: float
    steps: int
    tokens: int
    span: Span | None = None
    waits: Waits | None = None

    @property
    def idle(self) -> float | None:
        """The share of the time without a profiler in which no kernel runs."""
        if self.waits is None or self.span is None:
            return None
        return (self.span.waiting + self.waits.short) / self.span.seconds

    def cells(self) -> list[Cell]:
        """What `COLUMNS` say."""
        traced: list[Cell] = ["-", "-"]
        if self.waits is not None and self.idle is not None:
            traced = [100 * self.idle, 100 * self.waits.share]
        return [1e3 * self.seconds / self.steps, self.tokens / self.seconds, *traced]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "idle": self.idle}


AGAIN = 5
"""Runs without a profiler, of which the median counts."""
COLUMNS = ("engine ms/step, prefill included", "tokens/s", "idle %", "traced")


def steps_of(
    engine: Engine, prompts: Sequence[Sequence[int]], decoding: Decoding, graphs: GraphTimes, traced: bool
) -> Iterator[EngineSteps]:
    """Let an engine answer, which records what its steps need, and again; then once more with a trace, if wanted.

    graphs: within whose `recording()` the program was made, and this runs.
    """
    engine.generate(prompts, decoding)
    gc.collect()
    gc.freeze()  # as `dgraph serve` does: to look through a model and its compiler takes longer than a step
    done, begin = engine.stats.steps, time.perf_counter()
    answers = engine.generate(prompts, decoding)
    seconds, steps = time.perf_counter() - begin, engine.stats.steps - done
    found = EngineSteps(seconds, steps, sum(len(answer.token_ids) for answer in answers))
    yield found
    if traced:
        spans = [span_of(engine, prompts, decoding, graphs) for _ in range(AGAIN)]
        found = replace(found, span=sorted(spans, key=lambda span: span.waiting / span.seconds)[AGAIN // 2])
        yield replace(found, waits=waits_of(engine, prompts, decoding))


def waits_table(run: Run, found: Mapping[int, EngineSteps]) -> None:
    """Where the device waited longest in all, by number of sequences."""
    rows: list[list[Cell]] = [
        [batch, *pair, count, spent / count, spent / 1e3]
        for batch, one in found.items()
        if one.waits is not None
        for *pair, count, spent in one.waits.between[:10]
    ]
    if rows:
        columns = ["sequences", "after", "before", "times", "us each", "ms in all"]
        run.table("Where the device waits, in the middle half of a run", columns, rows)
        run.write()


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, for a trial")
    add_recipe(parser, "fast_dllm")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of the shorter run")
    parser.add_argument("--steps", type=int, default=32, help="per block of 32")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_run(parser)
    args = parser.parse_args(arguments)

    recipe = chosen(args)
    changes: dict[str, Any] = {"block_length": 32} | ({"num_hidden_layers": args.layers} if args.layers else {})
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    title = f"prompt {args.prompt}, {args.steps} steps per block of 32"
    times: dict[int, list[Cell]] = {}
    every: dict[int, EngineSteps] = {}
    graphs = GraphTimes()
    with Run(args, f"Steps of {args.shape} under {recipe}", arguments is None) as run, graphs.recording():
        with run.stage("weights"):
            model = random_model(args.shape, args.device, dtype, **changes)
        with run.stage("optimize"):
            program = dgraph.optimize(model, recipe.name, backend=args.backend, **recipe.options)
        draw = torch.Generator().manual_seed(0)
        for batch in args.batch:
            prompts = torch.randint(10, model.spec.vocab // 2, (batch, args.prompt), generator=draw).tolist()
            if run.late(f"{batch} sequences"):
                continue
            if program.graph_pool is not None:
                with run.stage(f"graphs of {batch}"):
                    program.warm_up(batch, args.prompt + 2 * args.tokens, steps=args.steps)
            alone = per_step(program, prompts, args.tokens, args.steps, args.repeat)
            median, fastest = statistics.median(alone), min(alone)
            run.say(f"{batch} sequences: generate {median:.3g} ms/step, fastest {fastest:.3g}")
            decoding = Decoding(max_new_tokens=2 * args.tokens, steps=args.steps, ignore_eos=True)
            longest = args.prompt + decoding.max_new_tokens
            with program.engine(max_sequences=batch, max_tokens=longest, max_batched_rows=batch * longest) as engine:
                for found in steps_of(engine, prompts, decoding, graphs, args.device != "cpu"):
                    every[batch], times[batch] = found, [median, fastest, *found.cells()]
                    run.report.data["engine"] = {str(batch): one.to_json() for batch, one in every.items()}
                    rows = [[batch, *cells] for batch, cells in times.items()]
                    run.arm(title, ["sequences", "generate ms/step", "fastest", *COLUMNS], rows)
            waits_table(run, every)


if __name__ == "__main__":
    main()

"""dLLM-Serve beside its baselines in one engine: the paper's figures 3, 4, 5, 7 and 8, and its table 4.

    python -m benchmarks.dllm_serve --shape llada-8b --json out.json --markdown out.md --plot out.png
    python -m benchmarks.dllm_serve --model tiny_llada --device cpu --backend eager --scale 0.1 --tokens 32 \
        --requests 8 --sequences 4 --lengths osc --memory keys:0.1 --rates 1.5

A subset of four to five minutes on one H200, half of which goes into three programs. The second command goes on where
the first one ended, with more memory. The third is about the logit budget, on a card of 24 GB:

    SUBSET="--shape llada-8b --lengths osc --tokens 64 --requests 96 --sequences 32 --commits one --parts loads \
        --no-tune --seconds 280 --json dllm_serve.json --markdown dllm_serve.md"
    ARMS="dllm_serve:delay=0@look_ahead fast_dllm@static fast_dllm@look_ahead sparse_dllm@static"
    python -m benchmarks.dllm_serve $SUBSET --simulate --rates 1.5 0.7 --memory keys:8 --arms $ARMS
    python -m benchmarks.dllm_serve $SUBSET --simulate --rates 1.5 0.7 --memory keys:8 keys:24 --arms $ARMS --resume
    python -m benchmarks.dllm_serve $SUBSET --rates 1.5 --memory 24 --arms dllm_serve:delay=0@look_ahead \
        dllm_serve:delay=0@look_ahead+all fast_dllm@static+all --resume

An arm is RECIPE[:KEY=VALUE,...]@SCHEDULER, with "+all" where logits of all rows exist at a time, as in the baselines of
the paper; else the logit budget (`--logit-rows`) is in force. All arms have the same engine: the paper's baselines have
engines of their own, which are not here. Its "engine" of figure 8 is therefore 1 by construction, up to what its keys
per head cost against Sparse-dLLM's.

Memory is "24" (GB of a card: what weights, activations and the logits of the arm leave is for keys and values), "card"
(all of this one) or "keys:8" (GB of keys and values under the logit budget; more logits take from it, and 8,192 rows of
them leave nothing of 8). Packed keys count.

Rates are shares of the capacity: what the first arm serves in a closed loop with a client for every slot. Lengths are
synthetic (see `benchmarks.serving_lengths`); the paper's responses have 256 tokens, so have these by default. Commits
are one token a step ("one"), or those of a trace ("trace").

Parts: loads (figures 3, 4, 5 and 8, table 4), lengths (figure 7), memory (what the logit budget leaves). An arm is
printed and written when it is over; `--resume` goes on from what --json has, `--seconds` ends it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

import dgraph
from benchmarks import dllm_serve_tables as tables
from benchmarks.dllm_serve_memory import Memory, MemoryLimit
from benchmarks.runs import Run, add_run
from benchmarks.serving_lengths import WORKLOADS, fixed
from dgraph.bench.arrivals import Request
from dgraph.bench.beside import Steps, simulated
from dgraph.bench.load import named, shape_of
from dgraph.bench.serve import LoadTest, ServedLoad, cut, prompts_for
from dgraph.bench.traces import read_trace
from dgraph.cli.options import recipe_options
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.engine.build import EngineConfig
from dgraph.engine.scheduling.schedulers import scheduler_of
from dgraph.errors import InputError
from dgraph.models.shapes import SHAPES
from dgraph.settings import named as named_recipe

ARMS = (
    "dllm_serve:delay=0@look_ahead",
    "dllm_serve:delay=0@fcfs",
    "fast_dllm@static+all",
    "fast_dllm@look_ahead",
    "dllm_cache:prompt_interval=100@static+all",
    "dllm_cache:prompt_interval=100@look_ahead",
    "sparse_dllm@static+all",
    "sparse_dllm@look_ahead",
    "dllm_serve:delay=0@static+all",
    "dllm_serve:delay=0@fcfs+all",
)
"""The paper's systems (its Table 3), each also with scheduler and logit budget, and the steps of figure 8."""
INPUTS, OUTPUTS = (100, 200, 300, 400, 500, 600), (128, 256, 384, 512)
"""Tokens of prompts and of responses of figure 7."""
PARTS = ("loads", "lengths", "memory")
COMMITS = ("one", "trace")
CAPACITY = "capacity"


@dataclass(frozen=True)
class Arm:
    """A recipe with its options as text, a scheduler, and whether the logit budget is in force."""

    recipe: str
    scheduler: str
    bounded: bool = True

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Read RECIPE[:KEY=VALUE,...]@SCHEDULER[+all].

        Raises:
            InputError: another form.
            UnknownName: an unknown scheduler.
        """
        recipe, at, rest = text.partition("@")
        scheduler, plus, logits = rest.partition("+")
        if not recipe or not at or (plus and logits != "all"):
            raise InputError(f"an arm is RECIPE[:KEY=VALUE,...]@SCHEDULER or ...@SCHEDULER+all, got {text!r}.")
        return cls(recipe, scheduler_of(scheduler).name, not plus)

    def __str__(self) -> str:
        return f"{self.recipe}@{self.scheduler}{'' if self.bounded else '+all'}"

    @property
    def options(self) -> dict[str, Any]:
        """Options of the recipe.

        Raises:
            UnknownName, InputError: as `recipe_options`.
        """
        return recipe_options(*named_recipe(self.recipe))

    @property
    def name(self) -> str:
        """Name of the recipe."""
        return named_recipe(self.recipe)[0]


@dataclass(frozen=True)
class Case:
    """Setting in which arms are compared: the lengths by name, how blocks commit, and the memory."""

    lengths: str
    commits: str
    memory: MemoryLimit

    def __str__(self) -> str:
        return f"{self.lengths}, {self.commits}, {self.memory}"


class Bench:
    """The model, the programs of the arms, and the loads that were measured.

    Args:
        args: of the command line.
        run: where arms are said and written.
        loads: of an earlier run that this one goes on from.
    """

    def __init__(self, args: argparse.Namespace, run: Run, loads: Sequence[dict[str, Any]] = ()):
        self.args, self.run, self.loads = args, run, list(loads)
        self.tell()
        self.device = torch.device(args.device)
        self.trace = read_trace(args.trace) if "trace" in args.commits else None
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        block = self.trace.block if self.trace is not None else args.block
        with run.stage("weights"):
            if args.model is None:
                self.model = shape_of(args.shape, self.device, dtype, args.layers, block)
            else:
                self.model = named(args.model, self.device, dtype, random_weights=False, block=block)
        self._programs: dict[tuple[str, int | None], CompiledModel] = {}
        self._ready: set[tuple[str, int, str]] = set()
        self._steps: dict[str, Steps] = {}

    def tell(self) -> None:
        """Put the loads, and the figures of them, into the report."""
        self.run.report.data["loads"] = self.loads
        if self.loads:
            self.run.table("Loads", tables.LOAD, tables.load_rows(self.loads), tables.LOAD_NOTE)
            tables.figures(self.run, self.loads)

    def found(self, **key: Any) -> dict[str, Any] | None:
        """The measured load of a key."""
        return next((one for one in self.loads if all(one[name] == value for name, value in key.items())), None)

    def program(self, arm: Arm, logit_rows: int | None = None) -> CompiledModel:
        """Program of an arm. logit_rows: rows whose logits exist at a time; None for the recipe's."""
        key = (arm.recipe, logit_rows)
        if key not in self._programs:
            if logit_rows is None:
                with self.run.stage(arm.recipe):
                    self._programs[key] = dgraph.optimize(
                        self.model,
                        arm.name,
                        backend=self.args.backend,
                        buckets=self.args.buckets,
                        tune=not self.args.no_tune,
                        **arm.options,
                    )
            else:
                whole = self.program(arm)
                same = whole.recipe.logit_rows == logit_rows
                self._programs[key] = whole if same else whole.with_logit_rows(logit_rows)
        return self._programs[key]

    def memory(self, arm: Arm, limit: MemoryLimit, requests: Sequence[Request]) -> Memory:
        """What an arm has for keys and values."""
        longest = max(request.prompt + request.new for request in requests)
        rows = max(self.args.rows or limit.rows, longest, 2 * self.model.spec.block_length)
        logit_rows = self.args.logit_rows if arm.bounded else rows
        program = self.program(arm, logit_rows)
        return Memory.of(program, limit, rows, self.args.logit_rows, self.args.sequences, requests)

    def requests(self, lengths: str, seed: int) -> list[Request]:
        """Requests of a workload, prompts cut to what the model can have."""
        args = self.args
        asked = WORKLOADS[lengths].requests(args.requests, seed, args.tokens, args.scale)
        return cut(asked, self.model.spec.max_positions)[0]

    def test(self, arm: Arm, commits: str, memory: Memory, requests: Sequence[Request], seed: int) -> LoadTest:
        """The load test of an arm, with a program that is compiled."""
        script = self.trace.script() if commits == "trace" and self.trace is not None else None
        steps = None if script is not None else self.model.spec.block_length
        decoding = dgraph.Decoding(policy=script, steps=steps, ignore_eos=True)
        program = self.program(arm, self.args.logit_rows if arm.bounded else memory.rows)
        settings = EngineConfig(
            max_sequences=memory.slots,
            max_tokens=max(request.prompt + request.new for request in requests),
            max_batched_rows=memory.rows,
            max_logit_rows=program.recipe.logit_rows,
            kv_bytes=memory.keys,
            decoding=decoding,
            record=self.args.buckets != "exact",
        )
        test = LoadTest(program, requests, prompts_for(self.model, requests, seed=seed), decoding, settings)
        if (key := (arm.recipe, program.recipe.logit_rows or 0, commits)) not in self._ready:
            self._ready.add(key)
            with self.run.stage(f"first load of {arm}"):
                test.prepare(arm.scheduler, min(8, self.args.sequences))
        return test

    def load(self, arm: Arm, case: Case, load: float | str, seed: int, requests: Sequence[Request]) -> None:
        """Measure a load, unless it was; load: share of the capacity, or `CAPACITY` to measure that."""
        key = {**tables.case_of(str(arm), case.lengths, case.commits, str(case.memory)), "load": load, "seed": seed}
        if self.found(**key) is not None or self.run.late(f"{arm}, {case}, {load}"):
            return
        rate, clients = None, 0
        memory = self.memory(arm, case.memory, requests)
        if load == CAPACITY:
            clients = memory.slots
            requests = requests[: max(2 * clients, self.args.requests // 4)]
        elif (capacity := self.capacity(case)) is not None:
            rate = float(load) * capacity
        else:
            return
        test = self.test(arm, case.commits, memory, requests, seed)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        served = test.run(arm.scheduler, rate, clients=clients, seed=seed)
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
        beside = self._beside(arm, case, test, served, rate, clients, seed) if self.args.simulate else {}
        found = served.to_json()
        del found["requests_each"], found["engine"]
        self.loads.append({**key, **memory.to_json(), "peak": peak, **found, **beside})
        self.tell()
        self.run.arm("Loads", tables.LOAD, tables.load_rows(self.loads), tables.LOAD_NOTE)

    def capacity(self, case: Case) -> float | None:
        """Requests per second of the first arm in a closed loop; None if that was not measured."""
        first = tables.case_of(str(self.args.arms[0]), case.lengths, case.commits, str(case.memory))
        found = self.found(**first, load=CAPACITY)
        return None if found is None else float(found["steady"])

    def _beside(
        self, arm: Arm, case: Case, test: LoadTest, served: ServedLoad, rate: float | None, clients: int, seed: int
    ) -> dict[str, Any]:
        """The same load in the simulator, with the times of this program's steps."""
        if arm.recipe not in self._steps:
            with self.run.stage(f"steps of {arm.recipe}"):
                self._steps[arm.recipe] = Steps.of(test.optimized, test.settings.max_batched_rows or 8192)
        trace = self.trace if case.commits == "trace" else None
        found = simulated(test, served, self._steps[arm.recipe], rate, trace=trace, clients=clients, seed=seed)
        return {"simulated": None if found is None else found.summary.to_json()}


def run_loads(bench: Bench) -> None:
    """Every arm at every rate; the highest rates first."""
    args = bench.args
    for lengths, commits, memory in product(args.lengths, args.commits, args.memory):
        case = Case(lengths, commits, memory)
        for load, seed in product([CAPACITY, *sorted(args.rates, reverse=True)], range(args.seeds)):
            requests = bench.requests(lengths, seed)
            for arm in args.arms[:1] if load == CAPACITY else args.arms:
                if load != CAPACITY or seed == 0:
                    with bench.run.told(f"{arm}, {case}, {load}"):
                        bench.load(arm, case, load, seed, requests)


def run_lengths(bench: Bench) -> None:
    """Figure 7: arms of sparse_dllm and dllm_serve at prompts and responses of one length, all requests at once."""
    args = bench.args
    asked = [*((n, args.outputs[len(args.outputs) // 2]) for n in args.inputs)]
    asked += [(args.inputs[len(args.inputs) // 2], n) for n in args.outputs]
    arms = [arm for arm in args.arms if arm.name in ("sparse_dllm", "dllm_serve")]
    for (prompt, new), memory, arm in product(dict.fromkeys(asked), args.memory[:1], arms):
        case = Case(f"{prompt}+{new}", "one", memory)
        with bench.run.told(f"{arm}, {case}"):
            bench.load(
                arm, case, CAPACITY, 0, cut(fixed(prompt, new, args.requests), bench.model.spec.max_positions)[0]
            )


def run_memory(bench: Bench) -> None:
    """What the logit budget leaves for keys and values, by memory and recipe."""
    args, rows = bench.args, []
    for arm, limit in product(
        dict.fromkeys(replace(arm, scheduler="fcfs", bounded=True) for arm in args.arms), args.memory
    ):
        for bounded in (True, False):
            one = replace(arm, bounded=bounded)
            if not bench.run.late(f"memory of {one}"):
                found = bench.memory(one, limit, bench.requests(args.lengths[0], 0))
                rows.append([arm.recipe, str(limit), *found.cells()])
                bench.run.arm("Logit budget", ["recipe", "memory", *Memory.COLUMNS], rows, Memory.NOTE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, write; 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--model", help="instead: an embedded model or a checkpoint folder, with its weights")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, for a trial")
    parser.add_argument("--block", type=int, default=32, help="without a trace")
    parser.add_argument("--arms", nargs="+", type=Arm.parse, default=[Arm.parse(text) for text in ARMS])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="in this order")
    parser.add_argument("--lengths", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--tokens", default="256", help='new tokens; "" for those of the workload')
    parser.add_argument("--scale", type=float, default=1.0, help="of the prompts' lengths, for a small trial")
    parser.add_argument("--commits", nargs="+", choices=COMMITS, default=list(COMMITS))
    parser.add_argument("--trace", default="benchmarks/traces/text.json", help="of commits")
    parser.add_argument(
        "--memory", nargs="+", type=MemoryLimit.parse, default=[MemoryLimit.parse(m) for m in ("24", "48", "card")]
    )
    parser.add_argument("--rates", nargs="+", type=float, default=[0.5, 0.7, 0.9, 1.1, 1.5], help="of the capacity")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds, each with its own requests and arrivals")
    parser.add_argument("--sequences", type=int, default=64, help="slots at most; fewer where memory holds fewer")
    parser.add_argument("--rows", type=int, help="of a step; default 4,096 up to 24 GB of memory, 16,384 above")
    parser.add_argument("--logit-rows", type=int, default=2048, help="the logit budget")
    parser.add_argument("--inputs", nargs="+", type=int, default=INPUTS, help="of figure 7")
    parser.add_argument("--outputs", nargs="+", type=int, default=OUTPUTS, help="of figure 7")
    parser.add_argument(
        "--simulate", action="store_true", help="each load in the simulator, too, with steps timed here"
    )
    parser.add_argument("--no-tune", action="store_true", help="time no tilings of kernels")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--buckets", help="exact, hybrid or fine; default that of the device")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plot", type=Path, help="draw figures 3, 4 and 5 (needs matplotlib)")
    parser.add_argument("--resume", action="store_true", help="go on from the loads that --json has")
    add_run(parser)
    args = parser.parse_args(arguments)
    kept = args.json is not None and args.resume and args.json.is_file()
    before = json.loads(args.json.read_text("utf-8"))["data"].get("loads", []) if kept else []
    with Run(args, f"dLLM-Serve and its baselines, {args.model or args.shape}", arguments is None) as run:
        bench = Bench(args, run, before)
        parts = {"loads": run_loads, "lengths": run_lengths, "memory": run_memory}
        for part in args.parts:
            with run.told(part):
                parts[part](bench)
    if args.plot is not None and bench.loads:
        tables.plot(bench.loads, args.plot)
    return min(1, run.failed)


if __name__ == "__main__":
    raise SystemExit(main())

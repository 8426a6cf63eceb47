"""A model and its requests by the options of a command line, for scripts that put an engine under load."""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

import dgraph
from benchmarks.recipes import add_recipe, chosen
from benchmarks.runs import Run, add_run
from dgraph.bench.arrivals import Lengths, drawn
from dgraph.bench.load import named, shape_of
from dgraph.bench.serve import LoadTest, prompts_for
from dgraph.bench.traces import read_trace
from dgraph.engine.build import EngineConfig
from dgraph.models.shapes import SHAPES


def add_load(parser: argparse.ArgumentParser, **defaults: object) -> None:
    """What `ready` and `Run` ask for; defaults: other ones than here."""
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--model", help="instead: an embedded model or a checkpoint folder, with its weights")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, for a trial")
    parser.add_argument("--block", type=int, default=32, help="without a trace")
    add_recipe(parser, "fast_dllm")
    parser.add_argument("--commits", help="a trace of commits that every arm follows")
    parser.add_argument(
        "--steps", type=int, default=32, help="instead: steps per block; as many as it has rows: one token a step"
    )
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", default="uniform:64-2048", help="tokens of a prompt")
    parser.add_argument("--tokens", default="uniform:32-512", help="new tokens")
    parser.add_argument("--sequences", type=int, default=64, help="slots")
    parser.add_argument("--rows", type=int, help="of a step; default the engine's")
    parser.add_argument("--logit-rows", type=int, help="rows whose logits exist at a time; default the recipe's")
    parser.add_argument("--kv-gib", type=float, help="memory of keys and values; default the engine's")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--buckets", help="exact, hybrid or fine; default that of the device")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    add_run(parser)
    parser.set_defaults(**defaults)


def ready(args: argparse.Namespace, run: Run, scheduler: str, clients: int) -> LoadTest:
    """The model and its requests, after a brief load of so many clients. Says what each stage of the start took."""
    recipe, device = chosen(args), torch.device(args.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    trace = None if args.commits is None else read_trace(args.commits)
    block = trace.block if trace is not None else args.block
    with run.stage("weights"):
        if args.model is None:
            model = shape_of(args.shape, device, dtype, args.layers, block)
        else:
            model = named(args.model, device, dtype, random_weights=False, block=block)
    steps = None if trace is not None else args.steps
    decoding = dgraph.Decoding(policy=trace.script() if trace else None, steps=steps, ignore_eos=True)
    requests = drawn([0.0] * args.requests, Lengths(args.prompt), Lengths(args.tokens, "--tokens"), args.seed)
    settings = EngineConfig(
        max_sequences=args.sequences,
        max_tokens=max(request.prompt + request.new for request in requests),
        max_batched_rows=args.rows,
        max_logit_rows=args.logit_rows,
        kv_bytes=None if args.kv_gib is None else int(args.kv_gib * 2**30),
        scheduler=scheduler,
        decoding=decoding,
        record=args.buckets != "exact",
    )
    running = {"backend": args.backend, "buckets": args.buckets}
    with run.stage("optimize"):
        optimized = dgraph.optimize(model, recipe.name, **running, **recipe.options)
        prompts = prompts_for(model, requests, seed=args.seed)
        test = LoadTest(optimized, requests, prompts, decoding, settings)
    with run.stage("engine"), test.optimized.engine(test.settings):
        pass
    with run.stage("first load"):
        test.prepare(scheduler, clients)
    return test


def first_of(test: LoadTest, count: int) -> LoadTest:
    """The same test with the first requests alone."""
    return replace(test, requests=test.requests[:count], prompts=test.prompts[:count])

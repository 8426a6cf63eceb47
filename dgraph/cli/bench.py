"""`dgraph bench`: cost of a step next to its floor and to another recipe; `record`: traces; `serve`: an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgraph.cli import decoding_args as args
from dgraph.cli import options as given
from dgraph.cli import workload
from dgraph.cli.bench_serve import serve
from dgraph.cli.output import ERR, check_file, complain, print_json, print_table, print_text, status, writes
from dgraph.cli.ranks import ranks
from dgraph.errors import DgraphError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from dgraph.bench.arms import Arm
    from dgraph.bench.load import Load
    from dgraph.bench.measure import Bench, Measured
    from dgraph.families import Model

app = typer.Typer(add_completion=False)
app.command()(serve)


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    model: workload.Named = None,
    shape: workload.Shape = None,
    random_weights: workload.RandomWeights = False,
    layers: workload.Layers = None,
    recipe: args.Recipe = "focus",
    option: given.Options = None,
    kv_dtype: given.KvDtype = None,
    against: Annotated[str | None, typer.Option(help="A recipe to compare with, measured first.")] = None,
    batch: Annotated[int, typer.Option(help="Prompts, decoded together.")] = 8,
    prompt: Annotated[
        str,
        typer.Option(help="Tokens of a prompt: a number, uniform:128-1024, lognormal:MEDIAN,SIGMA, or a JSONL file."),
    ] = "128",
    tokens: Annotated[int, typer.Option(help="New tokens per prompt.")] = 64,
    block: workload.Block = None,
    commits: workload.Commits = None,
    steps: workload.Steps = None,
    threshold: workload.Threshold = None,
    ablation: Annotated[
        bool, typer.Option("--ablation", help="Also measure the recipe without each of its parts.")
    ] = False,
    buckets: given.Buckets = None,
    no_graphs: workload.NoGraphs = False,
    backend: workload.Backend = "inductor",
    repeat: Annotated[int, typer.Option(help="Timed runs; the median counts.")] = 3,
    dtype: workload.Dtype = None,
    weights: given.Weights = None,
    device: workload.Device = None,
    tp: given.Ranks = 1,
    fact: given.Facts = None,
    calibration: given.Calibration = None,
    json: Annotated[Path | None, typer.Option(help="Write all results to this JSON file.", show_default=False)] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this file.", show_default=False)] = None,
) -> None:
    """Measure what a step costs: time by stage and kernel, rows, memory, host reads, and its floor at the same rows.

    The floor is the time of the step's matrix products at the very row counts that were met, and of the bytes that
    attention reads. It is measured in the same run; ratio is time over floor. Attention over packed keys, or that is
    updated, has no floor: floor and ratio are of the products alone. Time starts after the prefill. No token ends a
    response here, so that every arm decodes as many. Under a trace that says which columns are kept, a recipe that
    evicts keeps these (select=scripted), unless an option says otherwise.

    \b
    dgraph bench --model tiny_sdar --against dense --commits benchmarks/traces/text.json
    dgraph bench --shape sdar-8b --batch 64 --prompt 1024 --against dense --commits benchmarks/traces/text.json
    dgraph bench --model tiny_sdar --recipe focus --ablation --json out.json --plot out.png
    dgraph bench record --model tiny_sdar --threshold 0.9 --out trace.json
    """
    if context.invoked_subcommand is not None:
        return
    import dgraph.bench.report as written
    from dgraph.bench.load import endless
    from dgraph.compiler.base_graph import quantising

    options = given.recipe_options(recipe, option, kv_dtype)
    if against is not None:
        given.recipe_options(against, None)
    facts = given.facts(fact, calibration)
    workload.check_model(model, shape, layers, facts)
    for name, value in (("--batch", batch), ("--tokens", tokens), ("--repeat", repeat), ("--layers", layers)):
        if value is not None and value < 1:
            raise InputError(f"{name} must be at least 1, got {value}.")
    workload.check_files(json, plot)
    where = workload.device_of(device)
    rows = given.bucket_list(buckets)
    load = _load(commits, steps, threshold, prompt, batch, tokens, block)
    kind = workload.dtype_of(dtype, where)
    quantising(weights)
    with ranks(tp, str(where)) as mesh:
        opened = mesh is not None or weights is not None
        with status("loading"):
            length = load.trace.block if load.trace else block
            found = endless(workload.model_of(model, shape, where, kind, random_weights, layers, length, facts, opened))
            measure = replace(_bench(found, load, where, backend, rows, repeat), mesh=mesh, weights=weights)
            arms = _arms(measure, recipe, options, against, ablation, not no_graphs, where)
        over = "" if mesh is None else f" over {mesh.size()} ranks"
        over += "" if weights is None else f", weights {weights}"
        title = (
            f"{found.name}{over}: {batch} prompts of {prompt}, {tokens} new tokens, blocks of {found.spec.block_length}"
        )
        setting = {**written.machine(where), "title": title, "model": found.spec.to_json(), "buckets": rows}
        setting["commits"] = commits or workload.written_commits(measure.load.decoding)
        _measure(measure, arms, measure.load, setting, json, plot)


def _measure(
    measure: Bench, arms: Sequence[Arm], load: Load, setting: dict[str, Any], json: Path | None, plot: Path | None
) -> None:
    """Measure every arm, and show the measurements."""
    import dgraph.bench.report as written

    done: list[Measured] = []
    failed: dict[str, str] = {}
    try:
        with _progress(len(arms)) as tell:
            for arm in arms:
                try:
                    done.append(measure(arm, lambda what, arm=arm: tell(arm.label, what, len(done))))  # type: ignore[misc]
                except (DgraphError, RuntimeError) as error:  # running out of memory is a result, too
                    if not isinstance(error, DgraphError) and "out of memory" not in str(error):
                        raise
                    failed[arm.label] = str(error).partition("\n")[0]
    finally:  # after Ctrl-C, too: shows what was measured until then
        _show(done, failed, load, setting["title"], setting)
        if json is not None and done:
            workload.write_json(json, written.to_json(done, failed, setting))
        if plot is not None and done and writes():
            written.plot(done, plot, setting["title"])
    if not done:
        raise InputError("no arm could be measured.")


@app.command()
def record(
    model: Annotated[str, typer.Option("--model", "-m", help=workload.NAMED)] = "tiny_sdar",
    out: Annotated[Path | None, typer.Option(help="The file to write; required.", show_default=False)] = None,
    recipe: args.Recipe = "focus",
    option: given.Options = None,
    kv_dtype: given.KvDtype = None,
    threshold: Annotated[float, typer.Option(help="Commit tokens above this confidence, in (0, 1].")] = 0.9,
    prompts: Annotated[int, typer.Option(help="Number of the model's held-out passages.")] = 50,
    prompt_file: Annotated[
        str | None, typer.Option(help="A file with a prompt per line, instead of held-out passages.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Length limit of a response.")] = 128,
    backend: Annotated[str, typer.Option(help="inductor, or eager to run op by op.")] = "inductor",
    weights: given.Weights = None,
    dtype: given.Dtype = None,
    device: given.Device = None,
    fact: given.Facts = None,
    json: given.Json = False,
) -> None:
    """Record a model's commits, and the columns kept after an eviction, as a trace.

    \b
    dgraph bench record --model tiny_sdar --recipe focus --threshold 0.41 --out trace.json
    """
    import dgraph
    from dgraph.bench.record import record as run
    from dgraph.bench.record import report, text_prompts
    from dgraph.compiler.base_graph import quantising
    from dgraph.recipes import RECIPES, build

    if out is None:
        raise InputError("--out is missing; name the file that the trace is written to.")
    check_file("--out", out)
    options = given.recipe_options(recipe, option, kv_dtype)
    for name, value in (("--prompts", prompts), ("--tokens", tokens)):
        if value < 1:
            raise InputError(f"{name} must be at least 1, got {value}.")
    decoding, holds = dgraph.Decoding(max_new_tokens=tokens, threshold=threshold), given.facts(fact)
    quantising(weights)  # refuses what it does not know
    where, opened = given.torch_device(device), weights is not None
    with status("loading") as tell:
        found = dgraph.load(model, given.torch_dtype(dtype), where, opened, **holds)
        build(RECIPES, recipe, found.spec, options)
        texts = text_prompts(model, prompts) if prompt_file is None else given.read_prompts(None, prompt_file)
        how: dict[str, Any] = {"backend": backend, "options": options, "weights": weights}
        recorded = run(found, texts, recipe, decoding, **how, tell=tell)
    recorded.trace.write(out)
    facts = report(recorded)
    if json:
        print_json(facts)
    else:
        print_table(("trace", str(out)), [(key.replace("_", " "), _text(value)) for key, value in facts.items()])


def _text(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _load(
    commits: str | None,
    steps: int | None,
    threshold: float | None,
    prompt: str,
    batch: int,
    tokens: int,
    block: int | None,
) -> Load:
    """The workload, with lists of zeros of the prompts' lengths in place of their ids."""
    from dgraph.bench.arrivals import Lengths
    from dgraph.bench.load import Load

    decoding, trace = workload.commits_of(commits, steps, threshold, tokens, block)
    return Load([[0] * length for length in Lengths(prompt).draw(batch)], decoding, trace)


def _bench(
    model: Model,
    load: Load,
    device: torch.device,
    backend: str,
    buckets: str | list[int] | None,
    repeat: int,
) -> Bench:
    from dgraph.bench.floor import Device
    from dgraph.bench.load import prompts_of
    from dgraph.bench.measure import Bench
    from dgraph.lowering.buckets import Buckets
    from dgraph.lowering.regions import RegionCompiler
    from dgraph.runtime.request_checks import check_request

    RegionCompiler(backend)
    if buckets is not None:
        Buckets.of(buckets)
    prompts = prompts_of(model, [len(p) for p in load.prompts])
    load = replace(load, prompts=prompts, decoding=workload.decided(load.decoding, model.spec))
    check_request(model.spec, load.prompts, load.decoding, None)
    return Bench(model, load, Device(device), backend, buckets, repeat)


def _arms(
    measure: Bench,
    recipe: str,
    options: dict[str, Any],
    against: str | None,
    ablation: bool,
    graphs: bool,
    device: torch.device,
) -> list[Arm]:
    from dgraph.bench.arms import Arm
    from dgraph.bench.arms import ablation as lacking
    from dgraph.recipes import RECIPES, build

    options = workload.scripted(recipe, options, measure.load.trace)
    arms = []
    if against is not None:
        arms.append(Arm(against, build(RECIPES, against, measure.model.spec, {}), graphs))
    label = ", ".join([recipe, *(f"{key}={value}" for key, value in options.items())])
    whole = Arm(label, build(RECIPES, recipe, measure.model.spec, options), graphs)
    arms.append(whole)
    return arms + (list(lacking(whole, device.type == "cuda")) if ablation else [])


def _show(done: Sequence[Measured], failed: dict[str, str], load: Load, title: str, setting: dict[str, Any]) -> None:
    import dgraph.bench.report as written

    if done:
        print_text(f"{title}; {setting['device']}, torch {setting['torch']}")
        if load.trace is not None:
            rows = load.trace.redundancy()
            print_text(
                f"trace: {load.trace.source}; rows per token of its blocks: {rows.dense:.2f} dense"
                + (
                    f", {rows.kept:.2f} kept ({rows.recommitted:.2f} with recommit)"
                    if rows.kept and rows.recommitted
                    else ""
                )
            )
    for titles, rows_of in written.tables(done) if done else ():
        print_text("")
        print_table(titles, rows_of)
    for label, reason in failed.items():
        complain(f"{label} was not measured: {reason}")


@contextmanager
def _progress(arms: int) -> Iterator[Callable[[str, str, int], None]]:
    """Show a bar over the arms and the work in progress, while stderr is a terminal."""
    if not ERR.is_terminal:
        yield lambda arm, what, done: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=ERR, transient=True) as bar:
        task = bar.add_task("", total=arms)
        yield lambda arm, what, done: bar.update(task, completed=done, description=f"{arm}: {what}")

"""`dgraph profile`: use of a device's memory, and the number of sequences that fit."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgraph.cli import decoding_args as args
from dgraph.cli import options as given
from dgraph.cli.output import check_file, plain, print_table, print_text, status, write_file
from dgraph.cli.units import read_size, size_text
from dgraph.errors import InputError

if TYPE_CHECKING:
    from dgraph.engine.memory.profile import Profile


def profile(
    model: given.Model,
    recipe: args.Recipe = "focus",
    option: given.Options = None,
    kv_dtype: given.KvDtype = None,
    rows: Annotated[
        int | None, typer.Option(help="Rows of a step at most.", show_default="16384 on a GPU, 1024 on a CPU")
    ] = None,
    logit_rows: Annotated[
        int | None,
        typer.Option(help="Rows of an LM-head chunk: logits in memory at a time.", show_default="the recipe's"),
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option(help="Sequences that the decode state has room for.", show_default="as many as have a block each"),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory limit in bytes, as 24G.", show_default="the GPU's; 4G on a CPU"),
    ] = None,
    steps: Annotated[bool, typer.Option("--steps", help="Also time steps, for `dgraph simulate`.")] = False,
    shape: Annotated[
        bool, typer.Option("--shape", help="MODEL is a published shape with random weights, as llada-8b.")
    ] = False,
    buckets: given.Buckets = None,
    backend: Annotated[str, typer.Option(help="inductor, or eager to run op by op.")] = "inductor",
    dtype: given.Dtype = None,
    weights: given.Weights = None,
    device: given.Device = None,
    fact: given.Facts = None,
    json: Annotated[Path | None, typer.Option(help="Write all results to this JSON file.", show_default=False)] = None,
) -> None:
    """Say where the memory of a device goes when a model is served, and how many sequences of which length fit.

    Activations are predicted from the programs, and measured by a dummy step of as many rows as a step may have; in
    code that was compiled for a CPU they cannot be seen (--backend eager shows them). The memory that weights, CUDA
    graphs, activations, state and a guard (2 % of a GPU) leave is for keys and values.

    \b
    dgraph profile tiny_llada --recipe fast_dllm --memory 1G
    dgraph profile ./LLaDA-8B-Instruct -r dllm_serve --rows 16384 --logit-rows 2048 --device cuda --dtype bfloat16
    dgraph profile llada-8b --shape -r fast_dllm --device cuda --steps --json profile.json
    """
    import dgraph
    from dgraph.engine.memory.profile import profile as run

    options, facts, limit = (
        given.recipe_options(recipe, option, kv_dtype),
        given.facts(fact),
        read_size("--memory", memory),
    )
    if json is not None:
        check_file("--json", json)
    if shape and facts:
        raise InputError("--fact is for a model; a published shape has its own.")
    for name, value in (("--rows", rows), ("--logit-rows", logit_rows), ("--sequences", sequences)):
        if value is not None and value < 1:
            raise InputError(f"{name} must be at least 1, got {value}.")
    with status("loading") as tell:
        named: Any = _shape(model, dtype, device) if shape else model
        optimized = dgraph.optimize(
            named,
            recipe,
            buckets=given.bucket_list(buckets),
            backend=backend,
            dtype=None if shape else given.torch_dtype(dtype),
            device=None if shape else given.torch_device(device),
            facts=facts,
            progress=tell,
            weights=weights,
            **options,
        )
        found = run(optimized, rows, logit_rows, limit, sequences=sequences, steps=steps, progress=tell)
    _show(found)
    if json is not None:
        text = jsonlib.dumps(plain(_facts(found)), indent=1, allow_nan=False)
        write_file("--json", json, f"{text}\n")


def _shape(name: str, dtype: str | None, device: str | None) -> Any:
    import torch

    from dgraph.bench.load import shape_of

    where = given.torch_device(device) or torch.device("cpu")
    return shape_of(name, where, given.shape_dtype(dtype, torch.bfloat16))


def _facts(found: Profile) -> dict[str, Any]:
    from dgraph.engine.scheduling.cost_model import CostModel

    cost = {"cost": CostModel.fit(found.steps).to_json()} if found.steps else {}
    return {**found.to_json(), **cost}


def _show(found: Profile) -> None:
    print_text(
        f"{found.model} under {found.recipe} on {found.device}: {found.rows} rows, logits of {found.logit_rows}, "
        f"{found.sequences} sequences\n"
    )
    measured = "" if found.measured is None else f", measured {size_text(found.measured)}"
    each = (f", {size_text(size)} of a window of {window}" for window, size, _ in found.kv_cost.rings)
    windows = "".join(each)
    lines = [
        ("weights", found.weights, ""),
        ("libraries", found.libraries, ""),
        ("CUDA graphs", found.graphs, ""),
        ("activations", found.activations, f"predicted {size_text(found.predicted)}{measured}"),
        *((f"  {group}", size, "at most, while it runs") for group, size in found.groups.items()),
        ("  LM head, all rows", found.unbounded, "without a bound on rows of logits"),
        ("state", found.state, ""),
        ("guard", found.guard, ""),
        ("keys and values", found.kv, f"{size_text(found.kv_cost.position)} per position{windows}"),
        ("in all", found.memory, ""),
    ]
    print_table(("", "memory", ""), [(what, size_text(size), note) for what, size, note in lines])
    if found.left < 0:
        print_text(f"\nNothing is left for keys and values: {size_text(-found.left)} are missing.")
    print_text("")
    counts = ((length, found.fits(length), found.fits(length, bounded=False)) for length in found.lengths)
    print_table(("positions", "sequences", "without the bound"), [tuple(map(str, line)) for line in counts])
    if found.steps:
        print_text("")
        timed = [(str(rows), str(keys), f"{1e3 * seconds:.2f}") for rows, keys, seconds in found.steps]
        print_table(("rows", "keys", "ms"), timed)

"""The workload of a measurement from the command line: a model, and the rule that commits its tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgraph.cli import options as given
from dgraph.cli.output import check_file, plain, write_file
from dgraph.errors import InputError
from dgraph.settings import DtypeLike

if TYPE_CHECKING:
    import torch

    from dgraph.bench.traces import Trace
    from dgraph.families import Model
    from dgraph.runtime.decoding import Decoding
    from dgraph.spec import ModelSpec

NAMED = "Name of an embedded model, or a checkpoint folder."

Named = Annotated[str | None, typer.Option("--model", "-m", help=NAMED, show_default=False)]
Shape = Annotated[
    str | None,
    typer.Option(help="A published shape with random weights, as sdar-8b, instead of --model.", show_default=False),
]
RandomWeights = Annotated[
    bool, typer.Option("--random-weights", help="Draw random weights instead of loading the model's.")
]
Layers = Annotated[int | None, typer.Option(help="Number of layers, at most those of the shape.", show_default=False)]
Block = Annotated[int | None, typer.Option(help="Rows per block.", show_default="the model's")]
Commits = Annotated[str | None, typer.Option(help="A trace of commits that every arm follows.", show_default=False)]
Steps = Annotated[
    int | None, typer.Option(help="Fixed steps per block, instead of --threshold.", show_default="15, without a trace")
]
Threshold = Annotated[
    float | None, typer.Option(help="Commit tokens above this confidence, instead of --steps.", show_default=False)
]
NoGraphs = Annotated[bool, typer.Option("--no-graphs", help="Launch op by op on a GPU.")]
Backend = Annotated[str, typer.Option(help="inductor, or eager to run op by op.")]
Dtype = Annotated[str | None, typer.Option(help=given.DTYPE, show_default="float32 on a CPU, bfloat16 on a GPU")]
Device = Annotated[str | None, typer.Option(help="Device: cpu, cuda, cuda:1, ...", show_default="cuda if there is one")]


def check_files(numbers: Path | None, plot: Path | None) -> None:
    """Raise `InputError` if results could not be written at the end."""
    for option, path in (("--json", numbers), ("--plot", plot)):
        if path is not None:
            check_file(option, path)
    if plot is not None:
        from dgraph.bench.report import check_plot

        check_plot(plot)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write results to a file. Raises `InputError` if that fails."""
    write_file("--json", path, json.dumps(plain(value), indent=1, allow_nan=False) + "\n")


def device_of(name: str | None) -> torch.device:
    """A device by name; without a name the GPU if there is one, else the CPU."""
    import torch

    return given.torch_device(name) or torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dtype_of(name: str | None, device: torch.device) -> DtypeLike:
    """A dtype by name, or "auto"; without a name float32 on a CPU, and bfloat16 elsewhere."""
    import torch

    return given.torch_dtype(name) or (torch.float32 if device.type == "cpu" else torch.bfloat16)


def check_model(model: str | None, shape: str | None, layers: int | None, facts: dict[str, Any]) -> None:
    """Raise `InputError` unless the options name one model."""
    if (model is None) == (shape is None):
        raise InputError("give either --model or --shape, not both and not neither.")
    if facts and shape is not None:
        raise InputError("--fact is for --model; a published shape has its own.")
    if layers is not None and shape is None:
        raise InputError("--layers is for --shape; a model has the layers that it was trained with.")


def model_of(
    model: str | None,
    shape: str | None,
    device: torch.device,
    dtype: DtypeLike,
    random_weights: bool,
    layers: int | None,
    block: int | None,
    facts: dict[str, Any],
    opened: bool = False,
) -> Model:
    """Load the model that the options name; see `dgraph.load` for `opened`."""
    import torch

    from dgraph.bench import load as loads

    if block is not None and block < 1:
        raise InputError(f"--block must be at least 1, got {block}.")
    if shape is not None:
        return loads.shape_of(shape, device, given.shape_dtype(dtype, torch.float32), layers, block, opened)
    own: dict[str, Any] = {"random_weights": random_weights, "block": block, "opened": opened}
    return loads.named(str(model), device, dtype, **own, **facts)


def commits_of(
    commits: str | None, steps: int | None, threshold: float | None, tokens: int, block: int | None
) -> tuple[Decoding, Trace | None]:
    """The decoding that the options give, and the trace that it follows, if any.

    Without any of the options the decoding has no rule; see `decided`.

    Raises:
        InputError: several of the options, a trace that cannot be read, or one of another block length.
    """
    from dgraph.bench.traces import read_trace
    from dgraph.runtime.decoding import Decoding

    if sum(value is not None for value in (commits, steps, threshold)) > 1:
        raise InputError("give one of --commits, --steps and --threshold.")
    if commits is None:
        return Decoding(max_new_tokens=tokens, steps=steps, threshold=threshold), None
    trace = read_trace(commits)
    if block not in (None, trace.block):
        raise InputError(f"--block {block} does not fit {commits}, a trace of blocks of {trace.block}; leave it out.")
    return Decoding(max_new_tokens=tokens, policy=trace.script()), trace


def decided(decoding: Decoding, spec: ModelSpec) -> Decoding:
    """The decoding with its own rule, or else the model's own rule, or else 15 steps per block."""
    own = decoding.for_model(spec)
    return own if own.says_rule else replace(own, steps=15)


def written_commits(decoding: Decoding) -> dict[str, Any]:
    """The rule that commits tokens, as plain values for a report."""
    said = {"steps": decoding.steps, "threshold": decoding.threshold, "policy": decoding.policy}
    return {name: value for name, value in said.items() if isinstance(value, (int, float, str))}


def scripted(recipe: str, options: dict[str, Any], trace: Trace | None) -> dict[str, Any]:
    """Options of a recipe, with scripted eviction if the recipe evicts rows and the trace lists kept columns.

    An option that says which rows are kept stays.

    Raises:
        InputError: scripted eviction without a trace that lists kept columns.
    """
    from dgraph.recipes import RECIPES, Ablation, builder_of, options_of

    known, scripts = options_of(builder_of(RECIPES, recipe)), trace is not None and trace.keeps
    given = options.get("ablation", Ablation())
    if scripts and "ablation" in known and "select" not in options and given.select == Ablation.select:
        options = {**options, "ablation": replace(given, select="scripted")}
    if "scripted" in (options.get("select"), given.select) and not scripts:
        raise InputError("select=scripted keeps what a trace says; give --commits with a trace that has kept columns.")
    return options

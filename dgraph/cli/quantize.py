"""`dgraph quantize`: a checkpoint with weights of 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from dgraph.cli import options as given
from dgraph.cli.calibrate import prompts_of, read_prompts
from dgraph.cli.output import ERR, print_json, print_text, status
from dgraph.errors import InputError, UnknownName

METHODS = ("awq", "gptq")
"""Values of --calibrated."""


def quantize(
    model: given.Model,
    out: Annotated[Path, typer.Option(help="The folder to write, which must not exist.", show_default=False)],
    weights: Annotated[
        str,
        typer.Option(
            metavar=given.FORMAT,
            help="fp8, int8 or int4, with the keys of other commands: int4:block=1x64,zeros=true or fp8:lm_head=true.",
        ),
    ] = "int4",
    calibrated: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="Measure inputs on prompts: awq rounds columns of large ones more finely, gptq lets columns make up "
            "for the rounding of those before them.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help='With --calibrated: a JSONL file of {"prompt": ...}, instead of prompts of its own tasks.'),
    ] = None,
    count: Annotated[int | None, typer.Option(help="With --calibrated: prompts at most.", show_default="32")] = None,
    dtype: Annotated[
        str | None, typer.Option(help=f"With --calibrated: to measure in. {given.DTYPE}", show_default=False)
    ] = None,
    device: given.Device = None,
    json: given.Json = False,
) -> None:
    """Write a checkpoint again, its weights quantised, in the layout of compressed-tensors.

    Commands take the folder as they take other checkpoints, and so does what else reads compressed-tensors. One
    weight at a time is in memory, and the folder appears when it is complete.

    \b
    dgraph quantize tiny_sdar --out tiny_sdar-int4
    dgraph quantize tiny_sdar --out tiny_sdar-int4 --calibrated gptq --weights int4:zeros=true
    dgraph quantize ./SDAR-8B-Chat-b32 --weights fp8 --out SDAR-8B-Chat-b32-FP8 --device cuda
    """
    from dgraph.compiler.saving import Fold, check_out, check_weights, save_quantised
    from dgraph.evaluate.gptq import gptq_for
    from dgraph.evaluate.inputs import inputs_for
    from dgraph.evaluate.scales import scales_for
    from dgraph.families.quantised import QuantisedWeight

    if count is not None and count < 1:
        raise InputError(f"--count must be at least 1, got {count}.")
    if calibrated not in (None, *METHODS):
        raise UnknownName("method of --calibrated", calibrated, METHODS)
    measured = given.torch_dtype(dtype)
    alone = {"--prompts": (prompts, "on"), "--count": (count, "on"), "--dtype": (dtype, "in")}
    for name, (value, how) in alone.items():
        if value is not None and calibrated is None:
            raise InputError(f"{name} is what --calibrated measures {how}; give that too, or leave it out.")
    check_out(out)
    where, chosen = given.torch_device(device), check_weights(weights)
    folds: tuple[Fold, ...] = ()
    rounded: dict[str, QuantisedWeight] = {}
    if calibrated is not None:
        most = 32 if count is None else count
        texts = prompts_of(model, most, 0) if prompts is None else read_prompts(prompts)[:most]
        with status("measuring inputs") as say:
            inputs = inputs_for(model, texts, chosen, dtype=measured, device=where)
            if calibrated == "awq":
                folds = scales_for(inputs, lambda done, total: say(f"scales of {done} of {total} groups of weights"))
            else:
                rounded = gptq_for(inputs, lambda done, total: say(f"{done} of {total} weights"))
    with _progress() as tell:
        saved = save_quantised(model, out, chosen, device=where or "cpu", folds=folds, rounded=rounded, progress=tell)
    if json:
        facts = {"weights": weights, "tensors": saved.quantised, "folds": len(folds), "rounded": len(rounded)}
        sizes = {"bytes_before": saved.before, "bytes_after": saved.after}
        print_json({"model": model, "folder": str(saved.folder), **facts, **sizes})
    else:
        share = saved.after / saved.before
        print_text(
            f"{saved.quantised} weights of {model} as {weights}: {saved.after / 2**20:.1f} MiB, {share:.0%} of before; "
            f"written to {saved.folder}"
        )


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Show a bar over the bytes that are read, while stderr is a terminal."""
    if not ERR.is_terminal:
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    with Progress(BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=ERR, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

"""`dgraph export`: a rewritten program as a file of torch.export."""

from __future__ import annotations

from typing import Annotated

import typer

from dgraph.cli import decoding_args as args
from dgraph.cli import options as given
from dgraph.cli.output import print_json, print_text, status
from dgraph.errors import InputError


def export(
    model: given.Model,
    out: Annotated[str, typer.Option(metavar="FILE.pt2", help="The file to write.", show_default=False)],
    recipe: args.Recipe = "focus",
    phase: Annotated[str, typer.Option(help="The phase to export; see `dgraph dump`.")] = "step",
    option: given.Options = None,
    kv_dtype: given.KvDtype = None,
    dtype: given.Dtype = None,
    weights: given.Weights = None,
    device: given.Device = None,
    fact: given.Facts = None,
    calibration: given.Calibration = None,
    json: given.Json = False,
) -> None:
    """Write a phase of a recipe as a torch.export.ExportedProgram, which runs with torch and `dgraph.ops` alone.

    \b
    dgraph export tiny_sdar -r focus --out step.pt2
    """
    import dgraph
    from dgraph.compiler.exporting import SUFFIX, check_file

    for text in option or ():
        if "=" not in text and text.endswith(SUFFIX):
            raise InputError(f"-o is an option of the recipe, as in `dgraph generate`; the file is --out {text}.")
    check_file(out)
    options, facts = given.recipe_options(recipe, option, kv_dtype), given.facts(fact, calibration)
    with status("loading") as tell:
        made = dgraph.optimize(
            model,
            recipe,
            backend="eager",
            dtype=given.torch_dtype(dtype),
            device=given.torch_device(device),
            facts=facts,
            weights=weights,
            progress=tell,
            **options,
        )
        tell(f"exporting {phase}")
        written = made.export(out, phase)
    if json:
        names = {"inputs": list(written.inputs), "outputs": list(written.outputs)}
        print_json({"file": str(written.file), "phase": phase, "size": written.size, **names})
    else:
        print_text(str(written))

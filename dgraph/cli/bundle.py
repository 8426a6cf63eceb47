"""`dgraph bundle` and `dgraph replay`: a step in a file for a bug report, and that step run again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dgraph.cli import decoding_args as args
from dgraph.cli import options as given
from dgraph.cli.output import check_file, print_json, print_text, status
from dgraph.errors import InputError

DIFFERENT = 1


def bundle(
    context: typer.Context,
    model: given.Model,
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="The file to write.")] = "bundle.zip",
    step: Annotated[
        int | None,
        typer.Option(
            help="Number of the step, from 0.", show_default="the one that fails, else the last one", metavar="N"
        ),
    ] = None,
    with_weights: Annotated[bool, typer.Option("--with-weights", help="Put the weights in.")] = False,
    with_text: Annotated[
        bool, typer.Option("--with-text", help="Put the prompts and the texts of --stop in, not ids alone.")
    ] = False,
    prompt: args.Prompt = None,
    prompt_file: args.PromptFile = None,
    recipe: args.Recipe = "focus",
    option: given.Options = None,
    kv_dtype: given.KvDtype = None,
    max_new_tokens: args.MaxNewTokens = 128,
    threshold: args.Threshold = None,
    steps: args.Steps = None,
    policy: args.Policy = None,
    block_length: args.BlockLength = None,
    open_blocks: args.OpenBlocks = 1,
    temperature: args.Temperature = None,
    top_p: args.TopP = None,
    top_k: args.TopK = None,
    stop: args.Stop = None,
    seed: args.Seed = 0,
    max_batch: Annotated[int | None, typer.Option(help="Prompts decoded at a time.", show_default="all")] = None,
    backend: args.Backend = "auto",
    buckets: given.Buckets = None,
    dtype: given.Dtype = None,
    weights: given.Weights = None,
    device: given.Device = None,
    fact: given.Facts = None,
    calibration: given.Calibration = None,
    cache: args.Cache = True,
    json: given.Json = False,
) -> None:
    """Write one step of `dgraph generate` to a file that a bug report needs, and `dgraph replay` runs again.

    It takes the options of `generate`. It has token ids, keys and values, and no text. A step that fails is taken.

    \b
    dgraph bundle tiny_sdar -r focus -p "Sort these words: river stone" --step 0 --out step.zip
    dgraph bundle tiny_sdar -r focus -p "Sort these words: river stone" --with-weights
    """
    import dgraph
    from dgraph.cli.generate import check_prompts
    from dgraph.recipes import RECIPES, build

    for text in option or ():
        if "=" not in text and text.endswith(".zip"):
            raise InputError(f"-o is an option of the recipe, as in `dgraph generate`; the file is --out {text}.")
    options, rows = given.recipe_options(recipe, option, kv_dtype), given.bucket_list(buckets)
    facts, decoding = given.facts(fact, calibration), args.decoding_of(context.params)
    prompts = given.read_prompts(prompt, prompt_file)
    check_file("--out", Path(out))
    with status("loading") as tell:
        opened = weights is not None
        found = dgraph.load(model, given.torch_dtype(dtype), given.torch_device(device), opened, **facts)
        build(RECIPES, recipe, found.spec, options)
        check_prompts(found, prompts, decoding, max_batch)
        optimized = dgraph.optimize(
            found, recipe, backend=backend, buckets=rows, artifacts=cache, progress=tell, weights=weights, **options
        )
        tell("decoding")
        made = dgraph.bundle(
            optimized, out, prompts, decoding, step=step, weights=with_weights, text=with_text, max_batch=max_batch
        )
    if json:
        print_json({"file": out, "bundle": made.title, "exception": made.error})
        return
    print_text(f"{out}: {made.title}")
    if made.error is not None:
        print_text(f"{made.error['type']}: {made.error['message']}")


def replay(
    file: Annotated[str, typer.Argument(help="A bundle.", show_default=False)],
    model: Annotated[
        str | None,
        typer.Option(
            help="The model, as for `dgraph generate`.", show_default="by its name, or the weights in the bundle"
        ),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="inductor, or eager to run op by op.", show_default="as recorded")
    ] = None,
    weights: given.Weights = None,
    device: Annotated[str | None, typer.Option(help="Device: cpu, cuda, ...", show_default="as recorded")] = None,
    json: given.Json = False,
) -> None:
    """Run the step of a bundle again and compare. Nothing in the file is executed.

    Exit code 0 if the outputs are equal within rounding, or the same exception came; else 1.

    \b
    dgraph replay step.zip
    dgraph replay step.zip --backend eager --json
    """
    import dgraph

    with status("replaying"):
        found = dgraph.replay(file, model, backend=backend, device=given.torch_device(device), weights=weights)
    if json:
        print_json(found.to_json())
    else:
        print_text(str(found))
    if not found.same:
        raise typer.Exit(DIFFERENT)

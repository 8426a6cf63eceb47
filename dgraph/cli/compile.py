"""`dgraph compile`: fill the artifact cache ahead."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from dgraph.cli import decoding_args as args
from dgraph.cli import options as given
from dgraph.cli.cache_args import Folder, open_cache
from dgraph.cli.output import print_json, print_text, status
from dgraph.cli.ranks import ranks


def compile_(
    model: given.Model,
    recipe: args.Recipe = "focus",
    option: given.Options = None,
    kv_dtype: given.KvDtype = None,
    buckets: Annotated[
        str | None, typer.Option(help="Row counts to pad to: exact, hybrid, or a list as 8,16,32.", show_default=False)
    ] = None,
    dtype: given.Dtype = None,
    weights: given.Weights = None,
    device: given.Device = None,
    tp: given.Ranks = 1,
    fact: given.Facts = None,
    calibration: given.Calibration = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Largest batch size to compile and time kernels for, on a GPU.", show_default=False),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="Positions per sequence, with --batch.", show_default="the model's longest"),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Write the program to a folder, for `dgraph generate FOLDER`.", show_default=False
        ),
    ] = None,
    with_weights: Annotated[
        bool, typer.Option("--with-weights", help="Put the checkpoint into the folder of --to.")
    ] = False,
    backend: Annotated[str, typer.Option(help="inductor, or eager to run op by op.")] = "inductor",
    cache: Folder = None,
    check: given.Check = "",
    json: given.Json = False,
) -> None:
    """Compile a model under a recipe, so that later processes only load it. Stored artifacts are not made again.

    \b
    dgraph compile tiny_sdar -r focus
    dgraph compile tiny_sdar -r focus --to program --with-weights
    dgraph compile ./SDAR-8B-Chat-b32 -r focus -o alpha=1.8 --dtype bfloat16 --device cuda --batch 64
    """
    import dgraph
    from dgraph.errors import CacheError, InputError

    if batch is None and tokens is not None:
        raise InputError("--tokens is the length of the sequences of --batch; give that too, or leave it out.")
    if with_weights and to is None:
        raise InputError("--with-weights puts the weights into the folder of --to; give that, or leave it out.")
    facts = given.facts(fact, calibration)
    options, rows, store = given.recipe_options(recipe, option, kv_dtype), given.bucket_list(buckets), open_cache(cache)
    start = time.perf_counter()
    with ranks(tp, device) as mesh, status("loading") as tell:
        made = dgraph.optimize(
            model,
            recipe,
            backend=backend,
            buckets=rows,
            check=check,
            dtype=given.torch_dtype(dtype),
            device=given.torch_device(device),
            facts=facts,
            warmup=None if batch is None else dgraph.WarmUp(batch=batch, tokens=tokens),
            artifacts=store.root,
            progress=tell,
            mesh=mesh,
            weights=weights,
            **options,
        )
    seconds, compiler = time.perf_counter() - start, made.compiler
    if compiler.unstored:
        count = len(compiler.compiled) + len(compiler.loaded)
        raise CacheError(f"{len(compiler.unstored)} of {count} regions could not be stored in {store.root}.")
    saved = None if to is None else made.save(to, weights=with_weights)
    timed = len(made.tuning.timed) if made.tuning is not None else 0
    kernels = len(made.kernels.compiled)
    counts = {"compiled": len(compiler.compiled), "present": len(compiler.loaded), "timed": timed, "kernels": kernels}
    found = {**counts, "seconds": seconds}
    if json:
        folder = (
            {} if saved is None else {"folder": str(saved.folder), "artifacts": saved.artifacts, "size": saved.size}
        )
        made_of = {"model": made.model.name, "recipe": made.recipe.to_json()}
        print_json({**made_of, **found, "cache": str(store.root), **folder})
    else:
        there = f"{len(compiler.compiled)} regions compiled, {len(compiler.loaded)} already in the cache"
        tilings = f", tilings timed for {timed} shapes, {kernels} kernels compiled" if batch is not None else ""
        print_text(f"{made.model.name} under {recipe}: {there}{tilings} ({seconds:.1f} s)")
        if saved is not None:
            print_text(str(saved))

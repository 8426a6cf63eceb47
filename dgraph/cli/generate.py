"""`dgraph generate`: the main job."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Annotated

import typer

from dgraph.cli import options as given
from dgraph.cli.output import ERR, OUT, print_json, print_text, status

if TYPE_CHECKING:
    from dgraph.api import Result
    from dgraph.families import Model
    from dgraph.runtime.decoding import Decoding
    from dgraph.runtime.session import Progress


def generate(
    model: given.Model,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated.")] = None,
    prompt_file: Annotated[str | None, typer.Option(help="A file with a prompt per line; - for stdin.")] = None,
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="See `dgraph recipes`.")] = "focus",
    option: given.Options = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length limit of a response.")] = 128,
    threshold: Annotated[
        float | None, typer.Option(help="Commit tokens above this confidence, in (0, 1].", show_default="0.9")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Instead: steps per block.", show_default=False)] = None,
    policy: Annotated[
        str | None, typer.Option(help="A decoding rule by name; see `dgraph policies`.", show_default=False)
    ] = None,
    block_length: Annotated[int | None, typer.Option(help="Rows per block.", show_default="the model's")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the most likely token.", show_default="the policy's, or 0")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw from the most likely tokens of this share.", show_default="the policy's, or 1"),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Draw from so many tokens; 0 for all.", show_default="the policy's, or 0")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends a response; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    max_batch: Annotated[int | None, typer.Option(help="Prompts per batch.", show_default="all")] = None,
    backend: Annotated[str, typer.Option(help="inductor, or eager to run op by op.")] = "inductor",
    buckets: given.Buckets = None,
    dtype: given.Dtype = None,
    device: given.Device = None,
    fact: given.Facts = None,
    cache: Annotated[bool, typer.Option(help="Keep compiled code for later runs; see `dgraph cache`.")] = True,
    json: given.Json = False,
) -> None:
    """Continue prompts.

    \b
    dgraph generate tiny_sdar -p "Sort these words: river stone cloud maple"
    dgraph generate ./SDAR-8B-Chat-b32 -r focus -o alpha=1.8 -p "Why is the sky blue?" --json
    """
    import dgraph
    from dgraph.recipes import RECIPES, build

    options, facts = given.recipe_options(recipe, option), given.facts(fact)
    rows, prompts = given.bucket_list(buckets), given.read_prompts(prompt, prompt_file)
    decoding = dgraph.Decoding(
        max_new_tokens=max_new_tokens,
        threshold=threshold,
        steps=steps,
        policy=policy,
        block_length=block_length,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop=stop or (),
        seed=seed,
    )
    with status("loading") as tell:
        found = dgraph.load(model, given.torch_dtype(dtype), given.torch_device(device), **facts)
        build(RECIPES, recipe, found.spec, options)
        _check(found, prompts, decoding, max_batch)
        optimized = dgraph.optimize(
            found, recipe, backend=backend, buckets=rows, artifacts=cache, progress=tell, **options
        )

        def count(progress: Progress) -> None:
            tell(f"decoding: {progress.finished} of {progress.prompts} prompts, {progress.decoded} tokens")

        result = optimized.generate(prompts, decoding, max_batch=max_batch, progress=count)
    if json:
        made = {"model": found.name, "recipe": optimized.recipe.to_json()}
        print_json({"texts": result.texts, "token_ids": result.token_ids, **result.stats.to_json(), **made})
    else:
        _print(prompts, result)


def _check(model: Model, prompts: list[str], decoding: Decoding, max_batch: int | None) -> None:
    """Refuse what cannot be decoded now: compiling takes a minute and writes to a cache.

    Raises:
        InputError: as `Optimized.generate` would raise it.
    """
    from dgraph.errors import InputError
    from dgraph.runtime.checks import check_request

    if model.tokenizer is None:
        raise InputError(f"{model.name} has no tokenizer.json, so it cannot read a prompt; add one to its folder.")
    with warnings.catch_warnings(action="ignore"):  # `generate` gives the same warning later
        check_request(model.spec, [model.tokenizer.encode(p) for p in prompts], decoding, max_batch)


def _print(prompts: list[str], result: Result) -> None:
    stats = result.stats
    for prompt, text in zip(prompts, result.texts or [], strict=True):
        if OUT.is_terminal and len(prompts) > 1:
            OUT.print(f"> {prompt}", style="dim")
        print_text(text)
    if ERR.is_terminal:
        ERR.print(
            f"{stats.tokens} tokens, of {stats.decoded} decoded in {stats.steps} steps: {stats.tokens_per_step:.2f} "
            f"tokens per step, {stats.rows_per_token:.1f} rows per token, {stats.total:.2f} s",
            style="dim",
        )

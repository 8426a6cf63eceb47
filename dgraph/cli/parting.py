"""`dgraph compare`, `dgraph bisect`: places where numbers part."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from dgraph.cli import decoding_args as args
from dgraph.cli import options as given
from dgraph.cli.output import check_file, check_page, plain, print_table, print_text, status, write_file, write_page
from dgraph.errors import InputError
from dgraph.settings import named

JsonFile = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write all of it as JSON.")]
Tolerance = Annotated[
    float | None,
    typer.Option(
        help="Share of its largest magnitude by which a value may differ.", show_default="the rounding of its dtype"
    ),
]


def compare(
    model: given.Model,
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="Recipe of both sides.")] = "dense",
    to: Annotated[str | None, typer.Option(help="Recipe of the second side.", show_default="that of the first")] = None,
    option: given.Options = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the second side, as bf16.", show_default=False)] = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar=given.FORMAT, help="Format of the second side's weights.", show_default=False),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="inductor, to compile the regions of the second side.", show_default=False)
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device of the second side.", show_default=False)] = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated.", show_default="a short one")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length limit of a response.")] = 32,
    threshold: Annotated[
        float | None, typer.Option(help="Commit tokens above this confidence.", show_default=False)
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps per block.", show_default="8")] = None,
    tolerance: Tolerance = None,
    fact: given.Facts = None,
    json: JsonFile = None,
    html: given.Html = None,
) -> None:
    """Run two sides on the same steps, and say by step, layer and node where their values part.

    The first side decodes; the second one takes the same steps and commits the same tokens.

    \b
    dgraph compare tiny_sdar --recipe dense --to focus
    dgraph compare tiny_sdar --recipe focus:alpha=1.2 --to focus:alpha=1.8 --html parting.html
    dgraph compare tiny_sdar --recipe dense --dtype bf16
    dgraph compare tiny_sdar --recipe dense --weights int8 --json parting.json
    dgraph compare ./SDAR-8B-Chat-b32 --recipe focus --device cuda
    """
    import dgraph
    from dgraph.comparison.page import to_html

    if all(value is None for value in (to, dtype, weights, backend, device)):
        raise InputError("both sides would be the same; give --to, --dtype, --weights, --backend or --device.")
    if threshold is not None and steps is not None:
        raise InputError("--threshold and --steps are two rules; give one of them.")
    names = [named(text)[0] for text in (recipe, to) if text is not None]
    shared, facts = given.shared_options(names, option), given.facts(fact)
    _check(json, html)
    with status("loading") as tell:
        found = dgraph.compare(
            model,
            inputs=prompt,
            recipe=_recipe(recipe, shared),
            to=None if to is None else _recipe(to, shared),
            dtype=given.torch_dtype(dtype),
            weights=weights,
            backend=backend,
            device=given.torch_device(device),
            facts=facts,
            tolerance=tolerance,
            max_new_tokens=max_new_tokens,
            threshold=threshold,
            steps=steps,
            progress=tell,
        )
    if html is not None:
        write_page(html, to_html(found))
    _write(json, found.to_json())
    print_text(found.heading())
    print_text("")
    print_table(*found.step_rows())
    print_text("")
    print_table(*found.layer_rows())


def bisect(
    model: given.Model,
    recipe: args.Recipe = "focus",
    option: given.Options = None,
    kv_dtype: given.KvDtype = None,
    tolerance: Tolerance = None,
    as_set: Annotated[
        bool, typer.Option("--as-set", help="Take a pass that approximates as it is set, not at its identity.")
    ] = False,
    backend: Annotated[str, typer.Option(help="inductor, or eager to compile no region.")] = "inductor",
    dtype: given.Dtype = None,
    weights: given.Weights = None,
    device: given.Device = None,
    fact: given.Facts = None,
    json: JsonFile = None,
) -> None:
    """Find the first pass of a recipe, or stage of its lowering, that changes results. Exit code 1 if one does.

    \b
    dgraph bisect tiny_sdar --recipe focus
    dgraph bisect tiny_sdar --recipe focus --as-set --backend eager
    dgraph bisect ./SDAR-8B-Chat-b32 --recipe focus --device cuda
    """
    import dgraph

    options, facts = given.recipe_options(recipe, option, kv_dtype), given.facts(fact)
    _check(json, None)
    with status("loading") as tell:
        found = dgraph.bisect(
            model,
            recipe,
            tolerance=tolerance,
            as_set=as_set,
            backend=backend,
            dtype=given.torch_dtype(dtype),
            device=given.torch_device(device),
            weights=weights,
            facts=facts,
            progress=tell,
            **options,
        )
    _write(json, found.to_json())
    print_text(found.heading())
    print_text("")
    print_table(*found.rows())
    print_text(f"\n{found.ending()}")
    if found:
        raise typer.Exit(1)


def _recipe(text: str, shared: Mapping[str, Any]) -> Any:
    """A recipe as a value: `NAME[:KEY=VALUE,...]`, and those of the shared options that it has."""
    from dgraph.recipes import RECIPES, builder_of, options_of

    name, options = named(text)
    builder = builder_of(RECIPES, name)
    own = {key: value for key, value in shared.items() if key in options_of(builder)}
    return builder.options(**own | given.recipe_options(name, options))


def _check(json: str | None, html: str | None) -> None:
    """Refuse files that could not be written, before the work whose results they hold."""
    if json is not None:
        check_file("--json", Path(json))
    if html is not None:
        check_page(html)


def _write(json: str | None, value: dict[str, Any]) -> None:
    """Write the file of `--json FILE`."""
    if json is not None:
        text = json_module.dumps(plain(value), indent=1, ensure_ascii=False, allow_nan=False)
        write_file("--json", Path(json), text + "\n")

"""`dgraph dump`, `dgraph diff`, `dgraph explain`: views of a graph and of its rewriting."""

from __future__ import annotations

from typing import Annotated

import typer

from dgraph.cli import decoding_args as args
from dgraph.cli import options as given
from dgraph.cli.output import columns, print_json, print_listing, status, write_page

Tp = Annotated[
    int | None,
    typer.Option("--tp", help="Ranks to divide the model over first; what one of them has is shown.", show_default="1"),
]
After = Annotated[str | None, typer.Option(metavar="PASS", help="Stop after this pass.", show_default=False)]
Phase = Annotated[str, typer.Option(help="A phase of the recipe: step or prefill.")]


def dump(
    model: given.Model,
    recipe: Annotated[
        str | None, typer.Option("--recipe", "-r", help="Recipe to rewrite the graph by.", show_default="as captured")
    ] = None,
    option: given.Options = None,
    kv_dtype: given.KvDtype = None,
    phase: Phase = "step",
    after: After = None,
    layer: Annotated[int | None, typer.Option(help="Show this layer alone.", show_default=False)] = None,
    full: Annotated[bool, typer.Option("--full", help="Write equal layers out instead of folding them.")] = False,
    tp: Tp = None,
    weights: given.Weights = None,
    fact: given.Facts = None,
    json: given.Json = False,
    html: given.Html = None,
) -> None:
    """Print the graph of a model, as captured or after the passes of a recipe.

    \b
    dgraph dump tiny_sdar
    dgraph dump tiny_sdar -r focus -o alpha=1.8 --layer 1
    dgraph dump tiny_sdar -r focus --after CacheKV --json
    dgraph dump tiny_sdar --tp 2
    dgraph dump tiny_sdar --weights int8 -r focus
    """
    from dgraph.errors import InputError
    from dgraph.text import views
    from dgraph.text.html import to_html
    from dgraph.text.writer import dump as text_of
    from dgraph.text.writer import to_json

    for name, there in (("--option", option), ("--phase", phase != "step")):
        if recipe is None and there:
            raise InputError(f"{name} needs --recipe.")
    options = given.recipe_options(recipe, option, kv_dtype) if recipe is not None else {}
    facts = given.facts(fact)
    with status(f"capturing {model}"):
        graph = views.graph_of(model, recipe, phase, after, options, facts, tp, weights)
    if html is not None:
        write_page(html, to_html(graph, full, layer))
    if json:
        print_json(to_json(graph, full, layer))
    elif html is None:
        print_listing(text_of(graph, full, layer))


def diff(
    model: given.Model,
    from_: Annotated[str, typer.Option("--from", help="A recipe, or captured.")] = "dense",
    to: Annotated[str, typer.Option(help="A recipe, or captured.")] = "focus",
    option: given.Options = None,
    kv_dtype: given.KvDtype = None,
    phase: Phase = "step",
    after: After = None,
    tp: Tp = None,
    weights: given.Weights = None,
    fact: given.Facts = None,
    json: given.Json = False,
    html: given.Html = None,
) -> None:
    """Compare the graphs that two recipes make of a model. An option goes to each recipe that has it.

    \b
    dgraph diff tiny_sdar --from dense --to focus
    dgraph diff tiny_sdar --from captured --to dense --phase prefill
    dgraph diff tiny_sdar --from dense --to focus --after CacheKV
    """
    from dgraph.text import views
    from dgraph.text.html import diff_to_html

    options, facts = given.shared_options((from_, to), option, kv_dtype), given.facts(fact)
    with status(f"capturing {model}"):
        found = views.diff_of(model, from_, to, phase, after, options, facts, tp, weights)
    if html is not None:
        write_page(html, diff_to_html(found))
    if json:
        print_json(found.to_json())
    elif html is None:
        print_listing(str(found))


def explain(
    model: given.Model,
    recipe: args.Recipe = "focus",
    option: given.Options = None,
    kv_dtype: given.KvDtype = None,
    buckets: given.Buckets = None,
    weights: given.Weights = None,
    fact: given.Facts = None,
    json: given.Json = False,
) -> None:
    """Say what a recipe does to a model: each pass and where it applied, stages, regions. Compiles nothing.

    \b
    dgraph explain tiny_sdar -r focus
    dgraph explain tiny_sdar -r focus -o after=2 --json
    """
    from dgraph.text import views

    options, rows = given.recipe_options(recipe, option, kv_dtype), given.bucket_list(buckets)
    facts = given.facts(fact)
    with status(f"capturing {model}"):
        found = views.explain(model, recipe, rows, facts, weights, **options)
    if json:
        print_json(found.to_json())
    else:
        print_listing(found.text(columns()))

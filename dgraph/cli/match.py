"""`dgraph match`: where the patterns of a file stand in a model's graph."""

from __future__ import annotations

from typing import Annotated

import typer

from dgraph.cli import options as given
from dgraph.cli.output import print_json, print_listing, status
from dgraph.cli.views import Phase


def match(
    model: given.Model,
    file: Annotated[str, typer.Argument(metavar="FILE.py", help="A file with functions under @dgraph.Pattern.")],
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="A recipe, or captured.")] = "captured",
    option: given.Options = None,
    phase: Phase = "step",
    after: Annotated[str | None, typer.Option(metavar="PASS", help="Stop after this pass.", show_default=False)] = None,
    layer: Annotated[int | None, typer.Option(help="Look in this layer alone.", show_default=False)] = None,
    weights: given.Weights = None,
    fact: given.Facts = None,
    json: given.Json = False,
) -> None:
    """Try the patterns of a Python file, which is run, on the graph of a model; print matches and near misses by layer.

    \b
    dgraph match tiny_sdar patterns.py
    dgraph match tiny_sdar patterns.py -r focus --after FuseProjections
    dgraph match tiny_sdar patterns.py --layer 1 --json
    """
    from dgraph.text import views
    from dgraph.text.matches import patterns_in, text_of

    patterns = patterns_in(file)
    options = given.shared_options((recipe,), option)
    with status(f"capturing {model}"):
        graph = views.graph_of(model, recipe, phase, after, options, given.facts(fact), weights=weights)
    found = [graph.match(pattern, layer) for pattern in patterns]
    if json:
        print_json({"model": model, "patterns": [matches.to_json() for matches in found]})
    else:
        print_listing(text_of(graph, found))

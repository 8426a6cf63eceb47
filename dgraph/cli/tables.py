"""`dgraph recipes`, `dgraph policies`, `dgraph passes`, `dgraph models`: what there is."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from dgraph.cli import options as given
from dgraph.cli.output import print_json, print_table


def recipes(json: given.Json = False) -> None:
    """List the recipes and their options, and what the defaults cost against dense: exact match and steps.

    \b
    dgraph recipes
    """
    from dgraph.recipes import RECIPES, costs_of, options_of

    found: list[dict[str, Any]] = [
        {
            "recipe": name,
            "summary": _summary(builder),
            "costs": [asdict(cost) for cost in costs_of(builder)],
            "options": options_of(builder),
        }
        for name, builder in RECIPES.items()
    ]
    if json:
        print_json({"recipes": found})
    else:
        costs = ["; ".join(map(str, costs_of(builder))) or "-" for builder in RECIPES.values()]
        print_table(
            ("recipe", "summary", "against dense", "options"),
            [(r["recipe"], r["summary"], c, _options(r["options"])) for r, c in zip(found, costs, strict=True)],
        )


def policies(json: given.Json = False) -> None:
    """List the decoding rules, and the settings of them that systems publish, with their options.

    \b
    dgraph policies
    """
    from dgraph.runtime.policies import POLICIES, PRESETS, options_of

    found: list[dict[str, Any]] = [
        {"policy": name, "summary": _summary(rule), "options": options_of(name)} for name, rule in POLICIES.items()
    ]
    found += [
        {"policy": name, "summary": f"{rule.name} as published", "options": options_of(name)}
        for name, rule in PRESETS.items()
    ]
    if json:
        print_json({"policies": found})
    else:
        rows = [(p["policy"], p["summary"], _options(p["options"])) for p in found]
        print_table(("policy", "summary", "options"), rows)


def passes(json: given.Json = False) -> None:
    """List the passes, their effect on the numbers and their options.

    \b
    dgraph passes
    """
    from dgraph.passes import PASSES

    found: list[dict[str, Any]] = [
        {
            "pass": name,
            "effect": cls.effect.value,
            "summary": cls.summary,
            "options": {f.name: f.default for f in fields(cls)},
        }
        for name, cls in PASSES.items()
    ]
    if json:
        print_json({"passes": found})
    else:
        rows = [(p["pass"], p["effect"], p["summary"], _options(p["options"])) for p in found]
        print_table(("pass", "effect", "summary", "options"), rows)


def models(json: given.Json = False) -> None:
    """List the embedded models and the families of checkpoints and model objects.

    \b
    dgraph models
    """
    from dgraph.families import embedded, families

    found: list[dict[str, Any]] = [
        *(
            {"model": m.name, "kind": "embedded", "summary": m.summary, "folder": str(m.folder)}
            for m in embedded().values()
        ),
        *({"model": f.name, "kind": "family", "summary": f.summary, "folder": None} for f in families().values()),
    ]
    if json:
        print_json({"models": found})
    else:
        print_table(("model", "kind", "summary"), [(m["model"], m["kind"], m["summary"]) for m in found])


def _summary(builder: Any) -> str:
    """The first sentence of a docstring, on one line."""
    first, stop, _ = " ".join((builder.__doc__ or "").partition("\n\n")[0].split()).partition(". ")
    return first + stop.rstrip()


def _options(defaults: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in defaults.items()) or "-"

"""List recipes, policies, passes and models from an index that needs no torch to be read.

`declared` reads the declarations: docstrings, fields, signatures. The file listing.json keeps those of dgraph itself.
tests/cli/test_listing.py compares the two, and with DGRAPH_UPDATE_GOLDEN=1 in its environment it writes the file anew.
A group to which another package adds is read from the declarations.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from dgraph.plugins import entry_points

Entry = dict[str, Any]
INDEX = Path(__file__).with_name("listing.json")
_OWNER = "dgraph"


def listed(kind: str) -> list[Entry]:
    """The entries of a kind ("recipes", "policies", "passes", "models"), as `declared` gives them.

    Raises:
        PluginError: two packages declare one name, or one has the name of one of dgraph's own.
    """
    points = entry_points(f"dgraph.{kind}")
    if any(point.dist is None or point.dist.name != _OWNER for point in points.values()):
        return declared(kind)
    found: list[Entry] = json.loads(INDEX.read_text(encoding="utf-8"))[kind]
    for entry in found if kind == "models" else ():
        if entry["folder"] is not None:
            entry["folder"] = os.path.normpath(_home(entry["model"]) / entry["folder"])
    return found


def declared(kind: str) -> list[Entry]:
    """The entries of a kind from the declarations, as plain values of JSON. This imports torch."""
    from dgraph.cli.output import plain

    return plain(_READERS[kind]())


def index_text() -> str:
    """The text of an up-to-date listing.json."""
    found = {kind: declared(kind) for kind in _READERS}
    for entry in found["models"]:
        if entry["folder"] is not None:
            entry["folder"] = os.path.relpath(entry["folder"], _home(entry["model"]))
    return json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _home(model: str) -> Path:
    """The folder of the module that declares an embedded model, which is not imported."""
    found = importlib.util.find_spec(entry_points("dgraph.models")[model].module)
    assert found is not None, model
    assert found.origin is not None, model
    return Path(found.origin).parent


def _recipes() -> list[Entry]:
    from dgraph.recipes import RECIPES, costs_of

    return [
        {
            "recipe": name,
            "summary": builder.summary,
            "papers": _papers(builder.options),
            "costs": [{**asdict(cost), "text": str(cost)} for cost in costs_of(builder)],
            "options": {option.name: option.default for option in builder.listed},
            "meaning": {option.name: option.doc for option in builder.listed},
        }
        for name, builder in RECIPES.items()
    ]


def _policies() -> list[Entry]:
    from dgraph.runtime.policies import POLICIES, PRESETS, options_of

    rules = {name: (_summary(rule), rule) for name, rule in POLICIES.items()}
    rules |= {name: (f"{rule.name} as published", type(rule)) for name, rule in PRESETS.items()}
    return [
        {"policy": name, "summary": text, "papers": _papers(rule), "options": options_of(name)}
        for name, (text, rule) in rules.items()
    ]


def _passes() -> list[Entry]:
    from dgraph.passes import PASSES

    return [
        {
            "pass": name,
            "effect": cls.effect.value,
            "summary": cls.summary,
            "papers": _papers(cls),
            "options": {f.name: None if f.default is MISSING else f.default for f in fields(cls)},
        }
        for name, cls in PASSES.items()
    ]


def _models() -> list[Entry]:
    from dgraph.families import embedded, families

    found = [
        {"model": m.name, "kind": "embedded", "summary": m.summary, "folder": str(m.folder)}
        for m in embedded().values()
    ]
    others = families().values()
    return found + [{"model": f.name, "kind": "family", "summary": f.summary, "folder": None} for f in others]


_READERS: dict[str, Callable[[], list[Entry]]] = {
    "recipes": _recipes,
    "policies": _policies,
    "passes": _passes,
    "models": _models,
}


def _papers(declaring: Any) -> list[Entry]:
    """The papers of a recipe, a pass or a rule, and each as one text."""
    return [{**asdict(paper), "text": str(paper)} for paper in getattr(declaring, "papers", ())]


def _summary(documented: Any) -> str:
    """The first sentence of a docstring, on one line."""
    first, stop, _ = " ".join((documented.__doc__ or "").partition("\n\n")[0].split()).partition(". ")
    return first + stop.rstrip()

"""FOCUS's options as its oracles take them: the fields of `Ablation` beside the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from dgraph.recipes import Ablation


def focus_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the recipe for those of an oracle."""
    varied = {f.name: given[f.name] for f in fields(Ablation) if f.name in given}
    return {**{name: value for name, value in given.items() if name not in varied}, "ablation": Ablation(**varied)}

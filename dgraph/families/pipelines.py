"""Pipeline folders of diffusers: a model, its tokenizer and a scheduler in folders of their own.

The settings of the scheduler become the rule by which the model is decoded, unless a caller chooses one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgraph.errors import CheckpointError, warn
from dgraph.families.hub import CONFIG

INDEX = "model_index.json"
"""The file that makes a folder a pipeline."""

Rule = tuple[tuple[str, Any], ...]
"""A rule's settings; see `dgraph.spec.ModelSpec.rule`."""


@dataclass(frozen=True)
class Pipeline:
    """A pipeline folder.

    Attributes:
        model: folder of the checkpoint.
        block_length: rows denoised together, by its scheduler; None if that does not say.
        rule: the scheduler as a rule; empty if dgraph has no such rule.
    """

    model: Path
    block_length: int | None
    rule: Rule


def _refinement(said: Mapping[str, Any]) -> Rule:
    """`BlockRefinementScheduler`: at least block_length / num_inference_steps tokens per step; it may edit."""
    threshold, edit = said.get("threshold", 0.95), said.get("editing_threshold")
    if edit is not None and edit > 0:
        return ("rule", "joint_threshold"), ("threshold", threshold), ("edit_threshold", edit)
    return ("rule", "dynamic_threshold"), ("threshold", threshold), ("steps", said.get("num_inference_steps", 32))


def _entropy(said: Mapping[str, Any]) -> Rule:
    """`EntropyBoundScheduler`, whose temperature goes from t_max to t_min."""
    found = ("bound", said.get("entropy_bound", 0.1)), ("t_min", said.get("t_min", 0.4))
    return (
        ("rule", "renoise"),
        *found,
        ("t_max", said.get("t_max", 0.8)),
        ("steps", said.get("num_inference_steps", 32)),
    )


_KINDS: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], Rule]]] = {
    "LLaDA2Pipeline": ("BlockRefinementScheduler", _refinement),
    "DiffusionGemmaPipeline": ("EntropyBoundScheduler", _entropy),
}
"""Pipelines that are read, each with the scheduler that is a rule for its model."""


PARTS = ("model", "tokenizer", "processor", "scheduler")
"""Folders of a pipeline that are read."""


def pipeline_of(folder: Path) -> Pipeline | None:
    """The pipeline that a folder is; None for any other folder.

    Warns of a scheduler that is no rule for the model; the default of the model holds then.

    Raises:
        CheckpointError: a damaged file, another pipeline, or one without a checkpoint in its folder "model".
    """
    if not (folder / INDEX).is_file():
        return None
    kind = str(_object(folder / INDEX).get("_class_name"))
    if kind not in _KINDS:
        raise CheckpointError(f"{folder / INDEX}: _class_name is {kind!r}, expected one of {', '.join(_KINDS)}.")
    model = folder / "model"
    if not (model / CONFIG).is_file():
        raise CheckpointError(f"{folder} is a {kind} without model/config.json; fetch the rest of it.")
    path = folder / "scheduler" / "scheduler_config.json"
    said = _object(path) if path.is_file() else {}
    expected, rule_of = _KINDS[kind]
    if (scheduler := said.get("_class_name", expected)) != expected:
        warn(f"{folder}: dgraph decodes a {kind} by no {scheduler}, but by the default of its model; give policy=.")
        return Pipeline(model, None, ())
    try:
        return Pipeline(model, said.get("block_length"), rule_of(said) if said else ())
    except TypeError as error:
        raise CheckpointError(f"{path} is not as diffusers writes a {expected}: {error}.") from None


def tokenizer_folder(folder: Path) -> Path:
    """The folder of a checkpoint's tokenizer: its own, or the one that a pipeline has beside it."""
    places = [folder.parent / name for name in ("tokenizer", "processor")]
    beside = next((place for place in places if place.is_dir()), folder)
    return beside if (folder.parent / INDEX).is_file() else folder


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, expected an object of settings.")
    return found

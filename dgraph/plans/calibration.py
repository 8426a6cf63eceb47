"""Results of a calibration, and the file beside a model that stores them."""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dgraph.errors import CheckpointError
from dgraph.spec import ModelSpec

FILE = "calibration.json"
FORMAT = 1
_AGAIN = "Run `dgraph calibrate` for this model, or remove the file."


@dataclass(frozen=True)
class Calibration:
    """Change of the hidden states by each layer of a model (MaskKV, arXiv 2510.09309, Eq. 8), and by its attention.

    See `dgraph.calibrate`.

    Attributes:
        family, layers, hidden: the model, as its spec says it.
        prompts: number of prompts that were measured.
        max_new_tokens: masks after each prompt.
        seed: of the prompts; None where they were given.
        importance: per layer, the mean over the prompts; at least 0, to six significant digits.
        spread: per layer, the standard deviation among the prompts; 0 for a single one.
        similarity: per layer, the mean cosine of the hidden states before its attention and after it, which includes
            the residual (SqueezeAttention, arXiv 2404.04793, section 3). Empty in files of earlier versions, and where
            attention is no addend of the residual stream.
    """

    family: str
    layers: int
    hidden: int
    prompts: int
    max_new_tokens: int
    seed: int | None
    importance: tuple[float, ...]
    spread: tuple[float, ...]
    similarity: tuple[float, ...] = ()

    @property
    def facts(self) -> dict[str, Any]:
        """The measured facts of a `ModelSpec`, by their names there."""
        return {"layer_importance": self.importance, "attention_similarity": self.similarity}

    def to_json(self) -> dict[str, Any]:
        """Plain values only, in field order, after the version of the format."""
        return {"format": FORMAT, **asdict(self)}

    def of(self, spec: ModelSpec) -> ModelSpec:
        """A spec with these values.

        Raises:
            CheckpointError: they were measured for a model of another family or size.
        """
        for name in ("family", "layers", "hidden"):
            if getattr(self, name) != getattr(spec, name):
                raise CheckpointError(
                    f"the calibration is of a model with {name} {getattr(self, name)!r}, expected "
                    f"{getattr(spec, name)!r}."
                )
        return replace(spec, **self.facts)

    def write(self, path: str | Path) -> None:
        """Write the file; the old one stays as it is until the new one is complete.

        Raises:
            CheckpointError: it cannot be written.
        """
        path = Path(path)
        lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in self.to_json().items()]
        temporary = None
        try:
            with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", encoding="utf-8", delete=False) as file:
                temporary = file.name
                file.write("{\n" + ",\n".join(lines) + "\n}\n")
            os.chmod(temporary, 0o644)  # temporary files are private
            os.replace(temporary, path)
        except OSError as error:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            raise CheckpointError(f"{path} cannot be written: {error.strerror}.") from None


def read_calibration(path: str | Path) -> Calibration:
    """A calibration from its file.

    Raises:
        CheckpointError: it cannot be read, is damaged, or is of a later format.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            found = value.get("format") if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"expected an object of format {FORMAT}, got {found!r}")
        calibration = _checked(value)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no calibration: {error}. {_AGAIN}") from None
    return calibration


def apply_calibration(path: Path, spec: ModelSpec) -> ModelSpec:
    """A spec with the values of a file.

    Raises:
        CheckpointError: as `read_calibration`, or it is of another model.
    """
    found = read_calibration(path)
    try:
        return found.of(spec)
    except CheckpointError as error:
        raise CheckpointError(f"{path} does not belong to this model: {error} {_AGAIN}") from None


def _checked(value: dict[str, Any]) -> Calibration:
    """The calibration in an object of the file.

    Raises:
        ValueError: a value is missing or is not what it should be.
    """
    for name in ("layers", "hidden", "prompts", "max_new_tokens"):
        if type(value.get(name)) is not int or value[name] < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value.get(name)!r}")
    family, seed = value.get("family"), value.get("seed")
    if not isinstance(family, str):
        raise ValueError(f"family must be a text, got {family!r}")
    if seed is not None and type(seed) is not int:
        raise ValueError(f"seed must be an integer or null, got {seed!r}")
    return Calibration(
        family=family,
        layers=value["layers"],
        hidden=value["hidden"],
        prompts=value["prompts"],
        max_new_tokens=value["max_new_tokens"],
        seed=seed,
        importance=_one_per_layer(value, "importance"),
        spread=_one_per_layer(value, "spread"),
        similarity=_one_per_layer(value, "similarity", least=-1) if value.get("similarity") else (),
    )


def _one_per_layer(value: dict[str, Any], name: str, least: float = 0) -> tuple[float, ...]:
    found, layers = value.get(name), value["layers"]
    if not isinstance(found, list) or len(found) != layers:
        got = f"{len(found)} values" if isinstance(found, list) else repr(found)
        raise ValueError(f"{name} must be a list of {layers} numbers, one for each layer, got {got}")
    for layer, number in enumerate(found):
        if type(number) not in (int, float) or not math.isfinite(number) or number < least:
            raise ValueError(f"{name} of layer {layer} must be a finite number of at least {least}, got {number!r}")
    return tuple(map(float, found))

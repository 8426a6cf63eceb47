"""`benchmarks/recipes.py`: scripts take options of a recipe as the commands of dgraph do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import dgraph
from benchmarks import engine_load, engine_steps, server_load
from dgraph.errors import UnknownName
from dgraph.testing import models
from tests.cli.folders import write_checkpoint

Main = Callable[[Sequence[str]], None]


class Built(Exception):
    """Raised with what a script gives to `dgraph.optimize`."""


@pytest.fixture(params=[engine_load, engine_steps, server_load], ids=lambda script: script.__name__)
def main(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Main:
    """A script on a small model, which ends where it would build the program."""
    (tiny,) = models(None, "sdar")

    def optimize(model: Any, recipe: str, backend: str, buckets: Any = None, **options: Any) -> None:
        raise Built(recipe, options)

    monkeypatch.setattr(dgraph, "optimize", optimize)
    if request.param is engine_steps:
        monkeypatch.setattr(engine_steps, "random_model", lambda *given, **changes: tiny.model)
        return engine_steps.main
    folder = ("--model", str(write_checkpoint(tmp_path / "small")), "--block", "8", "--prompt", "9", "--tokens", "8")
    return lambda given: request.param.main([*folder, *given])


def test_options_are_read_as_by_dgraph(main: Main) -> None:
    with pytest.raises(Built) as found:
        main(["-r", "focus", "-o", "alpha=1.25", "--option", "recommit=false", "--device", "cpu"])
    assert found.value.args == ("focus", {"alpha": 1.25, "recommit": False})


def test_options_that_a_recipe_lacks_are_named(main: Main) -> None:
    with pytest.raises(UnknownName, match=r"unknown option of recipe 'focus' 'alpah'\. Did you mean 'alpha'"):
        main(["--recipe", "focus", "-o", "alpah=1.25", "--device", "cpu"])

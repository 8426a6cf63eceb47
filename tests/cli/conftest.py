"""A checkpoint folder, and the command line in this process."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dgraph.api import CompiledModel, capture, optimize
from dgraph.cli import app
from dgraph.ir.graph import Graph
from dgraph.text import views
from tests.cli.folders import write_checkpoint

Run = Callable[..., Any]


@pytest.fixture(scope="session", autouse=True)
def other_packages_have_complained() -> None:
    """torchao, where it is installed, writes to stderr when it is first imported, in the middle of any command."""
    with suppress(ImportError):
        importlib.import_module("torchao")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "small")


@pytest.fixture(scope="session")
def focus(folder: Path) -> CompiledModel:
    return optimize(folder, "focus", backend="eager")


@pytest.fixture(scope="session")
def dense(folder: Path) -> CompiledModel:
    return optimize(folder, "dense", backend="eager")


@functools.cache
def _captured(model: str, **facts: Any) -> Graph:
    return capture(model, **facts)


@pytest.fixture
def captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let dump, diff and explain share one capture per model: it is most of their time."""
    monkeypatch.setattr(views, "capture", _captured)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line in an empty folder; the result has exit_code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def invoke(*args: Any, **extra: Any) -> Any:
        return CliRunner().invoke(app, [str(a) for a in args], **extra)

    return invoke

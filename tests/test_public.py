"""The public names of the package, and what is imported for them."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dgraph
from dgraph.cli.app import COMMANDS, Imported
from dgraph.errors import DgraphWarning

HEAVY = (
    "fastapi",
    "jinja2",
    "matplotlib",
    "numpy",
    "safetensors",
    "sympy",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
    "uvicorn",
)


def imported_by(*args: str) -> list[str]:
    """Heavy modules that a command imports."""
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['dgraph', *{list(args)!r}]\n"
        "try:\n    runpy.run_module('dgraph', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code\n"
        f"print(*sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    return done.stderr.split()


@pytest.mark.parametrize(
    "args", [("--help",), ("--version",), ("cache", "ls"), ("generate", "--help"), ("serve", "--help")], ids=" ".join
)
def test_what_runs_no_model_imports_nothing_heavy(args: tuple[str, ...]) -> None:
    assert imported_by(*args) == []


def test_every_public_name_is_there() -> None:
    assert set(dgraph.__all__) <= set(dir(dgraph))
    assert {"optimize", "Recipe", "Engine"} <= set(dgraph.__all__)
    for name in dgraph.__all__:
        assert getattr(dgraph, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        dgraph.optimise  # noqa: B018


def test_a_former_name_warns_at_each_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dgraph._HOMES, "Prescription", ("dgraph.recipes", "Recipe"))
    for _ in range(2):
        with pytest.warns(DgraphWarning, match=r"dgraph\.Prescription is Recipe since version 0\.2"):
            assert dgraph.Prescription is dgraph.Recipe
    assert "Prescription" not in dgraph.__all__


def test_type_checkers_know_the_public_names() -> None:
    """Also a package that does not check the body of dgraph, as py.typed and the stub are installed."""
    data = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    assert data["tool"]["setuptools"]["package-data"]["dgraph"] == ["py.typed", "*.pyi"]
    names = {node.target.id for node in dgraph._STUB.body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    assert names == {"__all__", "__version__", "API_VERSION"}


def test_the_version_stands_in_one_file() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "dgraph.__version__"}


def test_no_public_name_is_a_module_too() -> None:
    modules = {found.name for found in pkgutil.iter_modules(dgraph.__path__)}
    assert "api" in modules
    assert modules.isdisjoint(dgraph.__all__)


def test_modules_are_there_without_an_import_of_their_own() -> None:
    code = "import dgraph; print(dgraph.parallel.init.__module__, dgraph.ray.__name__)"
    made = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert made.stdout.split() == ["dgraph.parallel", "dgraph.ray"]


def test_every_command_is_listed_and_can_be_imported() -> None:
    commands = Imported()
    assert list(commands) == list(COMMANDS)
    assert all(command.name == name for name, command in commands.items())

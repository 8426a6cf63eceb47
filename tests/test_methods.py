"""The package of examples/methods is installed as another project's would be, and passes its own tests."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dgraph.testing import models

METHODS = Path(__file__).parents[1] / "examples" / "methods"
GUIDE = Path(__file__).parents[1] / "docs" / "write_a_method.md"
LONGEST = 100
"""Lines of a method, or of its op."""
MOST = 60
"""Lines of a method by `method_lines`."""
FILES = sorted(METHODS.glob("dgraph_methods/*.py"))


RELEASED = sorted((Path(__file__).parent / "released").glob("methods_*"))
"""The package as it stood at each earlier release that the promise to packages outside covers."""
PROMPTLY = "alone and (fast_dllm or dream) or fires or the_op or found_by_name"
"""Tests of a released package that the default run makes; a release makes all of them."""


def passes_its_tests(package: Path, folder: Path, *args: str) -> None:
    """Install a package into a folder as a build backend would, without one, and run its tests.

    args: for pytest.
    """
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / f"dgraph_methods-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", encoding="utf-8"
    )
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in names.items())])
        for group, names in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups), encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(folder), str(package), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *args]
    done = subprocess.run(
        command, cwd=package, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.release
@pytest.mark.long
@pytest.mark.parametrize("package", [METHODS, *RELEASED], ids=lambda path: path.name)
def test_its_tests_pass(package: Path, tmp_path: Path) -> None:
    passes_its_tests(package, tmp_path)


@pytest.mark.parametrize("package", RELEASED, ids=lambda path: path.name)
def test_a_package_of_an_earlier_release_works(package: Path, tmp_path: Path) -> None:
    """All of it is imported, and each of its methods runs."""
    passes_its_tests(package, tmp_path, "-k", PROMPTLY)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_method_is_short_and_asks_for_nothing_private(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST
    imported = [line for line in text.splitlines() if line.startswith(("from dgraph", "import dgraph"))]
    assert not [line for line in imported if " _" in line or "._" in line or "dgraph.private" in line]


def method_lines(text: str) -> int:
    """Lines of a method: all but docstrings, imports, comments and blank ones."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            left_out |= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            left_out |= {*range(node.lineno, (node.end_lineno or 0) + 1)}
    lines = (line.strip() for at, line in enumerate(text.splitlines(), 1) if at not in left_out)
    return sum(1 for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("path", [p for p in FILES if not p.stem.endswith("_op")], ids=lambda path: path.stem)
def test_a_method_takes_sixty_lines(path: Path) -> None:
    assert method_lines(path.read_text(encoding="utf-8")) <= MOST


def test_the_guide_shows_dpad_as_it_is() -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert (METHODS / "dgraph_methods" / "dpad.py").read_text(encoding="utf-8") in blocks
    project = tomllib.loads((METHODS / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    (shown,) = re.findall(r"```toml\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    for group, names in tomllib.loads(shown)["project"]["entry-points"].items():
        assert names.items() <= project[group].items()


def test_the_recipe_of_the_guide_decodes() -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    (source,) = [block for block in blocks if "class Sliding" in block]
    names: dict[str, Any] = {"__name__": __name__}
    exec(source, names)
    (tiny,) = models("bidirectional", "llada")
    run = tiny.optimized(names["Sliding"](before=2))
    assert run.recipe.name == "sliding"
    assert len(run.generate(input_ids=[[1, 2, 3, 4, 5]], max_new_tokens=8).token_ids[0]) == 8


def test_the_links_of_the_guide_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", GUIDE.read_text(encoding="utf-8"))
    assert links
    assert not [link for link in links if not (GUIDE.parent / link).exists()]
